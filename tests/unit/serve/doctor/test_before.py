"""What is said before an installation: all that is missing at once, and where torch comes from."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from serve.doctor import before

LINUX = ("Linux", "x86_64")


def test_this_machine_which_runs_the_tests_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(before.SIZES, "cpu", (1, 1))
    assert before.lacks("cpu", str(tmp_path)) == []


@pytest.mark.parametrize(
    ("version", "machine", "said"),
    [
        ((3, 10), LINUX, "Python 3.11 or later: this one is 3.10"),
        ((3, 11), ("Darwin", "arm64"), "Linux on x86-64 or ARM64: this is Darwin on arm64"),
        ((3, 11), ("Linux", "riscv64"), "Linux on x86-64 or ARM64: this is Linux on riscv64"),
    ],
)
def test_what_does_not_fit_is_named_with_its_mend(
    version: tuple[int, int], machine: tuple[str, str], said: str, tmp_path: Path
) -> None:
    (lack,) = before.lacks("cpu", str(tmp_path), version, machine)
    assert said in lack.what
    assert lack.mend


def test_an_arm64_linux_has_a_triton_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(before.SIZES, "cpu", (1, 1))
    assert before.lacks("cpu", str(tmp_path), (3, 11), ("Linux", "aarch64")) == []


@pytest.mark.parametrize(("there", "lacks"), [("uv", 0), ("python3.12", 0), ("python3.10", 1), (None, 1)])
def test_a_newer_python_needs_an_older_one_for_triton(
    there: str | None, lacks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(before.SIZES, "cpu", (1, 1))
    monkeypatch.setattr("shutil.which", lambda name: name if name == there else None)
    found = before.lacks("cpu", str(tmp_path), (3, 14), LINUX)
    assert len(found) == lacks
    assert all("Triton's Python models" in lack.what for lack in found)


def test_all_that_is_missing_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before, "_library", lambda _: False)
    monkeypatch.setattr(before, "_glibc", lambda: (2, 31))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setitem(before.SIZES, "cpu", (1, 10**12))
    told = before.lacks("cpu", str(tmp_path / "not" / "there"), (3, 11), LINUX)
    assert [
        "libpython3.11" in told[0].what,
        "venv" in told[1].what,
        "glibc 2.35" in told[2].what,
        "MB of disk" in told[3].what,
    ] == [True] * 4
    assert len(told) == 4


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ("", False),
        ("global.timeout='60'\n:env:.cert='/etc/ssl/x.crt'\n", False),
        ("global.index-url='https://mirror.example/simple'\n", True),
        (":env:.find-links='/opt/wheels'\n", True),
        ("install.no-index='true'\n", True),
        ("user.extra-index-url='https://wheels.example'\n", True),
    ],
)
def test_who_told_pip_where_to_look_is_not_overruled(config: str, own: bool) -> None:
    flags, words = before.plan("cpu", config)
    assert before.own_sources(config) is own
    assert (flags == "") is own
    assert "0.5 GB to download" in words


def test_a_build_for_gpus_is_asked_for_and_its_size_is_told() -> None:
    flags, words = before.plan("cuda", "")
    assert flags == ""
    assert "3.6 GB to download, 9.3 GB on disk" in words


def test_it_runs_where_nothing_is_installed() -> None:
    """An older Python must be able to read it: it is who says that it is too old."""
    ast.parse(Path(before.__file__).read_text("utf-8"), feature_version=(3, 7))
    command = [sys.executable, "-I", "-S", before.__file__, "--torch", "cpu", "--pip-flags"]
    assert subprocess.run(command, capture_output=True, check=True, timeout=120).stderr == b""
