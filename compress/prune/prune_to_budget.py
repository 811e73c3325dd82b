"""Structural pruning until the finished model keeps a budget: milliseconds, bytes or weights, as measured."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from compress.artifact import Runtime, Signature
from compress.errors import BudgetError, RecipeError, StageError
from compress.formats.files import size_of
from compress.model import Model, OnnxModel, TorchModel, sample_inputs
from compress.prune.finished import finished
from compress.prune.prune_channels import Prepared, PruneChannels
from compress.runtime.backends import open_model
from compress.runtime.latency import BLOCK_SECONDS, latency
from compress.runtime.machine import machine_of
from compress.runtime.measure import torch_params
from compress.stage import Given, Progress, Stage

__all__ = ["PruneToBudget"]

STEPS = 7
MEND = "add --int8, allow more, or start from a smaller architecture"
MOST = 0.95
# A limit in time is aimed at with room for the machine's noise.
ROOM = {"latency_ms": 0.97, "size_bytes": 1.0, "params": 1.0}
UNITS = {"latency_ms": "{:.3f} ms", "size_bytes": "{:,.0f} bytes", "params": "{:,.0f} weights"}


@dataclass(frozen=True)
class PruneToBudget:
    """Find, by bisection, the smallest fraction of MACs whose removal brings the finished model inside the budget.

    Each candidate goes through the stages that follow (without training, which changes no size and no time) and is
    measured as it would be shipped.

    Attributes:
        prune: how to prune; its fraction is what is searched for.
        budget: what is limited: p50 at batch 1 in ms, bytes of the file, or number of weights.
        limit: its largest value.
        tail: the stages from torch to the finished file.
        threads: for the latency.
        runtime: that times the file.
    """

    prune: PruneChannels
    budget: Literal["latency_ms", "size_bytes", "params"]
    limit: float
    tail: tuple[Stage, ...]
    threads: int = 1
    runtime: Runtime = "onnxruntime"

    name: ClassVar[str] = "prune_to_budget"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        prune = {name: value for name, value in self.prune.options.items() if name != "fraction"}
        tail = [[stage.name, dict(stage.options)] for stage in self.tail]
        found = {"budget": self.budget, "limit": self.limit, "prune": prune, "tail": tail, "threads": self.threads}
        clock = {"machine": machine_of(self.threads), "runtime": self.runtime}
        return found | (clock if self.budget == "latency_ms" else {})

    def check(self, model: Model) -> None:
        if not self.limit > 0:
            raise RecipeError(
                f"can't keep a budget of {self.limit:g}",
                why="--target-latency-ms, --target-size-mb and --target-params are above 0",
                mend="give the largest value that you can accept",
            )
        self.prune.check(model)

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
        unit = UNITS[self.budget]
        model = dataclasses.replace(model, macs_gone=0.0, lost=None)  # what is measured counts, not what went before
        tried: list[dict[str, float]] = []

        def note(step: int, fraction: float, value: float) -> None:
            tried.append({"fraction": fraction, "value": value})
            progress(step, STEPS + 2, f"−{fraction:.0%} MACs: {unit.format(value)}")

        progress(0, STEPS + 2, "measuring the unpruned model")
        whole = self._value(model)
        note(1, 0.0, whole)
        if whole <= self.limit:
            return Given(
                model,
                did=f"nothing: {unit.format(whole)} is inside {unit.format(self.limit)} without pruning",
                details={
                    "macs_removed": 0.0,
                    "budget": self.budget,
                    "limit": self.limit,
                    "reached": whole,
                    "tried": tried,
                },
            )
        try:
            prepared = self.prune.prepare(model, progress, folder.parent)
        except StageError as err:
            raise BudgetError(f"can't reach {unit.format(self.limit)} by pruning", why=err.why, mend=MEND) from err
        while True:  # until what is removed is proven; each time around there is a group less
            groups = len(prepared.channels.groups)
            best, nearest = self._search(prepared, whole, note)
            if best is None:
                raise BudgetError(
                    f"can't reach {unit.format(self.limit)} by pruning",
                    why=f"the nearest is {unit.format(nearest[1])} with {nearest[0]:.0%} of the MACs removed",
                    mend=MEND,
                )
            fraction, value = best
            try:
                given = dataclasses.replace(self.prune, fraction=fraction).cut(prepared, _silent)
            except StageError:  # out of reach without the groups that just dropped out
                continue
            if len(prepared.channels.groups) == groups:
                break
        progress(STEPS + 2, STEPS + 2, unit.format(value))
        return Given(
            given.model,
            did=f"{given.did}: {unit.format(value)} as finished, the limit is {unit.format(self.limit)}",
            details={
                **given.details,
                "budget": self.budget,
                "limit": self.limit,
                "reached": value,
                "fraction": fraction,
                "tried": tried,
            },
            warnings=given.warnings,
        )

    def _search(
        self, prepared: Prepared, whole: float, note: Callable[[int, float, float], None]
    ) -> tuple[tuple[float, float] | None, tuple[float, float]]:
        """The smallest fraction inside the limit, if there is one, and the nearest to it, each with its value."""
        lowest, highest = 0.0, MOST
        best: tuple[float, float] | None = None
        nearest = (0.0, whole)
        for step in range(STEPS):
            fraction = (lowest + highest) / 2
            try:
                given = dataclasses.replace(self.prune, fraction=fraction).cut(prepared, _silent, prove=False)
                value = self._value(given.model)
            except StageError:  # more than this model can lose
                highest = fraction
                continue
            note(step + 2, fraction, value)
            nearest = min(nearest, (fraction, value), key=lambda pair: pair[1])
            if value <= self.limit * ROOM[self.budget]:
                highest, best = fraction, (fraction, value)
            else:
                lowest = fraction
        return best, nearest

    def _value(self, model: Model) -> float:
        if self.budget == "params":
            assert isinstance(model, TorchModel)  # noqa: S101  the search prunes torch models
            return float(torch_params(model.module))
        with tempfile.TemporaryDirectory() as name:
            file = finished(model, self.tail, Path(name))
            if self.budget == "size_bytes":
                return float(size_of(file.path))
            return _p50(dataclasses.replace(file, runtime=self.runtime), file.signature, self.threads)


def _p50(model: OnnxModel, signature: Signature, threads: int) -> float:
    opened = {"candidate": open_model(model, threads=threads)}
    if opened["candidate"].emulated:
        raise StageError(
            "can't prune to a latency",
            why="the result is in BF16, which ONNX Runtime only emulates on this CPU",
            mend="take --precision fp32 or --runtime openvino, or give --target-params or --target-size-mb",
        )
    found = latency(opened, sample_inputs(signature, 1), block_seconds=BLOCK_SECONDS)["candidate"]
    # A budget is kept when all of its interval keeps it.
    return found.p50_ms if found.high_ms is None else found.high_ms


def _silent(_done: int, _total: int, _note: str) -> None:
    pass
