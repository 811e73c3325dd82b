"""Several processes of this machine that train together.

They find each other by a file, not by torchrun's rendezvous, whose port is open to every network.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
from torch import distributed as dist

from compress.runtime.measure import cores

__all__ = ["STORE", "all_here", "end_with_parent", "ended_as", "join", "launch", "lost_another"]

STORE = "COMPRESS_TRAINING_STORE"  # path of the file; set in the processes that were launched
GRACE = 10.0  # seconds that the others have to end by themselves when one has failed
EVERY = 0.1
PATIENCE = timedelta(minutes=30)  # of one for another
END = timedelta(days=1)  # of all for the first, which judges and writes at the end


def launch(command: Sequence[str], count: int, log: TextIO, told: Callable[[str], None]) -> list[int]:
    """Run so many processes to their end; if one fails, all end.

    Args:
        command: of each; RANK and the others that torchrun sets are in its environment.
        count: of them.
        log: gets what they write, but for the first one's stdout.
        told: is given each line of that.

    Returns:
        Their exit codes; that of one that a signal ended is negative.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = []
        for rank in range(count):
            out = subprocess.PIPE if rank == 0 else log
            environment = _environment(rank, count, Path(folder) / "store")
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )
            stack.enter_context(contextlib.closing(process.stdin))  # type: ignore[type-var]  # a pipe was asked for
            stack.callback(_end, process)
            running.append(process)
        threading.Thread(target=_end_together, args=(running,), daemon=True).start()
        assert running[0].stdout is not None  # noqa: S101  a pipe was asked for
        with running[0].stdout as lines:
            for line in lines:
                told(line)
        return [process.wait() for process in running]


def _environment(rank: int, count: int, store: Path) -> dict[str, str]:
    usual = {
        "OMP_NUM_THREADS": str(max(1, cores() // count)),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    told = {name: str(value) for name, value in ranks.items()}
    told["TORCHELASTIC_RUN_ID"] = "launched"  # by which Lightning sees that others start its processes
    return usual | os.environ | told | {STORE: str(store)}


def _end_together(running: Sequence[subprocess.Popen[str]]) -> None:
    """One that waits for another that is gone would wait for minutes."""
    while not any(process.poll() for process in running):
        if all(process.poll() == 0 for process in running):
            return
        time.sleep(EVERY)
    until = time.monotonic() + GRACE
    while time.monotonic() < until and any(process.poll() is None for process in running):
        time.sleep(EVERY)
    for process in running:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ended_as(codes: Sequence[int]) -> str | None:
    """Which one failed, and how; None where none did.

    One that a signal ended is the cause of what happened to the others; but SIGTERM came from here.
    """
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return None
    rank = min(failed, key=lambda rank: (codes[rank] == -signal.SIGTERM, codes[rank] > 0))
    code = codes[rank]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"process {rank + 1} of {len(codes)} ended with {how}"


def lost_another(err: BaseException | None) -> bool:
    """Whether an error of torch tells that another process is gone, and so nothing of what this one computed.

    gloo has no error of its own: what it raises names its sources.
    """
    return isinstance(err, dist.DistError) or (isinstance(err, RuntimeError) and "gloo/transport" in str(err))


def all_here() -> None:
    """Wait for all processes that train together; where there are no others, do nothing."""
    if dist.is_initialized():
        dist.barrier(dist.new_group(timeout=END, backend="gloo"))


def end_with_parent() -> None:
    """For a process that was launched: the pipe to its stdin closes with the process that launched it."""

    def wait() -> None:
        os.read(0, 1)  # sys.stdin's lock would be held when the interpreter ends
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def join(kind: str) -> None:
    """Meet the others that were launched; where this process was not, do nothing.

    Args:
        kind: of the devices: "cpu" or "cuda".
    """
    store = os.environ.get(STORE)
    if store is None or dist.is_initialized():
        return
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if kind == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
        atexit.register(dist.destroy_process_group)  # which NCCL asks for
    dist.init_process_group(backend, init_method=f"file://{store}", timeout=PATIENCE, world_size=count, rank=rank)
