"""What a layer takes by its channels on both sides, measured on this machine: medians of turns, made monotone."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from compress.artifact import Runtime
from compress.console.wording import counted
from compress.model import sample_inputs
from compress.prune.latency.graphs import layer_model, nothing
from compress.prune.latency.layers import Layer, Shape
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import open_model
from compress.runtime.latency import FEWEST, block_of, interleave
from compress.runtime.machine import machine_of
from compress.stage import Progress
from compress.storage.stage_cache import SAID, StageCache
from compress.vetting.texts import read_json

__all__ = ["SECONDS", "Clocked", "Table", "Tables", "tables_of"]

SECONDS = 120.0  # after these no further layer is measured
BLOCK_SECONDS = 0.01
SWEEPS = 8  # over rows and columns in turn, after which a table is as good as monotone
LEAST_MS = 1e-4  # a layer takes something
ENTRY, FILE = "latency_table", "table.json"

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Clocked:
    """On what layers are measured.

    Attributes:
        runtime: that serves the result.
        threads: for an operator.
        quantize: how the export makes it 8-bit; None for float32.
    """

    runtime: Runtime = "onnxruntime"
    threads: int = 1
    quantize: QuantizeOnnx | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As JSON values, all that a table holds for."""
        precision = {} if self.quantize is None else dict(self.quantize.options)
        kept = {name: precision[name] for name in ("mode", "reduce_range", "target") if name in precision}
        return {
            "runtime": self.runtime, "version": version(self.runtime), "threads": self.threads,
            "machine": machine_of(self.threads), "int8": kept or None,
        }  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Milliseconds of a layer, never falling with channels.

    Attributes:
        inputs, outputs: counts that were measured, rising.
        ms: float64 [inputs, outputs]; of a depthwise convolution [1, outputs], its inputs being its outputs.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ms: Array

    def at(self, inputs: Array | float, outputs: Array | float) -> Array:
        """Between counts on the lines from one to the next, in both directions; outside as at the nearest."""
        row, across = _place(self.inputs, inputs)
        column, along = _place(self.outputs, outputs)
        next_row, next_column = min(1, len(self.inputs) - 1), min(1, len(self.outputs) - 1)
        low, right = self.ms[row, column], self.ms[row, column + next_column]
        up, both = self.ms[row + next_row, column], self.ms[row + next_row, column + next_column]
        found: Array = (low * (1 - across) + up * across) * (1 - along) + (right * (1 - across) + both * across) * along
        return found

    @property
    def whole(self) -> float:
        """With all channels."""
        return float(self.ms[-1, -1])


@dataclass(frozen=True)
class Tables:
    """Of all layers of a network, by their shape's key.

    Attributes:
        found: tables.
        overhead_ms: of a call that does nothing.
        scaled: layers that time ran out for, by name: theirs is that of the others by multiply-accumulate.
        seconds: that measuring took; 0 where all was known.
    """

    found: Mapping[str, Table]
    overhead_ms: float
    scaled: tuple[str, ...] = ()
    seconds: float = 0.0


def tables_of(
    layers: Sequence[Layer], on: Clocked, progress: Progress, cache: StageCache | None = None, seconds: float = SECONDS
) -> Tables:
    """Measure each shape once, those of the most work first; at least one, however little time there is.

    Args:
        layers: of a network.
        on: what runs them.
        progress: is told of shapes.
        cache: has tables of earlier runs, and gets these.
        seconds: after which no further shape is begun.
    """
    shapes = sorted({layer.shape.key: layer.shape for layer in layers}.values(), key=_work, reverse=True)
    found: dict[str, Table] = {}
    overheads: list[float] = []
    begun, spent = time.perf_counter(), 0.0
    for number, shape in enumerate(shapes):
        key = hashlib.sha256(json.dumps([on.options, shape.key], sort_keys=True).encode()).hexdigest()
        held = _kept(cache, key, shape)
        if held is None and (not found or spent < seconds):
            progress(number, len(shapes), f"timing {shape}")
            held = _measured(shape, on)
            spent = time.perf_counter() - begun
            _keep(cache, key, held, f"timed {shape} on {on.runtime}")
        if held is not None:
            found[shape.key] = held[0]
            overheads.append(held[1])
    speed = statistics.median(found[shape.key].whole / _work(shape) for shape in shapes if shape.key in found)
    missing = {shape.key for shape in shapes} - set(found)
    found |= {shape.key: _scaled(shape, speed) for shape in shapes if shape.key in missing}
    progress(len(shapes), len(shapes), f"{counted(len(shapes), 'shapes')} timed")
    names = tuple(dict.fromkeys(layer.name for layer in layers if layer.shape.key in missing))
    return Tables(found, statistics.median(overheads), names, spent)


def monotone(ms: Array) -> Array:
    """The nearest table or nearly that never falls along an axis: isotonic regression of rows and columns in turn.

    (Dykstra and Robertson, An Algorithm for Isotonic Regression for Two or More Independent Variables, 1982, without
    its increments; what is left of a fall is then lifted.)
    """
    for _ in range(SWEEPS):
        for axis in (0, 1):
            ms = np.apply_along_axis(lambda line: np.asarray(isotonic_regression(line).x), axis, ms)
    return np.maximum.accumulate(np.maximum.accumulate(ms, 0), 1)


def _measured(shape: Shape, on: Clocked) -> tuple[Table, float]:
    """A table, and what a call takes that does nothing; all of its sizes take turns."""
    inputs, outputs = _counts(shape)
    with tempfile.TemporaryDirectory() as folder:
        models = {"": nothing(Path(folder) / "nothing.onnx")}
        for row in inputs:
            for column in outputs:
                name = f"{row}-{column}"
                given = column if shape.depthwise else row
                models[name] = layer_model(shape, given, column, on.quantize, Path(folder) / f"{name}.onnx")
        blocks = {}
        for name, model in models.items():
            backend = open_model(dataclasses.replace(model, runtime=on.runtime), threads=on.threads)
            blocks[name] = block_of(backend, sample_inputs(model.signature, 1), BLOCK_SECONDS)
        turns = interleave(blocks, rounds=FEWEST)
    overhead = turns[""].p50_ms
    ms = np.array([[turns[f"{row}-{column}"].p50_ms - overhead for column in outputs] for row in inputs])
    return Table(inputs, outputs, monotone(np.maximum(ms, LEAST_MS))), overhead


def _counts(shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Channels of both sides that a table has; of a depthwise convolution, whose sides are one, of the outputs."""
    outputs = shape.counts(1)
    return (outputs[-1:] if shape.depthwise else shape.counts(0)), outputs


def _work(shape: Shape) -> float:
    """Multiply-accumulates of a call, with all channels; strides and padding aside."""
    window = math.prod(shape.window.get("kernel_shape", (1,)))
    strides = 1 if shape.kind == "transposed" else math.prod(shape.window.get("strides", (1,)))
    return math.prod(shape.given) / strides * window * shape.inputs * shape.outputs / shape.groups


def _scaled(shape: Shape, speed: float) -> Table:
    inputs, outputs = _counts(shape)
    whole = _work(shape) * speed
    share = np.outer([1.0] if shape.depthwise else np.array(inputs) / shape.inputs, np.array(outputs) / shape.outputs)
    return Table(inputs, outputs, whole * share)


def _kept(cache: StageCache | None, key: str, shape: Shape) -> tuple[Table, float] | None:
    """What the cache has; None where it is not as it was written."""
    if cache is None:
        return None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "entry"
        if not cache.fetch(ENTRY, key, folder):
            return None
        try:
            return _read(read_json(folder / FILE), shape)
        except (OSError, ValueError, KeyError, TypeError):
            cache.drop(ENTRY, key)
            return None


def _read(told: Any, shape: Shape) -> tuple[Table, float]:
    """Raises KeyError, TypeError or ValueError where it is no table of such a shape."""
    inputs, outputs = _counts(shape)
    ms, overhead = np.array(told["ms"], np.float64), float(told["overhead_ms"])
    right = ms.shape == (len(inputs), len(outputs)) and bool(np.isfinite(ms).all() and (ms > 0).all())
    rises = right and all(bool((np.diff(ms, axis=axis) >= 0).all()) for axis in (0, 1))
    if not rises or not 0 <= overhead < math.inf:
        raise ValueError("it is no table")
    return Table(inputs, outputs, ms), overhead


def _keep(cache: StageCache | None, key: str, held: tuple[Table, float], did: str) -> None:
    if cache is None:
        return
    with tempfile.TemporaryDirectory() as name:
        told = {"ms": held[0].ms.tolist(), "overhead_ms": held[1]}
        (Path(name) / FILE).write_text(json.dumps(told), encoding="utf-8")
        (Path(name) / SAID).write_text(json.dumps({"did": did}), encoding="utf-8")
        cache.keep(ENTRY, key, Path(name))


def _place(counts: Sequence[int], at: Array | float) -> tuple[Any, Any]:
    """The number of the count below, and how far it is from there to the next, from 0 to 1."""
    held = np.asarray(counts, np.float64)
    if len(held) == 1:
        return np.zeros(np.shape(at), int), np.zeros(np.shape(at))
    where = np.clip(np.asarray(at, np.float64), held[0], held[-1])
    below = np.clip(np.searchsorted(held, where, "right") - 1, 0, len(held) - 2)
    return below, (where - held[below]) / (held[below + 1] - held[below])
