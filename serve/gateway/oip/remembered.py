"""What is remembered up to a bound; of more, what was not used for the longest time is forgotten."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Remembered"]

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """Values by key.

    Unlike one that is emptied when it is full, it does not lose all to one entry too many.

    Args:
        most: the sum of their sizes; the newest one is kept whatever its size.

    Attributes:
        size: of what is there.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value, which was used by this; None for none."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int = 1) -> None:
        """Remember a value.

        Args:
            size: of it, in the unit of the bound.
        """
        self.pop(key)
        self._values[key] = value, size
        self.size += size
        while self.size > self._most and len(self._values) > 1:
            _, (_, freed) = self._values.popitem(last=False)
            self.size -= freed

    def pop(self, key: K) -> None:
        """Forget a value, if it is there."""
        if (found := self._values.pop(key, None)) is not None:
            self.size -= found[1]
