"""Evidence that grows with each observation and may be looked at after every one of them.

A gambler bets against a claim, "the mean is at most m", with stakes that are fair or worse for him while the claim is
true. His wealth then exceeds 1/a with a probability of at most a, *at any time, however often it is looked at*
(Ville's inequality): wealth is evidence. Tests that are made for one look, repeated every few seconds, raise a false
alarm sooner or later. (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024:
the stakes are those of section 4, "approximate GRAPA". With a window they follow the last observations only, so that a
fault which begins late is seen as fast as an early one.)
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Bet", "Measure"]

MOST = 0.75  # of the stake at which one observation could lose everything
PRIOR_VARIANCE = 0.05
WINDOW = 100


class Bet:
    """Wealth gained by betting against "the mean of these values is at most `bound`".

    Values may depend on each other and drift: what is tested is each one's mean given those before it.

    Args:
        bound: the mean that is claimed at most.
        low, high: no value lies outside.
        window: how many of the last observations the next stake follows; None for all.

    Attributes:
        log_wealth: natural logarithm; 0 at the start.
        count: of observations.
    """

    __slots__ = (
        "_bound",
        "_low",
        "_recent",
        "_scale",
        "_seen",
        "_squares",
        "_stake",
        "_sum",
        "_window",
        "count",
        "log_wealth",
    )

    def __init__(self, bound: float, *, low: float, high: float, window: int | None = None) -> None:
        if not low < bound < high:
            raise ValueError(f"the bound {bound} is not between {low} and {high}")
        self._low = low
        self._scale = 1.0 / (high - low)
        self._bound = (bound - low) * self._scale
        self._window = window
        self._recent: deque[float] = deque()
        self._seen = 0
        self._sum = 0.0
        self._squares = 0.0
        self._stake = 0.0
        self.count = 0
        self.log_wealth = 0.0

    def add(self, value: float) -> None:
        """Take one more observation."""
        x = min(1.0, max(0.0, (value - self._low) * self._scale))
        self.log_wealth += math.log1p(self._stake * (x - self._bound))
        self.count += 1
        self._sum += x
        self._squares += x * x
        self._seen += 1
        seen = self._seen
        if self._window is not None:
            self._recent.append(x)
            seen = len(self._recent)
            if seen > self._window:
                gone = self._recent.popleft()
                self._sum -= gone
                self._squares -= gone * gone
                seen -= 1
        self._bet(seen)

    def _bet(self, seen: int) -> None:
        # One synthetic observation at the bound keeps the first stakes small.
        mean = (self._sum + self._bound) / (seen + 1)
        variance = (max(0.0, self._squares - self._sum * self._sum / seen) + PRIOR_VARIANCE) / (seen + 1)
        excess = mean - self._bound
        self._stake = min(MOST / self._bound, max(0.0, excess / (variance + excess * excess)))

    def lowest(self, count: int) -> float:
        """What `log_wealth` would be, at least, after so many values more, whatever is staked on these."""
        return self.log_wealth + count * math.log1p(-MOST)

    def stake(self) -> list[float]:
        """What the next stake follows, where that is all observations: for `resume_stake`."""
        return [self._seen, self._sum, self._squares]

    def resume_stake(self, seen: int, total: float, squares: float) -> None:
        """Go on with the stakes of an earlier gambler, too."""
        self._seen, self._sum, self._squares = seen, total, squares
        if seen > 0:
            self._bet(seen)

    def resume(self, log_wealth: float, count: int) -> None:
        """Go on with the wealth of an earlier gambler; stakes begin small again."""
        self.log_wealth = log_wealth
        self.count = count


class Measure:
    """One question with its two gamblers; bound, low and high of its values."""

    def __init__(self, bound: float, low: float, high: float) -> None:
        self.worse = Bet(bound, low=low, high=high, window=WINDOW)
        self.fine = Bet(-bound, low=-high, high=-low)
        self._limit = bound
        self._high = high
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Take an observation: how much worse the candidate is."""
        self.worse.add(value)
        self.fine.add(-value)
        self._sum += value

    def doubt(self, unknown: int) -> None:
        """So many more may have been as much worse as can be, and nobody will know: it is to be proven beside them."""
        if unknown:
            self.fine.log_wealth = min(0.0, self.fine.log_wealth)
        for _ in range(unknown):
            self.miss()

    def miss(self) -> None:
        """One may have been as much worse as can be, or not: it is no evidence that it is, and none that it is fine."""
        self.fine.add(-self._high)

    @property
    def count(self) -> int:
        """Of observations."""
        return self.worse.count

    @property
    def mean(self) -> float:
        """Of the observations; 0 where there are none."""
        return self._sum / self.count if self.count else 0.0

    @property
    def against(self) -> bool:
        """Whether this speaks against the candidate: beyond the bound, and by more than one stroke of bad luck.

        The first bad one gains nothing, for nothing was staked on it.
        """
        return self.mean > self._limit and self.worse.log_wealth > 0

    def kept(self) -> list[float]:
        """What `resume` takes."""
        return [self.worse.log_wealth, self.fine.log_wealth, self.count, self._sum]

    def resume(self, worse: float, fine: float, count: int, total: float = 0.0) -> None:
        """Go on with the wealth of earlier gamblers, and with the sum of what they saw."""
        self.worse.resume(worse, count)
        self.fine.resume(fine, count)
        self._sum = total
