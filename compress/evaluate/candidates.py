"""What a search tries: each way to compress, and all that the options ask for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from compress.evaluate.judge import Budget
from compress.options import Allocate, Calibrator, ExportOptions, Importance, OptimizeOptions
from compress.options.asked import repairs, trains_last

__all__ = ["Candidate", "candidates"]

Int8 = Literal["none", "static", "dynamic", "weights"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Candidate:
    """One way to compress.

    Attributes:
        prune: fraction of the MACs to remove.
        int8: its kind.
        calibrator: of the ranges of a static one.
        precision: of what is not quantized.
        trained: whether it is trained after it was pruned.
        importance, allocate: how channels are chosen, where that is asked for in several ways; else None.
    """

    prune: float
    int8: Int8
    calibrator: Calibrator | None = None
    precision: Precision = "fp32"
    trained: bool = False
    importance: Importance | None = None
    allocate: Allocate | None = None

    @property
    def name(self) -> str:
        """Short, for tables."""
        way = [word for word in (self.importance, self.allocate and f"by {self.allocate}") if word]
        pruned = " ".join((f"−{self.prune:.0%}", *way)) + ", trained" * self.trained if self.prune else "whole"
        return f"{pruned} · {self.kind}" + (f" {self.calibrator}" if self.calibrator else "")

    @property
    def kind(self) -> str:
        """The numbers that it computes with."""
        if self.int8 != "none":
            return f"INT8 {self.int8}"
        return "float" if self.precision == "fp32" else self.precision.upper()

    @property
    def whole(self) -> Candidate:
        """The same numbers, where nothing is pruned."""
        return Candidate(0.0, self.int8, self.calibrator, self.precision)

    @property
    def ladder(self) -> tuple[Importance | None, Allocate | None]:
        """What candidates have in common of which one loses more than another that is pruned more lightly."""
        return self.importance, self.allocate

    @property
    def in_float32(self) -> bool:
        """Whether it is what the others of its pruning are made of."""
        return self == self.floating

    @property
    def floating(self) -> Candidate:
        """What it is made of: the same channels and weights in float32."""
        return dataclasses.replace(self, int8="none", calibrator=None, precision="fp32")

    def budget(self, of: Budget, allowance: float) -> Budget:
        """What it may lose: one that is pruned and not trained so many points more, which a training may bring back."""
        more = allowance if self.prune and not self.trained else 0.0
        return dataclasses.replace(of, points=of.points + more)

    def options(self, base: OptimizeOptions) -> ExportOptions:
        """What `compress export` would be asked for."""
        shared = {
            field.name: getattr(base, field.name)
            for field in dataclasses.fields(base)
            if field.name in {known.name for known in dataclasses.fields(ExportOptions)}
        }
        static = self.int8 == "static"
        repair = bool(self.prune) and base.repair is not False
        half = self.precision != "fp32"
        smooth = base.smooth if static or self.int8 == "dynamic" else None
        shared |= {
            "prune": self.prune or None,
            "sensitivity": base.sensitivity if self.prune else None,
            "finetune": base.finetune if self.trained else None,
            "tune_training": base.tune_training if self.trained else None,
            "int8": None if self.int8 == "none" else self.int8,
            "calibration": base.calibration if static or smooth or repair or half else None,
            "calibrator": self.calibrator or "minmax",
            "smooth": smooth,
            "precision": self.precision,
            "importance": self.importance or base.importance[0],
            "allocate": self.allocate or base.allocate[0],
            "max_drop": None,  # the winner is judged by its search's own
        }
        return ExportOptions(**shared)


def candidates(options: OptimizeOptions) -> tuple[Candidate, ...]:
    """Every combination that can be made of the data at hand, lightly pruned ones first."""
    floats: tuple[Precision, ...] = ("fp32", *options.precision)
    whole = [Candidate(0.0, "none", precision=precision) for precision in dict.fromkeys(floats)]
    for int8 in dict.fromkeys(options.int8):  # one that is given twice is tried once
        if int8 in ("dynamic", "weights"):
            whole.append(Candidate(0.0, int8))
        elif int8 == "static" and options.calibration is not None:
            whole += [Candidate(0.0, int8, calibrator) for calibrator in dict.fromkeys(options.calibrators)]
    found: list[Candidate] = []
    trained = options.finetune is not None and not trains_last(options)
    for prune in sorted(set(options.prune)):
        if not prune:
            found += whole
            continue
        for way in _ways(options):
            # By latency, layers are timed in FP32 and in INT8 alone.
            kinds = [each for each in whole if each.precision == "fp32" or way["allocate"] == "macs"]
            told = {name: value for name, value in way.items() if len(set(getattr(options, name))) > 1}
            found += [dataclasses.replace(each, prune=prune, trained=trained, **told) for each in kinds]
    return tuple(found)


def _ways(options: OptimizeOptions) -> list[dict[str, Any]]:
    """How channels are chosen: what is asked for, without what can't be, unless nothing would be left."""
    asked = [(one, other) for one in dict.fromkeys(options.importance) for other in dict.fromkeys(options.allocate)]
    lacking = {"obs": not repairs(options), "taylor": options.finetune is None}
    able = [(one, other) for one, other in asked if not lacking.get(one) and (other == "macs" or one == "obs")]
    return [{"importance": importance, "allocate": allocate} for importance, allocate in able or asked]
