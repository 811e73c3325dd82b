"""What layers of an ONNX file read on some data, as Gram matrices: x'x over all rows, a batch in memory at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.model import Arrays
from compress.model.inputs import run_on
from compress.model.watched import Watched
from compress.quantize.calibrate import batch_for
from compress.quantize.half.no_numbers import no_numbers
from compress.runtime.backends.onnxrt import session
from compress.runtime.measure import cores

__all__ = ["GRAM_BYTES", "grams", "portions"]

Array = np.ndarray[Any, Any]
GRAM_BYTES = 512 << 20  # of the matrices that are summed at the same time
ROWS = 4096  # whose products are summed in float32; sums of those are float64
FEW = 256  # samples that say whether an input is a mask


def portions(widths: Mapping[str, int]) -> list[list[str]]:
    """Tensors whose matrices are summed together, so that each portion stays within GRAM_BYTES, or is one tensor.

    Args:
        widths: the last dimension of each.
    """
    found: list[list[str]] = []
    size = 0
    for name, width in widths.items():
        own = 8 * width * width
        if not found or size + own > GRAM_BYTES:
            found.append([])
            size = 0
        found[-1].append(name)
        size += own
    return found


def grams(path: Path, widths: Mapping[str, int], data: Dataset, progress: Callable[[int], None]) -> dict[str, Array]:
    """x'x of each tensor's rows, float64 [width, width].

    Tokens that the model's mask hides are left out.

    Args:
        path: a float32 file.
        widths: tensors of it, floating point, by name, with their last dimension.
        data: that the file is run on.
        progress: is told of samples done.

    Raises:
        StageError: one of them is NaN or infinite, or there are no samples.
    """
    model = onnx.load(path)
    graph = model.graph
    known = {value.name for value in (*graph.input, *graph.output)}
    more = [name for name in widths if name not in known]
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in more)
    fed = {value.name for value in graph.input}
    asked = [name for name in widths if name not in fed]
    with tempfile.TemporaryDirectory() as folder:
        augmented = Path(folder) / "augmented.onnx"
        onnx.save(model, augmented)
        running, watched = session(augmented, cores()), Watched(path)
    sums = {name: np.zeros((width, width)) for name, width in widths.items()}
    mask = _mask(data)
    done = 0
    for inputs, _ in data.batches(batch_for(path, asked, data)):
        run = partial(watched.run, running, asked, inputs)
        found = dict(zip(asked, run_on(inputs, run), strict=True)) if asked else {}
        found |= {name: inputs[name] for name in widths if name in fed}
        count = len(next(iter(inputs.values())))
        for name, width in widths.items():
            rows = _rows(found[name], width, inputs, mask)
            _add(sums[name], rows)
            if not np.isfinite(sums[name]).all():
                raise _beyond(graph, name, found, (done, done + count - 1))
        done += count
        progress(done)
    if not done:
        raise StageError(
            "can't calibrate on no samples",
            why=f"{data.source or 'the calibration data'} holds none",
            mend="give 100 typical inputs",
        )
    return sums


def _add(total: Array, rows: Array) -> None:
    for at in range(0, len(rows), ROWS):
        some = np.ascontiguousarray(rows[at : at + ROWS], np.float32)
        total += some.T @ some


def _beyond(graph: onnx.GraphProto, name: str, found: Mapping[str, Array], samples: tuple[int, int]) -> StageError:
    if not np.isfinite(found[name]).all():
        return no_numbers(graph, name, found, samples, shown=False)
    most, (first, last) = np.abs(found[name]).max(), samples
    return StageError(
        "calibration gives values that are too large to be squared",
        why=f"the tensor {name!r} reaches {most:.3g} for a sample from {first} to {last}",
        mend="drop samples that none like them is ever served; or leave --calibration out, and weights are rounded",
    )


def _rows(values: Array, width: int, inputs: Arrays, mask: str | None) -> Array:
    """[rows, width], without those of padding."""
    rows = values.reshape(-1, width)
    if mask is None:
        return rows
    told = inputs[mask].astype(bool)
    by_token = values.ndim == 3 and values.shape[:2] == told.shape
    in_a_row = values.ndim == 2 and len(values) == told.size > len(told)  # the tokens of all samples
    return np.ascontiguousarray(rows[told.reshape(-1)] if by_token or in_a_row else rows)


def _mask(data: Dataset) -> str | None:
    """The input that says which tokens count, by 1: its name says so, and it holds ones and zeros.

    Others go by other rules: of torch's padding masks, 1 is what does not count.
    """
    named = [name for name, array in data.inputs.items() if name == "attention_mask" and len(array.shape) == 2]
    whole = [name for name in named if np.dtype(data.inputs[name].dtype).kind in "iub"]
    few = data.take(np.arange(min(len(data), FEW)))[0] if whole else {}
    return next((name for name in whole if np.isin(few[name], (0, 1)).all()), None)
