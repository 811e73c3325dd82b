"""Nothing is told to the makers of the runtimes: no identifier is kept, no event is stored to be sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper


@pytest.mark.parametrize(
    "command",
    [
        ("compress", "inspect", "model.onnx"),
        ("compress", "measure", "model.onnx", "--runtime", "onnxruntime"),
        ("serve", "pack", "model.onnx", "--repository", "repository", "--name", "m"),
    ],
    ids=" ".join,
)
def test_onnx_runtime_keeps_no_identifier_and_no_events(command: tuple[str, ...], tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "model.onnx"
    )
    home = tmp_path / "home"
    home.mkdir()
    known = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}

    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env=known | {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")},
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert not [path.name for path in home.rglob("*") if "onnxruntime" in path.name or path.name == "deviceid"]


@pytest.mark.parametrize("place", ["home", "unwritable"])
def test_what_others_have_put_into_tmp_under_the_name_of_torch_s_cache_is_not_met(tmp_path: Path, place: str) -> None:
    """torch makes the folder when its tracer is imported, and fails where somebody has a file of that name."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    home = tmp_path / "home" if place == "home" else Path("/dev/null/none")
    known = {
        name: value for name, value in os.environ.items() if name not in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
    }
    code = (
        "import compress, os, pathlib, torch._inductor.runtime.cache_dir_utils as told\n"
        "there = pathlib.Path(told.default_cache_dir())\n"
        "there.touch() if 'TORCHINDUCTOR_CACHE_DIR' in os.environ else None\n"
        "import torch._dynamo\nprint(told.cache_dir())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240,
        env=known | {"HOME": str(home), "TMPDIR": str(tmp_path / "tmp")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted = home / ".cache/compress-serve/torch" if place == "home" else tmp_path / "tmp"
    assert done.stdout.strip().startswith(str(wanted))
