"""The shared memory that Triton's Python backend needs: one region for each process that runs a model."""

from __future__ import annotations

import math
import resource
import shutil
from contextlib import suppress
from pathlib import Path

from compress.errors import ServerError
from compress.host.groups import CGROUPS, PROC, folders
from serve.config.model_config import ModelInput, ModelOutput
from serve.repository.read import ModelInfo, instance_count

__all__ = ["check_room", "limits", "region_bytes", "remove_regions", "takes_any_size"]

FOLDER = Path("/dev/shm")  # noqa: S108 - POSIX shared memory, where Triton puts it
MIB = 1024 * 1024
SMALLEST, LARGEST = MIB, 32 * MIB
ITEM_BYTES = {"TYPE_FP64": 8, "TYPE_INT64": 8, "TYPE_UINT64": 8, "TYPE_FP32": 4, "TYPE_INT32": 4, "TYPE_UINT32": 4,
              "TYPE_FP16": 2, "TYPE_BF16": 2, "TYPE_INT16": 2, "TYPE_UINT16": 2}  # fmt: skip


def region_bytes(models: list[ModelInfo]) -> int:
    """How large each region should be from the start: the largest batch's inputs and outputs, in whole MiB.

    A region grows when it has to, which costs time while a request waits. Strings and varying dimensions count little.
    """
    largest = 0
    for config in (model.config for model in models if model.config.platform != "ensemble"):
        tensors: list[ModelInput | ModelOutput] = [*config.input, *config.output]
        one = sum(_item_bytes(tensor) for tensor in tensors)
        largest = max(largest, one * max(config.max_batch_size, 1))
    return min(max(SMALLEST, math.ceil(largest / MIB) * MIB), LARGEST)


def takes_any_size(model: ModelInfo) -> bool:
    """Whether a process of its own takes inputs as large as clients may send: texts, or dimensions that vary."""
    config = model.config
    inputs = config.input if config.platform != "ensemble" else ()
    return any(tensor.data_type == "TYPE_STRING" or min(tensor.dims, default=1) < 0 for tensor in inputs)


def _item_bytes(tensor: ModelInput | ModelOutput) -> int:
    return ITEM_BYTES.get(tensor.data_type, 1) * math.prod(max(dim, 1) for dim in tensor.dims)


def check_room(models: list[ModelInfo], *, free_bytes: int | None = None) -> None:
    """Raise ServerError when the regions don't fit into /dev/shm; Triton would die of it with a bus error.

    Args:
        models: what is to be served.
        free_bytes: what is free there; it is looked up.
    """
    free = shutil.disk_usage(FOLDER).free if free_bytes is None else free_bytes
    count, size = instance_count(models), region_bytes(models)
    if count * size > free:
        need = count * size // MIB
        raise ServerError(
            "can't start Triton",
            why=f"{count} model processes need {need} MiB of shared memory, {FOLDER} has {free // MIB} MiB free",
            mend=f"pack with fewer instances, or enlarge it: mount -o remount,size={2 * need}M {FOLDER}, or docker run "
            f"--shm-size={2 * need}m",
        )


def limits(*, cgroups: Path = CGROUPS, proc: Path = PROC) -> str:
    """What bounds threads and memory of a server that is started here, to be added to an error; empty for nothing.

    A model of the Python backend has some 36 threads (Triton 24.10), which take 0.3 GiB of a bound of addresses or data
    whether they use it or not. Where one can't be had, the server dies (SIGSEGV), and its log says nothing.

    Args:
        cgroups: where control groups are mounted.
        proc: where the kernel tells of processes.
    """
    told = []
    for name, kind in (("-d", resource.RLIMIT_DATA), ("-v", resource.RLIMIT_AS)):
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            told.append(f"ulimit {name} leaves {most / 2**30:.1f} GiB, of which each model takes some 0.3")
    for _, folder in folders("pids", cgroups=cgroups, proc=proc):
        with suppress(OSError, ValueError):  # it is not seen from here, or "max"
            most = int((folder / "pids.max").read_text(encoding="ascii"))
            told.append(f"{folder / 'pids.max'} leaves {most} threads, of which each model takes some 36")
    return "".join(f"; {each}" for each in told)


def remove_regions(prefix: str) -> None:
    """Remove what a killed server left in shared memory."""
    for path in FOLDER.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)
