"""A module as plain data: nothing is lost on the way, and nothing but tensor functions comes in."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from compress.artifact import TensorSpec
from compress.formats.native.graph import GraphError, from_data, to_data
from compress.model import call, example_inputs
from tests.models import ZOO, build


@pytest.mark.parametrize("name", ZOO)
def test_every_network_gives_the_same_answers_after_the_round_trip(name: str) -> None:
    module, inputs = build(name)
    specs = tuple(TensorSpec.parse(text) for text in inputs)
    again = from_data(to_data(module, inputs=len(inputs)))
    for batch in (1, 3):
        arrays = example_inputs(specs, {"batch": batch})
        with torch.no_grad():
            expected, got = call(module, specs, arrays), call(again, specs, arrays)
        assert expected.keys() == got.keys()
        for key in expected:
            assert torch.equal(expected[key], got[key])


def test_a_module_that_came_from_data_goes_into_data_again() -> None:
    module, _ = build("two_inputs")
    once = to_data(module, inputs=2)
    assert to_data(from_data(once), inputs=2)["nodes"] == once["nodes"]


def test_layers_stay_layers_and_parameters_outside_layers_stay_trainable() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
            self.register_buffer("shift", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale + self.shift  # type: ignore[no-any-return]

    again = from_data(to_data(Scaled(), inputs=1))
    assert isinstance(again.get_submodule("layer"), nn.Linear)
    assert {name for name, _ in again.named_parameters()} == {"layer.weight", "layer.bias", "scale"}
    assert {name for name, _ in again.named_buffers()} == {"shift"}


def test_a_forward_that_branches_on_values_is_refused() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(GraphError, match="trace"):
        to_data(Branching(), inputs=1)


def test_training_mode_is_left_as_it_was() -> None:
    module, _ = build("mlp")
    module.train()
    to_data(module, inputs=1)
    assert module.training


def node(**changes: Any) -> dict[str, Any]:
    return {"name": "n", "op": "placeholder", "target": "x", "args": {"tuple": []}, "kwargs": {"dict": []}} | changes


@pytest.mark.parametrize(
    "evil",
    [
        node(target="x): __import__('os').system('touch /tmp/owned')\n#"),
        node(name="x\nimport os"),
        node(op="call_function", target="posix.system", args={"tuple": ["id"]}),
        node(op="call_function", target="builtins.eval", args={"tuple": ["1"]}),
        node(op="call_function", target="builtins.getattr", args={"tuple": ["x", "__class__"]}, kwargs={"dict": [["a b", 1]]}),
        node(op="call_function", target="torch.load", args={"tuple": ["/etc/passwd"]}),
        node(op="call_function", target="_operator.methodcaller", args={"tuple": ["system"]}),
        node(op="call_method", target="__reduce__"),
        node(op="call_method", target="apply_"),
        node(op="call_module", target='a"); import os; ("'),
        node(args={"tuple": [{"torch": "load"}]}),
        node(args={"tuple": [{"code": "1"}]}),
    ],
)  # fmt: skip
def test_data_that_names_anything_but_tensor_functions_is_refused(evil: dict[str, Any]) -> None:
    data = {"nodes": [evil], "modules": {}, "parameters": {}, "buffers": {}}
    with pytest.raises(GraphError):
        from_data(data)


def test_attributes_other_than_a_tensors_shape_and_kind_are_refused_when_run() -> None:
    nodes = [
        node(name="x"),
        node(name="g", op="call_function", target="builtins.getattr", args={"tuple": [{"node": "x"}, "__class__"]}),
        node(name="o", op="output", target="output", args={"tuple": [{"node": "g"}]}),
    ]
    module = from_data({"nodes": nodes, "modules": {}, "parameters": {}, "buffers": {}})
    with pytest.raises(GraphError):
        module(torch.ones(1))


def test_a_pruned_module_has_a_plain_form_too() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    smaller = copy.deepcopy(module)
    smaller[0] = nn.Linear(4, 3)
    smaller[2] = nn.Linear(3, 2)
    file = io.BytesIO()
    torch.save(to_data(smaller, inputs=1), file)
    assert file.tell() > 0
