"""Latency and throughput over batch sizes and thread counts, all models interleaved in each setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from compress.data.dataset import Dataset
from compress.data.sizes import typical_inputs
from compress.model import Model
from compress.runtime.backends import open_model
from compress.runtime.latency import FEWEST, latency

__all__ = ["Cell", "measure_grid"]


@dataclass(frozen=True)
class Cell:
    """One model in one setting.

    Attributes:
        model: its name.
        batch, threads: the setting.
        p50_ms, p99_ms: of a call.
        throughput: samples a second, from the median.
    """

    model: str
    batch: int
    threads: int
    p50_ms: float
    p99_ms: float
    throughput: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_grid(
    models: Mapping[str, Model],
    batches: Sequence[int],
    thread_counts: Sequence[int],
    *,
    data: Dataset | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Cell]:
    """Time every model at every batch size and thread count, on inputs of representative sizes.

    Args:
        models: by name; all of one signature.
        batches: samples in a call.
        thread_counts: for a model's operators.
        data: whose samples go in; random ones by default.
        progress: called with settings done and in all.
    """
    signature = next(iter(models.values())).signature
    found: list[Cell] = []
    for threads in thread_counts:
        opened = {name: open_model(model, threads=threads) for name, model in models.items()}
        for batch in batches:
            timed = latency(opened, typical_inputs(signature, data, batch), rounds=FEWEST)
            found += [
                Cell(name, batch, threads, took.p50_ms, took.p99_ms, 1000 * batch / took.p50_ms)
                for name, took in timed.items()
            ]
            progress(len(found) // len(models), len(thread_counts) * len(batches))
    return found
