"""torchrun's elastic launch: machines that die, and come back, while a training goes on from what was kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import compress
from tests.unit.compress.training.networks import data, model

SOON = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
PATIENCE = 240.0
AUGMENT = """
import time
from pathlib import Path

def as_they_are(tensors, generator):
    time.sleep(0.1 if Path({slow!r}).exists() else 0)
    while Path({hold!r}).exists():
        time.sleep(0.05)
    return tensors
"""
TRAINING = [
    "finetune", "../student.pt", "--teacher", "../teacher.pt", "--data", "../train.npz", "-o", "out",
    "--epochs", "12", "--batch-size", "32", "--precision", "32", "--augment", "slowly:as_they_are",
    "--checkpoint-seconds", "0.5", "--threads", "1",
]  # fmt: skip


def environ(folder: Path) -> dict[str, str]:
    """Without a store of its own for each round, one that comes back is never told of it: see docs/training.md."""
    more = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return os.environ | more | {"PYTHONPATH": str(folder)}


class Nodes:
    """Machines that train together: an agent of torchrun each, with what it started; "a" has their meeting place.

    Args:
        folder: of the models and the data.
        disks: where each one works, by name.
    """

    def __init__(self, folder: Path, disks: dict[str, Path]) -> None:
        self.folder, self.disks = folder, disks
        self.agents: dict[str, psutil.Popen] = {}
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]

    def begin(self, name: str) -> None:
        rendezvous = [
            "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", "t",
            "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", f"{SOON},is_host={str(name == 'a').lower()}",
        ]  # fmt: skip
        command = [sys.executable, "-m", "compress.cli.elastic", *rendezvous, "--", *TRAINING]
        with (self.folder / f"{name}.log").open("a") as log:
            self.agents[name] = psutil.Popen(
                command, cwd=self.disks[name], env=environ(self.folder), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """As a machine that loses its power."""
        agent = self.agents.pop(name)
        for each in [agent, *agent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        agent.wait()

    def workers(self, since: float = 0.0) -> int:
        """How many processes train that began after that, in seconds since 1970."""
        found = 0
        for agent in self.agents.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += sum(each.create_time() > since for each in agent.children())
        return found

    def kept(self, since: float = 0.0) -> bool:
        """Whether a state lies on a disk that was written after that."""
        found = [path for disk in set(self.disks.values()) for path in disk.glob("out.work/training-*/training.state")]
        return any(path.stat().st_mtime > since for path in found)

    def wait_for(self, true: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not true():
            logs = {path.name: path.read_text()[-3000:] for path in self.folder.glob("*.log")}
            assert time.monotonic() < until, f"{what}: {logs}"
            time.sleep(0.1)


@contextlib.contextmanager
def nodes(folder: Path, disks: dict[str, Path]) -> Iterator[Nodes]:
    found = Nodes(folder, disks)
    try:
        yield found
    finally:
        for name in list(found.agents):
            found.kill(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model(tmp_path, "student", 8)
    model(tmp_path, "teacher", 12)
    data(tmp_path, count=600, noise=2.0)
    (tmp_path / "slowly.py").write_text(AUGMENT.format(slow=str(tmp_path / "slow"), hold=str(tmp_path / "hold")))
    return tmp_path


@pytest.mark.parametrize("storage", ["shared", "apart"])
def test_a_training_goes_on_when_a_machine_dies_comes_back_and_the_one_with_the_meeting_place_dies(
    folder: Path, storage: str
) -> None:
    """Each start takes up the newest state that a machine has, and the end is that of one process alone."""
    disks = {name: folder / (name if storage == "apart" else "both") for name in ("a", "b")}
    for disk in disks.values():
        disk.mkdir(exist_ok=True)
    (folder / "slow").touch()
    with nodes(folder, disks) as two:
        two.begin("a")
        two.begin("b")
        two.wait_for(lambda: two.workers() == 2 and two.kept(), "two train, and keep a state")
        died = time.time()
        two.kill("b")
        two.wait_for(lambda: two.workers(since=died) == 1 and two.kept(since=died), "the one that is left goes on")
        (folder / "hold").touch()
        back = time.time()
        two.begin("b")
        two.wait_for(lambda: two.workers(since=back) == 2, "both are started anew when it is back")
        (folder / "hold").unlink()
        two.wait_for(lambda: two.kept(since=back + 1), "they go on")
        two.kill("a")
        assert two.agents.pop("b").wait(PATIENCE) not in (0, 2), "it is no mistake"
        (folder / "slow").unlink()
        two.begin("a")
        two.begin("b")
        assert [agent.wait(PATIENCE) for agent in two.agents.values()] == [0, 0]
        two.agents.clear()
    outputs = [disk / "out" for disk in set(disks.values()) if (disk / "out").exists()]
    assert len(outputs) == 1, "the first process writes what comes out"
    told = json.loads((outputs[0] / "training.json").read_text())["training"]
    assert told["processes"] == 2
    assert told["resumed_at_step"] > 0
    logs = "".join(path.read_text() for path in folder.glob("?.log"))
    assert "it began anew" not in logs
    assert "the training has lost one of its processes" in logs
    alone = folder / "alone"
    alone.mkdir()
    subprocess.run([sys.executable, "-m", "compress", *TRAINING], cwd=alone, env=environ(folder), check=True)
    one, both = (compress.load(path / "model.pt").module.state_dict() for path in (alone / "out", outputs[0]))
    assert all(torch.allclose(one[name], both[name], rtol=1e-3, atol=1e-4) for name in one)
