"""Which of a model's outputs is judged, by what kind of thing each gives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np

from compress.artifact import Signature, TensorSpec
from compress.errors import RecipeError
from compress.model import Arrays

__all__ = ["OutputContent", "class_outputs", "content_of", "named_so", "rebuilds", "the_output"]

# By the names that outputs usually have; "output" and its like say nothing.
_CLASSES = re.compile(r"logit|prob|class|score|label", re.IGNORECASE)
_EMBEDDING = re.compile(r"emb|feat|hidden|pool|repr|vector|state", re.IGNORECASE)
_VALUES = re.compile(r"box|bbox|coord|landmark|keypoint|offset|regress|depth", re.IGNORECASE)


class OutputContent(Enum):
    """What an output gives for a sample."""

    CLASSES = "class scores"
    ANSWERS = "integers"
    VALUES = "values"
    EMBEDDING = "an embedding"
    DENSE = "a map or a sequence"


def content_of(spec: TensorSpec, sample: np.ndarray[Any, Any] | None = None) -> OutputContent:
    """By dtype, shape and name; a vector whose length is always 1 is an embedding.

    Args:
        spec: of the output.
        sample: what it gave for some samples [n, …].
    """
    if not spec.dtype.startswith("float"):
        return OutputContent.ANSWERS
    if len(spec.shape) < 2 or (len(spec.shape) == 2 and spec.shape[1] == 1):
        return OutputContent.VALUES
    if len(spec.shape) > 2:
        return OutputContent.DENSE
    for pattern, kind in (
        (_CLASSES, OutputContent.CLASSES),
        (_EMBEDDING, OutputContent.EMBEDDING),
        (_VALUES, OutputContent.VALUES),
    ):
        if pattern.search(spec.name):
            return kind
    if not isinstance(spec.shape[1], int):
        return OutputContent.DENSE
    if sample is not None and len(sample) and (sample < 0).any():
        lengths = np.linalg.norm(np.asarray(sample, np.float64), axis=1)
        if np.allclose(lengths, 1.0, atol=1e-3):
            return OutputContent.EMBEDDING
    return OutputContent.CLASSES


def named_so(name: str) -> bool:
    """Whether an output's name says that it gives class scores."""
    return _CLASSES.search(name) is not None


def rebuilds(shape: tuple[int | str, ...], inputs: Iterable[tuple[int | str, ...]]) -> bool:
    """Whether an output has an input's shape, beside the samples: an autoencoder's, more likely than class scores.

    Args:
        shape: of the output.
        inputs: the shapes of the inputs of floats.
    """
    return any(shape[1:] == given[1:] for given in inputs)


def the_output(
    metric: str | None,
    signature: Signature,
    labels: Any | None,
    asked: str | None,
    sample: Arrays | None = None,
    *,
    ask: bool,
) -> str | None:
    """The name of the output that a metric looks at; None is all of them.

    Args:
        metric: the name that was asked for, or None.
        signature: of the model.
        labels: class ids [n], or None.
        asked: the name that the user gave.
        sample: outputs of some samples.
        ask: whether to raise where it can't be told, rather than take the first that fits.

    Raises:
        RecipeError: there is no output of that name, or it can't be told which is meant.
    """
    names = [spec.name for spec in signature.outputs]
    if asked is not None:
        if asked not in names:
            raise RecipeError(
                f"can't judge the output {asked!r}",
                why=f"the model gives {', '.join(names)}",
                mend="name one of these with --judge",
            )
        return asked
    if len(names) < 2:
        return names[0] if names else None
    if metric in ("cosine", "mse"):
        return None
    kinds = {
        spec.name: content_of(spec, None if sample is None else sample.get(spec.name)) for spec in signature.outputs
    }
    fitting = _classifying(signature, kinds, labels)
    answers = [name for name, kind in kinds.items() if kind is OutputContent.ANSWERS]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting and len(answers) == 1 and metric in (None, "agreement"):
        return answers[0]
    given = set(kinds.values())
    alike = given <= {OutputContent.EMBEDDING, OutputContent.DENSE} or given == {OutputContent.VALUES}
    if not fitting and not answers and alike and metric is None:
        return None
    if not ask:
        return fitting[0] if fitting else None
    told = "; ".join(f"{spec} ({kinds[spec.name].value})" for spec in signature.outputs)
    raise RecipeError(
        "can't tell which output to judge", why=f"the model gives {told}", mend=f"name it: --judge {names[0]}"
    )


def class_outputs(signature: Signature, labels: Any | None) -> list[str]:
    """The names of the outputs that class ids may belong to, by shape and name.

    Args:
        signature: of the model.
        labels: class ids [n], or None.
    """
    return _classifying(signature, {spec.name: content_of(spec) for spec in signature.outputs}, labels)


def _classifying(signature: Signature, kinds: dict[str, OutputContent], labels: Any | None) -> list[str]:
    """Outputs of class scores: those that hold every label, and of these the ones that are named so, if any is."""
    found = [spec for spec in signature.outputs if kinds[spec.name] is OutputContent.CLASSES]
    if labels is not None and len(found) > 1:
        most = int(np.max(labels[:], initial=-1))
        found = [spec for spec in found if isinstance(spec.shape[1], int) and spec.shape[1] > most] or found
    named = [spec.name for spec in found if _CLASSES.search(spec.name)]
    return named or [spec.name for spec in found]
