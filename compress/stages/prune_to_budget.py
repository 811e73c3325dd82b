"""Structural pruning until the finished model keeps a budget: milliseconds, bytes or weights, as measured."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from compress.artifact import Signature
from compress.backends import open_model
from compress.errors import BudgetError, RecipeError, StageError
from compress.latency import latency
from compress.measure import torch_params
from compress.model import Model, OnnxModel, TorchModel, sample_inputs
from compress.stages import Given, Progress, Stage
from compress.stages.prune_channels import PruneChannels

__all__ = ["PruneToBudget"]

STEPS = 7
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
    """

    prune: PruneChannels
    budget: Literal["latency_ms", "size_bytes", "params"]
    limit: float
    tail: tuple[Stage, ...]
    threads: int = 1

    name: ClassVar[str] = "prune_to_budget"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        prune = {name: value for name, value in self.prune.options.items() if name != "fraction"}
        tail = [[stage.name, dict(stage.options)] for stage in self.tail]
        return {"budget": self.budget, "limit": self.limit, "prune": prune, "tail": tail, "threads": self.threads}

    def check(self, model: Model) -> None:
        if not self.limit > 0:
            raise RecipeError(
                f"can't keep a budget of {self.limit:g}",
                why="--target-latency-ms, --target-size-mb and --target-params are above 0",
                mend="give the largest value that you can accept",
            )
        self.prune.check(model)

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:  # noqa: ARG002
        unit = UNITS[self.budget]
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
                details={"budget": self.budget, "limit": self.limit, "reached": whole, "tried": tried},
            )
        prepared = self.prune.prepare(model, _silent)
        lowest, highest = 0.0, MOST
        best: tuple[float, float, Given] | None = None
        nearest: tuple[float, float] = (0.0, whole)
        for step in range(STEPS):
            fraction = (lowest + highest) / 2 if step else MOST / 2
            try:
                given = dataclasses.replace(self.prune, fraction=fraction).cut(prepared, _silent)
                value = self._value(given.model)
            except StageError:  # more than this model can lose
                highest = fraction
                continue
            note(step + 2, fraction, value)
            nearest = min(nearest, (fraction, value), key=lambda pair: pair[1])
            if value <= self.limit * ROOM[self.budget]:
                highest, best = fraction, (fraction, value, given)
            else:
                lowest = fraction
        if best is None:
            raise BudgetError(
                f"can't reach {unit.format(self.limit)} by pruning",
                why=f"the nearest is {unit.format(nearest[1])} with {nearest[0]:.0%} of the MACs removed",
                mend="add --int8, allow more, or start from a smaller architecture",
            )
        fraction, value, given = best
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

    def _value(self, model: Model) -> float:
        if self.budget == "params":
            assert isinstance(model, TorchModel)  # noqa: S101  the search prunes torch models
            return float(torch_params(model.module))
        with tempfile.TemporaryDirectory() as name:
            for index, stage in enumerate(self.tail):
                folder = Path(name) / str(index)
                folder.mkdir()
                model = stage.run(model, folder, _silent).model
            assert isinstance(model, OnnxModel)  # noqa: S101  the tail ends in a file
            if self.budget == "size_bytes":
                return float(model.path.stat().st_size)
            return _p50(model, model.signature, self.threads)


def _p50(model: OnnxModel, signature: Signature, threads: int) -> float:
    opened = {"candidate": open_model(model, threads=threads)}
    if opened["candidate"].emulated:
        raise StageError(
            "can't prune to a latency",
            why="the result is in BF16, which ONNX Runtime only emulates on this CPU",
            mend="take --precision fp32 to search with, or give --target-params or --target-size-mb",
        )
    found = latency(opened, sample_inputs(signature, 1))["candidate"]
    # A budget is kept when all of its interval keeps it.
    return found.p50_ms if found.high_ms is None else found.high_ms


def _silent(_done: int, _total: int, _note: str) -> None:
    pass
