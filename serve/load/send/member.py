"""One generator process as its coordinator sees it: started here as a child, or joined where it listens."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.errors import ServerError
from serve.http.message import Address
from serve.load.ask.target import is_loopback
from serve.load.options import LoadOptions
from serve.load.send.channel import Channel
from serve.load.send.greeting import BUSY, COORDINATOR, SPEAKS, TOKEN, WORKER, place, same, signed
from serve.load.send.wire import WireError

__all__ = ["Member", "join", "start", "tls_to_workers"]

PINGS = 9
STOP_S = 5.0
START_S = 60.0
"""For a child to be there: its interpreter and libraries are read from a disk, on a machine that may be busy."""
JOIN_S = 10.0
RETRY_S = 1.0
AGAIN = "start it again"
START_IT = "start it there (`serve load worker`), and name it as host:port"


class Member:
    """One process.

    Attributes:
        name: in an error.
        channel: to it.
        elsewhere: whether it has another loopback than this process.
        ahead_ns: its clock's time less ours, to half of `trip_ns`, the shortest round trip.
    """

    def __init__(self, name: str, channel: Channel, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name = name
        self.channel = channel
        self.process = process
        self.elsewhere = False
        self.ahead_ns = 0
        self.trip_ns = 0

    async def hear(self, kind: str, silence_s: float | None = None) -> Mapping[str, Any]:
        """The next message, which must be of this kind.

        Raises:
            WireError: it is another one, or none comes.
        """
        message, _ = await self.channel.hear(silence_s=silence_s)
        if message.get("is") != kind:
            raise WireError(_told(message))
        return message

    async def compare_clocks(self, silence_s: float | None = None) -> None:
        """Learn how far its clock is ahead, to half of the shortest round trip (Cristian 1989).

        Raises:
            WireError: it does not answer.
        """
        found: list[tuple[int, int]] = []
        for _ in range(PINGS):
            before = time.perf_counter_ns()
            self.channel.tell({"do": "clock"})
            ns = (await self.hear("clock", silence_s)).get("ns")
            after = time.perf_counter_ns()
            if type(ns) is not int:
                raise WireError("it does not say what its clock shows")
            found.append((after - before, ns - (before + after) // 2))
        self.trip_ns, self.ahead_ns = min(found)

    async def clock_error(self) -> int | None:
        """By how much its schedule may have been off: how far the clocks drifted since they were compared, and half of
        both round trips. None where it is gone. They are as compared now for the next load.
        """
        before, trip = self.ahead_ns, self.trip_ns
        try:
            await self.compare_clocks()
        except WireError:
            return None
        return abs(self.ahead_ns - before) + (trip + self.trip_ns) // 2

    async def leave(self) -> None:
        """Hang up, and see to it that a child ends."""
        await self.channel.close()
        if self.process is not None:
            try:
                await asyncio.to_thread(self.process.wait, STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                await asyncio.to_thread(self.process.wait)


def _told(message: Mapping[str, Any]) -> str:
    why = message.get("why")
    return why if message.get("is") == "failed" and isinstance(why, str) else "it speaks another language"


async def start(number: int, cpu: int | None) -> Member:
    """A child process.

    Raises:
        ServerError: it does not come up.
    """
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
        member = Member(f"generator process {number + 1}", Channel(*await asyncio.open_connection(sock=ours)), process)
        member.channel.beat()
        await member.compare_clocks(START_S)
    except BaseException as err:  # Ctrl-C, too: nobody else knows of it yet
        process.kill()
        process.wait()
        if isinstance(err, WireError):
            raise ServerError(
                f"{member.name} does not answer", why=str(err), mend="look at what it printed, and start again"
            ) from err
        raise
    member.ahead_ns = 0  # one machine has one clock
    return member


def tls_to_workers(file: Path | None) -> ssl.SSLContext | None:
    """For TLS to the workers; None without. Raises ServerError."""
    if file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(file))
    except (OSError, ssl.SSLError) as err:
        raise ServerError(
            f"can't use {file}", why=str(err),
            mend="name a PEM file with the workers' certificates, or with that of whoever signed them",
        ) from err  # fmt: skip


async def join(text: str, options: LoadOptions, number: int, context: ssl.SSLContext | None, *, until: float) -> Member:
    """A worker that listens.

    Args:
        until: a time of `time.monotonic`, up to which one that is not there, or busy, is tried again.

    Raises:
        ServerError: it can't be reached or trusted, or does not work for us.
    """
    while True:
        try:
            return await _join(text, options, number, context)
        except _LaterError as err:
            if time.monotonic() + RETRY_S > until:
                raise ServerError(err.what, why=err.why, mend=err.mend) from err
            await asyncio.sleep(RETRY_S)


class _LaterError(ServerError):
    """What time may mend."""


async def _join(text: str, options: LoadOptions, number: int, context: ssl.SSLContext | None) -> Member:
    try:
        address = Address.parse(f"http://{text}")
    except ValueError as err:
        raise ServerError(f"can't reach the worker {text}", why=str(err), mend=START_IT) from err
    try:
        await asyncio.get_running_loop().getaddrinfo(address.host, address.port)  # it is somewhere
        if not await is_loopback(address.host):
            _check_remote(text, options, context)
        async with asyncio.timeout(JOIN_S):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    except ssl.SSLError as err:
        mend = "let its certificate name that address, and give --worker-ca the file that vouches for it"
        if context is not None and "WRONG_VERSION" in str(err):
            mend = "start it with --tls-certificate and --tls-key"
        raise ServerError(f"can't trust the worker {text}", why=str(err), mend=mend) from err
    except (OSError, TimeoutError) as err:
        raise _LaterError(f"can't reach the worker {text}", why=str(err) or "no answer", mend=START_IT) from err
    member = Member(f"worker {number + 1} ({text})", Channel(reader, writer))
    try:
        await _greet(member, text, options.token, plain=context is None)
    except BaseException:
        await member.channel.close()
        raise
    return member


def _check_remote(text: str, options: LoadOptions, context: ssl.SSLContext | None) -> None:
    """What a worker on another machine takes; raises ServerError."""
    if context is None and not options.worker_plain:
        raise ServerError(
            f"won't send the load to the worker {text} unencrypted",
            why="the requests that it is to send go there, with the key that they carry",
            mend="start it with --tls-certificate and --tls-key, and give --worker-ca; or say --worker-plain",
        )
    if not options.token:
        raise ServerError(
            f"won't send the load to the worker {text} without a token",
            why="nothing else says that it is yours",
            mend="set SERVE_LOAD_TOKEN to the same long random text here and there",
        )


async def _greet(member: Member, text: str, token: str, *, plain: bool) -> None:
    """Show each other that both know the token, before anything else is said.

    Raises:
        ServerError: it does not, we do not, or it does not answer.
    """
    mend = "set the same SERVE_LOAD_TOKEN for both"
    try:
        greeting = await member.hear("worker", JOIN_S)
        theirs, ours = str(greeting.get("challenge", "")), secrets.token_hex(16)
        if greeting.get("speaks") != SPEAKS:
            raise ServerError(
                f"the worker {text} won't work for us", why="it is of another version", mend="install the same on both"
            )
        member.channel.tell({"signed": signed(token, COORDINATOR, theirs, ours), "challenge": ours})
        message, _ = await member.channel.hear(silence_s=JOIN_S)
        if message.get("is") != "welcome":
            if message.get("about") == BUSY:
                raise _LaterError(
                    f"the worker {text} won't work for us", why=_told(message),
                    mend="wait until that has ended (--worker-wait), or start another one",
                )  # fmt: skip
            mend = mend if message.get("about") == TOKEN else AGAIN
            raise WireError(_told(message))
        if not same(message.get("signed"), signed(token, WORKER, theirs, ours)):
            raise ServerError(
                f"won't send the load to the worker {text}",
                why="it does not know the token, so that it is somebody else's",
                mend="look what listens there; " + mend,
            )
        mend, here = AGAIN, place()
        member.elsewhere = not here or message.get("place") != here
        member.channel.beat()
        await member.compare_clocks()
    except WireError as err:
        if plain and mend != AGAIN and ("closed" in str(err) or "nothing" in str(err)):
            mend += "; or give --worker-ca, where it speaks TLS"
        raise ServerError(f"the worker {text} won't work for us", why=str(err), mend=mend) from err
