"""Inference over HTTP for a model under release: one of two answers, and some requests are copied and compared."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from serve.gateway.access.admission import Admission
from serve.gateway.access.asides import JUDGED
from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.access.memory import Memory, MemoryFullError, Share
from serve.gateway.access.uncounted import goes_on, uncounted
from serve.gateway.errors import (
    AnswerTooLargeError,
    GatewayError,
    HasItsConnectionsError,
    OverloadedError,
    UpstreamTimeoutError,
)
from serve.gateway.health.flights import ABOARD, Came, Flight
from serve.gateway.health.outages import ModelDownError, Outages
from serve.gateway.health.suspects import PoisonError, Suspects
from serve.gateway.oip.encoding import unpacked
from serve.gateway.oip.protocol import BINARY_HEADER, InferResponse, parse_response
from serve.gateway.oip.tensors import ProtocolError
from serve.gateway.release.agreement import Agreement, FunctionError, Functions, agreement
from serve.gateway.release.answers import ANSWER_ID, Answers, given
from serve.gateway.release.grades import Grade
from serve.gateway.release.patience import InLine
from serve.gateway.release.release import Answered, Release
from serve.gateway.release.users_rules import UsersRules
from serve.gateway.upstream.aside import exchange
from serve.gateway.upstream.deadline import EarlyTimeoutError
from serve.gateway.upstream.upstream import Upstream
from serve.gateway.upstream.verdicts import HURRY, was_hurried
from serve.http.body import GrowingBody
from serve.http.client import Response
from serve.rollout.agree import Agree
from serve.rollout.plan import Target

__all__ = [
    "SERVED_BY",
    "Released",
    "at_home",
    "came_of",
    "grade_status",
    "graded_down",
    "instead",
    "is_gone",
    "keep_on",
    "sticky_value",
]

SERVED_BY = b"served-by"
LARGE_BYTES = 64 * 1024
MOST_UNPACKED = 256 * 1024 * 1024  # and less where little memory is given
MOST_COMPARED = 64 * 1024 * 1024  # of two answers that are read in another process: to hand over more takes long
ELEMENT_BYTES = 64  # of a number of an answer's JSON, while it is compared
OTHERS = Agreement(items=1, disagreed=1, difference=0.0, largest=0.0)

A = TypeVar("A")
Headers = Sequence[tuple[bytes, bytes]]
logger = logging.getLogger(__name__)

# A body, its encoding, and the length of its JSON in the binary form.
Told = tuple[bytes, bytes | None, bytes | None]


# Calls a function of a module somewhere else.
Apart = Callable[[Callable[[], Agreement | None]], Awaitable[Agreement | None]]


class Released:
    """Requests for models under release.

    Args:
        gate: has the places, which copies take only when they are free.
        upstream: is asked.
        apart: calls a function of a module in another process, where long JSON is compared; by default in a thread.
        most_bytes: that two answers may become where they are compared.
        answers: keeps those that clients may speak of; None keeps none.
        rules: functions of the operator's; None for none.
        timeout_s: that a candidate is waited for, where its clients have the baseline's answers.
    """

    def __init__(
        self,
        gate: Gate,
        upstream: Upstream,
        apart: Apart | None = None,
        most_bytes: int = MOST_UNPACKED,
        answers: Answers | None = None,
        rules: UsersRules | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._rules = rules
        self._answers = answers
        self._gate = gate
        self._upstream = upstream
        self._apart = apart or asyncio.to_thread
        self._most_bytes = min(most_bytes, MOST_UNPACKED)
        self._comparing = asyncio.Lock()
        self._told: int | None = None
        self._copies: set[asyncio.Task[Any]] = set()

    async def infer(
        self,
        release: Release | None,
        path: bytes,
        who: Identity,
        came: Headers,
        headers: Headers,
        body: bytes | GrowingBody,
        timeout_s: float,
        sequence: bytes | None = None,
        stays: Target | None = None,
        draw: bytes | None = None,
        *,
        waits: bool = False,
        speaks: bool = True,
    ) -> Response:
        """An answer by one of the two models under release, whose header Served-By says which, and Answer-Id how to
        speak of it, where the key may; else by Triton's choice.

        Args:
            release: None where there is none.
            path: of the request where there is none, and of a body that still comes.
            came: headers of the client's request.
            headers: those that go on to Triton.
            timeout_s: for all tries together.
            sequence: what says which server has the request's sequence; None for none.
            stays: who has it, where that is nobody who answers for the name now.
            draw: what keeps the parts of one request together, where nothing keeps its client with the same model.
            waits: whether its sequence has no slot yet.
            speaks: whether its client gets the answer's id, and may speak of it.

        Raises:
            GatewayError: there was no answer.
        """
        if release is None or not isinstance(body, bytes):
            ask_it = partial(self._upstream.infer, path, headers, body, timeout_s, who=who.id.encode())
            if sequence is None:
                return await ask_it()
            asked = path.decode()
            self._gate.asides.check(self._gate.places(asked.split("/")[3]), asked, who.id, waits=waits)
            with exchange(self._gate.asides, asked, who.id, len(body), waits=waits, lingers=True):
                return await ask_it(sequence=sequence)
        begun = time.monotonic()
        suspects = self._gate.incidents.suspects
        whole = ABOARD.get() or Flight(who.id, release.model, body)

        async def ask(target: Target) -> tuple[Grade, Response | GatewayError]:
            until = begun + times[target == release.candidate]

            async def asked() -> tuple[Grade, Response | GatewayError]:
                return await self._ask(
                    target, headers, body, until - time.monotonic(), who.id,
                    least=JUDGED if target == release.candidate else 1, sequence=sequence, waits=waits,
                )  # fmt: skip

            if (
                down := graded_down(self._gate.incidents.outages, target)
            ) is not None:  # not asked, and so suspected of nothing
                return down
            if target.model == whole.model:
                return await at_home(suspects, whole, asked(), came_of)
            left_s = until - time.monotonic()
            return await instead(
                suspects, who.id, target, body, left_s, asked, came_of, candidate=target == release.candidate
            )

        def on_slow(task: asyncio.Task[Any]) -> None:
            keep_on(self._gate, release, who.id, body, task, came_of)
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)

        watched = release.copying and (
            await suspects.suspected(who.id, release.model, body)
            or await suspects.suspected(who.id, release.candidate.model, body)
        )
        places = self._gate.places(release.candidate.model)
        place = _Place(release, places, self._gate.memory, len(body), who.id, watched=watched)
        movable = release.weight >= 1 or sequence is None
        # What a candidate has goes on when the client's own time is over: that says nothing of it.
        goes = movable and release.weight < 1 and release.plan.fallback
        times = timeout_s, max(timeout_s, self._timeout_s) if goes else timeout_s
        copied = False
        try:
            sticky = sticky_value(release, who, came) or draw
            answered = await release.ask(
                sticky, ask, movable=movable, reserve=place.take, stays=stays, key=who.id,
                goes_on=on_slow, left_s=timeout_s,
            )  # fmt: skip
            if isinstance(answered.answer, Response):
                release.saw(len(answered.answer.body))
            if answered.paired and answered.by == release.baseline:
                self._copy(release, who.id, place, headers, body, answered, timeout_s)
                copied = True
        finally:
            if not copied:  # else the copy has it
                place.leave()
        answer = answered.answer
        if isinstance(answer, GatewayError):
            answer.sent = whole.reached  # by now it may have been asked of two
            raise answer
        answer.headers.append((SERVED_BY, str(answered.by).encode()))
        may_speak = speaks and (self._gate.keys.open or who.feedback)
        if answer.status == 200 and self._answers is not None and may_speak:
            id_ = self._answers.add(given(release, who, answered, answer, movable=movable))
            if id_ is not None:
                release.may_speak(who.id)
                answer.headers.append((ANSWER_ID, id_.encode()))
        return answer

    async def close(self) -> None:
        """Give up copies that are under way."""
        for task in self._copies:
            task.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)

    async def _ask(
        self,
        target: Target,
        headers: Headers,
        body: bytes,
        timeout_s: float,
        who: str,
        *,
        least: int = 1,
        counts: bool = True,
        sequence: bytes | None = None,
        waits: bool = False,
    ) -> tuple[Grade, Response | GatewayError]:
        asides, asked = self._gate.asides, target.path
        nothing = Grade.no_room(candidate=least == JUDGED or not counts)
        try:
            asides.check(self._gate.places(target.model), asked, who, least=least, waits=waits)
        except OverloadedError as err:  # which says nothing of the model
            return nothing, err
        try:
            owner = who.encode() if counts else None
            with exchange(asides, asked, who, len(body), waits=waits):
                answer = await self._upstream.infer(
                    asked.encode(), headers, body, timeout_s, who=owner, sequence=sequence
                )
        except EarlyTimeoutError as err:  # which says nothing of it, either
            return Grade.CUT, err
        except (HasItsConnectionsError, MemoryFullError) as err:  # there was no room for it, or its answer
            return nothing, err
        except UpstreamTimeoutError as err:
            return Grade.LATE, err
        except GatewayError as err:
            return Grade.FAILED, err
        return grade_status(answer.status, answer.body, lambda: HURRY in body), answer

    def _copy(
        self,
        release: Release,
        who: str,
        place: _Place,
        headers: Headers,
        body: bytes,
        answered: Answered[Response | GatewayError],
        timeout_s: float,
    ) -> None:
        answer = answered.answer
        if isinstance(answer, Response):  # its headers are the client's from here on
            answered = replace(answered, answer=replace(answer, headers=list(answer.headers)))
        task = asyncio.create_task(self._copied(release, who, place, headers, body, answered, timeout_s))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)

    async def _copied(
        self,
        release: Release,
        who: str,
        place: _Place,
        headers: Headers,
        body: bytes,
        answered: Answered[Response | GatewayError],
        timeout_s: float,
    ) -> None:
        """Ask the candidate, too, for the gateway's own time, and compare."""
        timeout_s = max(timeout_s, self._timeout_s)
        try:
            headers = [header for header in headers if header[0] not in (b"accept-encoding", b"traceparent")]
            started = time.monotonic()
            try:
                if (down := graded_down(self._gate.incidents.outages, release.candidate)) is not None:
                    if down[0] is Grade.DOWN:
                        release.withholds(answered)
                    else:  # for so long that it fails what it is not asked: a step of copies alone would wait for ever
                        failed = Answered[Response | GatewayError](down[1], down[0], release.candidate, 0.0)
                        release.copied(failed, answered, key=who)
                    return
                places = self._gate.places(release.candidate.model)
                with (
                    self._gate.incidents.suspects.beside(who, release.candidate.model, body) as flight,
                    uncounted(places, flight),
                ):
                    asked = self._ask(release.candidate, headers, body, timeout_s, who, counts=False)
                    found = await release.bear(asked, timeout_s, who)
                    if isinstance(found, asyncio.Task):
                        place.answered()  # others need it while this one goes on
                        found = await found
                    grade, copy = found
                    told(flight, came_of(copy))
                seconds = time.monotonic() - started
            finally:
                place.answered()
            if release.course is not None:
                release.course.shared = len(self._gate.keys) > 1
            release.copied(Answered(copy, grade, release.candidate, seconds), answered, key=who)
            answer = answered.answer
            both_good = grade is Grade.GOOD and answered.grade is Grade.GOOD
            if both_good and isinstance(copy, Response) and isinstance(answer, Response):
                await self._compare(release, who, copy, answer)
        finally:  # not before: what waits to be compared is held all the same
            place.leave()

    async def _compare(self, release: Release, who: str, copy: Response, answer: Response) -> None:
        if release.texts is None:  # nor is it known what of an answer is the batch: it would be taken apart wrongly
            return
        both = mine, theirs = _told(copy), _told(answer)
        plan = release.plan
        compare = partial(
            compared, mine, theirs, self._most_bytes, release.batched, plan.tolerance, release.texts, plan.agree
        )
        long = [len(body) if length is None or packed else int(length) for body, packed, length in both]
        total = len(copy.body) + len(answer.body)
        try:
            if self._rules is not None and any(agree.kind == "function" for agree in plan.agree):
                if total > MOST_COMPARED:
                    raise FunctionError(f"they are {total} bytes, and at most {MOST_COMPARED} are given to a function")
                async with self._comparing:  # it is one process
                    found = await asyncio.to_thread(self._rules.compare, *compare.args)
                if found is not None:
                    release.compared(found, key=who)
                return
            slow = total > LARGE_BYTES and any(agree.kind == "overlap" for agree in plan.agree)  # sets are Python's
            if slow or any(packed for _, packed, _ in both) or sum(long) > LARGE_BYTES:
                if total > MOST_COMPARED and _others_by_length(
                    plan.agree, [len(body) for body, packed, _ in both if not packed]
                ):
                    release.compared(OTHERS, key=who)
                    return
                if total > MOST_COMPARED:
                    what = "to be compared as sets" if slow else "of JSON, or packed"
                    raise ValueError(f"they are {total} bytes {what}, and at most {MOST_COMPARED} are read")
                async with self._comparing:  # one at a time: clients' own long JSON is read there, too
                    found = await self._apart(compare)
            elif total > LARGE_BYTES:  # raw: numpy leaves Python's lock to others
                async with self._comparing:  # one at a time, for what it takes besides the answers
                    found = await asyncio.to_thread(compare)
            else:
                found = compare()
        except FunctionError as err:  # nobody knows: what is not said to be the same is another
            release.unjudged(str(err))
            release.compared(OTHERS, key=who)
            return
        except (ValueError, GatewayError) as err:
            if release.id != self._told:  # once: a client may choose such answers
                logger.error("answers of %s and %s can't be compared: %s", release.candidate, release.baseline, err)
            self._told = release.id
            return
        if found is not None:
            release.compared(found, key=who)


class _Place:
    """Of a copy, among the candidate's requests: taken before the answer is known that it is compared with.

    None is taken for what may have ended a process, or while it is being found out what did.
    """

    def __init__(
        self, release: Release, places: Admission, memory: Memory, size: int, key: str, *, watched: bool = False
    ) -> None:
        self._key = key
        self._release = release
        self._places = places
        self._memory = memory
        self._share = Share(memory)
        self._size = self._held = size
        self._watched = watched
        self._taken = self._asking = False

    def take(self) -> bool:
        """Decide whether the request is copied."""
        release = self._release
        self._held = release.held(self._size)
        if not release.wants_copy(self._held, self._key, suspected=self._watched):
            return False
        try:
            if self._memory.used + self._held > self._memory.bound // 2:  # the rest is for clients
                raise MemoryFullError(self._memory.bound // 2)
            self._share.take(self._size)
        except MemoryFullError:
            release.drops()
            return False
        if not self._places.try_enter():
            self._share.close()
            release.drops()
            return False
        release.copies += 1
        release.copied_bytes += self._held
        self._taken = self._asking = True
        return True

    def answered(self) -> None:
        """Make room among the candidate's requests, once; the copy goes on to be held."""
        if self._asking:
            self._asking = False
            self._places.leave(None)

    def leave(self) -> None:
        """Make room, once."""
        self.answered()
        if self._taken:
            self._taken = False
            self._share.close()
            self._release.copies -= 1
            self._release.copied_bytes -= self._held


def grade_status(status: int, told: bytes, chosen: Callable[[], bool]) -> Grade:
    """What Triton's status and words say of a model: errors below 500 are the client's, but for a model not there.

    Args:
        chosen: tells whether the request says itself how long it may wait in the model's queue.
    """
    if status == 200:
        return Grade.GOOD
    if is_gone(status, told):
        return Grade.GONE
    if status == 503 and was_hurried(told, chosen):
        return Grade.CUT
    return Grade.CLIENT if 400 <= status < 500 and status not in (404, 408, 429) else Grade.FAILED


def told(flight: Flight, came: Came) -> None:
    """What has come of a request that another model was asked for."""
    flight.lost, flight.left, flight.unsent = not came.answered, came.left, not came.sent


async def at_home(
    suspects: Suspects,
    whole: Flight,
    asked: Awaitable[tuple[Grade, A]],
    came_of: Callable[[A], Came],
) -> tuple[Grade, A]:
    """What comes of a request that the model is asked that it is known by."""
    suspects.at_home(whole)
    try:
        found = await asked
    except BaseException:
        whole.reached = whole.unanswered = whole.left = True
        raise
    came = came_of(found[1])
    whole.reached |= came.sent
    whole.unanswered = came.sent and not came.answered
    whole.left |= came.left
    return found


async def instead(
    suspects: Suspects,
    key: str,
    target: Target,
    body: bytes,
    left_s: float,
    ask: Callable[[], Awaitable[tuple[Grade, A]]],
    came_of: Callable[[A], Came],
    *,
    candidate: bool,
) -> tuple[Grade, A | GatewayError]:
    """What comes of a request that another model is asked than it is known by.

    One that is known to end that model, or whose turn does not come, is not asked: that says nothing of the model.

    Args:
        left_s: seconds for which it may wait for its turn.
        candidate: whether that is the candidate.
    """
    try:
        with InLine.watched() as in_line:
            in_line.enter()
            try:
                async with suspects.instead(key, target.model, body, left_s) as flight:
                    in_line.leave()
                    found = await ask()
                    told(flight, came_of(found[1]))
            finally:
                in_line.leave()
    except (PoisonError, OverloadedError) as err:
        return Grade.no_room(candidate=candidate), err
    return found


def keep_on(
    gate: Gate,
    release: Release,
    key: str,
    body: bytes,
    task: asyncio.Task[Answered[Any]],
    ended: Callable[[Any], Came],
) -> None:
    """The request at hand is answered by the baseline, and goes on with the candidate until that task is done.

    Args:
        ended: what comes of it.
    """
    candidate, held = release.candidate, Share(gate.memory, key)
    goes_on(gate.places(candidate.model), candidate.within_models, task, held, len(body))
    whole = ABOARD.get()
    if candidate.model == (release.model if whole is None else whole.model):  # another has a flight of its own
        gate.incidents.suspects.goes_on(key, candidate.model, body, task, lambda done: ended(done.answer))


def came_of(answer: Response | GatewayError) -> Came:
    """What has come of a request, by its answer."""
    if not isinstance(answer, GatewayError):
        return Came(answered=True)
    no_room = isinstance(answer, MemoryFullError | AnswerTooLargeError)  # for what it said
    return Came(no_room and answer.sent, isinstance(answer, UpstreamTimeoutError), answer.sent)


def graded_down(outages: Outages, target: Target) -> tuple[Grade, ModelDownError] | None:
    """What a model that is known to be down, and so is not asked, is to be held for; None where it is not.

    For a short time that says nothing of it: the requests that were with it have told.
    """
    try:
        outages.check(target.model)
    except ModelDownError as err:
        return Grade.DOWN if outages.fresh(target.model) else Grade.FAILED, err
    return None


def is_gone(status: int, told: bytes) -> bool:
    """Whether Triton says that it does not serve what was asked for."""
    return status in (404, 503) and b"unknown model" in told


def sticky_value(release: Release, who: Identity, came: Headers) -> bytes | None:
    """What keeps this client with the same model."""
    name = release.plan.sticky.lower()
    if not name:
        return None
    if name == "key":
        return who.id.encode()
    return next((value for header, value in came if header == name.encode()), None)


def compared(
    copy: Told,
    answer: Told,
    most_bytes: int,
    batched: bool,
    tolerance: float | None,
    texts: Collection[str] | None,
    agrees: Sequence[Agree] = (),
    functions: Functions | None = None,
) -> Agreement | None:
    """Compare two answers; what they are, as `agreement` takes it.

    Two of which one can't be read, or is too long and more than twice the other, are others: were they left out, a
    model that now and then says what nobody can read would be judged by the rest.

    Args:
        copy, answer: the candidate's and the baseline's.
        most_bytes: that either may become.

    Raises:
        ValueError: neither can be read, or they are too long.
        GatewayError: one can't be unpacked, or would become more.
    """
    bodies = [unpacked(body, packed, most_bytes) if packed else body for body, packed, _ in (copy, answer)]
    lengths = [None if length is None else int(length) for _, _, length in (copy, answer)]
    become = [ELEMENT_BYTES * body.count(b",", 0, length) for body, length in zip(bodies, lengths, strict=True)]
    if max(become) > most_bytes:
        if _others_by_length(agrees, become):
            return OTHERS
        raise ValueError(f"{max(map(len, bodies))} bytes would take {max(become)} to read")
    candidate, baseline = (_read(body, length) for body, length in zip(bodies, lengths, strict=True))
    if isinstance(candidate, ProtocolError) and isinstance(baseline, ProtocolError):
        raise candidate
    if isinstance(candidate, ProtocolError) or isinstance(baseline, ProtocolError):
        return OTHERS
    return agreement(
        candidate, baseline, batched=batched, tolerance=tolerance, texts=texts, agrees=agrees, functions=functions
    )


def _told(answer: Response) -> Told:
    return answer.body, answer.header(b"content-encoding"), answer.header(BINARY_HEADER)


def _read(body: bytes, length: int | None) -> InferResponse | ProtocolError:
    try:
        return parse_response(body, length)
    except ProtocolError as err:
        return err


def _others_by_length(agrees: Sequence[Agree], sizes: Sequence[int]) -> bool:
    """Whether two answers are others by their length: more than twice the other's; rules for a part leave it open."""
    whole = all(agree.kind in ("equal", "argmax", "close") for agree in agrees)
    return whole and len(sizes) == 2 and max(sizes) > 2 * min(sizes)
