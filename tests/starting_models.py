"""Networks for which `serve hooks new` writes hooks, and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.serve_models import artifact_of, lookup_artifact, tiny_artifact


def mean_of_images(folder: Path, shape: str, dtype: str = "float32", classes: int = 5) -> Path:
    """x of a shape without the batch, averaged over all but three channels."""
    spec = f"x:{dtype}[batch,{shape}]"
    last = shape.endswith(",3")
    nodes = [
        helper.make_node("Cast", ["x"], ["real"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["real", "axes"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "weight"], ["class-scores"]),
    ]
    weights: dict[str, np.ndarray[Any, Any]] = {
        "axes": np.array([1, 2] if last else [2, 3], np.int64),
        "weight": np.ones((3, classes), np.float32),
    }
    return artifact_of(folder, nodes, [spec], [f"class-scores:float32[batch,{classes}]"], weights)


def ids(folder: Path, names: tuple[str, ...], length: str, output: str = "logits") -> Path:
    """The sum of token ids, of all inputs, as two numbers."""
    casts = [helper.make_node("Cast", [name], [f"{name}_real"], to=onnx.TensorProto.FLOAT) for name in names]
    nodes = [
        *casts,
        helper.make_node("Sum", [f"{name}_real" for name in names], ["sum"]),
        helper.make_node("ReduceSum", ["sum", "axes"], ["one"], keepdims=1),
        helper.make_node("Concat", ["one", "one"], [output], axis=1),
    ]
    inputs = [f"{name}:int64[batch,{length}]" for name in names]
    return artifact_of(folder, nodes, inputs, [f"{output}:float32[batch,2]"], {"axes": np.array([1], np.int64)})


def one_number(folder: Path) -> Path:
    """x:float32[batch,size] to price:float32[batch,1]."""
    node = helper.make_node("ReduceSum", ["x", "axes"], ["price"], keepdims=1)
    weights = {"axes": np.array([1], np.int64)}
    return artifact_of(folder, [node], ["x:float32[batch,size]"], ["price:float32[batch,1]"], weights)


def outputs(folder: Path, sizes: dict[str, int], row: list[float] | None = None) -> Path:
    """x:float32[batch,4], its sum put onto 0, 1, 2, … (or a row), in outputs of these names and sizes."""
    nodes = [helper.make_node("ReduceSum", ["x", "axes"], ["sum of x"], keepdims=1)]
    weights: dict[str, np.ndarray[Any, Any]] = {"axes": np.array([1], np.int64)}
    for name, size in sizes.items():
        weights[f"row of {name}"] = np.array(row or range(size), np.float32)
        nodes.append(helper.make_node("Add", ["sum of x", f"row of {name}"], [name]))
    specs = [f"{name}:float32[batch,{size}]" for name, size in sizes.items()]
    return artifact_of(folder, nodes, ["x:float32[batch,4]"], specs, weights)


def ending(folder: Path, operators: tuple[str, ...], output: str = "y") -> Path:
    """x:float32[batch,4] to three numbers, 0, 0 and 2 of a row of zeros, through these operators in turn."""
    weights: dict[str, np.ndarray[Any, Any]] = {
        "weight": np.ones((4, 3), np.float32),
        "bias": np.array([0, 0, 2], np.float32),
    }
    extra: dict[str, dict[str, Any]] = {"Cast": {"to": onnx.TensorProto.FLOAT}, "Softmax": {"axis": -1}}
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["n0"]), helper.make_node("Add", ["n0", "bias"], ["n1"])]
    for number, name in enumerate(operators, 1):
        made = output if number == len(operators) else f"n{number + 1}"
        inputs = [f"n{number}"] if name != "Div" else [f"n{number}", "total"]
        if name == "Div":
            nodes.append(helper.make_node("ReduceSum", [f"n{number}", "axes"], ["total"], keepdims=1))
            weights["axes"] = np.array([1], np.int64)
        nodes.append(helper.make_node(name, inputs, [made], **extra.get(name, {})))
    return artifact_of(folder, nodes, ["x:float32[batch,4]"], [f"{output}:float32[batch,3]"], weights)


def one_text(folder: Path) -> Path:
    """words:string[batch] to same:string[batch]."""
    node = helper.make_node("Identity", ["words"], ["same"])
    return artifact_of(folder, [node], ["words:string[batch]"], ["same:string[batch]"])


def tokenizer_file(folder: Path, pad: str = "[PAD]") -> Path:
    """A tokenizer.json of three words and a token for padding."""
    made = Tokenizer(WordLevel({"[UNK]": 0, "the": 1, "fox": 2, pad: 3}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.save(str(folder / "words.json"))
    return folder / "words.json"


# Task, what makes the network, with which arguments, and the outputs of the served model that hooks give.
KINDS: list[tuple[str, Any, tuple[Any, ...], list[str]]] = [
    ("image-classification", mean_of_images, ("3,8,10",), ["label", "probability"]),
    ("image-classification", mean_of_images, ("3,height,width",), ["label", "probability"]),
    ("image-classification", mean_of_images, ("8,10,3",), ["label", "probability"]),
    ("image-classification", mean_of_images, ("3,8,10", "uint8"), ["label", "probability"]),
    ("image-classification", mean_of_images, ("8,10,3", "uint8"), ["label", "probability"]),
    ("image-classification", mean_of_images, ("3,8,10", "float16"), ["label", "probability"]),
    ("image-classification", mean_of_images, ("8,10,3", "float16"), ["label", "probability"]),
    ("tabular", tiny_artifact, (), ["label", "probability"]),
    ("tabular", one_number, (), ["value"]),
    ("tabular", outputs, ({"emb": 5, "scores": 3},), ["label", "probability"]),
    ("tabular", outputs, ({"a.b": 3, "a_b": 2},), ["label", "probability"]),
    ("tabular", ending, (("Softmax",),), ["label", "probability"]),
    ("tabular", lookup_artifact, (), ["label", "probability"]),
    ("text", one_text, (), []),
    ("text", ids, (("input_ids",), "6"), ["label", "probability"]),
    ("text", ids, (("input_ids", "attention_mask", "token_type_ids"), "length"), ["label", "probability"]),
    ("text", ids, (("input_ids", "attention_mask"), "length", "sentence_embedding"), []),
]
