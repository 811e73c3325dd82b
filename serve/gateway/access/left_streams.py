"""What clients left of streams, and models are still at work on.

Triton computes it to its end, whether anybody reads or not, and each of it may have one of the model's instances to
itself. Where there has been as much of it as the model has instances for a while, what comes would wait in vain.
So one message is let go on, to see: a model that works on many at a time answers it, and is asked as before from then
on. Until that one is answered others wait as for a place; once it was not, though there was time enough, they are
refused at once, until another is let go on: after a while, that doubles each time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from serve.gateway.access.admission import Admission
from serve.gateway.errors import OverloadedError

__all__ = ["LeftStreams", "Trial"]

RETRY_AFTER_S = 5.0
# Without an answer for so much longer than the first answers to others took, and so long in any case, it waits there.
PATIENCE, LEAST_S = 4.0, 1.0
LONGEST_S = 30.0  # the same, where nothing is known of others
FADES = 0.9
SETTLES_S = 0.2  # for what Triton has ended to be known of
AGAIN_S, SELDOM_S = 5.0, 80.0  # from one that was tried in vain to the next: at first, and at most
MANY_S = 600.0  # that a model which answered beside what was left is taken to do so: it may be loaded anew, as another
A_WHILE_S = 5.0  # most of what was left is over by then, and waited for
logger = logging.getLogger(__name__)


class _Left:
    """What was left with one model, of which there is some."""

    def __init__(self) -> None:
        self.since: list[float] = []  # when each was left, on the monotonic clock
        self.trial: Trial | None = None
        self.again = -math.inf  # when the next may be tried: one was in vain, and none that was left has ended since
        self.again_s = AGAIN_S
        self.changed = asyncio.Event()

    @property
    def in_vain(self) -> bool:
        """Whether one was tried of late, and not answered."""
        return time.monotonic() < self.again

    def was_in_vain(self) -> None:
        """One was tried just now."""
        self.again = time.monotonic() + self.again_s
        self.again_s = min(SELDOM_S, 2 * self.again_s)

    def lasts(self, seconds: float) -> int:
        """How many have gone on for so long."""
        until = time.monotonic() - seconds
        return sum(since <= until for since in self.since)

    def change(self) -> None:
        """Wake those that wait for how it ends."""
        self.changed.set()
        self.changed = asyncio.Event()


class LeftStreams:
    """That of one gateway.

    Args:
        timeout_s: of its answers.

    Attributes:
        stuck: messages that models were at work on for longer than `left_timeout_s`, by their places.
    """

    def __init__(self, timeout_s: float) -> None:
        self._a_while_s = min(A_WHILE_S, timeout_s)
        self.stuck: Counter[Admission] = Counter()
        self._of: dict[Admission, _Left] = {}
        # Models that work on more at a time than they have instances, and until when that is taken to be so.
        self._many: dict[Admission, float] = {}
        self._first_s: dict[Admission, float] = {}

    def __iter__(self) -> Iterator[tuple[Admission, int]]:
        """The places of models, and how many messages these are at work on that were left."""
        return ((places, len(left.since)) for places, left in self._of.items())

    def begin(self, places: Admission) -> float:
        """A client left a message, and the model goes on with it; gives what `end` is to be told."""
        now = time.monotonic()
        self._of.setdefault(places, _Left()).since.append(now)
        return now

    def end(self, places: Admission, since: float, *, stuck: bool) -> None:
        """Triton is through with one; or nobody waits for that any longer, as it is `stuck`."""
        left = self._of[places]
        left.since.remove(since)
        left.again, left.again_s = -math.inf, AGAIN_S
        if not left.since:
            del self._of[places]
        left.change()
        if stuck:
            self.stuck[places] += 1
            logger.warning(
                "the model %r does not end a message that its client has left: its place is given back, though an "
                "instance may be at work on it still; reload the model, or bound what it makes of a message",
                places.model,
            )

    def answered_first(self, places: Admission, seconds: float) -> None:
        """The first answer to a message came after so long; where something is left, it may have waited for that."""
        if places in self._of:
            return
        self._first_s[places] = max(seconds, FADES * self._first_s.get(places, 0.0))

    async def enter(self, places: Admission, wait_s: float) -> Trial | None:
        """Let a message to a model go on: None where nothing is known to be in its way, else it is a trial.

        Args:
            places: of the model.
            wait_s: how long it may wait for another's trial.

        Raises:
            OverloadedError: it would wait for what was left.
        """
        if (left := self._stands_in_the_way(places)) is None:
            return None
        if left.trial is not None and not left.in_vain:
            try:
                async with asyncio.timeout(wait_s):
                    await left.changed.wait()
            except TimeoutError:
                raise self.late(places) from None
            if (left := self._stands_in_the_way(places)) is None:
                return None
        if left.trial is not None or left.in_vain:
            raise self.late(places)
        first_s = self._first_s.get(places)
        left.trial = Trial(self, places, left, None if first_s is None else max(LEAST_S, PATIENCE * first_s))
        return left.trial

    def late(self, places: Admission) -> OverloadedError:
        """What refuses a message that would wait, or has waited, for what was left."""
        places.shed += 1
        return OverloadedError(
            f"the model {places.model!r} is at work on requests whose clients have left",
            why="they have all of its instances, and it does not hear that nobody waits for them",
            mend="wait as long as Retry-After says, then try again",
            retry_after_s=RETRY_AFTER_S,
        )

    def _stands_in_the_way(self, places: Admission) -> _Left | None:
        left = self._of.get(places)
        if left is None or left.lasts(self._a_while_s) < places.fairness.instances:
            return None
        if time.monotonic() < self._many.get(places, -math.inf):
            return None
        return left

    def answered(self, places: Admission, left: _Left, before: Sequence[float]) -> None:
        """A trial was, by the model, beside such of what was left before it as goes on."""
        go_on = len(before) - (Counter(before) - Counter(left.since)).total()
        if go_on >= places.fairness.instances:  # else one that ended has made room for it
            self._many[places] = time.monotonic() + MANY_S


class Trial:
    """A message that is sent to see whether a model answers beside what was left with it.

    Attributes:
        patience_s: how long its first answer may take; None where nothing is known of that.
    """

    def __init__(self, of: LeftStreams, places: Admission, left: _Left, patience_s: float | None) -> None:
        self.patience_s = patience_s
        self._of, self._places, self._left = of, places, left
        self._before = tuple(left.since)
        self._sent = time.monotonic()
        self._answered = False

    def answered(self) -> None:
        """It was, by the model."""
        self._answered = True
        asyncio.get_running_loop().call_later(SETTLES_S, self._settle)

    def _settle(self) -> None:
        self._of.answered(self._places, self._left, self._before)
        self._answered = False
        self.over()

    def over(self, *, unanswered: bool = False) -> None:
        """It has told all that it can.

        Args:
            unanswered: whether it was sent, and was not answered: that tells something where it had its time. A client
                that leaves before that, or a key that is revoked, says nothing of the model.
        """
        if self._left.trial is self and not self._answered:
            self._left.trial = None
            if unanswered and time.monotonic() - self._sent >= (self.patience_s or LONGEST_S):
                self._left.was_in_vain()
            self._left.change()
