"""Trainings as processes: killed and taken up again, and shared by two."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from PIL import Image

import compress
from compress.cli import main
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.quantize.qat.train_quantized import TrainQuantized
from compress.training.finetune import Finetune
from compress.training.machine.launch import launch, lost_another
from tests.hub_models import bert_folder, vit_folder, with_config
from tests.unit.compress.training.networks import data, model, two_headed

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def words(folder: Path, output: str, *options: str, source: str | None = None, data: str | None = None) -> list[str]:
    checkpoint, train = source or folder / "student.pt", data or folder / "train.npz"
    return [*map(str, ("finetune", checkpoint, "--data", train, "-o", folder / output)), *options]


def command(folder: Path, output: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "compress", *words(folder, output, *options)]


def run(folder: Path, output: str, *options: str, **given: str) -> dict[str, torch.Tensor]:
    """In this process."""
    with pytest.raises(SystemExit) as ended:
        main(words(folder, output, *options, **given))
    assert not ended.value.code
    return weights(folder / output)


def weights(output: Path) -> dict[str, torch.Tensor]:
    return compress.load(output / "model.pt").module.state_dict()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    model(tmp_path, "student", 8, dropout=0.2)
    model(tmp_path, "teacher", 12)
    data(tmp_path, count=600, noise=2.0)
    return tmp_path


def test_a_training_that_is_killed_ends_where_one_that_was_not_ends(folder: Path) -> None:
    options = [
        "--teacher", str(folder / "teacher.pt"), "--epochs", "12", "--batch-size", "16", "--hold-out", "0.1",
        "--ema", "0.99", "--augment", "shift:1",
    ]  # fmt: skip
    whole = run(folder, "whole", *options)
    killed = subprocess.Popen(
        command(folder, "killed", *options, "--checkpoint-seconds", "0"), stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    kept: set[int] = set()
    while killed.poll() is None and len(kept) < 3:  # anywhere after the third state was kept
        for path in (folder / "killed.work").glob("*/training.state"):
            kept.add(path.stat().st_mtime_ns)
        time.sleep(0.003)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL, "it was still at work"
    assert not (folder / "killed").exists()
    again = run(folder, "killed", *options)
    told = json.loads((folder / "killed/training.json").read_text())
    assert told["training"]["resumed_at_step"] > 0
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not list((folder / "killed.work").glob("*/training.state")), "a state that is done with goes"


def test_two_processes_compute_what_one_does(folder: Path) -> None:
    """The batch is shared, and batch normalization sees all of it."""
    model(folder, "student", 8)
    options = ("--teacher", str(folder / "teacher.pt"), "--epochs", "2", "--batch-size", "32", "--precision", "32")
    one = run(folder, "one", *options)
    two = run(folder, "two", *options, "--devices", "2", "--threads", "1")
    assert all(torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-5) for name in one)
    told = json.loads((folder / "two/training.json").read_text())["training"]
    assert (told["processes"], told["threads"]) == (2, 1)


def test_processes_that_torchrun_starts_compute_what_those_do_that_are_started_here(folder: Path) -> None:
    model(folder, "student", 8)
    options = ("--teacher", str(folder / "teacher.pt"), "--epochs", "2", "--batch-size", "32", "--precision", "32")
    two = run(folder, "two", *options, "--devices", "2", "--threads", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *command(folder, "three", *options)[1:]], capture_output=True, text=True, env=ENVIRONMENT
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    three = weights(folder / "three")
    assert all(torch.equal(two[name], three[name]) for name in two)


def test_two_processes_freeze_and_round_as_one_does(folder: Path) -> None:
    """Fake quantization: batch normalization keeps its statistics, and ranges are those of the whole batch."""
    student = model(folder, "student", 8)
    opened = Dataset.open(str(folder / "train.npz"), student.signature)

    def trained(devices: int) -> dict[str, torch.Tensor]:
        asked = TrainingOptions(devices=devices, epochs=1, batch_size=30)
        work = folder / f"work{devices}"
        work.mkdir()
        given = TrainQuantized(Finetune(opened, None, asked)).run(student, work, lambda _d, _t, _n: None)
        assert isinstance(given.model, TorchModel)
        return given.model.module.state_dict()

    before, one, two = student.module.state_dict(), trained(1), trained(2)
    for name, tensor in before.items():
        assert torch.equal(two[name], tensor) == ("running" in name or "tracked" in name), name
    assert all(torch.allclose(one[name], two[name], atol=2e-3) for name in one)


def test_two_processes_with_uneven_shares_of_vectors_and_an_idle_head(folder: Path) -> None:
    """99 samples in a batch, activations computed twice, an output that nothing teaches."""
    student = two_headed(folder, "student", 1)
    data(folder, count=297)
    opened = Dataset.open(str(folder / "train.npz"), student.signature)

    def trained(devices: int, **more: Any) -> dict[str, torch.Tensor]:
        common: dict[str, Any] = {"epochs": 2, "batch_size": 99, "train_precision": "32"}
        asked = TrainingOptions(devices=devices, **common, **more)
        work = folder / f"work{devices}{len(more)}"
        work.mkdir()
        given = Finetune(opened, None, asked).run(student, work, lambda _d, _t, _n: None)
        assert isinstance(given.model, TorchModel)
        return given.model.module.state_dict()

    one, two = (trained(devices, gradient_checkpointing=True) for devices in (1, 2))
    assert all(torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-5) for name in one)
    parts = trained(2, accumulate=8, gradient_checkpointing=False)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in parts.values()), "50 and 49 samples, as many parts"


@pytest.mark.parametrize("kind", ["images", "texts.jsonl", "texts.csv"])
def test_two_processes_train_on_what_was_made_of_images_and_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """By a name that is looked up from where the command was given."""
    source = "vit" if kind == "images" else "bert"
    (vit_folder if kind == "images" else bert_folder)(tmp_path / source)
    with_config(tmp_path / source, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rows = [f"word{at % 50} word{at * 7 % 50}" for at in range(24)]
    labelled = [{"text": row, "label": at % 3} for at, row in enumerate(rows)]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in labelled))
    (tmp_path / "texts.csv").write_text("\n".join(("text,label", *(f"{r['text']},{r['label']}" for r in labelled))))
    for at, row in enumerate(rows):
        place = tmp_path / "images" / ("cat", "dog")[at % 2] / f"{row}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (9 * at, 0, 0)).save(place)
    monkeypatch.chdir(tmp_path)
    options = ("--epochs", "1", "--batch-size", "8", "--precision", "32")
    one, two = (
        run(tmp_path, f"on{devices}", *options, "--devices", str(devices), source=source, data=kind)
        for devices in (1, 2)
    )
    assert all(torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-4) for name in one)
    told = json.loads((tmp_path / "on2/training.json").read_text())["training"]
    assert told["processes"] == 2


def test_what_fails_in_one_of_several_processes_is_told(folder: Path) -> None:
    student = compress.load(folder / "student.pt")
    opened = Dataset.open(str(folder / "train.npz"), student.signature)
    told: list[int] = []
    stage = Finetune(opened, None, TrainingOptions(devices=2, learning_rate=1e30, epochs=2))
    with pytest.raises(StageError, match="the training has diverged"):
        stage.run(student, folder, lambda done, _total, _note: told.append(done))
    assert told, "until then it told of its progress"


def test_several_processes_take_some_steps_of_a_trial_together(folder: Path) -> None:
    student = compress.load(folder / "student.pt")
    opened = Dataset.open(str(folder / "train.npz"), student.signature)
    asked = TrainingOptions(devices=2, epochs=100_000, hold_out=0.2)
    told: list[tuple[int, int]] = []
    stage = Finetune(opened, compress.load(folder / "teacher.pt"), asked, trial=True)
    given = stage.run(student, folder, lambda done, total, _note: told.append((done, total)))
    assert told[-1][0] < told[-1][1] / 10
    assert given.details["trial"]["whole"] > given.details["trial"]["spent"]


def test_processes_that_train_together_listen_on_loopback_and_end_together(folder: Path) -> None:
    student = compress.load(folder / "student.pt")
    opened = Dataset.open(str(folder / "train.npz"), student.signature)
    heard: set[str] = set()

    def progress(_done: int, _total: int, _note: str) -> None:
        together = trainers(psutil.Process())
        if not heard:
            found = [one for process in together.values() for one in process.net_connections()]
            heard.update(one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN)
            together["1"].kill()

    stage = Finetune(opened, None, TrainingOptions(devices=2, epochs=10_000))
    with pytest.raises(StageError, match="several processes failed") as caught:
        stage.run(student, folder, progress)
    assert "process 2 of 2 ended with signal SIGKILL" in caught.value.why
    assert heard == {"127.0.0.1"}
    assert not trainers(psutil.Process())


LEFT_ALONE = """
import os, sys, torch
from torch import distributed as dist
from compress.training.machine.launch import join, lost_another

join("cpu")
dist.barrier()
if os.environ["RANK"] == "1":
    os._exit(3)
try:
    while True:
        dist.all_reduce(torch.ones(3))
except RuntimeError as err:
    print(lost_another(err), flush=True)
"""


def test_what_torch_says_when_another_process_is_gone_is_told_from_a_models_errors(tmp_path: Path) -> None:
    """It comes out of a forward pass, too, and no other inputs would mend it."""
    told: list[str] = []
    with (tmp_path / "log.txt").open("w", encoding="utf-8") as log:
        codes = launch([sys.executable, "-c", LEFT_ALONE], 2, log, told.append)
    assert [line.strip() for line in told] == ["True"]
    assert codes == [0, 3]
    assert not lost_another(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


ON_ITS_OWN_DISK = """
import os
from compress.cli import main

os.chdir(os.environ["RANK"])
main("finetune student.pt --data train.npz --eval eval.npz -o out --epochs 1".split())
"""


@pytest.mark.parametrize("other", [None, "data", "eval", "missing", "model"])
def test_processes_that_read_different_files_by_one_name_do_not_train_together(
    tmp_path: Path, other: str | None
) -> None:
    for rank in (0, 1):
        place = tmp_path / str(rank)
        place.mkdir()
        model(place, "student", 8 + (rank if other == "model" else 0))
        data(place, count=600, noise=2.0 + (rank if other == "data" else 0))
        if (rank, other) != (1, "missing"):  # which is told, and the other does not wait for it
            data(place, "eval", seed=1 + (rank if other == "eval" else 0))
    with contextlib.chdir(tmp_path), (tmp_path / "log.txt").open("w", encoding="utf-8") as log:
        codes = launch([sys.executable, "-c", ON_ITS_OWN_DISK], 2, log, lambda _line: None)
    told = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert codes == ([0, 0] if other is None else [2, 2]), told
    assert (tmp_path / "0/out/model.pt").exists() == (other is None)
    assert told.count("there is no such file") == (other == "missing")
    assert told.count("what 2 of 2 read is not what 1 read") == {None: 0, "missing": 1}.get(other, 2)


def test_processes_end_with_the_one_that_started_them(folder: Path) -> None:
    options = ("--epochs", "10000", "--devices", "2")
    started = subprocess.Popen(command(folder, "killed", *options), stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        until = time.monotonic() + 60
        while len(found := trainers(psutil.Process(started.pid))) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        assert len(found) == 2
    finally:
        started.kill()
        started.wait()
    gone, alive = psutil.wait_procs(found.values(), timeout=30)
    assert len(gone) == 2, alive


def trainers(parent: psutil.Process) -> dict[str, psutil.Process]:
    """By rank."""
    found = {}
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "compress.training.process" in process.cmdline():
                found[process.environ()["RANK"]] = process
    return found


def test_processes_share_samples_that_they_made_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "talkative.py").write_text(TALKATIVE)
    monkeypatch.chdir(folder)
    student = compress.load(folder / "student.pt")
    opened = Dataset.open("talkative:samples", student.signature)
    asked = TrainingOptions(devices=2, epochs=2, batch_size=16, cache_data=True, loader_workers=0)
    given = Finetune(opened, None, asked).run(student, folder / "work", lambda _d, _t, _n: None)
    assert given.details["steps"] == 2 * 4
    assert not list((folder / "work").rglob("cache"))


TALKATIVE = """
import torch

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        print('{"what": "the training never said"}')
        print("{")
        return torch.rand(1, 6, 6), place % 4

def samples():
    return Samples()
"""
