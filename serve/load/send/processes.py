"""The processes that send a load: this one, children, or workers on other machines; all told the same way."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from compress.errors import ServerError
from compress.host.cores import cores_here
from serve.http.message import Address
from serve.load.ask.target import is_loopback
from serve.load.options import LoadOptions
from serve.load.send.batch import Batch
from serve.load.send.generator import Generator
from serve.load.send.job import Job
from serve.load.send.timer import check_timer
from serve.load.send.wire import MOST_BYTES, WireError, batch_of, pack, read
from serve.load.send.worker import signed

__all__ = ["Processes"]

START_AHEAD_NS = 50_000_000
PINGS = 9
STOP_S = 5.0
JOIN_S = 10.0
HANG_UP_S = 1.0


class Processes:
    """Generator processes, ready for load after load.

    Args:
        options: say how many, or which workers.

    Attributes:
        lost: those that went away, in words.
        clock_error_ns: by how much the workers' clocks may be off, in the load that was sent last; None where one
            machine sends.
    """

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._members: list[_Member] = []
        self._here: Generator | None = None
        self._stopping = False
        self.lost: list[str] = []
        self.clock_error_ns: int | None = None

    @property
    def size(self) -> int:
        return max(len(self._members), 1)

    async def __aenter__(self) -> Self:
        check_timer()
        try:
            if self._options.worker:
                context = _context(self._options)
                for number, text in enumerate(self._options.worker):
                    self._members.append(await _join(text, self._options, number, context))
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
                    self._members.append(await _start(number, cpu))
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
            ServerError: no process can send it.
        """
        self._stopping = False
        self.lost = []
        if not self._members:
            self._here = Generator(job, lambda batch: on_batch(batch, 0))
            await self._here.prepare()
            start_ns = time.perf_counter_ns() + START_AHEAD_NS
            on_start(start_ns)
            if not self._stopping:
                await self._here.run(start_ns)
            return
        data, blob = job.to_wire()
        for part, member in enumerate(self._members):
            member.tell({"do": "prepare", "job": data, "part": part, "parts": len(self._members)}, blob)
        for member in self._members:
            answer = await member.hear("ready")
            if answer is None:
                raise ServerError(
                    f"{member.name} can't send the load", why=member.why, mend="mend that, or leave it out"
                )
        start_ns = time.perf_counter_ns() + START_AHEAD_NS
        for member in self._members:
            member.tell({"do": "start", "at_ns": start_ns + member.ahead_ns})
        on_start(start_ns)
        if self._stopping:
            self.stop()
        await asyncio.gather(*(self._follow(part, member, on_batch) for part, member in enumerate(self._members)))
        errors = [await member.clock_error() for member in self._members if member.process is None]
        self.clock_error_ns = max((each for each in errors if each is not None), default=None)
        if len(self.lost) == len(self._members):
            raise ServerError("the load was not sent", why="; ".join(self.lost), mend="start again")

    def stop(self) -> None:
        """Drop what is under way; what was measured is still handed on."""
        self._stopping = True
        if self._here is not None:
            self._here.stop()
        for member in self._members:
            member.tell({"do": "stop"})

    async def _follow(self, part: int, member: _Member, on_batch: Callable[[Batch, int], None]) -> None:
        while True:
            try:
                message, blob = await read(member.reader)
            except WireError as err:
                self.lost.append(f"{member.name} was lost: {err}")
                return
            if message.get("is") != "batch":
                continue
            batch = batch_of(message, blob)
            on_batch(batch, part)
            if batch.done:
                return

    async def _close(self) -> None:
        members, self._members = self._members, []
        await asyncio.gather(*(_hang_up(member.writer) for member in members))
        for member in members:
            if member.process is not None:
                try:
                    await asyncio.to_thread(member.process.wait, STOP_S)
                except subprocess.TimeoutExpired:
                    member.process.kill()
                    await asyncio.to_thread(member.process.wait)


class _Member:
    """One process.

    Attributes:
        ahead_ns: its clock's time less ours, to half of `trip_ns`, the shortest round trip.
    """

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.name = name
        self.reader = reader
        self.writer = writer
        self.process = process
        self.ahead_ns = 0
        self.trip_ns = 0
        self.why = ""

    def tell(self, message: dict[str, Any], blob: bytes = b"") -> None:
        self.writer.write(pack(message, blob))

    async def hear(self, kind: str) -> dict[str, Any] | None:
        """The next message if it is of this kind; else None, and `why` tells."""
        try:
            message, _ = await read(self.reader)
        except WireError as err:
            self.why = str(err)
            return None
        if message.get("is") != kind:
            self.why = str(message.get("why", "it speaks another language"))
            return None
        return message

    async def compare_clocks(self) -> None:
        """Learn how far its clock is ahead, to half of the shortest round trip (Cristian 1989).

        Raises:
            ServerError: it does not answer.
        """
        best: tuple[int, int] | None = None
        for _ in range(PINGS):
            before = time.perf_counter_ns()
            self.tell({"do": "clock"})
            try:
                message = await self.hear("clock")
            except BaseException:
                self.writer.close()
                raise
            after = time.perf_counter_ns()
            if message is None:
                raise ServerError(f"{self.name} does not answer", why=self.why, mend="start it again")
            ahead = int(message["ns"]) - (before + after) // 2
            if best is None or after - before < best[0]:
                best = (after - before, ahead)
        assert best is not None  # noqa: S101
        self.trip_ns, self.ahead_ns = best

    async def clock_error(self) -> int | None:
        """By how much its schedule may have been off: how far the clocks drifted since they were compared, and half of
        both round trips. None where it is gone. They are as compared now for the next load.
        """
        before, trip = self.ahead_ns, self.trip_ns
        try:
            await self.compare_clocks()
        except (ServerError, ConnectionError):
            return None
        return abs(self.ahead_ns - before) + (trip + self.trip_ns) // 2


async def _start(number: int, cpu: int | None) -> _Member:
    """A child process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "serve.load.send.worker", str(theirs.fileno())]
    process = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        command if cpu is None else [*command, str(cpu)],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    try:
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_BYTES)
        member = _Member(f"generator process {number + 1}", reader, writer, process)
        await member.compare_clocks()
    except BaseException:  # Ctrl-C, too: nobody else knows of it yet
        process.kill()
        process.wait()
        raise
    member.ahead_ns = 0  # one machine has one clock
    return member


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a connection, and see to it that it is: TLS says farewell first, which an event loop that ends cuts off."""
    writer.close()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(HANG_UP_S):
            await writer.wait_closed()
    writer.transport.abort()


def _context(options: LoadOptions) -> ssl.SSLContext | None:
    """For TLS to the workers; None without. Raises ServerError."""
    if options.worker_ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(options.worker_ca))
    except (OSError, ssl.SSLError) as err:
        raise ServerError(
            f"can't use {options.worker_ca}", why=str(err),
            mend="name a PEM file with the workers' certificates, or with that of whoever signed them",
        ) from err  # fmt: skip


async def _join(text: str, options: LoadOptions, number: int, context: ssl.SSLContext | None) -> _Member:
    """A worker that listens."""
    mend = "start it there (`serve load worker`), and name it as host:port"
    try:
        address = Address.parse(f"http://{text}")
        await asyncio.get_running_loop().getaddrinfo(address.host, address.port)  # it is somewhere
        if context is None and not options.worker_plain and not await is_loopback(address.host):
            raise ServerError(
                f"won't send the load to the worker {text} unencrypted",
                why="the requests that it is to send go there, with the key that they carry",
                mend="start it with --tls-certificate and --tls-key, and give --worker-ca; or say --worker-plain",
            )
        async with asyncio.timeout(JOIN_S):
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=MOST_BYTES, ssl=context)
    except ssl.SSLError as err:
        mend = "let its certificate name that address, and give --worker-ca the file that vouches for it"
        if context is not None and "WRONG_VERSION" in str(err):
            mend = "start it with --tls-certificate and --tls-key"
        raise ServerError(f"can't trust the worker {text}", why=str(err), mend=mend) from err
    except (ValueError, OSError, TimeoutError) as err:
        raise ServerError(f"can't reach the worker {text}", why=str(err) or "no answer", mend=mend) from err
    member = _Member(f"worker {number + 1} ({text})", reader, writer)
    try:
        async with asyncio.timeout(JOIN_S):
            greeting = await member.hear("worker")
    except TimeoutError:
        greeting, member.why = None, "it says nothing"
    if greeting is not None:
        member.tell({"signed": signed(options.token, str(greeting["challenge"]))})
        greeting = await member.hear("welcome")
    if greeting is None:
        await _hang_up(writer)
        mend = "set the same SERVE_LOAD_TOKEN for both"
        if context is None and ("closed" in member.why or "nothing" in member.why):
            mend += "; or give --worker-ca, where it speaks TLS"
        raise ServerError(f"the worker {text} won't work for us", why=member.why, mend=mend)
    await member.compare_clocks()
    return member
