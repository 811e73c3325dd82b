"""Files with weights beside them are measured side by side, with one of them in memory at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.artifact import Signature, TensorSpec
from compress.model import OnnxModel
from compress.onnx_export import file
from compress.runtime import latency as clock
from compress.runtime.backends import OnnxBackend, in_turns, open_model
from compress.runtime.backends.in_turns import open_all
from compress.runtime.latency import latency

ROOT = Path(__file__).parents[4]
WIDTH, LAYERS = 1536, 12
BYTES = 4 * LAYERS * WIDTH * WIDTH
AT_MOST = 2.4  # times one file; it is 1.2 to 1.8, and with three of them open 3.1

MEMORY = """
import sys
from pathlib import Path
import numpy as np
from compress.artifact import Signature, TensorSpec
from compress.model import OnnxModel
from compress.runtime.backends.in_turns import open_all
from compress.runtime.latency import latency

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

files = sys.argv[1:]
inputs = {"x": np.ones((1, WIDTH), np.float32)}
signature = Signature((TensorSpec("x", "float32", ("batch", WIDTH)),), (TensorSpec("y", "float32", ("batch", WIDTH)),))
before = status("VmRSS")
models = {name: OnnxModel(Path(name), signature) for name in files}
latency(open_all(models, threads=1), inputs, rounds=2, block_seconds=0)
print(status("VmHWM") - before)
"""


def signature_of(width: int) -> Signature:
    given, shown = (TensorSpec(name, "float32", ("batch", width)) for name in "xy")
    return Signature((given,), (shown,))


def written(path: Path, monkeypatch: pytest.MonkeyPatch, *, seed: int, width: int, layers: int) -> OnnxModel:
    """A chain of MatMuls, its weights beside the file."""
    rng = np.random.default_rng(seed)
    weights = [rng.standard_normal((width, width), np.float32) / width**0.5 for _ in range(layers)]
    names = ["x", *(f"h{at}" for at in range(layers - 1)), "y"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [names[at], f"w{at}"], [names[at + 1]], name=f"m{at}") for at in range(layers)],
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", width])],
        [numpy_helper.from_array(values, f"w{at}") for at, values in enumerate(weights)],
    )
    made: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    with monkeypatch.context() as lowered:
        lowered.setattr(file, "MOST", width * width)
        file.save(made, path)
    assert path.with_name(path.name + ".data").exists()
    return OnnxModel(path, signature_of(width))


def test_one_is_open_at_a_time_and_each_answers_as_if_it_stayed_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {
        str(seed): written(tmp_path / f"{seed}.onnx", monkeypatch, seed=seed, width=160, layers=2) for seed in range(3)
    }
    alive: weakref.WeakSet[OnnxBackend] = weakref.WeakSet()
    opened: list[str] = []

    def counted(model: OnnxModel, *, threads: int) -> Any:
        assert not alive, "the one before is closed before the next is opened"
        backend = OnnxBackend(model, threads)
        alive.add(backend)
        opened.append(model.path.stem)
        return backend

    monkeypatch.setattr(in_turns, "open_model", counted)
    found = open_all(models, threads=1)
    inputs = {"x": np.random.default_rng(9).standard_normal((3, 160), np.float32)}
    for name in ("0", "0", "2", "1", "0"):
        np.testing.assert_array_equal(
            found[name].infer(inputs)["y"], open_model(models[name], threads=1).infer(inputs)["y"]
        )
    assert opened == ["0", "1", "2", "0", "2", "1", "0"], "by turns, and none anew that is open"
    assert {backend.runtime for backend in found.values()} == {"ONNX Runtime"}


def test_opening_is_in_no_latency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block begins with a call that does not count: every timed one finds its file open."""
    models = {
        str(seed): written(tmp_path / f"{seed}.onnx", monkeypatch, seed=seed, width=160, layers=2) for seed in range(2)
    }
    slow: list[None] = []

    def told(model: OnnxModel, *, threads: int) -> Any:
        slow.append(None)
        return OnnxBackend(model, threads)

    monkeypatch.setattr(in_turns, "open_model", told)
    found = open_all(models, threads=1)
    counts: list[int] = []
    real = in_turns.InTurns.infer

    def seen(self: in_turns.InTurns, inputs: Any) -> Any:
        before = len(slow)
        answers = real(self, inputs)
        counts.append(len(slow) - before)
        return answers

    monkeypatch.setattr(in_turns.InTurns, "infer", seen)
    monkeypatch.setattr(clock, "LONG_CALL", 0.0)  # of calls as long as a large model's, none was warmed up
    monkeypatch.setattr(clock, "CALLS", (1, 1))
    turns = latency(found, {"x": np.ones((1, 160), np.float32)}, rounds=3)
    assert len(turns) == 2
    blocks = counts[-2 * 2 * 3 :]  # of each model in each round: one to open it, and one that counts
    assert not any(blocks[1::2])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells of memory there")
def test_three_in_turns_take_the_memory_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        str(written(tmp_path / f"{at}.onnx", monkeypatch, seed=at, width=WIDTH, layers=LAYERS).path) for at in range(3)
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.replace("WIDTH", str(WIDTH)), *files],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < AT_MOST * BYTES
