"""Which GPUs tasks see, on a real Ray whose node says that it has two: none here is needed for what Ray gives out."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from compress import OptimizeOptions
from compress.cluster.gpus import VISIBLE
from compress.cluster.nodes import Needs
from compress.jobs.on_ray import Task, needs_of, on_ray
from tests.ray_cluster import Running, ray_cluster

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra `ray`"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Running]:
    with ray_cluster(1, cpus=2, gpus=2) as running:
        yield running


def asked(tmp_path: Path, **more: Any) -> OptimizeOptions:
    return OptimizeOptions(output=tmp_path / "best", finetune="train.npz", train_threads=1, **more)


def seen(task: Task, together: Path, count: int) -> str | None:
    """In a task, once so many are at work at the same time: what torch would count its GPUs by."""
    with task.begun():
        (together / str(os.getpid())).touch()
        until = time.monotonic() + 120
        while len(list(together.iterdir())) < count and time.monotonic() < until:
            time.sleep(0.05)
        return os.environ.get(VISIBLE)


@pytest.mark.parametrize(
    ("accelerator", "devices", "expected"),
    [("auto", 1, ["0", "1"]), ("cuda", 1, ["0", "1"]), ("auto", 2, ["0,1"]), ("cpu", 1, ["", ""])],
)
def test_tasks_see_the_gpus_that_are_theirs_alone(
    cluster: Running, tmp_path: Path, accelerator: Literal["auto", "cpu", "cuda"], devices: int, expected: list[str]
) -> None:
    together = tmp_path / "together"
    together.mkdir()
    options = asked(tmp_path, accelerator=accelerator, devices=devices, ray=cluster.address)
    with on_ray(options, tmp_path / "work") as there:
        assert there is not None
        assert there.slots == len(expected)
        given = [(there.task, together, len(expected))] * len(expected)
        found = [answer for _, answer in there.answers(seen, given, lambda: range(len(given)))]
    assert sorted(found) == expected


@pytest.mark.parametrize(
    ("accelerator", "gpus", "needs"),
    [
        ("auto", [0, 0], Needs(2)), ("auto", [0, 1], Needs(2)), ("auto", [0, 2], Needs(1, 2)), ("cpu", [2], Needs(2)),
        ("cuda", [0], Needs(1, 2)),
    ],
)  # fmt: skip
def test_what_trains_is_decided_once_for_all_tasks(
    tmp_path: Path, accelerator: Literal["auto", "cpu", "cuda"], gpus: list[int], needs: Needs
) -> None:
    nodes = [{"Resources": {"CPU": 4.0, "GPU": float(count)}} for count in gpus]
    assert needs_of(asked(tmp_path, accelerator=accelerator, devices=2), nodes) == needs
