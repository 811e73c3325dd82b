"""A search and a sensitivity on a real Ray cluster of three nodes of one core each: the same result as on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress import OptimizeOptions
from compress.cluster import connect
from compress.cluster.shared import Shared
from compress.errors import RecipeError, ResourceError, ServerError, ToolkitError
from compress.evaluate.search_result import SearchResult
from compress.jobs.sensitivity import sensitivity
from compress.options import SensitivityOptions
from tests.ray_cluster import ON_RAY, Running, ray_cluster

pytestmark = [pytest.mark.timeout(1200), *ON_RAY]  # a machine may have other work to do
ASKED: dict[str, Any] = {
    "eval": "eval.npz", "finetune": "train.npz", "epochs": 3, "prune": (0.0, 0.4, 0.6), "int8": ("dynamic",),
    "goal": "size", "max_drop": 100.0, "train_threads": 1, "runtime": "onnxruntime",  # of two, the clock would choose
}  # fmt: skip
FLAGS = [
    "--eval", "eval.npz", "--finetune", "train.npz", "--epochs", "3", "--prune", "0", "0.4", "0.6", "--int8", "dynamic",
    "--goal", "size", "--max-drop", "100", "--train-threads", "1", "--runtime", "onnxruntime",
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Running]:
    with ray_cluster(3) as running:
        yield running


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier that learnt something, with its data beside it."""
    folder = tmp_path_factory.mktemp("task")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1500, 12)).astype(np.float32)
    y = (np.tanh(x) @ rng.standard_normal((12, 4))).argmax(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4))
    optimizer = torch.optim.Adam(module.parameters(), 5e-3)
    for _ in range(100):
        loss = nn.functional.cross_entropy(module(torch.from_numpy(x[:1000])), torch.from_numpy(y[:1000]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    compress.save(module, folder / "model.pt", inputs="x:float32[batch,12]", outputs=["logits"])
    np.savez(folder / "train.npz", x=x[:1000], label=y[:1000])
    np.savez(folder / "eval.npz", x=x[1000:], label=y[1000:])
    return folder


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    return search(task, tmp_path_factory.mktemp("alone") / "best")


def search(task: Path, output: Path, **more: Any) -> SearchResult:
    return compress.optimize(task / "model.pt", OptimizeOptions(output=output, **{**ASKED, **more}))


def told(found: SearchResult) -> list[Any]:
    """What of a result hangs on no clock."""
    rows = [
        (t.candidate, t.status, t.why, t.value, t.drop, t.drop_low, t.drop_high, t.size_bytes) for t in found.trials
    ]
    front = [t.candidate for t in found.front], [t.candidate for t in found.line]
    proof = found.proof and replace(found.proof, runtime=None, latency_p50_ms=None)  # a clock's word
    return [*rows, front, found.best and found.best.candidate, proof]


def stages(work: Path) -> dict[str, int]:
    """What is kept in the shared folder, by name, with its times."""
    return {path.parent.name: path.stat().st_mtime_ns for path in work.glob("ray/stages/[a-z]*/stage.json")}


def when(happens: Callable[[], Any], then: Callable[[], Any]) -> threading.Thread:
    def follow() -> None:
        end = time.monotonic() + 120
        while not happens() and time.monotonic() < end:
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=follow)
    thread.start()
    return thread


def test_a_node_that_dies_in_the_middle_changes_nothing(
    cluster: Running, task: Path, tmp_path: Path, alone: SearchResult
) -> None:
    work = tmp_path / "best.work"
    seen: list[int] = []

    def kill() -> None:
        seen.extend((cluster.kill_busy(), len(stages(work))))

    # The whole model needs no training: its stages are kept while the others are at theirs.
    killer = when(lambda: stages(work), kill)
    found = search(task, tmp_path / "best", ray=cluster.address)
    killer.join()
    cluster.add()  # for the tests that follow
    assert told(found) == told(alone)
    node, before = seen
    assert node > 0, "it had a task"
    assert 0 < before < len(stages(work)), "it died before the end"
    assert cluster.tasks() == []


def test_a_winner_is_trained_on_a_node_as_here(cluster: Running, task: Path, tmp_path: Path) -> None:
    more = {
        "calibration": "train.npz",
        "max_drop": 5.0,
        "int8": ("none",),
        "importance": ("magnitude", "obs"),
        "prune": (0.0, 0.4),
    }
    here = search(task, tmp_path / "here", **more)
    there = search(task, tmp_path / "there", ray=cluster.address, **more)
    # A repair on another number of cores rounds otherwise: an answer may turn, no more.
    for one, other in zip(there.trials, here.trials, strict=True):
        assert (one.candidate, one.status, one.size_bytes) == (other.candidate, other.status, other.size_bytes)
        assert one.drop == pytest.approx(other.drop, abs=1.0)
    assert there.best is not None
    assert here.best is not None
    assert there.best.candidate == here.best.candidate
    assert "; then trained" in there.training
    assert len(list((tmp_path / "there.work").glob("ray/stages/finetune*"))) <= 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_search_that_ends_early_leaves_nothing_running_and_goes_on_with_what_is_kept(
    cluster: Running, task: Path, tmp_path: Path, alone: SearchResult, number: signal.Signals, code: int
) -> None:
    output, work = tmp_path / "best", tmp_path / "best.work"
    command = [sys.executable, "-m", "compress", "optimize", str(task / "model.pt"), "-o", str(output), *FLAGS]
    with subprocess.Popen([*command, "--ray", cluster.address], stderr=subprocess.PIPE, text=True) as process:
        when(lambda: len(stages(work)) >= 2, lambda: process.send_signal(number)).join()
        _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    if number == signal.SIGINT:
        assert said.strip().splitlines()[-1].startswith("interrupted: what is done is kept")
        assert "Traceback" not in said
    end = time.monotonic() + 20
    while cluster.tasks() and time.monotonic() < end:
        time.sleep(0.1)
    assert cluster.tasks() == []
    before = stages(work)
    found = search(task, output, ray=cluster.address)
    assert told(found) == told(alone)
    after = stages(work)
    assert 2 <= len(before) < len(after)
    assert {name: after[name] for name in before} == before, "nothing that was kept is made again"


def test_layers_are_thinned_on_nodes_as_here(cluster: Running, task: Path, tmp_path: Path) -> None:
    def thin(output: Path, ray: str | None) -> str:
        options = SensitivityOptions(output=output, eval="eval.npz", ratios=(0.25, 0.5), ray=ray)
        return sensitivity(task / "model.pt", options).text()

    assert thin(tmp_path / "there", cluster.address) == thin(tmp_path / "here", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"], "nothing is left that nobody needs"


@pytest.mark.parametrize(
    ("more", "kind", "why"),
    [
        (
            {"accelerator": "cuda"},
            RecipeError,
            "a task asks for 1 CPU and 1 GPU of one node; of 3 nodes, none has more",
        ),
        (
            {"train_threads": 64},
            RecipeError,
            "a task asks for 64 CPUs of one node; of 3 nodes, none has more than 1 CPU",
        ),
        ({"shared": Path("s3://bucket/search")}, RecipeError, "has to be a folder of each machine's file system"),
    ],
)
def test_what_the_cluster_can_not_do_is_told_before_any_work(
    cluster: Running, task: Path, tmp_path: Path, more: dict[str, Any], kind: type[ToolkitError], why: str
) -> None:
    with pytest.raises(kind) as caught:
        search(task, tmp_path / "best", ray=cluster.address, **more)
    assert why in caught.value.why
    assert not list(tmp_path.iterdir())


def test_a_node_with_another_release_is_named(cluster: Running, task: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed/torch-2.0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n", encoding="utf-8")
    node = cluster.add(PYTHONPATH=str(installed.parent))
    try:
        with pytest.raises(ServerError, match="would give other results") as caught:
            search(task, tmp_path / "best", ray=cluster.address)
    finally:
        cluster.kill(node)
    assert caught.value.why.startswith("torch is 2.0.1 there and ")
    assert [path.name for path in tmp_path.iterdir()] == ["installed"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a folder of its own")
def test_a_node_without_the_shared_folder_is_named(task: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with ray_cluster(1) as running:
        running.add_blind(shared)
        with pytest.raises(ResourceError, match="does not see") as caught:
            search(task, tmp_path / "best", ray=running.address, shared=shared)
    assert caught.value.why == "it has no such folder"
    assert list(shared.iterdir()) == []


def test_a_node_does_not_work_on_an_input_that_is_another_one(
    cluster: Running, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Shared.place

    def damaged(shared: Shared, path: Path, files: Sequence[Path] = ()) -> Path:
        placed = place(shared, path, files)
        if placed.name == "train.npz":
            placed.write_bytes(placed.read_bytes()[:-1] + b"?")
        return placed

    monkeypatch.setattr(Shared, "place", damaged)
    with pytest.raises(ResourceError, match="would work on something else") as caught:
        search(task, tmp_path / "best", ray=cluster.address)
    assert "train.npz is not what was put there" in caught.value.why


def test_another_release_of_ray_is_told_by_both_numbers(task: Path, tmp_path: Path) -> None:
    with ray_cluster(1, ray_version="2.1.0") as running, pytest.raises(ServerError) as caught:
        search(task, tmp_path / "best", ray=running.address)
    assert caught.value.why.startswith("it runs Ray 2.1.0 on Python ")


def test_what_takes_connections_and_is_no_ray_is_told_within_seconds(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr(connect, "JOINS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ServerError) as caught:
        search(task, tmp_path / "best", ray=f"127.0.0.1:{silent.getsockname()[1]}")
    assert "does not answer as Ray does within 2 s" in caught.value.why


def test_a_command_s_end_is_its_own_while_it_is_connected(cluster: Running) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with connect.connected(cluster.address):
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_head_that_dies_is_told(task: Path) -> None:
    """Ray itself would end the command after a minute, without a word."""
    with ray_cluster(2) as running:
        command = [sys.executable, "-m", "compress", "optimize", "model.pt", *FLAGS]
        command += ["--ray", running.address, "-o", "headless"]
        command[command.index("--epochs") + 1] = "3000"
        log = task / "headless.log"
        with log.open("w") as out, subprocess.Popen(command, cwd=task, stdout=out, stderr=out) as search:
            while not running.tasks():
                assert search.poll() is None, log.read_text()
                time.sleep(0.1)
            running.kill(0)
            assert search.wait(120) == 2, log.read_text()
    assert "error: the Ray cluster is gone" in log.read_text() or "raylet died" in log.read_text()
    assert "Traceback" not in log.read_text()
