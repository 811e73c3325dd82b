"""From options to the list of stages that they stand for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

from compress.data.dataset import Dataset
from compress.data.reading import arrays_of
from compress.data.sizes import sized_by
from compress.evaluate.metrics import METRICS, Metric
from compress.formats.onnx.load import beside, is_onnx
from compress.jobs.source import DAMAGED
from compress.jobs.timed_on import timed_on
from compress.jobs.together import refuse_together
from compress.model import OnnxModel, TorchModel
from compress.model.infer import proven
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_file import OnnxFromFile
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.onnx_export.torch_from_onnx import TorchFromOnnx, taken_back
from compress.options import (
    CompressOptions,
    EngineOptions,
    ExportOptions,
    FinetuneOptions,
    SourceOptions,
)
from compress.options.asked import drops, is_static, prunes, repairs
from compress.options.training import TrainingOptions
from compress.options.user_code import is_code
from compress.prune.drop_blocks import DropBlocks
from compress.prune.latency.by_latency import ByLatency
from compress.prune.latency.tables import Clocked
from compress.prune.prune_channels import PruneChannels
from compress.prune.prune_to_budget import PruneToBudget
from compress.prune.repair_channels import RepairChannels
from compress.prune.sensitivity import Sensitivity
from compress.quantize.attends import attends
from compress.quantize.half.half_onnx import HalfOnnx
from compress.quantize.qat.train_quantized import TrainQuantized, shorter
from compress.quantize.quantize_faster import QuantizeFaster
from compress.quantize.quantize_int4 import QuantizeInt4
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.quantize_within import QuantizeWithin
from compress.quantize.smooth_onnx import SmoothOnnx
from compress.runtime.machine import int8_saturates
from compress.stage import Stage
from compress.storage.hashing import code_files
from compress.storage.stage_cache import StageCache
from compress.tensorrt.profiles import ranges_of
from compress.training.finetune import Finetune
from compress.training.frozen import Use, refuse_untaught

__all__ = [
    "code_of",
    "data_at",
    "find_data",
    "inputs_of",
    "labelled_of",
    "sources_of",
    "stages_for",
    "tables_in",
    "training_of",
    "with_sizes",
]

# Options that name what is read.
INPUTS = ("eval", "selection", "calibration", "finetune", "validation", "data", "teacher", "sensitivity")
# Of the epochs that --epochs names, for training with fake quantization: the weights are near their place already.
QAT_SHARE = 0.25
QAT_RATE = 0.1


def find_data(source: str, checkpoint: Path) -> str:
    """The path as it is, or, if there is nothing there, beside the checkpoint."""
    beside = checkpoint.parent / source
    return str(beside) if not Path(source).exists() and beside.exists() else source


_Model = TypeVar("_Model", bound=TorchModel | OnnxModel)


def with_sizes(model: _Model, checkpoint: Path, sources: Mapping[str, str | None], dims: Sequence[str] = ()) -> _Model:
    """A model with a representative size for whatever varies: from the data, where neither user nor file gave one.

    Args:
        model: as it was loaded.
        checkpoint: data is looked for beside it, too.
        sources: of data, by what it is for, in the order in which they are asked.
        dims: ranges of an engine's dimensions; what is best for it goes before everything else.

    Raises:
        DatasetError, SignatureError: data that can't be used, or sizes that the model does not run at.
    """
    best = {name: sizes[1] for name, sizes in ranges_of(dims).items() if name not in model.signature.batches}
    if best:
        model = dataclasses.replace(model, signature=proven(model.module, model.signature.sized(best, "from --dims")))
    for use, source in sources.items():
        if source is not None and model.signature.unsaid:
            model = sized_by(model, Dataset.open(data_at(source, checkpoint, model), model.signature), use)
    return model


def data_at(source: str, checkpoint: Path, model: TorchModel | OnnxModel) -> str:
    """What `Dataset.open` takes for a source: of texts and images what was made of them for the model."""
    return arrays_of(find_data(source, checkpoint), model.processor)


def sources_of(options: CompressOptions, checkpoint: Path, model: TorchModel | OnnxModel) -> dict[str, str]:
    """Where the data of each option lies, by the option's name."""
    names = ("eval", "selection", "finetune", "validation", "calibration")
    given = {name: source for name in names if (source := getattr(options, name)) is not None}
    return {name: data_at(source, checkpoint, model) for name, source in given.items()}


def inputs_of(options: SourceOptions, checkpoint: Path, recipe: Path | None = None) -> list[Path]:
    """Files and folders that a run reads: the checkpoint, what its options name, code too, and the recipe."""
    named = [getattr(options, name, None) for name in INPUTS]
    sources = [find_data(str(source), checkpoint) for source in named if source is not None]
    found = [checkpoint, *map(Path, sources), *(path for source in code_of(options) for path in code_files(source))]
    with suppress(*DAMAGED):  # a damaged file: who reads it says so
        found += beside(checkpoint) if is_onnx(checkpoint) else []
    return [path for path in (*found, *([] if recipe is None else [recipe])) if path.exists()]


def code_of(options: SourceOptions) -> list[str]:
    """What options name of the user's code, as `package.module:name`."""
    named = [getattr(options, name, None) for name in ("model", "metric", *INPUTS)]
    return list(dict.fromkeys(str(source) for source in named if source is not None and is_code(str(source))))


def stages_for(
    options: ExportOptions,
    model: TorchModel | OnnxModel,
    checkpoint: Path,
    judged: tuple[Dataset, Metric] | None = None,
    sensitivity: Sensitivity | None = None,
) -> list[Stage]:
    """The list of stages, with their data opened and checked.

    Args:
        options: of the run.
        model: what it starts from, and what recovery is taught by.
        checkpoint: data is looked for beside it, too.
        judged: evaluation data to choose by, and the metric that a largest drop is in; the export is proven on data,
            too.
        sensitivity: what the options name, where it has been read.

    Raises:
        RecipeError: options that don't go together.
        DatasetError, SignatureError: data that can't be used.
    """
    refuse_together(options, judged=judged is not None)

    def data(source: str | None) -> Dataset | None:
        return None if source is None else Dataset.open(data_at(source, checkpoint, model), model.signature)

    training, calibration = data(options.finetune), data(options.calibration)
    validation = data(options.validation) if training is not None else None
    typical = next((held for held in (calibration, judged and judged[0], training) if held is not None), None)
    precision = _precision(options, model, calibration, judged, typical)
    seen = "" if judged is None else judged[0].sha256
    recovery = None
    if training is not None:
        teacher = model if isinstance(model, TorchModel) else taken_back(model)  # which answers as the file does
        uses: dict[Use, bool] = {"train": True, "taylor": options.importance == "taylor", "qat": options.int8 == "qat"}
        for use in (use for use, asked in uses.items() if asked):
            refuse_untaught(teacher.module, use)
        recovery = _finetune(options, teacher, training, validation, seen)
    samples = training if calibration is None else calibration  # a training that is added proves the same removal
    if options.sensitivity is not None and sensitivity is None:
        sensitivity = Sensitivity.load(options.sensitivity)
    pruning = _pruning(options, training, samples, recovery, precision, sensitivity, calibration)
    taken = isinstance(model, OnnxModel) and _in_torch(options, model)
    layers: list[Stage] = [TorchFromOnnx(typical)] if taken else []
    stages = [*layers, *pruning, *_qat(options, recovery, precision), *precision]
    return [*stages, *_engine(options)]


def tables_in(stages: Sequence[Stage], cache: StageCache | None) -> list[Stage]:
    """Stages whose latencies of layers are looked for, and kept, in a cache."""
    return [_with_tables(stage, cache) for stage in stages]


def _with_tables(stage: Stage, cache: StageCache | None) -> Stage:
    if isinstance(stage, PruneToBudget):
        prune = _with_tables(stage.prune, cache)
        assert isinstance(prune, PruneChannels)  # noqa: S101  it was
        return dataclasses.replace(stage, prune=prune)
    if isinstance(stage, PruneChannels) and stage.latency is not None:
        return dataclasses.replace(stage, latency=dataclasses.replace(stage.latency, cache=cache))
    return stage


def _in_torch(options: ExportOptions, model: TorchModel | OnnxModel) -> bool:
    """Whether anything is done to a network of torch: an ONNX file is taken back only to be pruned or trained."""
    return isinstance(model, TorchModel) or prunes(options) or drops(options) or options.finetune is not None


def _engine(options: ExportOptions) -> list[Stage]:
    if options.to == "onnx":
        return []
    from compress.tensorrt.engine_from_onnx import EngineFromOnnx

    own = {field.name: getattr(options, field.name) for field in dataclasses.fields(EngineOptions)}
    return [EngineFromOnnx(EngineOptions(**own))]


def _pruning(
    options: ExportOptions,
    training: Dataset | None,
    samples: Dataset | None,
    recovery: Finetune | None,
    precision: list[Stage],
    sensitivity: Sensitivity | None,
    calibration: Dataset | None,
) -> list[Stage]:
    kind, limit = _budget(options)
    pruned = options.prune is not None or kind is not None
    rounds = options.rounds if pruned else 1
    curves: dict[str, tuple[tuple[float, float], ...]] = {}
    if pruned and sensitivity is not None:
        curves = sensitivity.curves
    fraction = 0.5 if options.prune is None else options.prune
    tail = tuple(_whole(stage) for stage in precision)
    prune = PruneChannels(
        # The same share of what is left in each round.
        1 - (1 - fraction) ** (1 / rounds) if rounds > 1 and 0 < fraction < 1 else fraction,
        options.importance,
        options.seed,
        options.round_to,
        scope=options.scope,
        data=training if options.importance == "taylor" else None,
        samples=samples,
        curves=curves,
        labelled=labelled_of(options),
        shared=rounds > 1,
        calibration=calibration if options.importance == "obs" else None,
        latency=_by_latency(options, tail) if options.allocate == "latency" else None,
    )
    pruning: PruneChannels | PruneToBudget | None = prune if pruned else None
    if kind is not None and limit is not None:
        pruning = PruneToBudget(prune, kind, limit, tail, options.threads, timed_on(options))
    stages: list[Stage] = []
    if options.drop_blocks is not None and calibration is not None:
        weighed = pruning if options.drop_blocks == "auto" else None
        stages.append(DropBlocks(options.drop_blocks, calibration, repairs(options), weighed, samples))
        stages += [RepairChannels(calibration)] if repairs(options) else []
    for _ in range(rounds):
        if pruning is not None:
            stages.append(pruning)
        if pruned and repairs(options) and calibration is not None:
            stages.append(RepairChannels(calibration))
        if recovery is not None:
            stages.append(recovery)
    return stages


def _by_latency(options: ExportOptions, tail: tuple[Stage, ...]) -> ByLatency:
    """What times layers, as the result will run."""
    quantize = next((stage for stage in tail if isinstance(stage, QuantizeOnnx)), None)
    return ByLatency(Clocked(timed_on(options), options.threads, quantize), tail)


def _whole(stage: Stage) -> Stage:
    """A stage that chooses what to quantize, as one that takes all, and one that chooses how, as one that rounds."""
    if isinstance(stage, QuantizeInt4):
        return dataclasses.replace(stage, calibration=None)
    return stage.quantize if isinstance(stage, QuantizeWithin | QuantizeFaster) else stage


def _qat(options: ExportOptions, recovery: Finetune | None, precision: list[Stage]) -> list[Stage]:
    """Training as the stages after it will quantize."""
    if options.int8 != "qat" or recovery is None:
        return []
    last = [_whole(stage) for stage in precision]
    quantize = next(stage for stage in last if isinstance(stage, QuantizeOnnx))
    unfuse = any(stage.unfuse for stage in precision if isinstance(stage, FoldOnnx))
    return [TrainQuantized(shorter(recovery, options.epochs, QAT_SHARE, QAT_RATE), options.target, quantize, unfuse)]


def _finetune(
    options: ExportOptions, model: TorchModel, training: Dataset, validation: Dataset | None, seen: str
) -> Finetune:
    asked = training_of(options)
    asked = dataclasses.replace(asked, epochs=math.ceil(options.epochs / options.rounds))
    return Finetune(training, model, asked, options.seed, validation, seen, labelled_of(options))


def labelled_of(options: CompressOptions | FinetuneOptions) -> str | None:
    """The output that labels teach, where the user says so: what is judged, unless that is against the original's."""
    metric = METRICS.get(options.metric or "")
    return None if metric is not None and metric.compares else options.judge


def training_of(options: TrainingOptions) -> TrainingOptions:
    """These alone, of options that have more."""
    return TrainingOptions(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(TrainingOptions)}
    )


def _precision(
    options: ExportOptions,
    model: TorchModel | OnnxModel,
    calibration: Dataset | None,
    judged: tuple[Dataset, Metric] | None,
    typical: Dataset | None,
) -> list[Stage]:
    stages: list[Stage] = [
        OnnxFromTorch(typical) if _in_torch(options, model) else OnnxFromFile(typical),
        FoldOnnx(unfuse=options.target == "cpu" and options.precision == "fp32"),
    ]
    if calibration is not None and options.int8 != "qat":  # a training finds its own scales
        by_default = options.smooth is None and is_static(options) and options.target == "cpu"
        if options.smooth or (by_default and attends(model)):
            saturates = options.target == "cpu" and int8_saturates()
            alone = not options.smooth
            stages.append(SmoothOnnx(calibration, scalings=True, reduce_range=saturates, attention_only=alone))
    if options.int8 is not None:
        mode: Literal["static", "dynamic", "weights"] = "weights" if options.int8 == "weights" else "dynamic"
        quantize = QuantizeOnnx(
            "static" if is_static(options) else mode,
            calibration if is_static(options) else None,
            options.calibrator,
            int8_saturates(),
            target=options.target,
            exclude=options.keep_float,
        )
        if options.max_drop is not None and judged is not None and quantize.mode == "static":
            confidence = options.confidence if options.budget_by == "interval" else None
            faster = options.threads if options.int8 == "auto" else None
            stages.append(QuantizeWithin(quantize, model, *judged, options.max_drop, confidence, faster))
        elif options.int8 == "auto":
            stages.append(QuantizeFaster(quantize, options.threads))
        else:
            stages.append(quantize)
    if options.int4 is not None:
        stages.append(QuantizeInt4(calibration, options.keep_float, openvino=options.runtime == "openvino"))
    if options.precision != "fp32":
        stages.append(HalfOnnx(options.precision, calibration, target=options.target))
    return stages


def _budget(options: ExportOptions) -> tuple[Literal["latency_ms", "size_bytes", "params"] | None, float | None]:
    if options.target_latency_ms is not None:
        return "latency_ms", options.target_latency_ms
    if options.target_size_mb is not None:
        return "size_bytes", options.target_size_mb * 1e6
    if options.target_params is not None:
        return "params", options.target_params
    return None, None
