"""A query that a mask hides all keys from: the file answers as torch does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.nn import functional as F

from compress.artifact import TensorSpec
from compress.data.dataset import Dataset
from compress.formats.onnx.load import load_onnx
from compress.model import OnnxModel, TorchModel
from compress.model.infer import infer_signature
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.onnx_export.torch_from_onnx import TorchFromOnnx
from compress.quantize.half.half_onnx import HalfOnnx
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import OnnxBackend
from tests.unit.compress.onnx_graphs import normal, written

Mask = np.ndarray[Any, Any]
LENGTH, WIDTH = 5, 16
X = normal(2, LENGTH, WIDTH) * 2
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
CAUSAL[2] = False  # the hidden row
EACH = np.stack([CAUSAL, np.ones_like(CAUSAL)])[:, None]
PADDED = np.array([[True, True, True, False, False], [False] * LENGTH])  # the second is all padding
LOWEST = float(np.finfo(np.float32).min)


def numbers(mask: Mask, hidden: float = -np.inf) -> Mask:
    return np.where(mask, 0, hidden).astype(np.float32)


class Attending(nn.Module):
    """Of queries with a number of axes; with fewer heads of keys, where these are shared."""

    def __init__(self, axes: int = 4, *, shared: bool = False) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2 if shared else WIDTH)
        self.out, self.axes, self.shared = nn.Linear(WIDTH, 4), axes, shared

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key = self.query(x), self.key(x)
        if self.axes > 3:
            query, key = (each.unflatten(2, (-1, 4)).transpose(1, 2) for each in (query, key))
        if self.axes > 4:
            query, key = query.unsqueeze(1), key.unsqueeze(1)
        found = F.scaled_dot_product_attention(query, key, key, mask, is_causal=mask is None, enable_gqa=self.shared)
        found = found.squeeze(1) if self.axes > 4 else found
        return self.out(found.transpose(1, 2).flatten(2) if self.axes > 3 else found)  # type: ignore[no-any-return]


class Encoding(nn.Module):
    """True in its mask hides a key."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(self.into(x), src_key_padding_mask=mask)  # type: ignore[no-any-return]


class Decomposed(Attending):
    """As programs have attention whose operators were decomposed."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key = (each.unflatten(2, (-1, 4)).transpose(1, 2) for each in (self.query(x), self.key(x)))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return self.out(attend(query, key, key, attn_mask=mask)[0].transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


CASES: dict[str, tuple[nn.Module, str, Mask]] = {
    "truths": (Attending(), "bool[batch,1,T,T]", EACH),
    "truths for all samples": (Attending(), "bool[T,T]", CAUSAL),
    "-inf": (Attending(), "float32[batch,1,T,T]", numbers(EACH)),
    "the lowest number, which gives the mean": (Attending(), "float32[batch,1,T,T]", numbers(EACH, LOWEST)),
    "fewer heads of keys": (Attending(shared=True), "bool[batch,1,T,T]", EACH),
    "fewer heads of keys, -inf": (Attending(shared=True), "float32[T,T]", numbers(CAUSAL)),
    "three axes": (Attending(3), "bool[batch,T,T]", EACH[:, 0]),
    "three axes, -inf": (Attending(3), "float32[T,T]", numbers(CAUSAL)),
    "five axes": (Attending(5), "bool[batch,1,1,T,T]", EACH[:, None]),
    "a layer of torch": (Encoding(), "bool[batch,T]", ~PADDED),
    "decomposed": (Decomposed(), "float32[batch,1,T,T]", numbers(EACH)),
}  # fmt: skip


def exported(module: nn.Module, folder: Path, *inputs: str) -> OnnxModel:
    module = module.eval()
    model = TorchModel(module, infer_signature(module, tuple(map(TensorSpec.parse, inputs))))
    found = OnnxFromTorch().run(model, folder, lambda *_: None).model
    assert isinstance(found, OnnxModel)
    return found


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("case", CASES)
def test_a_row_of_which_no_key_is_seen_answers_as_in_torch(case: str, tmp_path: Path) -> None:
    module, spec, mask = CASES[case]
    found = exported(module, tmp_path, f"x:float32[batch,T,{WIDTH}]", f"mask:{spec}")
    # Without gradients, torch's encoder layer takes a fast path, which gives NaN.
    expected = module(torch.from_numpy(X), torch.from_numpy(mask)).detach().numpy()
    (got,) = OnnxBackend(found, 1).infer({"x": X, "mask": mask}).values()
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert not operators(found.path)["IsNaN"]  # of the scores, which are as many as queries times keys


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("hidden", [-np.inf, LOWEST])
def test_so_does_one_of_a_script(hidden: float, tmp_path: Path) -> None:
    class Plain(nn.Module):
        """The old exporter loses the rank of what is unflattened."""

        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.out(F.scaled_dot_product_attention(x, x, x, mask))  # type: ignore[no-any-return]

    x, mask = X[:, None], numbers(EACH, hidden)
    given = torch.from_numpy(x), torch.from_numpy(mask)
    module = torch.jit.trace(Plain().eval(), given)  # type: ignore[no-untyped-call]
    specs = f"x:float32[batch,1,{LENGTH},{WIDTH}]", f"mask:float32[batch,1,{LENGTH},{LENGTH}]"
    (got,) = OnnxBackend(exported(module, tmp_path, *specs), 1).infer({"x": x, "mask": mask}).values()
    np.testing.assert_allclose(got, module(*given).detach().numpy(), atol=1e-5)


def test_what_sees_all_that_was_before_chooses_nothing(tmp_path: Path) -> None:
    found = exported(Attending(), tmp_path, f"x:float32[batch,T,{WIDTH}]")
    assert not operators(found.path).keys() & {"ReduceMax", "IsNaN"}


class Heads(nn.Module):
    """torch's attention with a mask for each head, and a fast way of its own, which gives NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = (mask[:, None, :] | mask[:, :, None]).repeat_interleave(2, 0)
        return self.layer(x, x, x, attn_mask=mask, need_weights=False)[0]  # type: ignore[no-any-return]


def test_rows_that_torch_s_fast_way_makes_nan_of_are_no_difference(tmp_path: Path) -> None:
    found = exported(Heads(), tmp_path, f"x:float32[batch,{LENGTH},{WIDTH}]", f"mask:bool[batch,{LENGTH}]")
    (got,) = OnnxBackend(found, 1).infer({"x": X, "mask": ~PADDED}).values()
    assert np.isfinite(got).all()


class Hiding(Attending):
    """Makes numbers of truths itself."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        assert mask is not None
        return super().forward(x, torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, float("-inf")))


def test_its_ranges_are_taken_and_it_is_trained_as_any_other(tmp_path: Path) -> None:
    """Of what is not there, no NaN is made on the way."""
    mask = EACH
    network = exported(Hiding(), tmp_path, f"x:float32[batch,T,{WIDTH}]", "mask:bool[batch,1,T,T]")
    data = Dataset("", {"x": np.tile(X, (8, 1, 1)), "mask": np.tile(mask, (8, 1, 1, 1))}, None, "")
    (tmp_path / "int8").mkdir()
    eight = QuantizeOnnx("static", data).run(network, tmp_path / "int8", lambda *_: None).model
    assert isinstance(eight, OnnxModel)
    before, after = (OnnxBackend(each, 1).infer({"x": X, "mask": mask}) for each in (network, eight))
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, atol=0.1)
    taken = TorchFromOnnx().run(network, tmp_path, lambda *_: None).model
    assert isinstance(taken, TorchModel)
    (got,) = taken.module(torch.from_numpy(X), torch.from_numpy(mask)).values()
    got.sum().backward()
    weights = [each for each in taken.module.parameters() if each.requires_grad]
    assert weights
    assert all(each.grad is None or each.grad.isfinite().all() for each in weights)
    assert sum(each.grad is not None for each in weights) > 2


@pytest.mark.parametrize("hidden", [-np.inf, LOWEST])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_in_half_precision_what_hides_is_told_as_in_float32(
    precision: Literal["fp16", "bf16"], hidden: float, tmp_path: Path
) -> None:
    """Half precision has no number as low as finfo.min, of which torch gives the mean."""
    network = exported(Attending(), tmp_path, f"x:float32[batch,T,{WIDTH}]", "mask:float32[batch,1,T,T]")
    (tmp_path / "half").mkdir()
    half = HalfOnnx(precision).run(network, tmp_path / "half", lambda *_: None).model
    assert isinstance(half, OnnxModel)
    given = {"x": X / 4, "mask": numbers(EACH, hidden)}  # beside -65,504, FP16 has no steps below 32
    (before,), (after,) = (OnnxBackend(each, 1).infer(given).values() for each in (network, half))
    np.testing.assert_allclose(after, before, atol=0.05)


class Positions(Attending):
    """What is added to its scores is a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 4, LENGTH, LENGTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, self.table)


def test_a_table_that_hides_nothing_leaves_no_choice_when_it_is_folded(tmp_path: Path) -> None:
    found = exported(Positions(), tmp_path, f"x:float32[batch,{LENGTH},{WIDTH}]")
    (tmp_path / "folded").mkdir()
    folded = FoldOnnx().run(found, tmp_path / "folded", lambda *_: None).model
    assert isinstance(folded, OnnxModel)
    assert not operators(folded.path).keys() & {"ReduceMax", "Less", "Where"}


@pytest.mark.parametrize("mask", [[[True], [False]], [[True, True], [False, False]], [False, True]])
def test_what_chooses_anything_stays(mask: list[Any], tmp_path: Path) -> None:
    """[2, 1] or [2, 2] of which a row is chosen, [2] of which a column is."""
    nodes = [helper.make_node("Where", ["mask", "zero", "x"], ["w"]), helper.make_node("Relu", ["w"], ["y"])]
    model = written(
        nodes, {"mask": np.array(mask), "zero": np.float32(0)}, tmp_path, inputs=("x:float32[2,2]",),
        outputs=("y:float32[2,2]",),
    )  # fmt: skip
    (tmp_path / "folded").mkdir()
    folded = FoldOnnx().run(model, tmp_path / "folded", lambda *_: None).model
    assert isinstance(folded, OnnxModel)
    assert operators(folded.path)["Where"] == 1


def test_so_does_what_makes_its_input_larger(tmp_path: Path) -> None:
    nodes = [helper.make_node("Where", ["mask", "zero", "x"], ["w"]), helper.make_node("Relu", ["w"], ["y"])]
    model = written(
        nodes, {"mask": np.zeros((3, 1), bool), "zero": np.float32(0)}, tmp_path, inputs=("x:float32[1,2]",),
        outputs=("y:float32[3,2]",),
    )  # fmt: skip
    (tmp_path / "folded").mkdir()
    folded = FoldOnnx().run(model, tmp_path / "folded", lambda *_: None).model
    assert isinstance(folded, OnnxModel)
    assert operators(folded.path)["Where"] == 1


@pytest.mark.parametrize(("kind", "mask"), [(TensorProto.BOOL, EACH), (TensorProto.FLOAT, numbers(EACH))])
def test_an_onnx_file_that_is_taken_back_answers_as_before(kind: int, mask: Mask, tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w1"], ["h"]), node("Attention", ["h", "h", "h", "mask"], ["a"], q_num_heads=4, kv_num_heads=4),
        node("MatMul", ["a", "w2"], ["y"]),
    ]  # fmt: skip
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", LENGTH, WIDTH]),
        helper.make_tensor_value_info("mask", kind, ["batch", 1, LENGTH, LENGTH]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    ]
    weights = {"w1": normal(WIDTH, WIDTH), "w2": normal(WIDTH, 4)}
    stored = [onnx.numpy_helper.from_array(values, name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:2], ends[2:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), tmp_path / "m.onnx")
    file = load_onnx(tmp_path / "m.onnx")
    network = TorchFromOnnx().run(file, tmp_path, lambda *_: None).model
    (tmp_path / "out").mkdir()
    found = OnnxFromTorch().run(network, tmp_path / "out", lambda *_: None).model  # type: ignore[arg-type]
    assert isinstance(found, OnnxModel)
    before, after = (OnnxBackend(each, 1).infer({"x": X, "mask": mask})["y"] for each in (file, found))
    np.testing.assert_allclose(after, before, atol=1e-5)
