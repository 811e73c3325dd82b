"""Which layer of a compressed file lost what, measured against the original on the same samples."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper

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
from compress.quantize.beside import Range, Tensor, beside
from compress.quantize.int8_onnx import plain
from compress.quantize.put_back import Mixed, UnmatchedError
from compress.quantize.shield import shield, unshield
from compress.runtime.backends import open_model
from compress.runtime.measure import cores

__all__ = ["Explanation", "Layer", "explain"]

WORTH = 0.02  # of the output's error, that a layer has to take with it to stand among the exclusions
MOST = 5  # exclusions
OTHER = 0.2  # of their size, that weights in 8 bits are away from the original's: rounding alone is 0.01 to 0.05
LINKS = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class Layer:
    """What became of the squared error of the outputs with this layer alone as in the original: the share that went."""

    name: str
    kind: str
    share: float


@dataclass(frozen=True)
class Explanation:
    """All that was found.

    Attributes:
        samples: that it was found on.
        error: squared error of the outputs, relative to their size; None where they are not finite.
        error_mended: the same, with the exclusions in float, all at once.
        layers: largest share first.
        tensors: in the order of the graph.
        ranges: of which values clip, most first.
        keep_float: names for `compress export --keep-float`.
        unmatched: tensors or layers that could not be compared, with why.
        not_finite: samples for which an output is NaN or infinite where the original's is not, or is another.
    """

    samples: int
    error: float | None
    error_mended: float | None
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    ranges: tuple[Range, ...]
    keep_float: tuple[str, ...]
    unmatched: dict[str, str]
    not_finite: int = 0

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
    unshield(after)
    source = _comparable(model, after, folder, watcher)
    before = plain(source)
    tensors, ranges, unmatched = beside((source, before), (other.path, after), data, watcher.started("compare"))
    judge = Judge(open_model(model, threads=cores()), data, METRICS["cosine"])
    variants, kinds = _variants(before, after, unmatched)
    path = folder / "tried.onnx"

    def errors(built: ModelProto) -> np.ndarray[Any, Any]:
        shield(built)
        onnx.save(built, path)
        return judge.squared_errors(open_model(OnnxModel(path, other.signature), threads=cores()))

    def error(built: ModelProto) -> float:
        return float(errors(built).mean())

    all_of_it = errors(after)
    lost = int((~np.isfinite(all_of_it)).sum())
    if lost:
        return Explanation(len(data), None, None, (), tensors, ranges, (), unmatched, lost)
    whole = float(all_of_it.mean())
    tick = watcher.started("explain")
    layers = []
    for at, (name, build) in enumerate(variants.items(), 1):
        try:
            share = 1 - error(build((name,))) / whole if whole else 0.0
            if np.isfinite(share):
                layers.append(Layer(name, kinds[name], share))
            else:
                unmatched[name] = "with it alone in float the outputs are not finite"
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
    was, now = _weights(before), _weights(after)
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


def _weights(model: ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def _dequantized(given: list[np.ndarray[Any, Any]], axis: int) -> np.ndarray[Any, Any]:
    levels, scale, *zero = (each.astype(np.float64) for each in given)
    shape = [-1 if at == axis % levels.ndim else 1 for at in range(levels.ndim)] if scale.size > 1 else [1]
    made: np.ndarray[Any, Any] = (levels - (zero[0].reshape(shape) if zero else 0.0)) * scale.reshape(shape)
    return made


def _weights_back(before: ModelProto, after: ModelProto, unmatched: dict[str, str]) -> dict[str, Build]:
    """For float files: layers whose weights are others now."""
    was, now = _weights(before), _weights(after)
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


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
