"""A share of the time goes for the least error that is found: never more time than allowed, never a worse choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from compress.prune.latency.allocate import Curve, Predicted, allocated, error_of
from compress.prune.latency.layers import Layer, Shape
from compress.prune.latency.tables import Table, monotone

WIDTH, STEP = 32, 8


def table(draw: st.DrawFn, rows: int, columns: int) -> Table:
    rises = st.floats(0.0, 1.0, allow_subnormal=False)
    held = np.array(draw(st.lists(rises, min_size=rows * columns, max_size=rows * columns))).reshape(rows, columns)
    counts = (8, 16, 32)
    return Table(counts[-rows:], counts[-columns:], 0.01 + held.cumsum(0).cumsum(1))


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Curve], Predicted]:
    """Layers in a row, some around a sum: what each reads and gives is of a group, or of none."""
    names = [f"g{at}" for at in range(draw(st.integers(1, 4)))]
    curves = []
    for name in names:
        costs = st.lists(st.floats(0.0, 1.0, allow_subnormal=False), min_size=3, max_size=3)
        curves.append(Curve(name, np.array([0, 8, 16, 24]), np.array([0.0, *np.cumsum(draw(costs))])))
    layers, tables = [], {}
    for at in range(draw(st.integers(1, 6))):
        reads = draw(st.sampled_from([None, *names]))
        gives = draw(st.sampled_from([None, *names]))
        shape = Shape("conv", (1, at + 1), WIDTH, WIDTH)
        layers.append(
            Layer(
                f"l{at}", shape, draw(st.integers(1, 2)), {reads: 1.0} if reads else {}, {gives: 1.0} if gives else {}
            )
        )
        tables[shape.key] = table(draw, draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 3])))
    return curves, Predicted(layers, tables)


@given(networks(), st.floats(0.0, 1.0), st.data())
def test_no_choice_takes_more_than_its_budget_and_none_that_is_known_is_better(
    network: tuple[list[Curve], Predicted], share: float, data: st.DataObject
) -> None:
    curves, predicted = network
    budget = predicted.total({}) * share
    known = [
        {curve.root: int(data.draw(st.sampled_from(list(curve.gone)))) for curve in curves}
        for _ in range(data.draw(st.integers(0, 3)))
    ]
    found = allocated(curves, predicted, budget, known)
    least = predicted.total({curve.root: int(curve.gone[-1]) for curve in curves})
    if found is None:
        assert least > budget
        return
    assert predicted.total(found) <= budget
    assert all(found[curve.root] in curve.gone for curve in curves)
    for other in known:
        assert predicted.total(other) > budget or error_of(curves, found) <= error_of(curves, other)


@given(networks(), st.floats(0.3, 0.9))
def test_no_group_could_have_units_back_within_the_time(network: tuple[list[Curve], Predicted], share: float) -> None:
    curves, predicted = network
    budget = predicted.total({}) * share
    found = allocated(curves, predicted, budget)
    assume(found is not None)
    assert found is not None
    for curve in curves:
        for gone in curve.gone:
            other = {**found, curve.root: int(gone)}
            assert error_of(curves, other) >= error_of(curves, found) or predicted.total(other) > budget


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_of_layers_by_themselves_the_choice_is_nearly_the_best_of_all(share: float) -> None:
    random = np.random.default_rng(0)
    curves, layers, tables = [], [], {}
    for at in range(4):
        errors = np.array([0.0, *random.random(3).cumsum()])
        curves.append(Curve(f"g{at}", np.array([0, 8, 16, 24]), errors))
        shape = Shape("linear", (at + 1,), WIDTH, WIDTH)
        layers.append(Layer(f"l{at}", shape, 1, {}, {f"g{at}": 1.0}))
        tables[shape.key] = Table((32,), (8, 16, 24, 32), random.random((1, 4)).cumsum(1))
    predicted = Predicted(layers, tables)
    budget = predicted.total({}) * share
    every = (
        {curve.root: int(gone) for curve, gone in zip(curves, counts, strict=True)}
        for counts in itertools.product(*(curve.gone for curve in curves))
    )
    best = min((error_of(curves, each) for each in every if predicted.total(each) <= budget), default=None)
    found = allocated(curves, predicted, budget)
    assert (found is None) == (best is None)
    assert found is None or best is None or error_of(curves, found) <= 1.05 * best


def test_what_takes_long_goes_and_what_takes_nothing_stays() -> None:
    """Both lose as much error by a channel: the one whose time does not fall by it keeps all."""
    errors = np.array([0.0, 0.1, 0.2, 0.3])
    curves = [Curve(name, np.array([0, 8, 16, 24]), errors) for name in ("slow", "free")]
    slow, free = Shape("linear", (64,), WIDTH, WIDTH), Shape("linear", (1,), WIDTH, WIDTH)
    tables = {slow.key: Table((32,), (8, 32), np.array([[1.0, 4.0]])), free.key: Table((32,), (8, 32), np.ones((1, 2)))}
    layers = [Layer("a", slow, 1, {}, {"slow": 1.0}), Layer("b", free, 1, {}, {"free": 1.0})]
    assert allocated(curves, Predicted(layers, tables), 4.0) == {"slow": 8, "free": 0}


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_a_table_never_falls_and_one_that_does_not_is_left_alone(rows: int, columns: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(0.01, 9.0), min_size=rows * columns, max_size=rows * columns))
    ms = np.array(values).reshape(rows, columns)
    for axis in (0, 1):
        assert (np.diff(monotone(ms), axis=axis) >= 0).all()
    rising = ms.cumsum(0).cumsum(1)
    np.testing.assert_allclose(monotone(rising), rising)


def test_between_counts_a_table_is_followed_on_its_lines_and_outside_it_ends() -> None:
    held = Table((8, 16), (8, 32), np.array([[1.0, 2.0], [3.0, 8.0]]))
    assert held.at(16, 32) == 8.0 == held.whole
    assert held.at(12, 8) == 2.0
    assert held.at(12, 20) == 3.5
    assert held.at(2, 2) == 1.0
    np.testing.assert_allclose(held.at(np.array([8, 16]), 32), [2.0, 8.0])
    alone = Table((3,), (8, 16), np.array([[1.0, 2.0]]))
    np.testing.assert_allclose(alone.at(3, np.array([8, 12, 16])), [1.0, 1.5, 2.0])
