"""A user's mistake gives three lines and exit code 2, no traceback, and leaves what was there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.cli import main
from compress.formats.checkpoint import save
from tests.models import build, mlp
from tests.unit.compress.formats.test_checkpoint import Malicious, X


def model_in(folder: Path) -> Path:
    return save(mlp(), folder / "model.pt", inputs=X)


def saved(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


def truncated(folder: Path) -> list[Any]:
    path = model_in(folder)
    path.write_bytes(path.read_bytes()[:2000])
    return [path]


def malicious(folder: Path) -> list[Any]:
    torch.save(Malicious(folder / "owned"), folder / "model.pt")
    return [folder / "model.pt"]


def nan(folder: Path) -> list[Any]:
    module = mlp()
    module.get_parameter("0.weight").data[0, 0] = float("nan")
    return [save(module, folder / "model.pt", inputs=X)]


def data(folder: Path, *flags: str, **arrays: Any) -> list[Any]:
    np.savez(folder / "data.npz", **arrays)
    return [model_in(folder), *[flag if flag.startswith("--") or flag == "static" else folder / flag for flag in flags]]


STATIC = ("--int8", "static", "--calibration", "data.npz")
MISTAKES: dict[str, tuple[Callable[[Path], list[Any]], str]] = {
    "missing file": (lambda f: [f / "nothing.pt"], "no such file"),
    "truncated file": (truncated, "truncated"),
    "malicious pickle": (malicious, "posix.system"),
    "NaN weights": (nan, "NaN"),
    "wrong input shape": (
        lambda f: [saved(mlp().state_dict(), f / "m.pt"), "--model", "tests.models:mlp",
                   "--input", "x:float32[batch,7]"],
        "does not run on inputs of its signature",
    ),
    "input that is no spec": (
        lambda f: [saved(mlp(), f / "m.pt"), "--input", "4 floats"], "name:dtype[dimensions]"
    ),
    "calibration data of the wrong shape": (lambda f: data(f, *STATIC, x=np.zeros((5, 9), np.float32)), "float32[5, 9]"),
    "empty calibration data": (lambda f: data(f, *STATIC, x=np.zeros((0, 4), np.float32)), "is empty"),
    "missing calibration data": (lambda f: [model_in(f), "--int8", "static", "--calibration", f / "no.npz"], "no such file"),
    "static INT8 without calibration": (lambda f: [model_in(f), "--int8", "static"], "--calibration"),
    "calibration without INT8": (lambda f: data(f, "--calibration", "data.npz", x=np.zeros((5, 4), np.float32)), "--int8 static"),
    "by latency without obs": (lambda f: [model_in(f), "--prune", "0.5", "--allocate", "latency"], "--importance obs"),
    "by latency without data": (
        lambda f: [model_in(f), "--prune", "0.5", "--allocate", "latency", "--importance", "obs"], "--calibration"
    ),
    "by latency on a runtime that is not there": (
        lambda f: [*data(f, "--calibration", "data.npz", x=np.zeros((20, 4), np.float32)), "--prune", "0.5",
                   "--allocate", "latency", "--importance", "obs", "--runtime", "openvino"],
        ".[openvino]",
    ),
    "fraction out of range": (lambda f: [model_in(f), "--prune", "70"], "above 0 and below 1"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_three_lines_and_leaves_the_old_artifact(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, says = MISTAKES[mistake]
    output = tmp_path / "artifact"
    output.mkdir()
    (output / "artifact.json").write_text("what was there")
    with pytest.raises(SystemExit) as caught:
        main(["export", *map(str, arguments(tmp_path)), "-o", str(output)])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line.strip().partition(" ")[0] for line in lines] == ["error:", "why:", "mend:"]
    assert says in "\n".join(lines)
    assert (output / "artifact.json").read_text() == "what was there"
    assert not (tmp_path / "owned").exists()


def test_a_folder_with_something_else_in_it_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(SystemExit):
        main(["export", str(model_in(tmp_path)), "-o", str(tmp_path / "home")])
    assert "won't replace" in capsys.readouterr().err
    assert (tmp_path / "home" / "thesis.tex").exists()


@pytest.mark.parametrize("arguments", [["export"], ["exprot", "x"], ["export", "m.pt", "-o", "x", "--prun", "0.5"]])
def test_a_mistyped_command_line_ends_with_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["measure", "m.onnx", "--eval", "d.npz"], "--data"),
        (["measure", "m.onnx", "--eval=d.npz"], "--data"),
        (["export", "m.pt", "-o", "out", "--data", "d.npz"], "--eval, --calibration"),
    ],
)
def test_a_flag_that_other_commands_have_is_told_by_its_name_here(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    told = capsys.readouterr()
    assert f"it is {name}" in " ".join((told.out + told.err).split())


def test_inspect_tells_what_a_file_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", str(model_in(tmp_path))])
    assert not caught.value.code
    assert "params   131" in capsys.readouterr().out


def test_help_comes_without_torch() -> None:
    code = "import sys\nfrom compress.cli import app\napp(['export', '--help'], result_action='return_value')\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_help_of_export_names_every_kind_of_model_and_of_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("Hugging Face folder", "ONNX file", ".npz", ".jsonl", ".parquet", "folder of images"):
        assert words in told


def test_an_interrupted_run_keeps_what_is_done_and_goes_on(tmp_path: Path) -> None:
    module, inputs = build("residual")
    save(module, tmp_path / "model.pt", inputs=inputs)
    np.savez(tmp_path / "train.npz", image=np.zeros((500, 3, 16, 16), np.float32))
    output = tmp_path / "artifact"
    arguments = [
        sys.executable,
        "-m",
        "compress",
        "export",
        str(tmp_path / "model.pt"),
        "-o",
        str(output),
        "--prune",
        "0.5",
    ]
    arguments += ["--finetune", "train.npz"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    run = subprocess.Popen([*arguments, "--epochs", "10000"], stderr=subprocess.PIPE, text=True, env=environment)
    assert run.stderr is not None
    deadline = time.monotonic() + 120
    stage = "01-prune_channels-????????????/stage.json"  # in place, no longer beside it in a .part
    while not list((tmp_path / "artifact.work").glob(stage)) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(2)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "give the same command again" in err
    assert "Traceback" not in err
    assert not output.exists()
    again = subprocess.run([*arguments, "--epochs", "1"], capture_output=True, text=True, check=True)
    assert "(kept from before)" in next(line for line in again.stderr.splitlines() if "prune_channels" in line)
    assert (output / "model.onnx").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_can_t_be_shown_is_told_of_stdout_and_of_no_folder(tmp_path: Path, unbuffered: str) -> None:
    model_in(tmp_path)
    command = [sys.executable, "-m", "compress", "inspect", str(tmp_path / "model.pt")]
    with Path("/dev/full").open("w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines), lines[0]) == (2, 3, "error: can't write to stdout")
    assert "No space left" in lines[1]


def test_settings_of_plots_that_are_no_text_are_told_in_three_lines(tmp_path: Path) -> None:
    """matplotlib reads them as it is imported, of the current folder first."""
    (tmp_path / "matplotlibrc").write_bytes(b"font.size: 10\n\xff\xfe")
    save(mlp(), tmp_path / "model.pt", inputs="x:float32[batch,4]")
    command = [sys.executable, "-m", "compress", "sensitivity", "model.pt", "-o", "out", "--eval", "eval.npz"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    assert [line.strip().split(":")[0] for line in found.stderr.splitlines()[-3:]] == ["error", "why", "mend"]
    assert "matplotlibrc" in found.stderr.splitlines()[-2]
