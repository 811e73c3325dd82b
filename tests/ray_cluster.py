"""A real Ray cluster on this machine, of some raylets with a core each, in processes of its own.

`python -m tests.ray_cluster 3 "" 1 0` starts it, and is told by lines: `kill N` ends node N at once, `busy` one that has a task,
`add NAME=VALUE` starts one more with that in its environment, `blind FOLDER` one that has an empty folder there; the end of its input ends all.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ON_RAY = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra `ray`"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
"""Marks of tests on it."""
ROOT = Path(__file__).parents[1]
STORE = 80_000_000  # bytes, about the least that Ray takes
# Ray starts its workers at a low priority, where a machine with other work to do hardly gets to them.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_worker_niceness": "0"}
# There, a raylet that does not answer in 10 s is taken for dead, and ends; one that has ended refuses at once.
QUIET |= {"RAY_health_check_timeout_ms": "60000"}


class Running:
    """A cluster that runs.

    Attributes:
        address: of its head.
        process: that holds it.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("> "):
                return line[2:].strip()
        raise RuntimeError(f"the cluster ended with {self.process.wait(10)}")

    def _tell(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._line()

    def kill(self, node: int) -> None:
        """End a node and all that runs there, as when its machine loses power."""
        self._tell(f"kill {node}")

    def kill_busy(self) -> int:
        """End a node, not the head, in the middle of a task; gives its number, or -1 where none has one."""
        return int(self._tell("busy"))

    def add(self, **environ: str) -> int:
        """One node more; gives its number."""
        return int(self._tell("add " + " ".join(f"{name}={value}" for name, value in environ.items())))

    def add_blind(self, folder: Path) -> None:
        """One node more, to which an empty folder stands in place of this one."""
        self._tell(f"blind {folder}")

    def tasks(self) -> list[int]:
        """Processes that work at a task of this project's."""
        return _tasks(self.process.pid)


def _tasks(parent: int) -> list[int]:
    found = []
    for each in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):
            if each.cmdline()[:1] in (["ray::_branch"], ["ray::_thinned"]):
                found.append(each.pid)
    return found


@contextmanager
def ray_cluster(nodes: int = 3, *, ray_version: str = "", cpus: int = 1, gpus: int = 0) -> Iterator[Running]:
    """A cluster for as long as the block runs.

    Args:
        nodes: how many.
        ray_version: that it says it is of; its own by default.
        cpus: of each node.
        gpus: that each says it has.
    """
    command = [sys.executable, "-m", "tests.ray_cluster", *map(str, (nodes, ray_version, cpus, gpus))]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        env=os.environ | QUIET, start_new_session=True,
    )  # fmt: skip
    try:
        yield Running(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(20)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()


def _serve(count: int, version: str, cpus: int, gpus: int) -> None:
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets of Ray lie deep in it: it has to be short
    os.environ["RAY_TMPDIR"] = folder
    (Path(folder) / "ray").mkdir()
    import ray
    from ray.cluster_utils import Cluster

    if version:
        ray.__version__ = version
    own: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**own, "include_dashboard": False})
    others: list[subprocess.Popen[bytes]] = []
    gone = 0
    try:
        nodes = [cluster.head_node, *(cluster.add_node(**own) for _ in range(count - 1))]
        print(f"> {cluster.address}", flush=True)
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "kill":
                cluster.remove_node(nodes[int(rest[0])], allow_graceful=False)
                gone += 1
                print("> done", flush=True)
            elif word == "busy":
                raylets = [node.all_processes["raylet"][0].process for node in nodes]
                at = [n for n, each in enumerate(raylets) if n and each.poll() is None and _tasks(each.pid)]
                if at:
                    cluster.remove_node(nodes[at[0]], allow_graceful=False)
                    gone += 1
                print(f"> {at[0] if at else -1}", flush=True)
            elif word == "blind":
                apart = f'mount -t tmpfs none "$0" && exec "$@" --address={cluster.address} --num-cpus=1 --block'
                ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--object-store-memory={STORE}"]
                others.append(
                    subprocess.Popen(["/usr/bin/unshare", "-m", "sh", "-c", apart, *rest, *ray_start], stdout=2)
                )
                cluster.connect()
                while sum(node["Alive"] for node in ray.nodes()) <= len(nodes) - gone:
                    time.sleep(0.1)
                ray.shutdown()
                print("> done", flush=True)
            elif word == "add":
                environ: Mapping[str, str] = dict(each.split("=", 1) for each in rest)
                nodes.append(cluster.add_node(**own, env_vars=environ))
                print(f"> {len(nodes) - 1}", flush=True)
    finally:
        for each in others:
            each.terminate()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
