"""A Triton of this machine whose models come and go: single loads and unloads over gRPC, and who holds what memory.

Over gRPC, as a load over HTTP holds one of Triton's few threads for HTTP, and with it all of its connections.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from compress.errors import ServerError
from serve.gateway.on_demand.catalogue import Known
from serve.gateway.on_demand.host import HostDownError, Used
from serve.triton.control import control_call
from serve.triton.launch import TritonServer
from serve.triton.memory import FOLDER

__all__ = ["TritonHost"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ENDS_S, LOOK_S = 30.0, 0.02
IDLES_S = 3.0  # in which a stub ends that computes nothing: it sleeps for a second before it sees that it is to


class TritonHost:
    """One that was started to be told what to load; see `serve.gateway.on_demand.host`.

    Args:
        triton: of this process.
        region_bytes: of shared memory, for each process of a model.
        timeout_s: that a load may take before it is given up, and an unload.
        check: reads models' files again before they are loaded; raises ToolkitError where they are not to be.
    """

    def __init__(
        self,
        triton: TritonServer,
        region_bytes: int,
        timeout_s: float,
        check: Callable[[Collection[str]], object],
    ) -> None:
        self._triton = triton
        self._region_bytes = region_bytes
        self.timeout_s = timeout_s
        self._check = check
        self._channel: Any = None
        self._older: dict[str, frozenset[int]] = {}  # by model that is being loaded: its processes of before
        self._given_up: set[str] = set()

    async def load(self, model: Known) -> None:
        stubs = await asyncio.to_thread(self._triton.stubs)
        self._older[model.name] = frozenset(stub.pid for stub in stubs if stub.model == model.name)
        try:
            await self._load(model)
        finally:
            del self._older[model.name]
            self._given_up.discard(model.name)

    async def _load(self, model: Known) -> None:
        await _apart(lambda: self._check((model.name,)))
        if model.name in self._given_up:
            raise ServerError(
                f"can't load {model.name}", why="its files could not be read in time", mend="see what holds them up"
            )
        free, need = shutil.disk_usage(FOLDER).free, model.processes * self._region_bytes
        if need > free:
            raise ServerError(
                f"can't load {model.name}",
                why=f"its processes need {need >> 20} MiB of shared memory, {FOLDER} has {free >> 20} MiB free",
                mend="enlarge it, or pack the model with fewer instances",
            )
        await self._tell("Load", model.name, None)
        await asyncio.to_thread(self._triton.close_regions)

    def give_up(self, model: str) -> None:
        """Triton ends a load within a second once its process has died, and its thread is free again."""
        older = self._older.get(model)
        if older is not None:
            self._given_up.add(model)
            self._triton.end_stubs(model, spared=older)

    async def unload(self, model: str, *, patient: bool = False) -> None:
        pids = [stub.pid for stub in await asyncio.to_thread(self._triton.stubs) if stub.model == model]
        await self._tell("Unload", model, self.timeout_s)
        if not await _ended(pids, ENDS_S if patient else IDLES_S) and not patient:
            await asyncio.to_thread(self._triton.end_stubs, model, ())
            await _ended(pids, ENDS_S)

    async def used(self) -> Used:
        return await asyncio.to_thread(self.used_now)

    def used_now(self) -> Used:
        """What is resident now, looked up in this thread."""
        if not self._triton.running:
            return Used()
        by_model: dict[str, int] = {}
        members, stubs = self._triton.family()
        for stub in stubs:
            by_model[stub.model] = by_model.get(stub.model, 0) + _rss(stub.pid)
        others = set(members) - {stub.pid for stub in stubs}
        return Used(sum(_rss(pid) - _shared(pid) for pid in others), by_model)

    async def _tell(self, act: Literal["Load", "Unload"], model: str, timeout_s: float | None) -> None:
        if not self._triton.running:
            raise HostDownError
        import grpc  # takes a while

        if self._channel is None:  # its address is known once it has started; a restart keeps it
            self._channel = grpc.aio.insecure_channel(self._triton.grpc_address)
        try:
            await control_call(self._channel, act, model, self._triton.control, timeout_s)
        except ServerError as err:
            if isinstance(err.__cause__, grpc.aio.AioRpcError) and err.__cause__.code() is grpc.StatusCode.UNAVAILABLE:
                raise HostDownError from err
            raise

    async def close(self) -> None:
        """Nothing is asked of it any more."""
        if self._channel is not None:
            await self._channel.close()


async def _apart(work: Callable[[], object]) -> None:
    """Do something in a thread of its own: one that reads from a disk that hangs takes none from others, and nobody
    waits for it at the end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error: Exception | None = None
        try:
            work()
        except Exception as err:  # whatever it is, it is raised where it is waited for
            error = err
        with suppress(RuntimeError):  # the loop is closed by now
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="check", daemon=True).start()
    await done


async def _ended(pids: Collection[int], seconds: float) -> bool:
    """Whether processes have ended, which is waited for."""
    until = time.monotonic() + seconds
    while any(map(_rss, pids)):
        if time.monotonic() >= until:
            return False
        await asyncio.sleep(LOOK_S)
    return True


def _shared(pid: int) -> int:
    """Of these, bytes of regions of shared memory: they are those of models, and count for the processes of these."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem:")), 0)
    except (OSError, IndexError, ValueError):
        return 0


def _rss(pid: int) -> int:
    """Bytes that a process has resident; 0 for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0
