"""Masks of -inf, finfo.min and -1e9 through INT8, quantization-aware training and half precision."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.model import OnnxModel
from compress.options.training import TrainingOptions
from compress.quantize.calibrate import calibrate, trained_ranges
from compress.quantize.half.half_onnx import HalfOnnx
from compress.quantize.half.mask_chain import mask_chain
from compress.quantize.qat.train_quantized import TrainQuantized
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.training.finetune import Finetune
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped
from tests.unit.compress.quantize.test_half_onnx import exported

VOCABULARY, WIDTH, HEADS, SHARED = 23, 32, 4, 2
FORMS = ("fill", "add", "add_lowest", "fill_lowest", "fill_1e9", "both")
LENGTHS = (1, 2, 5, 11)
INPUTS = ("tokens:int64[batch,seq]",)


class Attention(nn.Module):
    """Causal, with fewer heads of keys and values than of queries."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.size = form, WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, SHARED * self.size), nn.Linear(WIDTH, SHARED * self.size)

    def extra_repr(self) -> str:
        return self.form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, self.size).transpose(1, 2)
        k, v = (
            layer(x).view(batch, length, SHARED, self.size).transpose(1, 2).repeat_interleave(HEADS // SHARED, 1)
            for layer in (self.k, self.v)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        lowest = torch.finfo(torch.float32).min
        value = {"fill": -torch.inf, "add": -torch.inf, "both": -torch.inf, "fill_1e9": -1e9}.get(self.form, lowest)
        if self.form.startswith("add"):
            scores = scores + torch.zeros(length, length).masked_fill(later, value)
        else:
            scores = scores.masked_fill(later, value)
        if self.form == "both":  # two masks, one on the other
            scores = scores + torch.zeros(length, length).masked_fill(later, lowest)
        mixed = torch.softmax(scores, -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Two blocks on embedded tokens and positions."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.attend = nn.ModuleList(Attention(form) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for at in range(2):
            x = x + self.attend[at](self.norms[2 * at](x))
            x = x + self.feed[at](self.norms[2 * at + 1](x))
        return self.head(x)  # type: ignore[no-any-return]


def tokens(count: int, length: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, length))


def data(count: int = 48) -> Dataset:
    return Dataset("", {"tokens": tokens(count, 9)}, None, "tokens")


def answers(path: Path, given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """By ONNX Runtime alone."""
    running = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(running.run(None, {running.get_inputs()[0].name: given})[0])


def holds(path: Path, module: nn.Module, error: float) -> None:
    """Assert that a file answers as the module does, and that no token has to do with one before it."""
    for length in LENGTHS:
        given = tokens(6, length, seed=length)
        got = answers(path, given)
        with torch.no_grad():
            want = module(torch.from_numpy(given)).numpy()
        assert np.isfinite(got).all()
        assert np.linalg.norm(got - want) < error * np.linalg.norm(want), length
        for place in range(1, length):
            other = given.copy()
            other[:, place:] = (other[:, place:] + 1 + np.arange(length - place)) % VOCABULARY
            np.testing.assert_array_equal(answers(path, other)[:, :place], got[:, :place])


def rounded(path: Path) -> set[str]:
    """Names of the activations with a QuantizeLinear."""
    graph = onnx.load(path).graph
    stored = {tensor.name for tensor in graph.initializer}
    return {n.input[0] for n in graph.node if n.op_type == "QuantizeLinear" and n.input[0] not in stored}


def weighed(path: Path) -> int:
    """How many products take a weight of 8 bits."""
    graph = onnx.load(path).graph
    stored = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.INT8}
    whole = {n.output[0] for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored}
    return sum(n.op_type in ("MatMul", "Gemm") and bool(whole & set(n.input)) for n in graph.node)


@pytest.mark.parametrize("target", ["cpu", "tensorrt", "cuda"])
@pytest.mark.parametrize("form", FORMS)
def test_a_causal_decoder_in_static_int8_stays_causal(form: str, target: str, tmp_path: Path) -> None:
    module = Decoder(form).eval()
    model = exported(module, INPUTS, tmp_path)
    given = QuantizeOnnx("static", data(), target=target).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    assert isinstance(given.model, OnnxModel)
    assert weighed(given.model.path) == 13, "every linear layer"
    chain = mask_chain(onnx.load(model.path).graph)
    assert chain.holding
    assert not rounded(given.model.path) & chain.all
    holds(given.model.path, module, 0.05)


@pytest.mark.parametrize("method", ["percentile", "entropy", "mse"])
def test_ranges_that_clip_leave_a_mask_alone(method: str, tmp_path: Path) -> None:
    module = Decoder("fill").eval()
    model = exported(module, INPUTS, tmp_path)
    given = QuantizeOnnx("static", data(), method).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    assert isinstance(given.model, OnnxModel)
    holds(given.model.path, module, 0.1)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_keeps_a_mask(form: str, tmp_path: Path) -> None:
    module = Decoder(form).eval()
    model = exported(module, INPUTS, tmp_path)
    for precision, error in (("fp16", 0.005), ("bf16", 0.05)):
        folder = tmp_path / precision
        folder.mkdir()
        given = HalfOnnx(precision, data()).run(model, folder, quiet)  # type: ignore[arg-type]
        assert isinstance(given.model, OnnxModel)
        assert given.details["error"] < error
        if precision == "fp16":
            holds(given.model.path, module, error)
        stored = [numpy_helper.to_array(t) for t in onnx.load(given.model.path).graph.initializer]
        infinite = any(t.dtype.kind == "f" and np.isinf(t.astype(np.float32)).any() for t in stored)
        assert infinite == (form in ("fill", "add", "both")) or precision == "bf16"


@pytest.mark.parametrize("form", ["fill", "add", "fill_lowest"])
def test_what_is_trained_is_what_is_exported(form: str, tmp_path: Path) -> None:
    module = Decoder(form).eval()
    original = wrapped(module, *INPUTS)
    asked = TrainingOptions(epochs=1, learning_rate=1e-4, batch_size=16)
    stage = TrainQuantized(Finetune(data(), original, asked, 0))
    (tmp_path / "work").mkdir()
    simulated = set(stage._simulation(original, tmp_path / "work", quiet)[0].activations)
    given = stage.run(original, tmp_path, quiet)
    assert not given.details["not_simulated"]
    assert all(levels["rms"] < 1 for levels in given.details["off_levels"].values())
    folder = tmp_path / "export"
    folder.mkdir()
    model = exported(given.model.module, INPUTS, folder)  # type: ignore[union-attr]
    model = dataclasses.replace(model, ranges=given.model.ranges)  # type: ignore[union-attr]
    assert trained_ranges(model) is not None
    int8 = QuantizeOnnx("static", data()).run(model, folder / "next", quiet)
    assert not int8.warnings
    assert isinstance(int8.model, OnnxModel)
    assert rounded(int8.model.path) == simulated
    assert not simulated & mask_chain(onnx.load(model.path).graph).all
    holds(int8.model.path, given.model.module, 0.05)  # type: ignore[union-attr]


class Looking(nn.Module):
    """Self-attention on tokens, of which an input says which are there."""

    def __init__(self, value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.value, self.embed, self.head = value, nn.Embedding(10, 16), nn.Linear(16, 4)

    def extra_repr(self) -> str:
        return str(self.value)

    def forward(self, tokens: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        scores = (x @ x.transpose(1, 2)).masked_fill(there[:, None, :] == 0, self.value)
        return self.head(torch.softmax(scores, -1) @ x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("value", [-math.inf, -1e9, torch.finfo(torch.float32).min])
def test_in_fp16_a_mask_hides_what_it_hid_before(value: float, shown: bool, tmp_path: Path) -> None:
    """And of a row that a finite mask hides whole, the answer stays a number."""
    module = Looking(value).eval()
    model = exported(module, ("tokens:int64[batch,6]", "there:int64[batch,6]"), tmp_path)
    rng = np.random.default_rng(0)
    there = rng.integers(0, 2, (8, 6)) | (np.arange(6) == 0)
    fed = {"tokens": rng.integers(0, 10, (8, 6)), "there": there}
    seen = Dataset("", fed if shown else fed | {"there": np.ones_like(there)}, None, "tokens")
    given = HalfOnnx("fp16", seen).run(model, tmp_path / "next", quiet)
    assert isinstance(given.model, OnnxModel)
    if np.isfinite(value):
        fed["there"][1] = 0
    running = onnxruntime.InferenceSession(str(given.model.path), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        want = module(*(torch.from_numpy(values) for values in fed.values())).numpy()
    # A CPU computes a softmax in float32, and sees no difference where a GPU would: the reference takes FP16 as it is.
    with np.errstate(over="ignore"):  # the distance from -65,504 to a score; its exponential is 0
        plain = ReferenceEvaluator(str(given.model.path)).run(None, fed)[0]
    for got in (running.run(None, fed)[0], plain):
        assert np.isfinite(np.asarray(got)).all()
        assert np.linalg.norm(got - want) < 0.005 * np.linalg.norm(want)


class Pooled(nn.Module):
    """The largest value of the places that are there; no softmax."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def extra_repr(self) -> str:
        return str(self.value)

    def forward(self, x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        h = self.first(x).masked_fill(there[:, :, None] == 0, self.value)
        return self.last(h.amax(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("target", ["cpu", "tensorrt"])
@pytest.mark.parametrize("value", [-math.inf, -1e9])
@pytest.mark.parametrize("shown", [True, False])
def test_a_mask_before_a_maximum_is_not_rounded(value: float, target: str, shown: bool, tmp_path: Path) -> None:
    """Though the calibration data masks nothing, and the maximum itself is in 8 bits."""
    module = Pooled(value).eval()
    model = exported(module, ("x:float32[batch,5,8]", "there:int64[batch,5]"), tmp_path)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 5, 8)).astype(np.float32)
    there = rng.integers(0, 2, (64, 5)) | (np.arange(5) == 2)
    seen = Dataset("", {"x": x, "there": there if shown else np.ones_like(there)}, None, "x")
    given = QuantizeOnnx("static", seen, target=target).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    assert isinstance(given.model, OnnxModel)
    assert weighed(given.model.path) == 2
    running = onnxruntime.InferenceSession(str(given.model.path), providers=["CPUExecutionProvider"])
    got = np.asarray(running.run(None, {"x": x, "there": there})[0])
    with torch.no_grad():
        want = module(torch.from_numpy(x), torch.from_numpy(there)).numpy()
    assert np.linalg.norm(got - want) < (0.03 if shown else 0.15) * np.linalg.norm(want)


def small(nodes: list[onnx.NodeProto], stored: dict[str, Any], folder: Path) -> tuple[Path, Dataset]:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("x", "y")]
    weights = [numpy_helper.from_array(np.asarray(v), name) for name, v in stored.items()]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = folder / "model.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(made), path)
    signature = Signature((TensorSpec.parse("x:float32[batch,3]"),), (TensorSpec.parse("y:float32[batch,3]"),))
    np.save(folder / "x.npy", np.ones((4, 3), np.float32))
    return path, Dataset.open(str(folder / "x.npy"), signature)


BARE = np.array([True, False, False])
WHOLE = np.array([True, True, True])
EYE, NONE, HUGE = np.eye(3, dtype=np.float32), np.float32(-np.inf), np.float32(3e38)
node = helper.make_node
REFUSED: dict[str, tuple[list[onnx.NodeProto], dict[str, Any], str, str, str]] = {
    "a product overflows": (
        [node("Mul", ["x", "huge"], ["big"]), node("Mul", ["big", "big"], ["far"]), node("Relu", ["far"], ["y"])],
        {"huge": np.float32(1e30), "bare": BARE}, "'far'", "infinite", "overflows",
    ),
    "scores overflow before the mask": (
        [
            node("MatMul", ["x", "w"], ["scores"]), node("Where", ["bare", "none", "scores"], ["masked"]),
            node("Softmax", ["masked"], ["y"]),
        ],
        {"w": -HUGE * np.ones((3, 3), np.float32), "bare": BARE, "none": NONE}, "'scores'", "infinite", "overflows",
    ),
    "a row is masked whole": (
        [node("Where", ["bare", "none", "x"], ["masked"]), node("Softmax", ["masked"], ["y"])],
        {"bare": WHOLE, "none": NONE}, "'y'", "NaN", "masked whole",
    ),
    "a mask reaches an output": (
        [node("Where", ["bare", "none", "x"], ["y"])], {"bare": BARE, "none": NONE}, "'y'", "infinite", "finite number",
    ),
    "a mask reaches a layer": (
        [
            node("Where", ["bare", "none", "x"], ["masked"]), node("MatMul", ["masked", "w"], ["made"]),
            node("Softmax", ["made"], ["y"]),
        ],
        {"bare": BARE, "none": NONE, "w": np.ones((3, 3), np.float32)}, "'made'", "infinite", "'masked'",
    ),
    "a mask that is the logarithm of 0": (
        [
            node("Sub", ["x", "x"], ["zero"]), node("Log", ["zero"], ["m"]), node("Add", ["x", "m"], ["masked"]),
            node("Softmax", ["masked"], ["y"]),
        ],
        {}, "'m'", "infinite", "torch.where(mask, 0.0, -1e4)",
    ),
    "a mask times 0": (
        [node("Sub", ["x", "x"], ["zero"]), node("Mul", ["zero", "none"], ["m"]), node("Softmax", ["m"], ["y"])],
        {"none": NONE}, "'m'", "NaN", "'m'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_real_overflow_is_refused_and_named(case: str, tmp_path: Path) -> None:
    nodes, stored, name, kind, mend = REFUSED[case]
    path, seen = small(nodes, stored, tmp_path)
    for masks in (False, True):
        with pytest.raises(StageError) as caught:
            calibrate(path, seen, "minmax", quiet, masks=masks)
        assert f"the tensor {name}" in caught.value.why
        assert f"is {kind} for a sample from 0 to 3" in caught.value.why
        assert mend in caught.value.mend


def test_a_logarithm_of_distances_that_becomes_a_place_in_a_table_may_be_infinite() -> None:
    nodes = [
        helper.make_node("Log", ["distance"], ["log"]),
        helper.make_node("Mul", ["log", "scale"], ["scaled"]),
        helper.make_node("Cast", ["scaled"], ["place"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "place"], ["bias"]),
        helper.make_node("Log", ["distance"], ["value"]),
        helper.make_node("Add", ["bias", "value"], ["output"]),
    ]
    given = helper.make_tensor_value_info("distance", TensorProto.FLOAT, [3])
    made = helper.make_tensor_value_info("output", TensorProto.FLOAT, [3])
    stored = [numpy_helper.from_array(np.ones(n, np.float32), name) for n, name in ((1, "scale"), (9, "table"))]
    chain = mask_chain(helper.make_graph(nodes, "buckets", [given], [made], stored))
    assert chain.infinite == {"log", "scaled"}
    assert not chain.holding
