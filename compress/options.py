"""What the commands can be asked for; kept apart from torch, so that `--help` is instant.

Each field is a flag, a key of a recipe and an argument in Python, by one name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

__all__ = [
    "RUN",
    "Calibrator",
    "CompressOptions",
    "ExportOptions",
    "OptimizeOptions",
    "SensitivityOptions",
    "SourceOptions",
]

Calibrator = Literal["minmax", "percentile", "entropy", "mse"]

_SOURCE = Group("The model", sort_key=1)
_DATA = Group("Data", sort_key=2, help="An .npz, a .npy, a folder of .npy files or package.module:function.")
_PRUNE = Group("Pruning", sort_key=3)
_TRAIN = Group("Recovery", sort_key=4)
_INT8 = Group("Precision", sort_key=5)
_SEARCH = Group("Search", sort_key=6)
_PROOF = Group("Proof", sort_key=7)
RUN = Group("The run", sort_key=8)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a model file may need to be loaded."""

    input: Annotated[tuple[str, ...], Parameter(group=_SOURCE)] = ()
    """Each input of the model, where its file doesn't say: 'name:float32[batch,3,224,224]'."""

    model: Annotated[str | None, Parameter(group=_SOURCE)] = None
    """For a state_dict: 'package.module:factory', which gives the module that it fits."""

    trust_pickle: Annotated[bool, Parameter(negative="", group=_SOURCE)] = False
    """Run the pickle's code: only for a file from someone who may run code on this machine."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompressOptions(SourceOptions):
    """What `compress export` and `compress optimize` have in common."""

    output: Annotated[Path, Parameter(name=["--output", "-o"], group=RUN)]
    """Folder for the artifact; one that is there already is replaced when the run has succeeded."""

    eval: Annotated[str | None, Parameter(group=_DATA)] = None
    """Inputs and labels to judge each stage by; apart from training and calibration data."""

    calibration: Annotated[str | None, Parameter(group=_DATA)] = None
    """Typical inputs, about 100, for the ranges of activations."""

    finetune: Annotated[str | None, Parameter(group=_DATA)] = None
    """Training data for the recovery, with labels or without."""

    importance: Annotated[Literal["magnitude", "taylor", "random"], Parameter(group=_PRUNE)] = "magnitude"
    """How to choose the channels that go; taylor needs --finetune data, random is a control."""

    scope: Annotated[Literal["global", "local"], Parameter(group=_PRUNE)] = "global"
    """Let the weakest layers lose most, or take the same share from each."""

    sensitivity: Annotated[Path | None, Parameter(group=_PRUNE)] = None
    """What `compress sensitivity` wrote: each layer loses what costs it the same, in place of --scope."""

    round_to: Annotated[int | None, Parameter(group=_PRUNE)] = None
    """Channel counts are multiples of this; by default of 16, or the largest power of two that reaches the fraction."""

    epochs: Annotated[int, Parameter(group=_TRAIN)] = 20
    """Passes over the training data."""

    learning_rate: Annotated[float, Parameter(group=_TRAIN)] = 2e-3
    """Its peak, after the warm-up."""

    batch_size: Annotated[int, Parameter(group=_TRAIN)] = 64
    """Samples in a training step."""

    target: Annotated[Literal["cpu", "tensorrt", "cuda"], Parameter(group=_INT8)] = "cpu"
    """What will run the model: decides the types of INT8 weights and activations."""

    smooth: Annotated[bool, Parameter(negative="", group=_INT8)] = False
    """Before INT8, even out channels of very unlike sizes: pays on badly scaled networks and transformers."""

    metric: Annotated[str | None, Parameter(group=_PROOF)] = None
    """top1, top5, agreement, cosine, mse or package.module:function; by default what fits the data."""

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
class ExportOptions(CompressOptions):
    """What `compress export` is asked for.

    Data is an .npz, a .npy, a folder of .npy files or `package.module:function`; a relative path is looked for here,
    then beside the checkpoint.
    """

    prune: Annotated[float | None, Parameter(group=_PRUNE)] = None
    """Fraction of the multiply-accumulates to remove, such as 0.5."""

    target_latency_ms: Annotated[float | None, Parameter(group=_PRUNE)] = None
    """Instead of --prune: remove what it takes until the result needs no longer than this, at batch 1."""

    target_size_mb: Annotated[float | None, Parameter(group=_PRUNE)] = None
    """Instead of --prune: remove what it takes until the result's file is no larger, in MB (1,000,000 bytes)."""

    target_params: Annotated[int | None, Parameter(group=_PRUNE)] = None
    """Instead of --prune: remove what it takes until no more weights are left."""

    rounds: Annotated[int, Parameter(group=_PRUNE)] = 1
    """Prune and recover in this many steps; --epochs are shared among them."""

    int8: Annotated[Literal["static", "dynamic", "weights", "qat"] | None, Parameter(group=_INT8)] = None
    """8-bit weights and activations; static and qat need --calibration, qat needs --finetune; weights: only these."""

    calibrator: Annotated[Calibrator, Parameter(group=_INT8)] = "minmax"
    """How the range of each activation follows from the calibration data."""

    max_drop: Annotated[float | None, Parameter(group=_INT8)] = None
    """Largest loss in points of the metric: layers are put back to float until INT8 is inside; missed: exit code 3."""

    precision: Annotated[Literal["fp32", "fp16", "bf16"], Parameter(group=_INT8)] = "fp32"
    """Of what is not INT8; layers that would overflow stay in FP32."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OptimizeOptions(CompressOptions):
    """What `compress optimize` is asked for."""

    max_drop: Annotated[float, Parameter(group=_SEARCH)] = 0.5
    """Largest loss in points of the metric that a candidate may have."""

    goal: Annotated[Literal["latency", "size", "throughput"], Parameter(group=_SEARCH)] = "latency"
    """What the winner is best at: p50 at batch 1, bytes of the file, or samples a second at batch 8."""

    prune: Annotated[tuple[float, ...], Parameter(consume_multiple=True, group=_SEARCH)] = (0.0, 0.3, 0.5, 0.7, 0.85)
    """Fractions of the multiply-accumulates to try; above 0 only with --finetune."""

    int8: Annotated[
        tuple[Literal["none", "static", "dynamic", "weights"], ...], Parameter(consume_multiple=True, group=_SEARCH)
    ] = (
        "none",
        "static",
        "dynamic",
    )
    """Kinds of INT8 to try; static only with --calibration."""

    calibrators: Annotated[tuple[Calibrator, ...], Parameter(consume_multiple=True, group=_SEARCH)] = (
        "minmax",
        "percentile",
        "mse",
    )
    """Ranges to try for static INT8."""

    workers: Annotated[int, Parameter(group=RUN)] = 1
    """Candidates made at the same time, each in a process; they are measured one after the other all the same."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SensitivityOptions(SourceOptions):
    """What `compress sensitivity` is asked for."""

    output: Annotated[Path, Parameter(name=["--output", "-o"], group=RUN)]
    """Folder for sensitivity.json and sensitivity.html."""

    eval: Annotated[str, Parameter(group=_DATA)]
    """Inputs, and labels where there are some, to judge each layer's pruning by."""

    metric: Annotated[str | None, Parameter(group=_PROOF)] = None
    """top1, top5, agreement, cosine, mse or package.module:function; by default what fits the data."""

    ratios: Annotated[tuple[float, ...], Parameter(consume_multiple=True, group=_PRUNE)] = (0.25, 0.5, 0.75)
    """Shares of a layer's channels to take away."""

    samples: Annotated[int, Parameter(group=_DATA)] = 1000
    """Evaluation samples to use, spread over the data."""

    importance: Annotated[Literal["magnitude", "random"], Parameter(group=_PRUNE)] = "magnitude"
    """How to choose the channels that go."""

    max_drop: Annotated[float, Parameter(group=_PRUNE)] = 1.0
    """Points that a layer may cost, to show what each bears."""
