"""Ranges of a model's activations from calibration data, one batch in memory at a time."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.formats.onnx.outline import outline
from compress.model import OnnxModel, Ranges
from compress.model.inputs import run_on
from compress.model.watched import Watched
from compress.onnx_export.file import save
from compress.onnx_export.tied import apart
from compress.quantize.half.mask_chain import mask_chain
from compress.quantize.half.no_numbers import no_numbers
from compress.quantize.histogram import Histogram, Method
from compress.runtime.backends.onnxrt import session
from compress.runtime.measure import cores
from compress.runtime.onnx_shapes import shapes_for
from compress.stage import Progress

__all__ = ["batch_for", "calibrate", "samples_within", "trained_ranges"]

# All activations of a batch are there at once: as many samples as keep them below this.
ACTIVATION_BYTES = 64 * 1024 * 1024
LARGEST_BATCH = 32


def calibrate(
    path: Path, data: Dataset, method: Method, progress: Progress, *, masks: bool = False
) -> dict[str, tuple[float, float]]:
    """Run the data through an ONNX file and find the range of each float tensor in it.

    Args:
        path: a file whose shapes have been inferred (fold_onnx does it).
        data: fits its inputs; the last batch may be smaller.
        method: see `Histogram.range`.
        progress: is told of samples done.
        masks: whether tensors that hold a mask are given, too, with the range of their finite values. Without, they
            are left out: what has no range is not rounded to 8 bits.

    Returns:
        (lowest, highest) by tensor name; both finite, with 0 between them.

    Raises:
        StageError: an activation is NaN; or infinite, and not by a mask, or in an output; or there are no samples.
    """
    model = onnx.load(path)
    apart(model)  # a weight that is another's transpose is no activation
    tensors = _float_tensors(model)
    chain = mask_chain(model.graph)
    outputs = {value.name for value in model.graph.output}
    steps = [name for node in model.graph.node for name in node.output]
    order = [name for name in dict.fromkeys([*(v.name for v in model.graph.input), *steps]) if name in tensors]
    infinite: set[str] = set()
    known = {value.name for value in (*model.graph.input, *model.graph.output)}
    model.graph.output.extend(value for name, value in tensors.items() if name not in known)
    histograms = {name: Histogram() for name in tensors}
    computed = [value.name for value in model.graph.output if value.name in tensors]
    fed = [value.name for value in model.graph.input if value.name in tensors]
    with tempfile.TemporaryDirectory() as folder:
        augmented = Path(folder) / "augmented.onnx"
        save(model, augmented)
        running, watched = session(augmented, cores()), Watched(path)
    done = 0
    for inputs, _ in data.batches(batch_for(path, tensors, data)):
        run = partial(watched.run, running, computed, inputs)
        found = dict(zip(computed, run_on(inputs, run), strict=True)) if computed else {}  # no name asks for all
        found |= {name: inputs[name] for name in fed}
        for name in order:  # the first that is no number is the cause of those behind it
            values = found[name]
            held = np.isfinite(values)
            if not held.all():
                if np.isnan(values).any() or name in outputs or name not in chain.infinite:
                    last = done + len(next(iter(inputs.values()))) - 1
                    raise no_numbers(model.graph, name, found, (done, last), shown=name in outputs)
                infinite.add(name)
                values = values[held]
            histograms[name].add(values)
        done += len(next(iter(inputs.values())))
        progress(done, len(data), "calibrating")
    if not done:
        raise StageError(
            "can't calibrate on no samples",
            why=f"{data.source or 'the calibration data'} holds none",
            mend="give 100 typical inputs",
        )
    left_out = set() if masks else infinite | chain.holding
    return {name: _range(histogram, method) for name, histogram in histograms.items() if name not in left_out}


def _range(histogram: Histogram, method: Method) -> tuple[float, float]:
    """The range of what was counted; empty where nothing was finite."""
    return histogram.range(method) if histogram.counts.any() else (0.0, 0.0)


def trained_ranges(model: OnnxModel) -> Ranges | None:
    """The ranges that a training has found, where there are some and they are those of this graph's tensors."""
    if not model.ranges:
        return None
    loaded = onnx.load(model.path)
    tensors, found = set(_float_tensors(loaded)), set(model.ranges)
    # Only what carries a mask has no range.
    return model.ranges if found <= tensors and tensors - found <= mask_chain(loaded.graph).all else None


def batch_for(path: Path, names: Iterable[str], data: Dataset) -> int:
    """Samples at a time, so that some tensors together stay within ACTIVATION_BYTES; at least 1.

    Args:
        path: an ONNX file; one whose batch is fixed takes no other.
        names: of its float32 tensors.
        data: what it is run on, whose sizes decide.
    """
    leading = [value.type.tensor_type.shape.dim[:1] for value in outline(path).graph.input]
    fixed = {dims[0].dim_value for dims in leading if dims and dims[0].HasField("dim_value")}
    if fixed:
        return 1 if fixed == {1} else max(1, len(data))
    shapes = shapes_for(path, data.take(slice(0, 1))[0], list(names))
    return samples_within(sum(math.prod(shape) for shape in shapes.values()))


def samples_within(elements: int) -> int:
    """Samples of so many float32 elements each that stay within ACTIVATION_BYTES; from 1 to LARGEST_BATCH."""
    return max(1, min(LARGEST_BATCH, ACTIVATION_BYTES // max(4 * elements, 1)))


def _float_tensors(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    weights = {tensor.name for tensor in model.graph.initializer}
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16)
    # Shape inference leaves types of tensors that folding has taken away.
    there = {name for node in model.graph.node for name in node.output} | {v.name for v in model.graph.input}
    there -= weights
    return {v.name: v for v in values if v.type.tensor_type.elem_type in kinds and v.name in there}
