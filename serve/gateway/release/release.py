"""One model's release: which of two models answers a request, and what is learnt from the answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from serve.gateway.health.outages import ModelDownError
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.release.agreement import Agreement
from serve.gateway.release.beside import Beside, Met
from serve.gateway.release.grades import (
    AWAIT_THE_OTHER,
    BLAMED,
    UNASKED,
    Grade,
    Other,
    Says,
    Second,
    is_late,
    of_copy,
    says,
)
from serve.gateway.release.patience import InLine, Patience, ended
from serve.rollout.analysis import Outcome
from serve.rollout.course import Course, Event
from serve.rollout.pairs import Place
from serve.rollout.plan import Plan, Target

__all__ = ["Answered", "Ask", "Release"]

T = TypeVar("T")
MOST_COPIES = 16
MOST_COPIED_BYTES = 64 * 1024 * 1024
logger = logging.getLogger(__name__)
Variant = Literal["candidate", "baseline"]


def _nothing(_: asyncio.Task[Any]) -> None:
    pass


@dataclass(frozen=True)
class Answered(Generic[T]):
    """An answer.

    Attributes:
        by: who gave it.
        seconds: that it took.
        paired: whether a copy of the request is to be asked of the candidate, as was decided before it was answered.
        first: whether nobody was asked before because another had failed.
        met: with others, that had asked the same model by another name, so that its time says nothing.
    """

    answer: T
    grade: Grade
    by: Target
    seconds: float
    paired: bool = False
    first: bool = True
    met: Met | None = None

    def outcome(self, *, fails: bool, timed: bool) -> Outcome:
        """What it is as evidence, where it is any."""
        return Outcome(fails, self.seconds if timed and self.met is None else None)


Ask = Callable[[Target], Awaitable[tuple[Grade, T]]]


@dataclass
class Asked:
    """A request whose first answer is evidence.

    Attributes:
        variant: who is asked first.
        key: the id of its client's key.
        place: among those of about the same time; None where that says nothing.
        goes_on: whether its answer comes after its client's.
    """

    variant: Variant
    key: str
    place: Place | None = None
    goes_on: bool = False

    def forget(self) -> None:
        """Nothing is known of its answer, unless it was told."""
        if self.place is not None:
            self.place.say(None)


class Release:
    """A model name for which one of two models answers.

    Args:
        id_: of the rollout; decides, with what is sticky, who meets the candidate first.
        model: the name that clients ask for.
        baseline, candidate: who answers.
        plan: what was asked for.
        course: where it is; None where another gateway follows the rollout, or it has ended.
        weight: the candidate's share where there is no course, 0 to 1.
        created: when the rollout was asked for.

    Attributes:
        beside: the candidate's requests that ask it by another name than this, or a step of it alone.
        steps: models that the candidate asks, and the baseline does not; None where that is not known.
        askers: names of other models that ask the candidate, or one of these steps.
        rollout: which one it is: another state file counts from 1 again, so the id alone does not say.
        asked: number of requests by variant and grade.
        events: what happened and has not been written down yet.
        copies: that are under way; copied_bytes: what they hold.
        fallbacks: requests that the baseline answered, as the candidate had failed or took long.
        lost: whether the version that answers for the name was said to be served no longer.
        batched: whether the models' tensors have a batch dimension.
        texts: their outputs that are BYTES; None where that is not known.
        unjudged_count: copies that a function of the operator's gave no judgement of.
        rests: whether nothing is decided any more: the gateway ends, and what has no answer then says nothing.
        dropped: copies that were not made, because the candidate or the gateway had enough to do, or they may end a
            process.
    """

    def __init__(
        self,
        id_: int,
        model: str,
        baseline: Target,
        candidate: Target,
        plan: Plan,
        course: Course | None = None,
        weight: float = 0.0,
        created: float = 0.0,
    ) -> None:
        self.id = id_
        self.rollout = id_, created
        self.model = model
        self.baseline = baseline
        self.candidate = candidate
        self.plan = plan
        self.course = course
        self.beside = Beside()
        self.steps: tuple[Target, ...] | None = None
        self.askers: frozenset[str] = frozenset()
        self.asked: Counter[tuple[Variant, Grade]] = Counter()
        self.events: list[Event] = []
        self.lost = False
        self.batched = True
        self.texts: frozenset[str] | None = None
        self.fallbacks = 0
        self.copies = 0
        self.copied_bytes = 0
        self.dropped = 0
        self.unjudged_count = 0
        self.rests = False
        self._unjudged = ""
        self._weight = weight
        self._asker: str | None = None
        self._speaker: str | None = None
        self._speakers = False
        self._answer_bytes: int | None = None
        self._patience = Patience()
        self._late: set[asyncio.Task[Any]] = set()  # the candidate's answers that clients did not wait for
        self._unheard = 0  # that are there, and do not count yet
        self._salt = f"{id_}:{model}:".encode()

    @property
    def weight(self) -> float:
        """The candidate's share of the requests, 0 to 1."""
        return self._weight if self.course is None else self.course.weight

    @property
    def kept(self) -> Target:
        """Who answers whoever does not meet the candidate; the candidate itself, once it has taken over."""
        return self.candidate if self.weight >= 1 else self.baseline

    def withdraw(self) -> None:
        """The candidate gets nothing more, where another gateway judges."""
        self._weight = 0.0

    @property
    def running(self) -> bool:
        """Whether this gateway judges it now."""
        return self.course is not None and self.course.state == "running"

    @property
    def copying(self) -> bool:
        """Whether requests are copied to the candidate now."""
        return self.course is not None and self.course.copies > 0

    @property
    def may_ask(self) -> tuple[Target, ...]:
        """Whom its requests may be with."""
        settled = not self.running and self.weight in (0.0, 1.0)
        return (self.kept,) if settled else (self.baseline, self.candidate)

    def meets(self, asked: Sequence[Target]) -> bool:
        """Whether one of these may be its candidate, or what that alone asks, or asks such, while it is judged."""
        return self.running and any(
            each.model in self.askers or any(_may_be(each, own) for own in (self.candidate, *(self.steps or ())))
            for each in asked
        )

    def knows(self, metadata: ModelMetadata) -> None:
        """Take from the baseline's metadata how answers are to be compared."""
        self.batched = metadata.batched
        self.texts = frozenset(output.name for output in metadata.outputs if output.datatype == "BYTES")

    def place(self, sticky: bytes | None) -> float:
        """Where a client stands in the line to the candidate, 0 to 1; without something sticky, anywhere."""
        if not sticky:
            return random.random()  # noqa: S311  no secret
        return int.from_bytes(hashlib.blake2b(self._salt + sticky, digest_size=8).digest()) / 2**64

    async def ask(
        self,
        sticky: bytes | None,
        ask: Ask[T],
        *,
        movable: bool,
        reserve: Callable[[], bool] | None = None,
        stays: Target | None = None,
        goes_on: Callable[[asyncio.Task[Any]], None] = _nothing,
        key: str = "",
        left_s: float = math.inf,
    ) -> Answered[T]:
        """Have a request answered by one of the two.

        A model's own first answer is what counts for or against it: the answer of one that is asked because the other
        failed says nothing, for only failures lead to it. Blame of the client is checked alike for both: it was the
        client if the other model says so, too.

        Args:
            sticky: what keeps the client with the same one; None for nothing.
            ask: asks a model and grades its answer; an exception means that nobody waits for it any more.
            movable: whether any model may be asked, and a second one after the first; sequences stay with the baseline.
            reserve: decides for a request to the baseline, before it is asked, whether a copy follows, and takes the
                place for it; None where none can. Chosen later, pairs would be those of well-answered requests only.
            stays: who has the request's sequence; None for none. Where that is nobody who answers for the name now, its
                answer says nothing of the two.
            goes_on: is given what still waits for the candidate, where the baseline is asked for its client.
            key: the id of the client's key.
            left_s: seconds that the client has.
        """
        due = time.monotonic() + left_s
        if stays is not None and stays != self.kept:
            return await _timed(ask, stays)
        if self.course is not None:
            self._asker = key if self._asker is None else self._asker
            self.course.joined |= key != self._asker
        weight = self.weight
        hangs = self.plan.fallback and self._patience.is_spent(key)
        meets = bool(weight) and (weight >= 1 or (movable and self.place(sticky) < weight))
        if meets and not (hangs and weight < 1):
            with self._asked("candidate", key) as asked:
                return await self._ask_candidate(ask, asked, goes_on, movable=movable, left_s=left_s)
        paired = movable and reserve is not None and reserve()
        # What never meets the candidate, as sequences do not, would hide what that fails at. What it is late with is
        # heard while it is asked nothing else: beside all that the baseline answers meanwhile, it would seem to fail
        # more often than it does.
        if weight and (not movable or (hangs and not self._patience.in_vain)):
            answered = replace(await self._ask_kept(ask, self.baseline), paired=paired)
            self.asked["baseline", answered.grade] += 1
        else:
            with self._asked("baseline", key, paired=paired) as asked:
                answered = await self._ask_baseline(
                    ask, asked, goes_on, due, movable=movable, paired=paired, hangs=hangs
                )
        if meets:
            self.withholds(answered)
        return answered

    def withholds(self, answered: Answered[Any]) -> None:
        """The candidate was not asked, as it answers none or has no process, what the baseline has answered so."""
        if answered.grade is Grade.GOOD and self.course is not None and self.running:
            self.course.analysis.withheld()

    @contextmanager
    def _asked(self, variant: Variant, key: str, *, paired: bool = False) -> Iterator[Asked]:
        """Take the request's place among those of about the same time, unless its copy has both answer the same."""
        asked = Asked(variant, key)
        if self.course is not None and self.running and self.course.weight and not paired:
            asked.place = self.course.analysis.asked(variant, key=key)
        try:
            yield asked
        finally:
            if not asked.goes_on:
                asked.forget()

    async def _ask_baseline(
        self,
        ask: Ask[T],
        asked: Asked,
        goes_on: Callable[[asyncio.Task[Any]], None],
        due: float,
        *,
        movable: bool,
        paired: bool,
        hangs: bool,
    ) -> Answered[T]:
        left_s = due - time.monotonic()
        patience_s = self._patience.seconds(left_s)
        with self._left("baseline"):
            answered = replace(await self._ask_kept(ask, self.baseline), paired=paired)
        blamed = answered.grade in BLAMED and movable and not paired and self.plan.fallback and 0 < self.weight < 1
        if not blamed:
            self._note(asked, answered)
            return answered
        # As where the candidate is asked first: who could fail the one alone would hide what the other fails.
        if hangs or (self._patience.in_vain and self._patience.is_spent(asked.key)) or time.monotonic() >= due:
            self._note(asked, answered, Other.SILENT)
        else:
            beside_s = left_s - min(answered.seconds, patience_s)
            await self._ask_who_is_blamed(ask, answered, goes_on, asked, due - time.monotonic(), beside_s)
        return answered

    async def _ask_who_is_blamed(
        self,
        ask: Ask[T],
        answered: Answered[T],
        goes_on: Callable[[asyncio.Task[Any]], None],
        asked: Asked,
        left_s: float,
        beside_s: float,
    ) -> None:
        """Ask the candidate what the baseline blames the client for, or fails at; no client waits long for that.

        Args:
            beside_s: seconds that the baseline would have had beside the candidate, were that asked first.
        """
        first = Answered(None, answered.grade, answered.by, answered.seconds)  # its answer is the client's
        found = await self._patience.bear(_timed(ask, self.candidate), left_s, asked.key)
        if isinstance(found, asyncio.Task):
            goes_on(found)
            self.look()
            asked.goes_on = True
            found.add_done_callback(partial(self._note_blamed, first, asked, beside_s))
        else:
            self._hear(found)
            self._note(asked, first, found.grade)

    def _note_blamed(self, first: Answered[None], asked: Asked, left_s: float, task: asyncio.Task[Answered[T]]) -> None:
        """The candidate has said who is to blame: in the time that the baseline would have had for that, or later."""
        second = _answered(task)
        try:
            if second is None:
                self._note(asked, first, Other.SILENT)
            else:
                late = is_late(second.grade, second.seconds, left_s)
                self._hear(second, saw=not late)
                self._note(asked, first, Grade.CUT if late else second.grade)
        finally:
            asked.forget()

    async def _ask_candidate(
        self,
        ask: Ask[T],
        asked: Asked,
        goes_on: Callable[[asyncio.Task[Any]], None],
        *,
        movable: bool,
        left_s: float,
    ) -> Answered[T]:
        if self.weight >= 1:
            first = await self._ask_kept(ask, self.candidate)
            self._note(asked, first)
            return first
        met, fallback = Met(), self.plan.fallback and movable
        asking, began = self._meeting(ask, met), time.monotonic()
        with self._left("candidate", met):
            found = await (self._patience.bear(asking, left_s, asked.key) if fallback else asking)
        if isinstance(found, asyncio.Task):
            return await self._ask_instead(ask, found, goes_on, began, met, asked, began + left_s)
        self._hear(found)
        if not (fallback and found.grade in BLAMED):
            self._note(asked, found)
            return found
        # Also where the candidate blames the client: it may be the candidate that does not understand.
        self._unheard += 1
        try:
            second = await self._ask_kept(ask, self.baseline)
        finally:
            self._unheard -= 1
        self.fallbacks += 1
        self._note(asked, found, second.grade)
        if isinstance(found.answer, ModelDownError) and found.grade is Grade.DOWN:
            self.withholds(second)
        return replace(second, first=False)

    async def _meeting(self, ask: Ask[T], met: Met) -> Answered[T]:
        """The candidate's answer, and what it met there."""
        with self.beside.watched(met):
            first = await _timed(ask, self.candidate)
        return replace(first, met=met) if met.any else first

    async def _ask_instead(
        self,
        ask: Ask[T],
        first: asyncio.Task[Answered[T]],
        goes_on: Callable[[asyncio.Task[Any]], None],
        began: float,
        met: Met,
        asked: Asked,
        due: float,
    ) -> Answered[T]:
        """Ask the baseline what the candidate takes long for; what that answers is evidence, when it does.

        Where the baseline fails, the candidate is waited for after all. A client that leaves has left the candidate.
        """
        goes_on(first)
        self._late.add(first)
        self.look()
        second: Answered[T] | None = None
        asking = asyncio.create_task(self._ask_kept(ask, self.baseline))
        try:
            await asyncio.wait((first, asking), return_when=asyncio.FIRST_COMPLETED)
            answered = _answered(first)
            if not asking.done() and answered is not None and answered.grade is Grade.GOOD:
                await ended(asking)
                return answered
            second = await asking
            if second.grade in AWAIT_THE_OTHER:
                await asyncio.wait((first,), timeout=None if math.isinf(due) else max(0.0, due - time.monotonic()))
        except asyncio.CancelledError:
            if not first.done():
                self._note_left("candidate", time.monotonic() - began, met)
            await ended(first, asking)
            raise
        finally:
            told = None if second is None else second.grade  # and no more of it is kept for as long as the other takes
            asked.goes_on = True
            first.add_done_callback(partial(self._note_later, told, asked, due - began))
        if second.grade is not Grade.GOOD and (answered := _answered(first)) and answered.grade is Grade.GOOD:
            return answered
        self.fallbacks += 1
        return replace(second, first=False)

    def _note_later(self, second: Grade | None, asked: Asked, left_s: float, task: asyncio.Task[Answered[T]]) -> None:
        self._late.discard(task)
        first = _answered(task)
        try:
            if first is not None:
                if self.rests and self.course is not None:  # which look does no more
                    self.course.analysis.going_on = max(0, self.course.analysis.going_on - 1)
                late = is_late(first.grade, first.seconds, left_s)
                self._hear(first, saw=not late)
                self._note(asked, first, second or Other.SILENT, left_s=left_s)
        finally:
            asked.forget()

    def _hear(self, first: Answered[T], *, saw: bool = True) -> None:
        """The candidate has answered."""
        if first.grade not in {Grade.CUT, *UNASKED}:
            self._patience.hears(first.seconds if first.grade is Grade.LATE else None)
        if saw:
            self._saw(first)

    def _saw(self, answered: Answered[T]) -> None:
        if answered.grade is Grade.GOOD:
            self._patience.saw(answered.seconds)

    @contextmanager
    def _left(self, variant: Variant, met: Met | None = None) -> Iterator[None]:
        """Note how long a client waited that left, where the answer is the first one."""
        started = time.monotonic()
        try:
            yield
        except asyncio.CancelledError:
            self._note_left(variant, time.monotonic() - started, met)
            raise

    def _note_left(self, variant: Variant, seconds: float, met: Met | None) -> None:
        self.asked[variant, Grade.CUT] += 1
        if self.course is not None and self.running and self.course.weight:
            if met is not None and met.any:
                self.course.analysis.met(met.key)
            else:
                self.course.analysis.left(variant, seconds)
            self.look()

    async def _ask_kept(self, ask: Ask[T], kept: Target) -> Answered[T]:
        """Ask the one that answers for the name; where that version is served no longer, what Triton serves instead."""
        answered = await _timed(ask, kept)
        self._saw(answered)
        if answered.grade is not Grade.GONE or kept.version is None or kept.model != self.model:
            return answered
        if not self.lost:
            logger.error("%s is no longer served: Triton's own choice answers for %s", kept, self.model)
            self.lost = True
        return await _timed(ask, Target(self.model))

    def _note(
        self, asked: Asked, first: Answered[Any], second: Second = Other.UNNEEDED, *, left_s: float = math.inf
    ) -> None:
        """Take the first answer to a request as evidence.

        Args:
            second: what the other model did with it.
            left_s: seconds that the client had.
        """
        variant = asked.variant
        said = says(first.grade, second, late=is_late(first.grade, first.seconds, left_s))
        if said is Says.WAITED:
            self._note_left(variant, min(first.seconds, left_s), first.met)
            return
        blames_wrongly = first.grade is Grade.CLIENT and said is Says.FAILED
        self.asked[variant, Grade.FAILED if blames_wrongly else first.grade] += 1
        course = self.course
        if said.fails is None or course is None or course.state != "running" or not course.weight:
            return
        outcome = first.outcome(fails=said.fails, timed=said.timed)
        if variant == "baseline":
            course.analysis.baseline(outcome, paired=first.paired, key=asked.key, place=asked.place)
        else:
            course.analysis.candidate(outcome, key=asked.key, place=asked.place)
        if first.met is not None:
            course.analysis.met(first.met.key)
        elif said.waited:
            course.analysis.left(variant, left_s)
        self.look()

    def look(self) -> None:
        """Act on the evidence."""
        if self.course is None or self.rests:
            return
        unheard = self._unheard + sum(task.done() for task in self._late)  # these wait for what the baseline says
        self.course.analysis.going_on = self._patience.going_on + unheard
        if (event := self.course.look(time.monotonic())) is not None:
            self.events.append(replace(event, why=event.why + self.unjudged_told))

    def unjudged(self, why: str) -> None:
        """A function of the operator's gave no judgement of two answers, which counts as a disagreement."""
        self.unjudged_count += 1
        if self._unjudged != why and self.unjudged_count == 1:
            logger.error("rollout of %s: --agree: %s", self.model, why)
            self.events.append(Event("note", f"--agree gave no judgement, which counts as a disagreement: {why}"))
        self._unjudged = why

    @property
    def unjudged_told(self) -> str:
        """What to add to the reasons; "" where all was judged."""
        if not self.unjudged_count:
            return ""
        return f"; --agree gave no judgement of {self.unjudged_count} copies, which count as others: {self._unjudged}"

    async def bear(self, copy: Coroutine[Any, Any, T], left_s: float, key: str) -> T | asyncio.Task[T]:
        """The candidate's answer to a copy; what goes on to wait for it, where a client would not.

        Args:
            left_s: seconds that the copy may take.
            key: the id of the key of the request that it is of.
        """
        return await self._patience.bear(copy, left_s, key)

    def copied(self, candidate: Answered[T], baseline: Answered[T], *, key: str = "") -> None:
        """A copied request of a key's was answered by both, well or not.

        Where both blame the client, it was the client; where it gave up before either answered, or one was not asked
        since it is down, there is no pair.
        """
        self._hear(candidate, saw=False)
        fail = of_copy(candidate.grade, baseline.grade)
        if fail is not None and self.course is not None and self.running:
            first, second = (
                each.outcome(fails=fails, timed=each.grade is Grade.GOOD)
                for each, fails in zip((candidate, baseline), fail, strict=True)
            )
            self.course.analysis.copied(first, second, key=key)
            self.look()

    def compared(self, found: Agreement, *, key: str = "") -> None:
        """Both answers to a copied request of a key's were good, and have been compared."""
        if self.course is not None and self.running and "disagreement" in self.course.analysis.measures:
            self.course.analysis.compared(
                found.items, found.disagreed, found.difference, found.largest, judged=found.judged, key=key
            )
            self.look()

    def variant(self, answered: Answered[T]) -> Variant | None:
        """Whose answer it counts as; None where it says nothing of either: only failures lead to a second one."""
        by: dict[Target, Variant] = {self.baseline: "baseline", self.candidate: "candidate"}
        return by.get(answered.by) if answered.first else None

    def snapshot(self) -> dict[str, Any]:
        """What a later process needs to go on with its course; {} where there is none."""
        return {} if self.course is None else {**self.course.snapshot(), "speakers_several": self._speakers}

    def restore(self, seconds: float, snapshot: Mapping[str, Any]) -> None:
        """Go on within a step; see `Course.restore`. That several keys have asked or may speak stays known."""
        self._speakers = snapshot.get("speakers_several") is True
        if self.course is not None:
            self.course.restore(seconds, snapshot)

    def may_speak(self, key: str) -> None:
        """An answer was given to a key that may say whether it was wrong."""
        if self._speaker is None:
            self._speaker = key
        elif key != self._speaker:
            self._speakers = True

    def reported(self, variant: Variant, *, wrong: bool, key: str = "") -> None:
        """A client has said of an answer whether it was wrong."""
        if self.course is not None and self.running:
            self.course.analysis.speakers.several = self._speakers
            self.course.analysis.reported(variant, wrong=wrong, key=key)
            self.look()

    def saw(self, size: int) -> None:
        """A client got an answer of so many bytes."""
        self._answer_bytes = max(size, (self._answer_bytes or 0) * 63 // 64)

    def held(self, size: int) -> int:
        """Bytes that a copy of a request of so many will hold: both answers too, as long as they have been of late.

        By what came before, not by its own answer: copies are chosen before that is known.
        """
        return size + 2 * (self._answer_bytes or 0)

    def wants_copy(self, size: int, key: str, *, suspected: bool = False) -> bool:
        """Whether a request of a key's that the baseline will be asked, and whose copy will hold so many bytes, is one
        to copy; what is suspected of a death is none."""
        course = self.course
        if course is None or not self.copying or random.random() >= course.copies:  # noqa: S311  no secret
            return False
        if suspected:
            self.drops(suspected=True)
            return False
        most = 1 if self._answer_bytes is None else MOST_COPIES
        # One alone may hold more, or a model with long answers would never be compared.
        full = self.copies >= most or (self.copies and self.copied_bytes + size > MOST_COPIED_BYTES)
        if full or self._patience.is_spent(key):
            self.drops()
            return False
        return True

    def drops(self, *, suspected: bool = False) -> None:
        """A copy was not made, because the candidate or the gateway had enough to do, or it may end a process."""
        self.dropped += 1
        if self.course is not None:
            self.course.analysis.dropped(self.beside.key if self.beside.now else "", suspected=suspected)


def _may_be(one: Target, other: Target) -> bool:
    """Whether two may be the same: Triton reads version 02 as 2, and chooses one where none is named."""
    if one.model != other.model:
        return False
    return one.version is None or other.version is None or int(one.version) == int(other.version)


def _answered(task: asyncio.Task[Answered[T]]) -> Answered[T] | None:
    """What has come of it; None for nothing, as yet."""
    return task.result() if task.done() and not task.cancelled() and task.exception() is None else None


async def _timed(ask: Ask[T], target: Target) -> Answered[T]:
    started = time.monotonic()
    with InLine.watched() as in_line:
        grade, answer = await ask(target)
    return Answered(answer, grade, target, time.monotonic() - started - in_line.seconds)
