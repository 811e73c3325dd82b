"""Names beside points cover neither each other nor the points."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

from compress.plot_labels import label_points
from compress.plots import axes_of, svg_of


@pytest.mark.parametrize("seed", range(6))
def test_names_cover_nothing(seed: int) -> None:
    rng = random.Random(seed)
    figure, axes = axes_of(5)
    points = [(10 ** rng.uniform(0, 0.5 + seed / 3), rng.uniform(0.7, 0.75 + seed / 50)) for _ in range(16)]
    names = [f"a stage of name {index}" for index in range(len(points))]
    axes.scatter([x for x, _ in points], [y for _, y in points])
    axes.set_xscale("log")
    axes.margins(x=0.16, y=0.3)
    label_points(axes, points, names)
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    texts = [text for text in axes.texts if isinstance(text, Annotation)]
    for text in texts:
        text.arrow_patch = None
        text.arrowprops = None
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    spots = [axes.transData.transform(point) for point in points]
    assert not [spot for spot in spots for box in boxes if box.contains(*spot)]
    assert svg_of(figure).count("a stage of name") >= len(texts)


def test_points_in_one_place_share_a_name() -> None:
    _, axes = axes_of(4)
    axes.scatter([1, 1, 1, 2], [1, 1, 1, 2])
    label_points(axes, [(1, 1), (1, 1), (1, 1), (2, 2)], ["a", "b", "c", "d"])
    assert [text.get_text() for text in axes.texts] == ["a\nb\nc", "d"]
