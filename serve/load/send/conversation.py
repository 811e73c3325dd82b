"""What a generator process does for its coordinator: prepare and run load after load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from serve.load.ask.target import is_loopback
from serve.load.send.batch import Batch
from serve.load.send.channel import Channel
from serve.load.send.generator import Generator
from serve.load.send.job import Job
from serve.load.send.wire import WireError, frame_of_batch

__all__ = ["Conversation"]

START_LATEST_NS = 60 * 1_000_000_000


class Conversation:
    """With one coordinator, until it leaves or is silent: then nothing is sent for it any more.

    Args:
        channel: to it.
        allow_remote: whether to send load to other machines than this one.

    Attributes:
        began: whether a load was.
    """

    def __init__(self, channel: Channel, *, allow_remote: bool = True) -> None:
        self._channel = channel
        self._allow_remote = allow_remote
        self._generator: Generator | None = None
        self._running: asyncio.Task[None] | None = None
        self.began = False

    async def hold(self) -> None:
        """All of it."""
        self._channel.beat()
        try:
            while True:
                message, blob = await self._channel.hear()
                await self._do(message, blob)
        except WireError:
            pass
        finally:
            await self._end()
            await self._channel.close()

    async def leave(self) -> None:
        """End it from this side, and hand on what was measured so far."""
        if self._generator is not None:
            self._generator.stop("cut")
        if self._running is not None:
            await asyncio.wait([self._running])
        await self._channel.close()

    async def _do(self, message: Mapping[str, Any], blob: bytes) -> None:
        busy = self._running is not None and not self._running.done()
        match message.get("do"):
            case "clock":
                self._channel.tell({"is": "clock", "ns": time.perf_counter_ns()})
            case "prepare" if not busy:
                await self._end()
                try:
                    self._generator = await self._prepared(message, blob)
                except (ValueError, KeyError, TypeError, OSError, ImportError, OverflowError) as err:
                    self._channel.tell({"is": "failed", "why": str(err)})
                else:
                    self._channel.tell({"is": "ready"})
            case "start" if self._generator is not None and self._running is None:
                at_ns = message.get("at_ns")
                if type(at_ns) is not int or not 0 <= at_ns <= time.perf_counter_ns() + START_LATEST_NS:
                    raise WireError("told to start at no time")
                self.began = True
                self._running = asyncio.ensure_future(self._generator.run(at_ns))
            case "stop":
                if self._generator is not None:
                    self._generator.stop()
            case _:
                raise WireError("a message that makes no sense here")

    async def _prepared(self, message: Mapping[str, Any], blob: bytes) -> Generator:
        job = Job.from_wire(message["job"], blob)
        if not self._allow_remote and not await is_loopback(job.host):
            why = f"this worker sends load to its own machine only, not to {job.host}"
            raise ValueError(f"{why}; start it with --allow-remote")
        made = Generator(job, self._hand_on, part=int(message["part"]), parts=int(message["parts"]))
        try:
            await made.prepare()
        except BaseException:
            await made.close()
            raise
        return made

    def _hand_on(self, batch: Batch) -> None:
        self._channel.tell_frame(frame_of_batch(batch))

    async def _end(self) -> None:
        """End the load that is under way, or close the connections of one that never was."""
        generator, self._generator = self._generator, None
        running, self._running = self._running, None
        if generator is not None:
            generator.stop("cut")
            if running is not None:
                await asyncio.gather(running, return_exceptions=True)
            else:
                await generator.close()
