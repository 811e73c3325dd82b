"""Layers to keep in float are recommended where samples that did not choose them prove it, and never by chance."""

from __future__ import annotations

import numpy as np
import pytest

from compress.jobs.exclusions import Errors, exclusions, gone, mends

SAMPLES = 64


def errors(rng: np.random.Generator, scale: float = 1.0) -> Errors:
    """Few samples have most of the error."""
    return Errors(*(scale * rng.lognormal(0, 2, SAMPLES) for _ in range(2)))


def changed(whole: Errors, rng: np.random.Generator, spread: float, factor: float = 1.0) -> Errors:
    """As much error on the mean, other in each sample."""
    return Errors(
        *(factor * part * rng.lognormal(-(spread**2) / 2, spread, SAMPLES) for part in (whole.choosing, whole.proving))
    )


def recommended(layers: dict[str, Errors], whole: Errors) -> tuple[str, ...]:
    def together(names: tuple[str, ...]) -> Errors:
        """What goes adds up; no error is below 0."""
        parts = [(whole.choosing - layers[n].choosing, whole.proving - layers[n].proving) for n in names]
        left = whole.choosing - sum(a for a, _ in parts), whole.proving - sum(b for _, b in parts)
        return Errors(*(np.maximum(part, 0) for part in left))

    names, found, _ = exclusions(layers, whole, together)
    return names if found is not None and mends(found) else ()


def test_layers_that_change_nothing_on_the_mean_are_hardly_ever_recommended() -> None:
    wrong = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        whole = errors(rng)
        wrong += bool(recommended({f"l{at}": changed(whole, rng, 0.5) for at in range(20)}, whole))
    assert wrong <= 200 * 0.05, "half of the 5% that lie outside of an interval are beyond its lower end"


def test_a_layer_that_has_a_fifth_of_the_error_is_found_among_others() -> None:
    rng = np.random.default_rng(0)
    whole = errors(rng)
    layers = {f"l{at}": changed(whole, rng, 0.01) for at in range(20)} | {"coarse": changed(whole, rng, 0.1, 0.8)}
    assert recommended(layers, whole) == ("coarse",)


def test_what_mends_only_the_samples_that_chose_is_not_recommended() -> None:
    rng = np.random.default_rng(0)
    whole = errors(rng)
    assert recommended({"lucky": Errors(0.5 * whole.choosing, 1.1 * whole.proving)}, whole) == ()


@pytest.mark.parametrize("factor", [0.99, 1.0, 1.5])
def test_what_takes_nothing_worth_it_is_not_recommended(factor: float) -> None:
    whole = errors(np.random.default_rng(0))
    assert recommended({"small": Errors(factor * whole.choosing, factor * whole.proving)}, whole) == ()


def test_two_layers_are_kept_where_both_take_more_than_one() -> None:
    whole = errors(np.random.default_rng(0))
    layers = {name: Errors(f * whole.choosing, f * whole.proving) for name, f in (("a", 0.7), ("b", 0.8), ("c", 0.99))}
    assert recommended(layers, whole) == ("a", "b")


def test_no_error_at_all_has_no_share() -> None:
    none = Errors(np.zeros(4), np.zeros(4))
    assert recommended({"a": none}, none) == ()
    assert gone(np.zeros(4), np.zeros(4)).share == 0
