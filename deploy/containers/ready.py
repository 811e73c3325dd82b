"""Waiting for what was started, and what it said where it does not come."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable

from compress.errors import ServerError
from deploy.containers.engine import Engine
from deploy.containers.say import say

__all__ = ["READY_S", "answers", "reasons", "until_ready", "within"]

READY_S = 120.0
ENDS = 2  # that a container came to: once may be chance, and one that ends again and again will not come up
LOOK_EACH_S = 0.2
# What Triton gives as a reason stands far above its last lines; tables follow, and in the next start all of it again.
ERROR = re.compile(r"^E\d{4} \S+ \d+ \S+\] ")
FAILED = re.compile(r"failed to load '.*' version .*")
BACKEND = '"CudaDriverHelper has not been initialized."'  # without a GPU Triton says so each time, as an error
MOST = 20  # lines that are shown
WIDEST = 400  # of each


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold in that time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EACH_S)
    return True


def answers(url: str) -> bool:
    """Whether somebody answers there that all is well."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  on this machine
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def until_ready(engine: Engine, ready: Callable[[], bool], what: str, container: str, mend: str = "") -> None:
    """Wait until it is ready: no longer than that may take, and not for what ends again and again.

    Args:
        engine: Podman.
        ready: whether it is.
        what: waits for it, as it is called.
        container: whose it is.
        mend: what else may help.

    Raises:
        ServerError: it is not; what it said stands above.
    """
    before = _ends(engine, container)
    ended = False

    def settled() -> bool:
        nonlocal ended
        if ready():
            return True
        ended = _ends(engine, container) >= before + ENDS
        return ended

    if within(READY_S, settled) and not ended:
        return
    said = engine.run("logs", container, check=False)
    lines = (said.stdout + said.stderr).splitlines()
    found = reasons(lines)
    say("\n".join(line[:WIDEST] for line in found[:MOST] or lines[-MOST:]), error=True)
    why = f"it ended {ENDS} times" if ended else f"not ready after {READY_S:g} s"
    if why_not := next(filter(None, map(FAILED.search, found)), None):
        why += f": {why_not[0][:WIDEST]}"
    raise ServerError(
        f"can't bring {what} up", why=why, mend="; ".join(each for each in ("see what it said above", mend) if each)
    )


def reasons(lines: Iterable[str]) -> list[str]:
    """What a server says is wrong, once each, without when it was said and Python's way to it."""
    wrong = (line for line in lines if ERROR.match(line) or FAILED.search(line))
    told = (ERROR.sub("", line).partition(r"\n\nAt:")[0] for line in wrong)
    return list(dict.fromkeys(text for text in told if text != BACKEND))


def _ends(engine: Engine, container: str) -> int:
    """How often Podman has started it again; 0 where it can't tell."""
    told = engine.run("inspect", "--format", "{{.RestartCount}}", container, check=False).stdout.strip()
    return int(told) if told.isdecimal() else 0
