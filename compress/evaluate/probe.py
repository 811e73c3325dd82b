"""What a model answers to some samples of its data, where its graph does not say what its outputs are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.artifact import Signature
from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.evaluate.endings import Ending, endings_of, unbounded_of
from compress.evaluate.output_choice import OutputContent, content_of, named_so
from compress.evaluate.output_kind import SHARES, OutputKind, by_labels
from compress.model import Arrays, OnnxModel, TorchModel

__all__ = ["Probe", "hangs", "probe", "probed", "shares_among"]

Array = np.ndarray[Any, Any]
Infer = Callable[[Arrays], Arrays]
FEW, PROBED = 8, 256  # samples that tell shapes, and those that tell what the values are
KEPT_BYTES, BATCH_BYTES = 64 << 20, 32 << 20  # of inputs and outputs
MOST_TOGETHER = 64


@dataclass(frozen=True)
class Probe:
    """What outputs are, by the graph and, where it does not say, by values.

    Attributes:
        outputs: of some samples.
        rows: where these are in the data.
        endings: of the outputs by name; what gives 0 to 1 for every sample, and may give no more, ends as a sigmoid.
        because: how that is known of each output, a clause.
    """

    outputs: Arrays
    rows: Array
    endings: Mapping[str, Ending | None]
    because: Mapping[str, str]


def probe(infer: Infer, model: TorchModel | OnnxModel, data: Dataset) -> Probe:
    """Look at the graph, and at what the model answers: to all samples, where the kind of an output hangs on it.

    What is told does not depend on the order of the samples.

    Args:
        infer: runs the model.
        model: the same one.
        data: that it is judged on.
    """
    signature, endings, unbounded = model.signature, endings_of(model), unbounded_of(model)
    outputs, rows = probed(infer, data, many=hangs(signature, data.labels, endings, unbounded))
    names = shares_among(signature, data.labels, endings, unbounded, outputs)
    size = _together(data, outputs, len(rows))
    for start in range(0, len(data) if names else 0, size):
        found = infer(data.take(slice(start, start + size))[0])
        names = [name for name in names if _are_shares(found[name])]
        if not names:
            break
    because = {name: f"the network ends in {ending}" for name, ending in endings.items() if ending is not None}
    because |= dict.fromkeys(unbounded, "the network ends in a layer that gives any number")
    because |= {name: f"it gives 0 to 1 for all {counted(len(data), 'samples')}" for name in names}
    settled: dict[str, Ending | None] = {**endings, **dict.fromkeys(names, "sigmoid")}
    return Probe(outputs, rows, settled, because)


def hangs(signature: Signature, labels: Any | None, endings: Mapping[str, Ending | None], unbounded: set[str]) -> bool:
    """Whether what an output is can be told by its values alone: nothing in the graph says it.

    Args:
        signature: of the model.
        labels: [n, …], or None.
        endings: of the outputs by name.
        unbounded: see `unbounded_of`.
    """
    for spec in signature.outputs:
        if not spec.dtype.startswith("float") or endings.get(spec.name) is not None:
            continue
        form = None if labels is None else by_labels(labels, spec, None)
        if form is not None and form.kind is OutputKind.SIGMOID and spec.name not in unbounded:
            return True
        if form is not None and form.because == SHARES:
            return True
        unnamed = content_of(spec) is OutputContent.CLASSES and not named_so(spec.name)
        if unnamed and (form is None or len(signature.outputs) > 1):
            return True
    return False


def probed(infer: Infer, data: Dataset, *, many: bool) -> tuple[Arrays, Array]:
    """What a model answers to samples that are spread over the data, and where these are in it.

    Args:
        infer: runs the model.
        data: to take samples of.
        many: as many as there is room for; otherwise a few, which tell shapes.
    """
    rows = data.places(FEW)
    outputs = infer(data.take(rows)[0])
    most = int(np.clip(KEPT_BYTES // _bytes(data, outputs, len(rows)), FEW, PROBED))
    if not many or min(most, len(data)) <= len(rows):
        return outputs, rows
    size, rows = _together(data, outputs, len(rows)), data.places(most)
    parts = [infer(data.take(rows[start : start + size])[0]) for start in range(0, len(rows), size)]
    found = {name: np.concatenate([part[name] for part in parts]) for name in _by_sample(parts, len(rows))}
    return outputs | found, rows


def _bytes(data: Dataset, outputs: Arrays, samples: int) -> int:
    """Of a sample's inputs and outputs."""
    given = sum(values.nbytes for values in data.take(slice(0, 1))[0].values())
    return max(1, given + sum(values.nbytes for values in outputs.values()) // samples)


def _together(data: Dataset, outputs: Arrays, samples: int) -> int:
    """How many samples are run at a time."""
    return data.whole(int(np.clip(BATCH_BYTES // _bytes(data, outputs, samples), 1, MOST_TOGETHER)))


def _by_sample(parts: list[Arrays], samples: int) -> list[str]:
    """The outputs that have a row of the same size for each sample."""
    alike = [name for name in parts[0] if len({part[name].shape[1:] for part in parts if part[name].ndim}) == 1]
    return [
        name
        for name in alike
        if all(part[name].ndim for part in parts) and sum(len(part[name]) for part in parts) == samples
    ]


def _are_shares(values: Array) -> bool:
    """Whether all values may be probabilities."""
    return bool(((values >= 0) & (values <= 1)).all())


def shares_among(
    signature: Signature,
    labels: Any | None,
    endings: Mapping[str, Ending | None],
    unbounded: set[str],
    values: Arrays,
) -> list[str]:
    """The outputs whose labels are each there or not, of which the graph says nothing, and whose values are all 0 to 1.

    Args:
        signature: of the model.
        labels: [n, …], or None.
        endings: of the outputs by name.
        unbounded: see `unbounded_of`; what may be any number is a logit, whatever it is for these samples.
        values: of some samples.
    """
    found = []
    for spec in signature.outputs:
        told = endings.get(spec.name) is not None or spec.name in unbounded or not spec.dtype.startswith("float")
        if labels is None or told or spec.name not in values:
            continue
        form = by_labels(labels, spec, None)
        if form is not None and form.kind is OutputKind.SIGMOID and _are_shares(values[spec.name]):
            found.append(spec.name)
    return found
