"""Where the time of a training step goes, in words, and as a trace for the browser (chrome://tracing, Perfetto)."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["Profile"]

SKIPPED, STEPS = 5, 10
PHASES = {
    "data": "data loading",
    "copy": "copies to the device",
    "teacher": "the original's answers",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}
OTHER = "the loop itself"


class Profile:
    """Watches some steps, after the first few.

    Args:
        trace: is written there; None watches nothing.
        device: that trains.
    """

    def __init__(self, trace: Path | None, device: torch.device) -> None:
        self._trace = trace
        self._device = device
        self._step = 0
        self._seconds: dict[str, float] = defaultdict(float)
        self._start = 0.0
        self._profiler: Any = None
        self.figures: dict[str, Any] = {}

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """A part of a step."""
        return nullcontext() if self._profiler is None else self._timed(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with record_function(PHASES[name]):
            yield
            self._wait()
        self._seconds[name] += time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def begins(self) -> None:
        """A step begins: before its batch is asked for."""
        if self._trace is None or self.figures:
            return
        self._step += 1
        if self._step == SKIPPED + 1:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write to the terminal
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
            self._profiler = profile(activities=kinds)
            self._profiler.__enter__()
            self._wait()
            self._start = time.perf_counter()
        elif self._step > SKIPPED + STEPS:
            self._close(STEPS)

    def close(self) -> None:
        """No more steps; those that were watched are counted."""
        self._close(self._step - SKIPPED)

    def _close(self, steps: int) -> None:
        if self._profiler is None or self._trace is None or steps < 1:
            return
        self._wait()
        seconds = time.perf_counter() - self._start
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._trace))
        shares = {PHASES[name]: spent / seconds for name, spent in self._seconds.items()}
        shares[OTHER] = max(0.0, 1 - sum(shares.values()))
        averages = profiler.key_averages()
        self.figures = {
            "steps": steps,
            "step_ms": 1e3 * seconds / steps,
            "shares": dict(sorted(shares.items(), key=lambda item: -item[1])),
            "operators": _operators(averages, cuda=self._device.type == "cuda"),
            "trace": self._trace.name,
        }
        if self._device.type == "cuda":
            busy = sum(event.self_device_time_total for event in averages) / 1e6
            self.figures["device_idle"] = max(0.0, 1 - busy / seconds)
        self.figures["words"] = _words(self.figures)


def _operators(averages: Any, *, cuda: bool) -> dict[str, float]:
    """Share of the time that operators took themselves, of the five that took most."""
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    times = {event.key: getattr(event, key) for event in averages if event.key not in PHASES.values()}
    total = sum(times.values()) or 1
    most = sorted(times, key=lambda name: -times[name])[:5]
    return {name: times[name] / total for name in most}


def _words(figures: dict[str, Any]) -> list[str]:
    shares = figures["shares"]
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    words = [f"a step took {figures['step_ms']:.1f} ms (of {figures['steps']}, watched): {parts}"]
    operators = ", ".join(f"{name} {share:.0%}" for name, share in figures["operators"].items())
    words.append(f"most time in: {operators}")
    if shares.get(PHASES["data"], 0) > 0.15:
        words.append("the training waits for data: more --loader-workers, or --cache-data, would help")
    if shares.get(PHASES["copy"], 0) > 0.1:
        words.append("copies to the device are slow: send fewer bytes, such as uint8 images that the model scales")
    if figures.get("device_idle", 0) > 0.3:
        words.append(f"the GPU was idle for {figures['device_idle']:.0%} of it: a larger --batch-size would help")
    return words
