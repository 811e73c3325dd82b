"""For TensorRT, what no layer has made is rounded for layers alone: nobody who reads it in float has its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import NodeProto, helper
from torch import nn

from compress.data.dataset import Dataset
from compress.model import OnnxModel
from compress.quantize.calibrate import calibrate
from compress.quantize.int8_onnx import finish, plain
from compress.quantize.put_back import Mixed
from compress.quantize.quantize_onnx import QuantizeOnnx, quantize, quantized
from compress.quantize.tied_tables import ties
from compress.runtime.backends import OnnxBackend
from tests.families import family
from tests.unit.compress.onnx_graphs import error_of
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_half_onnx import exported, random_data
from tests.unit.compress.quantize.test_place_qdq import conv, int8_inputs, placed

INPUTS = ("x:float32[batch,8]", "b:float32[batch,8]")


class Joined(nn.Module):
    """Amounts up to 100,000 beside scores, squashed together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c = nn.Linear(16, 48), nn.Linear(48, 5)

    def squashed(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.cat([x, b], 1))

    def forward(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.a(self.squashed(x, b))))  # type: ignore[no-any-return]


class Moved(Joined):
    """The same, turned on the way."""

    def squashed(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return nn.functional.elu(torch.cat([x[..., None], b[..., None]], 1).transpose(1, 2)).flatten(1).clamp(-1, 1)


class Summed(Joined):
    """Two amounts that are nearly each other's opposite."""

    def squashed(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        both = torch.sigmoid(b + x.roll(1, 1) - x.roll(1, 1) + (x - x))
        return torch.cat([both, torch.sigmoid(-b)], 1)


def amounts() -> Dataset:
    r = np.random.default_rng(0)
    x = np.exp(r.normal(size=(128, 8)) * 2.5 + 2).clip(0, 1e5).astype(np.float32)
    return Dataset("", {"x": x, "b": r.normal(size=(128, 8)).astype(np.float32)}, None, "data")


@pytest.mark.parametrize("network", [Joined, Moved, Summed])
def test_what_is_joined_or_added_before_an_activation_is_not_rounded(network: type[nn.Module], tmp_path: Path) -> None:
    model = exported(network().eval(), INPUTS, tmp_path)
    given = QuantizeOnnx("static", amounts(), target="tensorrt").run(model, tmp_path / "next", quiet)
    assert given.details["outputs_lost"]["share"] < 0.02
    assert given.details["layers"] == {"int8": 2, "float": 0}


@pytest.mark.parametrize("name", ["Joined", "Moved", "Summed", "unet", "residual", "squeeze_excite"])
def test_a_mixture_is_the_file_that_excludes_the_same_nodes(name: str, tmp_path: Path) -> None:
    own = {each.__name__: each for each in (Joined, Moved, Summed)}
    net, inputs = (own[name]().eval(), INPUTS) if name in own else family(name)
    model = exported(net, inputs, tmp_path)
    data = amounts() if name in own else random_data(model, 8)
    options, graph = QuantizeOnnx("static", data, target="tensorrt"), plain(model.path)
    ranges = calibrate(model.path, data, "minmax", quiet)
    mixed = Mixed(graph, quantized(options, graph, ranges), rounds_outputs=False)
    for unit in mixed.units:
        finish(mixed.model((unit,)), tmp_path / "mixed.onnx", ties(graph), integers=False)
        quantize(replace(options, exclude=(unit,)), model.path, tmp_path / "kept.onnx", ranges)
        mine, kept = (
            OnnxBackend(OnnxModel(tmp_path / file, model.signature), 1).infer(data.inputs)
            for file in ("mixed.onnx", "kept.onnx")
        )
        # An addition that is fused into a layer takes both of its terms in 8 bits once that layer is in float.
        assert error_of(kept, mine) < 0.03, unit


def chain(*kinds: str) -> tuple[list[NodeProto], str]:
    """Nodes after the tensor "j"."""
    nodes, name = [], "j"
    for at, kind in enumerate(kinds):
        fields = (
            {"kernel_shape": [1, 1]} if kind == "MaxPool" else {"perm": [0, 1, 3, 2]} if kind == "Transpose" else {}
        )
        nodes.append(helper.make_node(kind, [name], [f"t{at}"], name=f"t{at}", **fields))
        name = f"t{at}"
    return nodes, name


@pytest.mark.parametrize(
    ("made", "after", "in_8_bits"),
    [
        ("inputs", (), True),
        ("inputs", ("Transpose",), True),
        ("inputs", ("Tanh",), False),
        ("inputs", ("Transpose", "Sigmoid"), False),
        ("inputs", ("Sigmoid", "Transpose"), False),
        ("layers", ("Tanh",), True),
        ("layers", ("Relu", "Transpose"), True),
        ("one input", ("Relu",), False),
        ("one input", ("Transpose",), True),
    ],
)
def test_a_concatenation_before_a_layer_is_in_8_bits_where_it_rounds_nobody_elses(
    made: str, after: tuple[str, ...], in_8_bits: bool
) -> None:
    weights: dict[str, np.ndarray] = {}
    layers = [conv("a", "x", "p", weights, 2), conv("b", "x", "q", weights, 2)]
    halves = [helper.make_node("Split", ["x"], ["p", "q"], name="s", axis=1, num_outputs=2)]
    both = {"inputs": halves, "layers": layers, "one input": [layers[0], replace_output(halves[0])]}[made]
    nodes, last = chain(*after)
    joined = helper.make_node("Concat", ["p", "q"], ["j"], name="join", axis=1)
    found = placed([*both, joined, *nodes, conv("c", last, "y", weights)], weights, "y")
    assert int8_inputs(found, "join") == [in_8_bits] * 2


def replace_output(split: NodeProto) -> NodeProto:
    """The same, whose first half nobody takes."""
    made = NodeProto()
    made.CopyFrom(split)
    made.output[0] = "unused"
    return made


def test_what_somebody_else_reads_is_not_rounded_for_a_layer() -> None:
    weights: dict[str, np.ndarray] = {}
    halves = helper.make_node("Split", ["x"], ["p", "q"], name="s", axis=1, num_outputs=2)
    joined = helper.make_node("Concat", ["p", "q"], ["j"], name="join", axis=1)
    nodes = [halves, joined, conv("c", "j", "l", weights), helper.make_node("Mul", ["l", "j"], ["y"], name="m")]
    found = placed(nodes, weights, "y")
    assert int8_inputs(found, "join") == [False, False]
    assert int8_inputs(found, "c")[:2] == [True, True]
