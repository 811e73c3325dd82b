"""A client that leaves ends what is done for it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from serve.gateway.asking import unless_client_leaves
from serve.gateway.errors import ClientGoneError
from serve.gateway.extensions import LEAVING

Leave = Callable[[], None] | None


async def nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def at_once() -> str:
    return "done"


async def later() -> str:
    await asyncio.sleep(30)
    return "done"


def gone(leave: Leave) -> None:
    """What a connection does that is closed already."""
    if leave is not None:
        leave()


@pytest.mark.parametrize("work", [at_once, later])
def test_who_has_left_before_cancels_nothing_that_comes_after(work: Callable[[], Awaitable[str]]) -> None:
    async def serve() -> None:
        for _ in range(2):  # a turn first, and then the model
            with pytest.raises(ClientGoneError):
                await unless_client_leaves({"extensions": {LEAVING: gone}}, nothing, work())
        await asyncio.sleep(0)  # a cancellation left over would end this
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(serve())


def test_who_leaves_meanwhile_ends_it_however_often_it_is_told() -> None:
    async def serve() -> None:
        told: list[Leave] = []

        def leave() -> None:
            if told[0] is not None:
                told[0]()
                told[0]()

        asyncio.get_running_loop().call_soon(leave)
        with pytest.raises(ClientGoneError):
            await unless_client_leaves({"extensions": {LEAVING: told.append}}, nothing, later())
        await asyncio.sleep(0)
        assert told[1:] == [None]

    asyncio.run(serve())
