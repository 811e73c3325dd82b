"""The cores that may be used, told by trees of files as Linux has them, and by the kernel itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.host.cores import Cores, bound_pools, cores_here, cpu_list
from tests.control_groups import quota_of_one

ALL = range(64)


def machine(root: Path, files: Mapping[str, str], *, cpus: int = 64, siblings: int = 1, nodes: int = 1) -> None:
    """A machine under `root`: its CPUs 0 and cpus / 2 are one core where siblings is 2, nodes are of equal size."""
    tree = {"sys/cpu/online": f"0-{cpus - 1}\n", **files}
    step, size = cpus // siblings, cpus // nodes
    for cpu in range(cpus):
        same = ",".join(str(cpu % step + step * number) for number in range(siblings))
        tree[f"sys/cpu/cpu{cpu}/topology/core_cpus_list"] = f"{same}\n"
    for node in range(nodes):
        tree[f"sys/node/node{node}/cpulist"] = f"{node * size}-{(node + 1) * size - 1}\n"
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def here(root: Path, allowed: range | frozenset[int] = ALL, among: tuple[int, ...] = ()) -> Cores:
    return cores_here(
        among, cgroups=root / "cgroup", proc=root / "proc", system=root / "sys", allowed=frozenset(allowed)
    )


def v1(folder: str, quota: int, period: int = 100_000, controller: str = "cpu") -> dict[str, str]:
    where = f"cgroup/{controller}{folder}"
    return {f"{where}/cpu.cfs_quota_us": f"{quota}\n", f"{where}/cpu.cfs_period_us": f"{period}\n"}


class Case(NamedTuple):
    name: str
    groups: str
    files: Mapping[str, str]
    cores: int
    source: str


CASES = (
    Case("no groups", "", {}, 64, "the machine"),
    Case("v2", "0::/pod\n", {"cgroup/pod/cpu.max": "200000 100000\n"}, 2, "cgroup/pod/cpu.max: 2 at a time"),
    Case("v2, no bound", "0::/pod\n", {"cgroup/pod/cpu.max": "max 100000\n"}, 64, "the machine"),
    Case("v2, the container's own root", "0::/\n", {"cgroup/cpu.max": "400000 100000\n"}, 4, "cgroup/cpu.max"),
    Case("v2, nested, the parent is tighter", "0::/a/b\n",
         {"cgroup/a/b/cpu.max": "800000 100000\n", "cgroup/a/cpu.max": "300000 100000\n"}, 3, "cgroup/a/cpu.max"),
    Case("v2, nested, the child is tighter", "0::/a/b\n",
         {"cgroup/a/b/cpu.max": "100000 50000\n", "cgroup/a/cpu.max": "300000 100000\n"}, 2, "cgroup/a/b/cpu.max"),
    Case("v2, nested, the child has no bound", "0::/a/b\n",
         {"cgroup/a/b/cpu.max": "max 100000\n", "cgroup/a/cpu.max": "500000 100000\n"}, 5, "cgroup/a/cpu.max"),
    Case("v2, beside the container", "0::/../b\n", {"cgroup/cpu.max": "600000 100000\n"}, 6, "cgroup/cpu.max"),
    Case("v1", "4:cpu,cpuacct:/d/x\n1:cpuset:/\n", v1("/d/x", 250_000), 2, "cpu.cfs_quota_us: 2.5 at a time"),
    Case("v1, no bound", "4:cpu,cpuacct:/d\n", v1("/d", -1), 64, "the machine"),
    Case("v1, mounted under both names", "4:cpu,cpuacct:/d\n", v1("/d", 300_000, controller="cpu,cpuacct"), 3, "quota"),
    Case("v1, its folder is not seen", "4:cpu:/docker/f00\n", v1("", 100_000), 1, "cgroup/cpu/cpu.cfs_quota_us"),
    Case("hybrid", "4:cpu:/\n0::/user\n", {**v1("", -1), "cgroup/unified/user/cpu.max": "700000 100000\n"}, 7,
         "cgroup/unified/user/cpu.max"),
    Case("hybrid, the first version is tighter", "4:cpu:/d\n0::/user\n",
         {**v1("/d", 200_000), "cgroup/unified/user/cpu.max": "700000 100000\n"}, 2, "cgroup/cpu/d/cpu.cfs_quota_us"),
    Case("less than one", "0::/\n", {"cgroup/cpu.max": "20000 100000\n"}, 1, "0.2 at a time"),
    Case("more than there are", "0::/\n", {"cgroup/cpu.max": "9900000 100000\n"}, 64, "the machine"),
    Case("cpuset, v2", "0::/p\n", {"cgroup/p/cpuset.cpus.effective": "0-3,8\n"}, 5, "p/cpuset.cpus.effective"),
    Case("cpuset, v1", "1:cpuset:/p\n", {"cgroup/cpuset/p/cpuset.cpus": "4-6\n"}, 3, "cgroup/cpuset/p/cpuset.cpus"),
    Case("cpuset and quota", "0::/p\n", {"cgroup/p/cpuset.cpus.effective": "0-7\n", "cgroup/p/cpu.max": "200000 100000"},
         2, "cpu.max"),
    Case("damaged", "0::/p\nrubbish\n", {"cgroup/p/cpu.max": "many\n", "cgroup/p/cpuset.cpus.effective": "a-b\n"}, 64,
         "the machine"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_tightest_bound_holds_and_is_named(case: Case, tmp_path: Path) -> None:
    machine(tmp_path, {"proc/self/cgroup": case.groups, **case.files})
    found = here(tmp_path)
    assert (found.count, found.machine) == (case.cores, 64)
    assert case.source in found.source, found.source


def test_an_affinity_is_named_as_the_cpuset_that_it_is_of(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/p\n", "cgroup/p/cpuset.cpus.effective": "2-3\n"}
    machine(tmp_path, files)
    assert here(tmp_path, range(2, 4)).source.endswith("cgroup/p/cpuset.cpus.effective")
    assert here(tmp_path, range(2, 3)).told() == "1 core of 64 (affinity)"


def test_those_asked_for_are_of_those_allowed(tmp_path: Path) -> None:
    machine(tmp_path, {})
    found = here(tmp_path, range(8), among=(6, 7, 8, 9))
    assert (found.cpus, found.told()) == ((6, 7), "2 cores of 64 (--cpus)")


def test_two_threads_of_a_core_compute_as_one(tmp_path: Path) -> None:
    machine(tmp_path, {}, siblings=2)
    found = here(tmp_path)
    assert (found.count, found.physical, found.computing) == (64, 32, 32)
    assert found.told() == "64 cores, 32 physical (the machine)"
    assert here(tmp_path, frozenset({0, 1, 32})).computing == 2


def test_kernels_of_before_name_siblings_otherwise(tmp_path: Path) -> None:
    machine(tmp_path, {}, cpus=4)
    for cpu in range(4):
        topology = tmp_path / f"sys/cpu/cpu{cpu}/topology"
        (topology / "core_cpus_list").unlink()
        (topology / "thread_siblings_list").write_text(f"{cpu - cpu % 2}-{cpu - cpu % 2 + 1}\n")
    assert here(tmp_path, range(4)).computing == 2


def test_a_quota_bounds_physical_cores_too(tmp_path: Path) -> None:
    machine(tmp_path, {"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "300000 100000\n"}, siblings=2)
    assert here(tmp_path).computing == 3


def test_nodes_are_those_of_the_cpus_that_may_be_used(tmp_path: Path) -> None:
    machine(tmp_path, {}, siblings=2, nodes=2)
    found = here(tmp_path)
    assert ([len(node) for node in found.nodes], found.in_node) == ([32, 32], 16)
    assert "2 NUMA nodes" in found.told()
    assert here(tmp_path, range(4)).nodes == ((0, 1, 2, 3),)


def test_a_machine_that_tells_nothing_has_what_python_counts(tmp_path: Path) -> None:
    found = here(tmp_path, range(0))
    assert (found.count, found.computing, found.source) == (os.cpu_count(), os.cpu_count(), "the machine")


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_the_kernels_is_read_back(cpus: set[int]) -> None:
    assert cpu_list(",".join(map(str, sorted(cpus)))) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "1,,2", "-1", "0-999999999", "1 2"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no list of CPUs"):
        cpu_list(text)


SAYS = "from compress.host.cores import cores_here as f; c = f(); print(c.count, c.source)"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity")
def test_a_child_on_one_core_has_one() -> None:
    program = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}); {SAYS}"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split()[0] == "1"


def test_a_child_in_a_group_with_a_quota_has_what_that_gives() -> None:
    with quota_of_one() as inside:
        command = [*inside, sys.executable, "-c", SAYS]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if (os.cpu_count() or 1) > 1:
        assert said.split()[0] == "1"
        assert said.rstrip().endswith("1 at a time")


def test_pools_keep_to_a_quota_and_to_what_somebody_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(quota: float | None) -> dict[str, str]:
        monkeypatch.setattr("compress.host.cores.cores_here", lambda: Cores((0, 1, 2, 3), 4, 4, quota, ""))
        environ = {"OMP_NUM_THREADS": "3"}
        bound_pools(environ)
        return environ

    assert asked(None) == {"OMP_NUM_THREADS": "3"}
    assert asked(2.0) == {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}


@pytest.mark.parametrize(("share", "cores"), [("2", 2), ("64", 64), ("100", 64), ("0", 64), ("many", 64), ("", 64)])
def test_who_starts_several_says_what_each_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str, cores: int
) -> None:
    machine(tmp_path, {})
    monkeypatch.setenv("COMPRESS_CORES", share)
    found = here(tmp_path)
    assert found.count == found.computing == cores
    assert found.source == ("COMPRESS_CORES: 2 at a time" if cores == 2 else "the machine")
