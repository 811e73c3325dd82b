"""Claims of `make images-check` about pods' networks, and about commands that end in the middle or come at once."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from compress.errors import ServerError
from deploy.containers.build import ROOT
from deploy.containers.say import say
from deploy.containers.stack import Stack

__all__ = ["apart", "at_once", "bounded", "half_up", "hold", "hung_up", "interrupted"]

WAIT_S = 60.0
# In a container: whether a port answers, and whether somebody tells the address of a name.
REACHES = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"
# Threads, which count as processes do, until it is told to end.
THREADS = """import os, sys, threading
made, stop = 0, threading.Event()
try:
    while made < 100_000:
        threading.Thread(target=stop.wait, daemon=True).start()
        made += 1
except RuntimeError:
    print(made, flush=True)
sys.stdin.read()
os._exit(0)
"""
ONE_MORE = "import threading; threading.Thread(target=int).start()"
NAMES = "import socket, sys; socket.getaddrinfo(sys.argv[1], 80)"


def hold(holds: bool, what: str) -> None:
    """Tell a claim that holds.

    Raises:
        ServerError: it does not.
    """
    if not holds:
        raise ServerError(f"not so: {what}", why="the check found otherwise", mend="look at the lines above")
    say(f"holds: {what}")


def apart(stack: Stack, pod: str) -> None:
    """Triton reaches neither this machine nor a name; nobody but pods reaches what is not published.

    The gateway, whose network has a way out, shows that there is something to be reached.
    """
    gateway, triton = f"{stack.name}-gateway-gateway", f"{pod}-triton"
    (models,) = stack.engine.ask("network", "inspect", f"{stack.name}-models")
    host = models["subnets"][0]["gateway"]
    with socket.create_server(("0.0.0.0", 0)) as listening:  # noqa: S104  as a service of this machine may
        port = str(listening.getsockname()[1])
        hold(_can(stack, gateway, REACHES, host, port), f"this machine answers the gateway at {host}")
        hold(not _can(stack, triton, REACHES, host, port), "it does not answer Triton")
    hold(_can(stack, gateway, NAMES, f"{stack.name}-triton"), "the gateway has names told")
    hold(not _can(stack, triton, NAMES, f"{stack.name}-triton"), "Triton has none: it can't ask for one")
    inside = _addresses(stack, pod)
    hold(not any(_answers(each, 8000) for each in inside), "users of this machine reach Triton by the gateway alone")
    if outer := _outer_address():
        for name, at in ((f"{stack.name}-gateway", 8080), (f"{stack.name}-prometheus", 9090)):
            reached = [each for each in _addresses(stack, name) if _answers(each, at, outer)]
            hold(not reached, f"{name} does not answer who is in none of its networks, as {outer}")


def bounded(stack: Stack, pod: str) -> None:
    """Processes without end in one pod leave the others theirs, though all are of one user."""
    gateway, triton = f"{stack.name}-gateway-gateway", f"{pod}-triton"
    command = [stack.engine.command, "exec", "--interactive", triton, "python3", "-c", THREADS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as endless:
        try:
            told = (endless.stdout.readline() if endless.stdout else "").strip()
            hold(
                told.isdecimal() and not _can(stack, triton, ONE_MORE), f"Triton's pod has an end of processes: {told}"
            )
            hold(_can(stack, gateway, ONE_MORE), "and the gateway is left its own")
        finally:
            if endless.stdin:
                endless.stdin.close()


def half_up(stack: Stack, repository: Path) -> None:
    """An `up` that is killed is no application that runs: a roll says so, and the next `up` begins anew."""
    ports = ("--gateway-port", stack.gateway_port, "--prometheus-port", stack.prometheus_port)
    with _command("up", repository, *ports) as up:
        _wait(lambda: bool(stack.pods()), "its first pod")
        up.kill()
    with _command("roll", repository) as roll:
        told = roll.communicate()[0]
    hold(roll.returncode == 2 and "not finished" in told, "a roll after an `up` that was killed says so")


def hung_up(stack: Stack, repository: Path) -> None:
    """An `up` whose terminal is closed leaves nothing: nobody reads what it says as it takes all away."""
    ports = ("--gateway-port", stack.gateway_port, "--prometheus-port", stack.prometheus_port)
    mine, its = os.openpty()
    command = ["setsid", "--ctty", sys.executable, "-m", "deploy.containers", "up", *map(str, (repository, *ports))]
    with subprocess.Popen(command, cwd=ROOT, stdin=its, stdout=its, stderr=its) as up:
        os.close(its)
        try:
            _wait(lambda: f"{stack.name}-gateway" in stack.pods(), "its gateway")
        finally:
            os.close(mine)
    left = [*stack.pods(), *stack.engine.run("network", "ls", "--format", "{{.Name}}").stdout.split()]
    left = [each for each in left if each.startswith(f"{stack.name}-")]
    hold(up.returncode == 130 and not left, f"an `up` whose terminal is closed leaves nothing: {left}")


def interrupted(stack: Stack, repository: Path) -> None:
    """A roll that is killed as two versions stand is finished by the same command."""
    before = stack.tritons()
    with _command("roll", repository) as roll:
        _wait(lambda: len(stack.tritons()) > len(before), "a second version beside the first")
        roll.kill()
    hold(len(stack.tritons()) > 1, "a roll that was killed leaves two versions")
    with _command("roll", repository) as again:
        told = again.communicate()[0]
    left = stack.tritons()
    hold(not again.returncode and len(left) == 1 and left != before, f"the same command finishes it: {told.strip()}")


def at_once(stack: Stack, one: Path, other: Path) -> None:
    """Of two rolls at once, the second is told who is at it, and changes nothing."""
    with _command("roll", one) as first:
        _wait(lambda: f"process {first.pid}:" in _holder(stack), "the first roll")
        with _command("roll", other) as second:
            told = second.communicate()[0]
        first.communicate()
    hold(second.returncode == 2 and f"process {first.pid}:" in told, "a second roll at once is told who is at it")
    hold(not first.returncode and len(stack.tritons()) == 1, "the first goes on to its end, and one version is left")


def _holder(stack: Stack) -> str:
    with contextlib.suppress(FileNotFoundError):
        return (stack.folder / ".lock").read_text()
    return ""


def _command(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deploy.containers", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait(until: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not until():
        if time.monotonic() > deadline:
            raise ServerError(f"did not see {what}", why=f"{WAIT_S:g} s went by", mend="look at the lines above")
        time.sleep(0.05)


def _can(stack: Stack, container: str, program: str, *given: str) -> bool:
    return stack.engine.run("exec", container, "python3", "-c", program, *given, check=False).returncode == 0


def _addresses(stack: Stack, pod: str) -> list[str]:
    """Of a pod, one in each of its networks."""
    (first,) = stack.engine.run("pod", "inspect", "--format", "{{.InfraContainerID}}", pod).stdout.split()
    (told,) = stack.engine.ask("container", "inspect", first)
    return [each["IPAddress"] for each in told["NetworkSettings"]["Networks"].values()]


def _answers(host: str, port: int, source: str = "") -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 3, (source, 0) if source else None):
        return True
    return False


def _outer_address() -> str:
    """This machine's own towards others; "" where it has none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("192.0.2.1", 9))  # sends nothing
        return str(asked.getsockname()[0])
    return ""
