"""The slots of a pool of connections, shared by models and keys.

A model may take one more slot while it has fewer than are free (dynamic thresholds: Choudhury and Hahne, "Dynamic Queue
Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking, 1998). So one that takes what
it can has half of them, two have a third each, and there is always something for who comes next. The same holds for a
key while others ask; one that is alone leaves an eighth.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from serve.http.message import ExchangeError

__all__ = ["FEWEST_SHARED", "Slots", "Whose"]

FEWEST_SHARED = 16  # of fewer slots there are no shares: who comes first has them
KEPT = 8  # one part of so many is kept from a key that is alone

Whose = tuple[str, str]  # a model, and the id of a key; "" for none, which is not bounded by a share


class Slots:
    """Counts who has slots, and wakes those that wait.

    Args:
        most: slots.

    Attributes:
        used: slots that are taken.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._keyed = 0  # of these, those of keys
        self._by_model: Counter[str] = Counter()
        self._by_key: Counter[str] = Counter()
        self._waiting: dict[Whose, deque[asyncio.Future[None]]] = {}

    def take(self, whose: Whose) -> bool:
        """Take a slot, if there is one for them, to be given back by `give`."""
        model, who = whose
        if not self._room_of_model(model) or (who and not self._room_of_key(who)):
            return False
        self._count(whose)
        return True

    def give(self, whose: Whose) -> None:
        """Give a slot back; whoever waits and may take it has it at once."""
        model, who = whose
        self.used -= 1
        if left := self._by_model[model] - 1:
            self._by_model[model] = left
        else:
            del self._by_model[model]
        if who:
            self._keyed -= 1
            if left := self._by_key[who] - 1:
                self._by_key[who] = left
            else:
                del self._by_key[who]
        if self._waiting:
            self._grant()

    async def wait(self, whose: Whose, deadline: float) -> None:
        """Take a slot that `take` has not given. Of those that wait, the model with the fewest is served first.

        A key that has its share does not wait: it would keep places of models with what can't go on.

        Args:
            deadline: on the loop's clock.

        Raises:
            ExchangeError: "share" where the key has its share, "busy" where there is none in time.
        """
        model, who = whose
        if self._by_key.get(who, 0) and not self._room_of_key(who):
            raise ExchangeError("share", f"it has {self._by_key[who]} of {self.most} connections")
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        queue = self._waiting.setdefault(whose, deque())
        queue.append(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except BaseException as err:
            if waiter.done() and not waiter.cancelled():
                self.give(whose)  # the slot came too late for us: pass it on
            elif waiter in queue:
                queue.remove(waiter)
                if not queue:
                    del self._waiting[whose]
            if isinstance(err, TimeoutError):
                message = f"{self.used} of {self.most} connections were in use, {self._by_model[model]} by its model"
                raise ExchangeError("busy", message) from None
            raise

    def _room_of_model(self, model: str) -> bool:
        free = self.most - self.used
        if not model or self.most < FEWEST_SHARED:
            return free > 0
        return self._by_model.get(model, 0) < free

    def _room_of_key(self, who: str) -> bool:
        if self.most < FEWEST_SHARED:
            return True
        held = self._by_key.get(who, 0)
        if held < self.most - self.used:  # no more than the others may have, too
            return True
        alone = held == self._keyed and all(each in ("", who) for _, each in self._waiting)
        return alone and held < self.most - self.most // KEPT

    def _count(self, whose: Whose) -> None:
        model, who = whose
        self.used += 1
        self._by_model[model] += 1
        if who:
            self._keyed += 1
            self._by_key[who] += 1

    def _grant(self) -> None:
        while able := [whose for whose in self._waiting if self._room_of_model(whose[0])]:
            whose = min(able, key=lambda each: (self._by_model[each[0]], self._by_key[each[1]]))
            queue = self._waiting.pop(whose)
            waiter = queue.popleft()
            if queue:
                self._waiting[whose] = queue  # behind the others
            if not waiter.done():
                self._count(whose)
                waiter.set_result(None)
