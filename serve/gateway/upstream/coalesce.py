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
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

from serve.gateway.oip.contract import ITEM_BYTES
from serve.gateway.oip.protocol import BINARY_HEADER
from serve.http.client import ExchangeError, Response

__all__ = ["Coalescer", "Form", "split"]

UNDER_WAY = 2
MOST_FORMS = 256
LONGEST_HEAD = 4096
LARGEST_BYTES = 64 * 1024

Headers = Sequence[tuple[bytes, bytes]]
Exchange = Callable[[bytes, Headers, bytes, float], Awaitable[Response]]


@dataclass(frozen=True)
class Form:
    """What requests that can be joined have in common.

    Attributes:
        head: the JSON that they begin with.
        batch: items of each.
        sizes: bytes of each input, in the order in which they follow the head.
    """

    head: bytes
    batch: int
    sizes: tuple[int, ...]
    request: dict[str, Any]

    @classmethod
    def read(cls, head: bytes) -> Self | None:
        """The form of requests with this head; None where they must go alone.

        Alone go those with an id or parameters of their own, with tensors in JSON, and whose answer would hold some;
        and those whose tensors do not lie where their shapes say, to the byte: texts, whose lengths a client writes.
        """
        try:
            request = orjson.loads(head)
            if not request.keys() <= {"inputs", "outputs", "parameters", "id"} or request.get("id"):
                return None
            binary = request.get("parameters", {}) == {"binary_data_output": True}
            outputs = request.get("outputs", [])
            if not binary and (request.get("parameters") or not outputs):
                return None
            if not all(each.get("parameters", {"binary_data": binary}) == {"binary_data": True} for each in outputs):
                return None
            batches = {each["shape"][0] for each in request["inputs"]}
            sizes = []
            for each in request["inputs"]:
                if "data" in each or each["parameters"].keys() != {"binary_data_size"}:
                    return None
                size = each["parameters"]["binary_data_size"]
                if type(size) is not int or size != _bytes_of(each["datatype"], each["shape"]):
                    return None
                sizes.append(size)
            if len(batches) != 1:
                return None
            return cls(head, batches.pop(), tuple(sizes), request)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return None  # Triton says what is wrong with it

    def joined(self, count: int, tensors: Sequence[bytes]) -> tuple[bytes, int]:
        """A body for several requests, and the length of its head.

        Args:
            count: of requests.
            tensors: what followed the head of each.
        """
        inputs = [
            {
                **each,
                "shape": [count * each["shape"][0], *each["shape"][1:]],
                "parameters": {"binary_data_size": count * size},
            }
            for each, size in zip(self.request["inputs"], self.sizes, strict=True)
        ]
        head = orjson.dumps({**self.request, "inputs": inputs})
        if len(self.sizes) == 1:
            return b"".join((head, *tensors)), len(head)
        parts, at = [head], 0
        for size in self.sizes:
            parts += [each[at : at + size] for each in tensors]
            at += size
        return b"".join(parts), len(head)


@dataclass
class _Group:
    """Requests of one form to one path."""

    form: Form
    path: bytes
    most: int
    waiting: list[tuple[bytes, asyncio.Future[Response]]] = field(default_factory=list)
    under_way: int = 0
    timer: asyncio.Handle | None = None


class Coalescer:
    """Joins requests.

    Args:
        exchange: asks Triton: path, headers, body and seconds.
        on_joined: told how many requests were joined to one.
    """

    def __init__(self, exchange: Exchange, on_joined: Callable[[int], None] = lambda _: None) -> None:
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
            who: requests of another go apart.
            most: items that the model takes at once.
            wait_s: how long to gather while others are under way.

        Raises:
            ExchangeError: no whole answer came.
        """
        length = int(next(value for name, value in headers if name == BINARY_HEADER))
        group = self._group(path, who, body[:length], most) if length <= LONGEST_HEAD else None
        if group is None or len(body) - length != sum(group.form.sizes) or len(body) > LARGEST_BYTES:
            return await self._exchange(path, headers, body, timeout_s)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Response] = loop.create_future()
        group.waiting.append((body[length:], answer))
        if group.timer is None:
            if group.under_way < UNDER_WAY:  # with what else is read in this turn of the loop
                group.timer = loop.call_soon(self._send, group, headers, timeout_s)
            else:
                group.timer = loop.call_later(wait_s, self._send, group, headers, timeout_s)
        elif len(group.waiting) * group.form.batch >= group.most:
            group.timer.cancel()
            self._send(group, headers, timeout_s)
        return await answer  # in time: the exchange has the time-out of the first of them

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

    def _send(self, group: _Group, headers: Headers, timeout_s: float) -> None:
        group.timer = None
        count = max(1, group.most // group.form.batch)
        members = [each for each in group.waiting[:count] if not each[1].done()]
        group.waiting = group.waiting[count:]
        if members:
            group.under_way += 1
            task = asyncio.get_running_loop().create_task(self._sent(group, members, headers, timeout_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if group.waiting:
            group.timer = asyncio.get_running_loop().call_soon(self._send, group, headers, timeout_s)

    async def _sent(
        self, group: _Group, members: list[tuple[bytes, asyncio.Future[Response]]], headers: Headers, timeout_s: float
    ) -> None:
        try:
            answers = await self._asked(group, [tensors for tensors, _ in members], headers, timeout_s)
        except BaseException as err:
            gone = err if isinstance(err, ExchangeError) else ExchangeError("closed", repr(err))
            for _, future in members:
                if not future.done():
                    future.set_exception(gone)
            if not isinstance(err, Exception):
                raise
        else:
            for (_, future), answer in zip(members, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Response):
                    future.set_result(answer)
                else:
                    future.set_exception(answer)
        finally:
            group.under_way -= 1
            if group.waiting and group.timer is not None:
                group.timer.cancel()
                self._send(group, headers, timeout_s)

    async def _asked(
        self, group: _Group, tensors: list[bytes], headers: Headers, timeout_s: float
    ) -> Sequence[Response | BaseException]:
        form = group.form
        if len(tensors) > 1:
            self._on_joined(len(tensors))
            body, length = form.joined(len(tensors), tensors)
            kept = [(b"content-type", b"application/octet-stream"), (BINARY_HEADER, b"%d" % length)]
            answer = await self._exchange(group.path, kept, body, timeout_s)
            if answer.status == 200 and (parts := split(answer, len(tensors), form.batch)) is not None:
                return parts
        alone = [(name, value) for name, value in headers if name != b"traceparent"]
        asked = (self._exchange(group.path, alone, form.head + each, timeout_s) for each in tensors)
        return await asyncio.gather(*asked, return_exceptions=True)


def split(answer: Response, count: int, batch: int) -> list[Response] | None:
    """The answers to requests that were joined; None where the rows can't be told apart.

    Args:
        count: of requests.
        batch: items of each.
    """
    length = answer.header(BINARY_HEADER)
    if length is None:
        return None
    at = int(length)
    try:
        told = orjson.loads(answer.body[:at])
        outputs = told["outputs"]
        columns = []
        for each in outputs:
            size = each["parameters"]["binary_data_size"]
            raw = answer.body[at : at + size]
            at += size
            if each["shape"][0] != count * batch or not len(raw) == size == _bytes_of(each["datatype"], each["shape"]):
                return None
            share = size // count
            columns.append([raw[i * share : (i + 1) * share] for i in range(count)])
        if at != len(answer.body):
            return None
        head = orjson.dumps({**told, "outputs": [
            {**each, "shape": [batch, *each["shape"][1:]],
             "parameters": {**each["parameters"], "binary_data_size": len(column[0])}}
            for each, column in zip(outputs, columns, strict=True)
        ]})  # fmt: skip
        headers = [header for header in answer.headers if header[0] not in (BINARY_HEADER, b"content-length")]
        headers.append((BINARY_HEADER, b"%d" % len(head)))
        bodies = [b"".join((head, *rows)) for rows in zip(*columns, strict=True)] if columns else [head] * count
        return [Response(200, list(headers), body, len(body)) for body in bodies]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _bytes_of(datatype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor; None where its shape does not say."""
    if datatype not in ITEM_BYTES or not all(type(dim) is int and dim >= 0 for dim in shape):
        return None
    return ITEM_BYTES[datatype] * math.prod(shape)
