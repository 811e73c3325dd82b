"""Random small graphs, of kinds that torch does not write, through each stage that writes ONNX at random options."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.errors import StageError
from compress.model import OnnxModel
from compress.onnx_export.fold import FoldOnnx
from compress.quantize.calibrate import calibrate
from compress.quantize.half.half_onnx import HalfOnnx
from compress.quantize.int8_onnx import finish, plain
from compress.quantize.put_back import Mixed
from compress.quantize.quantize_onnx import QuantizeOnnx, quantized
from compress.quantize.smooth_onnx import SmoothOnnx
from compress.quantize.tied_tables import ties
from compress.runtime.backends import OnnxBackend
from compress.stage import Stage
from tests.unit.compress.onnx_graphs import data_for, error_of, normal, written
from tests.unit.compress.prune.test_prune_channels import quiet

WIDTH = 32
KINDS = (
    "matmul", "gemm", "gemm_turned", "tied", "add", "residual", "relu", "clip", "tanh", "norm", "softmax", "concat",
    "constant", "constant_float", "defaulted", "empty", "branch", "conv", "zero", "scalar",
)  # fmt: skip
NAMES = ("int8_zero", "x_int8", "x_scale", "x_QuantizeLinear_Output", "w_half", "x_cast10", "")


class Builder:
    """Grows a graph [batch, WIDTH] by one block after the other."""

    def __init__(self, name: str) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, Any] = {"shared": normal(WIDTH, WIDTH)}
        self.defaults: list[onnx.ValueInfoProto] = []
        self.seen = ["x"]
        self.odd = name
        self.count = 0

    def add(self, op: str, given: list[str], **attributes: Any) -> str:
        self.count += 1
        odd = self.odd and self.count == 2 and self.odd not in self.seen
        made = self.odd if odd else f"t{self.count}"
        name = f"n{self.count}" if self.odd else ""  # ONNX asks for none
        self.nodes.append(helper.make_node(op, given, [made], name=name, **attributes))
        return made

    def weight(self, values: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = values
        return name

    def block(self, kind: str, at: int) -> None:
        x, seed = self.seen[-1], len(self.weights)
        square = normal(WIDTH, WIDTH, seed=seed)
        if kind == "matmul":
            y = self.add("MatMul", [x, self.weight(square)])
        elif kind == "gemm":
            y = self.add("Gemm", [x, self.weight(square), self.weight(normal(WIDTH, seed=seed))])
        elif kind == "gemm_turned":
            y = self.add("Gemm", [x, "shared"], transB=1, alpha=0.5)
        elif kind == "tied":
            y = self.add("MatMul", [x, "shared"])
        elif kind == "add":
            y = self.add("Add", [x, self.weight(normal(WIDTH, seed=seed))])
        elif kind == "residual":
            y = self.add("Add", [x, self.seen[at % len(self.seen)]])
        elif kind in ("relu", "tanh"):
            y = self.add(kind.capitalize(), [x])
        elif kind == "clip":
            y = self.add("Clip", [x, "", self.weight(np.float32(1.5))])
        elif kind == "norm":
            y = self.add("LayerNormalization", [x, self.weight(np.ones(WIDTH, np.float32))])
        elif kind == "softmax":
            y = self.add("Softmax", [x])
        elif kind == "concat":
            joined = self.add("Concat", [x, self.seen[at % len(self.seen)]], axis=1)
            y = self.add("MatMul", [joined, self.weight(normal(2 * WIDTH, WIDTH, seed=seed))])
        elif kind == "constant":
            stored = self.add("Constant", [], value=numpy_helper.from_array(square))
            y = self.add("MatMul", [x, stored])
        elif kind == "constant_float":
            y = self.add("Mul", [x, self.add("Constant", [], value_float=0.7)])
        elif kind == "defaulted":  # an input with a value of its own
            name = self.weight(square)
            self.defaults.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [WIDTH, WIDTH]))
            y = self.add("MatMul", [x, name])
        elif kind == "empty":
            none = self.add(
                "MatMul", [self.weight(np.zeros((1, 0), np.float32)), self.weight(np.zeros((0, 32), np.float32))]
            )
            y = self.add("Add", [x, none])
        elif kind == "branch":
            inside = helper.make_node("MatMul", [x, "shared"], [f"i{len(self.nodes)}"], name="inside")
            out = [helper.make_tensor_value_info(f"i{len(self.nodes)}", TensorProto.FLOAT, None)]
            other = helper.make_node("Identity", [x], [f"i{len(self.nodes)}"], name="other")
            y = self.add(
                "If", [self.weight(np.array(seed % 2 == 0))],
                then_branch=helper.make_graph([inside], "then", [], out),
                else_branch=helper.make_graph([other], "else", [], out),
            )  # fmt: skip
        elif kind == "conv":
            image = self.add("Reshape", [x, self.weight(np.array([-1, 2, 4, 4]))])
            kernel, bias = self.weight(normal(2, 2, 3, 3, seed=seed)), self.weight(1e4 * normal(2))
            made = self.add("Conv", [image, kernel, bias], pads=[1, 1, 1, 1])
            made = self.add("Mul", [made, self.weight(np.float32(1e-4))])
            y = self.add("Reshape", [made, self.weight(np.array([-1, WIDTH]))])
        elif kind == "zero":  # an activation without a range
            nothing = self.add("Mul", [x, self.weight(np.float32(0))])
            y = self.add("Add", [x, self.add("MatMul", [nothing, self.weight(square)])])
        else:
            y = self.add("Mul", [x, self.weight(np.float32(0.5))])
        self.seen.append(y)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[str], str, int, int, list[int]]:
    blocks = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=7))
    return (
        blocks, draw(st.sampled_from(NAMES)), draw(st.sampled_from([17, 20, 21])), draw(st.integers(0, 9)),
        draw(st.lists(st.integers(0, 6), max_size=2)),
    )  # fmt: skip


def build(drawn: tuple[list[str], str, int, int, list[int]], folder: Path) -> OnnxModel:
    blocks, name, opset, at, shown = drawn
    builder = Builder(name)
    for kind in blocks:
        builder.block(kind, at)
    builder.nodes.append(helper.make_node("MatMul", [builder.seen[-1], "last"], ["y"], name="last"))
    outputs = ["y:float32[batch,8]"]
    extra = {builder.seen[1:][index] for index in shown if index < len(builder.seen) - 1}
    made = {out for node in builder.nodes for out in node.output}
    outputs += [f"{name}:float32[batch,{WIDTH}]" for name in sorted(extra & made)]
    builder.weights["last"] = normal(WIDTH, 8)
    return written(
        builder.nodes, builder.weights, folder, inputs=(f"x:float32[batch,{WIDTH}]",), outputs=outputs, opset=opset,
        more_inputs=builder.defaults,
    )  # fmt: skip


OPTIONS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["static", "dynamic", "weights"]),
        "calibrator": st.sampled_from(["minmax", "percentile", "entropy", "mse"]),
        "reduce_range": st.booleans(),
        "target": st.sampled_from(["cpu", "tensorrt", "cuda"]),
    }
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=models(), options=OPTIONS, folds=st.booleans(), seed=st.integers(0, 99))
def test_whatever_the_graph_what_is_written_runs_and_answers_nearly_the_same(
    drawn: tuple[list[str], str, int, int, list[int]], options: dict[str, Any], folds: bool, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        model = build(drawn, folder / "float")
        data = data_for(model, 24)
        expected = OnnxBackend(model, 1).infer(data.inputs)
        if options["mode"] == "dynamic":
            options = {**options, "target": "cpu"}
        eight = QuantizeOnnx(calibration=data if options["mode"] == "static" else None, **options)
        stages: list[tuple[Stage, float]] = [(FoldOnnx(unfuse=seed % 2 == 0), 1e-5)] if folds else []
        stages += [(SmoothOnnx(data), 1e-4)] if seed % 3 == 0 else []
        stages += [(eight, 0.35)]
        stages += [(HalfOnnx("bf16" if seed % 2 else "fp16", data, options["target"]), 0.45)] if seed % 4 < 2 else []
        for number, (stage, bound) in enumerate(stages):
            (folder / str(number)).mkdir()
            try:
                made = stage.run(model, folder / str(number), quiet).model
            except StageError as err:
                assert "nothing was quantized" in err.what  # noqa: PT017
                return
            assert isinstance(made, OnnxModel)
            assert error_of(expected, OnnxBackend(made, 1).infer(data.inputs)) < bound, stage
            model = made


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=models(), target=st.sampled_from(["cpu", "tensorrt"]), share=st.floats(0, 1))
def test_whatever_the_graph_all_put_back_is_float_and_each_mixture_runs(
    drawn: tuple[list[str], str, int, int, list[int]], target: Any, share: float
) -> None:
    with tempfile.TemporaryDirectory() as root:
        model = build(drawn, Path(root) / "float")
        data = data_for(model, 24)
        expected = OnnxBackend(model, 1).infer(data.inputs)
        original = plain(model.path)
        options = QuantizeOnnx("static", data, target=target)
        ranges = calibrate(model.path, data, "minmax", quiet)
        mixed = Mixed(original, quantized(options, original, ranges), rounds_outputs=target == "cpu")
        rng = np.random.default_rng(0)
        some = [unit for unit in mixed.units if rng.random() < share]
        for back, bound in ((some, 0.35), (mixed.units, 2e-6)):
            path = Path(root) / "mixed.onnx"
            finish(mixed.model(back), path, ties(original), integers=target == "cpu")
            assert error_of(expected, OnnxBackend(OnnxModel(path, model.signature), 1).infer(data.inputs)) < bound
