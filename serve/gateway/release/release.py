"""One model's release: which of two models answers a request, and what is learnt from the answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.release.agreement import Agreement
from serve.gateway.release.beside import Beside, Met
from serve.gateway.release.patience import Patience, ended
from serve.rollout.analysis import Outcome
from serve.rollout.course import Course, Event
from serve.rollout.plan import Plan, Target

__all__ = ["Answered", "Ask", "Grade", "Release", "models_of"]

T = TypeVar("T")
MOST_COPIES = 16
MOST_COPIED_BYTES = 64 * 1024 * 1024
logger = logging.getLogger(__name__)
Variant = Literal["candidate", "baseline"]


def _nothing(_: asyncio.Task[Any]) -> None:
    pass


class Grade(Enum):
    """What an answer says of the model that gave it."""

    GOOD = "good"
    CLIENT = "client"
    """The request can't be answered, whoever is asked."""
    FAILED = "failed"
    GONE = "gone"
    """Triton does not serve what was asked for."""
    DOWN = "down"
    """It was not asked: its process has died a moment ago, of which the requests that were with it have told."""
    LATE = "late"
    """There is no time left to ask another."""
    CUT = "cut"
    """The client's own deadline came first, or it left: that says how long it waited, and nothing else of the model."""


BLAMED = (Grade.CLIENT, Grade.FAILED, Grade.GONE, Grade.DOWN)  # the other model is asked who is to blame
AWAIT_THE_OTHER = (Grade.FAILED, Grade.GONE, Grade.DOWN)  # the other model, which is slow, may yet answer


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

    @property
    def outcome(self) -> Outcome:
        good = self.grade is Grade.GOOD and self.met is None
        return Outcome(self.grade not in (Grade.GOOD, Grade.CLIENT), self.seconds if good else None)


Ask = Callable[[Target], Awaitable[tuple[Grade, T]]]


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
        fallbacks: requests that the baseline answered after the candidate had failed.
        lost: whether the version that answers for the name was said to be served no longer.
        batched: whether the models' tensors have a batch dimension.
        texts: their outputs that are BYTES; None where that is not known.
        unjudged_count: copies that a function of the operator's gave no judgement of.
        dropped: copies that were not made, because the candidate or the gateway had enough to do.
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
        self._unjudged = ""
        self._weight = weight
        self._asker: str | None = None
        self._speaker: str | None = None
        self._speakers = False
        self._answer_bytes: int | None = None
        self._patience = Patience()
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
        """
        if stays is not None and stays != self.kept:
            return await _timed(ask, stays)
        if self.course is not None:
            self._asker = key if self._asker is None else self._asker
            self.course.joined |= key != self._asker
        weight = self.weight
        hangs = self.plan.fallback and self._patience.is_spent
        if weight and (weight >= 1 or (movable and not hangs and self.place(sticky) < weight)):
            return await self._ask_candidate(ask, key, goes_on, movable=movable)
        paired = movable and reserve is not None and reserve()
        with self._left("baseline"):
            answered = replace(await self._ask_kept(ask, self.baseline), paired=paired)
        blamed = answered.grade in BLAMED and movable and not paired and self.plan.fallback and 0 < self.weight < 1
        if not blamed:
            self._note("baseline", answered, key)
            return answered
        # As where the candidate is asked first: who could fail the one alone would hide what the other fails.
        if hangs:  # nobody could say
            self.asked["baseline", answered.grade] += 1
        else:
            self._note_first("baseline", answered, await _timed(ask, self.candidate), key)
        return answered

    async def _ask_candidate(
        self, ask: Ask[T], key: str, goes_on: Callable[[asyncio.Task[Any]], None], *, movable: bool
    ) -> Answered[T]:
        if self.weight >= 1:
            first = await self._ask_kept(ask, self.candidate)
            self._note("candidate", first, key)
            return first
        met, fallback = Met(), self.plan.fallback and movable
        asked, began = self._meeting(ask, met), time.monotonic()
        with self._left("candidate", met):
            found = await (self._patience.bear(asked) if fallback else asked)
        if isinstance(found, asyncio.Task):
            return await self._ask_instead(ask, found, goes_on, began, met, key)
        self._hear(found)
        if not (fallback and found.grade in BLAMED):
            self._note("candidate", found, key)
            return found
        # Also where the candidate blames the client: it may be the candidate that does not understand.
        second = await self._ask_kept(ask, self.baseline)
        self.fallbacks += 1
        self._note_first("candidate", found, second, key)
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
        key: str,
    ) -> Answered[T]:
        """Ask the baseline what the candidate takes long for; what that answers is evidence, when it does.

        Where the baseline fails, the candidate is waited for after all. A client that leaves has left the candidate.
        """
        goes_on(first)
        self.fallbacks += 1
        second: Answered[T] | None = None
        try:
            second = await self._ask_kept(ask, self.baseline)
            if second.grade in AWAIT_THE_OTHER:
                await asyncio.wait((first,))
        except asyncio.CancelledError:
            if not first.done():
                self._note_left("candidate", time.monotonic() - began, met)
            await ended(first)
            raise
        finally:
            first.add_done_callback(partial(self._note_later, second, key))
        if second.grade is not Grade.GOOD and (answered := _answered(first)) and answered.grade is Grade.GOOD:
            return answered
        return replace(second, first=False)

    def _note_later(self, second: Answered[T] | None, key: str, task: asyncio.Task[Answered[T]]) -> None:
        first = _answered(task)
        if first is None:
            return
        self._hear(first)
        if first.grade in BLAMED and second is None:  # its client has left before the other could say
            self.asked["candidate", first.grade] += 1
        elif first.grade in BLAMED and second is not None:
            self._note_first("candidate", first, second, key)
        else:
            self._note("candidate", first, key)

    def _hear(self, first: Answered[T]) -> None:
        """The candidate has answered."""
        if first.grade not in (Grade.CUT, Grade.DOWN):
            self._patience.hears(in_vain=first.grade is Grade.LATE)
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

    def _note_first(self, variant: Variant, first: Answered[T], second: Answered[T], key: str) -> None:
        """Take the first of two answers as evidence."""
        if Grade.DOWN in (first.grade, second.grade):  # there are not two
            self.asked[variant, first.grade] += 1
        elif first.grade is second.grade and first.grade is not Grade.CLIENT:
            # The two are alike in this: it is the request, or what both stand on, and no evidence against the one.
            self.asked[variant, first.grade] += 1
        else:
            judged = _judged(first.grade, second.grade)
            self._note(variant, first, key, judged, told=second.grade is Grade.FAILED)

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
        self, variant: Variant, answered: Answered[T], key: str, grade: Grade | None = None, *, told: bool = False
    ) -> None:
        """Take an answer as evidence, with another grade than its own if need be.

        Blame of the client says nothing, but where it is `told` that the other model fails at the same request.
        """
        if grade is not None:
            answered = replace(answered, grade=grade)
        if answered.grade is Grade.CUT:
            self._note_left(variant, answered.seconds, answered.met)
            return
        self.asked[variant, answered.grade] += 1
        course = self.course
        says_nothing = answered.grade is Grade.DOWN or (answered.grade is Grade.CLIENT and not told)
        if course is None or course.state != "running" or says_nothing or not course.weight:
            return
        if variant == "baseline":
            course.analysis.baseline(answered.outcome, paired=answered.paired, key=key)
        else:
            course.analysis.candidate(answered.outcome, key=key)
            if answered.met is not None:
                course.analysis.met(answered.met.key)
        self.look()

    def look(self) -> None:
        """Act on the evidence."""
        if self.course is not None and (event := self.course.look(time.monotonic())) is not None:
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

    def copied(self, candidate: Answered[T], baseline: Answered[T], *, key: str = "") -> None:
        """A copied request of a key's was answered by both, well or not.

        Where both blame the client, it was the client; where it gave up before either answered, or one was not asked
        since it is down, there is no pair.
        """
        grades = candidate.grade, baseline.grade
        if {Grade.CUT, Grade.DOWN} & {*grades} or grades == (Grade.CLIENT, Grade.CLIENT):
            return
        if self.course is not None and self.running:
            first, second = (
                replace(each, grade=_judged(each.grade, other)).outcome
                for each, other in ((candidate, baseline.grade), (baseline, candidate.grade))
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

    def wants_copy(self, size: int) -> bool:
        """Whether a request that the baseline will be asked, and whose copy will hold so many bytes, is one to copy."""
        course = self.course
        if course is None or not self.copying or random.random() >= course.copies:  # noqa: S311  no secret
            return False
        most = 1 if self._answer_bytes is None else MOST_COPIES
        # One alone may hold more, or a model with long answers would never be compared.
        if self.copies >= most or (self.copies and self.copied_bytes + size > MOST_COPIED_BYTES):
            self.drops()
            return False
        return True

    def drops(self) -> None:
        """A copy was not made, because the candidate or the gateway had enough to do."""
        self.dropped += 1
        if self.course is not None:
            self.course.analysis.dropped(self.beside.key if self.beside.now else "")


def models_of(model: str, release: Release | None) -> set[str]:
    """Names of the models that a request for one may be with, by its release."""
    return {model} if release is None else {target.model for target in release.may_ask}


def _may_be(one: Target, other: Target) -> bool:
    """Whether two may be the same: Triton reads version 02 as 2, and chooses one where none is named."""
    if one.model != other.model:
        return False
    return one.version is None or other.version is None or int(one.version) == int(other.version)


def _judged(grade: Grade, other: Grade) -> Grade:
    """What an answer is worth beside the other model's to the same request.

    Blame of the client is a failure where the other answered well. Where the other failed, it was right: to say 400 of
    bad input is better than to say 500.
    """
    return Grade.FAILED if grade is Grade.CLIENT and other is Grade.GOOD else grade


def _answered(task: asyncio.Task[Answered[T]]) -> Answered[T] | None:
    """What has come of it; None for nothing, as yet."""
    return task.result() if task.done() and not task.cancelled() and task.exception() is None else None


async def _timed(ask: Ask[T], target: Target) -> Answered[T]:
    started = time.monotonic()
    grade, answer = await ask(target)
    return Answered(answer, grade, target, time.monotonic() - started)
