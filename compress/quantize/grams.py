"""What layers of an ONNX file read on some data: Gram matrices x'x over all rows, and rows held out to judge."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from compress.data.dataset import Dataset
from compress.data.padding import Tokens, padding_of
from compress.errors import StageError
from compress.formats.onnx.outline import outline
from compress.model import Arrays
from compress.model.inputs import run_on
from compress.model.watched import Watched
from compress.onnx_export.file import save
from compress.quantize.blocks import SIZE
from compress.quantize.calibrate import batch_for
from compress.quantize.half.no_numbers import no_numbers
from compress.runtime.backends.onnxrt import session
from compress.runtime.measure import cores

__all__ = ["FEWEST", "GRAM_BYTES", "Reading", "held_out", "portions", "readings", "slices"]

Array = np.ndarray[Any, Any]
Run = Callable[[Arrays], dict[str, Array]]
GRAM_BYTES = 512 << 20  # of the matrices that are summed at the same time
# Columns of one matrix. Its inverse takes time with their cube; what a layer of more reads is looked at in parts.
WIDEST = 3072
ROWS = 4096  # whose products are summed in float32; sums of those are float64
HELD_OUT = 5  # every so many samples, one judges
FEWEST = 8 * HELD_OUT  # samples: with fewer, too few are left to judge
MOST_HELD = 1024  # samples that judge, and about as many rows of each tensor


@dataclass(frozen=True)
class Reading:
    """What a tensor held.

    Attributes:
        grams: x'x of the samples that weights are chosen by, float64 [columns, columns] of each of its `slices`.
        held: rows of those that judge, float32 [rows, width].
        every: the same, padding with them: what is taken for padding is not to be lost on either.
    """

    grams: tuple[Array, ...]
    held: Array
    every: Array

    def __add__(self, other: Reading) -> Reading:
        both = zip(self.grams, other.grams, strict=True)
        return Reading(
            tuple(a + b for a, b in both),
            np.concatenate([self.held, other.held]),
            np.concatenate([self.every, other.every]),
        )


def slices(width: int) -> list[slice]:
    """Parts of so many columns, each of whole blocks, that have a matrix of their own: one, up to WIDEST."""
    parts = math.ceil(width / WIDEST)
    step = math.ceil(width / parts / SIZE) * SIZE
    return [slice(at, min(at + step, width)) for at in range(0, width, step)]


def portions(widths: Mapping[str, int]) -> list[list[str]]:
    """Tensors whose matrices are summed together, so that each portion stays within GRAM_BYTES, or is one tensor.

    Args:
        widths: the last dimension of each.
    """
    found: list[list[str]] = []
    size = 0
    for name, width in widths.items():
        own = sum(8 * (part.stop - part.start) ** 2 for part in slices(width)) + 8 * MOST_HELD * width
        if not found or size + own > GRAM_BYTES:
            found.append([])
            size = 0
        found[-1].append(name)
        size += own
    return found


def held_out(path: Path, data: Dataset) -> Array | None:
    """Places of the samples that judge; None where there are too few, or all go in one call.

    Args:
        path: an ONNX file.
        data: that it is run on.
    """
    leading = [value.type.tensor_type.shape.dim[:1] for value in outline(path).graph.input]
    if len(data) < FEWEST or any(dims and dims[0].dim_value > 1 for dims in leading):
        return None
    step = max(HELD_OUT, math.ceil(len(data) / MOST_HELD))
    return np.arange(step - 1, len(data), step)


def readings(
    path: Path, widths: Mapping[str, int], data: Dataset, held: Array, progress: Callable[[int], None]
) -> dict[str, Reading]:
    """What each tensor holds, tokens left out that are proven to be padding (see `padding_of`).

    Args:
        path: a float32 file.
        widths: tensors of it, floating point, by name, with their last dimension.
        data: that the file is run on.
        held: places of the samples that judge; the others are summed.
        progress: is told of samples done.

    Raises:
        StageError: one of them is NaN or infinite.
    """
    model = onnx.load(path)
    graph = model.graph
    padded = _padding(model, path, widths, data)
    run = _runner(model, path, widths)
    sums = {name: [np.zeros((part.stop - part.start,) * 2) for part in slices(width)] for name, width in widths.items()}
    kept: dict[str, list[Array]] = {name: [] for name in widths}
    every: dict[str, list[Array]] = {name: [] for name in widths}
    batch = batch_for(path, [name for name in widths if name not in _fed(graph)], data)
    places = np.setdiff1d(np.arange(len(data)), held)
    done = 0
    for judges, some in ((False, places), (True, held)):
        for at in range(0, len(some), batch):
            inputs, _ = data.take(some[at : at + batch])
            count = len(next(iter(inputs.values())))
            found = run(inputs)
            for name, width in widths.items():
                whole = found[name].reshape(-1, width)
                told = padded[name].kept(inputs).reshape(-1) if name in padded else None
                told = told if told is not None and len(told) == len(whole) else None  # a batch that the model has cut
                rows = np.ascontiguousarray(whole if told is None else whole[told])
                if judges:
                    most = math.ceil(MOST_HELD * count / len(held))
                    kept[name].append(_some(rows, most))
                    every[name].append(kept[name][-1] if told is None else _some(whole, most))
                else:
                    _add(sums[name], rows)
                if not np.isfinite(rows).all() or not all(np.isfinite(each).all() for each in sums[name]):
                    raise _beyond(graph, name, found, some[at : at + batch])
            done += count
            progress(done)
    return {
        name: Reading(tuple(sums[name]), np.concatenate(kept[name]), np.concatenate(every[name])) for name in widths
    }


def _padding(model: onnx.ModelProto, path: Path, names: Iterable[str], data: Dataset) -> dict[str, Tokens]:
    """What of tensors is proven to be padding."""
    outputs = [value.name for value in model.graph.output]
    runner = functools.cache(lambda: _runner(model, path, [*names, *outputs]))  # where there is a mask to prove

    def run(inputs: Arrays) -> tuple[Arrays, Arrays]:
        found = runner()(inputs)
        return {name: found[name] for name in names}, {name: found[name] for name in outputs}

    return padding_of(run, data).tensors


def _fed(graph: onnx.GraphProto) -> set[str]:
    return {value.name for value in graph.input}


def _runner(model: onnx.ModelProto, path: Path, names: Iterable[str]) -> Run:
    """What gives these tensors for inputs of a file; the model gets them as outputs."""
    graph, names = model.graph, list(dict.fromkeys(names))
    fed, known = _fed(graph), {value.name for value in (*graph.input, *graph.output)}
    graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in known
    )
    asked = [name for name in names if name not in fed]
    with tempfile.TemporaryDirectory() as folder:
        augmented = Path(folder) / "augmented.onnx"
        save(model, augmented)
        running, watched = session(augmented, cores()), Watched(path)

    def run(inputs: Arrays) -> dict[str, Array]:
        once = partial(watched.run, running, asked, inputs)
        found = dict(zip(asked, run_on(inputs, once), strict=True)) if asked else {}
        return found | {name: inputs[name] for name in names if name in fed}

    return run


def _some(rows: Array, most: int) -> Array:
    """So many of the rows, evenly spread."""
    if len(rows) <= most:
        return rows.astype(np.float32)
    found: Array = rows[np.linspace(0, len(rows) - 1, most).astype(int)].astype(np.float32)
    return found


def _add(totals: list[Array], rows: Array) -> None:
    parts = slices(rows.shape[1])
    for at, (total, part) in itertools.product(range(0, len(rows), ROWS), zip(totals, parts, strict=True)):
        some = np.ascontiguousarray(rows[at : at + ROWS, part], np.float32)
        total += some.T @ some


def _beyond(graph: onnx.GraphProto, name: str, found: Mapping[str, Array], samples: Array) -> StageError:
    first, last = int(samples[0]), int(samples[-1])
    if not np.isfinite(found[name]).all():
        return no_numbers(graph, name, found, (first, last), shown=False)
    most = np.abs(found[name]).max()
    return StageError(
        "calibration gives values that are too large to be squared",
        why=f"the tensor {name!r} reaches {most:.3g} for a sample from {first} to {last}",
        mend="drop samples that none like them is ever served; or leave --calibration out, and weights are rounded",
    )
