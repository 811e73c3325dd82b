"""docs/begin.md: the first commands for each kind of model, run as they stand, and their models asked."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from PIL import Image

from tests.e2e.conftest import compress_here, free_port, running
from tests.e2e.test_readme import blocks
from tests.hub_models import sentence_folder, vit_folder

pytestmark = pytest.mark.timeout(1200)
PAGE = "docs/begin.md"
SCRIPTS = Path(sys.executable).parent
# Where torchvision is not installed: the same name, for a network of the same inputs.
STAND_IN = """\
from torch import nn


def resnet18():
    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    return nn.Sequential(block(3, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
"""


def lines() -> list[str]:
    text = "\n".join(blocks("sh", PAGE)).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page takes for given, small."""
    folder = tmp_path_factory.mktemp("begin")
    torch.manual_seed(0)
    vit_folder(folder / "vit-pets")
    sentence_folder(folder / "all-MiniLM-L6-v2")
    rows = [{"text": f"word{at % 50} word{at * 7 % 50} word{at * 3 % 50}"} for at in range(40)]
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if importlib.util.find_spec("torchvision") is None:
        (folder / "torchvision").mkdir()
        (folder / "torchvision/__init__.py").write_text("")
        (folder / "torchvision/models.py").write_text(STAND_IN)
    factory = "import torch, torchvision.models as models; torch.save(models.resnet18().state_dict(), 'resnet18.pth')"
    subprocess.run([sys.executable, "-c", factory], cwd=folder, check=True)
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    batch = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 64]) for name in ("x", "boxes")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["boxes"])], "detector", batch[:1], batch[1:],
                              [numpy_helper.from_array(weight, "w")])  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, folder / "detector.onnx")
    Image.fromarray(np.arange(48 * 48 * 3, dtype=np.uint8).reshape(48, 48, 3)).save(folder / "cat.jpg")
    (code,) = blocks("python", PAGE)
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    return folder


def done(line: str, folder: Path) -> str:
    words = shlex.split(line)
    if words[0] == "compress" and "torchvision" not in line:  # for which a module of that name may stand here
        compress_here(words[1:], folder)
        return ""
    if words[0] != "curl":
        words[0] = str(SCRIPTS / words[0])
    environ = os.environ | {"COMPRESS_MEASURE_SECONDS": "0"}
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=400, check=False, env=environ)
    assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
    return result.stdout


def test_each_line_works_as_it_stands(files: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    found = lines()
    assert [line.split()[0] for line in found].count("compress") == 5, "one export for each kind"
    (at,) = (number for number, line in enumerate(found) if line.startswith("serve up"))
    for line in found[:at]:
        done(line, files)
    port = free_port()
    ports = f"--port {port} --triton-http-port 0 --triton-grpc-port 0 --triton-metrics-port 0"
    with running(shlex.split(f"{SCRIPTS / found[at]} {ports}"), f"http://127.0.0.1:{port}", files):
        url = f"http://127.0.0.1:{port}"
        answers = [
            json.loads(done(line.replace("http://127.0.0.1:8080", url) + (f" --url {url}" if "infer" in line else ""),
                            files))
            for line in found[at + 1 :]
        ]  # fmt: skip
    pets, resnet, texts, mine, detector = answers
    assert pets["outputs"]["label"] in ("cat", "dog")
    assert resnet["model"] == "resnet18"
    assert resnet["outputs"]
    assert len(texts["outputs"]["embeddings"]) == 32
    assert len(mine["outputs"]["logits"]) == 3
    assert detector["inputs"][0]["name"] == "x"
