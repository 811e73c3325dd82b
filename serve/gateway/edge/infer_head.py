"""The heads of infer requests and of their answers: which headers are read, go on, or come back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from serve.config.names import MODEL_NAME, VERSION
from serve.gateway.access.identity import KEY_HEADERS
from serve.gateway.errors import BadRequestError
from serve.gateway.oip.protocol import BINARY_HEADER
from serve.gateway.release.answers import ANSWER_ID
from serve.gateway.release.released import SERVED_BY
from serve.gateway.upstream.deadline import TIMEOUT_HEADER
from serve.http.message import header_line

__all__ = ["JSON", "MOST_DIGITS", "PATH", "RETURNED", "SAFE", "answer_lines", "returned_lines", "split_headers"]

PATH = re.compile(rf"/v2/models/({MODEL_NAME})(?:/versions/({VERSION}))?/infer".encode())
RETURNED = frozenset((b"content-type", b"content-encoding", BINARY_HEADER, SERVED_BY, ANSWER_ID))
SAFE = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
JSON = (b"content-type", b"application/json")
MOST_DIGITS = 20
# Not what a client calls its body: Triton 24.10 reads one that is called a form (as curl -d calls any) as a form, too,
# on its stack, and dies of 4 MB. What is binary is told by the length of the JSON, whatever it is called.
_FORWARDED = frozenset((b"accept-encoding", b"traceparent", b"tracestate", BINARY_HEADER))
_READ = frozenset((b"content-length", b"content-encoding", TIMEOUT_HEADER, BINARY_HEADER, *KEY_HEADERS))
# Bytes of names and values that go on: Triton closes the connection on a head of over 8 KiB, as if it had failed.
MOST_FORWARDED = 2048
_SAFE_LINES = b"".join(header_line(*header) for header in SAFE)

Header = tuple[bytes, bytes]


def split_headers(headers: list[Header]) -> tuple[list[Header], dict[bytes, bytes]]:
    """The headers that go on to Triton, and those that are read here.

    What would make the former too long is left out: nothing that goes on has to be there for a right answer, but the
    length of the JSON, which is short.

    Raises:
        BadRequestError: one of the latter comes twice with different values.
    """
    forwarded: list[Header] = []
    read: dict[bytes, bytes] = {}
    room = MOST_FORWARDED
    for header in headers:
        name, value = header
        if name in _READ:
            if name == BINARY_HEADER and name not in read and len(value) < MOST_DIGITS:
                forwarded.append(header)
            if read.setdefault(name, value) != value:
                raise BadRequestError(f"the header {name.decode()} comes twice, with different values")
        elif name in _FORWARDED and (size := len(name) + len(value)) <= room:
            room -= size
            forwarded.append(header)
    return forwarded, read


def answer_lines(headers: Iterable[Header], own: Iterable[Header]) -> bytes:
    """The lines of an answer's head, without its length.

    Args:
        headers: that may come from elsewhere; they are checked.
        own: headers of the gateway's making.

    Raises:
        ValueError: one of the first can't be sent.
    """
    lines = [header_line(name, value) for name, value in headers]
    lines += [b"%b: %b\r\n" % header for header in own]  # seldom the same twice: nothing to remember
    lines.append(_SAFE_LINES)
    return b"".join(lines)


def returned_lines(headers: Iterable[Header], limits: bytes) -> bytes:
    """The lines of an answer of Triton's that goes back, without its length.

    Args:
        headers: all of Triton's.
        limits: lines of the gateway's making.

    Raises:
        ValueError: one of those that go back can't be sent.
    """
    global _latest
    before, lines = _latest
    if headers != before:  # as mostly they are, and the very same objects
        before, lines = list(headers), _returned(tuple(headers))
        _latest = before, lines
    return b"".join((lines, limits, _SAFE_LINES))


_latest: tuple[list[Header], bytes] = ([], b"")


@lru_cache(maxsize=64)  # Triton's answers have a few heads
def _returned(headers: tuple[Header, ...]) -> bytes:
    return b"".join(header_line(name, value) for name, value in headers if name in RETURNED)
