"""How far two arrays are apart where some values are far above the rest: a mask's fills, or a column of another scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compress.data.dataset import Dataset
from compress.evaluate.compare import batch_difference
from compress.evaluate.judge import Judge
from compress.evaluate.metrics import METRICS, cosine_similarity
from compress.evaluate.parity import difference
from compress.evaluate.runtime_choice import distances
from compress.model import Arrays
from compress.model.answers import apart
from compress.model.apart import by_scale, fills_of, share_of_largest, share_of_own_size, without_fills
from compress.quantize.beside import _Seen

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
SCORES = RNG.standard_normal((8, 12)).astype(np.float32)
OTHERS = RNG.standard_normal((8, 12)).astype(np.float32)  # of nothing that was asked
FILLS = [-1e9, -3.4e38, np.finfo(np.float32).min, 1e8, -65504.0, -1e4]
MASKS = {
    "a few": np.arange(12) < 1,
    "most": np.arange(12) > 1,
    "one in all": (np.arange(12) == 0) & (np.arange(8) == 3)[:, None],
}


def masked(values: Array, fill: float, mask: str) -> Array:
    return np.where(MASKS[mask], np.float32(fill), values)


class Gives:
    """A model that gives what it is given, changed."""

    runtime = "numpy"
    emulated = False

    def __init__(self, change: Any) -> None:
        self._change = change

    def infer(self, inputs: Arrays) -> Arrays:
        return {"y": self._change(inputs["x"])}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("mask", ["a few", "most"])
def test_a_fill_hides_no_difference_in_the_rest(fill: float, mask: str) -> None:
    """Whatever it is, and however many there are."""
    want, same, other = (masked(values, fill, mask) for values in (SCORES, SCORES * np.float32(1 + 1e-6), OTHERS))
    assert share_of_largest(want, same) < 1e-5 < 0.1 < share_of_largest(want, other)
    assert share_of_own_size(want, same) < 1e-5 < 0.1 < share_of_own_size(want, other)
    assert difference(want, same).fits
    assert not difference(want, other).fits
    assert cosine_similarity(want, other).mean() < 0.5 < 1 - 1e-6 < cosine_similarity(want, same).mean()
    found = distances({"a": Gives(lambda x: want), "b": Gives(lambda x: other)}, "a", [{"x": want}])
    assert found["b"] > 0.5


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("mask", ["a few", "most"])
def test_what_is_a_fill_is_one_in_the_other_too(fill: float, mask: str) -> None:
    want, without = masked(SCORES, fill, mask), SCORES
    assert share_of_largest(want, without) > 0.5
    assert share_of_largest(without, want) > 0.5
    assert not difference(want, without).fits
    assert cosine_similarity(want, without).mean() < 0.5
    assert METRICS["mse"].per_sample({"y": without}, {"y": want}, None).mean() > 1e6  # type: ignore[misc]


@pytest.mark.parametrize("fill", [-1e9, -3.4e38])
def test_one_fill_alone_hides_nothing(fill: float) -> None:
    want, other = masked(SCORES, fill, "one in all"), masked(OTHERS, fill, "one in all")
    assert cosine_similarity(want, other)[3] < 0.7
    assert share_of_largest(want, other) > 0.1
    assert distances({"a": Gives(lambda x: want), "b": Gives(lambda x: other)}, "a", [{"x": want}])["b"] > 0.5


def test_fills_that_moved_by_rounding_set_no_scale() -> None:
    """In double precision -1e9 + score is another number for each score: most of what differs are such."""
    want = SCORES.astype(np.float64) + np.where(MASKS["most"], -1e9, 0)
    got = want + np.where(MASKS["most"], 1e-3, 0.5)
    assert share_of_own_size(want, got) > 0.1


@pytest.mark.parametrize("scale", [1.0, 1e5, 1e9, 1e20])
def test_numbers_are_judged_in_any_unit(scale: float) -> None:
    """Sales in cents are no fills: they differ from one another."""
    prices = (RNG.random((50, 1)) + 1) * scale
    others = (RNG.random((50, 1)) + 1) * scale
    for want, got in (
        (prices, others),
        (np.hstack([prices, RNG.random((50, 3))]), np.hstack([others, np.ones((50, 3))])),
    ):
        assert not fills_of(want).any()
        assert METRICS["mse"].per_sample({"y": got}, {"y": want}, None).mean() > 1e-2 * scale**2  # type: ignore[misc]
    want = np.hstack([prices, others])
    assert cosine_similarity(want, want[:, ::-1]).mean() < 0.999
    assert without_fills(want, want[:, ::-1], alone=True)[0] is want


def test_shares_beside_populations_are_judged_by_the_cosine_and_the_runtimes() -> None:
    populations, shares = 1e9 * (RNG.random((50, 1)) + 1), RNG.standard_normal((50, 3))
    want, got = np.hstack([populations, shares]), np.hstack([populations, -shares])
    assert cosine_similarity(want, got).mean() < 0
    assert distances({"a": Gives(lambda x: want), "b": Gives(lambda x: got)}, "a", [{"x": want}])["b"] > 1


def test_behind_a_relu_zero_is_what_is_special() -> None:
    values = np.where(SCORES > 0, 3e9 * SCORES, 0)
    assert len(by_scale(values)) == 1
    assert share_of_largest(values, values + 1e4) < 1e-4


def test_another_infinity_is_a_difference() -> None:
    want = np.where(MASKS["a few"], -np.inf, SCORES)
    assert share_of_largest(want, want) == 0
    assert share_of_largest(want, np.where(MASKS["a few"], 3, SCORES)) == np.inf
    assert share_of_largest(want, -want) == np.inf


@pytest.mark.parametrize("fill", [-1e9, -3.4e38])
def test_errors_of_layers_are_of_what_a_mask_leaves(fill: float) -> None:
    """By these `compress explain` and INT8 within a drop rank layers."""
    data = Dataset("", {"x": SCORES}, None, "")
    judge = Judge(Gives(lambda x: masked(x, fill, "a few")), data, METRICS["cosine"])
    for given, like in ((lambda x: -x, 4.0), (lambda x: x, 0.0)):
        found = judge.squared_error(Gives(lambda x, given=given: masked(given(x), fill, "a few")))
        assert found == pytest.approx(like, rel=1e-6)
    assert judge.squared_error(Gives(lambda x: x)) == pytest.approx(1, rel=1e-3), "of a fill that is none, all"


def test_a_tensor_of_masked_scores_has_the_ratio_of_signal_to_noise_that_the_scores_have() -> None:
    bare, filled = _Seen(), _Seen()
    noisy = SCORES + np.float32(0.1) * OTHERS
    bare.add(SCORES[:, 1:], noisy[:, 1:], 8)
    filled.add(masked(SCORES, -1e9, "a few"), masked(noisy, -1e9, "a few"), 8)
    assert filled.ratio == pytest.approx(bare.ratio)


def test_what_a_batch_changes_is_told_beside_a_mask() -> None:
    def rows(x: Array) -> Array:
        return np.where(MASKS["a few"], np.float32(-1e9), x - x.mean(0, keepdims=True))

    assert batch_difference(Gives(rows), {"x": SCORES}) > 0.1
    assert batch_difference(Gives(lambda x: np.where(MASKS["a few"], -1e9, x)), {"x": SCORES}) == 0


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_answers_of_another_model_are_told_beside_a_mask_and_beside_their_own_squares(scale: float) -> None:
    def told(values: Array) -> list[list[float | None]]:
        return [[*values.ravel().tolist(), float(np.square(values).mean())]]

    scores = scale * SCORES.astype(np.float64)
    moved = scores.copy()
    moved[0, 5] *= 1.05
    assert apart(told(scores), told(moved))
    assert not apart(told(scores), told(scores * (1 + 1e-6)))
    filled, other = (np.where(MASKS["a few"], -1e9, values) for values in (scores, moved))
    assert apart(told(filled), told(other))
    assert not apart(told(filled), told(filled))


@pytest.mark.parametrize("codes", [2, 12])
@pytest.mark.parametrize("sign", [1, -1])
def test_codes_that_are_looked_up_are_no_fills(codes: int, sign: int) -> None:
    """An item's number beside its scores repeats, too, and is wrong if it is another's."""
    numbers = sign * (100_000 + 407 * np.arange(codes) / (codes - 1)).round()
    want = np.hstack([RNG.random((200, 4)), RNG.choice(numbers, (200, 8))])
    got = np.hstack([want[:, :4], np.full((200, 8), sign * 99_616.0)])
    told = METRICS["mse"].per_sample({"y": got}, {"y": want}, None)  # type: ignore[misc]
    if sign > 0 or codes > 3:
        assert told.tolist() == pytest.approx(np.square(got - want).mean(1).tolist())


@pytest.mark.parametrize(("fill", "given"), [(-1e4, -1.005e4), (-1e9, -65504.0), (-1e9, -9.99292928e8), (3e38, 1e9)])
def test_a_fill_is_one_in_other_formats_too(fill: float, given: float) -> None:
    want, got = (masked(SCORES, value, "a few") for value in (fill, given))
    assert METRICS["mse"].per_sample({"y": got}, {"y": want}, None).max() == 0  # type: ignore[misc]


def test_what_is_half_of_a_fill_is_another_answer() -> None:
    want, got = (masked(SCORES, value, "a few") for value in (-1e4, -5e3))
    assert METRICS["mse"].per_sample({"y": got}, {"y": want}, None).mean() > 1e5  # type: ignore[misc]
