"""How sure a figure is: confidence intervals of a mean over samples, and of what two models differ by on the same ones.

Shares of 0 and 1 are counts, and have score intervals, which stay honest where nothing was seen to change: Wilson, JASA
22, 1927, for one share; Tango, Statistics in Medicine 17, 1998, equations 7 to 10, for the difference of paired ones.
Other scores have the farther ends of two bootstrap intervals: BCa (Efron & Tibshirani, An Introduction to the
Bootstrap, 1993, section 14.3), and the t interval (there, section 12.5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from compress.evaluate.influences import SEEN, Outcomes, outcomes_of

__all__ = [
    "CONFIDENCE",
    "SHARE",
    "SUREST",
    "Bounds",
    "Interval",
    "difference_interval",
    "least_samples",
    "mean_interval",
    "paired_interval",
    "percent",
    "share_interval",
]

CONFIDENCE = 0.95
SHARE = (0.0, 1.0)  # the bounds of a score that is a share
SUREST = (0.01, 0.999999)  # between these a confidence is no word for nothing, and no rounding error
RESAMPLES = 2000, 20_000
BEYOND = 10  # resamplings that an end has to have beyond it; where the most have fewer, they don't tell where it is
FEW = 50
# Scores so near to the usual one are alike: rounding in single precision, as a share of what a score may be. A real
# loss, however small, is none of it: it says how losses look. Fewer others than this are hardly seen.
LEAST = 0.1  # of the deviation: a resample with less is one of values that are nearly all alike
_ALIKE = 1e-6
CHUNK = 4_000_000  # indices in memory at a time

Array = np.ndarray[Any, Any]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval; an end that the samples say nothing of is infinite."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """In another unit; a negative factor turns the ends round."""
        low, high = sorted((self.low * factor + 0.0, self.high * factor + 0.0))  # never -0
        return Interval(self.value * factor + 0.0, low, high)


def percent(confidence: float) -> str:
    """0.95 → '95%'; 0.999 is not rounded to all."""
    return f"{100 * confidence:.6g}%"


def share_interval(count: int, of: int, confidence: float = CONFIDENCE) -> Interval:
    """Of a share, by Wilson's score interval."""
    from scipy.stats import binomtest  # scipy.stats takes a tenth of a command's start, and few get here

    found = binomtest(count, of).proportion_ci(confidence, method="wilson")
    return Interval(count / of, float(found.low), float(found.high))


def paired_interval(gained: int, lost: int, of: int, confidence: float = CONFIDENCE) -> Interval:
    """Of the difference of two shares that were counted on the same samples, by Tango's score interval.

    Args:
        gained: samples that only the second has right.
        lost: samples that only the first has right.
        of: all samples, 1 or more.
        confidence: above 0 and below 1, two-sided.
    """
    from scipy.optimize import brentq

    z = float(ndtri((1 + confidence) / 2))
    seen = (gained - lost) / of

    def beyond(difference: float) -> float:
        """Above 0 where the score test refuses this difference: its numerator squared less z² times its variance."""
        linear = -gained - lost + (2 * of - gained + lost) * difference
        constant = -lost * difference * (1 - difference)
        only_lost = (math.sqrt(max(linear * linear - 8 * of * constant, 0.0)) - linear) / (4 * of)
        variance = of * (2 * only_lost + difference * (1 - difference))
        return float((gained - lost - of * difference) ** 2 - z * z * variance)

    def end(limit: float) -> float:
        near = seen + math.copysign(1e-9, limit)  # at what was seen, the test's numerator is 0
        if abs(near) >= 1 or beyond(limit) <= 0:
            return limit
        return seen if beyond(near) > 0 else float(brentq(beyond, near, limit, xtol=1e-12))

    return Interval(seen, end(-1.0), end(1.0))


def least_samples(share: float, confidence: float = CONFIDENCE) -> int | None:
    """Samples that it takes for `paired_interval` to end at this share where no change is seen; None: never enough."""
    if share <= 0:
        return None
    squared = float(ndtri((1 + confidence) / 2)) ** 2
    return max(1, math.ceil(squared * (1 - share) / share))


def mean_interval(
    scores: Array, *, confidence: float = CONFIDENCE, bounds: Bounds | None = None, seed: int = 0
) -> Interval:
    """Of the mean of scores [n].

    Args:
        scores: of one metric.
        confidence: above 0 and below 1, two-sided.
        bounds: of a score, where it has some. Between 0 and 1, scores that are all one of these are counted; a metric
            that may give more than 1 is none to count, whatever it gave. With bounds, scores that are all alike have an
            interval: as many others may have been missed as a share of which none was seen.
        seed: of the resampling.
    """
    values = np.asarray(scores, np.float64)
    if (told := outcomes_of(scores)) is not None:
        return _of_influences(values, confidence, bounds, seed, told)
    if _counts(bounds, values):
        return share_interval(int(values.sum()), len(values), confidence)
    return _of_values(values, confidence, bounds, seed, 0.0 if bounds is None else bounds[1] - bounds[0])


def difference_interval(
    after: Array, before: Array, *, confidence: float = CONFIDENCE, bounds: Bounds | None = None, seed: int = 0
) -> Interval:
    """Of the mean of `after - before`, scores [n] of two models on the same samples.

    Pairing takes out what makes a sample hard for both. The arguments are those of `mean_interval`. With bounds, no end
    is beyond what a score can lose or gain from those that the first model has: nothing gains on what is at its best.
    """
    second, first = np.asarray(after, np.float64), np.asarray(before, np.float64)
    told, known = outcomes_of(after), outcomes_of(before)
    if told is not None and known is not None:
        span = math.inf if bounds is None else bounds[1] - bounds[0]
        return _of_influences(second - first, confidence, (-span, span), seed, told, known)
    if _counts(bounds, second, first):
        return paired_interval(int((second > first).sum()), int((second < first).sum()), len(second), confidence)
    # A score in single precision may be a little beyond its bounds.
    apart = None if bounds is None else (min(bounds[0] - first.max(), 0.0), max(bounds[1] - first.min(), 0.0))
    with np.errstate(invalid="ignore"):
        difference = second - first
    span = 0.0 if bounds is None else bounds[1] - bounds[0]
    return _of_values(difference, confidence, apart, seed, span)


def _of_influences(
    values: Array, confidence: float, bounds: Bounds | None, seed: int, told: Outcomes, before: Outcomes | None = None
) -> Interval:
    """Of a figure that is no mean, or of how far two are apart: what was seen to vary, and what was not, as variances.

    Zou & Donner, Construction of confidence limits about effect measures, Statistics in Medicine 27, 2008.
    """
    mean = float(values.mean())
    if len(values) < 2 or not np.isfinite(values).all():
        return Interval(mean, -math.inf, math.inf)
    alike = bool((values == values[0]).all())
    seen = Interval(mean, mean, mean) if alike else _of_values(values, confidence, None, seed, 0.0)
    rise = told.rise(confidence) if before is None else before.fall(confidence, told)
    # A bias that is itself estimated moves the end that it tells is too near, and not the other.
    bias = told.bias - (0.0 if before is None else before.bias)
    below, above = told.spread(confidence, before)
    low = mean - max(bias, 0.0) - max(math.hypot(mean - seen.low, told.fall(confidence, before)), below)
    high = mean - min(bias, 0.0) + max(math.hypot(seen.high - mean, rise), above)
    least, most = (-math.inf, math.inf) if bounds is None else bounds
    return Interval(mean, max(low, min(least, mean)), min(high, max(most, mean)))


def _counts(bounds: Bounds | None, *scores: Array) -> bool:
    return bounds == SHARE and all(bool(np.isin(values, SHARE).all()) for values in scores)


def _of_values(values: Array, confidence: float, bounds: Bounds | None, seed: int, span: float) -> Interval:
    """Of a mean of values that lie between the bounds; a score of the metric may vary by the span."""
    mean = float(values.mean())
    if len(values) < 2 or not np.isfinite(values).all():
        return Interval(mean, -math.inf, math.inf)
    if (values == values[0]).all():
        return _all_alike(mean, len(values), confidence, bounds)
    resamples = int(min(max(2 * BEYOND / (1 - confidence), RESAMPLES[0]), RESAMPLES[1]))
    means, deviations = _resampled(values, resamples, seed)
    both = _accelerated(values, means, confidence), _studentized(values, means, deviations, confidence)
    low, high = min(low for low, _ in both), max(high for _, high in both)
    if len(values) < FEW or resamples * (1 - confidence) < 2 * BEYOND - 1e-6:  # a percentile of so few knows too little
        reach = float(stdtrit(len(values) - 1, (1 + confidence) / 2) * values.std(ddof=1) / math.sqrt(len(values)))
        low, high = min(low, mean - reach), max(high, mean + reach)
    if bounds is None:
        return Interval(mean, low, high)
    # Where nearly all scores are alike, a resampling sees next to nothing of the few that are not.
    usual = float(np.median(values))
    apart_of = int((np.abs(values - usual) > _ALIKE * span).sum())
    if apart_of < min(SEEN, len(values) - 1):
        unseen = share_interval(apart_of, len(values), confidence).high - apart_of / len(values)
        low, high = low - unseen * (usual - bounds[0]), high + unseen * (bounds[1] - usual)
    return Interval(mean, max(low, min(bounds[0], mean)), min(high, max(bounds[1], mean)))


def _all_alike(value: float, count: int, confidence: float, bounds: Bounds | None) -> Interval:
    if bounds is None:
        return Interval(value, -math.inf, math.inf)
    missed = share_interval(0, count, confidence).high
    return Interval(value, value - missed * (value - bounds[0]), value + missed * (bounds[1] - value))


def _accelerated(values: Array, means: Array, confidence: float) -> tuple[float, float]:
    """The bootstrap's BCa interval of a mean: Efron, Better bootstrap confidence intervals, JASA 82, 1987."""
    mean, resamples = float(values.mean()), len(means)
    # The jackknife's acceleration of a mean: a library's own jackknife takes the square of the samples.
    apart = values - mean
    acceleration = float((apart**3).sum() / (6 * (apart**2).sum() ** 1.5))
    below = ((means < mean).mean() + (means <= mean).mean()) / 2
    bias = float(ndtri(np.clip(below, 0.5 / resamples, 1 - 0.5 / resamples)))
    shifted = bias + ndtri([(1 - confidence) / 2, (1 + confidence) / 2])
    stretched = 1 - acceleration * shifted  # 0 and less of what is very skewed: no resampling is as far out
    with np.errstate(divide="ignore"):
        places = np.where(stretched > 0, shifted / stretched, np.copysign(np.inf, shifted))
    low, high = np.quantile(means, ndtr(bias + places))
    return float(low), float(high)


def _studentized(values: Array, means: Array, deviations: Array, confidence: float) -> tuple[float, float]:
    """The bootstrap's t interval of a mean, whose ends lie farther out than BCa's where values are skewed: Hall,
    Theoretical comparison of bootstrap confidence intervals, Annals of Statistics 16, 1988.

    Resamples that are all alike, or nearly, say nothing of how far a mean is off.
    """
    mean, deviation = float(values.mean()), float(values.std())
    varied = deviations > LEAST * deviation
    if not varied.any():
        return mean, mean
    t = (means[varied] - mean) / deviations[varied]
    above, below = np.quantile(t, [(1 + confidence) / 2, (1 - confidence) / 2])
    return mean - deviation * float(above), mean - deviation * float(below)


def _resampled(values: Array, resamples: int, seed: int) -> tuple[Array, Array]:
    """Means, and standard deviations, of as many samples, drawn from them with replacement."""
    rng = np.random.default_rng(seed)
    rows = max(1, CHUNK // len(values))
    found = []
    for start in range(0, resamples, rows):
        drawn = values[rng.integers(0, len(values), (min(rows, resamples - start), len(values)))]
        found.append((drawn.mean(1), drawn.std(1)))
    means, deviations = zip(*found, strict=True)
    return np.concatenate(means), np.concatenate(deviations)
