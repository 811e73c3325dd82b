"""Requests of a sequence: what one model server remembers of them, no other knows.

Such a request is asked once, of the server that had those before it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

import orjson

from serve.gateway.protocol import BINARY_HEADER, SEQUENCE
from serve.http_body import GrowingBody

__all__ = ["UNKNOWN", "Sequences", "sequence_of"]

UNKNOWN = b"?"
"""It may be of a sequence, and can't be told of which."""
MOST = 65536
_ID = re.compile(rb'"sequence_id"\s*:\s*(?:([0-9]{1,20})(?=[\s,}])|("[^"\\]{0,256}"))')
_ESCAPE = b"\\u"

Host = TypeVar("Host")


def sequence_of(headers: Sequence[tuple[bytes, bytes]], body: bytes | GrowingBody) -> bytes | None:
    """The id of the sequence that an infer request belongs to; None where it belongs to none.

    Args:
        headers: that say how long its JSON is.
        body: of the request; JSON that was not read before may spell a name with escapes.
    """
    if isinstance(body, GrowingBody):
        return UNKNOWN if SEQUENCE in body else None
    length = next((value for name, value in headers if name == BINARY_HEADER), b"")
    head = body[: int(length)] if length.isdigit() else body
    escaped = _ESCAPE in head
    if SEQUENCE in head and not escaped:
        found = _ID.findall(head)
        if len(found) == 1:
            number, text = found[0]
            return None if text == b'""' or (number and not int(number)) else text[1:-1] or b"%d" % int(number)
        return UNKNOWN
    if not escaped:
        return None
    try:
        asked = orjson.loads(head).get("parameters", {}).get("sequence_id", 0)
    except (ValueError, AttributeError):
        return UNKNOWN
    return str(asked).encode() if asked else None


class Sequences(Generic[Host]):
    """Which server has which sequence.

    A sequence goes where its id's hash says (rendezvous hashing: Thaler and Ravishankar, "Using name-based mappings to
    increase hit rates", 1998), so that several gateways agree; where that server could not be asked when the sequence
    was first seen, to the next, and stays there as long as that one is there.
    """

    def __init__(self) -> None:
        self._where: OrderedDict[bytes, Host] = OrderedDict()

    def host(self, key: bytes, hosts: Sequence[Host], name: Callable[[Host], str], able: Sequence[Host]) -> Host:
        """The server of a sequence.

        Args:
            key: model and id.
            hosts: all there are.
            name: of a host, the same in each gateway.
            able: those that a new sequence may begin with; never empty.
        """
        host = self._where.get(key)
        if host is None or host not in hosts:
            host = max(able, key=lambda each: blake2b(key + b"\0" + name(each).encode(), digest_size=8).digest())
            self._where[key] = host
            if len(self._where) > MOST:
                self._where.popitem(last=False)
        self._where.move_to_end(key)
        return host

    def forget(self, key: bytes) -> None:
        """Its server is gone: whoever is asked next may tell that it knows nothing of the sequence."""
        self._where.pop(key, None)
