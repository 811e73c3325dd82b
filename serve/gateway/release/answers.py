"""Answers of models under release that a client may still speak of: the last ones, for a while, each by an id."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from serve.gateway.access.identity import Identity
from serve.gateway.access.memory import Memory, MemoryFullError, Share
from serve.gateway.errors import GatewayError
from serve.gateway.oip.protocol import BINARY_HEADER
from serve.gateway.release.release import Answered, Release, Variant
from serve.http.client import Response

__all__ = ["ANSWER_ID", "Answers", "Given", "given"]

ANSWER_ID = b"answer-id"
ENTRY_BYTES = 1024  # about what is held for one, besides the answer itself
KEPT_BYTES = 2048  # longest answer that is kept, to be held against a label
OF_KEY = 4  # a key may have one in so many of the places
OF_MEMORY = 16  # and all of them one in so many of the bytes


@dataclass(slots=True)
class Given:
    """An answer that was given to a client.

    Attributes:
        key: the id of the client's key, "" without keys.
        model: that the client asked for.
        served_by: who answered, as the header Served-By says.
        release: its rollout, as `Release.rollout` says.
        variant: whose answer it counts as; None where it says nothing of either: the second one asked, or another.
        body, header_length: the answer, where it is short; None where it is not.
        texts, batched: as of the release.
        at: when, on the clock of `Answers`.
        said: whether the client has spoken of it.
    """

    key: str
    model: str
    served_by: str
    release: tuple[int, float]
    variant: Variant | None
    body: bytes | None = None
    header_length: int | None = None
    texts: frozenset[str] | None = None
    batched: bool = True
    at: float = 0.0
    said: bool = False


def given(
    release: Release, who: Identity, answered: Answered[Response | GatewayError], answer: Response, *, movable: bool
) -> Given:
    """What is kept of an answer.

    Args:
        movable: whether either could have given it; what only the baseline could give says nothing of the two.
    """
    length = answer.header(BINARY_HEADER)
    return Given(
        who.id, release.model, str(answered.by), release.rollout, release.variant(answered) if movable else None,
        None if answer.header(b"content-encoding") else answer.body,
        int(length) if length is not None and length.isdigit() else None, release.texts, release.batched,
    )  # fmt: skip


class Answers:
    """The last answers, oldest first.

    Args:
        most: that are kept; 0 for none.
        seconds: that one is kept.
        memory: what they hold is counted there; None counts nothing.
        clock: a monotonic one.
    """

    def __init__(
        self, most: int, seconds: float, memory: Memory | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._seconds = seconds
        self._memory = memory or Memory(1 << 62)
        self._share = Share(self._memory)
        self._clock = clock
        self._kept: OrderedDict[str, Given] = OrderedDict()
        self._of_key: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, answer: Given) -> str | None:
        """Keep an answer; its id, or None where none is kept."""
        if not self._most:
            return None
        answer.at = self._clock()
        if answer.body is not None and len(answer.body) > KEPT_BYTES:
            answer.body = None
        size = _size(answer)
        own = self._of_key.get(answer.key, {})
        if answer.key and len(own) >= max(1, self._most // OF_KEY):
            self._forget(next(iter(own)))  # its own, so that nobody drives out what others may speak of
        self._expire()
        while self._kept and (
            len(self._kept) >= self._most or self._share.size + size > self._memory.bound // OF_MEMORY
        ):
            self._forget(self._crowding())
        try:
            self._share.take(size)
        except MemoryFullError:
            return None
        id_ = secrets.token_urlsafe(12)
        self._kept[id_] = answer
        self._of_key.setdefault(answer.key, {})[id_] = None
        return id_

    def find(self, id_: str, key: str) -> Given | None:
        """The answer with this id, where it was given to this key and is kept still."""
        self._expire()
        given = self._kept.get(id_)
        return given if given is not None and given.key == key else None

    def done(self, given: Given) -> None:
        """It has been spoken of, and what was said counts: nothing more than that has to be known."""
        given.said = True
        before = _size(given)
        given.body = None
        self._share.resize(self._share.size - before + _size(given))

    def _crowding(self) -> str:
        """The oldest of the key that has most: many keys, too, drive out none of one that asks now and then."""
        most = max(self._of_key, key=lambda key: len(self._of_key[key]))
        return next(iter(self._of_key[most]))

    def _expire(self) -> None:
        oldest = self._clock() - self._seconds
        while self._kept:
            id_, given = next(iter(self._kept.items()))
            if given.at > oldest:
                return
            self._forget(id_)

    def _forget(self, id_: str) -> None:
        given = self._kept.pop(id_)
        own = self._of_key[given.key]
        del own[id_]
        if not own:
            del self._of_key[given.key]
        self._share.resize(self._share.size - _size(given))


def _size(given: Given) -> int:
    return ENTRY_BYTES + (0 if given.body is None else len(given.body))
