"""Where Linux's own calls are missing, commands work or say in words what to do; never by a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.errors import ServerError
from serve.doctor import before
from serve.load.send.timer import check_timer
from serve.triton import wheel
from tests.serve_models import tiny_artifact

ROOT = Path(__file__).parents[2]


def run(*words: str, status: int = 0) -> str:
    command = [sys.executable, "-W", "ignore:Unsupported macOS", "-m", "tests.as_on_a_mac", *words]
    found = {**os.environ, "PYTHONPATH": str(ROOT)}  # whatever else is set: `tests` is not installed
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=found)
    told = done.stdout + done.stderr
    assert "Traceback" not in told, told
    assert done.returncode == status, told
    return told


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mac")
    artifact = tiny_artifact(folder / "artifact")
    assert "wrote version 1" in run("serve", "pack", str(artifact), "--repository", str(folder / "m"), "--name", "m")
    return folder / "m"


def test_doctor_says_what_can_not_run_there() -> None:
    told = run("serve", "doctor", status=1)
    assert "arm64" in told
    assert "Triton's wheels are for Linux on x86_64 and Linux on aarch64, and this is Darwin on arm64" in told
    wrong = [line for line in told.splitlines() if line.startswith("- ") and not line.startswith("- port ")]
    assert len(wrong) == 1, "Triton alone is to be mended: shared memory and free memory are Linux's"


def test_a_repository_is_linted(repository: Path) -> None:
    assert "nothing to mend" in run("serve", "lint", str(repository))


@pytest.mark.parametrize("words", [("triton", "install"), ("up",)])
def test_what_needs_an_embedded_triton_names_another_way(words: tuple[str, ...], repository: Path) -> None:
    told = run("serve", *words, *([str(repository)] if words == ("up",) else []), status=2)
    assert "this is Darwin on arm64" in told
    assert "serve up --triton URL" in told
    assert "--docker run" in told


def test_a_file_is_read(repository: Path) -> None:
    assert "ONNX file" in run("compress", "inspect", str(repository / "m/1/model.onnx"))


def test_load_says_what_its_clock_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    with pytest.raises(ServerError) as caught:
        check_timer()
    assert "timerfd" in caught.value.why
    assert "Linux container" in caught.value.mend


def test_both_places_name_the_same_machines() -> None:
    assert before.BUILT == wheel.BUILT
