"""How sure a figure is: also where nothing was seen to change."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap, norm
from scipy.stats import t as student

from compress.evaluate import intervals
from compress.evaluate.intervals import (
    SUREST,
    Interval,
    difference_interval,
    least_samples,
    mean_interval,
    paired_interval,
    share_interval,
)

counts = st.integers(1, 300).flatmap(
    lambda of: st.tuples(st.just(of), st.integers(0, of)).flatmap(
        lambda pair: st.tuples(st.integers(0, pair[0] - pair[1]), st.just(pair[1]), st.just(pair[0]))
    )
)


@pytest.mark.parametrize(
    ("gained", "lost", "of", "low", "high"),
    [
        (40, 20, 160, 0.0308645, 0.2180642),  # the example of R's PropCIs::scoreci.mp
        (0, 0, 200, -0.0188453, 0.0188453),
        (0, 0, 1, -0.7934507, 0.7934507),
        (50, 0, 50, 0.8573048, 1.0),
    ],
)
def test_paired_shares_have_tangos_interval(gained: int, lost: int, of: int, low: float, high: float) -> None:
    found = paired_interval(gained, lost, of)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)


@given(counts, st.sampled_from([0.8, 0.95, 0.99]))
def test_at_its_ends_the_score_test_is_at_its_limit(found: tuple[int, int, int], confidence: float) -> None:
    gained, lost, of = found
    interval = paired_interval(gained, lost, of, confidence)
    assert -1 <= interval.low <= interval.value <= interval.high <= 1
    mirrored = paired_interval(lost, gained, of, confidence)
    assert (mirrored.low, mirrored.high) == pytest.approx((-interval.high, -interval.low), abs=1e-8)
    for end in (interval.low, interval.high):
        if abs(end) < 1 - 1e-9 and abs(end - interval.value) > 1e-6:
            assert _score(gained, lost, of, end) == pytest.approx(float(norm.ppf((1 + confidence) / 2)), rel=1e-3)


def _score(gained: int, lost: int, of: int, difference: float) -> float:
    """The score statistic with the nuisance share that makes the counts likeliest, found by looking at all of them."""
    least, most = max(0.0, -difference), (1 - difference) / 2
    share = np.linspace(least, most, 200_001)[1:-1]  # only lost; only gained is larger by the difference
    rest = 1 - 2 * share - difference
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = zip((gained, lost, of - gained - lost), (share + difference, share, rest), strict=True)
        likelihood = sum(count * np.log(p) if count else 0 * p for count, p in terms)
    best = share[int(np.nanargmax(likelihood))]
    return abs(gained - lost - of * difference) / math.sqrt(of * (2 * best + difference * (1 - difference)))


@pytest.mark.parametrize(("share", "confidence", "samples"), [(0.005, 0.95, 765), (0.01, 0.95, 381), (0.5, 0.9, 3)])
def test_so_many_samples_it_takes_to_be_sure_that_nothing_changed(
    share: float, confidence: float, samples: int
) -> None:
    assert least_samples(share, confidence) == samples
    assert (
        paired_interval(0, 0, samples, confidence).high <= share < paired_interval(0, 0, samples - 1, confidence).high
    )


@pytest.mark.parametrize("share", [0.0, -1.0])
def test_no_number_of_samples_proves_that_nothing_at_all_is_lost(share: float) -> None:
    assert least_samples(share) is None


@pytest.mark.parametrize(
    ("right", "of", "low", "high"), [(200, 200, 0.98115, 1.0), (0, 50, 0.0, 0.07135), (9, 10, 0.59585, 0.98212)]
)
def test_a_share_has_wilsons_interval(right: int, of: int, low: float, high: float) -> None:
    scores = np.repeat([1.0, 0.0], [right, of - right])
    assert mean_interval(scores, bounds=(0.0, 1.0)) == share_interval(right, of)
    assert (share_interval(right, of).low, share_interval(right, of).high) == pytest.approx((low, high), abs=1e-4)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 100))
def test_one_of_both_intervals_of_other_scores_is_the_bca_interval_of_scipy(seed: int) -> None:
    scores = np.random.default_rng(seed).exponential(size=80)
    theirs = bootstrap((scores,), np.mean, n_resamples=4000, method="BCa", rng=0).confidence_interval
    means, _ = intervals._resampled(scores, 4000, 0)
    width = theirs.high - theirs.low
    found = intervals._accelerated(scores, means, 0.95)
    assert found == pytest.approx((theirs.low, theirs.high), abs=0.06 * width)
    both = mean_interval(scores)
    assert both.low <= found[0] + 0.06 * width
    assert both.high >= found[1] - 0.06 * width


def test_the_end_on_the_long_side_of_skewed_scores_is_farther_out_than_bca_has_it() -> None:
    rng = np.random.default_rng(3)
    missed = alone = 0
    for _ in range(400):
        scores = rng.exponential(size=60)
        missed += mean_interval(scores).high < 1
        means, _ = intervals._resampled(scores, 2000, 0)
        alone += intervals._accelerated(scores, means, 0.95)[1] < 1
    assert missed < alone
    assert missed <= 0.05 * 400, "2.5% are allowed; of exponential scores it is 3%"


def test_a_resample_that_is_nearly_all_alike_makes_no_interval_endless() -> None:
    scores = np.where(np.arange(60) < 2, 1.0, 1e-9 * np.arange(60))
    found = mean_interval(scores)
    assert -0.5 < found.low < found.high < 1.0


@pytest.mark.parametrize("confidence", [0.999, 0.9999, 0.99999])
def test_a_high_confidence_is_no_more_than_its_resamplings_know(confidence: float) -> None:
    """Of 2,000 means the outermost is hardly further out than 99.9%, whatever was asked for."""
    allowed, tries = 1 - confidence, 300
    for draw, mean in ((np.random.default_rng(0).standard_normal, 0.0), (np.random.default_rng(1).exponential, 1.0)):
        missed = 0
        for _ in range(tries):
            found = mean_interval(draw(size=60), confidence=confidence)
            missed += not found.low <= mean <= found.high
        assert missed <= 2 + 3 * allowed * tries
    scores = np.random.default_rng(2).standard_normal(60)
    reach = float(student.ppf((1 + confidence) / 2, 59) * scores.std(ddof=1) / math.sqrt(60))
    wide = mean_interval(scores, confidence=confidence)
    assert (wide.high - wide.low) / (2 * reach) > (0.9 if confidence < 0.9999 else 0.999)


@pytest.mark.parametrize("confidence", SUREST)
def test_the_ends_of_confidence_have_intervals(confidence: float) -> None:
    rare = np.where(np.arange(60) < 1, 1.0, 0.01)
    for scores in (rare, 1 - rare, np.random.default_rng(0).exponential(size=60)):
        found = mean_interval(scores, confidence=confidence)
        assert -math.inf < found.low <= found.high < math.inf
        assert confidence < 0.5 or found.low < scores.mean() < found.high
    for gained, lost in ((0, 0), (3, 3), (60, 0), (5, 40)):
        paired = paired_interval(gained, lost, 60, confidence)
        assert -1 <= paired.low <= paired.value <= paired.high <= 1
    assert least_samples(0.01, confidence)


def test_scores_that_are_all_alike_may_have_missed_others() -> None:
    scores = np.full(200, 0.9)
    assert mean_interval(scores, bounds=(0.0, 1.0)).low == pytest.approx(0.9 * (1 - 0.01885), abs=1e-4)
    assert mean_interval(scores, bounds=(0.0, 1.0)).high == pytest.approx(0.9 + 0.1 * 0.01885, abs=1e-4)
    unknown = mean_interval(scores)
    assert (unknown.low, unknown.high) == (-math.inf, math.inf), "without bounds nothing is known"
    same = difference_interval(scores, scores, bounds=(-1.0, 1.0))
    assert (same.low, same.high) == pytest.approx((-0.01885 * 1.9, 0.01885 * 0.1), abs=1e-4), "no score is above 1"


SHAPES = {
    "normal": lambda rng, count: 1 + 0.1 * rng.standard_normal(count),
    "exponential": lambda rng, count: rng.exponential(size=count),
    "half of them none": lambda rng, count: rng.exponential(size=count) * (np.arange(count) % 2),
}


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(SHAPES)), st.integers(10, 300), st.integers(0, 50), st.floats(1e-3, 0.1), st.floats(1e-3, 1)
)
def test_an_interval_does_not_widen_as_the_loss_shrinks(
    shape: str, count: int, seed: int, loss: float, part: float
) -> None:
    """Of two models that lose alike on the same samples, whichever loses less keeps any budget that the other does."""
    losses, one = SHAPES[shape](np.random.default_rng(seed), count), np.ones(count)
    scales = (loss, max(loss * part, 1e-3))
    worse, better = (difference_interval(one - scale * losses, one, bounds=(-1.0, 1.0)) for scale in scales)
    assert better.high - better.low <= (worse.high - worse.low) * (1 + 1e-6)
    assert worse.low <= better.low + 1e-12
    assert max(worse.high, better.high) <= 1e-12, "nothing gains on a score of 1"


@pytest.mark.parametrize("loss", [0.0, 0.3e-6])
def test_nothing_lost_but_rounding_does_not_prove_that_nothing_can_be(loss: float) -> None:
    scores = 1 - loss * np.random.default_rng(0).random(200)
    found = difference_interval(scores, np.ones(200), bounds=(-1.0, 1.0))
    assert (found.low, found.high) == pytest.approx((-0.0377, 0.0), abs=1e-4)


@pytest.mark.parametrize("scores", [[0.5], [0.5, math.inf], [math.nan, 0.5]])
def test_what_the_samples_do_not_tell_is_not_made_up(scores: list[float]) -> None:
    found = mean_interval(np.array(scores))
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_a_negative_factor_turns_the_ends_round() -> None:
    assert Interval(0.1, -0.2, math.inf).times(-100) == Interval(-10.0, -math.inf, 20.0)
