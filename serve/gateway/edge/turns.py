"""Who waits, by address in turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

__all__ = ["Turns"]


class Turns:
    """Calls that wait, of which no address has two before another that waits has one."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[object, Callable[[], None]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, address: str, who: object, call: Callable[[], None]) -> None:
        """At the end of its address' calls; `who` has one at a time."""
        self._waiting.setdefault(address, OrderedDict())[who] = call

    def drop(self, address: str, who: object) -> None:
        """Take it back, if it waits."""
        calls = self._waiting.get(address)
        if calls is not None and calls.pop(who, None) is not None and not calls:
            del self._waiting[address]

    def next(self) -> Callable[[], None]:
        """Take the one whose turn it is; there has to be one."""
        address, calls = self._waiting.popitem(last=False)
        _, call = calls.popitem(last=False)
        if calls:
            self._waiting[address] = calls
        return call
