"""What a graph of a file calls can't read beyond its tensors, nor end the process, and still does its work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compress.errors import CheckpointError, ToolkitError
from compress.formats.checkpoint import load, save
from compress.formats.native.graph import from_data, to_data
from compress.formats.native.words import encode
from compress.vetting.calls.functions import functions, methods
from compress.vetting.calls.guards import guard_module
from compress.vetting.calls.operators import allowed
from tests.hostile.pickles import ending_with, native, node

aten = torch.ops.aten


class Calls(nn.Module):
    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.then = then
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(x, self.mean)


@pytest.mark.parametrize(
    "target",
    [
        "aten._reshape_alias.default", "aten._stack.default", "aten._fft_r2c.default", "aten._pdist_forward.default",
        "aten._batch_norm_with_update.default", "aten._native_multi_head_attention.default",
        "aten.native_batch_norm.default", "aten.lstm.data", "aten.gru.data",
        # TorchScript's own, of numbers and lists: a remainder by 0, a list without end, no tensor where one is wanted
        "aten.remainder.int", "aten.mul.right_", "aten.to.prim_Device", "aten.to.prim_dtype",
    ],
)  # fmt: skip
def test_operators_that_believe_their_arguments_are_not_called(target: str) -> None:
    namespace, name, overload = target.split(".")
    assert overload in getattr(getattr(torch.ops, namespace), name).overloads()  # else it would be refused for that
    assert not allowed(f"torch.ops.{target}")


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (aten._native_batch_norm_legit_no_training.default, (None, None, "mean", "mean", 0.1, 1e-5)),
        (aten._native_batch_norm_legit.no_stats, (None, None, False, 0.1, 1e-5)),
        (aten._weight_norm.default, ("mean", 0)),
        (aten._weight_norm_interface.default, ("mean", 0)),
        (aten.embedding_bag.default, ("indices", "indices")),
        (aten.scaled_dot_product_attention.default, ("x", "short")),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, ("short", "x")),
        (aten.repeat_interleave.self_Tensor, ("huge",)),
        (aten.matrix_power.default, (-(2**63),)),
        (aten.linalg_matrix_power.default, (-(2**63),)),
        (aten.tensor_split.sections, (1 << 24, 0)),
        (aten.tensor_split.tensor_indices_or_sections, ("parts",)),
        (aten.unbind.int, ("many", 1)),
        (aten.unbind_copy.int, ("many", 1)),
        (aten.chunk.default, ("many", 1 << 20, 1)),
        (aten.split.Tensor, ("many", 2, 1)),
        (aten.unsafe_split.Tensor, ("many", 2, 1)),
        (aten.split_with_sizes.default, ("many", [0] * (1 << 17), 1)),
        (aten.hsplit.int, ("many", 1 << 20)),
        (aten.hsplit.array, ("many", [0] * (1 << 17))),
    ],
    ids=str,
)
def test_a_program_whose_arguments_contradict_each_other_is_refused(operator: Any, arguments: tuple[Any, ...]) -> None:
    x = torch.ones(2, 3, 4, 5)
    named = {
        "mean": torch.zeros(1), "x": x, "short": x[:, :, :1], "huge": torch.full((4,), 1 << 62),
        "parts": torch.tensor(1 << 24),
        "many": torch.zeros(1).expand(1, 1 << 20),
        "indices": torch.zeros(1, 0, dtype=torch.int64),
    }  # fmt: skip
    if operator is aten.embedding_bag.default:
        x = torch.ones(1, 0)
    root, graph = nn.Module(), torch.fx.Graph()
    for name, tensor in named.items():
        root.register_buffer(name, tensor)
    given = graph.placeholder("x")
    rest = [graph.get_attr(value) if isinstance(value, str) else value for value in arguments]
    every = rest if arguments[0] == "many" else (given, *rest)
    graph.output(graph.call_function(operator, tuple(every)))
    module = torch.fx.GraphModule(root, graph)
    guard_module(module)
    with pytest.raises(ValueError, match="sizes or values do not fit"):
        module(x)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, saving what was decomposed
@pytest.mark.parametrize(
    "then",
    [
        lambda x, _: F.scaled_dot_product_attention(x, x[:, :, :1], x[:, :, :1]),
        lambda x, _: torch.repeat_interleave(x, 2, 1),
        lambda x, _: x.repeat_interleave(torch.tensor([1, 2, 3]), dim=1),
        lambda x, m: F.batch_norm(x, m.expand(3), m.expand(3) + 1),
    ],
)
def test_what_fits_is_calculated_as_before(tmp_path: Path, then: Callable[..., Any]) -> None:
    x = torch.randn(2, 3, 4, 5)
    module = Calls(then).eval()
    want = module(x)
    program = torch.export.export(module, (x,)).run_decompositions()
    torch.export.save(program, tmp_path / "model.pt2")
    torch.testing.assert_close(load(tmp_path / "model.pt2").module(x), want)


@pytest.mark.parametrize(
    "then",
    [
        lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1]),
        lambda x: torch.repeat_interleave(x, 2, 1),
        lambda x: x.repeat_interleave(2, dim=1),
        lambda x: x.type("torch.DoubleTensor"),
        lambda x: x.long().type(x.dtype),
        lambda x: torch.div(x, 2, rounding_mode="trunc"),
        lambda x: (x + 0).div_(x, rounding_mode="floor"),
        lambda x: torch.divide(x, 2),
        lambda x: torch.matrix_power(x[:, :3, :3], 2),
        lambda x: x[:, :3, :3].matrix_power(n=2),
        lambda x: torch.linalg.matrix_power(x[:, :3, :3], 2),
        lambda x: x.tensor_split(3, dim=1)[0] + torch.tensor_split(x, (1,), 1)[0],
        lambda x: x.long().type(torch.float64),
        lambda x: torch.cat([x.split(2, dim=1)[0], x.split(split_size=[1, 2], dim=1)[0]], 1),
        lambda x: torch.cat([torch.functional.split(x, 2, 1)[0], x.split(1, 1)[2]], 1),
        lambda x: torch.stack([x.unbind(1)[0], torch.unbind(x, dim=-2)[1], x.chunk(3, dim=1)[2][:, 0]]),
        lambda x: x.hsplit(3)[1] + torch.vsplit(x.transpose(0, 1), 3)[0].transpose(0, 1) + x.dsplit([2])[0].sum(),
        lambda x: sum([x, x]) + torch.split_with_sizes(x, (1, 2), 1)[0],
    ],
)
def test_functions_that_are_guarded_are_saved_and_load_twice(tmp_path: Path, then: Callable[..., Any]) -> None:
    class Forward(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return then(x)

    save(Forward(), tmp_path / "a.pt", inputs="x:float32[batch,3,4]")
    first = load(tmp_path / "a.pt").module
    save(first, tmp_path / "b.pt", inputs="x:float32[batch,3,4]")
    x = torch.randn(2, 3, 4)
    for module in (first, load(tmp_path / "b.pt").module):
        torch.testing.assert_close(module(x), then(x))


@pytest.mark.parametrize(
    "kind", ["torch.sparse.FloatTensor", "torch.cuda.FloatTensor", "torch.QUInt8Tensor", "torch.sparse.x"]
)
def test_a_type_is_one_of_plain_tensors(tmp_path: Path, kind: str) -> None:
    native(tmp_path / "a.pt", ending_with(node("r", "call_method", "type", {"node": "y"}, kind)))
    with pytest.raises(CheckpointError, match="none of plain tensors"):
        load(tmp_path / "a.pt")


@pytest.mark.timeout(120)  # what is not refused ends in hours
@pytest.mark.parametrize(
    "last",
    [
        node("r", "call_method", "matrix_power", {"node": "s"}, -(2**62)),
        node("r", "call_method", "matrix_power", {"node": "s"}, n=-(2**62)),
        node("r", "call_function", "torch.matrix_power", {"node": "s"}, -(2**62)),
        node("r", "call_function", "torch.linalg.matrix_power", {"node": "s"}, -(2**62)),
        node("r", "call_method", "tensor_split", {"node": "s"}, 1 << 24),
        node("r", "call_function", "torch.tensor_split", {"node": "s"}, sections=1 << 24),
    ],
    ids=lambda last: str(last)[:80],
)
def test_work_that_only_a_number_makes_long_is_refused(tmp_path: Path, last: Any) -> None:
    native(tmp_path / "a.pt", ending_with(node("s", "call_method", "new_ones", {"node": "y"}, {"tuple": [3, 3]}), last))
    with pytest.raises(ToolkitError, match="do not fit"):
        load(tmp_path / "a.pt")


def test_repeats_that_overflow_are_refused(tmp_path: Path) -> None:
    fill = [
        node("l", "call_method", "new_ones", {"node": "y"}, {"tuple": [4]}, dtype={"torch": "int64"}),
        node("f", "call_method", "fill_", {"node": "l"}, 1 << 62),
    ]
    for last in (
        node("r", "call_function", "torch.repeat_interleave", {"node": "f"}),
        node("r", "call_function", "torch.repeat_interleave", repeats={"node": "f"}),
        node("r", "call_function", "torch.repeat_interleave", {"node": "y"}, {"node": "f"}, 1),
        node("r", "call_method", "repeat_interleave", {"node": "y"}, repeats={"node": "f"}, dim=1),
    ):
        native(tmp_path / "a.pt", ending_with(*fill, last))
        with pytest.raises(ToolkitError, match="sizes or values do not fit"):
            load(tmp_path / "a.pt")


@pytest.mark.parametrize("form", ["torch.div", "torch.divide", "div", "div_", "divide", "divide_"])
@pytest.mark.parametrize("by", [-1, {"node": "m"}], ids=["number", "tensor"])
def test_a_quotient_that_stops_the_processor_is_refused(tmp_path: Path, form: str, by: Any) -> None:
    fill = [
        node("l", "call_method", "new_ones", {"node": "y"}, {"tuple": [4]}, dtype={"torch": "int64"}),
        node("m", "call_method", "neg", {"node": "l"}),
        node("f", "call_method", "fill_", {"node": "l"}, -(1 << 63) + 1),
        node("g", "call_method", "sub", {"node": "f"}, 1),
    ]
    kind = "call_function" if form.startswith("torch") else "call_method"
    native(tmp_path / "a.pt", ending_with(*fill, node("r", kind, form, {"node": "g"}, by, rounding_mode="trunc")))
    with pytest.raises(ToolkitError, match="sizes or values do not fit"):
        load(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("operator", "arguments", "keywords"),
    [
        (aten.div.Tensor_mode, ("least", "minus"), {"rounding_mode": "trunc"}),
        (aten.div.Scalar_mode, ("least", -1), {"rounding_mode": "trunc"}),
        (aten.divide_.Tensor_mode, ("least", "minus"), {"rounding_mode": "trunc"}),
        (torch.ops.prims.div.default, ("least", "minus"), {}),
        (aten.gru.input, ("x", "state", ["one", "two"], False, 1, 0.0, False, False, False), {}),
        (aten.gru.input, ("x", "state", [], True, -1, 0.0, False, True, True), {}),
        (aten.gru.input, ("x", "state", ["one", "two"], False, 1 << 62, 0.0, False, True, True), {}),
        (aten.lstm.input, ("x", ["state", "state"], ["none", "two"], False, 1, 0.0, False, False, False), {}),
        (aten.lstm.input, ("x", ["state"], ["one", "two"], False, 1, 0.0, False, False, False), {}),
    ],
    ids=str,
)
def test_values_and_lists_that_the_kernels_believe(operator: Any, arguments: Any, keywords: Any) -> None:
    named = {
        "least": torch.full((4,), -(1 << 63)), "minus": torch.full((4,), -1), "x": torch.ones(2, 3, 4),
        "state": torch.ones(1, 3, 5), "one": torch.ones(1, 4), "two": torch.ones(1, 5), "none": torch.ones(0, 4),
    }  # fmt: skip
    root, graph = nn.Module(), torch.fx.Graph()
    for name, tensor in named.items():
        root.register_buffer(name, tensor)
    nodes = {name: graph.get_attr(name) for name in named}
    given = [
        [nodes[part] for part in value] if isinstance(value, list) else nodes.get(value, value) for value in arguments
    ]
    graph.output(graph.call_function(operator, tuple(given), keywords))
    module = torch.fx.GraphModule(root, graph)
    guard_module(module)
    with pytest.raises(ValueError, match="sizes or values do not fit"):
        module()


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # of torch, while it exports
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True, "num_layers": 3}, {"bias": False, "batch_first": True}, {"nonlinearity": "relu"}],
    ids=str,
)
def test_recurrent_layers_of_programs_are_run_as_before(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    if kind is not nn.RNN:
        options = {name: value for name, value in options.items() if name != "nonlinearity"}
    _same_as_program(tmp_path, kind(4, 5, **options))


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # of torch, while it exports
def test_a_projected_lstm_is_run_as_before(tmp_path: Path) -> None:
    _same_as_program(tmp_path, nn.LSTM(4, 6, proj_size=3, num_layers=2, bidirectional=True))


def _same_as_program(tmp_path: Path, layer: nn.Module) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)[0]

    module, x = First().eval(), torch.randn(2, 3, 4)
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "model.pt2")
    torch.testing.assert_close(load(tmp_path / "model.pt2").module(x), module(x))


def test_what_checks_nothing_has_no_name() -> None:
    for name in ("native_batch_norm", "lstm", "gru", "embedding_bag", "native_group_norm"):
        assert f"torch.{name}" not in functions()
    assert "torch.nn.functional.embedding_bag" in functions()
    assert "repeat_interleave" in methods()


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("unbind", (1,)), ("chunk", (1 << 20, 1)), ("split", (2, 1)), ("split_with_sizes", ([0] * (1 << 17), 1)),
        ("hsplit", (1 << 20,)), ("tensor_split", (1 << 20, 1)),
        ("torch.unbind", (1,)), ("torch.chunk", (1 << 20, 1)), ("torch.functional.split", (2, 1)),
        ("torch.unsafe_split", (2, 1)), ("torch.unbind_copy", (1,)), ("torch.hsplit", (1 << 20,)),
        ("builtins.sum", ()), ("builtins.max", ()), ("builtins.min", ()),
    ],
)  # fmt: skip
def test_a_graph_of_a_file_makes_no_tensor_for_each_number(target: str, arguments: tuple[Any, ...]) -> None:
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)

    data = to_data(Empty(), inputs=1)
    (node,) = (node for node in data["nodes"] if node["op"] == "call_function")
    node["op"] = "call_function" if "." in target else "call_method"
    node["target"] = target
    node["args"]["tuple" if "tuple" in node["args"] else "list"] += [encode(value, {}) for value in arguments]
    module = from_data(data)
    many = torch.zeros(1).expand((1 << 20, 1) if target.startswith("builtins") else (1, 1 << 20))
    with pytest.raises(ValueError, match="sizes or values do not fit"):
        module(many)


def test_a_graph_of_a_file_makes_no_list_of_numbers() -> None:
    assert "tolist" not in methods()
