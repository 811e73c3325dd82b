"""Requests that come together go to Triton as one.

Each HTTP request costs Triton as much as many items of a small network do. Binary requests of one model with the very
same head (names, types, shapes, parameters) differ in their tensors' bytes only: those of one key are put behind one
another, a batch as large as the model takes, and the answer's rows are given back to whoever asked for them. A request
is sent at once while few are under way; the others gather until one of those is answered, or for the time that is set
(the idea of Nagle's algorithm, RFC 896). Texts go alone: where one ends is what a client wrote. A batch that Triton
refuses is asked one by one: no request suffers for another's sake.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serve.gateway.access.memory import MemoryFullError
from serve.gateway.oip.protocol import BINARY_HEADER
from serve.gateway.upstream.joined import Form, split
from serve.http.client import ExchangeError, Response
from serve.http.connection import LEFT, Leaving

__all__ = ["Coalescer"]

UNDER_WAY = 2
MOST_FORMS = 256
LONGEST_HEAD = 4096
LARGEST_BYTES = 64 * 1024

Headers = Sequence[tuple[bytes, bytes]]


class Exchange(Protocol):
    """Asks Triton: path, headers, body and seconds; `who` is the id of the key that the answer counts for."""

    async def __call__(
        self, path: bytes, headers: Headers, body: bytes, timeout_s: float, /, *, who: bytes | None
    ) -> Response:
        """Raises ExchangeError where no whole answer came, MemoryFullError where there is no room for it."""


class _Sent:
    """What was sent for some requests: a member that leaves keeps its place until Triton is through with all of it."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[bool] | None = asyncio.get_running_loop().create_future()
        self.leaving = Leaving()

    def close(self) -> None:
        for connection in self.leaving.connections:
            connection.close()

    def over(self) -> None:
        """It was answered, or given up: then it is over with what was left."""
        self.leaving.over = True
        left = [one.ended for one in self.leaving.connections if one.ended is not None]
        under_way = len(left)

        def done(_: object = None) -> None:
            nonlocal under_way
            under_way -= 1
            if under_way <= 0 and self.ended is not None and not self.ended.done():
                self.ended.set_result(all(not one.cancelled() and one.result() for one in left))

        for one in left:
            one.add_done_callback(done)
        if not left:
            done()


@dataclass(slots=True)
class _Member:
    """A request that waits: what followed its head, whose it is, until when, its answer, and how it was sent."""

    tensors: bytes
    who: bytes
    deadline: float
    answer: asyncio.Future[Response]
    sent: _Sent | None = None


@dataclass
class _Group:
    """Requests of one form to one path.

    Attributes:
        most: items that the model takes at once.
        together: requests at most whose answer was not found to be too long.
    """

    form: Form
    path: bytes
    most: int
    together: int = sys.maxsize
    waiting: list[_Member] = field(default_factory=list)
    under_way: int = 0
    timer: asyncio.Handle | None = None


class Coalescer:
    """Joins requests.

    Args:
        exchange: asks Triton.
        on_joined: told how many requests were joined to one.
        across_keys: whether requests of several keys are joined.
    """

    def __init__(
        self, exchange: Exchange, on_joined: Callable[[int], None] = lambda _: None, *, across_keys: bool = False
    ) -> None:
        self._across_keys = across_keys
        self._exchange = exchange
        self._on_joined = on_joined
        self._groups: dict[tuple[bytes, bytes, bytes], _Group | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def takes(self, headers: Headers) -> bool:
        """Whether a request with these headers is one to join: binary, and to be answered as it is."""
        return (
            len(headers) <= 3
            and any(name == BINARY_HEADER for name, _ in headers)
            and all(name != b"accept-encoding" or value in (b"", b"identity") for name, value in headers)
        )

    async def infer(
        self, path: bytes, headers: Headers, body: bytes, timeout_s: float, *, most: int, wait_s: float, who: bytes
    ) -> Response:
        """Ask Triton, with others or alone.

        Args:
            who: the id of the key that asks, for which its answer counts.
            most: items that the model takes at once.
            wait_s: how long to gather while others are under way.

        Raises:
            ExchangeError: no whole answer came.
            MemoryFullError: there is no room for the answer.
        """
        length = int(next(value for name, value in headers if name == BINARY_HEADER))
        group = (
            self._group(path, b"" if self._across_keys else who, body[:length], most)
            if length <= LONGEST_HEAD
            else None
        )
        if group is None or len(body) - length != sum(group.form.sizes) or len(body) > LARGEST_BYTES:
            return await self._exchange(path, headers, body, timeout_s, who=who)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Response] = loop.create_future()
        member = _Member(body[length:], who, time.monotonic() + timeout_s, answer)
        group.waiting.append(member)
        if group.timer is None:
            if group.under_way < UNDER_WAY:  # with what else is read in this turn of the loop
                group.timer = loop.call_soon(self._send, group, headers)
            else:
                group.timer = loop.call_later(wait_s, self._send, group, headers)
        elif len(group.waiting) * group.form.batch >= group.most:
            group.timer.cancel()
            self._send(group, headers)
        leaving = LEFT.get()
        late = loop.call_later(timeout_s, _late, answer)  # the exchange has the time of the one that has most
        try:
            return await answer
        except (asyncio.CancelledError, ExchangeError):
            if leaving is not None and member.sent is not None and not leaving.over:
                leaving.connections.append(member.sent)
            raise
        finally:
            late.cancel()

    async def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _group(self, path: bytes, who: bytes, head: bytes, most: int) -> _Group | None:
        key = path, who, head
        try:
            found = self._groups[key]
        except KeyError:
            if len(self._groups) >= MOST_FORMS:
                self._groups = {key: each for key, each in self._groups.items() if each and each.waiting}
            form = Form.read(head)
            found = _Group(form, path, most) if form is not None and 0 < 2 * form.batch <= most else None
            self._groups[key] = found
        if found is not None:
            found.most = most
        return found

    def _send(self, group: _Group, headers: Headers) -> None:
        group.timer = None
        count = max(1, min(group.most // group.form.batch, group.together))
        members = [each for each in group.waiting[:count] if not each.answer.done()]
        group.waiting = group.waiting[count:]
        if members:
            group.under_way += 1
            sent = _Sent()
            for each in members:
                each.sent = sent
            task = asyncio.get_running_loop().create_task(self._sent(group, members, headers, sent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if group.waiting:
            group.timer = asyncio.get_running_loop().call_soon(self._send, group, headers)

    async def _sent(self, group: _Group, members: list[_Member], headers: Headers, sent: _Sent) -> None:
        LEFT.set(sent.leaving)  # in this task: not of whoever happened to send it
        try:
            answers = await self._asked(group, members, headers)
        except BaseException as err:
            gone = err if isinstance(err, Exception) else ExchangeError("closed", "the gateway is about to stop")
            for member in members:
                if not member.answer.done():
                    member.answer.set_exception(gone)
            if not isinstance(err, Exception):
                raise
        else:
            for member, answer in zip(members, answers, strict=True):
                if member.answer.done():
                    continue
                if isinstance(answer, Response):
                    member.answer.set_result(answer)
                else:
                    member.answer.set_exception(answer)
        finally:
            sent.over()
            group.under_way -= 1
            if group.waiting and group.timer is not None:
                group.timer.cancel()
                self._send(group, headers)

    async def _asked(
        self, group: _Group, members: list[_Member], headers: Headers
    ) -> Sequence[Response | BaseException]:
        if len(members) > 1:
            latest = max(each.deadline for each in members)
            parts = await self._together(group, members, latest - time.monotonic())
            if parts is not None:
                return parts
        alone = [(name, value) for name, value in headers if name != b"traceparent"]
        now = time.monotonic()
        asked = (
            self._exchange(group.path, alone, group.form.head + each.tensors, each.deadline - now, who=each.who)
            for each in members
        )
        return await asyncio.gather(*asked, return_exceptions=True)

    async def _together(self, group: _Group, members: list[_Member], timeout_s: float) -> list[Response] | None:
        """The answers to requests asked as one; None where they have to be asked one by one."""
        self._on_joined(len(members))
        body, length = group.form.joined(len(members), [each.tensors for each in members])
        kept = [(b"content-type", b"application/octet-stream"), (BINARY_HEADER, b"%d" % length)]
        owners = {each.who for each in members}
        who = owners.pop() if len(owners) == 1 else None  # of several nobody's: each part is held against its own
        try:
            answer = await self._exchange(group.path, kept, body, timeout_s, who=who)
        except MemoryFullError:
            return None
        except ExchangeError as err:
            if err.kind != "too_large":
                raise
            group.together = max(1, len(members) // 2)
            return None
        return split(answer, len(members), group.form.batch) if answer.status == 200 else None


def _late(answer: asyncio.Future[Response]) -> None:
    if not answer.done():
        answer.set_exception(ExchangeError("timeout", "no whole response in time"))
