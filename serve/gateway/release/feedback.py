"""What clients say of answers, whether they were right: matched with who gave them, counted, and judged.

The body of POST /feedback is small and read strictly: {"id": ..., "correct": true} or {"id": ..., "label": "cat"}, for
an answer with several outputs {"id": ..., "label": "cat", "output": "label"}.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.errors import BadInputError, BadRequestError, GatewayError
from serve.gateway.oip.protocol import parse_response
from serve.gateway.oip.tensors import Tensor
from serve.gateway.release.answers import Answers, Given
from serve.gateway.release.releases import Releases

__all__ = ["MOST_BYTES", "Feedback", "Said"]

MOST_BYTES = 2048  # of a body
LONGEST = 512
MOST_SERIES = 1000  # of the counter
CLASS = re.compile(r"-?(?:\d[\d.e+-]*|inf|nan):\d+(?::.*)?", re.DOTALL)
FORM = '{"id": "…", "correct": true} or {"id": "…", "label": "…"}'


@dataclass(frozen=True)
class Said:
    """A client's word on an answer: whether it was correct, or what the label is.

    Attributes:
        id: of the answer.
        correct: None where a label was given.
        label: as a text; None where it was not given.
        output: that has the label; None for the only one that can.
    """

    id: str
    correct: bool | None = None
    label: str | None = None
    output: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a body; raises BadRequestError."""
        try:
            given = json.loads(body, object_pairs_hook=_once, parse_constant=_no_number)
        except (RecursionError, ValueError) as err:
            raise _unread(f"it is no JSON that can be read: {err}") from err
        if not isinstance(given, dict) or "id" not in given:
            raise _unread("it names no answer")
        which = given.keys() & {"correct", "label"}
        if len(which) != 1:
            raise _unread("it says not one of correct and label")
        if more := given.keys() - {"id", "output" if "label" in which else "correct", *which}:
            raise _unread(f"it has the field {min(more)!r}")
        texts = [given["id"], given.get("output", "x")]
        if not all(isinstance(text, str) and 0 < len(text) <= LONGEST for text in texts):
            raise _unread("an id and an output are texts")
        if "correct" in which:
            if type(given["correct"]) is not bool:
                raise _unread("correct is true or false")
            return cls(given["id"], correct=given["correct"])
        label = given["label"]
        if type(label) not in (str, int) or len(str(label)) > LONGEST:
            raise _unread("a label is a text or a whole number")
        return cls(given["id"], label=str(label), output=given.get("output"))


class Feedback(Collector):
    """Takes what clients say.

    Args:
        answers: that they may speak of.
        releases: whose evidence it is.
    """

    def __init__(self, answers: Answers, releases: Releases) -> None:
        self._answers = answers
        self._releases = releases
        self._counts: Counter[tuple[str, str, bool]] = Counter()

    def take(self, key: str, body: bytes) -> dict[str, Any]:
        """Count what a client says, once for each answer.

        Args:
            key: the id of the client's key.
            body: that it sent.

        Returns:
            The model, who answered, and whether this was counted (and as what).

        Raises:
            GatewayError: it can't be read, or there is no such answer, or it can't be held against a label.
        """
        said = Said.parse(body)
        given = self._answers.find(said.id, key)
        if given is None:
            raise GatewayError(
                "there is no such answer to speak of", status=404,
                why="its id was never given to this key by this gateway, or is forgotten by now",
                mend="send the Answer-Id of an answer soon after it came, to the gateway that gave it",
            )  # fmt: skip
        told: dict[str, Any] = {"model": given.model, "served_by": given.served_by}
        if given.said:
            return told | {"counted": False}
        correct = said.correct if said.correct is not None else _has_label(given, said)
        self._answers.done(given)
        name = given.model, given.served_by, correct
        if name in self._counts or len(self._counts) < MOST_SERIES:
            self._counts[name] += 1
        release = self._releases.get(given.model)
        if release is not None and release.rollout == given.release and given.variant is not None:
            release.reported(given.variant, wrong=not correct, key=given.key)
        return told | {"counted": True, "correct": correct}

    def collect(self) -> Iterator[Metric]:
        """Prometheus metrics."""
        counts = CounterMetricFamily(
            "gateway_feedback", "Answers that clients have said to be correct, or wrong.",
            labels=["model", "served_by", "outcome"],
        )  # fmt: skip
        for (model, served_by, correct), count in list(self._counts.items()):
            counts.add_metric([model, served_by, "correct" if correct else "wrong"], count)
        yield counts


def _has_label(given: Given, said: Said) -> bool:
    """Whether an answer's label is the one that was said; raises BadInputError where it can't be told."""
    if given.body is None:
        raise _untold("the answer was too long to be kept, or came packed")
    try:
        outputs = {output.name: output for output in parse_response(given.body, given.header_length).outputs}
    except ValueError as err:
        raise _untold(f"the answer can't be read: {err}") from err
    texts = [output for output in outputs.values() if output.datatype == "BYTES"]
    if said.output is not None:
        chosen = outputs.get(said.output)
    else:
        chosen = next(iter(outputs.values())) if len(outputs) == 1 else texts[0] if len(texts) == 1 else None
    if chosen is None:
        names = ", ".join(sorted(outputs))
        raise _untold(f"which output has the label? They are {names}", 'name it: "output": "…"')
    if given.batched and chosen.shape[:1] not in ((), (1,)):
        raise _untold(f"the answer is of {chosen.shape[0]} items", "send correct, or one item a request")
    return said.label in _labels(chosen, None if given.texts is None else chosen.name not in given.texts)


def _labels(output: Tensor, classes: bool | None) -> set[str]:
    """What an answer's first label may be called.

    Args:
        classes: whether BYTES are classes of scores that the client asked for, b"score:index[:label]"; None where
            nobody knows, as after a restart.
    """
    values = output.data
    if values.size and output.datatype == "BYTES":
        first = bytes(values.flat[0]).decode(errors="replace")
        parts = set(first.split(":", 2)[1:])
        if classes is None:
            return parts | {first} if CLASS.fullmatch(first) else {first}
        return parts if classes else {first}
    if values.size and values.dtype.kind in "iu":
        return {str(int(values.flat[0]))}
    if values.dtype.kind == "f" and values.ndim and values.size == values.shape[-1] > 1:
        # NaN is no largest, though np.argmax takes it: an answer of nothing else has no label, and was not correct.
        return set() if np.isnan(values).all() else {str(int(np.nanargmax(values)))}
    raise _untold(f"the output {output.name} is {output.datatype}{list(output.shape)}, and no label")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field comes twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _unread(why: str) -> BadRequestError:
    return BadRequestError("the feedback can't be read", why=why, mend=f"send {FORM}")


def _untold(why: str, mend: str = "send correct, true or false") -> BadInputError:
    return BadInputError("the answer can't be held against a label", why=why, mend=mend)
