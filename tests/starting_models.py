"""Networks for which `serve hooks new` writes hooks, and a tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from compress.artifact import Artifact, sha256_of
from compress.processor import Processor
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


def positions(folder: Path, most: int, labels: tuple[str, ...]) -> Path:
    """Token ids, with a mask, of at most so many places, as scores of the labels, and the processor that comes along.

    The file says that any length fits; ONNX Runtime fails over what is longer, as a network with a table of positions.
    """
    names = ("input_ids", "attention_mask")
    nodes = [
        *(helper.make_node("Cast", [name], [f"{name}_real"], to=onnx.TensorProto.FLOAT) for name in names),
        helper.make_node("Shape", ["input_ids"], ["length"], start=1),
        helper.make_node("Slice", ["table", "zero", "length"], ["places"]),
        helper.make_node("Add", ["input_ids_real", "places"], ["placed"]),
        helper.make_node("Mul", ["placed", "attention_mask_real"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "axes"], ["one"], keepdims=1),
        helper.make_node("Mul", ["one", "row"], ["logits"]),
    ]
    weights: dict[str, np.ndarray[Any, Any]] = {
        "table": np.ones(most, np.float32), "zero": np.array([0], np.int64), "axes": np.array([1], np.int64),
        "row": np.arange(len(labels), dtype=np.float32),
    }  # fmt: skip
    inputs = [f"{name}:int64[batch,seq]" for name in names]
    artifact_of(folder, nodes, inputs, [f"logits:float32[batch,{len(labels)}]"], weights)
    (folder / "processor").mkdir()
    tokenizer_file(folder).rename(folder / "processor" / "tokenizer.json")
    return with_processor(folder, "text", "tokenizer.json", labels, most)


CROPPED = {
    "do_resize": True, "size": {"shortest_edge": 16}, "do_center_crop": True, "crop_size": {"height": 8, "width": 8},
    "resample": 3, "do_rescale": True, "do_normalize": True, "image_mean": [0.5, 0.25, 0.0], "image_std": [0.5, 0.5, 1],
}  # fmt: skip
"""Settings of an image processor: the shorter side becomes 16 pixels, and its centre of 8 by 8 is taken."""


def own_images(folder: Path, shape: str, settings: dict[str, Any], labels: tuple[str, ...] = ()) -> Path:
    """As `mean_of_images`, with an image processor of these settings."""
    mean_of_images(folder, shape)
    (folder / "processor").mkdir()
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(settings))
    return with_processor(folder, "image", "preprocessor_config.json", labels, None)


def with_processor(folder: Path, kind: str, name: str, labels: tuple[str, ...], longest: int | None) -> Path:
    """Note in an artifact which file makes its inputs, as `compress` does."""
    file = folder / "processor" / name
    task = {"text": "sequence-classification", "image": "image-classification"}[kind]
    processor = Processor(kind, task, {name: sha256_of(file)}, labels, longest, file.parent)
    replace(Artifact.load(folder), processor=processor).save()
    return folder


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


def one_sample(folder: Path, given: str, made: str) -> Path:
    """The mean of an input whose batch is fixed at 1, counted on from 0 in an output."""
    (name, _), (output, shape) = given.split(":"), made.split(":")
    sizes = [int(size) for size in shape[shape.index("[") + 1 : -1].split(",")]
    nodes = [
        helper.make_node("Cast", [name], ["real"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["real"], ["mean"], keepdims=0),
        helper.make_node("Add", ["mean", "counted"], [output]),
    ]
    return artifact_of(
        folder, nodes, [given], [made], {"counted": np.arange(np.prod(sizes), dtype=np.float32).reshape(sizes)}
    )


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
    ("text", positions, (16, tuple(f"class number {each}" for each in range(9))), ["label", "probability"]),
    ("image-classification", one_sample, ("x:float32[1,3,8,10]", "y:float32[1,5]"), ["label", "probability"]),
    ("image-classification", one_sample, ("x:float16[1,8,10,1]", "y:float32[5]"), ["label", "probability"]),
    ("image-classification", one_sample, ("x:uint8[1,3,8,10]", "y:float32[1,1]"), ["value"]),
    ("image-classification", own_images, ("3,8,8", CROPPED, tuple("abcde")), ["label", "probability"]),
    ("tabular", one_sample, ("x:float32[1,4]", "y:float32[1,5]"), ["label", "probability"]),
    ("tabular", one_sample, ("x:int64[1,4]", "y:float32[1]"), ["value"]),
    ("text", one_sample, ("input_ids:int64[1,6]", "y:float32[1,2]"), ["label", "probability"]),
]
