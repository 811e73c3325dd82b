"""What hides a difference, or tells of one that is not: huge values, no values, doubles, circles, few samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.nn import functional as F

import compress
from compress.errors import CheckpointError, StageError
from compress.evaluate.intervals import difference_interval
from compress.evaluate.metrics import cosine_similarity
from compress.evaluate.parity import difference
from compress.formats.native.graph import GraphError, from_data, to_data
from compress.formats.onnx.scope import in_order
from compress.model import OnnxModel, TorchModel
from compress.model.apart import share_of_own_size
from compress.model.infer import infer_signature
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.prune.channels import Channels
from compress.runtime.measure import onnx_macs, torch_macs
from compress.signature import Signature, TensorSpec
from compress.stage import Given
from compress.tensorrt.view import View
from tests.unit.compress.prune.test_prune_channels import quiet

# What an output may end in that leaves next to nothing of how it was made.
ENDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "saturated": lambda y: torch.sigmoid(1e5 * y),
    "rounded": lambda y: (0.1 * y).round(),
    "cut off": lambda y: F.relu(y - 1e3),
}


class Mixes(nn.Module):
    """A softmax over hidden channels: to remove one is not to silence it."""

    def __init__(self, ends: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 6)
        with torch.no_grad():
            self.b.weight.mul_(4)
        self.ends = ends
        self.register_buffer("mask", torch.tensor([False] * 5 + [True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.log() if self.ends == "logarithm" else x
        y = self.c(torch.softmax(self.b(F.relu(self.a(x))), -1) * 8)
        if self.ends == "mask":
            y = y.masked_fill(self.mask, -1e9)
        if self.ends in ENDS:
            return ENDS[self.ends](y)
        return torch.cat([y, x.sum(-1, keepdim=True) * 1e6], -1) if self.ends == "large" else y


def saved(module: nn.Module, folder: Path, takes: str = "x:float32[batch,16]") -> TorchModel:
    return compress.load(compress.save(module, folder / "model.pt", inputs=takes))


@pytest.mark.parametrize("ends", ["plain", "mask", "large", "logarithm", *ENDS])
def test_no_large_value_and_no_lack_of_values_hides_what_a_removal_changes(tmp_path: Path, ends: str) -> None:
    channels = Channels(saved(Mixes(ends), tmp_path))
    assert [group.root for group in channels.groups] == ["a"]
    assert "b" in channels.left_alone


def test_the_distance_is_of_the_scale_of_what_differs() -> None:
    x = np.array([[1.0, 2.0, -1e9, 1e6]])
    assert share_of_own_size(x, x) == 0
    assert share_of_own_size(x, x + np.array([[0.1, 0, 0, 0]])) == pytest.approx(0.1)
    assert share_of_own_size(x, x * (1 + 1e-9)) < 1e-8
    assert share_of_own_size(np.full((2, 3), np.nan), np.full((2, 3), np.nan)) == np.inf
    assert share_of_own_size(x, np.where(x == 2, np.inf, x)) == np.inf
    assert share_of_own_size(np.zeros((0, 3)), np.zeros((0, 3))) == 0


def test_what_gives_no_number_is_not_equal() -> None:
    nothing = np.full((2, 3), np.nan, np.float32)
    assert not difference(nothing, nothing).fits
    partly = np.array([[1.0, np.nan]], np.float32)
    assert difference(partly, partly).fits


def test_a_network_of_positive_inputs_is_exported_and_proven_on_such(tmp_path: Path) -> None:
    given = OnnxFromTorch().run(saved(Mixes("logarithm"), tmp_path), tmp_path, quiet)
    assert isinstance(given, Given)
    assert all(row["cosine_similarity"] > 0.999 for row in given.details["parity"].values())


def test_the_cosine_is_of_what_a_mask_leaves() -> None:
    scores, others = np.array([[1.0, 0.0, -1e9]]), np.array([[0.0, 1.0, -1e9]])
    assert cosine_similarity(scores, scores)[0] == 1
    assert cosine_similarity(scores, others)[0] == 0
    assert cosine_similarity(scores, np.array([[1.0, 0.0, 0.0]]))[0] < 0.5


def test_a_model_whose_layers_do_more_than_its_forward_says_is_not_saved_behind_a_mask(tmp_path: Path) -> None:
    module = Mixes("mask")
    module.c.register_forward_hook(lambda _layer, _given, out: out * 5)
    with pytest.raises(CheckpointError):
        compress.save(module, tmp_path / "model.pt", inputs="x:float32[batch,16]")


@pytest.mark.parametrize("sizes", [{"seq": float("inf")}, {"seq": 2.5}, {"seq": "4"}, {"seq": True}])
def test_a_signature_of_a_file_has_whole_sizes(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no whole number"):
        Signature.from_dict({"inputs": ["x:float32[batch,seq]"], "outputs": ["y:float32[batch]"], "sizes": sizes})


def test_no_name_of_a_file_moves_the_cursor() -> None:
    data = {"inputs": ["x:float32[batch,seq]"], "outputs": ["y:float32[batch]"], "sizes": {"seq": 4}}
    found = Signature.from_dict(data | {"size_sources": {"seq": "\x1b[2J\x1b]0;owned\x07"}})
    assert "\x1b" not in found.sizes_text
    assert "\x1b" not in str(StageError("a\x1b[2Jb", why="c\x07\nd", mend="e"))
    assert str(StageError("a\x1b[2Jb", why="c\x07\nd", mend="e")).count("\n") == 2


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("torch.ctc_loss", [], "not a function on tensors"),
        ("torch.choose_qparams_optimized", [], "not a function on tensors"),
        ("math.factorial", [100_000_000], "not a function on tensors"),
        ("_operator.pow", [10, 10**9], "no network needs"),
        ("_operator.lshift", [1, 10**9], "no network needs"),
        ("_operator.mod", ["%999999999d", 1], "no network needs"),
        ("_operator.mul", ["a", 10**9], "no network needs"),
    ],
)
def test_words_that_grow_without_end_are_none_of_a_networks(name: str, args: list[Any], why: str) -> None:
    data = to_data(nn.Sequential(nn.ReLU()), inputs=1)
    node = {"name": "more", "op": "call_function", "target": name, "args": {"tuple": args}, "kwargs": {"dict": []}}
    data["nodes"].insert(1, node)
    with pytest.raises(GraphError, match=why):
        from_data(data)


def graph_of(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    return helper.make_graph(list(nodes), "g", [x], [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])])


@pytest.mark.parametrize(
    "graph",
    [
        graph_of(helper.make_node("Add", ["x", "y"], ["z"]), helper.make_node("Relu", ["z"], ["y"])),
        graph_of(helper.make_node("Relu", ["z"], ["z"])),
        graph_of(helper.make_node("Relu", ["x"], ["z"]), helper.make_node("Neg", ["x"], ["z"])),
    ],
)
def test_a_graph_that_goes_in_a_circle_is_refused(graph: onnx.GraphProto) -> None:
    with pytest.raises(ValueError, match=r"circle|two of its nodes"):
        in_order(graph)
    model = helper.make_model(graph)
    with pytest.raises(StageError, match="can't look at this graph"):
        View(model, model)


def test_a_long_chain_is_looked_at() -> None:
    nodes = [helper.make_node("Relu", [f"t{at}"], [f"t{at + 1}"]) for at in range(5000)]
    assert [node.output[0] for node in in_order(graph_of(*reversed(nodes)))] == [f"t{at + 1}" for at in range(5000)]


class Einsum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bij,bkj->bik", x, x * 2)


def test_products_by_einsum_are_counted(tmp_path: Path) -> None:
    model = saved(Einsum(), tmp_path, "x:float32[batch,6,8]")
    given = OnnxFromTorch().run(model, tmp_path, quiet)
    assert isinstance(given.model, OnnxModel)
    assert onnx_macs(given.model.path, model.signature) == torch_macs(model.module, model.signature) == 6 * 6 * 8


class Computes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6, 4))
        self.points, self.both = nn.Parameter(torch.randn(30, 8)), nn.Bilinear(8, 8, 6)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "bilinear":
            return self.both(x, x)  # type: ignore[no-any-return]
        if self.how == "vector":
            return torch.matmul(x, self.points[0])
        if self.how == "distances":
            return torch.cdist(x, self.points)
        return torch.einsum("bc,cd,de->be", x, self.w, self.v)


@pytest.mark.parametrize(
    ("how", "macs"), [("bilinear", 6 * 8 * 8), ("vector", 8), ("distances", 30 * 8), ("einsum", 8 * 6 + 6 * 4)]
)
def test_products_that_torch_does_not_count_are_counted(how: str, macs: int, tmp_path: Path) -> None:
    module = Computes(how)
    model = TorchModel(module, infer_signature(module, (TensorSpec.parse("x:float32[batch,8]"),)))
    assert torch_macs(module, model.signature) == macs
    if how in ("vector", "einsum"):
        given = OnnxFromTorch().run(model, tmp_path, quiet).model
        assert isinstance(given, OnnxModel)
        assert onnx_macs(given.path, given.signature) == macs


@pytest.mark.parametrize(("count", "least"), [(2, 0.9), (3, 0.9), (5, 0.9), (10, 0.9)])
def test_few_samples_have_wide_intervals(count: int, least: float) -> None:
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(300):
        found = difference_interval(rng.standard_normal(count) + 0.5, np.zeros(count), seed=seed)
        held += found.low <= 0.5 <= found.high
    assert held / 300 >= least


def test_rare_losses_behind_noise_are_not_told_as_none() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(200):
        after = 1 - np.abs(rng.standard_normal(50)) * 1e-6 - 0.7 * (rng.random(50) < 0.01)
        found = difference_interval(after, np.ones(50), bounds=(-1.0, 1.0), seed=seed)
        held += found.low <= -0.007 <= found.high
    assert held / 200 >= 0.95
