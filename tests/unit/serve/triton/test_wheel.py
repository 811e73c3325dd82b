"""Triton's wheel in a folder of its own: whole or not there, for each Python its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.errors import MissingExtraError, ServerError
from serve.triton import find, wheel
from serve.triton.interpreter import Interpreter
from serve.triton.wheel import folder_of, install, private

PIP = """
import pathlib, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*words, file=log)
if {fails!r} and {fails!r} in words[-1]:
    sys.exit("no such package")
if "--target" in words:
    pathlib.Path(words[words.index("--target") + 1], "pytriton").mkdir(parents=True)
"""


def environ(folder: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(folder / "cache")}


def pip_of(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> Path:
    """A tool in pip's place that notes what it is asked, and fails at one package; where it notes it."""
    log = folder / "asked.txt"
    (folder / "tool.py").write_text(PIP.format(log=str(log), fails=fails))
    real = wheel._run

    def run(command: list[str], otherwise: str) -> None:
        as_pip = [sys.executable, str(folder / "tool.py"), *command[3:]]
        real(as_pip if command[1:3] == ["-m", "pip"] else command, otherwise)

    monkeypatch.setattr(wheel, "_run", run)
    return log


@pytest.mark.parametrize(
    ("told", "cache"),
    [({"HOME": "/home/a"}, "/home/a/.cache"), ({"HOME": "/home/a", "XDG_CACHE_HOME": "/c"}, "/c")],
)
def test_it_stands_in_the_cache_with_the_version_of_the_python_in_its_name(told: dict[str, str], cache: str) -> None:
    folders = {folder_of(told, version) for version in ((3, 11), (3, 12))}
    assert {folder.name[-5:] for folder in folders} == {"-3.11", "-3.12"}
    assert {str(folder.parent) for folder in folders} == {f"{cache}/compress-serve"}


def test_a_user_without_a_home_folder_has_none_and_is_told_where_to_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    assert private({}) is None
    with pytest.raises(ServerError, match="can't fetch Triton") as caught:
        install({})
    assert "XDG_CACHE_HOME" in caught.value.mend


def test_it_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = pip_of(tmp_path, monkeypatch)
    assert private(environ(tmp_path)) is None
    folder = install(environ(tmp_path))
    assert install(environ(tmp_path)) == folder == folder_of(environ(tmp_path))
    assert [line.split()[-1] for line in log.read_text().splitlines()] == ["nvidia-pytriton==0.7.0", "numpy==1.26.4"]
    found = private(environ(tmp_path))
    assert found is not None
    assert found.numpy == folder / "numpy"
    assert found.server == folder / "packages" / "pytriton" / "tritonserver"


@pytest.mark.parametrize("package", ["nvidia-pytriton", "numpy"])
def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    pip_of(tmp_path, monkeypatch, fails=package)
    with pytest.raises(ServerError, match="can't fetch Triton") as caught:
        install(environ(tmp_path))
    assert package in caught.value.why
    assert not list((tmp_path / "cache" / "compress-serve").iterdir())


def test_what_a_killed_fetch_has_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_of(tmp_path, monkeypatch)
    folder = folder_of(environ(tmp_path))
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom compress.vetting.swap import staging\n"
        "with staging(Path(sys.argv[1])) as beside:\n    (beside / 'made').mkdir()\n    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == -9
    assert [path.name for path in folder.parent.iterdir()] != []
    assert install(environ(tmp_path)) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_without_pip_and_uv_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="can't fetch Triton") as caught:
        install(environ(tmp_path))
    assert "ensurepip" in caught.value.mend


def test_a_python_without_numpy_1_has_an_environment_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = pip_of(tmp_path, monkeypatch)
    monkeypatch.setattr(wheel, "PYTHONS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = install(environ(tmp_path), python=sys.executable)
    found = private(environ(tmp_path))
    assert found is not None
    assert found.numpy is None
    assert found.python == folder / "python" / "bin" / "python3"
    assert Interpreter.of(found.python).version == Interpreter.running().version
    _, into = log.read_text().splitlines()
    assert "numpy==1.26.4 onnxruntime==" in into


def test_a_python_without_numpy_1_and_no_other_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_of(tmp_path, monkeypatch)
    monkeypatch.setattr(wheel, "PYTHONS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="can't fetch Triton") as caught:
        install(environ(tmp_path))
    assert "3.11 or 3.12" in caught.value.why
    assert not list((tmp_path / "cache" / "compress-serve").iterdir())


def test_a_cache_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ServerError, match="can't fetch Triton") as caught:
        install(environ(tmp_path))
    assert "XDG_CACHE_HOME" in caught.value.mend


def test_a_machine_without_triton_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_of_environment", lambda: None)
    with pytest.raises(ServerError, match="can't start Triton") as caught:
        find.find_triton(environ(tmp_path) | {"PATH": "/nonexistent"})
    assert "serve triton install" in caught.value.mend
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"\.\[triton\]|onnxruntime"):
        find.find_triton(environ(tmp_path) | {"PATH": "/nonexistent"})
