"""What clients gave up and the model server still has, where it keeps no place.

Who gives up leaves its request in its place until the server is through with it. Two kinds can't: one of a sequence may
wait for its slot for as long as others go on, and of a model under release places are both models', so that a candidate
that hangs would take the baseline's. Their places are free again once the answer would have come. What is left of them
counts for its key instead: no key may have more of it with one model than half of the model's places, or with one under
release than it takes to see that a model hangs. Those that wait for a slot had no place, and count apart.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from serve.gateway.access.admission import Admission
from serve.gateway.access.left_behind import once_through
from serve.gateway.access.memory import Memory, Share
from serve.gateway.access.slots import MOST_WAITING
from serve.gateway.errors import OverloadedError

__all__ = ["JUDGED", "Asides"]

RETRY_AFTER_S = 1.0
JUDGED = 64  # waits in vain, of which some 40 prove that a candidate hangs


class Asides:
    """Of one gateway.

    Args:
        memory: counts, for its key, a request that may still be on its way.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._left: Counter[tuple[str, str, bool]] = Counter()

    def check(self, places: Admission, asked: str, who: str, *, least: int = 1, waits: bool = False) -> None:
        """Raises OverloadedError where a key has as many left with a model as it may.

        Args:
            places: of the model.
            asked: path of the model's requests.
            who: id of the key.
            least: the number never falls below it; JUDGED where it has to be seen that a model hangs.
            waits: whether its sequence has no slot yet: how many places there are says nothing of those.
        """
        most = MOST_WAITING if waits else max(least, int(places.limit) // 2)
        if self._left[asked, who, waits] >= most:
            places.shed += 1
            raise OverloadedError(
                f"the model {places.model!r} has more requests of this key than it can answer in time",
                why="their clients did not wait for them, and it is still at work on them",
                mend="wait for answers, or as long as Retry-After says",
                retry_after_s=RETRY_AFTER_S,
            )

    def keep(
        self, asked: str, who: str, ended: Sequence[asyncio.Future[Any]], size: int, *, waits: bool = False
    ) -> None:
        """Count a request that was left, until the server is through with it.

        Args:
            asked: as of `check`.
            who: id of the key.
            ended: each is done when the server is.
            size: of the request, in bytes.
            waits: as of `check`.
        """
        if not ended:
            return
        self._left[asked, who, waits] += 1
        held = Share(self._memory, who)
        held.hold(size)

        def over() -> None:
            held.close()
            self._left[asked, who, waits] -= 1
            if not self._left[asked, who, waits]:
                del self._left[asked, who, waits]

        once_through(ended, over)

    @contextmanager
    def call(
        self, asked: str, who: str, size: int, *, waits: bool = False
    ) -> Iterator[Callable[[asyncio.Future[Any]], None]]:
        """Around a call over gRPC whose place is not kept: is to be given what its server is at work on still.

        Arguments as of `keep`.
        """
        left: list[asyncio.Future[Any]] = []
        try:
            yield left.append
        finally:
            self.keep(asked, who, left, size, waits=waits)
