"""Which layer of a compressed file lost what, measured against the original on the same samples."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tempfile
import time
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from compress.artifact import Artifact
from compress.console.wording import AssumedWarning
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.evaluate.halves import halves
from compress.evaluate.judge import Judge, spread
from compress.evaluate.metrics import METRICS
from compress.evaluate.scoring import batch_for
from compress.formats.onnx.load import is_onnx
from compress.formats.onnx.outline import read_whole
from compress.formats.onnx.read import signature_of_onnx, vetted_onnx
from compress.formats.onnx.scope import name_nodes
from compress.jobs.exclusions import Errors, Gone, exclusions, gone, mends
from compress.jobs.original import Original, original
from compress.jobs.recipe import data_at
from compress.jobs.variants import in_few_bits, variants_of
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.file import save
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_file import OnnxFromFile
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.options import ExplainOptions
from compress.pipeline import Watcher
from compress.quantize.beside import Range, Tensor, beside
from compress.quantize.int8_onnx import plain
from compress.quantize.precision import LAYERS
from compress.quantize.shield import shield, unshield
from compress.quantize.weights_onnx import RECURRENT
from compress.runtime.backends import open_model
from compress.runtime.backends.bfloat16 import emulated
from compress.runtime.backends.onnxrt import is_emulated
from compress.runtime.measure import cores, onnx_layer_bytes

__all__ = ["Explanation", "Layer", "explain", "explained_within"]

BESIDE = 12  # times a file is run, besides once for each layer: tensors are compared, layers tried together


@dataclass(frozen=True)
class Layer:
    """What became of the squared error of the outputs with this layer alone as in the original: the share that went.

    Its interval is paired by sample; an end that the samples don't tell is None.
    """

    name: str
    kind: str
    share: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Explanation:
    """All that was found.

    Attributes:
        samples: that it was found on.
        error: squared error of the outputs, relative to their size; None where they are not finite.
        error_mended: the same, with the exclusions in float, all at once; None where none is recommended.
        layers: largest share first.
        tensors: in the order of the graph.
        ranges: of which values clip, most first.
        keep_float: names for `compress export --keep-float`, where samples that had no part in the choice prove them.
        tried: what was chosen, recommended or not.
        searched: whether there were layers in 8 bits to choose among.
        gone: of the error of those samples, the share that goes with it.
        unmatched: tensors or layers that could not be compared, with why.
        emptied: whether what was chosen is all that has weights in 8 bits, so that no INT8 would be left.
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
    tried: tuple[str, ...] = ()
    gone: Gone | None = None
    searched: bool = False
    emptied: bool = False

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
        first: the original, of torch or ONNX, or the folder of an artifact that the other was made of.
        second: an artifact's folder, or an ONNX file.
        options: of the data.
        watcher: is told how it goes on.

    Raises:
        ToolkitError: files or data that can't be compared.
    """
    if options.samples < 1 or options.rows < 1:
        raise RecipeError("can't explain on nothing", why="--samples and --rows are 1 at least", mend="leave them out")
    model = _second(first) if (first / "artifact.json").is_file() else original(first, options)
    other = _second(second)
    if _taken(model) != _taken(other) or _given(model) != _given(other):
        raise RecipeError(
            f"can't compare {second} with {first}",
            why=f"they are of other inputs or outputs: {_specs(other)} beside {_specs(model)}",
            mend="give the original that the file was made of",
        )
    data = spread(Dataset.open(data_at(options.data, first, model), model.signature), options.samples)
    with tempfile.TemporaryDirectory() as folder:
        other = _in_float(other, second, Path(folder))
        after = read_whole(other.path)
        name_nodes(after)
        before = _comparable(model, after, Path(folder), watcher)
        if _lost_blocks(second) and len(onnx_layer_bytes(before)) != len(onnx_layer_bytes(other.path)):
            raise RecipeError(
                f"can't compare the layers of {second} with those of {first}",
                why="whole blocks were dropped in between, and the names of what stands behind them are others' there",
                mend="give the float file that it was quantized from: it is kept as "
                f"{Path(second).name}.work/…-fold_onnx-…/model.onnx",
            )
        return _beside(model, before, after, other, data, Path(folder), watcher)


def _in_float(model: OnnxModel, named: Path, folder: Path) -> OnnxModel:
    """A file in BF16 as its emulation, whose tensors are float32 and have its names; others as they are."""
    if not is_emulated(model.path):
        return model
    told = f"{named} is in BF16, for which ONNX Runtime has no kernels on a CPU: it is explained as FP32 emulates it"
    warnings.warn(told, AssumedWarning, stacklevel=3)
    path = folder / "emulated.onnx"
    save(emulated(read_whole(model.path)), path)
    return OnnxModel(path, model.signature)


def _lost_blocks(path: Path) -> bool:
    """Whether an artifact's network has lost blocks on its way."""
    if not path.is_dir():
        return False
    rows = Artifact.load(path).stages
    return any(row.stage.startswith("drop_blocks") and row.details.get("blocks") for row in rows)


def _second(path: Path) -> OnnxModel:
    if path.is_dir():
        artifact = Artifact.load(path)
        # The file that was held against artifact.json; an engine's own can't be looked into.
        path = artifact.model_path if artifact.format == "onnx" else artifact.folder / "model.onnx"
        return OnnxModel(vetted_onnx(path), artifact.signature, processor=artifact.processor)
    if not is_onnx(path):
        raise RecipeError(f"can't look into {path}", why="it is no ONNX file", mend="give an artifact or an ONNX file")
    return OnnxModel(path, signature_of_onnx(path))


def _specs(model: Original) -> str:
    taken, given = (", ".join(map(str, specs)) for specs in (model.signature.inputs, model.signature.outputs))
    return f"{taken} → {given}"


def _taken(model: Original) -> set[tuple[str, str]]:
    return {(spec.name, spec.dtype) for spec in model.signature.inputs}


def _given(model: Original) -> set[str]:
    return {spec.name for spec in model.signature.outputs}


def explained_within(
    seconds: float, before: OnnxModel, other: OnnxModel, data: Dataset, folder: Path, watcher: Watcher
) -> Explanation | None:
    """Hold a quantized file against the float file that it was made of, if that takes no longer.

    Args:
        seconds: that it may take, by the time that two files take on the data.
        before: whose nodes have the names that they have in the other.
        other: the quantized file.
        data: of whose samples half choose, and half prove.
        folder: for what is tried.
        watcher: is told how it goes on.
    """
    begun = time.perf_counter()
    for model in (before, other):
        opened = open_model(model, threads=cores())
        for inputs, _ in data.batches(batch_for(opened, data)):
            opened.infer(inputs)
    each = (time.perf_counter() - begun) / 2
    after = read_whole(other.path)
    name_nodes(after)
    layers = {node.name for node in plain(before.path).graph.node} & {node.name for node in after.graph.node}
    if each * (len(layers) + BESIDE) > seconds:
        return None
    return _beside(before, before.path, after, other, data, folder, watcher)


def _beside(
    reference: Original,
    source: Path,
    after: ModelProto,
    other: OnnxModel,
    data: Dataset,
    folder: Path,
    watcher: Watcher,
) -> Explanation:
    """Hold a file against the one that it was made of, and its outputs against the original's."""
    unshield(after)
    before = plain(source)
    tensors, ranges, unmatched = beside((source, before), (other.path, after), data, watcher.started("compare"))
    judges = [Judge(open_model(reference, threads=cores()), half, METRICS["cosine"]) for half in _halves(data)]
    variants, kinds = variants_of(before, after, unmatched)
    path = folder / "tried.onnx"

    def errors(built: ModelProto) -> Errors:
        shield(built)
        save(built, path)
        opened = open_model(OnnxModel(path, other.signature), threads=cores())
        choosing, *proving = (judge.squared_errors(opened) for judge in judges)
        return Errors(choosing, proving[0] if proving else np.zeros(0))

    whole = errors(after)
    lost = int((~np.isfinite(whole.all)).sum())
    if lost:
        return Explanation(len(data), None, None, (), tensors, ranges, (), unmatched, lost)
    tick = watcher.started("explain")
    alone: dict[str, Errors] = {}
    for at, (name, build) in enumerate(variants.items(), 1):
        try:
            found = errors(build((name,)))
            if np.isfinite(found.all).all():
                alone[name] = found
            else:
                unmatched[name] = "with it alone in float the outputs are not finite"
        except (StageError, ValueError):  # of other shapes than its neighbours, or a graph that can't be mixed
            unmatched[name] = "alone in float it does not fit between the other's layers (pruned, or weights in INT8)"
        tick(at, len(variants), "layers put back")
    shares = {name: gone(whole.all, found.all) for name, found in alone.items()}
    layers = [Layer(name, kinds[name], each.share, each.low, each.high) for name, each in shares.items()]
    layers.sort(key=lambda layer: -layer.share)
    known = Explanation(len(data), float(whole.all.mean()), None, tuple(layers), tensors, ranges, (), unmatched)
    if len(judges) < 2 or not alone or not in_few_bits(after):
        return known
    tried, proven, mixed = exclusions(alone, whole, lambda names: errors(variants[names[0]](names)))
    if proven is None or mixed is None or not mends(proven):
        return dataclasses.replace(known, searched=True, tried=tried, gone=proven)
    mended = float(mixed.all.mean())
    if _layers(before, variants) <= set(tried):  # an export that keeps them all has nothing to quantize
        return dataclasses.replace(known, searched=True, error_mended=mended, tried=tried, gone=proven, emptied=True)
    return dataclasses.replace(known, searched=True, keep_float=tried, error_mended=mended, tried=tried, gone=proven)


def _layers(before: ModelProto, units: Collection[str]) -> set[str]:
    """Those of some nodes that have weights."""
    weights = {tensor.name for tensor in before.graph.initializer}
    kinds = (*LAYERS, *RECURRENT, "Gather")
    return {
        node.name
        for node in before.graph.node
        if node.name in units and node.op_type in kinds and weights.intersection(node.input[:2])
    }


def _halves(data: Dataset) -> tuple[Dataset, ...]:
    """Samples that choose, and those that prove; the data where it has no two samples that differ."""
    try:
        return halves(data)
    except RecipeError:
        return (data,)


def _comparable(model: Original, after: ModelProto, folder: Path, watcher: Watcher) -> Path:
    """The original as an export makes it, so that nodes and tensors have the names of the compressed file."""
    quantized = in_few_bits(after)
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


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
