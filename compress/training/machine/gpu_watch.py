"""What the driver says of a GPU while it trains (NVML): utilization, memory, power."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

__all__ = ["GpuWatch"]

MOST = 600  # samples that are kept; then every other one goes, and they are taken half as often


class GpuWatch:
    """Samples one GPU in a thread of its own; without NVML it has nothing, and says why.

    Args:
        device: its index among those that CUDA sees, or None for no GPU.
        seconds: between samples, at first.
    """

    def __init__(self, device: int | None, seconds: float = 1.0) -> None:
        self._device = device
        self._every = seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._start = time.monotonic()
        self.samples: list[dict[str, float]] = []
        self.reason: str | None = None

    def __enter__(self) -> Self:
        if self._device is None:
            return self
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(self._device).uuid}")
        except ImportError:
            self.reason = "the Python package 'nvidia-ml-py' is not installed"
        except Exception as err:  # NVML's errors have no common base that is there without it
            self.reason = f"NVML: {err}"
        else:
            self._thread = threading.Thread(target=self._run, args=(pynvml, handle), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, nvml: Any, handle: Any) -> None:
        while not self._stop.wait(self._every):
            try:
                self.samples.append(_sample(nvml, handle) | {"seconds": time.monotonic() - self._start})
            except nvml.NVMLError as err:
                self.reason = f"NVML: {err}"
                return
            if len(self.samples) >= MOST:
                self.samples = self.samples[::2]
                self._every *= 2


def _sample(nvml: Any, handle: Any) -> dict[str, float]:
    """Percent, bytes and watts."""
    return {
        "utilization": float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "memory_bytes": float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        "power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    }
