"""Loads that are given up once they take too long; a model has one at a time, whether Triton ends it or not.

Triton has no way to call a load off: its thread is taken until the load ends, and another load of the same model waits
inside Triton and begins then, whoever still wants it. So a model whose load was given up is asked for again only once
that load has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from compress.errors import ServerError
from serve.gateway.on_demand.catalogue import Known
from serve.gateway.on_demand.host import Host

__all__ = ["Behind"]


class Behind:
    """Those of one Triton.

    Args:
        host: loads.
        late: is told of a model whose load was given up, and has come to a good end after all.
    """

    def __init__(self, host: Host, late: Callable[[str], None]) -> None:
        self._host = host
        self._late = late
        self._left: dict[str, asyncio.Future[None]] = {}
        self._ending: dict[str, asyncio.Future[str]] = {}  # why each that is under way is to end

    def __contains__(self, model: str) -> bool:
        return model in self._left

    def __len__(self) -> int:
        return len(self._left)

    async def load(self, model: Known) -> None:
        """Load one; errors as of `Host.load`.

        Raises:
            ServerError: it took longer than `Host.timeout_s`, was ended by `end`, or one that was goes on still.
        """
        if model.name in self._left:
            raise ServerError(
                f"can't load {model.name}",
                why="a load of it was given up, and has not ended yet",
                mend="see what it waits for; a restart of `serve up` ends it",
            )
        loading = asyncio.ensure_future(self._host.load(model))
        ending = self._ending[model.name] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((loading, ending), timeout=self._host.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # Triton is about to be stopped, and would wait for it
            self._host.give_up(model.name)
            loading.cancel()
            raise
        finally:
            del self._ending[model.name]
        if loading.done():
            return loading.result()
        self._left[model.name] = loading
        loading.add_done_callback(lambda done: self._ended(model.name, done))
        await asyncio.to_thread(self._host.give_up, model.name)
        late = f"its load has not ended within {self._host.timeout_s:g} s (--start-timeout)"
        raise ServerError(
            f"can't load {model.name}",
            why=ending.result() if ending.done() else late,
            mend="see what its code or its files wait for, or allow it more time",
        )

    def end(self, model: str, why: str) -> bool:
        """Give up a load that is under way; whether there was one."""
        ending = self._ending.get(model)
        if ending is None or ending.done():
            return False
        ending.set_result(why)
        return True

    async def press(self) -> None:
        """End once more what was given up: a load may have begun its process since."""
        for model in list(self._left):
            await asyncio.to_thread(self._host.give_up, model)

    def _ended(self, model: str, loading: asyncio.Future[None]) -> None:
        del self._left[model]
        if not loading.cancelled() and loading.exception() is None:
            self._late(model)
