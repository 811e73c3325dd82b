"""Sizes at which a branch on a size shows, where the usual ones, powers of two and their likes, take it alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["LEAST", "STEPS", "Range", "nearest", "odd_sizes", "ranges_of"]

FAR = 1021  # a prime; what is larger is tried at half as much again
TIMES = 8
SMALL = (33, 34, 35)  # where one row more or less is a larger share of all
LEAST = (1, 2)  # a text of one token, a picture of one row
STEPS = (2, 4, 8, 16, 32, 64, 3, 5, 7, 10, 12, 14, 20, 28, 48, 80, 160, 320)
"""Of networks that take multiples only: they go down by as much, or cut into as large pieces."""
WALK = 64
"""Sizes in a row, of which a network takes one, whatever it goes down by."""


@dataclass(frozen=True)
class Range:
    """Sizes of a dimension for which what torch.export decided by them holds.

    Attributes:
        least, most: both with them; None where there is no end.
    """

    least: int | None
    most: int | None

    def beyond(self, step: int = 1, usual: int = 0) -> tuple[tuple[int, ...], ...]:
        """Sizes outside: groups of them, next to its ends and farther, of each of which one that runs is enough.

        Each has a size that is whole steps from the usual one first, then so many in a row that most networks take one.

        Args:
            step: in which a network takes its sizes.
            usual: one that it takes.
        """
        groups: list[tuple[int, ...]] = []
        if self.most is not None:
            first = self.most + 1 + (usual - self.most - 1) % step
            for begin, whole in ((self.most + 1, first), (2 * self.most + 1, first + self.most // step * step)):
                groups.append((whole, *range(begin, begin + WALK)))
        if self.least is not None:
            last = self.least - 1
            groups.append((last - (last - usual) % step, *range(last, max(last - WALK, 0), -1)))
        found = (tuple(dict.fromkeys(size for size in group if size > 0)) for group in groups)
        return tuple(filter(None, found))

    def holds(self, size: int) -> bool:
        """Whether a size is inside."""
        return (self.least is None or size >= self.least) and (self.most is None or size <= self.most)

    def __str__(self) -> str:
        if self.least is None:
            return f"up to {self.most}"
        return f"from {self.least} on" if self.most is None else f"from {self.least} to {self.most}"


def odd_sizes(size: int, step: int = 1) -> tuple[int, ...]:
    """Sizes beside a usual one: odd ones, a multiple of 3, twice an odd one, small ones, and one far beyond.

    Args:
        size: that is usual.
        step: where a network takes none but those that are whole steps from the usual one.

    Returns:
        Such sizes above 0, counted in steps: cheap ones first.
    """
    here, rest = divmod(size, step)
    above = range(here + 1, here + 13)
    found = (
        *LEAST,
        *(SMALL if here > 2 * SMALL[-1] else ()),
        (here // 2) | 1,
        next(each for each in above if each % 6 == 3),
        next(each for each in above if each % 6 in (1, 5)),
        next(each for each in above if each % 4 == 2),
        min(TIMES * here + 3, max(FAR // step, (here + here // 2) | 1)),
    )
    return tuple(each * step + rest for each in dict.fromkeys(found) if each != here)


def nearest(sizes: Iterable[int], usual: int, step: int = 1) -> tuple[int, ...]:
    """The sizes that are next to a usual one, above and below it: whole steps away, then any; and the smallest.

    Args:
        sizes: some.
        usual: beside which they lie.
        step: that a network goes by.
    """
    every = np.unique(np.fromiter(sizes, np.int64))
    found: list[int] = []
    for some in (every[(every - usual) % step == 0], every):
        found += [*some[some > usual][:1].tolist(), *some[some < usual][-1:].tolist()]
    return tuple(dict.fromkeys((*found, *every[:1].tolist())))


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
