"""Requests of a sequence: what one model server remembers of them, no other knows.

Such a request is asked once, of the server that had those before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

__all__ = ["Sequences"]

MOST = 65536

Host = TypeVar("Host")


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
