"""A mask that is added to data leaves the data its 8 bits, whatever number hides what it hides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from compress.data.dataset import Dataset
from compress.model import OnnxModel, example_inputs
from compress.quantize.calibrate import calibrate
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.swamped import swamped
from tests.families import family
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_half_onnx import exported
from tests.unit.compress.quantize.test_half_values import cast, graph_of, off_by

COUNT, LENGTH = 64, 12


class Longest(nn.Module):
    """The largest of what a mask shows, without a Softmax."""

    def __init__(self, hidden: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = hidden
        self.layer, self.a, self.b = nn.Linear(8, 48), nn.Linear(48, 48), nn.Linear(48, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shown = self.layer(x) + (1 - mask[..., None].float()) * self.hidden
        return self.b(torch.relu(self.a(shown.amax(1))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["int64", "bool", "float32"])
@pytest.mark.parametrize("hidden", [-3e3, -1e4, -1e6, -1e9])
def test_an_added_mask_before_a_maximum_leaves_the_values(hidden: float, kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, COUNT)[:, None]
    values = {"x": rng.normal(size=(COUNT, LENGTH, 8)).astype(np.float32), "mask": mask.astype(kind)}
    data = Dataset("", values, None, "data")
    inputs = (f"x:float32[batch,{LENGTH},8]", f"mask:{kind}[batch,{LENGTH}]")
    model = exported(Longest(hidden).eval(), inputs, tmp_path)
    given = QuantizeOnnx("static", data).run(model, tmp_path / "next", quiet)
    assert isinstance(given.model, OnnxModel)
    assert off_by(model, given.model, data) < 0.1
    assert given.details["layers"]["int8"] == 3, "its layers are in INT8"


class Gated(Longest):
    """A gate of each step, shut where a mask hides it, without a Softmax."""

    def __init__(self, hidden: float, gate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(hidden)
        self.gate, self.value = gate, nn.Linear(8, 48)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        gate = self.gate(3 * self.layer(x) + (1 - mask[..., None].float()) * self.hidden)
        return self.b(torch.relu(self.a((gate * self.value(x)).sum(1))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("gate", [torch.sigmoid, torch.tanh, nn.functional.softplus, nn.functional.hardsigmoid])
def test_an_added_mask_before_a_gate_leaves_the_values(
    gate: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    mask = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, COUNT)[:, None]).astype(np.int64)
    data = Dataset("", {"x": rng.normal(size=(COUNT, LENGTH, 8)).astype(np.float32), "mask": mask}, None, "data")
    inputs = (f"x:float32[batch,{LENGTH},8]", f"mask:int64[batch,{LENGTH}]")
    model = exported(Gated(-1e4, gate).eval(), inputs, tmp_path)
    given = QuantizeOnnx("static", data).run(model, tmp_path / "next", quiet)
    assert isinstance(given.model, OnnxModel)
    assert off_by(model, given.model, data) < 0.1
    assert given.details["layers"]["int8"] == 4, "its layers are in INT8"


@pytest.mark.parametrize("name", ["residual", "unet", "convnext", "mlp", "squeeze_excite", "vit"])
def test_ordinary_networks_have_no_such_sum(name: str, tmp_path: Path) -> None:
    net, inputs = family(name)
    model = exported(net, inputs, tmp_path)
    values = example_inputs(model.signature.inputs, model.signature.at(8))
    ranges = calibrate(model.path, Dataset("", values, None, "data"), "minmax", quiet)
    assert not swamped(onnx.load(model.path).graph, ranges)


SMALL_SUM = [
    cast("ids", "large"),
    helper.make_node("MatMul", ["ids", "w"], ["h"], name="layer"),
    helper.make_node("MatMul", ["h", "v"], ["branch"], name="branch"),
]
WIDE, NARROW = (-1e4, 0.0), (-1.0, 1.0)


@pytest.mark.parametrize(
    ("terms", "ranges", "found"),
    [
        (["branch", "large"], {"large": WIDE, "branch": NARROW, "y": WIDE}, {"sum", "pool"}),
        (["branch", "large"], {"large": (-400.0, 0.0), "branch": NARROW, "y": (-400.0, 0.0)}, set()),
        (["branch", "large"], {"large": WIDE, "branch": (0.0, 0.0), "y": WIDE}, set()),
        (["branch", "h"], {"h": WIDE, "branch": NARROW, "y": WIDE}, set()),
    ],
    ids=["a mask", "one that leaves some steps", "a branch that gives nothing", "a small branch of a residual"],
)
def test_what_counts_is_how_many_steps_are_left_beside_a_term_without_layers(
    terms: list[str], ranges: Mapping[str, tuple[float, float]], found: set[str]
) -> None:
    nodes = [
        *SMALL_SUM,
        helper.make_node("Add", terms, ["y"], name="sum"),
        helper.make_node("ReduceMax", ["y"], ["most"], name="pool"),
    ]
    weights = {"w": np.ones((6, 6), np.float32), "v": np.ones((6, 6), np.float32)}
    assert swamped(graph_of(nodes, weights, TensorProto.FLOAT).graph, ranges) == found
