"""What the commands can be asked for; kept apart from torch, so that `--help` is instant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

__all__ = ["ExportOptions", "SourceOptions"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a model file may need to be loaded."""

    input: tuple[str, ...] = ()
    """Each input of the model, where its file doesn't say: 'name:float32[batch,3,224,224]'."""

    model: str | None = None
    """For a state_dict: 'package.module:factory', which gives the module that it fits."""

    trust_pickle: Annotated[bool, Parameter(negative="")] = False
    """Run the pickle's code: only for a file from someone who may run code on this machine."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExportOptions(SourceOptions):
    """What `compress export` is asked for.

    Data is an .npz, a .npy, a folder of .npy files or `package.module:function`; a relative path is looked for here,
    then beside the checkpoint.
    """

    output: Annotated[Path, Parameter(name=["--output", "-o"])]
    """Folder for the artifact; one that is there already is replaced when the run has succeeded."""

    prune: float | None = None
    """Fraction of the multiply-accumulates to remove, such as 0.5."""

    importance: Literal["magnitude", "random"] = "magnitude"
    """How to choose the channels that go; random is a control."""

    round_to: int | None = None
    """Channel counts are multiples of this; by default of 16, or the largest power of two that reaches the fraction."""

    finetune: str | None = None
    """Training data for the recovery, with labels or without."""

    epochs: int = 20
    """Passes over the training data."""

    learning_rate: float = 2e-3
    """Its peak, after the warm-up."""

    batch_size: int = 64
    """Samples in a training step."""

    int8: Literal["static", "dynamic"] | None = None
    """8-bit weights and activations: static needs --calibration."""

    calibration: str | None = None
    """Typical inputs, about 100."""

    calibrator: Literal["minmax", "percentile", "entropy", "mse"] = "minmax"
    """How the range of each activation follows from them."""

    eval: str | None = None
    """Inputs and labels to judge each stage by; apart from training and calibration data."""

    threads: int = 1
    """Threads for each model while its latency is measured."""

    seed: int = 0
    """Of everything random."""

    work: Path | None = None
    """Folder that keeps each stage's output, so that a run can be resumed; by default OUTPUT.work."""
