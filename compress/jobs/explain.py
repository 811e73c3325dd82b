"""Which layer of a compressed file lost what, measured against the original on the same samples."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from compress.artifact import Artifact
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.evaluate.judge import Judge, spread
from compress.evaluate.metrics import METRICS
from compress.formats.onnx.load import is_onnx
from compress.formats.onnx.read import signature_of_onnx, vetted_onnx
from compress.formats.onnx.scope import name_nodes
from compress.jobs.original import Original, original
from compress.jobs.recipe import data_at
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_file import OnnxFromFile
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.options import ExplainOptions
from compress.pipeline import Watcher
from compress.quantize.calibrate import batch_for
from compress.quantize.int8_onnx import plain
from compress.quantize.put_back import Mixed, UnmatchedError
from compress.runtime.backends import open_model
from compress.runtime.backends.onnxrt import session
from compress.runtime.measure import cores

__all__ = ["Explanation", "Layer", "Range", "Tensor", "explain"]

WORTH = 0.02  # of the output's error, that a layer has to take with it to stand among the exclusions
MOST = 5  # exclusions
OTHER = 0.2  # of their size, that weights in 8 bits are away from the original's: rounding alone is 0.01 to 0.05
QUANTIZED = {TensorProto.UINT8: (0, 255), TensorProto.INT8: (-128, 127), TensorProto.UINT16: (0, 65535)}
LINKS = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class Tensor:
    """A tensor that both have: its signal to noise in dB (None where they are equal), channels that became constant."""

    name: str
    snr_db: float | None
    dead_channels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layer:
    """What became of the squared error of the outputs with this layer alone as in the original: the share that went."""

    name: str
    kind: str
    share: float


@dataclass(frozen=True)
class Range:
    """What a QuantizeLinear holds, and the share of its values that lie beyond."""

    tensor: str
    low: float
    high: float
    clipped: float


@dataclass(frozen=True)
class Explanation:
    """All that was found.

    Attributes:
        samples: that it was found on.
        error: squared error of the outputs, relative to their size.
        error_mended: the same, with the exclusions in float, all at once.
        layers: largest share first.
        tensors: in the order of the graph.
        ranges: of which values clip, most first.
        keep_float: names for `compress export --keep-float`.
        unmatched: tensors or layers that could not be compared, with why.
    """

    samples: int
    error: float
    error_mended: float | None
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    ranges: tuple[Range, ...]
    keep_float: tuple[str, ...]
    unmatched: dict[str, str]

    @property
    def flags(self) -> str:
        """What to add to the `compress export` that made the file; "" where no exclusion mends enough."""
        return "--keep-float " + shlex.join(self.keep_float) if self.keep_float else ""

    @property
    def recipe(self) -> str:
        """The same as a line of a recipe for `compress run`."""
        return f"keep_float = [{', '.join(map(_quoted, self.keep_float))}]\n" if self.keep_float else ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**dataclasses.asdict(self), "flags": self.flags, "recipe": self.recipe}


def explain(first: Path, second: Path, options: ExplainOptions, watcher: Watcher) -> Explanation:
    """Hold a compressed ONNX file against its original, layer by layer.

    Args:
        first: the original, of torch or ONNX.
        second: an artifact's folder, or an ONNX file.
        options: of the data.
        watcher: is told how it goes on.

    Raises:
        ToolkitError: files or data that can't be compared.
    """
    if options.samples < 1 or options.rows < 1:
        raise RecipeError("can't explain on nothing", why="--samples and --rows are 1 at least", mend="leave them out")
    model = original(first, options)
    other = _second(second)
    if _taken(model) != _taken(other) or _given(model) != _given(other):
        raise RecipeError(
            f"can't compare {second} with {first}",
            why=f"they are of other inputs or outputs: {', '.join(map(str, other.signature.inputs))} beside "
            f"{', '.join(map(str, model.signature.inputs))}",
            mend="give the original that the file was made of",
        )
    data = spread(Dataset.open(data_at(options.data, first, model), model.signature), options.samples)
    with tempfile.TemporaryDirectory() as folder:
        return _explained(model, other, data, Path(folder), watcher)


def _second(path: Path) -> OnnxModel:
    if path.is_dir():
        artifact = Artifact.load(path)
        return OnnxModel(vetted_onnx(artifact.folder / "model.onnx"), artifact.signature)
    if not is_onnx(path):
        raise RecipeError(f"can't look into {path}", why="it is no ONNX file", mend="give an artifact or an ONNX file")
    return OnnxModel(path, signature_of_onnx(path))


def _taken(model: Original) -> set[tuple[str, str]]:
    return {(spec.name, spec.dtype) for spec in model.signature.inputs}


def _given(model: Original) -> set[str]:
    return {spec.name for spec in model.signature.outputs}


def _explained(model: Original, other: OnnxModel, data: Dataset, folder: Path, watcher: Watcher) -> Explanation:
    after = onnx.load(other.path)
    name_nodes(after)
    before = plain(_comparable(model, after, folder, watcher))
    unmatched: dict[str, str] = {}
    tensors, ranges = _observed(before, after, data, folder, unmatched, watcher)
    judge = Judge(open_model(model, threads=cores()), data, METRICS["cosine"])
    variants, kinds = _variants(before, after, unmatched)
    path = folder / "tried.onnx"

    def error(built: ModelProto) -> float:
        onnx.save(built, path)
        return judge.squared_error(open_model(OnnxModel(path, other.signature), threads=cores()))

    whole = error(after)
    tick = watcher.started("explain")
    layers = []
    for at, (name, build) in enumerate(variants.items(), 1):
        try:
            share = 1 - error(build((name,))) / whole if whole else 0.0
            layers.append(Layer(name, kinds[name], share))
        except (StageError, ValueError):  # of other shapes than its neighbours, or a graph that can't be mixed
            unmatched[name] = "alone in float it does not fit between the other's layers (pruned, or weights in INT8)"
        tick(at, len(variants), "layers put back")
    layers.sort(key=lambda layer: -layer.share)
    quantized = any(node.op_type in LINKS for node in after.graph.node)
    keep = tuple(layer.name for layer in layers[:MOST] if layer.share >= WORTH) if quantized else ()
    mended = error(variants[keep[0]](keep)) if keep else None
    if mended is not None and mended >= whole:
        keep, mended = (), None
    return Explanation(len(data), whole, mended, tuple(layers), tensors, ranges, keep, unmatched)


def _comparable(model: Original, after: ModelProto, folder: Path, watcher: Watcher) -> Path:
    """The original as an export makes it, so that nodes and tensors have the names of the compressed file."""
    quantized = any(node.op_type in LINKS for node in after.graph.node)
    if isinstance(model, OnnxModel):
        named = {node.name for node in onnx.load(model.path, load_external_data=False).graph.node}
        if not quantized and named & {node.name for node in after.graph.node}:
            return model.path
    given: Any = model
    stages = (OnnxFromTorch() if isinstance(model, TorchModel) else OnnxFromFile(), FoldOnnx(unfuse=True))
    for stage in stages:
        place = folder / stage.name
        place.mkdir()
        given = stage.run(given, place, watcher.started(stage.name)).model
    path: Path = given.path
    return path


Build = Callable[[tuple[str, ...]], ModelProto]


def _variants(
    before: ModelProto, after: ModelProto, unmatched: dict[str, str]
) -> tuple[dict[str, Build], dict[str, str]]:
    """By layer, what builds the compressed graph with some layers as in the original."""
    kinds = {node.name: node.op_type for node in before.graph.node}
    if any(node.op_type in LINKS for node in after.graph.node):
        if not {node.name for node in after.graph.node} & set(kinds):
            unmatched["layers"] = "no node has the name of one of the original's: none can be put back"
            return {}, kinds
        signed = {
            t.data_type for t in after.graph.initializer for n in after.graph.node
            if n.op_type == "QuantizeLinear" and len(n.input) > 2 and t.name == n.input[2]
        }  # fmt: skip
        try:
            mixed = Mixed(before, after, rounds_outputs=TensorProto.INT8 not in signed)
        except UnmatchedError as err:
            unmatched["layers"] = f"{err}, as in a smoothed file: none can be put back by itself"
            return {}, kinds
        for name, off in _other_weights(before, after).items():
            unmatched[name] = f"its weights are not the original's in 8 bits (off by {off:.0%}): smoothed, or trained"
        return dict.fromkeys((name for name in mixed.units if name not in unmatched), mixed.model), kinds
    return _weights_back(before, after, unmatched), kinds


def _other_weights(before: ModelProto, after: ModelProto) -> dict[str, float]:
    """Layers whose restored weights differ from the original's by more than rounding does: by name, by how much."""
    was = {tensor.name: numpy_helper.to_array(tensor) for tensor in before.graph.initializer}
    now = {tensor.name: numpy_helper.to_array(tensor) for tensor in after.graph.initializer}
    there = {node.name: node for node in after.graph.node}
    restored = {node.output[0]: node for node in after.graph.node if node.op_type == "DequantizeLinear"}
    found: dict[str, float] = {}
    for node in before.graph.node:
        for its, mine in zip(node.input, there[node.name].input if node.name in there else (), strict=False):
            link = restored.get(mine)
            if link is None or its not in was or link.input[0] not in now or was[its].ndim < 2:
                continue
            axis = next((each.i for each in link.attribute if each.name == "axis"), 1)
            values = _dequantized([now[name] for name in link.input if name], axis)
            if values.shape == was[its].shape:
                off = float(np.linalg.norm(values - was[its]) / (np.linalg.norm(was[its]) or 1.0))
                if off > OTHER:
                    found[node.name] = off
    return found


def _dequantized(given: list[np.ndarray[Any, Any]], axis: int) -> np.ndarray[Any, Any]:
    levels, scale, *zero = (each.astype(np.float64) for each in given)
    shape = [-1 if at == axis % levels.ndim else 1 for at in range(levels.ndim)] if scale.size > 1 else [1]
    made: np.ndarray[Any, Any] = (levels - (zero[0].reshape(shape) if zero else 0.0)) * scale.reshape(shape)
    return made


def _weights_back(before: ModelProto, after: ModelProto, unmatched: dict[str, str]) -> dict[str, Build]:
    """For float files: layers whose weights are others now."""
    was = {tensor.name: numpy_helper.to_array(tensor) for tensor in before.graph.initializer}
    now = {tensor.name: numpy_helper.to_array(tensor) for tensor in after.graph.initializer}
    old = {node.name: node for node in before.graph.node}
    changed: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for node in after.graph.node:
        if node.name not in old or old[node.name].op_type != node.op_type:
            continue
        for mine, its in zip(node.input, old[node.name].input, strict=False):
            if mine in now and its in was:
                if now[mine].shape != was[its].shape:
                    unmatched[node.name] = f"its weights are {list(now[mine].shape)}, {list(was[its].shape)} before"
                elif not np.array_equal(now[mine], was[its]):
                    changed.setdefault(node.name, {})[mine] = was[its]

    def build(names: tuple[str, ...]) -> ModelProto:
        made = ModelProto()
        made.CopyFrom(after)
        values = {name: array for layer in names for name, array in changed[layer].items()}
        for tensor in made.graph.initializer:
            if tensor.name in values:
                tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
        return made

    return dict.fromkeys((name for name in changed if name not in unmatched), build)


class _Seen:
    """Sums over samples of one tensor of both."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0
        self.ends: list[list[np.ndarray[Any, Any]]] = [[], []]

    def add(self, was: np.ndarray[Any, Any], now: np.ndarray[Any, Any]) -> None:
        wide = was.astype(np.float64)
        self.signal += float(np.square(wide).sum())
        self.noise += float(np.square(now - wide).sum())
        for at, values in enumerate((was, now)):
            axis = 1 if values.ndim in (2, 4, 5) else values.ndim - 1
            flat = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1) if values.ndim > 1 else values[None]
            low, high = flat.min(axis=1), flat.max(axis=1)
            ends = self.ends[at]
            self.ends[at] = [np.minimum(ends[0], low), np.maximum(ends[1], high)] if ends else [low, high]

    def result(self, name: str) -> Tensor:
        (was_low, was_high), (low, high) = self.ends
        dead = np.flatnonzero((low == high) & (was_low < was_high))
        snr = 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else None
        return Tensor(name, snr, tuple(map(int, dead)))


def _observed(
    before: ModelProto, after: ModelProto, data: Dataset, folder: Path, unmatched: dict[str, str], watcher: Watcher
) -> tuple[tuple[Tensor, ...], tuple[Range, ...]]:
    """Both run side by side, a few samples at a time."""
    made = {name: node.op_type for node in after.graph.node for name in node.output}
    quantizers, drawn = _quantizers(after), _drawn(before, after)
    alike = [(name, node.op_type) for node in before.graph.node for name in node.output if name]
    common = [name for name, kind in alike if made.get(name) in (kind, "DequantizeLinear") or name in drawn]
    unmatched |= {name: "the other has no such tensor" for name, _ in alike if name not in common}
    ours, theirs = folder / "before.onnx", folder / "after.onnx"
    fed = {value.name for value in after.graph.input}
    _shown(before, common, ours)
    _shown(after, list(dict.fromkeys([*common, *(n for n in quantizers if n not in fed)])), theirs)
    left, right = session(ours, cores()), session(theirs, cores())
    floats = {value.name for value in left.get_outputs() if value.type == "tensor(float)"}
    names = [name for name in dict.fromkeys(common) if name in floats]
    asked = list(dict.fromkeys([*names, *(name for name in quantizers if name not in fed)]))
    seen = {name: _Seen() for name in names}
    beyond = {name: [0, 0] for name in quantizers}
    size, tick, done = batch_for(ours, names, data), watcher.started("compare"), 0
    for inputs, _ in data.batches(size):
        was = dict(zip(names, left.run(names, inputs), strict=True)) if names else {}
        now = dict(zip(asked, right.run(asked, inputs), strict=True)) if asked else {}
        for name in names:
            if was[name].shape == now[name].shape:
                seen[name].add(was[name], np.clip(now[name], *drawn.get(name, (-np.inf, np.inf))))
            else:
                unmatched[name] = f"it is {list(now[name].shape)}, {list(was[name].shape)} before"
        for name, (low, high, step) in quantizers.items():
            values = now[name] if name in now else inputs[name]
            values = np.clip(values, *drawn.get(name, (-np.inf, np.inf)))
            beyond[name][0] += int(((values < low - step / 2) | (values > high + step / 2)).sum())
            beyond[name][1] += values.size
        done += len(next(iter(inputs.values())))
        tick(done, len(data), "samples")
    ranges = [Range(n, quantizers[n][0], quantizers[n][1], out / total) for n, (out, total) in beyond.items() if out]
    tensors = tuple(seen[name].result(name) for name in names if seen[name].ends[0] and name not in unmatched)
    return tensors, tuple(sorted(ranges, key=lambda each: -each.clipped))


def _shown(model: ModelProto, names: list[str], path: Path) -> None:
    made = ModelProto()
    made.CopyFrom(model)
    there = {value.name for value in made.graph.output}
    known = {value.name: value for value in made.graph.value_info}
    made.graph.output.extend(known.get(n) or helper.make_empty_tensor_value_info(n) for n in names if n not in there)
    onnx.save(made, path)


def _drawn(before: ModelProto, after: ModelProto) -> dict[str, tuple[float, float]]:
    """Bounds of a Relu or a Clip that the quantizer drew into the range of what it takes: they cut on purpose."""
    values = {t.name: float(numpy_helper.to_array(t)) for t in before.graph.initializer if not t.dims}
    there = {node.name: node for node in after.graph.node}
    makers = {name: node.name for node in before.graph.node for name in node.output}
    found: dict[str, tuple[float, float]] = {}
    for node in before.graph.node:
        if node.op_type in ("Relu", "Clip") and node.name not in there and makers.get(node.input[0]) in there:
            bounds = [*node.input[1:], "", ""] if node.op_type == "Clip" else ["", ""]
            low = 0.0 if node.op_type == "Relu" else values.get(bounds[0], -math.inf)
            high = values.get(bounds[1], math.inf)
            found |= dict.fromkeys(there[makers[node.input[0]]].output, (low, high))
    return found


def _quantizers(model: ModelProto) -> dict[str, tuple[float, float, float]]:
    """Lowest, highest and step of each activation's range, where one scale is in the file."""
    values = {tensor.name: tensor for tensor in model.graph.initializer}
    found: dict[str, tuple[float, float, float]] = {}
    for node in model.graph.node:
        if node.op_type != "QuantizeLinear" or len(node.input) < 3 or not {*node.input[1:3]} <= set(values):
            continue
        scale, zero = (numpy_helper.to_array(values[name]) for name in node.input[1:3])
        ends = QUANTIZED.get(values[node.input[2]].data_type)
        if scale.size == 1 and ends is not None:
            step, at = float(scale.ravel()[0]), int(zero.ravel()[0])
            found[node.input[0]] = ((ends[0] - at) * step, (ends[1] - at) * step, step)
    return found


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
