"""Inference over HTTP for a model under release: one of two answers, and some requests are copied and compared."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from serve.gateway.access.identity import Identity
from serve.gateway.edge.encoding import unpacked
from serve.gateway.errors import GatewayError, UpstreamDownError, UpstreamTimeoutError
from serve.gateway.oip.protocol import BINARY_HEADER, InferResponse, parse_response
from serve.gateway.release.agreement import Agreement, agreement
from serve.gateway.release.release import Answered, Grade, Release
from serve.gateway.upstream.deadline import EarlyTimeoutError
from serve.gateway.upstream.upstream import Upstream
from serve.http.body import GrowingBody
from serve.http.client import Response
from serve.rollout.plan import Target

if TYPE_CHECKING:
    from serve.gateway.access.admission import Admission
    from serve.gateway.access.gate import Gate

__all__ = ["SERVED_BY", "Released", "grade_status", "sticky_value"]

SERVED_BY = b"served-by"
LARGE_BYTES = 64 * 1024
MOST_UNPACKED = 256 * 1024 * 1024

Headers = Sequence[tuple[bytes, bytes]]
logger = logging.getLogger(__name__)


class Released:
    """Requests for models under release.

    Args:
        gate: has the places, which copies take only when they are free.
        upstream: is asked.
    """

    def __init__(self, gate: Gate, upstream: Upstream) -> None:
        self._gate = gate
        self._upstream = upstream
        self._copies: set[asyncio.Task[None]] = set()

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
    ) -> Response:
        """An answer by one of the two models under release, whose header Served-By says which; else by Triton's choice.

        Args:
            release: None where there is none.
            path: of the request where there is none, and of a body that still comes.
            came: headers of the client's request.
            headers: those that go on to Triton.
            timeout_s: for all tries together.
            sequence: what says which server has the request's sequence; None for none.

        Raises:
            GatewayError: there was no answer.
        """
        if release is None or not isinstance(body, bytes):
            return await self._upstream.infer(path, headers, body, timeout_s, who=who.id.encode(), sequence=sequence)
        deadline = time.monotonic() + timeout_s

        async def ask(target: Target) -> tuple[Grade, Response | GatewayError]:
            left = deadline - time.monotonic()
            if target.model == release.model:
                return await self._ask(target, headers, body, left, who.id.encode(), sequence)
            with suspects.beside(who.id, target.model, body) as flight:
                found = await self._ask(target, headers, body, left, who.id.encode(), sequence)
                flight.lost = isinstance(found[1], GatewayError)
            return found

        suspects = self._gate.incidents.suspects
        watched = suspects.watches(who.id, release.model) or suspects.watches(who.id, release.candidate.model)
        place = _Place(release, self._gate.places(release.candidate.model), len(body), watched=watched)
        movable = release.weight >= 1 or sequence is None
        try:
            sticky = sticky_value(release, who, came)
            answered = await release.ask(sticky, ask, movable=movable, reserve=place.take)
            if answered.paired and answered.by == release.baseline:
                self._copy(release, who.id, place, headers, body, answered, timeout_s)
        finally:
            place.leave()  # does nothing where the copy has it
        answer = answered.answer
        if isinstance(answer, UpstreamDownError):
            answer.sent = True  # by now it may have been asked of two
        if isinstance(answer, GatewayError):
            raise answer
        answer.headers.append((SERVED_BY, str(answered.by).encode()))
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
        who: bytes | None = None,
        sequence: bytes | None = None,
    ) -> tuple[Grade, Response | GatewayError]:
        try:
            name = target.path.encode()
            answer = await self._upstream.infer(name, headers, body, timeout_s, who=who, sequence=sequence)
        except EarlyTimeoutError as err:
            return Grade.CUT, err
        except UpstreamTimeoutError as err:
            return Grade.LATE, err
        except GatewayError as err:
            return Grade.FAILED, err
        return grade_status(answer.status, answer.body), answer

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
        task = asyncio.create_task(self._copied(release, who, place.passed_on(), headers, body, answered, timeout_s))
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
        """Ask the candidate, too, with the same patience, and compare."""
        try:
            headers = [header for header in headers if header[0] not in (b"accept-encoding", b"traceparent")]
            started = time.monotonic()
            with self._gate.incidents.suspects.beside(who, release.candidate.model, body) as flight:
                grade, copy = await self._ask(release.candidate, headers, body, timeout_s)
                flight.lost = isinstance(copy, GatewayError)
            seconds = time.monotonic() - started
        finally:
            place.leave()
        release.copied(Answered(copy, grade, release.candidate, seconds), answered)
        answer = answered.answer
        both_good = grade is Grade.GOOD and answered.grade is Grade.GOOD
        if both_good and isinstance(copy, Response) and isinstance(answer, Response):
            await self._compare(release, copy, answer)

    async def _compare(self, release: Release, copy: Response, answer: Response) -> None:
        def compare() -> Agreement:
            return agreement(
                _read(copy), _read(answer), batched=release.batched, tolerance=release.plan.tolerance,
                texts=release.texts,
            )  # fmt: skip

        try:
            large = len(copy.body) + len(answer.body) > LARGE_BYTES
            found = await asyncio.to_thread(compare) if large else compare()
        except (ValueError, GatewayError) as err:
            logger.error("answers of %s and %s can't be compared: %s", release.candidate, release.baseline, err)
            return
        release.compared(found)


class _Place:
    """Of a copy, among the candidate's requests: taken before the answer is known that it is compared with.

    None is taken for what may have ended a process, or while it is being found out what did.
    """

    def __init__(self, release: Release, places: Admission, size: int, *, watched: bool = False) -> None:
        self._release = release
        self._places = places
        self._size = size
        self._watched = watched
        self._taken = False

    def take(self) -> bool:
        """Decide whether the request is copied."""
        release = self._release
        if self._watched or not release.wants_copy(self._size):
            return False
        if not self._places.try_enter():
            release.dropped += 1
            return False
        release.copies += 1
        release.copied_bytes += self._size
        self._taken = True
        return True

    def passed_on(self) -> _Place:
        """The same place, for another to leave."""
        found = _Place(self._release, self._places, self._size)
        found._taken, self._taken = self._taken, False
        return found

    def leave(self) -> None:
        """Make room, once."""
        if self._taken:
            self._taken = False
            self._places.leave(None)
            self._release.copies -= 1
            self._release.copied_bytes -= self._size


def grade_status(status: int, told: bytes) -> Grade:
    """What Triton's status and words say of a model: errors below 500 are the client's, but for a model not there."""
    if status == 200:
        return Grade.GOOD
    if status in (404, 503) and b"unknown model" in told:
        return Grade.GONE
    return Grade.CLIENT if 400 <= status < 500 and status not in (404, 408, 429) else Grade.FAILED


def sticky_value(release: Release, who: Identity, came: Headers) -> bytes | None:
    """What keeps this client with the same model."""
    name = release.plan.sticky.lower()
    if not name:
        return None
    if name == "key":
        return who.id.encode()
    return next((value for header, value in came if header == name.encode()), None)


def _read(response: Response) -> InferResponse:
    body = response.body
    if encoding := response.header(b"content-encoding"):
        body = unpacked(body, encoding, MOST_UNPACKED)
    length = response.header(BINARY_HEADER)
    return parse_response(body, int(length) if length is not None else None)
