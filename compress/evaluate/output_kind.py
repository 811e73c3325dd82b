"""What an output means: classes, several labels at once, numbers, an embedding, or a class for each place of a map.

Read off the labels where there are some that tell, else off the last operation of the network, else off the shape. What
can't be told (logits of several labels without labels look like logits of classes) has to be said by who knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from compress.artifact import TensorSpec
from compress.data.sources import Fetched
from compress.data.spread import spread_over
from compress.evaluate.distributions import distribution_axis
from compress.evaluate.endings import Ending, ending_of
from compress.evaluate.label_values import LabelValues, values_of
from compress.evaluate.layout import lies_alike
from compress.model import TorchModel

__all__ = [
    "BY_SHAPE",
    "SHARES",
    "OutputForm",
    "OutputKind",
    "by_labels",
    "class_axes",
    "class_axis",
    "form_of",
    "kind_of",
    "no_classes",
]

LOOKED_AT = 64  # labels that are made when asked for
SHARES = "the labels are shares of classes"
BY_SHAPE = "its shape is that of a logit for each class"


class OutputKind(StrEnum):
    """What an output's numbers are."""

    SOFTMAX = "softmax"  # one of several classes
    SIGMOID = "sigmoid"  # each label by itself: there or not
    REGRESSION = "regression"  # numbers, also those of a map
    EMBEDDING = "embedding"  # a direction
    DENSE = "dense"  # one of several classes at each place


@dataclass(frozen=True)
class OutputForm:
    """An output's kind, and what is to be known to compute with it.

    Attributes:
        kind: what its numbers are.
        axis: of the classes, for SOFTMAX and DENSE.
        ending: what the network has done to it already: probabilities, their logarithms, or a unit vector.
        because: how it is known, a clause.
        doubt: why it may be otherwise, a sentence; "" where nothing else fits.
        ignored: the labels that mean "not known", for SIGMOID.
        wrong: why labels that fit by their shape can't be meant so, a clause; they may be numbers to hit.
    """

    kind: OutputKind
    axis: int = 1
    ending: Ending | None = None
    because: str = ""
    doubt: str = ""
    ignored: tuple[float, ...] = ()
    wrong: str = ""


def kind_of(model: TorchModel, name: str, labels: Any | None = None) -> OutputKind:
    """See `form_of`."""
    return form_of(model, name, labels).kind


def form_of(model: TorchModel, name: str, labels: Any | None = None) -> OutputForm:
    """Tell what an output is.

    Args:
        model: with its forward; one that can't be traced is judged by labels and shape alone.
        name: of one of the signature's outputs.
        labels: [n, …] of this output, if there are some.
    """
    names = [spec.name for spec in model.signature.outputs]
    spec = model.signature.outputs[names.index(name)]
    ending = ending_of(model.module, names.index(name))
    told = None if labels is None else by_labels(labels, spec, ending)
    if told is not None:
        return told
    dims = len(spec.shape)
    if ending in ("softmax", "log_softmax"):
        axis = distribution_axis(model, names.index(name), class_axis(spec.shape), logarithms=ending == "log_softmax")
        if axis is None:
            why = f"the network ends in {ending}, and no dimension of this output sums to one: none holds its classes"
            return OutputForm(OutputKind.REGRESSION, 1, None, why)
        kind = OutputKind.SOFTMAX if dims == 2 else OutputKind.DENSE
        return OutputForm(kind, axis, ending, f"the network ends in {ending}")
    if ending is not None:
        kind = OutputKind.SIGMOID if ending == "sigmoid" else OutputKind.EMBEDDING
        return OutputForm(kind, 1, ending, f"the network ends in {ending}")
    if dims == 2 and spec.shape[1] != 1:
        return OutputForm(OutputKind.SOFTMAX, 1, None, BY_SHAPE)
    return OutputForm(OutputKind.REGRESSION, 1, None, "nothing says that it is more than numbers")


def class_axis(shape: tuple[int | str, ...]) -> int:
    """Where the classes most likely are, of an output without labels that tell: last in a sequence, else second.

    Args:
        shape: of the output; a size that varies counts no classes.
    """
    if len(shape) < 3 or not isinstance(shape[-1], int):
        return 1
    return -1 if len(shape) == 3 or not isinstance(shape[1], int) else 1


def class_axes(shape: tuple[int | str, ...], of: tuple[int, ...]) -> tuple[int, ...]:
    """Where the classes may be, of an output that has class ids for each of its places: 1, -1, both or neither.

    Args:
        shape: of the output; a size that varies counts no classes, and one value is no choice of a class.
        of: the labels' shape, for each sample.
    """
    if len(of) == 0 or len(shape) != len(of) + 2:
        return ()
    places = ((1, shape[2:]), (-1, shape[1:-1]))
    return tuple(at for at, rest in places if isinstance(shape[at], int) and shape[at] != 1 and _fits(rest, of))


def by_labels(labels: Any, spec: TensorSpec, ending: Ending | None) -> OutputForm | None:
    """What labels [n, …] say of an output; None where they don't fit it."""
    shape, of = spec.shape, tuple(labels.shape[1:])
    whole = labels.dtype.kind in "iub"
    if whole and not of and len(shape) == 2 and isinstance(shape[1], int) and shape[1] > 1:
        return OutputForm(OutputKind.SOFTMAX, 1, ending, "the labels are class ids")
    if whole and (axes := class_axes(shape, of)):
        doubt = ""
        if len(axes) > 1:
            doubt = (
                f"The classes of {spec} may be along its second dimension or along its last: both fit the labels "
                f"{['n', *of]}. The second is taken, as torch's cross_entropy has it; where the last is meant, its "
                "figures mean nothing: judge by a function of your own, --metric package.module:function, and give a "
                "model whose other sizes vary, or differ from the number of classes."
            ).replace("'n'", "n")
        return OutputForm(OutputKind.DENSE, axes[0], ending, "the labels are class ids for each place", doubt)
    if not lies_alike(shape[1:], of) or labels.dtype.kind not in "biuf":
        return None
    values = values_of(labels)
    unknown = values.unknown(bounded=ending == "sigmoid")
    if unknown is None:
        if ending != "sigmoid" and values.shares:
            return OutputForm(OutputKind.SOFTMAX, 1, ending, SHARES)
        wrong = _wrong(values, spec)
        if whole and ending == "sigmoid" and not wrong:
            return None
        return OutputForm(OutputKind.REGRESSION, 1, ending, "the labels are numbers in its shape", wrong=wrong)
    if values.one_hot and ending != "sigmoid":
        return OutputForm(OutputKind.SOFTMAX, 1, ending, "the labels are one-hot")
    return OutputForm(OutputKind.SIGMOID, 1, ending, "the labels are 0 or 1, each by itself", ignored=unknown)


def _wrong(values: LabelValues, spec: TensorSpec) -> str:
    """Why labels are neither there or not, nor numbers to hit, or ""."""
    if values.picture:
        return "they are 0 and 255, as a mask in a file of a picture has them, not 0 and 1"
    if values.classes and _one_for_each_place(spec.shape[1:]):
        few = ", ".join(f"{value:g}" for value in values.others[:5])
        return f"some are {few}, and {spec} has one value for each place: only 0 and 1 can be told apart"
    return ""


def _one_for_each_place(shape: tuple[int | str, ...]) -> bool:
    """Whether a sample's output is a map of two or more axes without channels; two short ones are rows of numbers."""
    axes = [size for size in shape if size != 1]
    if len(axes) < 2:
        return False
    return len(axes) < len(shape) or (len(axes) == 2 and all(isinstance(size, str) or size > 4 for size in axes))


def no_classes(labels: Any) -> bool:
    """Whether labels [n, …] that fit no output can't be ids of classes: numbers, pairs, or several for a sample."""
    if labels.ndim > 2 or (labels.ndim == 2 and labels.shape[1] != 1):
        return True
    if labels.dtype.kind != "f":
        return False
    made = isinstance(labels, Fetched)
    rows = spread_over(len(labels), LOOKED_AT)
    values = np.asarray(labels[rows] if made else labels[:])
    return not bool((values == np.rint(values)).all())


def _fits(want: tuple[int | str, ...], have: tuple[int, ...]) -> bool:
    return len(want) == len(have) and all(isinstance(a, str) or a == b for a, b in zip(want, have, strict=True))
