"""The memory that is left, under the limits of containers: told by trees of files as Linux has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compress.vetting.memory import memory_left

MEBI = 1 << 20
NO_LIMIT_V1 = 0x7FFF_FFFF_FFFF_F000


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with 8 GiB that can be had; of its process nothing is told."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9000000 kB\nMemAvailable: {8 << 20} kB\n")
    (tmp_path / "proc/self/statm").write_text("1000 100 10 1 0 100 0\n")
    return tmp_path / "proc"


def v2(folder: Path, limit: str, used: int, reclaimable: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used}\nfile 0\ninactive_file {reclaimable}\nactive_file 5\n")


def v1(folder: Path, limit: int, used: int, reclaimable: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 0\ninactive_file 1\ntotal_inactive_file {reclaimable}\n")


def left(tmp_path: Path, proc: Path, groups: str) -> int:
    (proc / "self/cgroup").write_text(groups)
    return memory_left(cgroups=tmp_path / "cgroup", proc=proc)


def test_a_group_bounds_it(tmp_path: Path, proc: Path) -> None:
    v2(tmp_path / "cgroup/pod/one", str(512 * MEBI), 500 * MEBI)
    assert left(tmp_path, proc, "0::/pod/one\n") == 12 * MEBI


def test_a_group_above_bounds_it(tmp_path: Path, proc: Path) -> None:
    v2(tmp_path / "cgroup/pod/one", "max", 100 * MEBI)
    v2(tmp_path / "cgroup/pod", str(512 * MEBI), 500 * MEBI)
    assert left(tmp_path, proc, "0::/pod/one\n") == 12 * MEBI


def test_a_group_that_sees_nothing_above_itself(tmp_path: Path, proc: Path) -> None:
    """In a container: its group is mounted as the root, its path may be the machine's, and is not there."""
    v2(tmp_path / "cgroup", str(512 * MEBI), 500 * MEBI)
    for path in ("/", "/kubepods/pod1/abc", "/../../other"):
        assert left(tmp_path, proc, f"0::{path}\n") == 12 * MEBI


def test_pages_of_files_that_can_go_are_not_counted(tmp_path: Path, proc: Path) -> None:
    v2(tmp_path / "cgroup", str(512 * MEBI), 512 * MEBI, 400 * MEBI)
    assert left(tmp_path, proc, "0::/\n") == 400 * MEBI


def test_the_first_version_of_groups(tmp_path: Path, proc: Path) -> None:
    v1(tmp_path / "cgroup/memory/docker/abc", NO_LIMIT_V1, 100 * MEBI)
    v1(tmp_path / "cgroup/memory/docker", 512 * MEBI, 510 * MEBI, 10 * MEBI)
    assert left(tmp_path, proc, "5:cpu,cpuacct:/\n4:memory:/docker/abc\n1:name=systemd:/x\n") == 12 * MEBI


def test_both_versions_side_by_side(tmp_path: Path, proc: Path) -> None:
    v1(tmp_path / "cgroup/memory", 512 * MEBI, 500 * MEBI)
    v2(tmp_path / "cgroup/unified/a", str(256 * MEBI), 250 * MEBI)
    assert left(tmp_path, proc, "4:memory:/\n0::/a\n") == 6 * MEBI


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path, proc: Path) -> None:
    v2(tmp_path / "cgroup", str(512 * MEBI), 600 * MEBI)
    assert left(tmp_path, proc, "0::/\n") == 0


@pytest.mark.parametrize("groups", ["", "0::/\n", "no line of groups\n", "0::/a:b\n", "4:memory\n"])
def test_without_limits_the_machine_bounds_it(tmp_path: Path, proc: Path, groups: str) -> None:
    v2(tmp_path / "cgroup", "max", 100 * MEBI)
    v1(tmp_path / "cgroup/memory", NO_LIMIT_V1, 100 * MEBI)
    assert left(tmp_path, proc, groups) == 8 << 30


def test_a_limit_that_cant_be_read_is_passed_over(tmp_path: Path, proc: Path) -> None:
    v2(tmp_path / "cgroup/a/b", "a word", 0)
    v2(tmp_path / "cgroup/a", str(512 * MEBI), 500 * MEBI)
    (tmp_path / "cgroup/a/memory.stat").unlink()
    assert left(tmp_path, proc, "0::/a/b\n") == 12 * MEBI


def test_without_groups_the_machine_bounds_it(tmp_path: Path, proc: Path) -> None:
    assert memory_left(cgroups=tmp_path / "none", proc=proc) == 8 << 30
    assert memory_left() > 1_000_000


BOUND = """
import numpy as np
from compress.jobs import running
from compress.vetting import memory

memory.memory_left = lambda: 1 << 30


def command():
    np.ones(1 << 28, np.uint8)  # as much as there is can be had
    np.ones(1 << 31, np.uint8)


running.run_to_end(command, resumes=False)
"""


def test_a_command_gets_no_more_than_is_left_and_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, timeout=100)

    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: there is not enough memory")
    assert "Traceback" not in done.stderr


def test_a_limit_that_is_lower_stays() -> None:
    lower = "import resource\nresource.setrlimit(resource.RLIMIT_DATA, (1 << 29, resource.RLIM_INFINITY))\n"
    told = "print(resource.getrlimit(resource.RLIMIT_DATA)[0])"
    bound = "from compress.vetting.memory import bound_memory\nbound_memory()\n"
    done = subprocess.run([sys.executable, "-c", lower + bound + told], capture_output=True, text=True, timeout=100)

    assert done.stdout.strip() == str(1 << 29)
