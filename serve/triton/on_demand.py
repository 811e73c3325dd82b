"""A Triton of this machine whose models come and go: single loads and unloads over gRPC, and who holds what memory.

Over gRPC, as a load over HTTP holds one of Triton's few threads for HTTP, and with it all of its connections.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from compress.errors import ServerError
from serve.gateway.on_demand.catalogue import Known
from serve.gateway.on_demand.host import HostDownError, Used
from serve.triton.control import control_call
from serve.triton.launch import TritonServer
from serve.triton.memory import FOLDER

__all__ = ["TritonHost"]

KINDS = "VmRSS", "VmHWM", "RssShmem"  # of /proc/PID/status
ENDS_S, LOOK_S = 30.0, 0.02


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
        self._ends_at_once: set[str] = set()

    async def load(self, model: Known) -> None:
        stubs = await asyncio.to_thread(self._triton.stubs)
        self._older[model.name] = frozenset(stub.pid for stub in stubs if stub.model == model.name)
        try:
            await self._load(model)
        finally:
            del self._older[model.name]
            self._given_up.discard(model.name)

    async def _load(self, model: Known) -> None:
        (self._ends_at_once.discard if model.finishes else self._ends_at_once.add)(model.name)
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
        if not patient and model in self._ends_at_once:
            # Before Triton is told: it looks for a second whether they live, and would wait for an answer of one that
            # died in between.
            await self._end(model, pids)
        await self._tell("Unload", model, self.timeout_s)
        if not await _ended(pids, ENDS_S) and not patient:
            await self._end(model, pids)
        # What these have begun has nobody to end it, and nothing to wait for.
        await _ended(await asyncio.to_thread(self._triton.end_left), ENDS_S)

    async def _end(self, model: str, pids: Collection[int]) -> None:
        await asyncio.to_thread(self._triton.end_stubs, model, ())
        await _ended(pids, ENDS_S)

    async def used(self) -> Used:
        return await asyncio.to_thread(self.used_now)

    def used_now(self) -> Used:
        """What is resident now, looked up in this thread."""
        if not self._triton.running:
            return Used()
        by_model: Counter[str] = Counter()
        peaks: Counter[str] = Counter()
        found = self._triton.relatives()
        models = {stub.pid: stub.model for stub in found.stubs}
        models |= {pid: models[stub] for pid, stub in found.begun.items()}
        for pid, model in models.items():
            memory = _memory(pid)
            by_model[model] += memory.resident
            peaks[model] += memory.peak
        own = map(_memory, [*found.own, *found.left])
        return Used(sum(each.resident - each.shared for each in own), by_model, peaks)

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
    while any(_memory(pid).resident for pid in pids):
        if time.monotonic() >= until:
            return False
        await asyncio.sleep(LOOK_S)
    return True


class _Memory(NamedTuple):
    """Of a process, in bytes; 0 for one that is gone.

    Attributes:
        resident: what it has.
        peak: the most that it has had.
        shared: of what it has, regions of shared memory: they are models', and count for the processes of these.
    """

    resident: int = 0
    peak: int = 0
    shared: int = 0


def _memory(pid: int) -> _Memory:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        told = {
            name: int(value.split()[0]) << 10
            for name, _, value in (line.partition(":") for line in lines)
            if name in KINDS
        }
    except (OSError, IndexError, ValueError):
        return _Memory()
    return _Memory(*(told.get(name, 0) for name in KINDS))
