"""Names beside points, none upon another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

__all__ = ["label_points"]

INK = "#999999"
CLEAR = 6.0  # pixels around a point that stay free
STEPS, TURNS = 14, 16  # how far out a place is looked for, and in how many directions


def label_points(axes: Axes, points: Sequence[tuple[float, float]], names: Sequence[str], *, size: float = 8) -> None:
    """Write a name beside each point, in the nearest place where it covers no other name and no point.

    Points that are alike share a label. One that is not beside its point gets a thin line to it. The axes' limits and
    scales are to be as they will be drawn.

    Args:
        axes: with the points drawn.
        points: in data coordinates.
        names: of these.
        size: of the letters, in points.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None  # noqa: S101  axes are drawn in one
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()  # its layout is made here
    inside = axes.get_window_extent(renderer)
    spots = [tuple(map(float, axes.transData.transform(point))) for point in points]
    shared: dict[tuple[int, int], list[int]] = {}
    for index, (x, y) in enumerate(spots):
        shared.setdefault((round(x / CLEAR), round(y / CLEAR)), []).append(index)
    taken = [Bbox.from_bounds(x - CLEAR, y - CLEAR, 2 * CLEAR, 2 * CLEAR) for x, y in spots]
    for group in shared.values():
        first = group[0]
        name = ", ".join(names[at] for at in group) if len(group) < 3 else f"{names[first]} … {names[group[-1]]}"
        probe = axes.text(0, 0, name, fontsize=size)
        extent = probe.get_window_extent(renderer)
        probe.remove()
        x, y = spots[first]
        box, far = _place(x, y, extent.width, extent.height, inside, taken)
        taken.append(box)
        axes.annotate(
            name, points[first], ((box.x0 - x) * 72 / figure.dpi, (box.y0 - y) * 72 / figure.dpi),
            textcoords="offset points", fontsize=size,
            arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.6, "shrinkA": 0, "shrinkB": 3} if far else None,
        )  # fmt: skip


def _place(x: float, y: float, width: float, height: float, inside: Bbox, taken: Sequence[Bbox]) -> tuple[Bbox, bool]:
    """The nearest free box, and whether it is away from its point; where there is none, the one beside it."""
    for step, (dx, dy) in _offsets(width, height):
        box = Bbox.from_bounds(x + dx, y + dy, width, height)
        free = not any(box.overlaps(other) for other in taken)
        if free and inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1:
            return box, step > 0
    return Bbox.from_bounds(x + CLEAR + 1, y + CLEAR, width, height), False


def _offsets(width: float, height: float) -> Iterator[tuple[int, tuple[float, float]]]:
    """Lower left corners of a box about a point: nearest first, to the right and above before elsewhere."""
    for step, turn in itertools.product(range(STEPS), range(TURNS)):
        angle = math.pi / 4 + (turn + 1) // 2 * (-1) ** turn * 2 * math.pi / TURNS
        far = CLEAR + 2 + step * height
        across, up = math.cos(angle), math.sin(angle)
        left = far * across if across >= 0 else far * across - width
        yield step, (left, far * up if up >= 0 else far * up - height)
