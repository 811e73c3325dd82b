"""What TensorRT would refuse or run slowly, one case each; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import compress
from compress.cli import main
from compress.errors import StageError
from compress.model import OnnxModel
from compress.quantize.half.half_onnx import HalfOnnx
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.tensorrt.lint import lint_tensorrt
from compress.tensorrt.lint_cpu import lint_cpu
from tests.families import family
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_half_onnx import exported, random_data

F = TensorProto.FLOAT


def saved(folder: Path, nodes: list[onnx.NodeProto], **weights: Any) -> Path:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", F, ["batch", 4])],
        [onnx.ValueInfoProto(name=nodes[-1].output[0])],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in weights.items()],
    )  # fmt: skip
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def node(kind: str, given: list[str], made: str = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, given, [made], name=kind.lower(), **attributes)


REFUSED: dict[str, Any] = {
    "an operator": ([node("Det", ["x"])], {}, "Det is not supported"),
    "another's operator": ([node("Gelu", ["x"], domain="com.microsoft")], {}, "com.microsoft.Gelu is not ONNX's own"),
    "dynamic INT8": (
        [helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="dynamic")],
        {},
        "reads INT8 from Q/DQ nodes alone",
    ),
    "a zero-point": (
        [node("QuantizeLinear", ["x", "s", "z"], "q"), node("DequantizeLinear", ["q", "s", "z"])],
        {"s": np.float32(0.1), "z": np.int8(3)},
        "its zero-point is not 0",
    ),
    "unsigned activations": (
        [node("QuantizeLinear", ["x", "s", "z"], "q"), node("DequantizeLinear", ["q", "s", "z"])],
        {"s": np.float32(0.1), "z": np.uint8(0)},
        "activations are unsigned",
    ),
    "a quantized bias": (
        [node("DequantizeLinear", ["b", "s"], "c"), node("Add", ["x", "c"])],
        {"s": np.float32(0.1), "b": np.zeros(4, np.int32)},
        "a bias is quantized to INT32",
    ),
    "INT8 that is not restored": (
        [node("QuantizeLinear", ["x", "s", "z"], "q"), node("Transpose", ["q"])],
        {"s": np.float32(0.1), "z": np.int8(0)},
        "what it gives is not restored",
    ),
    "a partly supported operator": (
        [helper.make_node("TopK", ["x", "k"], ["y", "i"], name="topk", sorted=0)],
        {"k": np.array([2])},
        "TopK: sorted must be 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_tensorrt_refuses_is_an_error_with_a_way_out(case: str, tmp_path: Path) -> None:
    nodes, weights, says = REFUSED[case]
    found = lint_tensorrt(saved(tmp_path, nodes, **weights))
    assert found.refused
    error = next(item for item in found.findings if item.severity == "error")
    assert says in error.what
    assert error.mend


def test_a_newer_opset_and_a_second_dimension_that_varies_are_noted(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [node("Relu", ["x"])], "g", [helper.make_tensor_value_info("x", F, ["batch", "length"])],
        [helper.make_tensor_value_info("y", F, None)],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10), tmp_path / "m.onnx")
    found = lint_tensorrt(tmp_path / "m.onnx")
    notes = [item.what for item in found.findings]
    assert not found.refused
    assert any("opset 22" in note for note in notes)
    assert any("varies in length" in note for note in notes)


def test_a_file_for_the_cpu_is_refused_and_one_for_tensorrt_is_not(tmp_path: Path) -> None:
    module, inputs = family("residual")
    model = exported(module, inputs, tmp_path)
    data = random_data(model, 16)
    for target in ("cpu", "tensorrt"):
        (tmp_path / target).mkdir()
        given = QuantizeOnnx("static", data, target=target).run(model, tmp_path / target, quiet)
        assert isinstance(given.model, OnnxModel)
        assert lint_tensorrt(given.model.path).refused == (target == "cpu")


def test_a_layer_left_out_is_seen_with_its_precision_and_the_reason(tmp_path: Path) -> None:
    module, inputs = family("residual")
    model = exported(module, inputs, tmp_path)
    data = random_data(model, 16)
    names = [item.name for item in onnx.load(model.path).graph.node if item.op_type == "Conv"]
    for folder in ("int8", "half"):
        (tmp_path / folder).mkdir()
    stage = QuantizeOnnx("static", data, target="tensorrt", exclude=(names[1],))
    eight = stage.run(model, tmp_path / "int8", quiet).model
    assert isinstance(eight, OnnxModel)
    found = {layer.name: layer for layer in lint_tensorrt(eight.path).layers}
    assert (found[names[1]].precision, found[names[1]].why) == ("FP32", "nothing that it takes is INT8")
    assert found[names[0]].precision == "INT8"
    slow = [item for item in lint_tensorrt(eight.path).findings if item.severity == "slow"]
    assert any(item.layer == names[1] and "in FP32" in item.what for item in slow)
    half = HalfOnnx("fp16", data, "tensorrt").run(eight, tmp_path / "half", quiet).model
    assert isinstance(half, OnnxModel)
    after = {layer.name: layer for layer in lint_tensorrt(half.path).layers}
    assert after[names[1]].precision == "FP16"


def test_q_and_dq_between_a_layer_and_its_relu_are_slow(tmp_path: Path) -> None:
    scale = {"s": np.float32(0.1), "z": np.int8(0), "w": np.ones((4, 4), np.int8)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="d"),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["v"], name="v"),
        helper.make_node("Gemm", ["d", "v"], ["h"], name="gemm"),
        helper.make_node("QuantizeLinear", ["h", "s", "z"], ["p"], name="p"),
        helper.make_node("DequantizeLinear", ["p", "s", "z"], ["e"], name="e"),
        helper.make_node("Relu", ["e"], ["y"], name="relu"),
    ]
    found = lint_tensorrt(saved(tmp_path, nodes, **scale))
    assert any(item.layer == "gemm" and "part it from the Relu" in item.what for item in found.findings)


def test_what_is_no_onnx_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"not onnx")
    for path in (tmp_path / "x.onnx", tmp_path / "missing.onnx"):
        with pytest.raises(StageError, match="can't read"):
            lint_tensorrt(path)


def test_the_command_tells_layers_and_findings_and_fails_for_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, inputs = family("residual")
    compress.save(module, tmp_path / "model.pt", inputs=inputs)
    compress.export(tmp_path / "model.pt", compress.ExportOptions(output=tmp_path / "artifact"))
    main_ends(["lint", str(tmp_path / "artifact"), "--target", "tensorrt"], 0)
    assert "FP32" in capsys.readouterr().out
    main_ends(["lint", str(tmp_path / "artifact"), "--json"], 0)
    told = json.loads(capsys.readouterr().out)
    assert told["precisions"] == {"FP32": len(told["layers"])}
    path = saved(tmp_path, [node("Det", ["x"])])
    main_ends(["lint", str(path)], 1)
    assert "Det is not supported" in capsys.readouterr().out


def test_what_there_is_to_mend_comes_first_and_each_layer_only_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, [node("Det", ["x"])])
    main_ends(["lint", str(path)], 1)
    short = capsys.readouterr().out
    assert short.index("Det is not supported") < short.index("layers: ")
    assert "read off the graph" not in short
    for flag in ("--layers", "--verbose"):
        main_ends(["lint", str(path), flag], 1)
        told = capsys.readouterr().out
        assert told.index("Det is not supported") < told.index("layers: ") < told.index("read off the graph")


def main_ends(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code or 0) == code


def test_what_was_made_for_the_cpu_is_told_what_matters_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, inputs = family("residual")
    compress.save(module, tmp_path / "model.pt", inputs=inputs)
    compress.export(tmp_path / "model.pt", compress.ExportOptions(output=tmp_path / "artifact", int8="dynamic"))
    main_ends(["lint", str(tmp_path / "artifact")], 0)
    told = capsys.readouterr().out
    assert told.startswith("For ONNX Runtime on a CPU")
    assert "a convolution of dynamic INT8, slower than the float one" in told
    assert "DynamicQuantizeLinear is not supported" not in told
    main_ends(["lint", str(tmp_path / "artifact"), "--target", "tensorrt"], 1)
    told = capsys.readouterr().out
    assert told.startswith("For TensorRT")
    assert "DynamicQuantizeLinear is not supported" in told


def test_a_cpu_has_its_own_limits(tmp_path: Path) -> None:
    halves = {"w": np.zeros((4, 8), np.float16)}
    foreign = helper.make_node("Mine", ["x"], ["y"], name="mine", domain="my.own")
    assert [item.severity for item in lint_cpu(saved(tmp_path, [foreign])).findings] == ["error"]
    product = [
        helper.make_node("Cast", ["x"], ["h"], to=10),
        helper.make_node("MatMul", ["h", "w"], ["y"], name="product"),
    ]
    found = lint_cpu(saved(tmp_path, product, **halves)).findings
    assert [(item.severity, item.layer) for item in found] == [("slow", "product")]
    assert "no kernel" in found[0].what
