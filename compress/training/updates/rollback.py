"""The way back to weights that were still good, when the loss is infinite or no number."""

from __future__ import annotations

from typing import Any

from compress.errors import StageError

__all__ = ["Rollback"]

MOST = 4
SLOWER = 0.25  # factor on the rate after each
State = dict[str, Any]


class Rollback:
    """Remembers where the training began, and the newest state that was good.

    Args:
        first: state, by "step" and what else there is.
        rate: the peak, as it was asked for.
    """

    def __init__(self, first: State, rate: float) -> None:
        self._first = self.good = first
        self._rate = rate
        self._back_to = -1
        self.count, self.scale = 0, 1.0

    def after(self, what: str) -> State:
        """The state to go on from: the last good one, or, when that did not help, the first; slower from there on.

        Args:
            what: happened, and when.

        Raises:
            StageError: it was enough.
        """
        if self.count == MOST:
            raise StageError(
                "the training has diverged",
                why=f"{what}, after {MOST} times of going back and on slower",
                mend=f"try a lower rate: --learning-rate {self._rate / 10:g}",
            )
        self.count += 1
        self.scale *= SLOWER
        if self._back_to == self.good["step"]:
            self.good = self._first
        self._back_to = self.good["step"]
        return self.good

    def state(self) -> State:
        """For the kept state, but for the states themselves."""
        return {"count": self.count, "scale": self.scale, "back_to": self._back_to}

    def restore(self, state: State, good: State) -> None:
        """From a kept state; `good` is where the training goes on."""
        self.count, self.scale, self._back_to = state["count"], state["scale"], state["back_to"]
        self.good = good
