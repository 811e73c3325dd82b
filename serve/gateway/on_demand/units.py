"""Single models in Triton, the steps of others among them: which are there, come, and leave, and the memory of each."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from compress.errors import ToolkitError
from serve.gateway.on_demand.behind import Behind
from serve.gateway.on_demand.catalogue import Known
from serve.gateway.on_demand.estimates import Estimates
from serve.gateway.on_demand.host import Host, HostDownError, Used

__all__ = ["Units"]

PASSES_S = 60.0  # what Triton itself had for a moment in it, as bodies on their way to models, is given back
GROWN = 0.25  # of what one was loaded with, that it may have more without being called grown
SETTLES_S = 2.0  # after a load, whose own memory has been given back by then


class Units:
    """Of one Triton.

    Args:
        host: loads and unloads.
        estimates: of what they take.

    Attributes:
        loaded: those that are there.
        used: memory, as it was seen last.
        own: bytes that Triton itself keeps: the least that it had of late. What bodies take is bounded by the
            gateway's memory for them, and no reason for a model to go, however long they come.
        passing: bytes of bodies that the gateway holds now.
        behind: loads that were given up, and have not ended.
    """

    def __init__(self, host: Host, estimates: Estimates) -> None:
        self.loaded: set[str] = set()
        self.used = Used()
        self.own = 0
        self.passing: Callable[[], int] = int
        self._at_first = math.inf  # the least that Triton ever had of its own
        self._owned: deque[tuple[float, int]] = deque()
        self.behind = Behind(host, self._came_late)
        self._host = host
        self._estimates = estimates
        self._since: dict[str, float] = {}  # when each was loaded
        self._granted: dict[str, int] = {}  # bytes that were known of each when it came, or that it had then
        self._coming: dict[str, int] = {}  # bytes that are kept for them
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._renewing: dict[str, float] = {}  # until when the processes of before may be there, too
        self._start = 0

    def started(self, loaded: Iterable[str]) -> None:
        """Triton is another, which has these."""
        self._start += 1
        self.loaded = set(loaded)
        self._coming.clear()
        self._granted.clear()
        self._owned.clear()
        self._at_first = math.inf

    async def look(self) -> None:
        """See what each takes now."""
        self.used = await self._host.used()
        now = time.monotonic()
        self._at_first = min(self._at_first, self.used.own)
        # Those of the gateway's that have not come to Triton yet lessen nothing.
        self._owned.append((now, int(max(self._at_first, self.used.own - self.passing()))))
        while self._owned[0][0] < now - PASSES_S:
            self._owned.popleft()
        self.own = min(own for _, own in self._owned)
        for unit in self.loaded:
            if unit not in self._granted:
                self._granted[unit] = max(self.used.by_model.get(unit, 0), self._estimates.settled(unit))

    def granted(self, unit: str) -> int:
        """Bytes that one was loaded with, or was known to grow to by then; 0 where it was not looked at yet."""
        return self._granted.get(unit, 0)

    def growth(self, unit: str) -> int:
        """Bytes that one has beyond those, which nobody has made room for; 0 for little more."""
        more = max(self.used.by_model.get(unit, 0), self._estimates.settled(unit)) - self.granted(unit)
        return more if unit in self._granted and more > GROWN * self.granted(unit) else 0

    def missing(self, model: Known) -> list[str]:
        """What of a model nobody has loaded, or loads."""
        return [part for part in model.parts if part not in self.loaded and part not in self._coming]

    def bytes_of(self, unit: str, known: Mapping[str, Known]) -> int:
        """What one takes: as it was seen, else as is guessed."""
        seen = self.used.by_model.get(unit)
        if seen:
            return max(seen, self._estimates.settled(unit))
        return self._estimates.bytes(known[unit]) if unit in known else 0

    def least_of(self, unit: str, known: Mapping[str, Known]) -> int:
        """What one takes without what it has grown by."""
        if unit in self._coming:
            return self._coming[unit]
        return self.granted(unit) if self.growth(unit) else self.bytes_of(unit, known)

    @property
    def taken(self) -> int:
        """Bytes, once those that come are there, and those that leave are gone."""
        by_model = self.used.by_model
        # What has just come will grow to what it had before, once it is asked.
        there = self.loaded - self._coming.keys()
        growing = sum(max(0, self._estimates.settled(unit) - by_model.get(unit, 0)) for unit in there)
        there_now = self.own + sum(by_model.values())
        return there_now + self._due + growing - sum(by_model.get(unit, 0) for unit in self._leaving)

    @property
    def _due(self) -> int:
        """Bytes that those which come will have more than they have; what leaves first has nothing then."""
        has = {unit: size for unit, size in self.used.by_model.items() if unit not in self._leaving}
        return sum(max(0, size - has.get(unit, 0)) for unit, size in self._coming.items())

    def is_twice(self, unit: str) -> bool:
        """Whether one is loaded anew, and what it has is of two of it."""
        return time.monotonic() < self._renewing.get(unit, 0.0)

    def settled(self, unit: str) -> bool:
        """Whether one was loaded some time ago."""
        return time.monotonic() - self._since.get(unit, 0.0) >= SETTLES_S

    def keep(self, sizes: Mapping[str, int]) -> None:
        """Keep memory for those that will come."""
        self._coming.update(sizes)

    def yields(self, units: Iterable[str]) -> None:
        """Of what is kept for those that come, leave others what they have not taken by now."""
        for unit in units:
            if unit in self._coming:
                self._coming[unit] = 0

    def gives_up(self, units: Iterable[str]) -> None:
        """They don't come after all."""
        for unit in units:
            self._coming.pop(unit, None)

    def leave(self, units: Collection[str], *, patient: bool = False) -> None:
        """Take some out, in this order, and go on.

        Args:
            units: their names.
            patient: whether somebody may wait for what they compute. Else it is ended soon.
        """
        there = [unit for unit in units if unit in self.loaded]
        for unit in there:
            self.behind.end(unit, "what was loaded of it makes way")  # a reload: until it ends, none can be unloaded
        self.loaded.difference_update(there)
        self._ungrant(there)
        if there:
            task = asyncio.ensure_future(self._unload(there, patient))
            for unit in there:
                self._leaving[unit] = task

    async def fit(self, budget: int) -> None:
        """Wait until enough of those that leave are gone: until then their processes have what they have."""
        while self._leaving and self.own + sum(self.used.by_model.values()) + self._due > budget:
            await asyncio.wait(set(self._leaving.values()), return_when=asyncio.FIRST_COMPLETED)

    async def bring(self, model: Known, known: Mapping[str, Known]) -> None:
        """Load what is missing of a model; raises ToolkitError, HostDownError."""
        for units in model.rounds:
            done = await asyncio.gather(*(self._bring(known[unit]) for unit in units), return_exceptions=True)
            for each in done:
                if isinstance(each, BaseException):
                    raise each

    async def again(self, unit: Known) -> None:
        """Load one that is there with what its folder holds now; raises as `bring`."""
        async with self._locks.setdefault(unit.name, asyncio.Lock()):
            self._renewing[unit.name] = math.inf
            self.keep({unit.name: 2 * self.used.by_model.get(unit.name, 0)})
            try:
                await self.behind.load(unit)
            finally:
                self._since[unit.name] = time.monotonic()
                self._renewing[unit.name] = time.monotonic() + SETTLES_S
                self.gives_up([unit.name])
            self._ungrant([unit.name])

    def _ungrant(self, units: Iterable[str]) -> None:
        for unit in units:
            self._granted.pop(unit, None)

    async def _bring(self, unit: Known) -> None:
        start = self._start
        async with self._locks.setdefault(unit.name, asyncio.Lock()):
            if unit.name in self.loaded:
                return
            await self.behind.load(unit)
            if start != self._start:
                raise HostDownError
            self._since[unit.name] = time.monotonic()
            self.loaded.add(unit.name)

    def _came_late(self, unit: str) -> None:
        """Nobody waits for it any more, and it holds memory."""
        if unit not in self.loaded:  # one that was there is there again, with what its folder holds now
            self.loaded.add(unit)
            self.leave([unit])

    async def _unload(self, units: list[str], patient: bool) -> None:
        try:
            for unit in units:
                async with self._locks.setdefault(unit, asyncio.Lock()):
                    if unit in self.loaded:  # it was brought before its turn to go came
                        continue
                    with suppress(HostDownError, ToolkitError):  # what it still takes goes on counting
                        await self._host.unload(unit, patient=patient)
            await self.look()
        finally:
            gone = asyncio.current_task()
            for unit in [unit for unit, task in self._leaving.items() if task is gone]:
                del self._leaving[unit]
