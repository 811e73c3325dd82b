"""Workers on the nodes of a Ray cluster, for as long as a load lasts: placed, started and ended by Ray.

What is sent, and how it is added up, is as with workers that were started by hand: the load goes from here to each of
them over TLS, with a certificate and a token that were made for this load.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

import orjson

from compress.cluster.connect import behind, connected
from compress.errors import ServerError
from serve.load.options import LoadOptions
from serve.load.send.certificate import certificate_for
from serve.load.send.worker import listen

__all__ = ["workers_on_ray"]

START_S = 60.0  # for Ray to begin a process, and for that to begin another
LISTENS = " over TLS at "
ENDS_S = 5.0


@contextmanager
def workers_on_ray(options: LoadOptions) -> Iterator[LoadOptions]:
    """The options with the workers that the cluster has until the block ends; as they are where they name no cluster.

    Raises:
        RecipeError, ServerError: the cluster can't be reached, or can't have as many workers.
        MissingExtraError: Ray, or what makes certificates, is not installed.
    """
    if not options.ray:
        if options.ray_workers:
            raise ServerError(
                "can't send from the nodes of a cluster",
                why="--ray-workers is given, and no cluster",
                mend="give --ray HOST:PORT, or leave --ray-workers out (--processes sends from this machine)",
            )
        yield options
        return
    if options.worker:
        raise ServerError(
            "can't send from two kinds of workers", why="--worker and --ray are given", mend="leave out one of them"
        )
    with connected(options.ray) as ray, TemporaryDirectory(prefix="serve-load-") as name:
        nodes = _nodes(ray, options)
        token = secrets.token_urlsafe(32)
        certificate, key = certificate_for({node["NodeManagerAddress"] for node in nodes})
        given = {"token": token, "certificate": certificate, "key": key, "allow_remote": options.allow_remote}
        ca = Path(name) / "workers.pem"
        ca.write_bytes(certificate.encode())
        actors = [_actor(ray, node["NodeID"]) for node in nodes]
        addresses = _started(ray, nodes, actors, given)
        try:
            yield options.with_(worker=tuple(addresses), worker_ca=ca, worker_plain=False, token=token)
        finally:
            for actor in actors:
                ray.kill(actor)


def _nodes(ray: Any, options: LoadOptions) -> list[Mapping[str, Any]]:
    """Where each worker goes: to all nodes that have a core, in turn."""
    nodes = [(node, int(node["Resources"].get("CPU", 0))) for node in ray.nodes() if node["Alive"]]
    able = [(node, cores) for node, cores in nodes if cores]
    turns = range(max((cores for _, cores in able), default=0))
    places = [node for turn in turns for node, cores in able if cores > turn]
    wanted = options.ray_workers or len(able)
    if not wanted or wanted > len(places):
        raise ServerError(
            f"the Ray cluster at {options.ray} can't have so many workers",
            why=f"each takes a core: {max(wanted, 1)} of {len(places)} on nodes that do work",
            mend="ask for fewer (--ray-workers), or let more nodes join (`ray start --address`)",
        )
    return places[:wanted]


def _actor(ray: Any, node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy=there)(_Node).remote()


def _started(
    ray: Any, nodes: Sequence[Mapping[str, Any]], actors: Sequence[Any], given: Mapping[str, Any]
) -> list[str]:
    hosts = [node["NodeManagerAddress"] for node in nodes]
    asked = [actor.start.remote({**given, "host": host}) for actor, host in zip(actors, hosts, strict=True)]
    ports = []
    for host, each in zip(hosts, asked, strict=True):
        try:
            ports.append(ray.get(each, timeout=START_S))
        except ray.exceptions.GetTimeoutError as err:
            why = f"it did not come up within {START_S:g} s: all cores of the node may have work"
            mend = "wait until that is done, or ask for fewer (--ray-workers)"
            raise ServerError(f"the node {host} has no worker", why=why, mend=mend) from err
        except ray.exceptions.RayError as err:
            mend = "install this project there, as here, with the extras `load` and `ray`, and start Ray there anew"
            raise ServerError(f"the node {host} has no worker", why=behind(err), mend=mend) from err
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]


class _Node:
    """On a node: holds the worker, which ends with it, however it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, given: Mapping[str, Any]) -> int:
        """The port that it listens at."""
        command = [sys.executable, "-P", "-m", "serve.load.send.on_ray"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._process = process
        stdin, stdout, stderr = (cast("IO[bytes]", each) for each in (process.stdin, process.stdout, process.stderr))
        stdin.write(orjson.dumps(given) + b"\n")
        stdin.flush()
        line = stdout.readline().decode()
        if LISTENS not in line:
            told = stderr.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(told[-1] if told else "the worker did not start")
        for stream in (stdout, stderr):
            threading.Thread(target=stream.read, daemon=True).start()
        return int(line.rpartition(":")[2])


def main() -> None:
    """A worker that is told by its standard input what it may do, and ends when that does."""
    given = orjson.loads(sys.stdin.buffer.readline())

    def follow() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(2 * ENDS_S, os._exit, (1,)).start()

    with TemporaryDirectory(prefix="serve-load-") as name:
        files = []
        for kind in ("certificate", "key"):
            path = Path(name) / f"{kind}.pem"
            path.touch(mode=0o600)
            path.write_text(given[kind])
            files.append(path)
        threading.Thread(target=follow, daemon=True).start()

        def tell(text: str) -> None:
            if LISTENS in text:  # they have been read; Ray's kill would leave them here
                shutil.rmtree(name, ignore_errors=True)
            print(text, flush=True)

        listen(
            given["host"], 0, token=given["token"], allow_remote=given["allow_remote"], tls=(files[0], files[1]),
            on_event=tell,
        )  # fmt: skip


if __name__ == "__main__":
    main()
