"""Small ONNX graphs that torch would not write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.model import Arrays, OnnxModel, example_inputs

__all__ = ["branching", "data_for", "error_of", "looping", "normal", "written"]


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Weights of a size at which activations keep theirs."""
    values = np.random.default_rng([seed, *shape]).standard_normal(shape) / np.sqrt(shape[0])
    return np.asarray(values, np.float32)


def written(
    nodes: Sequence[NodeProto],
    weights: Mapping[str, Any],
    folder: Path,
    *,
    inputs: Sequence[str] = ("x:float32[batch,32]",),
    outputs: Sequence[str] = ("y:float32[batch,8]",),
    opset: int = 20,
    more_inputs: Sequence[onnx.ValueInfoProto] = (),
) -> OnnxModel:
    """A file of these nodes, its shapes inferred."""
    signature = Signature(tuple(map(TensorSpec.parse, inputs)), tuple(map(TensorSpec.parse, outputs)))

    def value(spec: TensorSpec) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(
            spec.name, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), spec.shape
        )

    stored = [numpy_helper.from_array(np.asarray(values), name) for name, values in weights.items()]
    shown = [value(spec) for spec in signature.outputs]
    graph = helper.make_graph(nodes, "g", [*map(value, signature.inputs), *more_inputs], shown, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    return OnnxModel(folder / "model.onnx", signature)


def data_for(model: OnnxModel, count: int = 32) -> Dataset:
    """Random samples."""
    return Dataset("", example_inputs(model.signature.inputs, {"batch": count}, seed=3), None, "data")


def _shown(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def branching(folder: Path) -> OnnxModel:
    """Both branches of an If read activations and weights from around it; nobody else reads some of them."""
    node = helper.make_node
    then = [
        node("MatMul", ["h", "shared"], ["t0"], name="t0"),
        node("MatMul", ["before", "then_only"], ["t1"], name="t1"),
        node("Add", ["t0", "t1"], ["t2"], name="t2"),
    ]
    other = [node("MatMul", ["h", "shared"], ["e0"], name="e0"), node("Sub", ["e0", "else_only"], ["e1"], name="e1")]
    nodes = [
        node("Gemm", ["x", "first", "bias"], ["before"], name="first_layer"),
        node("Relu", ["before"], ["h"], name="relu"),
        node("ReduceSum", ["h"], ["sum"], name="sum", keepdims=0),
        node("Greater", ["sum", "zero"], ["positive"], name="greater"),
        node(
            "If", ["positive"], ["joined"], name="if",
            then_branch=helper.make_graph(then, "then", [], [_shown("t2")]),
            else_branch=helper.make_graph(other, "else", [], [_shown("e1")]),
        ),
        node("MatMul", ["joined", "last"], ["y"], name="last_layer"),
    ]  # fmt: skip
    weights = {
        "first": normal(32, 48), "bias": normal(48), "shared": normal(48, 48), "then_only": normal(48, 48, seed=1),
        "else_only": normal(48), "last": normal(48, 8), "zero": np.float32(0),
    }  # fmt: skip
    return written(nodes, weights, folder)


def looping(folder: Path) -> OnnxModel:
    """A Loop whose body multiplies by a weight from around it, and reads an activation that goes elsewhere, too."""
    node = helper.make_node
    body = helper.make_graph(
        [
            node("MatMul", ["state", "step"], ["s0"], name="s0"),
            node("Add", ["s0", "start"], ["s1"], name="s1"),
            node("Tanh", ["s1"], ["next"], name="s2"),
            node("Identity", ["going"], ["still"], name="s3"),
        ],
        "body",
        [
            helper.make_tensor_value_info("at", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            _shown("state"),
        ],
        [helper.make_tensor_value_info("still", TensorProto.BOOL, []), _shown("next")],
    )
    nodes = [
        node("MatMul", ["x", "first"], ["start"], name="first_layer"),
        node("Loop", ["times", "", "start"], ["end"], name="loop", body=body),
        node("MatMul", ["end", "last"], ["y"], name="last_layer"),
    ]
    weights = {"first": normal(32, 48), "step": normal(48, 48), "last": normal(48, 8), "times": np.int64(3)}
    return written(nodes, weights, folder)


def error_of(expected: Arrays, got: Arrays) -> float:
    """The largest difference of any output, as a share of the largest value of that output; infinite for NaN."""
    worst = 0.0
    for name, want in expected.items():
        finite = np.isfinite(want)
        have, reference = got[name][finite].astype(np.float64), want[finite]
        if not np.isfinite(have).all():
            return np.inf
        scale = float(np.abs(reference).max(initial=0)) or 1.0
        worst = max(worst, float(np.abs(have - reference).max(initial=0)) / scale)
    return worst
