"""Sizes at which a branch on a size shows, where the usual ones, powers of two and their likes, take it alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["Range", "odd_sizes", "ranges_of"]

FAR = 1021  # a prime; what is larger is tried at half as much again
TIMES = 8
SMALL = (33, 34, 35)  # where one row more or less is a larger share of all


@dataclass(frozen=True)
class Range:
    """Sizes of a dimension for which what torch.export decided by them holds.

    Attributes:
        least, most: both with them; None where there is no end.
    """

    least: int | None
    most: int | None

    @property
    def beyond(self) -> tuple[int, ...]:
        """Sizes outside, next to its ends and farther."""
        above = () if self.most is None else (self.most + 1, 2 * self.most + 1)
        return (*above, *(() if self.least is None else (self.least - 1,)))

    def holds(self, size: int) -> bool:
        """Whether a size is inside."""
        return (self.least is None or size >= self.least) and (self.most is None or size <= self.most)

    def __str__(self) -> str:
        if self.least is None:
            return f"up to {self.most}"
        return f"from {self.least} on" if self.most is None else f"from {self.least} to {self.most}"


def odd_sizes(size: int) -> tuple[int, ...]:
    """Sizes beside a usual one: odd ones, a multiple of 3, twice an odd one, a smaller, and one far beyond.

    Args:
        size: that is usual.

    Returns:
        Sizes above 1, cheap ones first.
    """
    above = range(size + 1, size + 13)
    found = (
        *(SMALL if size > 2 * SMALL[-1] else ()),
        (size // 2) | 1,
        next(each for each in above if each % 6 == 3),
        next(each for each in above if each % 6 in (1, 5)),
        next(each for each in above if each % 4 == 2),
        min(TIMES * size + 3, max(FAR, (size + size // 2) | 1)),
    )
    return tuple(each for each in dict.fromkeys(found) if each > 1 and each != size)


def ranges_of(program: torch.export.ExportedProgram, names: Mapping[tuple[str, int], str]) -> dict[str, Range]:
    """By dimension the sizes for which a program holds, where it says that these are not all.

    A least size of 2 is torch.export's own: it says nothing of 1.

    Args:
        program: of torch.export.
        names: of dimensions, by the program's input and its axis.
    """
    found: dict[str, Range] = {}
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for (name, axis), dim in names.items():
        size = getattr(values.get(name), "shape", ())[axis : axis + 1]
        if not size or isinstance(size[0], int):
            continue
        span = program.range_constraints.get(size[0].node.expr)
        if span is None:
            continue
        least, most = _whole(span.lower), _whole(span.upper)
        least = least if least is not None and least > 2 else None
        if least is not None or most is not None:
            found[dim] = Range(least, most)
    return found


def _whole(end: object) -> int | None:
    """An end of a range; None for infinity, and for what torch writes in its place."""
    try:
        number = int(end)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None
    return int(number) if abs(number) < 1 << 31 else None
