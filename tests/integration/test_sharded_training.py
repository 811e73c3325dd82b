"""Trainings whose processes keep a part of every weight: as one process trains, and gone on with by any number."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.data.dataset import Dataset
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.training.finetune import Finetune
from tests.integration.test_training import ENVIRONMENT, command, run
from tests.unit.compress.training.networks import data, model, two_headed

IN_PARTS = ("--strategy", "fsdp", "--threads", "1", "--precision", "32")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    model(tmp_path, "student", 8)
    model(tmp_path, "teacher", 12)
    data(tmp_path, count=600, noise=2.0)
    return tmp_path


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5) for name in one)


@pytest.mark.parametrize(
    "more", [(), ("--ema", "0.9", "--hold-out", "0.5"), ("--feature-weight", "0.5", "--accumulate", "2")]
)
def test_processes_with_parts_compute_what_one_does(folder: Path, more: tuple[str, ...]) -> None:
    """Batch normalization sees the whole batch; 300 samples that are held out are no equal number of batches."""
    options = (*IN_PARTS, "--teacher", str(folder / "teacher.pt"), "--epochs", "2", "--batch-size", "32", *more)
    one, two = run(folder, "one", *options), run(folder, "two", *options, "--devices", "2")
    assert close(one, two)
    told = json.loads((folder / "two/training.json").read_text())["training"]
    assert (told["processes"], told["strategy"]) == (2, "fsdp")
    alone = json.loads((folder / "one/training.json").read_text())["training"]
    assert told.get("best_value") == pytest.approx(alone.get("best_value"))


def test_what_no_label_teaches_keeps_its_weights_in_parts_too(folder: Path) -> None:
    student = two_headed(folder, "student", 1)
    opened = Dataset.open(str(folder / "train.npz"), student.signature)

    def trained(devices: int) -> dict[str, torch.Tensor]:
        asked = TrainingOptions(strategy="fsdp", devices=devices, epochs=2, batch_size=99, train_precision="32")
        work = folder / f"work{devices}"
        work.mkdir()
        given = Finetune(opened, None, asked).run(student, work, lambda _d, _t, _n: None)
        assert isinstance(given.model, TorchModel)
        return given.model.module.state_dict()

    assert close(trained(1), trained(2))


def test_another_number_of_processes_goes_on_where_those_that_were_killed_were(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    options = (
        *IN_PARTS, "--teacher", str(folder / "teacher.pt"), "--epochs", "12", "--batch-size", "48", "--hold-out", "0.1",
        "--ema", "0.9",
    )  # fmt: skip
    whole = run(folder, "whole", *options)
    killed = subprocess.Popen(
        command(folder, "killed", *options, "--devices", "2", "--checkpoint-seconds", "0"), env=ENVIRONMENT, stderr=subprocess.PIPE
    )  # fmt: skip
    kept: set[int] = set()
    while killed.poll() is None and len(kept) < 3:
        kept.update(path.stat().st_mtime_ns for path in (folder / "killed.work").glob("*/training.state"))
        time.sleep(0.003)
    killed.kill()
    killed.communicate()
    assert not (folder / "killed").exists(), "it was still at work"
    for then in (1,) if request.config.getoption("--short") else (1, 3):
        shutil.copytree(folder / "killed.work", folder / f"with{then}.work")
        again = run(folder, f"with{then}", *options, "--devices", str(then))
        told = json.loads((folder / f"with{then}/training.json").read_text())["training"]
        assert told["resumed_at_step"] > 0
        assert told["processes"] == then
        assert close(whole, again)


def test_each_process_keeps_its_part_alone(tmp_path: Path) -> None:
    """Of the weights and of what the optimizer keeps for them, half each."""
    program = tmp_path / "parts.py"
    program.write_text(PARTS)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)],
        capture_output=True, text=True, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [{"weights": 0.5, "optimizer": 0.5, "units": 5}] * 2


PARTS = """\
import json

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from compress.training.machine.sharded import local, shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.mixed = nn.MultiheadAttention(32, 4, batch_first=True)  # never calls its own layer
        self.twice = nn.Linear(32, 32)
        self.last = nn.Linear(32, 64)

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = block(x).relu()
        x = self.mixed(x, x, x, need_weights=False)[0]
        return self.last(self.twice(self.twice(x)))


distributed.init_process_group("gloo")
net = Net()
total = sum(weight.numel() for weight in net.parameters())
x = torch.arange(12).view(2, 6)
shard(net, init_device_mesh("cpu", (2,)), lambda: net(x))
optimizer = torch.optim.AdamW(net.parameters())
net(x).sum().backward()
optimizer.step()
kept = [state["exp_avg"] for state in optimizer.state.values()]
parts = {
    "weights": sum(part.numel() for part in local(net.parameters())) / total,
    "optimizer": sum(part.numel() for part in local(kept)) / total,
    "units": sum(isinstance(each, FSDPModule) for each in net.modules()) - 1,
}
rank = distributed.get_rank()
for each in range(2):  # one line after the other
    distributed.barrier()
    if rank == each:
        print(json.dumps(parts), flush=True)
distributed.destroy_process_group()
"""
