"""Names beside points cover neither each other nor the points."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from compress.report.plot_labels import label_points
from compress.report.plots import axes_of, svg_of


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


@pytest.mark.parametrize("apart", [0.05, 0.1, 0.2])
def test_no_name_is_nearer_to_another_point_than_to_its_own(apart: float) -> None:
    figure, axes = axes_of(4)
    points = [(1.0, 0.9), (1.0 + apart, 0.9), (1.0 + 2 * apart, 0.9), (5.0, 0.9), (5.0, 0.5)]
    names = ["fold_onnx", "original_onnx", "onnx_from_torch", "original", "prune_channels"]
    axes.scatter([x for x, _ in points], [y for _, y in points])
    axes.margins(x=0.16, y=0.3)
    label_points(axes, points, names, lines=[((x, 0.6), (x, 0.95)) for x, _ in points])
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    spots = {name: axes.transData.transform(point) for name, point in zip(names, points, strict=True)}
    for text in axes.texts:
        text.arrow_patch = None  # type: ignore[attr-defined]
        text.arrowprops = None  # type: ignore[attr-defined]
        box = text.get_window_extent(renderer)
        own = [far(box, spots[name]) for name in text.get_text().split("\n")]
        others = [far(box, spot) for name, spot in spots.items() if name not in text.get_text().split("\n")]
        assert min(own) <= min(others) + 1, text.get_text()


def far(box: Bbox, spot: Any) -> float:
    across, up = (max(low - at, 0, at - high) for at, low, high in zip(spot, box.min, box.max, strict=True))
    return float(np.hypot(across, up))


def test_a_name_that_looks_like_a_formula_is_drawn_as_it_is() -> None:
    figure, axes = axes_of(2.0)
    axes.barh([r"$\frac{$", "a$b$"], [1.0, 2.0])
    axes.set_xlabel(r"$\nothing")
    label_points(axes, [(1.0, 0.0)], [r"$\frac{$"])
    assert svg_of(figure).count(r"$\frac{$") >= 2
