"""Tiny things to serve, made without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from compress.artifact import Artifact, Signature, TensorSpec, sha256_of

WEIGHT = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], np.float32)
"""x:float32[batch,4] @ WEIGHT is logits:float32[batch,3]."""

HOOKS = '''\
from typing import NamedTuple

import numpy as np

REQUIREMENTS = ["numpy"]


class Answer(NamedTuple):
    label: str
    score: float


def preprocess(text: str) -> np.ndarray:
    """Four numbers with commas between them."""
    return np.array([float(part) for part in text.split(",")], np.float32)


def postprocess(logits: np.ndarray) -> Answer:
    best = int(logits.argmax())
    return Answer("abc"[best], float(logits[best]))


def example() -> dict[str, str]:
    return {"text": "0,2,1,0"}
'''
"""Hooks for it: text:str in; label:str and score:float out."""


INPUTS = {
    "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "uint8": TensorProto.UINT8,
    "int64": TensorProto.INT64, "string": TensorProto.STRING,
}  # fmt: skip


def artifact_of(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[str],
    outputs: list[str],
    weights: dict[str, np.ndarray[Any, Any]] | None = None,
    ir_version: int = 10,
) -> Path:
    """Write an artifact of an ONNX graph; its folder.

    Args:
        folder: is made.
        nodes: the graph's.
        inputs, outputs: as in "x:float32[batch,4]".
        weights: initializers by name.
        ir_version: of ONNX's format.
    """
    folder.mkdir(parents=True, exist_ok=True)
    signature = Signature(tuple(map(TensorSpec.parse, inputs)), tuple(map(TensorSpec.parse, outputs)))
    infos = [
        [helper.make_tensor_value_info(spec.name, INPUTS[spec.dtype], spec.shape) for spec in specs]
        for specs in (signature.inputs, signature.outputs)
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "tiny", *infos, initializers)
    more = [helper.make_opsetid(domain, 1) for domain in {node.domain for node in nodes} - {""}]
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), *more], ir_version=ir_version)
    onnx.checker.check_model(model, full_check=True)
    path = folder / "model.onnx"
    onnx.save(model, path)
    Artifact(folder, path.name, "onnx", sha256_of(path), signature).save()
    return folder


def tiny_artifact(folder: Path) -> Path:
    """One MatMul, x:float32[batch,4] to logits:float32[batch,3]."""
    node = helper.make_node("MatMul", ["x", "weight"], ["logits"])
    return artifact_of(folder, [node], ["x:float32[batch,4]"], ["logits:float32[batch,3]"], {"weight": WEIGHT})


def bfloat16_artifact(folder: Path) -> Path:
    """As `tiny_artifact`, computed in BF16, of which ONNX Runtime has no kernels on a CPU."""
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=onnx.TensorProto.BFLOAT16),
        helper.make_node("Cast", ["weight"], ["half_weight"], to=onnx.TensorProto.BFLOAT16),
        helper.make_node("MatMul", ["half", "half_weight"], ["half_logits"]),
        helper.make_node("Cast", ["half_logits"], ["logits"], to=onnx.TensorProto.FLOAT),
    ]
    return artifact_of(folder, nodes, ["x:float32[batch,4]"], ["logits:float32[batch,3]"], {"weight": WEIGHT})


def lookup_artifact(folder: Path) -> Path:
    """ids:int64[batch,2] to rows:float32[batch,2] of a table with ten entries: a larger id fails the whole batch."""
    node = helper.make_node("Gather", ["table", "ids"], ["rows"])
    table = {"table": np.arange(10, dtype=np.float32)}
    return artifact_of(folder, [node], ["ids:int64[batch,2]"], ["rows:float32[batch,2]"], table)


def four_bit_artifact(folder: Path) -> Path:
    """ids:int64[batch,2] to rows:float32[batch,2,64] of a table and logits:float32[batch,2,8], both of 4-bit weights."""
    codes = np.random.default_rng(0).integers(0, 256, (20 + 8, 2, 16)).astype(np.uint8)
    scale = np.linspace(0.1, 1, 2 * (20 + 8), dtype=np.float32).reshape(-1, 2)
    zero = np.full((20 + 8, 1), 0x87, np.uint8)
    weights: dict[str, np.ndarray[Any, Any]] = {
        "table": codes[:20].reshape(20, 32), "table_scale": scale[:20], "table_zero": zero[:20],
        "head": codes[20:], "head_scale": scale[20:], "head_zero": zero[20:],
    }  # fmt: skip
    domain = "com.microsoft"
    nodes = [
        helper.make_node(
            "GatherBlockQuantized", ["table", "ids", "table_scale", "table_zero"], ["rows"], domain=domain,
            gather_axis=0, quantize_axis=1, block_size=32,
        ),
        helper.make_node(
            "MatMulNBits", ["rows", "head", "head_scale", "head_zero"], ["logits"], domain=domain, K=64, N=8, bits=4,
            block_size=32,
        ),
    ]  # fmt: skip
    outputs = ["rows:float32[batch,2,64]", "logits:float32[batch,2,8]"]
    return artifact_of(folder, nodes, ["ids:int64[batch,2]"], outputs, weights)


def sum_artifact(folder: Path) -> Path:
    """Two inputs of any length, a and b:float32[batch,length], to total:float32[batch], a number for each sample."""
    nodes = [
        helper.make_node("Add", ["a", "b"], ["both"]),
        helper.make_node("ReduceSum", ["both", "axes"], ["total"], keepdims=0),
    ]
    inputs = ["a:float32[batch,length]", "b:float32[batch,length]"]
    return artifact_of(folder, nodes, inputs, ["total:float32[batch]"], {"axes": np.array([1], np.int64)})


def pooled_artifact(folder: Path) -> Path:
    """x:float32[batch,1,height,width], of 8 pixels and more, to y:float32[batch,1,h,w]."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["y"], kernel_shape=[8, 8], strides=[8, 8]),
    ]
    return artifact_of(folder, nodes, ["x:float32[batch,1,height,width]"], ["y:float32[batch,1,h,w]"], {})


def text_artifact(folder: Path) -> Path:
    """words:string[batch,2] to same:string[batch,2]."""
    node = helper.make_node("Identity", ["words"], ["same"])
    return artifact_of(folder, [node], ["words:string[batch,2]"], ["same:string[batch,2]"])


def unbatched_artifact(folder: Path) -> Path:
    """x:float32[2,2] to y:float32[2,2], without a batch dimension."""
    node = helper.make_node("Neg", ["x"], ["y"])
    return artifact_of(folder, [node], ["x:float32[2,2]"], ["y:float32[2,2]"])


def hook_file(folder: Path, text: str = HOOKS) -> Path:
    """Write a hook module; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "my_hooks.py"
    path.write_text(text, encoding="utf-8")
    return path


def plan_of(*version: int) -> bytes:
    """The beginning of a TensorRT plan: mark, layout 0, and the version (four numbers) of the TensorRT that built it."""
    return b"ftrt" + bytes(20) + bytes(version) + b"weights and layers"
