"""What the commands can be asked for; kept apart from torch, so that `--help` is instant.

Each field is a flag, a key of a recipe and an argument in Python, by one name.
"""

from __future__ import annotations

import warnings
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from compress.options.cluster import ClusterOptions
from compress.options.training import DATA, MACHINE, TrainingOptions

__all__ = [
    "RUN",
    "Allocate",
    "Calibrator",
    "CompressOptions",
    "EngineOptions",
    "ExplainOptions",
    "ExportOptions",
    "FinetuneOptions",
    "Importance",
    "MeasureOptions",
    "OptimizeOptions",
    "SensitivityOptions",
    "SourceOptions",
]

Calibrator = Literal["minmax", "percentile", "entropy", "mse"]
Importance = Literal["magnitude", "taylor", "obs", "random"]
Allocate = Literal["macs", "latency"]

_SOURCE = Group("The model", sort_key=1)
_PRUNE = Group("Pruning", sort_key=3)
_INT8 = Group("Precision", sort_key=5)
_SEARCH = Group("Search", sort_key=6)
_PROOF = Group("Proof", sort_key=7)
_ENGINE = Group("TensorRT", sort_key=8)
RUN = Group("The run", sort_key=9)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a model file may need to be loaded."""

    input: Annotated[tuple[str, ...], Parameter(group=_SOURCE)] = ()
    """Each input of the model, where its file doesn't say: 'name:float32[batch,3,224,224]', one or several."""

    size: Annotated[tuple[str, ...], Parameter(consume_multiple=True, group=_SOURCE)] = ()
    """What is usual for a dimension that varies, 'seq=128'; by default what the data holds, else 32, 224 for images."""

    model: Annotated[str | None, Parameter(group=_SOURCE)] = None
    """For a state_dict: 'package.module:factory', which gives the module that it fits."""

    part: Annotated[Literal["text", "image"] | None, Parameter(group=_SOURCE)] = None
    """Of a Hugging Face folder that holds two networks, as CLIP's does: the one to take."""

    pooling: Annotated[Literal["mean", "cls", "max"] | None, Parameter(group=_SOURCE)] = None
    """Of a Hugging Face folder that says no pooling itself: how its tokens become one embedding of each text."""

    text_column: Annotated[str, Parameter(group=DATA)] = "text"
    """In data of texts (.jsonl, .json, .csv, .tsv, .parquet, a saved dataset), the column that holds them."""

    text_pair_column: Annotated[str | None, Parameter(group=DATA)] = None
    """The column of a second text, for models that judge two; the network of a Hugging Face folder then takes
    `token_type_ids`, if it knows several types of texts."""

    label_column: Annotated[str | None, Parameter(group=DATA)] = None
    """The column of labels; of a classifier's data by default `label` or `labels`, where there is one."""

    trust: Annotated[bool, Parameter(negative="", group=_SOURCE)] = False
    """Run what the file brings, pickles and TorchScript: only for one from someone who may run code on this machine."""

    trust_pickle: InitVar[Annotated[bool, Parameter(parse=False)]] = False

    def __post_init__(self, trust_pickle: bool) -> None:
        if trust_pickle:
            warnings.warn("trust_pickle is now named trust", FutureWarning, stacklevel=3)
            object.__setattr__(self, "trust", True)

    verbose: Annotated[bool, Parameter(negative="", group=RUN)] = False
    """Show what libraries print; otherwise it is kept in the work folder's log.txt."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompressOptions(TrainingOptions, SourceOptions):
    """What `compress export` and `compress optimize` have in common."""

    output: Annotated[Path, Parameter(name=["--output", "-o"], group=RUN)]
    """Folder for the artifact; one that is there already is replaced when the run has succeeded."""

    eval: Annotated[str | None, Parameter(group=DATA)] = None
    """Inputs and labels to judge each stage by; apart from training and calibration data."""

    calibration: Annotated[str | None, Parameter(group=DATA)] = None
    """Typical inputs, for the ranges of activations (about 100), the repair after pruning and 4-bit weights (some
    hundreds)."""

    finetune: Annotated[str | None, Parameter(group=DATA)] = None
    """Training data for the recovery, with labels or without."""

    repair: Annotated[bool | None, Parameter(group=_PRUNE)] = None
    """After pruning, fit the layers behind it to what the original gave, by --calibration data: by default where there
    is some."""

    scope: Annotated[Literal["global", "local"], Parameter(group=_PRUNE)] = "global"
    """Let the weakest layers lose most, or take the same share from each."""

    sensitivity: Annotated[Path | None, Parameter(group=_PRUNE)] = None
    """What `compress sensitivity` wrote: each layer loses what costs it the same, in place of --scope."""

    round_to: Annotated[int | None, Parameter(group=_PRUNE)] = None
    """Channel counts are multiples of this; by default of 16, or the largest power of two that reaches the fraction."""

    target: Annotated[Literal["cpu", "tensorrt", "cuda"], Parameter(group=_INT8)] = "cpu"
    """What will run the model: decides the types of INT8 weights and activations."""

    runtime: Annotated[Literal["auto", "onnxruntime", "openvino"], Parameter(group=_PROOF)] = "auto"
    """What serves the result on a CPU: auto measures it on both where OpenVINO is installed, and takes the faster one,
    if it computes it alike."""

    smooth: Annotated[bool | None, Parameter(group=_INT8)] = None
    """Before INT8, even out channels of very unlike sizes: pays on badly scaled networks, and on transformers, where
    static INT8 for CPUs does it by default."""

    selection: Annotated[str | None, Parameter(group=DATA)] = None
    """Inputs and labels to choose among models by, apart from --eval; by default half of that, by seed."""

    metric: Annotated[str | None, Parameter(group=_PROOF)] = None
    """top1, top5, f1_macro, mcc, binary_accuracy, f1_samples, pixel_accuracy, miou, f1_entities, f1_tokens, r2,
    spearman, agreement, cosine, mse or package.module:function; by default what fits the data."""

    judge: Annotated[str | None, Parameter(group=_PROOF)] = None
    """The output to judge, of a model that has several; labels teach it, too."""

    confidence: Annotated[float, Parameter(group=_PROOF)] = 0.95
    """Of the intervals; --max-drop is kept when the upper end keeps it."""

    budget_by: Annotated[Literal["interval", "point"], Parameter(group=_PROOF)] = "interval"
    """What --max-drop is held against: the upper end of the drop's interval, or the estimate, however few samples."""

    threads: Annotated[int, Parameter(group=_PROOF)] = 1
    """Threads for each model while its latency is measured."""

    batches: Annotated[tuple[int, ...], Parameter(consume_multiple=True, group=_PROOF)] = ()
    """Batch sizes to measure besides, in a table of their own, such as 1 8 32."""

    thread_counts: Annotated[tuple[int, ...], Parameter(consume_multiple=True, group=_PROOF)] = ()
    """Thread counts for that table; by default --threads."""

    seed: Annotated[int, Parameter(group=RUN)] = 0
    """Of everything random."""

    work: Annotated[Path | None, Parameter(group=RUN)] = None
    """Folder that keeps each stage's output, so that a run can be resumed; by default OUTPUT.work."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a TensorRT engine is built."""

    max_batch_size: Annotated[int, Parameter(group=_ENGINE)] = 32
    """The largest batch that the engine takes."""

    opt_batch_size: Annotated[tuple[int, ...], Parameter(consume_multiple=True, group=_ENGINE)] = ()
    """Batch sizes that it is tuned for, each with an optimization profile of its own; by default the largest."""

    dims: Annotated[tuple[str, ...], Parameter(consume_multiple=True, group=_ENGINE)] = ()
    """For each other dimension that varies, its smallest, best and largest size: 'sequence=1:64:128'; the best one is
    taken for the usual one, too."""

    optimization_level: Annotated[Literal[0, 1, 2, 3, 4, 5] | None, Parameter(group=_ENGINE)] = None
    """From 0, the fastest build, to 5, the fastest engine; by default TensorRT's own choice."""

    workspace_mb: Annotated[int | None, Parameter(group=_ENGINE)] = None
    """The most device memory that a layer may work with, in MB (1,000,000 bytes)."""

    timing_cache: Annotated[Path | None, Parameter(group=_ENGINE)] = None
    """A file that keeps what was timed, so that a further build is fast; made if missing."""

    version_compatible: Annotated[bool, Parameter(negative="", group=_ENGINE)] = False
    """The engine also runs in later TensorRT releases of the same major version."""

    hardware_compatibility: Annotated[
        Literal["ampere-plus", "same-compute-capability"] | None, Parameter(group=_ENGINE)
    ] = None
    """The engine also runs on GPUs other than the one that it is built on; at some cost in speed."""

    refit: Annotated[bool, Parameter(negative="", group=_ENGINE)] = False
    """Its weights can be replaced later."""

    strip_weights: Annotated[bool, Parameter(negative="", group=_ENGINE)] = False
    """Besides the engine, write model.plan.stripped, which has no weights and is to be refitted where it runs."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExportOptions(CompressOptions, EngineOptions):
    """What `compress export` is asked for.

    Data is an .npz, a .npy, a folder of .npy files or `package.module:function`; a relative path is looked for here,
    then beside the checkpoint.
    """

    to: Annotated[Literal["onnx", "tensorrt"], Parameter(group=_INT8)] = "onnx"
    """What comes out; tensorrt builds an engine from the ONNX file, on this machine's GPU, for --target tensorrt."""

    prune: Annotated[float | None, Parameter(group=_PRUNE)] = None
    """Fraction of the multiply-accumulates to remove, such as 0.5; with --allocate latency, of the latency."""

    importance: Annotated[Importance, Parameter(group=_PRUNE)] = "magnitude"
    """How to choose the channels that go; taylor needs --finetune data, obs --calibration data and the repair behind
    it, random is a control."""

    allocate: Annotated[Allocate, Parameter(group=_PRUNE)] = "macs"
    """How many channels each layer loses: by what its multiply-accumulates cost in error, or by what the time does that
    its shapes take here, measured on --runtime; needs --importance obs."""

    target_latency_ms: Annotated[float | None, Parameter(group=_PRUNE)] = None
    """Instead of --prune: remove what it takes until the result needs no longer than this, at batch 1 (where it is
    fixed, at that)."""

    target_size_mb: Annotated[float | None, Parameter(group=_PRUNE)] = None
    """Instead of --prune: remove what it takes until the result's file is no larger, in MB (1,000,000 bytes)."""

    target_params: Annotated[int | None, Parameter(group=_PRUNE)] = None
    """Instead of --prune: remove what it takes until no more weights are left."""

    drop_blocks: Annotated[int | Literal["auto"] | None, Parameter(group=_PRUNE)] = None
    """Residual blocks to drop whole, the ones without which --calibration data hurts least, before channels are pruned.
    auto: as many as keep the budget (--prune or --target-…) better than channels alone."""

    rounds: Annotated[int, Parameter(group=_PRUNE)] = 1
    """Prune and recover in this many steps; --epochs are shared among them."""

    int8: Annotated[Literal["auto", "static", "dynamic", "weights", "qat"] | None, Parameter(group=_INT8)] = None
    """8-bit weights and activations; static and qat need --calibration, qat needs --finetune; weights: only these.
    auto: static with --calibration, else dynamic, and only for what measures faster here with it."""

    int4: Annotated[Literal["weights"] | None, Parameter(group=_INT8)] = None
    """4-bit weights of layers and embedding tables, for the size of the file more than for speed; with --calibration
    chosen by what the layers read (GPTQ), else rounded."""

    calibrator: Annotated[Calibrator, Parameter(group=_INT8)] = "minmax"
    """How the range of each activation follows from the calibration data."""

    keep_float: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", group=_INT8)] = ()
    """Nodes of the exported graph that stay in float, by name, as `compress explain` tells them."""

    max_drop: Annotated[float | None, Parameter(group=_INT8)] = None
    """Largest loss in points of the metric: layers are put back to float until INT8 is inside; missed: exit code 3."""

    precision: Annotated[Literal["fp32", "fp16", "bf16"], Parameter(group=_INT8)] = "fp32"
    """Of what is not quantized; layers that would overflow stay in FP32."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OptimizeOptions(ClusterOptions, CompressOptions):
    """What `compress optimize` is asked for."""

    max_drop: Annotated[float, Parameter(group=_SEARCH)] = 0.5
    """Largest loss in points of the metric that a candidate may have."""

    goal: Annotated[Literal["latency", "size", "throughput"], Parameter(group=_SEARCH)] = "latency"
    """What the winner is best at: p50 at batch 1, bytes of the file, or samples a second at batch 8; where the batch is
    fixed, both at that."""

    prune: Annotated[tuple[float, ...], Parameter(consume_multiple=True, group=_SEARCH)] = (0.0, 0.3, 0.5, 0.7, 0.85)
    """Fractions of the multiply-accumulates to try; --finetune or --calibration (the repair) bring accuracy back."""

    importance: Annotated[tuple[Importance, ...], Parameter(consume_multiple=True, negative="", group=_SEARCH)] = (
        "magnitude",
    )
    """How to choose the channels that go, one way or several; taylor needs --finetune data, obs --calibration data and
    the repair behind it, random is a control. Of several, those that lack their data are left out."""

    allocate: Annotated[tuple[Allocate, ...], Parameter(consume_multiple=True, negative="", group=_SEARCH)] = ("macs",)
    """How many channels each layer loses, one way or both: by what its multiply-accumulates cost in error, or, with
    obs, by what the time does that its shapes take here; --prune is then a fraction of the latency."""

    int8: Annotated[
        tuple[Literal["none", "static", "dynamic", "weights"], ...], Parameter(consume_multiple=True, group=_SEARCH)
    ] = (
        "none",
        "static",
        "dynamic",
    )
    """Kinds of INT8 to try; static only with --calibration."""

    precision: Annotated[
        tuple[Literal["fp32", "bf16"], ...], Parameter(consume_multiple=True, negative="", group=_SEARCH)
    ] = ()
    """Precisions to try of what is not quantized; fp32 always is. By default bf16, too, where OpenVINO may serve the
    result and this CPU multiplies BF16."""

    calibrators: Annotated[tuple[Calibrator, ...], Parameter(consume_multiple=True, group=_SEARCH)] = (
        "minmax",
        "percentile",
        "mse",
    )
    """Ranges to try for static INT8."""

    train: Annotated[Literal["all", "winner"] | None, Parameter(group=_SEARCH)] = None
    """Which pruned candidates --finetune data trains: all, or, once all are repaired and compared, the best alone, and
    up to two more where it then misses --max-drop. By default winner where --calibration data repairs, else all."""

    workers: Annotated[int, Parameter(group=RUN)] = 1
    """Candidates made at the same time, each in a process; they are measured one after the other all the same."""

    def __post_init__(self, trust_pickle: bool) -> None:
        super().__post_init__(trust_pickle)
        if isinstance(self.importance, str):  # it took one alone
            object.__setattr__(self, "importance", (self.importance,))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SensitivityOptions(ClusterOptions, SourceOptions):
    """What `compress sensitivity` is asked for."""

    output: Annotated[Path, Parameter(name=["--output", "-o"], group=RUN)]
    """Folder for sensitivity.json and sensitivity.html."""

    eval: Annotated[str, Parameter(group=DATA)]
    """Inputs, and labels where there are some; half of them judge each layer's pruning, the others are for proof."""

    metric: Annotated[str | None, Parameter(group=_PROOF)] = None
    """top1, top5, f1_macro, mcc, binary_accuracy, f1_samples, pixel_accuracy, miou, f1_entities, f1_tokens, r2,
    spearman, agreement, cosine, mse or package.module:function; by default what fits the data."""

    judge: Annotated[str | None, Parameter(group=_PROOF)] = None
    """The output to judge, of a model that has several."""

    ratios: Annotated[tuple[float, ...], Parameter(consume_multiple=True, group=_PRUNE)] = (0.25, 0.5, 0.75)
    """Shares of a layer's channels to take away."""

    samples: Annotated[int, Parameter(group=DATA)] = 1000
    """Samples of that half to use, spread over it."""

    importance: Annotated[Literal["magnitude", "random"], Parameter(group=_PRUNE)] = "magnitude"
    """How to choose the channels that go."""

    max_drop: Annotated[float, Parameter(group=_PRUNE)] = 1.0
    """Points that a layer may cost, to show what each bears."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainingOptions, SourceOptions):
    """What `compress finetune` is asked for."""

    output: Annotated[Path, Parameter(name=["--output", "-o"], group=RUN)]
    """Folder for model.pt, training.json and training.html; one that is there already is replaced at the end."""

    data: Annotated[str, Parameter(group=DATA)]
    """Training data, with labels or without."""

    teacher: Annotated[Path | None, Parameter(group=_SOURCE)] = None
    """The original model, whose answers are learnt; without it, the labels teach alone."""

    eval: Annotated[str | None, Parameter(group=DATA)] = None
    """Inputs and labels to judge the model by, before and after; apart from training and validation data."""

    metric: Annotated[str | None, Parameter(group=_PROOF)] = None
    """top1, top5, f1_macro, mcc, binary_accuracy, f1_samples, pixel_accuracy, miou, f1_entities, f1_tokens, r2,
    spearman, agreement, cosine, mse or package.module:function; by default what fits the data."""

    judge: Annotated[str | None, Parameter(group=_PROOF)] = None
    """The output to judge, of a model that has several; labels teach it, too."""

    train_precision: Annotated[
        Literal["auto", "bf16-mixed", "16-mixed", "32"],
        Parameter(name=["--precision", "--train-precision"], group=MACHINE),
    ] = "auto"
    """auto takes bf16-mixed where the hardware multiplies it and the network gains by it."""

    train_threads: Annotated[int | None, Parameter(name=["--threads", "--train-threads"], group=MACHINE)] = None
    """CPU threads of each process that trains; by default OMP_NUM_THREADS, else all cores, shared among --devices."""

    seed: Annotated[int, Parameter(group=RUN)] = 0
    """Of everything random."""

    work: Annotated[Path | None, Parameter(group=RUN)] = None
    """Folder that keeps the state, so that a run can be resumed; by default OUTPUT.work."""


_WHERE = Group("Where and how", sort_key=2)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MeasureOptions(SourceOptions):
    """What `compress measure` is asked for."""

    device: Annotated[Literal["cpu", "cuda"], Parameter(group=_WHERE)] = "cpu"
    """What runs the models; a model that can't run there is an error, it is never run elsewhere instead."""

    runtime: Annotated[Literal["auto", "onnxruntime", "openvino"], Parameter(group=_WHERE)] = "auto"
    """On the CPU: what runs ONNX files; auto is each that is installed, openvino needs the extra of that name."""

    provider: Annotated[tuple[Literal["cuda", "tensorrt"], ...], Parameter(consume_multiple=True, group=_WHERE)] = (
        "cuda",
    )
    """With --device cuda: what ONNX Runtime runs ONNX files on."""

    batches: Annotated[tuple[int, ...], Parameter(consume_multiple=True, group=_WHERE)] = (1,)
    """Samples in a call."""

    data: Annotated[str | None, Parameter(group=_WHERE)] = None
    """Inputs to run: an .npz, a .npy, a folder of .npy files or package.module:function; by default random ones."""

    dims: Annotated[tuple[str, ...], Parameter(consume_multiple=True, group=_WHERE)] = ()
    """As in `engine-script`: 'sequence=1:64:128'; the middle one is measured, in place of --size."""

    rounds: Annotated[int, Parameter(group=_WHERE)] = 24
    """How often the models take turns at most, in a new order each time; fewer where intervals are narrow earlier."""

    threads: Annotated[int, Parameter(group=_WHERE)] = 1
    """Of each model on the CPU."""

    compile: Annotated[bool, Parameter(negative="", group=_WHERE)] = False
    """Models of torch by torch.compile, too."""

    cuda_graphs: Annotated[bool, Parameter(negative="", group=_WHERE)] = False
    """Let ONNX Runtime record the GPU's work once for each shape, and replay it."""

    channels_last: Annotated[bool, Parameter(negative="", group=_WHERE)] = False
    """Let ONNX Runtime's CUDA provider lay images out channels-last, and add a convolution's bias in its kernel."""

    tf32: Annotated[bool, Parameter(group=_WHERE)] = True
    """On a GPU, let products of float32 round to 11 bits, in torch and in ONNX Runtime alike."""

    engine_cache: Annotated[Path | None, Parameter(group=_WHERE)] = None
    """With --provider tensorrt: a folder that keeps its engines."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExplainOptions(SourceOptions):
    """What `compress explain` is asked for."""

    data: Annotated[str, Parameter(group=DATA)]
    """Inputs to run both on: an .npz, a .npy, a folder of .npy files or package.module:function."""

    samples: Annotated[int, Parameter(group=DATA)] = 128
    """How many of the data to use, spread over it: one half chooses layers to keep in float, the other proves them."""

    rows: Annotated[int, Parameter(group=RUN)] = 12
    """Of each table at most, the worst first; with --verbose all."""

    json: Annotated[Path | None, Parameter(group=RUN)] = None
    """A file to write all that was found to, as JSON."""
