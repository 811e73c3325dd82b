"""Requests of a sequence: what one model server remembers of them, no other knows.

Such a request is asked once, of the server that had those before it.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import orjson

from serve.gateway.errors import BadRequestError, GatewayError
from serve.gateway.protocol import BINARY_HEADER, SEQUENCE
from serve.http_body import GrowingBody

__all__ = ["UNKNOWN", "Owners", "Sequences", "TakenSequenceError", "ends_sequence", "named_sequence", "sequence_of"]

UNKNOWN = b"?"
"""It may be of a sequence, and can't be told of which."""
MOST, MOST_OF_KEY = 65536, 4096
IDLE_S = 600.0  # Triton's own is a second where a model does not say otherwise
_ID = re.compile(rb'"sequence_id"\s*:\s*(?:([0-9]{1,20})(?=[\s,}])|("[^"\\]{0,256}"))')
_ESCAPE = b"\\u"

Host = TypeVar("Host")


class TakenSequenceError(GatewayError):
    """A sequence that another key began."""

    status = 409

    def __init__(self, model: str) -> None:
        super().__init__(
            f"this sequence of the model {model!r} is not this key's",
            why="another key has begun a sequence with this id, which has not ended",
            mend="take another sequence_id: large random numbers do not meet",
        )


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


class Owners:
    """Which key began a sequence: Triton's ids are the same for all, and whoever knows one could go on with it.

    A sequence is its key's until it ends, was idle for `IDLE_S`, or died with its model's process.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[tuple[str, bytes], tuple[str, float, object]] = {}
        self._by_key: dict[str, OrderedDict[tuple[str, bytes], None]] = {}

    def claim(self, key: str, model: str, sequence: bytes, *, ends: bool, life: object = None) -> None:
        """A request of a sequence is about to be sent.

        Args:
            key: the id of its key; "" where there are no keys, and so nobody to tell from another.
            model: that is asked, in whatever version.
            sequence: its id.
            ends: whether it is the last of its sequence.
            life: changes when the model's process dies.

        Raises:
            TakenSequenceError: another key has begun it.
        """
        if not key:
            return
        which = model, sequence
        now = self._clock()
        if (known := self._of.get(which)) is not None:
            owner, when, life_then = known
            if owner != key and now - when < IDLE_S and life_then == life:
                raise TakenSequenceError(model)
            self._drop(which, owner)
        if ends:
            return
        self._of[which] = key, now, life
        own = self._by_key.setdefault(key, OrderedDict())
        own[which] = None
        oldest = next(iter(own))
        if len(own) > MOST_OF_KEY or now - self._of[oldest][1] >= IDLE_S:  # one key has no room of another's
            self._drop(oldest, key)

    def _drop(self, which: tuple[str, bytes], owner: str) -> None:
        del self._of[which]
        own = self._by_key[owner]
        del own[which]
        if not own:
            del self._by_key[owner]


def named_sequence(headers: Sequence[tuple[bytes, bytes]], body: bytes | GrowingBody) -> tuple[bytes, bool] | None:
    """The sequence of a request for which `sequence_of` finds one, read strictly, and whether the request ends it.

    Raises:
        BadRequestError: it can't be told which: parsers differ in what a name that comes twice means.
    """
    length = next((value for name, value in headers if name == BINARY_HEADER), b"")
    size = int(length) if length.isdigit() else len(body)
    head = body.head(size) if isinstance(body, GrowingBody) else body[:size]
    try:
        parameters = json.loads(head, object_pairs_hook=_once).get("parameters") or {}
        sequence, end = parameters.get("sequence_id"), parameters.get("sequence_end")
    except (ValueError, AttributeError, RecursionError) as err:
        raise BadRequestError("it can't be told which sequence this is", why=str(err)) from err
    if not isinstance(sequence, int | str | None) or not isinstance(end, bool | None):
        raise BadRequestError("sequence_id is a number or a text, and sequence_end true or false")
    return (str(sequence).encode(), bool(end)) if sequence else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BadRequestError("a name comes twice in one object of the request")
    return found


def ends_sequence(parameters: Any) -> bool:
    """Whether a ModelInferRequest with these parameters is the last of its sequence."""
    end = parameters.get("sequence_end")
    return end is not None and bool(end.bool_param)
