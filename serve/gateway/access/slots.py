"""Slots of a model's sequence batcher, shared by the keys that use them.

Triton gives a slot to a sequence until it ends or is idle, and lets the others wait in the order in which they came: a
key that opens as many as there are, and keeps them busy, keeps all others out. Here slots are shared max-min fairly
(Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2): where a sequence has waited for a while, and its key
holds at least two fewer than the key that holds the most, that one's newest sequences are ended, down to half of what
the two hold together, and those with which it waits before the other. From when a key waits that has less than its
share, no other begins more than its own; nor for twice as long as it had to wait, after it has last begun one.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from serve.gateway.errors import GatewayError, OverloadedError, RateLimitedError
from serve.rollout.plan import Target

__all__ = [
    "MOST_WAITING",
    "Batcher",
    "HasItsShareError",
    "HasItsSlotsError",
    "NoSlotError",
    "SequenceEndedError",
    "Slots",
    "Turn",
]

LONGEST_S = 300.0  # that one sequence keeps the last slot from a key that has none
MOST_WAITING = 32  # of a key: each has one of the places among the requests of the model
TOLD_S = 60.0
MOST_WAITS = 3  # times what one waits until others are ended for it, for its first answer
KEPT_WAITS = 2.0  # times what a key waited for its share, that it may come back to it
REMEMBERED = 4096

logger = logging.getLogger(__name__)


class SequenceEndedError(RateLimitedError):
    """A sequence whose slot has gone to another key."""

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__(
            "the sequence was ended",
            why="another key waits for one of the model's slots, and this key holds more than its share",
            mend="end the sequences that are done (sequence_end), and begin this one anew",
            retry_after_s=seconds,
        )


class HasItsShareError(RateLimitedError):
    """A sequence that would take what was freed for another key."""

    def __init__(self, share: int, seconds: float) -> None:
        super().__init__(
            "the sequence can't begin now",
            why=f"another key has waited for the model's slots, and this key has its share of them ({share})",
            mend="end the sequences that are done (sequence_end), or wait as long as Retry-After says",
            retry_after_s=seconds,
        )


class HasItsSlotsError(RateLimitedError):
    """A sequence of a key that has as many as one may have here."""

    def __init__(self, most: int, slots: int) -> None:
        super().__init__(
            "the key has as many sequences of the model as it may",
            why=f"one key has {most} of its {slots} slots at most (max_sequence_share)",
            mend="end the sequences that are done (sequence_end), then begin others",
        )


class NoSlotError(OverloadedError):
    """A sequence has no slot, and nothing that is known here will free one."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(
            "the sequence could not begin",
            why=f"the model did not answer it in {waited_s:g} s: sequences hold its slots that are not known here, as "
            "those of another gateway, or its first answers take longer",
            mend="try again when Retry-After says; where first answers take as long, set sequence_wait_s higher",
            retry_after_s=waited_s,
        )


class Asked(Protocol):
    """A request of a sequence: the sequence's id, as Triton is told, and whether it is its first or its last."""

    @property
    def sent(self) -> int | str: ...

    @property
    def start(self) -> bool: ...

    @property
    def end(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Batcher:
    """What a model's configuration says of its sequences.

    Each version has a batcher, with slots, of its own: the same id is another sequence there.

    Attributes:
        name: of the model, or of the step of an ensemble that has them.
        version: that is asked, by number, also where Triton chooses it; "" where that is not known.
        slots: sequences that one server runs at a time.
        idle_s: after so long without a request Triton ends one.
    """

    name: str
    version: str
    slots: int
    idle_s: float

    @property
    def target(self) -> Target:
        """The model, or the step, with the version that has the sequences."""
        return Target(self.name, self.version or None)


# Ends a sequence, by the id that Triton knows, of a batcher: asking it as its client did, and whether its slot is free.
End = Callable[[Target, Batcher, int | str], Awaitable[bool]]


@dataclass(slots=True, eq=False)
class _Sequence:
    """One that has a slot, or waits for one.

    Attributes:
        who: the id of its key.
        id: as Triton knows it.
        target: the model that is asked.
        since: when it was begun; `heard` when Triton last answered it.
        flying: its requests that are with Triton.
        waits: whether its first request has not been answered.
        begun: whether that one was sent, so that it may have a slot, or get one yet.
        ending: whether it is being ended.
        lacks: whether it was begun while all slots were taken, and its key had less than its share.
        has_slot: whether a slot was free as it was begun, which Triton gives it at once, as far as is known.
        told: what to call once it is known that it has none, of each of its requests.
    """

    who: str
    id: int | str
    target: Target
    since: float
    heard: float
    flying: int = 0
    waits: bool = True
    begun: bool = False
    ending: bool = False
    lacks: bool = False
    has_slot: bool = False
    told: dict[Turn, list[Callable[[], object]]] = field(default_factory=dict)

    @property
    def queues(self) -> bool:
        """Whether it is known to wait in Triton's queue, where others are served after it."""
        return self.waits and self.begun and not self.has_slot

    def lose(self) -> None:
        """The slot that looked free for it is another's: it waits for the next."""
        self.has_slot = False
        told, self.told = self.told, {}
        for each in itertools.chain.from_iterable(told.values()):
            each()


@dataclass(slots=True)
class _Shared:
    """The sequences of one batcher, in the order in which they were begun, and those that were ended here lately.

    Attributes:
        kept: keys that have waited for their share: until when it is kept for them, and for how long each time.
    """

    batcher: Batcher
    sequences: dict[int | str, _Sequence] = field(default_factory=dict)
    ended: OrderedDict[int | str, float] = field(default_factory=OrderedDict)
    kept: dict[str, tuple[float, float]] = field(default_factory=dict)

    def prune(self, now: float) -> None:
        """Without those that Triton has ended by now."""
        idle_s = self.batcher.idle_s
        for each in [*self.sequences.values()]:
            if not each.waits and not each.flying and now - each.heard > idle_s:
                del self.sequences[each.id]

    def begin(self, who: str, id_: int | str, target: Target, now: float, wait_s: float) -> _Sequence:
        """One more of a key; raises HasItsShareError where others wait for what would be beyond its share.

        Where one queues, no slot is free for it, whatever is known of the others: they may be another gateway's.
        """
        self.kept = {each: kept for each, kept in self.kept.items() if kept[0] > now}
        held = Counter(each.who for each in self.sequences.values() if not each.ending)
        waiting = {each.who for each in self.sequences.values() if each.lacks and each.waits and not each.ending}
        others = (self.kept.keys() | waiting) - {who}
        share = max(1, self.batcher.slots // len(held.keys() | others | {who}))
        if wait_s and others and held[who] >= share:
            raise HasItsShareError(
                share, max(self.kept[each][0] - now if each in self.kept else wait_s for each in others)
            )
        if who in self.kept:
            self.keep(who, now, self.kept[who][1])
        free = len(self.sequences) < self.batcher.slots
        lacks = not free and held[who] < share
        has_slot = free and not any(each.queues for each in self.sequences.values())
        found = self.sequences[id_] = _Sequence(who, id_, target, now, now, lacks=lacks, has_slot=has_slot)
        return found

    def sends(self, sequence: _Sequence) -> None:
        """The first request of one is sent: it takes a slot that looked free for one that is not sent yet."""
        before, sequence.begun = sequence.begun, True
        if sequence.waits and not (before or sequence.has_slot):
            unsent = (each for each in self.sequences.values() if each.has_slot and each.waits and not each.begun)
            if (found := next(unsent, None)) is not None:
                sequence.has_slot = True
                found.lose()

    def answered(self, now: float) -> None:
        """One more has its slot: if all are known to be held, what is not answered has none, whatever looked free."""
        if sum(not each.waits for each in self.sequences.values()) < self.batcher.slots:
            return
        self.prune(now)
        if sum(not each.waits for each in self.sequences.values()) >= self.batcher.slots:
            self.full()

    def full(self) -> None:
        """What is not answered has no slot, whatever looked free."""
        for each in [*self.sequences.values()]:
            if each.waits and each.has_slot:
                each.lose()

    def keep(self, who: str, now: float, seconds: float) -> None:
        """Keep its share for a key: it is not shortened by that."""
        until, before = self.kept.get(who, (0.0, 0.0))
        self.kept[who] = max(until, now + seconds), max(seconds, before)

    def to_end(self, waiting: _Sequence, now: float) -> list[_Sequence]:
        """Those that are to make room for one that waits; [] where slots are free, or its key has its share."""
        holding = [each for each in self.sequences.values() if not each.waits and not each.ending]
        if len(holding) < self.batcher.slots:
            return []
        held = Counter(each.who for each in holding)
        ((who, most),) = held.most_common(1)
        mine = held[waiting.who]
        theirs = [each for each in holding if each.who == who]
        if most - mine >= 2:
            # What its key has in Triton's queue before this one would take each slot that is freed.
            before = itertools.takewhile(lambda each: each is not waiting, self.sequences.values())
            queued = [each for each in before if each.who == who and each.waits and not each.ending]
            return theirs[(most + mine + 1) // 2 :] + queued
        if mine == 0 and who != waiting.who:
            return [each for each in theirs if now - each.since > LONGEST_S][:1]
        return []


class Turn:
    """One request of a sequence; `leave` it in any case."""

    __slots__ = ("_asked", "_sequence", "_shared", "_slots", "_whose")

    def __init__(
        self, slots: Slots, shared: _Shared, sequence: _Sequence | None, whose: tuple[str, Target], asked: Asked
    ) -> None:
        self._slots, self._shared, self._sequence = slots, shared, sequence
        self._whose, self._asked = whose, asked
        if sequence is not None:
            sequence.flying += 1

    @property
    def waits(self) -> bool:
        """Whether its sequence has no slot yet, as far as is known."""
        return self._sequence is not None and self._sequence.waits and not self._sequence.has_slot

    @property
    def begins(self) -> bool:
        """Whether its sequence was not answered yet, so that it may wait for its slot, whatever is known."""
        return self._sequence is not None and self._sequence.waits

    @property
    def patient(self) -> bool:
        """Whether others may wait for it: its sequence has a slot, and it ends that, or is the only one of it."""
        found = self._sequence
        return found is not None and not found.waits and (self._asked.end or found.flying == 1)

    def on_wait(self, then: Callable[[], object]) -> None:
        """Call this once it is known that its sequence waits for its slot, though one looked free; not once it left."""
        if self.waits:
            then()
        elif self._sequence is not None and self._sequence.waits:
            self._sequence.told.setdefault(self, []).append(then)

    def waited(self) -> None:
        """It has waited for longer than an answer takes: no slot is free, nor for those behind it in the queue."""
        if self._sequence is not None and self._sequence.waits:
            self._shared.full()

    def sends(self) -> None:
        """From here on Triton may know of it."""
        if self._sequence is not None and self._asked.start:
            self._shared.sends(self._sequence)

    def leave(self, status: int | None) -> None:
        """It is over.

        Args:
            status: Triton's answer as over HTTP; None where there is none.
        """
        now, found = self._slots.clock(), self._sequence
        holds = status is not None and (status == 200 or status >= 500)  # a model that fails keeps the slot
        sequences, asked = self._shared.sequences, self._asked
        if found is None:  # begun elsewhere, or before this gateway
            if holds and not asked.end and asked.sent not in sequences:
                who, target = self._whose
                sequences[asked.sent] = _Sequence(who, asked.sent, target, now, now, waits=False)
                self._shared.answered(now)
            return
        found.flying -= 1
        found.told.pop(self, None)
        if status is not None:
            found.heard = now
        if found.ending or sequences.get(found.id) is not found:
            return
        if holds:
            if found.waits and found.lacks:
                self._shared.keep(found.who, now, KEPT_WAITS * (now - found.since))
            began, found.waits = found.waits, False
            if asked.end:
                del sequences[found.id]
            elif began:
                self._shared.answered(now)
            return
        if status is not None and asked.start:  # it was refused
            found.begun = False
        if found.waits and not found.flying:  # whichever of its requests is the last to leave
            if found.begun:  # it may get a slot yet, which nobody would use
                self._slots.end(self._shared, found)
            else:
                del sequences[found.id]


class Slots:
    """Whose sequences hold the slots of which model, as far as they pass here.

    Args:
        wait_s: that a sequence waits before another key's is ended for it; 0 ends none, and lets each wait as it may.
        clock: in seconds.
        share: of a batcher's slots, that one key may have.
    """

    def __init__(self, wait_s: float, clock: Callable[[], float] = time.monotonic, share: float = 1.0) -> None:
        self.clock = clock
        self._wait_s = wait_s
        self._share = share
        self._shared: dict[Target, _Shared] = {}
        self._end: End | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def longest_s(self) -> float:
        """Seconds that a sequence may wait for its first answer."""
        return MOST_WAITS * self._wait_s or math.inf

    def follow(self, end: End) -> None:
        """Ends a sequence in Triton."""
        self._end = end

    def asked(self, batcher: Batcher | None, target: Target, sequence: Asked, who: str) -> Turn | None:
        """A request of a sequence; None where nothing is known of the model's slots.

        Args:
            batcher: of the model.
            target: the model that is asked.
            sequence: its id, and whether this is its first or its last.
            who: the id of the key.

        Raises:
            SequenceEndedError: its slot has gone to another key.
            HasItsShareError: it would take what was freed for another key.
            RateLimitedError: the key has as many as one may have, or has as many waiting as may be.
        """
        if batcher is None or self._end is None:
            return None
        now, id_, start = self.clock(), sequence.sent, sequence.start
        shared = self._shared.get(batcher.target)
        if shared is None or shared.batcher != batcher:
            self._forget_idle(now)
            shared = self._shared[batcher.target] = _Shared(batcher)
        found = shared.sequences.get(id_)
        if found is not None and found.ending:
            raise SequenceEndedError
        if not start and found is None and now - shared.ended.get(id_, -TOLD_S) < TOLD_S:
            raise SequenceEndedError
        if start:
            shared.prune(now)
            found = shared.sequences.get(id_)
            if found is None:
                self._check_waiting(shared, who)
                found = shared.begin(who, id_, target, now, self._wait_s)
                shared.ended.pop(id_, None)
                self._look_later(shared, found)
        return Turn(self, shared, found, (who, target), sequence)

    def holds(self, models: Collection[str], who: str) -> bool:
        """Whether a key has a sequence with a slot of one of these models, for which others may wait."""
        return any(
            each.who == who and not each.waits and each.target.model in models
            for shared in self._shared.values()
            for each in shared.sequences.values()
        )

    def _forget_idle(self, now: float) -> None:
        """Without batchers that have no sequence, as those of versions that are gone."""
        for target, shared in [*self._shared.items()]:
            shared.prune(now)
            if not shared.sequences and all(now - ended >= TOLD_S for ended in shared.ended.values()):
                del self._shared[target]

    def end(self, shared: _Shared, sequence: _Sequence) -> None:
        """End a sequence, so that its slot is free."""
        sequence.ending = True
        # Nothing of the request in whose course this happens goes along.
        task = contextvars.Context().run(asyncio.ensure_future, self._ended(shared, sequence))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is being ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check_waiting(self, shared: _Shared, who: str) -> None:
        most = max(1, int(self._share * shared.batcher.slots))
        if self._share < 1 and sum(each.who == who and not each.ending for each in shared.sequences.values()) >= most:
            raise HasItsSlotsError(most, shared.batcher.slots)
        waiting = sum(each.waits and each.who == who for each in shared.sequences.values())
        most = min(2 * shared.batcher.slots, MOST_WAITING) if self._wait_s else MOST_WAITING
        if waiting >= most:
            raise RateLimitedError(
                "too many sequences of this key wait for a slot",
                why=f"{waiting} wait, and the model runs {shared.batcher.slots} at a time",
                mend=f"begin at most {most} at once, and end those that are done (sequence_end)",
            )

    def _look_later(self, shared: _Shared, waiting: _Sequence) -> None:
        if self._wait_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self._wait_s, self._look, shared, waiting, context=contextvars.Context())

    def _look(self, shared: _Shared, waiting: _Sequence) -> None:
        if not waiting.waits or waiting.ending or shared.sequences.get(waiting.id) is not waiting:
            return
        now = self.clock()
        shared.prune(now)
        ending = shared.to_end(waiting, now)
        if ending:
            shared.keep(waiting.who, now, KEPT_WAITS * self._wait_s)
        for sequence in ending:
            logger.warning(
                "ended a sequence of key %s of %s: key %s waits", sequence.who, shared.batcher.target, waiting.who
            )
            self.end(shared, sequence)
        self._look_later(shared, waiting)

    async def _ended(self, shared: _Shared, sequence: _Sequence) -> None:
        told = False
        try:
            told = self._end is not None and await self._end(sequence.target, shared.batcher, sequence.id)
        except GatewayError as err:
            logger.warning("could not end a sequence of %s: %s", shared.batcher.target, err.error)
        finally:
            if not told:  # nobody hears of it again, and Triton ends it when it has been idle
                left = sequence.heard + shared.batcher.idle_s - self.clock()
                asyncio.get_running_loop().call_later(max(0.0, left), self._forget, shared, sequence)
            else:
                self._forget(shared, sequence)

    def _forget(self, shared: _Shared, sequence: _Sequence) -> None:
        if shared.sequences.get(sequence.id) is sequence:
            del shared.sequences[sequence.id]
        shared.ended[sequence.id] = self.clock()
        while len(shared.ended) > REMEMBERED:
            shared.ended.popitem(last=False)
