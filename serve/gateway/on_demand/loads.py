"""Loads that are under way or wait: a few at a time, one of a key's, and so many of a key's in a minute.

A load takes a core for a second or more, which the requests of others would have had. So a key that asks for one model
after the other is held back, where others are there to feel it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from serve.gateway.errors import GatewayError, OverloadedError, RateLimitedError, UpstreamDownError
from serve.gateway.on_demand.catalogue import Known

__all__ = ["Failures", "Load", "LoadFailedError", "LoadingError", "Loads"]

AT_ONCE = 2
OVERDUE_S, OVERDUE_TIMES = 15.0, 2.0  # what takes longer than both waits for something: it hardly works
WINDOW_S, MOST_IN_WINDOW = 60.0, 20
MOST_PENDING = 4  # loads of one key that have not ended
MOST_WAITING, MOST_WAITING_OF_KEY = 1024, 256  # requests
BACK_S = 5.0  # that a load is wanted still by who was told to ask again
FIRST_S, LONGEST_S = 5.0, 300.0  # before a load that has failed is tried again


class LoadingError(OverloadedError):
    """The model is not loaded, and the request can't wait for it."""

    def __init__(self, model: str, why: str, seconds: float, mend: str = "") -> None:
        mend = mend or "ask again when Retry-After says: that is how long it takes to load"
        super().__init__(f"the model {model!r} is not loaded yet", why=why, mend=mend, retry_after_s=seconds)


class LoadFailedError(UpstreamDownError):
    """The model could not be loaded."""

    def __init__(self, model: str, seconds: float, why: str) -> None:
        mend = "ask again when Retry-After says; whoever runs the server is told more of it"
        super().__init__(f"the model {model!r} could not be loaded", why=why, mend=mend, retry_after_s=seconds)


@dataclass(eq=False)
class Load:
    """One model's.

    Attributes:
        model: of it.
        who: the key for whose sake; None where it is nobody's, as a rollout's.
        seconds: that it is expected to take.
        turn: done once it may begin.
        done: done once it has ended; fails with a GatewayError, of which each that waits raises a copy.
        began: when it began, on the monotonic clock; None while it waits for its turn.
        waiting: requests that wait for it, by key.
        back_by: until when somebody who was told to may ask again, on the monotonic clock.
        short: whether it waits for memory: it does not work, and none waits for it but those of its key.
        kept: the models for which memory is kept until it has ended.
        yields: whether that was given to others, but for what their processes have: it must fit once it has come.
    """

    model: Known
    who: str | None
    seconds: float
    turn: asyncio.Future[None]
    done: asyncio.Future[GatewayError | None]
    began: float | None = None
    waiting: Counter[str] = field(default_factory=Counter)
    back_by: float = 0.0
    short: bool = False
    kept: list[str] = field(default_factory=list)
    yields: bool = False

    @property
    def keys(self) -> set[str]:
        """For whose sake it is: those who wait for it, and who asked first."""
        return {*self.waiting, *([] if self.who is None else [self.who])}

    def is_wanted(self, now: float) -> bool:
        """Whether anybody would still use it."""
        return self.who is None or bool(self.waiting) or now < self.back_by

    def left_s(self, now: float) -> float:
        """Until it has ended, as far as can be told: one that is late may take as long again as it is late."""
        return self.seconds if self.began is None else max(0.1, abs(self.seconds - (now - self.began)))

    def overdue(self, now: float) -> bool:
        """Whether it takes so long that it seems to hang: no load waits for it any more but those of its key."""
        return self.began is not None and now - self.began > max(OVERDUE_S, OVERDUE_TIMES * self.seconds)


class Loads:
    """Those of one gateway.

    Attributes:
        by_model: that are under way, or wait for their turn.
        waiting: requests that wait for them, by key.
        is_leaving: whether a model is there still, and about to go: it is loaded anew once it has.
    """

    def __init__(self) -> None:
        self.by_model: dict[str, Load] = {}
        self.waiting: Counter[str] = Counter()
        self.is_leaving: Callable[[str], bool] = lambda _model: False
        self._queue: deque[Load] = deque()
        self._running: list[Load] = []
        self._begun: dict[str, deque[float]] = {}  # times of the loads of a key's

    def ask(self, model: Known, who: str | None, seconds: float, now: float, *, alone: bool) -> Load:
        """A load that takes its turn; to be ended with `end`.

        Args:
            model, who, seconds: as of `Load`.
            alone: whether no other key would feel it.

        Raises:
            RateLimitedError: the key has had so many lately.
            OverloadedError: as many of it wait already.
        """
        if who is not None and not alone:
            self._count(model.name, who, now)
        loop = asyncio.get_running_loop()
        load = Load(model, who, seconds, loop.create_future(), loop.create_future())
        self.by_model[model.name] = load
        self._queue.append(load)
        self.wake(now)
        return load

    def _count(self, model: str, who: str, now: float) -> None:
        begun = self._begun.setdefault(who, deque())
        while begun and now - begun[0] > WINDOW_S:
            begun.popleft()
        pending = [load for load in self.by_model.values() if load.who == who]
        if len(pending) >= MOST_PENDING:
            raise LoadingError(
                model, f"{len(pending)} other models are being loaded for this key",
                sum(load.seconds for load in pending),
            )  # fmt: skip
        if len(begun) >= MOST_IN_WINDOW:
            raise RateLimitedError(
                f"the model {model!r} is not loaded, and this key has had too many models loaded",
                why=f"while other keys are served, it may have {MOST_IN_WINDOW} loaded in {WINDOW_S:.0f} s",
                mend="ask fewer models in turn, or wait as long as Retry-After says",
                retry_after_s=begun[0] + WINDOW_S - now,
            )
        begun.append(now)

    def end(self, load: Load, error: GatewayError | None = None) -> None:
        """It has come to its end."""
        del self.by_model[load.model.name]
        if load in self._running:
            self._running.remove(load)
        else:
            self._queue.remove(load)
        if not load.done.done():
            load.done.set_result(error)
        for who in [who for who, begun in self._begun.items() if not begun]:
            del self._begun[who]
        self.wake(time.monotonic())

    def wanted(self, unit: str) -> bool:
        """Whether one of them needs a model."""
        return any(unit in load.model.parts for name, load in self.by_model.items() if not self.is_leaving(name))

    def add(self, load: Load, who: str, now: float) -> None:
        """A request of a key's waits for one; raises as `check_room`."""
        self.check_room(load, who, now)
        self.waiting[who] += 1
        load.waiting[who] += 1
        self.wake(now)

    def drop(self, load: Load, who: str) -> None:
        """It waits no more."""
        for counts in (self.waiting, load.waiting):
            counts[who] -= 1
            if not counts[who]:
                del counts[who]

    def check_room(self, load: Load, who: str, now: float) -> None:
        """Raises LoadingError where too many requests wait already."""
        if self.waiting.total() >= MOST_WAITING or (who and self.waiting[who] >= MOST_WAITING_OF_KEY):
            raise LoadingError(load.model.name, "too many requests wait for models", load.left_s(now))

    def wake(self, now: float) -> None:
        """Begin those whose turn it is; to be called now and then, too, as loads become overdue."""
        free = AT_ONCE - sum(not (each.short or each.overdue(now)) for each in self._running)
        for load in list(self._queue):
            if free <= 0:
                return
            if self.is_leaving(load.model.name):
                continue
            busy = {each.who for each in self._running}
            if load.who and load.who in busy:
                if not (others := load.keys - busy):
                    continue
                load.who = min(others)  # it waits for it, too, and has none under way
            self._queue.remove(load)
            self._running.append(load)
            free -= 1
            load.turn.set_result(None)


@dataclass
class Failures:
    """Loads that have failed, and are not tried again for a while."""

    _until: dict[str, tuple[float, int, str]] = field(default_factory=dict)

    def __contains__(self, model: str) -> bool:
        return model in self._until

    def add(self, model: str, now: float, why: str) -> float:
        """One more in a row; the seconds until it may be tried again."""
        row = self._until[model][1] + 1 if model in self._until else 1
        wait_s = min(LONGEST_S, FIRST_S * (1 << min(row - 1, 10)))
        self._until[model] = now + wait_s, row, why
        return wait_s

    def check(self, model: str, now: float) -> None:
        """Raises LoadFailedError while it is not to be tried."""
        if model in self._until and now < self._until[model][0]:
            raise LoadFailedError(model, self._until[model][0] - now, self._until[model][2])

    def forget(self, model: str) -> None:
        """It may be tried: it was loaded, or is another by now."""
        self._until.pop(model, None)
