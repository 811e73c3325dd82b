"""Which models are loaded: brought when they are asked for, within a budget of memory.

A request for a model that is loaded costs a look into a dictionary and a time stamp (`at_hand`). Any other waits for
the one load that is made for all who ask. What goes for it is chosen by `victim_of`, and never what a request, a
rollout or a pin holds. Where none may go by itself, a key that has next to nothing has its turn (`turns.py`): a model
is drained for it. All of this happens in the event loop: between two awaits nothing changes.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from compress.errors import ToolkitError
from serve.gateway.errors import EndsError, GatewayError, UpstreamDownError
from serve.gateway.on_demand.catalogue import Known
from serve.gateway.on_demand.estimates import MIB
from serve.gateway.on_demand.host import Host, HostDownError
from serve.gateway.on_demand.lease import Lease
from serve.gateway.on_demand.loads import BACK_S, Failures, Load, LoadFailedError, LoadingError
from serve.gateway.on_demand.resident import LATELY_S, TURN_S, Claim, Resident, held_by
from serve.gateway.on_demand.room import Room
from serve.gateway.on_demand.turns import DRAIN_S, Drain
from serve.repository.read import ModelInfo

__all__ = ["Residency"]

LOOK_S = 2.0
HANGS_S = 30.0  # after which to ask again for a model whose load was given up and has not ended
POLL_S, ROOM_S = 0.05, 5.0  # how often a load looks for memory, and for how long
TURNS = "ask again: whoever has next to nothing in memory gets a turn"
GROWN = "models that may not go now (pinned, under a rollout, or with open sequences) have grown by {} MiB"
IN_USE = "the memory for models is taken by those that are in use, or that others use"


class Residency(Room):
    """Of one Triton.

    Args:
        host, known, budget, pins, on_event: as of `Room`.

    Attributes:
        failures: of late.
        wanted: models that are wanted whoever asks, as a rollout's.
        came: is told of a model that is loaded.
        no_room_since: when a load was refused last for what models have grown by that may not go.
    """

    def __init__(
        self,
        host: Host,
        known: Mapping[str, Known],
        budget: int,
        pins: Collection[str],
        on_event: Callable[[str], None],
    ) -> None:
        super().__init__(host, known, budget, pins, on_event)
        self.failures = Failures()
        self.wanted: Callable[[], Collection[str]] = tuple
        self.came: Callable[[str], None] = lambda _model: None
        self.no_room_since = -math.inf
        self._tasks: set[asyncio.Task[None]] = set()
        self.started()

    def at_hand(self, model: str, who: str) -> bool:
        """Whether a model is loaded; it then counts as used by this key."""
        found = self.resident.get(model)
        if found is None:
            return False
        found.touch(who, time.monotonic())
        return True

    def lease(self) -> Lease:
        """What a request will need; to be closed."""
        return Lease(self)

    def state(self, model: str) -> str:
        """READY, LOADING, FAILED or ON_DEMAND; "" for a model that is not known."""
        if model in self.resident or model in self.units.loaded:
            return "READY"
        if model in self.loads.by_model:
            return "LOADING"
        if model not in self.known:
            return ""
        return "FAILED" if model in self.failures or self._hangs(self.known[model]) else "ON_DEMAND"

    def in_the_way(self, models: Collection[str]) -> int:
        """MiB that models have grown by, where a load has just been refused for such growth; else 0."""
        if time.monotonic() - self.no_room_since > LOOK_S:
            return 0
        return sum(map(self.growth, self.known.keys() & set(models))) // MIB

    def resting(self) -> dict[str, ModelInfo]:
        """Models that are not loaded, and that a request would have loaded: what each is."""
        states = ((known, self.state(name)) for name, known in self.known.items())
        return {known.name: known.info for known, state in states if known.info and state in ("ON_DEMAND", "LOADING")}

    def started(self) -> None:
        """Triton has died, or was started: it has what is pinned, and the rest when it is asked for."""
        now = time.monotonic()
        self.resident = {name: Resident(name, now) for name in self.pins}
        self.draining.clear()
        self._back.clear()
        self._surplus = None
        self.units.started(part for name in self.pins for part in self.known[name].parts)

    async def changed(self, model: str, known: Mapping[str, Known]) -> bool:
        """A model's files are others, or gone: it is loaded again if it was loaded; whether it is.

        Where there is no room for it twice, it goes, and what needs it; they come when they are asked for.

        Args:
            model: its name.
            known: the models that there are now.

        Raises:
            ToolkitError: it can't be loaded; what was loaded goes on.
            HostDownError: Triton is down.
        """
        for there in (self.resident, self.draining):
            for name in there.keys() - known.keys():
                del there[name]
                self._asked.pop(name, None)
                self.units.gives_up(self._back.pop(name, ()))
                self.units.leave(self._only_of(name, ()), patient=True)
        self.known = dict(known)
        self.pins &= known.keys()
        self.estimates.forget(model)
        for name in known:
            self.failures.forget(name)  # it may be made of what has changed
        if model not in known or model not in self.units.loaded:
            return False
        await self.units.bring(known[model], known)  # a step that is new
        await self.units.look()
        one = self.units.used.by_model.get(model, 0)
        if model not in self.units.behind and self.units.taken + one > self.budget:
            self._goes_first(model)
            return False
        await self.units.again(known[model])
        self.came(model)
        return True

    async def need(self, model: str, who: str, deadline: float) -> Resident | None:
        """Wait until a model is loaded; None for one that is not known. For what is raised, see `Lease.need`."""
        while not self.at_hand(model, who):
            if model not in self.known:
                return None
            await self._wait(model, who, deadline)
        return self.resident[model]

    async def _wait(self, model: str, who: str, deadline: float) -> None:
        now = time.monotonic()
        self._asked.setdefault(model, {})[who] = now
        load = self.loads.by_model.get(model) or self._ask(model, who, now)
        left, expected = deadline - now, load.left_s(now)
        if self.estimates.knows(model) and expected > left:
            load.back_by = now + BACK_S
            raise LoadingError(model, f"it takes {expected:.1f} s, and the request waits for {left:.1f} s", expected)
        self.loads.add(load, who, now)
        self.counts["waited", model] += 1
        try:
            await asyncio.wait((load.done,), timeout=max(0.0, left))
            load.back_by = time.monotonic() + BACK_S
        finally:
            self.loads.drop(load, who)
        if not load.done.done():
            raise LoadingError(model, "the request's time is over", load.left_s(time.monotonic()))
        if (error := load.done.result()) is not None:
            raise copy.copy(error)

    def _ask(self, model: str, who: str | None, now: float) -> Load:
        known = self.known[model]
        if self._hangs(known):
            raise LoadFailedError(model, HANGS_S, "a load of it, or of its steps, took too long and has not ended yet")
        self.failures.check(model, now)
        load = self.loads.ask(known, who, self.estimates.seconds(known), now, alone=self._alone(who, now))
        task = asyncio.get_running_loop().create_task(self._load(load))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return load

    def _hangs(self, known: Known) -> bool:
        """Whether a load of it, or of a part, was given up and has not ended."""
        return any(part in self.units.behind for part in known.parts)

    def _alone(self, who: str | None, now: float) -> bool:
        """Whether no other key has used a model lately, or waits for one."""
        others = any(not each.idle(now) and any(key != who for key in each.keys(now)) for each in self._unpinned())
        return not others and all(load.who == who for load in self.loads.by_model.values())

    async def _load(self, load: Load) -> None:
        model = load.model
        error: GatewayError | None = None
        try:
            await load.turn
            load.kept = self._back.pop(model.name, [])
            load.began = time.monotonic()
            if model.name in self.resident:  # it was about to go, and stayed
                return
            await self._make_room(load)
            load.began = began = time.monotonic()  # what it waited for is not the model's
            await self.units.fit(self.budget)
            await self.units.bring(model, self.known)  # nothing is awaited from here on: Triton may die at any time
            now = time.monotonic()
            self.estimates.saw_seconds(model.name, now - began)
            users = self._asked.setdefault(model.name, {})
            users[load.who or ""] = now
            self.resident[model.name] = Resident(model.name, now, users)
            self._turns.loaded(load.who or "", now)
            self.failures.forget(model.name)
            self.counts["loaded", model.name] += 1
            self.came(model.name)
            await self._look()
        except ToolkitError as err:
            error = self._failed(load, err.why)
        except HostDownError:
            error = UpstreamDownError("the model server can't be reached", why="it is being started", mend="ask again")
        except GatewayError as err:
            error = err
        except asyncio.CancelledError:
            error = EndsError()
            raise
        except Exception as err:
            error = self._failed(load, f"{type(err).__name__}: {err}")
        finally:
            self.units.gives_up(load.kept)
            self.loads.end(load, error)
            if error is not None:
                self._leave_alone(model)
            elif load.yields:
                self._fits(model.name)

    def _failed(self, load: Load, why: str) -> LoadFailedError:
        wait_s = self.failures.add(load.model.name, time.monotonic(), "its last load failed")
        self.counts["failed", load.model.name] += 1
        self._on_event(f"{load.model.name} can't be loaded: {why}; it is not tried again for {wait_s:.0f} s")
        return LoadFailedError(load.model.name, wait_s, "its load has failed just now")

    def _fits(self, late: str) -> None:
        """Take out a model that has come late, where others have the memory by now: what it takes is known by now."""
        found = self.resident.get(late)
        if found and self.units.taken > self.budget and not self._is_in_use(found):
            self._go([(found, "memory")], None)

    async def _make_room(self, load: Load) -> None:
        """Keep memory for what is missing of a model, and begin to take out what has to go."""
        model, until = load.model, time.monotonic() + ROOM_S
        drain: Drain | None = None
        trades = False  # what a key would trade of its own goes only where no other's does
        why = f"{model.name} is not loaded after all"
        await self._look()
        self._short.append(load)
        try:
            while True:
                sizes = self._sizes(self.units.missing(model))
                size = sum(sizes.values())
                room = self.budget - size
                if room < self._least(sizes):
                    raise self._too_large(load, size)
                if drain is not None and not any(self._is_in_use(each) for each in drain.residents):
                    self._go(drain.going, model)
                    drain, until = None, time.monotonic() + ROOM_S
                claims = self._claims(load, self._lasting(sizes))
                if any(self._free(self.units.taken - room, claim, model, trades=trades) for claim in claims):
                    self.units.keep(sizes)
                    load.kept += sizes
                    why = "others have made way"
                    return
                now = time.monotonic()
                if drain is None:
                    drain = self._drain(load)
                    if drain is None and not trades:
                        trades = True
                        continue
                elif not load.is_wanted(now):
                    why = f"nobody waits for {model.name} any more"
                    raise LoadingError(model.name, "nobody waits for it any more", self._turn_s(load))
                elif now > drain.until or any(self.stays(each.name) for each in drain.residents):
                    self._spare(drain, now)
                    drain, until, trades = None, now + ROOM_S, True
                if drain is None and now > until:
                    raise self._no_room(load, self.units.taken - room, now)
                if not load.short:
                    load.short = True
                    self.loads.wake(now)
                await asyncio.sleep(POLL_S)
        finally:
            load.short = False
            self._short.remove(load)
            if drain is not None:
                self._call_off(drain, why)

    def _no_room(self, load: Load, over: int, now: float) -> LoadingError:
        if (grown := self._grown_for_good(now)) >= over:
            self.no_room_since = now
            return LoadingError(load.model.name, GROWN.format(grown // MIB), TURN_S, TURNS)
        return LoadingError(load.model.name, IN_USE, self._turn_s(load), TURNS)

    def _claims(self, load: Load, size: int) -> list[Claim | None]:
        """For whose sake a load is, and for the one's that has least of those who wait for it."""
        if load.who is None:
            return [None]
        now = time.monotonic()
        held = held_by(self._used(), now, self.bytes_of)
        least = min(load.keys, key=lambda who: (held.get(who, 0.0), who != load.who))
        return [self._claim(load, who, size, now) for who in dict.fromkeys((load.who, least))]

    def _next(self, load: Load) -> str | None:
        """The key whose turn is next, of those who wait for a load; of several the one that has least."""
        now = time.monotonic()
        held = held_by(self._used(), now, self.bytes_of)
        keys = (who for who in load.keys if who)  # without keys, all clients are one
        return min(keys, key=lambda who: (self._turns.wait_s(who, now), held.get(who, 0.0)), default=None)

    def _drain(self, load: Load) -> Drain | None:
        """Begin to drain models for a load, if it is its turn."""
        now = time.monotonic()
        if not load.is_wanted(now):
            return None
        nexts = [(each, who) for each in self._short if (who := self._next(each)) is not None]
        turns = {each: who for each, who in nexts if not self._turns.wait_s(who, now)}
        if load not in turns:
            return None
        going, next_s = self._going(load, turns[load], now)
        if not going:
            return None
        while (first := self._turns.first_of(turns.items())) is not None and first is not load:
            if self._going(first, turns.pop(first), now)[0]:
                return None
        who = turns[load]
        load.who = who  # whose it is, should another have asked first
        self._turns.begin(who, now, next_s)
        for each, _ in going:
            self.draining[each.name] = self.resident.pop(each.name)
        names = ", ".join(each.name for each, _ in going)
        self._on_event(f"{names} will make way for {load.model.name}: a key with less in memory has its turn")
        return Drain(going, who, now + DRAIN_S)

    def _too_large(self, load: Load, size: int) -> GatewayError:
        why = f"it takes about {size // MIB} MiB, of {(self.budget - self._least()) // MIB} MiB that models may have"
        return self._failed(load, why)

    def _turn_s(self, load: Load) -> float:
        """In how many seconds a load may have its turn."""
        now, who = time.monotonic(), self._next(load)
        turn_s = 0.0 if who is None else self._turns.wait_s(who, now)
        return max(1.0, turn_s, min((each.loaded + TURN_S - now for each in self._unpinned()), default=TURN_S))

    def _leave_alone(self, model: Known) -> None:
        """Take out what was loaded for a model that did not come."""
        needed = {part for each in (*self.resident, *self.draining) for part in self.known[each].parts}
        self.units.leave([unit for unit in reversed(model.parts) if unit not in needed and not self.loads.wanted(unit)])

    async def _look(self) -> None:
        """See what models take, and learn of it."""
        await self.units.look()
        for name, size in self.units.used.by_model.items():
            if name in self.known and name in self.units.loaded and not self.units.is_twice(name):
                settled = self.units.settled(name)
                self.estimates.saw_bytes(self.known[name], size, settled=settled)
                if not settled and (peak := self.units.used.peaks.get(name)):
                    self.estimates.saw_loading(name, peak)

    async def watch(self) -> None:
        """Keep to the budget, and have what is wanted, until cancelled."""
        try:
            while True:
                await self.keep()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def keep(self) -> None:
        """The same, once: models grow with what they are asked."""
        try:
            now = time.monotonic()
            self.loads.wake(now)
            for asked in self._asked.values():
                for who in [who for who, at in asked.items() if now - at > LATELY_S]:
                    del asked[who]
            await self.units.behind.press()
            await self._look()
            if not self._yield(now):
                self._shed(now)
            for model in (*self.wanted(), *self.pins):
                if model in self.known and model not in self.resident and model not in self.loads.by_model:
                    with suppress(GatewayError):  # it has failed just now
                        self._ask(model, None, time.monotonic())
        except Exception as err:  # whatever it is, the next look must come
            self._on_event(f"can't look after the models' memory: {err or type(err).__name__}")
