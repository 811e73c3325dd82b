"""ONNX files taken back to layers: each operator answers as ONNX Runtime does, and what has no layer is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import NodeProto, helper, numpy_helper
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.errors import StageError
from compress.formats.native.onnx_part import OnnxPart
from compress.formats.onnx.load import load_onnx
from compress.formats.onnx_layers.layers import HANDLERS
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.equal import Wording, equal_throughout
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.onnx_export.torch_from_onnx import FIXED, MEND, taken_back
from compress.runtime.backends import TorchBackend
from tests.unit.compress.onnx_graphs import normal

Step = tuple[str, list[str], list[str], dict[str, Any]]
Case = tuple[str, Sequence[int | str], dict[str, Any], dict[str, Any]]
F32, I64 = np.float32, np.int64


def stored(
    nodes: Sequence[NodeProto],
    weights: dict[str, Any],
    shape: Sequence[int | str],
    folder: Path,
    *,
    gives: int = onnx.TensorProto.FLOAT,
) -> Path:
    tensors = [numpy_helper.from_array(np.asarray(values), name) for name, values in weights.items()]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", gives, None)],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


IMAGE, ROW = ("batch", 4, 9, 10), ("batch", 6)
POSITIVE = np.abs(normal(4)) + 0.5
RESIZED: list[tuple[str, list[float], dict[str, Any]]] = [
    ("nearest", [2, 3], {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    ("nearest, smaller", [0.4, 0.7], {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    ("nearest, from the middle", [2, 3], {"mode": "nearest"}),
    (
        "nearest, as TensorFlow",
        [0.5, 1.5],
        {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"},
    ),
    ("linear", [2, 1.5], {"mode": "linear"}),
    ("linear, smaller", [0.5, 0.3], {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}),
    ("linear, corners on corners", [2, 2], {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ("cubic", [2, 1.7], {"mode": "cubic"}),
]
CASES: dict[str, Case] = {
    "conv": ("Conv", IMAGE, {"w": normal(8, 4, 3, 3), "b": normal(8)}, {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "conv, padding on one side": ("Conv", IMAGE, {"w": normal(8, 4, 3, 3)}, {"pads": [0, 1, 1, 2]}),
    "conv, padding by itself": ("Conv", IMAGE, {"w": normal(8, 4, 4, 3)}, {"auto_pad": "SAME_UPPER"}),
    "conv, padding by itself in steps": ("Conv", IMAGE, {"w": normal(8, 4, 3, 3)}, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "conv, padding by itself from below": (
        "Conv", IMAGE, {"w": normal(8, 4, 4, 4)}, {"auto_pad": "SAME_LOWER", "strides": [2, 3]},
    ),
    "conv, no padding": ("Conv", IMAGE, {"w": normal(8, 4, 4, 4)}, {"auto_pad": "VALID"}),
    "conv, grouped and dilated": ("Conv", IMAGE, {"w": normal(8, 2, 3, 3)}, {"group": 2, "dilations": [2, 2]}),
    "conv, depthwise": ("Conv", IMAGE, {"w": normal(4, 1, 3, 3)}, {"group": 4}),
    "conv of one dimension": ("Conv", ("batch", 4, 9), {"w": normal(8, 4, 3)}, {}),
    "conv of three dimensions": ("Conv", ("batch", 2, 5, 6, 7), {"w": normal(3, 2, 3, 3, 3)}, {}),
    "conv, transposed": ("ConvTranspose", IMAGE, {"w": normal(4, 6, 3, 3)}, {"strides": [2, 2], "output_padding": [1, 1]}),
    "gemm": ("Gemm", ROW, {"w": normal(5, 6), "b": normal(5)}, {"transB": 1}),
    "gemm, scaled": ("Gemm", ROW, {"w": normal(6, 5), "b": normal(5)}, {"alpha": 0.5, "beta": 2.0}),
    "matmul": ("MatMul", ROW, {"w": normal(6, 5)}, {}),
    "batch norm": ("BatchNormalization", IMAGE, {"s": normal(4), "b": normal(4), "m": normal(4), "v": POSITIVE}, {}),
    "layer norm": ("LayerNormalization", ROW, {"s": normal(6), "b": normal(6)}, {"axis": -1}),
    "instance norm": ("InstanceNormalization", IMAGE, {"s": normal(4), "b": normal(4)}, {}),
    "prelu": ("PRelu", IMAGE, {"s": normal(4, 1, 1)}, {}),
    "max pool": ("MaxPool", IMAGE, {}, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "max pool, upwards": ("MaxPool", IMAGE, {}, {"kernel_shape": [2, 3], "strides": [2, 3], "ceil_mode": 1}),
    "max pool, padding on one side": ("MaxPool", IMAGE, {}, {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}),
    "max pool, padding by itself": (
        "MaxPool", IMAGE, {}, {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    ),
    "average pool": ("AveragePool", IMAGE, {}, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "average pool, counting all": (
        "AveragePool", IMAGE, {}, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
    ),
    "reduce": ("ReduceMean", IMAGE, {"axes": np.array([2, 3])}, {"keepdims": 0}),
    "sum of all": ("ReduceSum", IMAGE, {}, {"keepdims": 1}),
    "clip": ("Clip", ROW, {"low": np.float32(-0.5), "high": np.float32(0.5)}, {}),
    "pow": ("Pow", ROW, {"p": np.float32(2)}, {}),
    "pad": ("Pad", IMAGE, {"p": np.array([0, 0, 1, 2, 0, 0, 3, 0])}, {}),
    "pad, mirrored": ("Pad", IMAGE, {"p": np.array([0, 0, 1, 2, 0, 0, 3, 0])}, {"mode": "reflect"}),
    "pad, mirrored, of rows": ("Pad", ROW, {"p": np.array([0, 2, 0, 1])}, {"mode": "reflect"}),
    "pad, mirrored, of the last axis": ("Pad", IMAGE, {"p": np.array([0, 0, 0, 2, 0, 0, 0, 1])}, {"mode": "reflect"}),
    "pad, the last repeated": ("Pad", IMAGE, {"p": np.array([0, 0, 0, 2, 0, 0, 0, 1])}, {"mode": "edge"}),
    "slice": ("Slice", IMAGE, {"s": np.array([1]), "e": np.array([-1]), "a": np.array([2]), "t": np.array([2])}, {}),
    "slice, backwards": ("Slice", ROW, {"s": np.array([-1]), "e": np.array([-(2**63)]), "a": np.array([1]), "t": np.array([-1])}, {}),
    "reshape": ("Reshape", IMAGE, {"s": np.array([0, 2, 2, -1])}, {}),
    "expand": ("Expand", ("batch", 1, 6), {"s": np.array([1, 5, 1])}, {}),
    "gather": ("Gather", ROW, {"i": np.array([3, -1])}, {"axis": 1}),
    "flatten, further on": ("Flatten", IMAGE, {}, {"axis": 2}),
    "transpose": ("Transpose", IMAGE, {}, {"perm": [0, 2, 3, 1]}),
    **{
        f"resize, {name}": ("Resize", IMAGE, {"": None, "s": np.array([1, 1, *scales], F32)}, attributes)
        for name, scales, attributes in RESIZED
    },
    **{
        kind: (kind, IMAGE, {}, {})
        for kind in (
            "Relu", "Sigmoid", "Tanh", "Erf", "HardSwish", "HardSigmoid", "LeakyRelu", "Elu", "Gelu", "Softmax",
            "LogSoftmax", "Exp", "Neg", "Abs", "GlobalAveragePool", "GlobalMaxPool", "Flatten", "Identity",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("scale", [0.5, 0.125, 2.0])
@pytest.mark.parametrize("sizes", [("height", "width"), (9, 10)])
def test_a_picture_that_may_become_one_row_is_made_by_onnx_itself(
    tmp_path: Path, sizes: tuple[str | int, str | int], scale: float
) -> None:
    """torch takes such a row from the middle, ONNX by this mode from the edge."""
    attributes = {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Resize", ["c", "", "s"], ["y"], **attributes),
    ]
    weights = {"w": normal(4, 4, 3, 3), "s": np.array([1, 1, scale, scale], F32)}
    model = taken_back(load_onnx(stored(nodes, weights, ("batch", 4, *sizes), tmp_path)))
    kept = [each for each in model.module.modules() if isinstance(each, OnnxPart)]
    assert bool(kept) is (scale < 0.2 or (scale < 1 and sizes != (9, 10)))


@pytest.mark.parametrize("case", CASES)
def test_an_operator_answers_as_in_onnx_runtime(case: str, tmp_path: Path) -> None:
    kind, shape, weights, attributes = CASES[case]
    names = ["x", *weights]
    if case == "clip":
        names = ["x", "low", "high"]
    given = {name: values for name, values in weights.items() if name}
    path = stored([helper.make_node(kind, names, ["y"], **attributes)], given, shape, tmp_path)
    model = taken_back(load_onnx(path))  # which proves it at three batches
    assert [str(spec) for spec in model.signature.inputs] == [f"x:float32[{','.join(map(str, shape))}]"]


def test_a_product_and_what_is_added_to_it_become_one_layer(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["b", "p"], ["y"])]
    model = taken_back(load_onnx(stored(nodes, {"w": normal(6, 5), "b": normal(5)}, ROW, tmp_path)))
    (layer,) = [each for each in model.module.modules() if isinstance(each, nn.Linear)]
    assert (layer.in_features, layer.out_features, layer.bias is not None) == (6, 5, True)


def test_a_matrix_that_is_used_twice_stays_one_parameter(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("MatMul", ["p", "w"], ["y"])]
    model = taken_back(load_onnx(stored(nodes, {"w": normal(6, 6)}, ROW, tmp_path)))
    assert len(list(model.module.parameters())) == 1


def test_shapes_are_computed_from_what_comes_in(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
        helper.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["y"]),
    ]
    weights = {"zero": np.array(0), "axes": np.array([0]), "rest": np.array([2, 3])}
    assert str(taken_back(load_onnx(stored(nodes, weights, ROW, tmp_path))).signature.outputs[0]).startswith(
        "y:float32[batch,2,3]"
    )


def test_places_are_counted_in_floats_too(tmp_path: Path) -> None:
    """As detectors make their anchors: a size becomes a float before it is counted up to."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["n"], axis=0),
        helper.make_node("Cast", ["n"], ["f"], to=1),
        helper.make_node("Range", ["zero", "f", "by"], ["places"]),
        helper.make_node("Add", ["x", "places"], ["y"]),
    ]
    weights = {"one": np.array(1), "zero": np.float32(0), "by": np.float32(1)}
    file = load_onnx(stored(nodes, weights, ("batch", "width"), tmp_path))
    made = taken_back(file).module
    for width in (1, 5, 9):
        x = torch.from_numpy(normal(3, width))
        torch.testing.assert_close(made(x)["y"], file.module(x)["y"])


ROW_OF_WHOLE: Step = ("Cast", ["x"], ["whole"], {"to": onnx.TensorProto.INT32})
SIZES_OF_X: Step = ("Shape", ["x"], ["sizes64"], {})
SIZES_IN_32: Step = ("Cast", ["sizes64"], ["sizes"], {"to": onnx.TensorProto.INT32})
TYPED: dict[str, list[Step]] = {
    "sizes": [SIZES_OF_X, SIZES_IN_32, ("Identity", ["sizes"], ["y"], {})],
    "arithmetic of sizes": [SIZES_OF_X, SIZES_IN_32, ("Mul", ["sizes", "two"], ["y"], {})],
    "a part of sizes": [SIZES_OF_X, SIZES_IN_32, ("Gather", ["sizes", "one"], ["y"], {})],
    "a row of sizes": [SIZES_OF_X, SIZES_IN_32, ("Concat", ["sizes", "some"], ["y"], {"axis": 0})],
    "a range": [
        SIZES_OF_X, SIZES_IN_32, ("Gather", ["sizes", "one"], ["n"], {}), ("Range", ["zero", "n", "two"], ["y"], {}),
    ],
    "a sum": [ROW_OF_WHOLE, ("ReduceSum", ["whole", "axes"], ["y"], {})],
    "a power": [ROW_OF_WHOLE, ("Pow", ["whole", "half"], ["y"], {})],
}  # fmt: skip


@pytest.mark.parametrize("case", TYPED)
def test_whole_numbers_of_32_bits_stay_so(case: str, tmp_path: Path) -> None:
    nodes = [helper.make_node(kind, given, made, **attributes) for kind, given, made, attributes in TYPED[case]]
    weights = {
        "zero": np.int32(0), "two": np.int32(2), "some": np.array([3, 4], np.int32), "one": np.array(1),
        "axes": np.array([1]), "half": np.float32(2.5),
    }  # fmt: skip
    path = stored(nodes, weights, ROW, tmp_path, gives=onnx.TensorProto.INT32)
    model = taken_back(load_onnx(path))
    assert model.module(torch.ones(2, 6))["y"].dtype == torch.int32


def test_answers_of_another_type_are_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide as they may be: what serves the file would send other bytes than its signature says."""
    monkeypatch.setitem(HANDLERS, "Cast", lambda g, x, _a: g.call("to", x[0], torch.int64))
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.INT32)]
    with pytest.raises(StageError, match="answers of another type at batch 1") as caught:
        taken_back(load_onnx(stored(nodes, {}, ROW, tmp_path, gives=onnx.TensorProto.INT32)))
    assert "'y' is int64, in the original it is int32" in caught.value.why


def test_paddings_may_be_computed_from_constants_as_exporters_of_torch_write_them(tmp_path: Path) -> None:
    """By axis from the last in torch, before and behind; all before and then all behind in ONNX."""
    steps: list[Step] = [
        ("ConstantOfShape", ["four"], ["more"], {"value": numpy_helper.from_array(np.zeros(1, np.int64))}),
        ("Concat", ["pads", "more"], ["all"], {"axis": 0}),
        ("Reshape", ["all", "pairs"], ["table"], {}),
        ("Slice", ["table", "last", "first", "zero", "last"], ["back"], {}),
        ("Transpose", ["back"], ["turned"], {"perm": [1, 0]}),
        ("Reshape", ["turned", "last"], ["row"], {}),
        ("Cast", ["row"], ["p"], {"to": onnx.TensorProto.INT64}),
        ("Pad", ["x", "p"], ["y"], {}),
    ]
    weights = {
        "four": np.array([4]), "pads": np.array([0, 1, 2, 3]), "pairs": np.array([-1, 2]), "last": np.array([-1]),
        "first": np.array([-(2**63)]), "zero": np.array([0]),
    }  # fmt: skip
    nodes = [helper.make_node(kind, given, made, **attributes) for kind, given, made, attributes in steps]
    model = taken_back(load_onnx(stored(nodes, weights, IMAGE, tmp_path)))
    assert model.module(torch.ones(2, 4, 9, 10))["y"].shape == (2, 4, 14, 11)


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_a_choice_among_constants_keeps_their_values(kind: type, tmp_path: Path) -> None:
    steps: list[Step] = [
        ("Where", ["which", "one", "other"], ["chosen"], {}),
        ("Cast", ["chosen"], ["z"], {"to": 1}),
        ("Add", ["x", "z"], ["y"], {}),
    ]
    weights = {
        "which": np.array([True, False, True]), "one": np.array([0.25, 2.5, 7.75], kind), "other": np.array([1.5], kind),
    }  # fmt: skip
    nodes = [helper.make_node(kind, given, made, **attributes) for kind, given, made, attributes in steps]
    file = load_onnx(stored(nodes, weights, ("batch", 3), tmp_path))
    x = torch.ones(1, 3)
    torch.testing.assert_close(taken_back(file).module(x)["y"], file.module(x)["y"])


WIDTH: list[Step] = [
    ("Shape", ["x"], ["s"], {}),
    ("Gather", ["s", "one"], ["n"], {}),
    ("Sub", ["n", "five"], ["d"], {}),
]
ANY_SIZE: dict[str, list[Step]] = {
    "a difference that may be -1": [
        *WIDTH, ("Equal", ["d", "less"], ["is"], {}), ("Where", ["is", "many", "zero"], ["z"], {}),
        ("Add", ["x", "z"], ["y"], {}),
    ],
    "a quotient of what may be negative": [
        *WIDTH, ("Div", ["d", "two"], ["q"], {}), ("Cast", ["q"], ["z"], {"to": 1}), ("Add", ["x", "z"], ["y"], {}),
    ],
    "backwards, but for those in front": [("Slice", ["x", "last", "far", "ones", "last"], ["y"], {})],
    "backwards, from a place": [("Slice", ["x", "ones", "first", "ones", "last"], ["y"], {})],
    "backwards, without the last of all": [("Slice", ["x", "last", "zeros", "ones", "last"], ["y"], {})],
}  # fmt: skip


@pytest.mark.parametrize("case", ANY_SIZE)
def test_what_is_known_of_sizes_holds_at_every_size(case: str, tmp_path: Path) -> None:
    """Also where no proof tries: where a slice reaches further than most, and where a difference is below 0."""
    nodes = [helper.make_node(kind, given, made, **attributes) for kind, given, made, attributes in ANY_SIZE[case]]
    weights = {
        "one": np.array(1), "five": np.array(5), "two": np.array(2), "less": np.array(-1), "many": np.float32(100),
        "zero": np.float32(0), "last": np.array([-1]), "far": np.array([-8]), "ones": np.array([1]),
        "zeros": np.array([0]), "first": np.array([-(2**63)]),
    }  # fmt: skip
    file = load_onnx(stored(nodes, weights, ("batch", "width"), tmp_path))
    made = taken_back(file).module
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 20):
        x = torch.from_numpy(normal(3, width))
        torch.testing.assert_close(made(x)["y"], file.module(x)["y"])


def test_a_picture_is_brought_to_the_size_of_another(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MaxPool", ["x"], ["less"], kernel_shape=[3, 2], strides=[3, 2]),
        helper.make_node("Shape", ["x"], ["size"]),
        helper.make_node("Resize", ["less", "", "", "size"], ["y"], mode="linear"),
    ]
    path = stored(nodes, {}, ("batch", 4, "height", "width"), tmp_path)
    model = taken_back(load_onnx(path, {"height": 9, "width": 10}))
    assert str(model.signature.outputs[0]) == "y:float32[batch,4,height,width]"


def test_a_detector_that_finds_nothing_is_held_against_what_a_sigmoid_rounds(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["logits"]),
        helper.make_node("Sigmoid", ["logits"], ["seen"]),
        helper.make_node("Transpose", ["seen"], ["y"], perm=[0, 2, 3, 1]),
    ]
    weights = {"w": normal(4, 4, 3, 3), "b": np.full(4, -16, F32)}
    assert taken_back(load_onnx(stored(nodes, weights, IMAGE, tmp_path)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_file_that_gives_no_numbers_is_not_said_to_be_taken_back_wrongly(value: float, tmp_path: Path) -> None:
    weight = normal(6, 5)
    weight[:] = value
    path = stored([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weight}, ROW, tmp_path)
    with pytest.raises(StageError, match="the answers in the original are no numbers at batch 1") as caught:
        taken_back(load_onnx(path))
    assert "all of its output 'y' is NaN or infinite" in caught.value.why
    assert "among its weights" in caught.value.mend


def test_other_sizes_are_such_as_file_and_layers_take(tmp_path: Path) -> None:
    """Of 3 pixels ONNX Runtime makes one by a window of 4, which torch refuses; half the usual size is tried first."""
    node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[4, 4], strides=[4, 4])
    path = stored([node], {}, ("batch", 2, "height", "width"), tmp_path)
    taken_back(load_onnx(path, {"height": 6, "width": 40}))


def test_sizes_at_which_the_file_gives_no_numbers_are_not_tried(tmp_path: Path) -> None:
    steps = [*WIDTH, ("Cast", ["d"], ["f"], {"to": 1}), ("Log", ["f"], ["z"], {}), ("Add", ["x", "z"], ["y"], {})]
    nodes = [helper.make_node(kind, given, made, **attributes) for kind, given, made, attributes in steps]
    path = stored(nodes, {"one": np.array(1), "five": np.array(5)}, ("batch", "width"), tmp_path)
    taken_back(load_onnx(path, {"width": 8}))  # of the half, the logarithm is none


class OneSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.split(x, [16, 16], 1), 1)


def test_layers_of_one_size_name_the_dimension_and_what_fixes_it() -> None:
    signature = Signature((TensorSpec.parse("x:float32[batch,T]"),), (TensorSpec.parse("y:float32[batch,T]"),))
    words = Wording("the file, taken back to layers,", "in the original", MEND, MEND, FIXED)
    first, second = (TorchBackend(TorchModel(module, signature), 1) for module in (nn.Identity(), OneSize()))
    with pytest.raises(StageError, match="fails at batch 2, T = 16") as caught:
        equal_throughout(nn.Identity(), first, second, signature, None, lambda *_told: None, words, both=True)
    assert "fix T at it in the file" in caught.value.mend


UNKNOWN: dict[str, tuple[NodeProto, str]] = {
    "an operator without a layer": (helper.make_node("CumSum", ["x", "axis"], ["y"], name="sums"), "CumSum at 'sums'"),
    "another's operator": (helper.make_node("Gelu", ["x"], ["y"], name="g", domain="com.microsoft"), "Gelu at 'g'"),
    "padding that hangs on sizes": (
        helper.make_node("MaxPool", ["x"], ["y"], name="p", kernel_shape=[2], strides=[2], auto_pad="SAME_UPPER"),
        "MaxPool at 'p'",
    ),
    "a factor that is rounded": (helper.make_node("Resize", ["x", "", "factors"], ["y"], name="r"), "Resize at 'r'"),
    "scales between ONNX's places and torch's": (
        helper.make_node("Resize", ["x", "", "factors"], ["y"], name="r", mode="linear",
                         coordinate_transformation_mode="asymmetric"), "Resize at 'r'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_has_no_layer_is_refused_by_operator_and_node(case: str, tmp_path: Path) -> None:
    node, named = UNKNOWN[case]
    path = stored([node], {"axis": np.array(1), "factors": np.array([1, 1, 0.7], F32)}, ("batch", 2, "width"), tmp_path)
    if node.domain:
        model = onnx.load(path)
        model.opset_import.append(helper.make_opsetid(node.domain, 1))
        onnx.save(model, path)
    with pytest.raises(StageError, match=named) as caught:
        taken_back(load_onnx(path))
    assert "leave out --prune and --finetune" in caught.value.mend


SECOND: dict[str, NodeProto] = {
    "where the largest are": helper.make_node("MaxPool", ["x"], ["first", "y"], name="n", kernel_shape=[2]),
    "what is dropped": helper.make_node("Dropout", ["x"], ["first", "y"], name="n"),
    "a mean": helper.make_node("LayerNormalization", ["x", "scale"], ["first", "y"], name="n"),
}


@pytest.mark.parametrize("case", SECOND)
@pytest.mark.parametrize("read", [True, False])
def test_further_outputs_that_are_used_are_refused_by_operator_and_node(case: str, read: bool, tmp_path: Path) -> None:
    node, kinds = SECOND[case], {"MaxPool": onnx.TensorProto.INT64, "Dropout": onnx.TensorProto.BOOL}
    gives = kinds.get(node.op_type, onnx.TensorProto.FLOAT)
    nodes = [node]
    if read:
        node = NodeProto.FromString(node.SerializeToString())
        node.output[1] = "second"
        nodes, gives = [node, helper.make_node("Cast", ["second"], ["y"], to=1)], onnx.TensorProto.FLOAT
    path = stored(nodes, {"scale": np.ones(6, np.float32)}, ("batch", 2, 6), tmp_path, gives=gives)
    with pytest.raises(StageError, match=f"{node.op_type} at 'n'") as caught:
        taken_back(load_onnx(path))
    assert f"its output 2, {node.output[1]!r}, is used" in caught.value.why


GAPS: dict[str, NodeProto] = {
    "a Split of it leaves an output": helper.make_node("Split", ["x"], ["", "y"], axis=1, num_outputs=2),
    "a LayerNormalization of it leaves an input": helper.make_node("LayerNormalization", ["x", "scale", ""], ["y"]),
}


@pytest.mark.parametrize("why", GAPS)
def test_what_leaves_out_a_name_that_onnx_runtime_needs_is_refused_before_it_runs(why: str, tmp_path: Path) -> None:
    """ONNX Runtime would end the process."""
    with pytest.raises(StageError, match="can't read") as caught:
        load_onnx(stored([GAPS[why]], {"scale": np.ones(6, np.float32)}, ROW, tmp_path))
    assert f"{why} without a name" in caught.value.why


@pytest.mark.parametrize("word", ["class.weight", "None", "lambda.in", "class_.weight"])
def test_words_of_python_are_names_of_layers_too(word: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", word], ["p"]), helper.make_node("Add", ["p", "x"], ["y"])]
    model = taken_back(load_onnx(stored(nodes, {word: normal(6, 6)}, ROW, tmp_path)))
    assert sum(1 for each in model.module.modules() if isinstance(each, nn.Linear)) == 1


HOSTILE = ("__import__('os').system('false')", "../../x", "forward", "a.b.__class__", "x = 1; y", "é" * 300)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_a_file_are_never_code(name: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", name], [f"{name}2"], name=name),
        helper.make_node("Relu", [f"{name}2"], ["y"]),
    ]
    model = taken_back(load_onnx(stored(nodes, {name: normal(6, 5)}, ROW, tmp_path)))
    code = str(getattr(model.module, "code", ""))
    assert name not in code or name == "forward"


@pytest.mark.parametrize(
    ("operator", "inputs"), [("ConstantOfShape", ["s"]), ("Expand", ["one", "s"]), ("Range", ["zero", "many", "by"])]
)
def test_a_constant_that_would_fill_the_memory_is_refused(operator: str, inputs: list[str], tmp_path: Path) -> None:
    nodes = [
        helper.make_node(operator, inputs, ["made"], name="huge"),
        helper.make_node("Neg", ["made"], ["c0"], name="huge"),
        helper.make_node("Cast", ["c0"], ["c"], to=1),
        helper.make_node("Gather", ["c", "i"], ["first"], axis=0),
        helper.make_node("Add", ["x", "first"], ["y"]),
    ]
    numbers = {"zero": np.array(0), "many": np.array(1 << 33), "by": np.array(1), "i": np.array([0])}
    path = stored(nodes, {"s": np.array([1 << 33]), "one": np.ones(1, np.float32), **numbers}, ROW, tmp_path)
    x, y = (TensorSpec.parse(f"{name}:float32[batch,6]") for name in "xy")
    declared = OnnxModel(path, Signature((x,), (y,)))  # ONNX Runtime could not run it
    with pytest.raises(StageError, match="at 'huge'"):
        taken_back(declared)


def test_an_output_that_is_an_input_is_written_back_as_that(tmp_path: Path) -> None:
    path = stored([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": normal(6, 4)}, ROW, tmp_path)
    model = onnx.load(path)
    model.graph.output.append(model.graph.input[0])
    onnx.save(model, path)
    (tmp_path / "out").mkdir()
    found = OnnxFromTorch().run(taken_back(load_onnx(path)), tmp_path / "out", lambda *_: None).model
    assert isinstance(found, OnnxModel)
    assert [value.name for value in onnx.load(found.path).graph.output] == ["y", "x"]
