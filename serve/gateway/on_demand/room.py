"""What is loaded, within a budget of memory: what may go, which of it does, and how it is taken out."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from serve.gateway.on_demand.catalogue import Known
from serve.gateway.on_demand.estimates import MIB, Estimates
from serve.gateway.on_demand.host import Host
from serve.gateway.on_demand.loads import Load, Loads
from serve.gateway.on_demand.resident import LATELY_S, TURN_S, Claim, Reason, Resident, held_by, surplus_of, victim_of
from serve.gateway.on_demand.turns import DRAIN_S, SEQUENCES_S, SPARED_S, Drain, State, Turns, drained_of
from serve.gateway.on_demand.units import Units

__all__ = ["SETTLE_S", "Room"]

logger = logging.getLogger(__name__)

YIELDED = "it takes much longer than expected, or nobody waits for it, and others have the memory that it would need"
SETTLE_S = 0.5  # after a load, in which those who waited for it come


class Room:
    """Of one Triton. All of this happens in the event loop: between two awaits nothing changes.

    Args:
        host: loads and unloads.
        known: the models that there are.
        budget: bytes that Triton and the models' processes may have resident.
        pins: models that were loaded at the start, and stay.
        on_event: is told what happens, a line each.

    Attributes:
        known, budget, pins: as above.
        resident: those that are loaded for requests, by name.
        draining: those that are about to go, and answer what they have.
        units: those that Triton has, steps among them.
        estimates: of what models take.
        loads: that are under way.
        counts: by what happened ("loaded", "failed", "evicted"; "spared": was drained, and stayed; "waited": a request
            has, for its load) and the model.
        went: how often each model has made way, by why.
        held: says whether something else holds a model: requests in its places, an outage, a rollout.
        stays: says whether what holds it is not requests alone.
    """

    def __init__(
        self,
        host: Host,
        known: Mapping[str, Known],
        budget: int,
        pins: Collection[str],
        on_event: Callable[[str], None],
    ) -> None:
        self.known = dict(known)
        self.budget = budget
        self.pins = frozenset(pins)
        self.resident: dict[str, Resident] = {}
        self.draining: dict[str, Resident] = {}
        self.estimates = Estimates()
        self.units = Units(host, self.estimates)
        self.loads = Loads()
        self.loads.is_leaving = self.draining.__contains__
        self.counts: Counter[tuple[str, str]] = Counter()
        self.went: Counter[tuple[str, Reason]] = Counter()
        self.held: Callable[[str], bool] = lambda _model: False
        self.stays: Callable[[str], bool] = lambda _model: False
        self._on_event = on_event
        self._asked: dict[str, dict[str, float]] = {}  # when each key has asked for each model last
        self._turns = Turns()
        self._back: dict[str, list[str]] = {}  # pins that come again: the models for which memory is kept
        self._short: list[Load] = []  # those that lack room
        self._surplus: Drain | None = None  # what goes for the memory's sake, once it is through

    def has(self, resident: Resident) -> bool:
        """Whether one is there still, be it about to go."""
        name = resident.name
        return self.resident.get(name) is resident or self.draining.get(name) is resident

    def bytes_of(self, model: str) -> int:
        """What a model takes with what it needs."""
        return sum(self.units.bytes_of(part, self.known) for part in self.known[model].parts)

    def growth(self, model: str) -> int:
        """Bytes that a model has, with what it needs, beyond what it was loaded with."""
        return sum(map(self.units.growth, self.known[model].parts))

    def _unpinned(self) -> list[Resident]:
        return [each for name, each in self.resident.items() if name not in self.pins]

    def _used(self) -> list[Resident]:
        """What counts as held by keys: what is about to go, too."""
        return [*self._unpinned(), *self.draining.values()]

    def _sizes(self, units: Collection[str]) -> dict[str, int]:
        """Bytes to keep for units that come; guesses that are more than there is are no reason not to try.

        Nor is what a load alone takes: it is kept where there is as much.
        """
        sizes = {unit: self.estimates.loading(self.known[unit]) for unit in units}
        most = self.budget - self._least(units)
        if sum(sizes.values()) > most:
            sizes = {unit: self.estimates.bytes(self.known[unit]) for unit in units}
        guessed = [unit for unit in units if not self.estimates.saw(unit)]
        left = most - sum(sizes[unit] for unit in units if unit not in guessed)
        files = sum(self.known[unit].file_bytes for unit in guessed)
        if files < left < sum(sizes[unit] for unit in guessed):
            each = (left - files) // len(guessed)
            sizes |= {unit: self.known[unit].file_bytes + each for unit in guessed}
        return sizes

    def _lasting(self, sizes: Mapping[str, int]) -> int:
        """Of what is kept for units that come, the bytes that they will have once they are loaded."""
        return sum(min(size, self.estimates.bytes(self.known[unit])) for unit, size in sizes.items())

    def _least(self, coming: Collection[str] = ()) -> int:
        """Bytes that stay, whatever goes, beside what comes: Triton's own, and what is pinned, as it was loaded."""
        pinned = {part for name in self.pins for part in self.known[name].parts}.difference(coming)
        return self.units.own + sum(self.units.least_of(part, self.known) for part in pinned)

    def _equal(self, now: float) -> float:
        """An equal part of the memory for each key that has asked for a model lately."""
        keys = {who for asked in self._asked.values() for who, at in asked.items() if now - at <= LATELY_S}
        return max(1, self.budget - self._least()) / max(1, len(keys))

    def _free(self, over: int, claim: Claim | None, model: Known, *, trades: bool = True) -> bool:
        """Take out models until so many bytes are free; False, and nothing done, where too few may go."""
        now = time.monotonic()
        residents = self._used()
        spared = frozenset(model.parts)
        free = [each for each in self._unpinned() if self._is_free(each, now)]
        going: list[tuple[Resident, Reason]] = []
        while over > 0:
            own = {each.name for each, _ in going}

            def size_of(name: str, own: set[str] = own) -> int:
                alone = self._only_of(name, own, spared)
                return sum(self.units.bytes_of(unit, self.known) for unit in alone)

            found = victim_of(residents, free, claim, now, size_of, trades=trades)
            if found is None:
                return False
            victim, why = found
            over -= size_of(victim.name)
            going.append((victim, why))
            residents, free = ([each for each in some if each is not victim] for some in (residents, free))
        self._go(going, model)
        return True

    def _going(self, load: Load, who: str, now: float) -> tuple[list[tuple[Resident, Reason]], float]:
        """What would go for a load in a key's turn, and in how many seconds the key would have the next."""
        sizes = self._sizes(self.units.missing(load.model))
        size = sum(sizes.values())
        spared = load.model.parts

        def size_of(name: str, going: Iterable[str]) -> int:
            return sum(self.units.bytes_of(unit, self.known) for unit in self._only_of(name, set(going), spared))

        def state(each: Resident) -> State:
            may_go = each.name not in self.draining and not self.stays(each.name)
            return State(may_go, self._is_free(each, now), not self._rests(each, now))

        claim = self._claim(load, who, self._lasting(sizes), now)
        over = self.units.taken - (self.budget - size)
        return drained_of(self._used(), state, claim, over, self._equal(now), now, size_of)

    def _claim(self, load: Load, who: str, size: int, now: float) -> Claim:
        asked = self._asked.get(load.model.name, {})
        return Claim(who, size, frozenset(each for each, at in asked.items() if now - at <= LATELY_S) | load.keys)

    def _is_free(self, each: Resident, now: float) -> bool:
        return not self._is_in_use(each) and now - each.loaded >= SETTLE_S and self._rests(each, now)

    def _is_in_use(self, each: Resident) -> bool:
        return self.has(each) and (each.leases > 0 or self.held(each.name))

    def _rests(self, each: Resident, now: float) -> bool:
        """Whether no sequence can be in one."""
        known = self.known.get(each.name)
        return known is None or now - each.used >= known.idle_s

    def _only_of(self, name: str, going: Collection[str], spared: Collection[str] = ()) -> list[str]:
        """The models that go with one: those that no other needs, ensembles before their steps."""
        others = [each for each in (*self.resident, *self.draining) if each != name and each not in going]
        needed = {part for each in others for part in self.known[each].parts} | set(spared)
        return [unit for unit in reversed(self.known[name].parts) if unit not in needed and not self.loads.wanted(unit)]

    def _go(self, going: Sequence[tuple[Resident, Reason]], model: Known | None) -> None:
        """Take out residents, each for a reason, for a model, or for the memory's sake."""
        there = [(each, why) for each, why in going if self.has(each)]
        names = {each.name for each, _ in there}
        units = {unit for name in names for unit in self._only_of(name, names)}
        for name in names & self.pins:
            self._comes_back(name, self._only_of(name, names))
        for each, why in there:
            (self.draining if each.name in self.draining else self.resident).pop(each.name)
            self.counts["evicted", each.name] += 1
            self.went[each.name, why] += 1
            logger.info("%s makes way for %s: %s", each.name, "the memory" if model is None else model.name, why)
        self._leave(units)

    def _goes_first(self, unit: str) -> None:
        """Take out what has changed, with what needs it: its old and its new processes don't fit beside each other."""
        there = (self.resident, self.draining)
        names = {name for each in there for name in each if unit in self.known[name].parts}
        units = {part for name in names for part in self._only_of(name, names)} | {unit}
        for each in there:
            for name in names & each.keys():
                del each[name]
        self._leave(units, patient=True)

    def _leave(self, units: Collection[str], *, patient: bool = False) -> None:
        """Let these go, ensembles before their steps."""
        self.units.leave(sorted(units, key=lambda unit: (-len(self.known[unit].parts), unit)), patient=patient)
        self.loads.wake(time.monotonic())

    def _yield(self, now: float) -> bool:
        """Loads that hang, or that nobody waits for, give others what is kept for them; whether one is ended for it.

        They have what their processes have. Where that is too much by now, they end before what is loaded goes.
        """
        ended = False
        for load in self.loads.by_model.values():
            others = any(each is not load for each in self._short)
            if load.kept and not load.yields and (load.overdue(now) or (others and not load.is_wanted(now))):
                load.yields = True
                self.units.yields(load.kept)
            if load.yields and self.units.taken > self.budget:
                for unit in load.kept:
                    if self.units.used.by_model.get(unit):
                        ended |= self.units.behind.end(unit, YIELDED)
        return ended

    def _shed(self, now: float) -> None:
        """Bring what is loaded under the budget: who has most loses first, in use or not."""
        drain = self._surplus
        if drain is not None and not any(self._is_in_use(each) for each in drain.residents):
            self._go(drain.going, None)
            drain = None
        elif drain is not None and (now > drain.until or any(self.stays(each.name) for each in drain.residents)):
            self._spare(drain, now)
            drain = None
        self._surplus = drain
        lacks = bool(self._short)
        while self._surplus is None and (lacks or self.units.taken > self.budget):
            if (each := self._surplus_now(now)) is None:
                return
            lacks = False  # one at a time
            if not self._is_in_use(each):
                self._go([(each, "memory")], None)
                continue
            self._surplus = Drain([(each, "memory")], "", now + DRAIN_S)
            self.draining[each.name] = self.resident.pop(each.name)
            why = "it has grown" if self.growth(each.name) else "its keys have most"
            self._on_event(f"{each.name} will make way: the models have grown over the memory, and {why}")

    def _surplus_now(self, now: float) -> Resident | None:
        """What goes for the memory's sake: where it is short for loads alone, a pin that has grown.

        Such a pin comes again at once, as it was loaded at first.
        """
        over = self.units.taken > self.budget

        def may_go(each: Resident) -> bool:
            if self.stays(each.name) or now < each.spared:
                return False
            grown = self.growth(each.name) > 0
            if each.name in self.pins:
                return grown and now - each.loaded > TURN_S and self._rests(each, now)
            return over and (self._rests(each, now) or (grown and now - each.loaded > SEQUENCES_S))

        held = held_by(self._unpinned(), now, self.bytes_of)
        return surplus_of(
            filter(may_go, self.resident.values()), held, lambda each: not self._is_in_use(each), now, self.bytes_of,
            self.growth,
        )  # fmt: skip

    def _comes_back(self, pin: str, units: Collection[str]) -> None:
        """Keep, in the same step, the memory that a pin was loaded with."""
        self._on_event(f"{pin} is loaded anew: it has grown by {self.growth(pin) // MIB} MiB, which others need")
        sizes = {unit: self.units.granted(unit) for unit in units}
        for unit, size in sizes.items():
            self.estimates.shrinks(unit, size)
        self.units.keep(sizes)
        self._back[pin] = list(sizes)

    def _grown_for_good(self, now: float) -> int:
        """Bytes that models which may not go now have grown by."""
        stay = (
            each for each in (*self.resident.values(), *self.draining.values())
            if each.name in self.pins or self.stays(each.name) or not self._rests(each, now)
        )  # fmt: skip
        return sum(map(self.units.growth, {part for each in stay for part in self.known[each.name].parts}))

    def _spare(self, drain: Drain, now: float) -> None:
        """They can't go now, which is not for their key's doing."""
        self._turns.give_back(drain.who)
        late = now > drain.until
        for each in drain.residents:
            if late and self._is_in_use(each):
                each.spared = now + SPARED_S
        self._call_off(drain, f"what was asked has not ended within {DRAIN_S:.0f} s" if late else "it is needed")

    def _call_off(self, drain: Drain, why: str) -> None:
        """They stay, as if nothing had been."""
        for each in drain.residents:
            if self.draining.get(each.name) is each:
                self.resident[each.name] = self.draining.pop(each.name)
                self.counts["spared", each.name] += 1
                self._on_event(f"{each.name} stays: {why}")
        self.loads.wake(time.monotonic())
