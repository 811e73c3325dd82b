"""The GPU that models are measured on: its stream, its clock, and an error where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from compress.errors import StageError

__all__ = ["accelerator", "described", "elapsed_ms", "new_stream", "on_stream", "stream_handle"]


def accelerator() -> torch.device:
    """The CUDA device to use.

    Raises:
        StageError: there is none.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    raise StageError(
        "can't run on a GPU",
        why="torch sees no CUDA device" + ("" if torch.version.cuda else f": torch {torch.__version__} is for the CPU"),
        mend="run it where an NVIDIA GPU is, with a torch for CUDA (see docs/gpu.md), or leave --device out",
    )


def described(device: torch.device) -> Mapping[str, str | int]:
    """What a GPU is, for a report; nothing for the CPU."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    return {
        "gpu": found.name,
        "gpu_memory_bytes": found.total_memory,
        "compute_capability": f"{found.major}.{found.minor}",
        "cuda": str(torch.version.cuda),
    }


def new_stream(device: torch.device) -> Any:
    """A stream of its own: TensorRT synchronizes more on the default one. None on the CPU."""
    stream: Any = torch.cuda.Stream
    return stream(device) if device.type == "cuda" else None


def stream_handle(stream: Any) -> int:
    """The number by which CUDA libraries know a stream."""
    return 0 if stream is None else int(stream.cuda_stream)


class on_stream:  # noqa: N801  it is used like a function
    """Within it, torch works on the stream; at its end, the stream's work is done."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._inside: Any = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._stream is not None:
            self._inside.__exit__(*raised)
            self._stream.synchronize()


def elapsed_ms(work: Callable[[], Any], stream: Any, calls: int) -> list[float]:
    """Milliseconds that each call took: on a GPU between two CUDA events on the stream, else by the clock.

    Args:
        work: enqueues on the stream, or is done when it returns.
        stream: of `new_stream`.
        calls: how often.
    """
    if stream is None:
        found = []
        for _ in range(calls):
            start = time.perf_counter_ns()
            work()
            found.append((time.perf_counter_ns() - start) / 1e6)
        return found
    event: Any = torch.cuda.Event
    events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(calls)]
    for before, after in events:
        before.record(stream)
        work()
        after.record(stream)
    stream.synchronize()
    return [float(before.elapsed_time(after)) for before, after in events]
