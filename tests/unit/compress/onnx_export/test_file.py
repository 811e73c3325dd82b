"""ONNX files written, checked and taken apart without a second copy of their weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.errors import StageError
from compress.formats.files import size_of
from compress.formats.onnx.outline import LARGE, set_apart
from compress.formats.onnx.read import vetted_onnx
from compress.onnx_export import file as onnx_file
from compress.onnx_export import folding
from compress.onnx_export.folding import folded

ROOT = Path(__file__).parents[4]
FOLDED_AT_MOST = 5  # times the file: it was nearly seven, and is about three

MEMORY = """
import sys
from pathlib import Path
from compress.artifact import Signature, TensorSpec
from compress.model import OnnxModel
from compress.onnx_export.fold import FoldOnnx

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

signature = Signature(
    (TensorSpec("x0", "float32", ("batch", 2048)),), (TensorSpec("x6", "float32", ("batch", 2048)),)
)
before = status("VmRSS")
FoldOnnx().run(OnnxModel(Path(sys.argv[1]), signature), Path(sys.argv[2]), lambda *_: None)
print(status("VmHWM") - before)
"""


def network(layers: int = 2, width: int = 200) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((width, width)).astype(np.float32) / width**0.5 for _ in range(layers)]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [f"x{at}", f"w{at}"], [f"x{at + 1}"], name=f"layer{at}") for at in range(layers)],
        "network",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info(f"x{layers}", TensorProto.FLOAT, ["batch", width])],
        [numpy_helper.from_array(values, f"w{at}") for at, values in enumerate(weights)],
        doc_string="of this test",
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def with_everything() -> onnx.ModelProto:
    """Weights in each form that the format has, a body, metadata, a sparse weight."""
    model = network()
    graph = model.graph
    graph.initializer.append(helper.make_tensor("as_floats", TensorProto.FLOAT, [30000], [0.5] * 30000))
    graph.initializer.append(helper.make_tensor("as_text", TensorProto.STRING, [2], [b"a", b"b"]))
    graph.initializer.append(numpy_helper.from_array(np.zeros((0, 4), np.float32), "empty"))
    graph.initializer.append(numpy_helper.from_array(np.float32(2), "one"))
    values = numpy_helper.from_array(np.ones(1, np.float32), "sparse")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "indices")
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [8]))
    body = helper.make_graph(
        [helper.make_node("Identity", ["inside"], ["chosen"])],
        "body",
        [],
        [helper.make_tensor_value_info("chosen", TensorProto.FLOAT, [70, 300])],
        [numpy_helper.from_array(np.ones((70, 300), np.float32), "inside")],
    )
    graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    graph.node.append(helper.make_node("If", ["yes"], ["of_body"], name="if", then_branch=body, else_branch=body))
    helper.set_model_props(model, {"made": "here"})
    return model


def test_what_is_saved_is_the_model(tmp_path: Path) -> None:
    model = with_everything()
    onnx_file.save(model, tmp_path / "model.onnx")
    assert onnx.load(tmp_path / "model.onnx") == model


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a message held less than the weights of `network`."""
    monkeypatch.setattr(onnx_file, "MOST", 200_000)


def same(model: onnx.ModelProto, path: Path) -> None:
    back = onnx.load(path)
    for was, now in zip(model.graph.initializer, back.graph.initializer, strict=True):
        assert (was.name, was.data_type, was.dims) == (now.name, now.data_type, now.dims)
        assert np.array_equal(numpy_helper.to_array(was), numpy_helper.to_array(now))
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.initializer[:], back.graph.initializer[:]
    assert back == bare


def test_what_one_message_can_not_hold_lies_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch)
    model = with_everything()
    onnx_file.save(model, tmp_path / "model.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    same(model, tmp_path / "model.onnx")
    assert size_of(tmp_path / "model.onnx") > 2 * 200 * 200 * 4
    vetted_onnx(tmp_path / "model.onnx")


def test_weights_that_lie_beside_a_file_stay_there_or_come_in_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    whole, most = network(), onnx_file.MOST
    few(monkeypatch)
    onnx_file.save(whole, path)
    light = onnx.load(path, load_external_data=False)
    light.graph.doc_string = "another"
    onnx_file.save(light, path)
    whole.graph.doc_string = "another"
    same(whole, path)
    there = (tmp_path / "model.onnx.data").stat().st_size

    light.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((300, 300), np.float32), "w0"))
    whole.graph.initializer[0].CopyFrom(light.graph.initializer[0])
    onnx_file.save(light, path)  # one is new: the file beside is written anew
    same(whole, path)
    assert (tmp_path / "model.onnx.data").stat().st_size > there

    monkeypatch.setattr(onnx_file, "MOST", most)
    onnx_file.save(onnx.load(path, load_external_data=False), path)
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]
    same(whole, path)


def test_weights_beside_a_file_are_set_apart_and_folded_as_those_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere = tmp_path / "model.onnx", tmp_path / "elsewhere"
    elsewhere.mkdir()
    few(monkeypatch)
    onnx_file.save(network(), path)
    onnx.save(set_apart(path, elsewhere / "weights"), elsewhere / "light.onnx")
    same(network(), elsewhere / "light.onnx")
    made = folded(path)
    onnx_file.checked(made)
    assert {t.name for t in made.graph.initializer if len(t.raw_data) == 200 * 200 * 4} == {"w0", "w1"}


def test_the_check_of_a_model_without_its_values_finds_what_the_whole_one_does() -> None:
    model = network()
    onnx_file.checked(model)
    model.graph.node[1].input[1] = "nowhere"
    for check in (onnx.checker.check_model, onnx_file.checked):
        with pytest.raises(onnx.checker.ValidationError):
            check(model)


def test_large_weights_set_apart_come_back(tmp_path: Path) -> None:
    model = with_everything()
    onnx.save(model, tmp_path / "model.onnx")
    light = set_apart(tmp_path / "model.onnx", tmp_path / "weights")
    assert {t.name for t in light.graph.initializer if t.data_location == TensorProto.EXTERNAL} == {"w0", "w1"}
    assert all(len(t.raw_data) <= LARGE for t in light.graph.initializer)
    onnx.save(light, tmp_path / "light.onnx")
    back = onnx.load(tmp_path / "light.onnx")
    for was, now in zip(model.graph.initializer, back.graph.initializer, strict=True):
        assert (was.name, was.data_type, was.dims) == (now.name, now.data_type, now.dims)
        assert np.array_equal(numpy_helper.to_array(was), numpy_helper.to_array(now))
    del light.graph.initializer[:], model.graph.initializer[:]
    assert light == model


def test_folding_computes_what_is_constant_and_tells_shapes(tmp_path: Path) -> None:
    model = network()
    graph = model.graph
    graph.node.insert(0, helper.make_node("Transpose", ["w0"], ["turned"], name="turn"))
    graph.node[1].input[1] = "turned"
    onnx.save(model, tmp_path / "model.onnx")
    made = folded(tmp_path / "model.onnx")
    assert [node.op_type for node in made.graph.node] == ["MatMul", "MatMul"]
    weights = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    turned = numpy_helper.to_array(graph.initializer[0]).T
    assert np.array_equal(weights[made.graph.node[0].input[1]], turned)
    between = next(value for value in made.graph.value_info if value.name == made.graph.node[0].output[0])
    dims = between.type.tensor_type.shape.dim
    assert (dims[0].dim_param, dims[1].dim_value) == ("batch", 200)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of memory there")
def test_folding_holds_little_more_than_the_weights(tmp_path: Path) -> None:
    onnx.save(network(layers=6, width=2048), tmp_path / "model.onnx")
    size = (tmp_path / "model.onnx").stat().st_size
    (tmp_path / "folded").mkdir()
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "model.onnx"), str(tmp_path / "folded")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert int(done.stdout) < FOLDED_AT_MOST * size


@pytest.mark.parametrize("what", ["no kernel", "sizes that do not fit", "a constant that can't be computed"])
def test_what_onnx_runtime_can_not_optimize_is_told_in_three_lines(tmp_path: Path, what: str) -> None:
    model = network()
    node = model.graph.node[0]
    match what:
        case "no kernel":
            node.domain = "elsewhere"
            model.opset_import.append(helper.make_opsetid("elsewhere", 1))
        case "sizes that do not fit":
            model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.ones((3, 200), np.float32), "w1"))
        case _:
            model.graph.initializer.append(numpy_helper.from_array(np.array([7], np.int64), "sizes"))
            model.graph.node.insert(0, helper.make_node("Reshape", ["w0", "sizes"], ["turned"], name="turn"))
            node.input[1] = "turned"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(StageError, match="ONNX Runtime can't optimize this model") as told:
        folded(tmp_path / "model.onnx")
    assert told.value.__cause__ is not None  # `shortages` looks there for memory and disks that ran out
    assert len(str(told.value).splitlines()) == 3


def test_what_onnx_can_not_read_back_is_told_in_three_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(network(), tmp_path / "model.onnx")
    optimize = folding._optimize

    def cut(source: Path, target: Path) -> None:
        optimize(source, target)
        target.write_bytes(target.read_bytes()[:-7])

    monkeypatch.setattr(folding, "_optimize", cut)
    with pytest.raises(StageError, match="can't read what ONNX Runtime made"):
        folded(tmp_path / "model.onnx")
