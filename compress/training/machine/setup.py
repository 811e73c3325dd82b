"""What trains: one CPU, one GPU, or several processes that were started for it."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn

from compress.errors import MissingExtraError, RecipeError, StageError
from compress.runtime.measure import cores
from compress.training.machine.launch import join

__all__ = [
    "alone", "device_kind", "distributed", "fabric_class", "fabric_for", "launched", "local_rank", "on_threads", "rank",
    "refuse_others", "shared",
]  # fmt: skip


def fabric_class() -> Any:
    """Lightning's Fabric.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        from lightning_fabric import Fabric
    except ImportError as err:
        raise MissingExtraError("can't finetune", module="lightning-fabric", extra="finetune") from err
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it tells of its precision
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    return Fabric


def launched() -> bool:
    """Whether torchrun or `--devices` started this process, be it with others or, as the only one left, without."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def distributed() -> bool:
    """Whether this process was started with others."""
    return launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """What is computed inside is this process's own, and waits for no other."""
    before = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(before)


def shared() -> bool:
    """Whether what is computed is to be put together with what the others compute."""
    return distributed() and not _alone.get()


def rank() -> int:
    """Of this process among all; 0 where there are no others."""
    return int(os.environ["RANK"]) if distributed() else 0


def local_rank() -> int:
    """Of this process among those on its machine."""
    return int(os.environ["LOCAL_RANK"]) if distributed() else 0


def device_kind(asked: str) -> str:
    """ "cpu" or "cuda".

    Raises:
        RecipeError: CUDA was asked for, and is not there.
    """
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        cuda = torch.version.cuda
        raise RecipeError(
            "can't train on a GPU",
            why="torch finds none" if cuda else f"this torch ({torch.__version__}) is built without CUDA",
            mend="install a torch for CUDA where the GPU is, or leave --accelerator out",
        )
    return "cuda" if asked != "cpu" and there else "cpu"


@contextmanager
def on_threads(asked: int | None, kind: str) -> Iterator[None]:
    """What is computed inside is computed by so many threads of the CPU; afterwards there are as many as before.

    Args:
        asked: None for the usual number: what OMP_NUM_THREADS says, else all cores; of processes that share the work of
            this machine's CPU, whose OMP_NUM_THREADS torchrun sets to 1, each has its part of the cores.
        kind: of the device: "cpu" or "cuda".
    """
    before = torch.get_num_threads()
    torch.set_num_threads(asked or _usual_threads(kind))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _usual_threads(kind: str) -> int:
    if distributed() and kind == "cpu":
        return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is of nested levels
    return int(said) if said.isdecimal() and int(said) else cores()


def fabric_for(kind: str, precision: str, module: nn.Module, *, sharded: bool = False) -> Any:
    """A launched Fabric: this process alone, or with those that were started with it.

    Args:
        kind: of the device: "cpu" or "cuda".
        precision: as Fabric names it.
        module: that is trained.
        sharded: each process has a part of it (`compress.training.machine.sharded`).
    """
    if kind == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
        torch.backends.cudnn.allow_tf32 = True
    options: dict[str, Any] = {"accelerator": kind, "devices": 1, "precision": precision}
    if distributed():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        nodes = int(os.environ["WORLD_SIZE"]) // local
        strategy: Any = _in_parts(local * nodes)
        if not sharded:  # a traced module has no layer that its forward leaves out; another may have
            strategy = "ddp" if isinstance(module, fx.GraphModule) else "ddp_find_unused_parameters_true"
        options |= {"devices": local, "num_nodes": nodes, "strategy": strategy}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
        fabric = fabric_class()(**options)
    if distributed():
        join(kind)
        fabric.launch()
    return fabric


def refuse_others(fabric: Any, known_by: str) -> None:
    """Of processes that train together: all have read the same; each machine may have files of its own by one name.

    Args:
        fabric: of all, which ask together.
        known_by: what decides the training and what is told of it: the model, the data, the options, the versions of
            what computes.

    Raises:
        StageError: in all of them, where one has read something else than the first.
    """
    digest = hashlib.sha256(known_by.encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(fabric.device)
    every = fabric.all_gather(mine).reshape(-1, len(digest)).tolist()
    others = [str(number) for number, found in enumerate(every, 1) if found != every[0]]
    if others:
        raise StageError(
            "the processes can't train together",
            why=f"what {' and '.join(others)} of {len(every)} read is not what 1 read: model, data or versions",
            mend="give all machines the same files and the same libraries, then start all again",
        )


def _in_parts(processes: int) -> Any:
    """Fabric's way with modules that were parted before."""
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    return ModelParallelStrategy(lambda module, _: module, data_parallel_size=processes, tensor_parallel_size=1)
