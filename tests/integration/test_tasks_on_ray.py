"""Tasks on a real Ray: which GPUs they see, on a node that says that it has two, and what they leave when they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from compress import OptimizeOptions
from compress.cluster.gpus import VISIBLE
from compress.cluster.nodes import Needs
from compress.errors import ResourceError
from compress.jobs.on_ray import Task, needs_of, on_ray
from tests.ray_cluster import ON_RAY, Running, ray_cluster

pytestmark = ON_RAY


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The node's folder for temporary files."""
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def cluster(temporary: Path) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
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
    # Ray gives several of them in any order.
    assert sorted(",".join(sorted((each or "").split(","))) for each in found) == expected


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


def dies(task: Task) -> None:
    with task.begun() as work:
        (work / "large").write_bytes(b"1")
        os.kill(os.getpid(), signal.SIGKILL)


def test_of_a_task_that_died_each_time_nothing_is_left(cluster: Running, temporary: Path, tmp_path: Path) -> None:
    with on_ray(asked(tmp_path, ray=cluster.address), tmp_path / "work") as there:
        assert there is not None
        with pytest.raises(ResourceError, match="did not come to its end") as caught:
            list(there.answers(dies, [(there.task,)], lambda: [0]))
    assert "died 4 times" in caught.value.why
    assert list(temporary.glob("compress-*")) == []


def test_what_a_killed_command_has_left_on_a_node_goes_when_the_next_one_looks_at_it(
    cluster: Running, temporary: Path, tmp_path: Path
) -> None:
    code = "import os; from compress.vetting.scratch import scratch\nwith scratch('compress-ray-'): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(temporary)}, check=False)
    with scratch_of_another(temporary) as working:
        assert len(list(temporary.glob("compress-ray-*"))) == 2
        with on_ray(asked(tmp_path, ray=cluster.address), tmp_path / "work"):
            assert list(temporary.glob("compress-ray-*")) == [working], "it is at work"


@contextmanager
def scratch_of_another(temporary: Path) -> Iterator[Path]:
    code = "from compress.vetting.scratch import scratch\nwith scratch('compress-ray-') as f: print(f, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(temporary)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip())
        process.communicate("\n")
