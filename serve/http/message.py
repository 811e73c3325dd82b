"""What goes over an HTTP/1.1 connection: an address, a request's head, a response, and what can go wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol
from urllib.parse import urlsplit

__all__ = ["Address", "ExchangeError", "Held", "Kind", "Response", "encode_head", "header_line"]

Kind = Literal["refused", "busy", "share", "closed", "timeout", "stalled", "malformed", "too_large"]

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"/[\x21-\x7e]*")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
LONGEST_REMEMBERED = 48  # shorter than a traceparent, which never comes twice
_OWN_HEADERS = frozenset((b"host", b"connection", b"content-length", b"transfer-encoding"))


class ExchangeError(Exception):
    """No whole response came back.

    Attributes:
        kind: "refused" (no connection), "busy" (no free connection in time), "share" (who asked has its share of the
            connections), "closed" (the server closed before the response ended), "timeout", "stalled" (a body that was
            still coming came too slowly), "malformed" (not HTTP), "too_large" (past the response bound).
        unanswered: the connection closed before the first byte of a response.
        early: whether whoever asked gave the server less time than it may take.
        through: is done when the server is through with it all the same, where that is waited for; else None.
    """

    def __init__(self, kind: Kind, message: str, *, unanswered: bool = False) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.unanswered = unanswered
        self.early = False
        self.through: asyncio.Future[bool] | None = None


@dataclass(frozen=True)
class Address:
    """Where an HTTP server listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, url: str, *, default_port: int = 80) -> Address:
        """Read "http://host[:port]" (a path must be empty).

        Raises:
            ValueError: another scheme, no host, a path, a query or a user name.
        """
        parts = urlsplit(url)
        if parts.scheme != "http":
            raise ValueError(f"{url!r} does not start with http://")
        if not parts.hostname or parts.username is not None:
            raise ValueError(f"{url!r} names no plain host")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError(f"{url!r} has more than a host and a port")
        try:
            port = parts.port
        except ValueError as err:
            raise ValueError(f"{url!r} has no number for a port") from err
        return cls(parts.hostname, default_port if port is None else port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Held(Protocol):
    """What counts bytes for as long as somebody has it."""

    def take(self, size: int, /) -> None:
        """Count so many more; raises where there is no room."""

    def close(self) -> None:
        """Count nothing any more."""


@dataclass(slots=True)  # a frozen one takes three times as long to make
class Response:
    """A whole response.

    Attributes:
        headers: (name in lower case, value), in the order they came.
        body: the body's bytes, chunks joined, any content encoding left as it came.
        wire_bytes: bytes read from the socket for it, head and framing included.
        held: counts its bytes while it is there.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    wire_bytes: int
    held: Held | None = None

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, by its lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


def encode_head(
    method: bytes, target: bytes, address: Address, headers: Iterable[tuple[bytes, bytes]], body_bytes: int
) -> bytes:
    """The bytes of a request up to its body; Host and Content-Length are written here.

    Raises:
        ValueError: a line break or another byte that HTTP forbids in its place, or a header that is set here.
    """
    lines = [_first_lines(method, target, address)]
    lines += [header_line(name, value) for name, value in headers]
    if body_bytes or method not in (b"GET", b"DELETE"):
        lines.append(b"content-length: %d\r\n" % body_bytes)
    lines.append(b"\r\n")
    return b"".join(lines)


# The same few lines come again and again: checking and joining them each time would be a tenth of a request's cost.
@lru_cache(maxsize=1024)
def _first_lines(method: bytes, target: bytes, address: Address) -> bytes:
    if not _TOKEN.fullmatch(method) or not _TARGET.fullmatch(target):
        raise ValueError(f"not a request line: {method!r} {target!r}")
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, target, str(address).encode("ascii"))


def header_line(name: bytes, value: bytes) -> bytes:
    """A header as it goes over the wire.

    Raises:
        ValueError: a byte that HTTP forbids in its place, or one of the headers that frame a message.
    """
    return _known_line(name, value) if len(value) <= LONGEST_REMEMBERED else _line(name, value)


def _line(name: bytes, value: bytes) -> bytes:
    if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value) or name.lower() in _OWN_HEADERS:
        raise ValueError(f"not a header to send: {name!r}")
    return b"%b: %b\r\n" % (name, value)


_known_line = lru_cache(maxsize=1024)(_line)
