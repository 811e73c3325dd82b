"""Finding a tritonserver, and what is checked before one is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import rich

import serve
from compress.errors import ServerError
from serve.config.model_config import ModelConfig, ModelInput, ModelInstanceGroup
from serve.repository.read import ModelInfo
from serve.triton.find import build_backends, check_numpy, check_stub, find_triton
from serve.triton.interpreter import Interpreter, environment, library_folders
from serve.triton.log import failures
from serve.triton.memory import MIB, check_room, region_bytes
from serve.triton.ports import HOST, Ports, claim


def installed(folder: Path, *, backends: bool = True) -> Path:
    """What looks like a whole Triton installation; its executable."""
    binary = folder / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    if backends:
        (folder / "backends").mkdir()
    return binary


def test_an_installation_on_path_is_taken_with_its_own_backends(tmp_path: Path) -> None:
    binary = installed(tmp_path)
    triton = find_triton({"PATH": str(binary.parent)})
    assert triton.binary == binary
    assert build_backends(triton, tmp_path / "run") == tmp_path / "backends"


def test_the_variable_goes_before_path(tmp_path: Path) -> None:
    named, on_path = installed(tmp_path / "named"), installed(tmp_path / "path")
    assert find_triton({"PATH": str(on_path.parent), "TRITONSERVER": str(named)}).binary == named


def test_a_variable_that_names_no_executable_is_told(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="nowhere"):
        find_triton({"TRITONSERVER": str(tmp_path / "nowhere")})


def test_an_installation_without_backends_is_told(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="can't use the tritonserver"):
        find_triton({"TRITONSERVER": str(installed(tmp_path, backends=False))})


def test_the_wheel_is_found_and_not_imported(tmp_path: Path) -> None:
    triton = find_triton({"PATH": "/nonexistent", "HOME": os.environ["HOME"]})
    assert triton.binary.is_file()
    assert "pytriton" not in sys.modules
    folder = build_backends(triton, tmp_path / "backends")
    assert {path.name for path in (folder / "python").iterdir()} == {
        "libtriton_python.so",
        "stub",
        "triton_python_backend_stub",
        "triton_python_backend_utils.py",
    }
    assert os.access(folder / "python" / "triton_python_backend_stub", os.X_OK)
    assert (folder / "onnxruntime" / "model.py").is_file()
    assert build_backends(triton, folder) == folder  # again over the old ones


@pytest.mark.parametrize(("version", "good"), [("1.26.4", True), ("2.0.0", False), ("2.3.1rc1", False)])
def test_numpy_2_is_refused(version: str, good: bool) -> None:
    if good:
        check_numpy(version)
    else:
        with pytest.raises(ServerError, match=version) as caught:
            check_numpy(version)
        assert "serve triton install" in caught.value.mend


def test_a_python_without_a_stub_is_told_which_have_one(tmp_path: Path) -> None:
    for version in ("3.10", "3.11"):
        (tmp_path / version).mkdir()
    with pytest.raises(ServerError, match=r"3\.99") as caught:
        check_stub(tmp_path / "3.99" / "triton_python_backend_stub", "3.99")
    assert "3.10, 3.11" in caught.value.why


def test_an_interpreter_is_asked_what_it_is() -> None:
    assert Interpreter.of(Path(sys.executable)) == Interpreter.running()


def test_an_interpreter_that_has_gone_is_told(tmp_path: Path) -> None:
    gone = tmp_path / "python" / "bin" / "python3"
    gone.parent.mkdir(parents=True)
    gone.symlink_to("/nonexistent")
    with pytest.raises(ServerError, match="can't run Triton's Python backend") as caught:
        Interpreter.of(gone)
    assert caught.value.mend == f"rm -r {tmp_path}, then `serve triton install`"


def test_an_environment_has_the_packages_of_this_one_after_those_before_them(tmp_path: Path) -> None:
    before = tmp_path / "be'fore"
    (before / "numpy").mkdir(parents=True)
    (before / "numpy" / "__init__.py").write_text("__version__ = 'first'")
    python = environment(tmp_path / "made", before) / "python3"
    code = "import numpy, rich, pytest, serve; print(numpy.__version__, rich.__file__, serve.__file__)"
    # as a stub is started: nothing comes from the variables
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    numpy, rich_file, serve_file = done.stdout.split()
    assert numpy == "first"
    assert Path(rich_file) == Path(rich.__file__)
    assert Path(serve_file) == Path(serve.__file__)


def test_a_port_of_0_becomes_a_free_one_of_its_own() -> None:
    ports = claim(Ports(0, 0, 0))
    assert len({ports.http_port, ports.grpc_port, ports.metrics_port} - {0}) == 3


@pytest.mark.parametrize("name", ["http_port", "grpc_port", "metrics_port"])
def test_a_port_in_use_is_told_with_the_flag_that_changes_it(name: str) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=str(port)) as caught:
            claim(Ports(**{"http_port": 0, "grpc_port": 0, "metrics_port": 0, name: port}))
    assert f"--triton-{name.replace('_', '-')}" in caught.value.mend


@pytest.mark.parametrize("port", [-1, 70_000])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ServerError, match=str(port)):
        claim(Ports(port, 0, 0))


def test_two_flags_with_one_port_are_refused() -> None:
    port = claim(Ports(0, 0, 0)).http_port
    with pytest.raises(ServerError) as caught:
        claim(Ports(port, port, 0))
    assert "another flag" in caught.value.why


def models(instances: int, *dims: int) -> list[ModelInfo]:
    tensor = ModelInput("x", "TYPE_FP32", dims)
    network = ModelConfig(
        "a", backend="onnxruntime", max_batch_size=32, input=(tensor,), instance_group=(ModelInstanceGroup(instances),)
    )
    return [ModelInfo("a", network, (1,)), ModelInfo("e", ModelConfig("e", platform="ensemble"), (1,))]


@pytest.mark.parametrize(("dims", "mib"), [((4,), 1), ((-1,), 1), ((3, 224, 224), 19), ((3, 1024, 1024), 32)])
def test_a_region_holds_the_largest_batch_within_reason(dims: tuple[int, ...], mib: int) -> None:
    assert region_bytes(models(1, *dims)) == mib * MIB


def test_too_little_shared_memory_is_told_before_triton_dies_of_it() -> None:
    check_room(models(3, 4), free_bytes=3 * MIB)
    with pytest.raises(ServerError) as caught:
        check_room(models(4, 4), free_bytes=3 * MIB)
    assert "4 model processes need 4 MiB" in caught.value.why
    assert "--shm-size=8m" in caught.value.mend


HEAD = "E1120 22:36:06.614026 8414 model_lifecycle.cc:642] "
NOISE = f'{HEAD}"CudaDriverHelper has not been initialized."\nError: Failed to initialize NVML\n'
NO_MODULE = (
    r"failed to load 'a_preprocess' version 1: Internal: ModuleNotFoundError: No module named 'x'\n\nAt:\n"
    r"  /r/a_preprocess/1/hooks.py(7): <module>\n  <frozen importlib._bootstrap>(241): f\n"
)
NO_BACKEND = "failed to load 'a' version 1: Invalid argument: no such backend"
NO_MEMBER = "Invalid argument: ensemble 'e' depends on 'a' which has no loaded version"


@pytest.mark.parametrize(
    ("log", "reasons"),
    [
        ("", []),
        (NOISE, []),
        (
            f'{NOISE}{HEAD}"{NO_MODULE}"',
            ["a_preprocess: ModuleNotFoundError: No module named 'x' (hooks.py, line 7)"],
        ),
        (f'{HEAD}"{NO_BACKEND}"\n{HEAD}"{NO_MEMBER}"', ["a: no such backend"]),
        (f"{HEAD}\"Poll failed for model directory 'a': no good\"", ["a: no good"]),
        (f'{HEAD}"Invalid argument: in ensemble e, tensor t is lost"', ["in ensemble e, tensor t is lost"]),
        (
            NOISE + "failed to start HTTP service: Unavailable - Socket '127.0.0.1:80' already in use\n",
            ["HTTP service: Unavailable - Socket '127.0.0.1:80' already in use"],
        ),
    ],
)
def test_the_log_is_told_in_a_line_for_each_model_at_fault(log: str, reasons: list[str]) -> None:
    assert failures(log) == reasons


@pytest.mark.parametrize("told_by", ["sysconfig", "prefix"])
def test_the_library_of_the_interpreter_itself_is_put_on_the_path(
    told_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader finds pyenv's and uv's for the interpreter alone, whose executable says where; not for the stub."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libpython3.99.so.1.0").touch()
    monkeypatch.setattr("sysconfig.get_config_var", lambda _: str(folder) if told_by == "sysconfig" else "/install/lib")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path if told_by == "prefix" else "/nonexistent"))
    python = replace(Interpreter.running(), version="3.99")
    assert library_folders(python, os.environ) == (folder,)


def test_a_python_without_its_shared_library_is_told_what_to_install() -> None:
    with pytest.raises(ServerError) as caught:
        library_folders(Interpreter(sys.executable, "3.99", ()), os.environ)
    assert "libpython3.99.so.1.0 is not installed" in caught.value.why
    assert "apt-get install libpython3.99" in caught.value.mend
