"""Names beside points: none upon another, and each nearer to its own point than to any other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Bbox

__all__ = ["label_points", "plain"]

INK = "#999999"
CLEAR = 6.0  # pixels around a point that stay free
ALIKE = 9.0  # pixels between points that are drawn as one
STEPS, TURNS = 14, 16  # how far out a place is looked for, and in how many directions
# In steps, what a place costs that lies on a line, is as near to another point, or nearer to it or led past it.
ON_LINE, AS_NEAR, ANOTHERS = 2.0, 4.0, 16.0
MOST_NAMES = 3

Spot = tuple[float, float]
Segment = tuple[Spot, Spot]


def plain(figure: Figure | SubFigure) -> None:
    """Have its texts, as far as there are some, be no formulas: names come out of files, "$" and all."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)


def label_points(
    axes: Axes,
    points: Sequence[Spot],
    names: Sequence[str],
    *,
    size: float = 8,
    radii: Sequence[float] = (),
    others: Sequence[Spot] = (),
    lines: Sequence[Segment] = (),
) -> None:
    """Write a name beside each point, in the nearest place where it covers no other name and no point.

    Points that are alike share a label, a name a line. One that is not close to its point, or that could be taken for
    another's, has a thin line to it. The axes' limits, scales and texts are to be as they will be drawn.

    Args:
        axes: with the points drawn.
        points: in data coordinates.
        names: of these.
        size: of the letters, in points.
        radii: of the points, in points, where they are larger than a dot.
        others: points without a name, which stay free, too.
        lines: from point to point, in data coordinates; kept free where there is room.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None  # noqa: S101  axes are drawn in one
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    plain(figure)
    figure.draw_without_rendering()  # its layout is made here
    inside = axes.get_window_extent(renderer)

    def pixels(point: Spot) -> Spot:
        x, y = axes.transData.transform(point)
        return float(x), float(y)

    spots = [pixels(point) for point in points]
    clear = [max(CLEAR, radius * figure.dpi / 72) for radius in radii] or [CLEAR] * len(spots)
    around = [*spots, *map(pixels, others)]
    drawn = [Path([pixels(start), pixels(end)]) for start, end in lines]
    free = itertools.chain(clear, itertools.repeat(CLEAR))
    taken = [Bbox.from_bounds(x - far, y - far, 2 * far, 2 * far) for (x, y), far in zip(around, free, strict=False)]
    taken += [text.get_window_extent(renderer) for text in axes.texts]
    for group in _groups(spots):
        name = _shared([names[at] for at in group])
        probe = axes.text(0, 0, name, fontsize=size, va="bottom", parse_math=False)
        extent = probe.get_window_extent(renderer)
        probe.remove()
        x, y = spots[group[0]]
        foreign = [spot for spot in around if math.dist(spot, (x, y)) > ALIKE]
        box, led = _place((x, y), max(clear[at] for at in group), extent, inside, taken, foreign, drawn)
        taken.append(box)
        axes.annotate(
            name, points[group[0]], ((box.x0 - x) * 72 / figure.dpi, (box.y0 - y) * 72 / figure.dpi),
            textcoords="offset points", fontsize=size, va="bottom", parse_math=False,
            arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.6, "shrinkA": 0, "shrinkB": 3} if led else None,
        )  # fmt: skip


def _groups(spots: Sequence[Spot]) -> list[list[int]]:
    """Points that lie upon each other, by their place in the list."""
    groups: list[list[int]] = []
    for index, spot in enumerate(spots):
        near = next((group for group in groups if math.dist(spots[group[0]], spot) <= ALIKE), None)
        if near is None:
            groups.append([index])
        else:
            near.append(index)
    return groups


def _shared(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMES:
        return "\n".join(names)
    return f"{names[0]}\n… {len(names) - 2} more\n{names[-1]}"


def _place(
    spot: Spot,
    clear: float,
    name: Bbox,
    inside: Bbox,
    taken: Sequence[Bbox],
    foreign: Sequence[Spot],
    lines: Sequence[Path],
) -> tuple[Bbox, bool]:
    """The best free box, and whether it needs a line to its point; where none is free, the one beside it."""
    best, least = None, math.inf
    width, height = name.width, name.height
    for step, (dx, dy) in _offsets(width, height, clear):
        if step >= least:
            break
        box = Bbox.from_bounds(spot[0] + dx, spot[1] + dy, width, height)
        if not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1):
            continue
        if any(box.overlaps(other) for other in taken):
            continue
        own = _far(box, spot)
        as_near = any(_far(box, other) < own + CLEAR for other in foreign)
        anothers = any(_far(box, other) < own - 1 or _passes(box, spot, other) for other in foreign)
        on_line = any(line.intersects_bbox(box) for line in lines)
        cost = step + AS_NEAR * as_near + ANOTHERS * anothers + ON_LINE * on_line
        if cost < least:
            best, least = (box, step > 0 or as_near), cost
    return best or (Bbox.from_bounds(spot[0] + clear + 1, spot[1] + clear, width, height), False)


def _passes(box: Bbox, spot: Spot, other: Spot) -> bool:
    """Whether a line from the box to its point goes by another point."""
    start = (min(max(spot[0], box.x0), box.x1), min(max(spot[1], box.y0), box.y1))
    length = math.dist(start, spot)
    if length == 0:
        return False
    along = sum((o - s) * (e - s) for o, s, e in zip(other, start, spot, strict=True)) / length**2
    nearest = tuple(s + min(max(along, 0.0), 1.0) * (e - s) for s, e in zip(start, spot, strict=True))
    return math.dist(nearest, other) < CLEAR


def _far(box: Bbox, spot: Spot) -> float:
    """Pixels from a point to a box."""
    across = max(box.x0 - spot[0], 0.0, spot[0] - box.x1)
    up = max(box.y0 - spot[1], 0.0, spot[1] - box.y1)
    return math.hypot(across, up)


def _offsets(width: float, height: float, clear: float) -> Iterator[tuple[int, Spot]]:
    """Lower left corners of a box about a point: nearest first, to the right and above before elsewhere.

    On each ring first above and below, in the middle of it: such a name can't be taken for a neighbour's.
    """
    for step in range(STEPS):
        far = clear + 2 + step * height
        yield step, (-width / 2, far)
        yield step, (-width / 2, -far - height)
        for turn in range(TURNS):
            angle = math.pi / 4 + (turn + 1) // 2 * (-1) ** turn * 2 * math.pi / TURNS
            across, up = math.cos(angle), math.sin(angle)
            left = far * across if across >= 0 else far * across - width
            yield step, (left, far * up if up >= 0 else far * up - height)
