"""The label that an answer names, and what a class is called otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from compress.artifact import Artifact
from compress.errors import ServerError

__all__ = ["label_of", "numbers_of"]


def numbers_of(artifact: Artifact) -> dict[str, str]:
    """The number of each class by its name, where no name is a number itself."""
    names = artifact.processor.labels if artifact.processor else ()
    return {} if any(map(str.isdecimal, names)) else {name: str(number) for number, name in enumerate(names)}


def _word(value: object) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def label_of(answer: dict[str, Any], output: str | None) -> str:
    """The label that an answer names."""
    outputs = answer.get("outputs", {})
    if output is None:
        output = next(iter(outputs), "")
    if output not in outputs:
        raise ServerError(
            f"there is no output {output!r}", why=f"the model gives {', '.join(outputs)}", mend="name one with --output"
        )
    value = outputs[output]
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, list):
        return _word(value)
    flat = list(_flat(value))
    if flat and all(isinstance(each, str) for each in flat):
        return str(flat[0])  # labels come best first
    if not flat or not all(isinstance(each, int | float) for each in flat):
        raise ServerError(
            f"the output {output!r} names no label",
            why="it is neither a text, nor texts, nor a score for each class",
            mend="name an output that does with --output",
        )
    scores: Sequence[float] = [float(each) for each in flat]
    return str(max(range(len(scores)), key=scores.__getitem__))


def _flat(value: Any) -> Iterator[Any]:
    """The elements of a tensor in JSON, an item's; None for what is no tensor."""
    if len({len(each) if isinstance(each, list) else -1 for each in value}) > 1:
        yield None
        return
    for each in value:
        if isinstance(each, list):
            yield from _flat(each)
        else:
            yield each
