"""The processes that send a load: this one, children, or workers on other machines; all told the same way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from compress.errors import ServerError
from compress.host.cores import cores_here
from serve.load.ask.target import is_loopback
from serve.load.options import LoadOptions
from serve.load.send.batch import Batch
from serve.load.send.generator import Generator
from serve.load.send.job import Job
from serve.load.send.ledger import Ledger
from serve.load.send.member import Member, join, start, tls_to_workers
from serve.load.send.timer import check_timer
from serve.load.send.wire import WireError

__all__ = ["Processes"]

START_AHEAD_NS = 50_000_000
PREPARE_S = 30.0
"""Of silence, while a process reads a load's data, when it is silent for longer than usual."""
END_S = 5.0
"""For a process to hand on its last figures, once it was told to stop."""


class Processes:
    """Generator processes, ready for load after load.

    Args:
        options: say how many, or which workers.

    Attributes:
        lost: those that went away, in words. After that no load can be sent any more.
        clock_error_ns: by how much the workers' clocks may be off, in the load that was sent last; None where one
            machine sends.
    """

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._members: list[Member] = []
        self._here: Generator | None = None
        self._stopping = False
        self._deadline: asyncio.TimerHandle | None = None
        self.lost: list[str] = []
        self.clock_error_ns: int | None = None

    @property
    def size(self) -> int:
        return max(len(self._members), 1)

    async def __aenter__(self) -> Self:
        check_timer()
        try:
            if self._options.worker:
                context = tls_to_workers(self._options.worker_ca)
                until = time.monotonic() + self._options.worker_wait
                for number, text in enumerate(self._options.worker):
                    self._members.append(await join(text, self._options, number, context, until=until))
            else:
                cpus = self._options.cpus
                mine = cores_here().cpus  # none where the system binds no process
                if odd := set(cpus) - set(mine):
                    raise ServerError(
                        f"can't bind to CPU {min(odd)}",
                        why="this process may not run there",
                        mend=f"choose of {', '.join(map(str, mine))}"
                        if mine
                        else "leave --cpus out: this system has none",
                    )
                for number in range(self._options.processes):
                    cpu = cpus[number % len(cpus)] if cpus else None
                    self._members.append(await start(number, cpu))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def run(self, job: Job, on_batch: Callable[[Batch, int], None], on_start: Callable[[int], None]) -> None:
        """Send a load, and wait for its end.

        Args:
            on_batch: given what was measured, and by which process.
            on_start: told when it begins, a time of `perf_counter_ns`.

        Raises:
            ServerError: not every process can begin it, or all were lost.
        """
        self._stopping = False
        self.lost = []
        try:
            if self._members:
                await self._run(job, on_batch, on_start)
                return
            self._here = Generator(job, lambda batch: on_batch(batch, 0))
            await self._here.prepare()
            start_ns = time.perf_counter_ns() + START_AHEAD_NS
            on_start(start_ns)
            if self._stopping:
                await self._here.close()
            else:
                await self._here.run(start_ns)
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    async def _run(self, job: Job, on_batch: Callable[[Batch, int], None], on_start: Callable[[int], None]) -> None:
        await _check_shared(job, self._members)
        data, blob = job.to_wire()
        for part, member in enumerate(self._members):
            member.channel.tell({"do": "prepare", "job": data, "part": part, "parts": len(self._members)}, blob)
        for member in self._members:
            try:
                await member.hear("ready", PREPARE_S)
            except WireError as err:
                raise ServerError(
                    f"{member.name} can't send the load", why=str(err), mend="mend that, or leave it out"
                ) from err
        # A message that is under way when the load begins would make its receiver late.
        start_ns = time.perf_counter_ns() + START_AHEAD_NS + max(member.trip_ns for member in self._members)
        for member in self._members:
            member.channel.tell({"do": "start", "at_ns": start_ns + member.ahead_ns})
        on_start(start_ns)
        if self._stopping:
            self.stop()
        ledgers = [Ledger(job, start_ns, part, self.size) for part in range(self.size)]
        await asyncio.gather(
            *(
                self._follow(part, member, ledger, on_batch)
                for part, (member, ledger) in enumerate(zip(self._members, ledgers, strict=True))
            )
        )
        errors = [await member.clock_error() for member in self._members if member.process is None]
        self.clock_error_ns = max((each for each in errors if each is not None), default=None)
        if len(self.lost) == len(self._members) and not any(ledger.told for ledger in ledgers):
            raise ServerError("the load was not sent", why="; ".join(self.lost), mend="start again")

    def stop(self) -> None:
        """Drop what is under way; what was measured is still handed on, by those who do so in time."""
        self._stopping = True
        if self._here is not None:
            self._here.stop()
        for member in self._members:
            member.channel.tell({"do": "stop"})
        if self._members and self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(
                END_S, self.abandon, f"it did not stop within {END_S:g} s"
            )

    def abandon(self, why: str) -> None:
        """Wait for no process any longer."""
        for member in self._members:
            member.channel.lose(why)

    async def _follow(self, part: int, member: Member, ledger: Ledger, on_batch: Callable[[Batch, int], None]) -> None:
        try:
            while True:
                message, blob = await member.channel.hear()
                if message.get("is") != "batch":
                    continue
                batch = ledger.take(message, blob)
                on_batch(batch, part)
                if batch.ended == "whole" or (batch.ended == "stopped" and self._stopping):
                    return
                if batch.ended:
                    raise WireError("it ended before the load did")
        except WireError as err:
            member.channel.lose(str(err))
            self.lost.append(f"{member.name} was lost: {err}")

    async def _close(self) -> None:
        members, self._members = self._members, []
        await asyncio.gather(*(member.leave() for member in members))


async def _check_shared(job: Job, members: list[Member]) -> None:
    """Whether a load can be shared at all; raises ServerError."""
    far = next((member for member in members if member.elsewhere), None)
    if far is not None and await is_loopback(job.host, unspecified=True):
        raise ServerError(
            f"won't send the load from {far.name}",
            why=f"{job.host} is each machine's own: the worker would send to itself, with the key",
            mend="name the server by an address that the worker reaches it at (with --allow-remote)",
        )
    if job.arrivals is not None and job.connections < len(members):
        raise ServerError(
            f"can't share {job.connections} connections among {len(members)} processes",
            why="each has requests to send, and needs one of its own",
            mend="give more --connections, or fewer processes",
        )
    if len(members) > 1 and job.check is not None and job.check.same:
        raise ServerError(
            "can't expect the same answers from several processes",
            why="each would hold answers against the first of its own, so that two different ones could pass",
            mend="send from one (--processes 1, or one --worker), or give --expect an .npz with the outputs",
        )
