"""A connection to a cluster that this machine is a node of; one that can't be had is told within seconds."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from compress.errors import MissingExtraError, RecipeError, ServerError

__all__ = ["answers_at", "behind", "connected", "ray_of", "split_address"]

ANSWERS = 3.0  # seconds that a port may take to take a connection
JOINS = 30.0  # and Ray to let this process in; where nothing of Ray answers, it would try for over a minute
VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")
MEND = "start one with `ray start --head`, and name what it prints: --ray HOST:PORT"
# Tried in a process of its own: Ray ends the process that it can't connect.
TRIAL = """
import logging, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL, configure_logging=False)
"""


def ray_of() -> Any:
    """Ray, which tells nobody of its use.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError as err:
        raise MissingExtraError("can't work on a Ray cluster", module="ray", extra="ray") from err
    return ray


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        RecipeError: it is no such address.
    """
    host, _, port = address.rpartition(":")
    if address.startswith("ray://"):
        raise RecipeError(
            f"--ray can't be {address}",
            why="it is Ray Client's, which has its work done by a process elsewhere; this command works where it is",
            mend="join this machine to the cluster (`ray start --address HOST:PORT --num-cpus 0`), and give HOST:PORT",
        )
    if not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", host) or not port.isdecimal() or not 0 < int(port) < 65536:
        why = "it has to be the host and the port of a cluster's head, as `ray start --head` prints them"
        raise RecipeError(f"--ray can't be {address!r}", why=why, mend="give it as 10.0.0.5:6379")
    return host.strip("[]"), int(port)


def answers_at(address: str) -> bool:
    """Whether something takes connections at the head's address."""
    try:
        _touch(address)
    except ServerError:
        return False
    return True


def _touch(address: str) -> None:
    try:
        socket.create_connection(split_address(address), ANSWERS).close()
    except (OSError, UnicodeError) as err:
        raise ServerError(f"can't reach the Ray cluster at {address}", why=str(err), mend=MEND) from err


def behind(err: Exception) -> str:
    """What is behind an error of Ray's that a node gave: a module that is missing there, mostly."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else type(err).__name__)[:400]


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Within it, this process may give tasks to the cluster; at the end, whatever of it still runs there ends.

    Args:
        address: of the head.

    Raises:
        RecipeError, ServerError: nothing of that kind answers, or another release does.
        MissingExtraError: Ray is not installed.
    """
    split_address(address)  # before Ray is asked for
    ray = ray_of()
    _touch(address)
    _try(address)
    ends = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, configure_logging=False)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ends)  # Ray's own ends the process by an abort
    try:
        yield ray
    finally:
        with contextlib.suppress(Exception):  # the cluster may be gone by now; its word would hide why
            ray.shutdown()


def _try(address: str) -> None:
    what = f"can't reach the Ray cluster at {address}"
    try:
        tried = subprocess.run(
            [sys.executable, "-P", "-c", TRIAL, address], capture_output=True, text=True, timeout=JOINS,
            errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as err:
        why = f"something takes connections there, and does not answer as Ray does within {JOINS:g} s"
        raise ServerError(what, why=why, mend=MEND) from err
    if tried.returncode == 0:
        return
    if "ersion mismatch" in tried.stderr and (found := VERSIONS.findall(tried.stderr)):
        there, here = found[0], (version("ray"), ".".join(map(str, sys.version_info[:3])))
        raise ServerError(
            f"can't work on the Ray cluster at {address}",
            why=f"it runs Ray {there[0]} on Python {there[1]}, this is Ray {here[0]} on Python {here[1]}",
            mend="install the same releases on all machines, as constraints.txt pins them",
        )
    lines = [line.strip() for line in tried.stderr.splitlines() if line.strip()]
    why = lines[-1][:400] if lines else f"Ray ended with {tried.returncode}"
    mend = f"run it on a machine of the cluster: `ray start --address {address} --num-cpus 0` makes this one such"
    raise ServerError(what, why=why, mend=mend)
