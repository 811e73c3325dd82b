"""What a training can be asked for, by the same flags in `compress export`, `optimize` and `finetune`."""

# Without postponed annotations: what inherits these fields has its flags made from them in another module.
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

__all__ = ["DATA", "MACHINE", "TRAIN", "TrainingOptions", "unused_values"]

DATA = Group(
    "Data",
    sort_key=2,
    help="An .npz, a .npy, a folder of .npy files or of .npz shards, or package.module:function; for a Hugging Face "
    "folder also texts (.jsonl, .json, .csv, .tsv, .txt, .parquet) or a folder of images.",
)
TRAIN = Group("Recovery", sort_key=4)
MACHINE = Group("Recovery: the machine", sort_key=4.5)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Of the recovery training."""

    epochs: Annotated[int, Parameter(group=TRAIN)] = 20
    """Passes over the training data."""

    learning_rate: Annotated[float, Parameter(group=TRAIN)] = 2e-3
    """Its peak, after the warm-up."""

    batch_size: Annotated[int | Literal["auto"], Parameter(group=TRAIN)] = 64
    """Samples in a training step, over all devices; auto tries sizes, and scales the rate by the square root."""

    schedule: Annotated[Literal["cosine", "one-cycle", "constant"], Parameter(group=TRAIN)] = "cosine"
    """How the rate goes: warm-up and cosine, one cycle with its momentum, or constant."""

    distillation: Annotated[float, Parameter(group=TRAIN)] = 0.9
    """Weight of the original's answers in the loss, 0 to 1; the rest is the labels'."""

    loss: Annotated[
        Literal["auto", "softmax", "sigmoid", "regression", "embedding", "dense"], Parameter(group=TRAIN)
    ] = "auto"
    """What the output is that labels teach, else the first: auto tells it by labels, last operation, name or shape."""

    temperature: Annotated[float, Parameter(group=TRAIN)] = 4.0
    """Softens the original's answers."""

    feature_weight: Annotated[float, Parameter(group=TRAIN)] = 0.0
    """Weight of the original's features in the loss, besides its answers; 0 leaves them out."""

    label_smoothing: Annotated[float, Parameter(group=TRAIN)] = 0.0
    """Share of a label that goes to all classes alike."""

    ema: Annotated[float, Parameter(group=TRAIN)] = 0.0
    """Decay of a moving average of the weights, such as 0.999, which is the result then; 0 for none."""

    freeze: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", group=TRAIN)] = ()
    """Parameters that keep their values: patterns of names, besides those without requires_grad; none trains all."""

    augment: Annotated[tuple[str, ...], Parameter(consume_multiple=True, group=TRAIN)] = ()
    """Random changes: flip and shift:2 (pixels) of images, or package.module:function of tensors and a generator."""

    validation: Annotated[str | None, Parameter(group=DATA)] = None
    """Samples to judge each epoch by, and to keep the best one; apart from evaluation data."""

    hold_out: Annotated[float, Parameter(group=TRAIN)] = 0.0
    """In place of validation data: share of the training data that is kept apart for it, such as 0.05."""

    patience: Annotated[int, Parameter(group=TRAIN)] = 0
    """Stop after so many epochs without a better one on the validation data; 0 never stops early."""

    tune_training: Annotated[int | None, Parameter(group=TRAIN)] = None
    """Train so many times, as asked for first, then with other rates, fewer epochs, other temperatures and batches,
    and keep what is best on --hold-out (or --validation) data; needs the extra optuna."""

    accumulate: Annotated[int, Parameter(group=MACHINE)] = 1
    """Work each step off in so many parts: less memory for the same gradient."""

    gradient_checkpointing: Annotated[bool, Parameter(negative="", group=MACHINE)] = False
    """Compute activations again in the backward pass rather than keep them: less memory, about a third more time."""

    train_precision: Annotated[Literal["auto", "bf16-mixed", "16-mixed", "32"], Parameter(group=MACHINE)] = "auto"
    """auto takes bf16-mixed where the hardware multiplies it and the network gains by it."""

    channels_last: Annotated[bool, Parameter(group=MACHINE)] = True
    """Lay images out with the channel last, in networks with convolutions."""

    compile: Annotated[Literal["auto", "on", "off"], Parameter(group=MACHINE)] = "auto"
    """torch.compile; auto tries it in a training that is long enough, and keeps it if it pays."""

    accelerator: Annotated[Literal["auto", "cpu", "cuda"], Parameter(group=MACHINE)] = "auto"
    """What trains; auto is the GPU where there is one."""

    devices: Annotated[int, Parameter(group=MACHINE)] = 1
    """GPUs, or processes on the CPU, that share each batch; for several machines, start it with torchrun."""

    strategy: Annotated[Literal["ddp", "fsdp"], Parameter(group=MACHINE)] = "ddp"
    """What each device keeps: the whole model, or by fsdp a share of it, where one device is too small."""

    train_threads: Annotated[int | None, Parameter(group=MACHINE)] = None
    """CPU threads of each process that trains; by default OMP_NUM_THREADS, else all cores, shared among --devices."""

    loader_workers: Annotated[int | None, Parameter(group=MACHINE)] = None
    """Processes that fetch and change samples; by default what fits the data and the device."""

    cache_data: Annotated[bool, Parameter(negative="", group=MACHINE)] = False
    """Keep what package.module:function's Dataset gives on disk, so that each sample is made once."""

    checkpoint_seconds: Annotated[float, Parameter(group=MACHINE)] = 30.0
    """How often the state is kept, for going on after an interruption; also at the end of each epoch."""

    profile: Annotated[bool, Parameter(negative="", group=MACHINE)] = False
    """Tell where the time of a few steps goes, and write a trace for the browser."""

    tensorboard: Annotated[Path | None, Parameter(group=MACHINE)] = None
    """Folder for TensorBoard's logs."""

    # Not used any more, and accepted for a release.

    optimizer: Annotated[Literal["adamw", "lamb"], Parameter(group=TRAIN, show=False)] = "adamw"
    """adamw, whatever is asked for."""

    sampler: Annotated[Literal["uniform", "uncertainty", "margin", "entropy"], Parameter(group=TRAIN, show=False)] = (
        "uniform"
    )
    """uniform, whatever is asked for."""


def unused_values(options: TrainingOptions) -> list[str]:
    """What was asked for as in an earlier release, and does nothing any more: a sentence for each."""
    found = []
    if options.optimizer != "adamw":
        found.append(
            f"--optimizer {options.optimizer} is gone: AdamW is used, for which a rate about as large as the default "
            f"({TrainingOptions.learning_rate:g}) fits; leave the flag out, or `optimizer` in a recipe"
        )
    if options.sampler != "uniform":
        found.append(
            f"--sampler {options.sampler} is gone, as it gained nothing: each sample is shown once an epoch; leave the "
            "flag out, or `sampler` in a recipe"
        )
    return found
