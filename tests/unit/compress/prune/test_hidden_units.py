"""Hidden units of recurrent layers go like channels, proven; what can't be handled is left alone by name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress.data.dataset import Dataset
from compress.model import TorchModel, call, sample_inputs
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.prune.channels import Channels
from compress.prune.prune_channels import PruneChannels
from compress.prune.repair_channels import RepairChannels
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import OnnxBackend
from compress.runtime.measure import torch_macs
from tests.unit.compress.prune.test_proof import check, double
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped

X, FIRST = "x:float32[batch,7,6]", "x:float32[7,batch,6]"
H = 32
GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}
Read = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """A recurrent layer and a linear one that reads it, or its last states."""

    def __init__(
        self, kind: type[nn.RNNBase], layers: int = 1, read: str = "outputs", *, both: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.rnn = kind(6, H, layers, bidirectional=both, **{"batch_first": True} | options)  # type: ignore[arg-type]
        self.read, self.ways = read, 2 if both else 1
        self.head = nn.Linear(H * self.ways, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, states = self.rnn(x)
        if self.read == "outputs":
            return self.head(out)  # type: ignore[no-any-return]
        last = states[0] if isinstance(states, tuple) else states
        return self.head(torch.cat([last[-1 - way] for way in range(self.ways)], -1))  # type: ignore[no-any-return]


TABLE = list(product((nn.LSTM, nn.GRU), (1, 2), (False, True), (False, True), (False, True), ("outputs", "states")))


@pytest.mark.parametrize(("kind", "layers", "both", "batch_first", "bias", "read"), TABLE)
def test_hidden_units_go_and_what_is_left_computes_the_same(
    kind: type[nn.RNNBase], layers: int, both: bool, batch_first: bool, bias: bool, read: str
) -> None:
    net = Net(kind, layers, read, both=both, batch_first=batch_first, bias=bias)
    model = double(net, X if batch_first else FIRST)
    details = check(model, 0.4) or check(model, 0.38)  # one unit is 4% of the multiply-accumulates
    before, after = details["channels"]["rnn"]
    assert before == H
    assert after < H
    assert "rnn" not in details["left_alone"]


@pytest.mark.parametrize(
    ("kind", "layers", "both"), [*product((nn.LSTM, nn.GRU), (1, 2), (False, True)), (nn.RNN, 2, True)]
)
def test_a_pruned_recurrent_network_is_smaller_saved_exported_and_quantized(
    kind: type[nn.RNNBase], layers: int, both: bool, tmp_path: Path
) -> None:
    model = wrapped(Net(kind, layers, both=both), X)
    given = PruneChannels(0.5, round_to=1).run(model, tmp_path, quiet)
    assert isinstance(given.model, TorchModel)
    rnn: Any = given.model.module.get_submodule("rnn")
    size = rnn.hidden_size
    assert all(tensor.shape[0] == GATES[kind] * size for tensor in rnn.parameters())
    ways = 2 if both else 1
    per_step = GATES[kind] * size * ways * ((6 + size) + (layers - 1) * (ways * size + size)) + ways * size * 5
    assert torch_macs(given.model.module, model.signature) == 7 * per_step
    arrays = sample_inputs(model.signature, 3)
    want = call(given.model.module, model.signature.inputs, arrays)["output"].detach()
    again = compress.load(compress.save(given.model.module, tmp_path / "pruned.pt", inputs=[X]))
    torch.testing.assert_close(call(again.module, model.signature.inputs, arrays)["output"], want)
    exported = OnnxFromTorch().run(given.model, tmp_path, quiet)
    assert set(exported.details["parity"]) == {"1", "2", "5"}
    (tmp_path / "int8").mkdir()
    small = QuantizeOnnx("dynamic").run(exported.model, tmp_path / "int8", quiet)  # type: ignore[arg-type]
    have = OnnxBackend(small.model, 1).infer(arrays)["output"]  # type: ignore[arg-type]
    assert float(np.corrcoef(have.ravel(), want.numpy().ravel())[0, 1]) > 0.97


class Around(nn.Module):
    """An LSTM both ways, read as it is told, with a layer on its way where one is given."""

    def __init__(self, read: Read, width: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.rnn, self.read = nn.LSTM(6, H, 2, batch_first=True, bidirectional=True), read
        self.norm, self.head = norm or nn.Identity(), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (h, c) = self.rnn(x)
        return self.head(self.norm(self.read(out, h, c)))  # type: ignore[no-any-return]


class Stacked(nn.Module):
    """One recurrent layer behind the other, between linear layers, and a convolution over time."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.a, self.b = nn.Linear(6, 16), nn.GRU(16, 16, batch_first=True), nn.LSTM(16, 16)
        self.conv, self.norm, self.head = nn.Conv1d(16, 16, 3), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, _ = self.a(torch.relu(self.before(x)))
        b, _ = self.b(a.transpose(0, 1))
        return self.head(self.conv(self.norm(b.permute(1, 2, 0))).amax(2))  # type: ignore[no-any-return]


class Attended(nn.Module):
    """The outputs summed by weights that are computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 16, batch_first=True, bidirectional=True)
        self.score, self.head = nn.Linear(32, 1), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(x)
        weights = self.score(torch.tanh(out)).softmax(1)
        return self.head((weights.transpose(1, 2) @ out).squeeze(1))  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[], nn.Module]] = {
    "sum of both directions": lambda: Around(lambda out, _h, _c: torch.stack(out.chunk(2, -1)).sum(0), H),
    "mean of all states": lambda: Around(lambda _out, h, _c: h.mean(0), H),
    "states and cells": lambda: Around(lambda _out, h, c: torch.cat([h[0], c[-1]], 1), 2 * H),
    "one direction": lambda: Around(lambda out, _h, _c: out[:, -1].chunk(2, -1)[1], H),
    "all steps flat": lambda: Around(lambda out, _h, _c: out.flatten(1), 7 * 2 * H),
    "normalized": lambda: Around(lambda out, _h, _c: out, 2 * H, nn.LayerNorm(2 * H)),
    "mean and largest": lambda: Around(lambda out, _h, _c: torch.cat([out.mean(1), out.amax(1)], 1), 4 * H),
    "stacked": Stacked,
    "attended": Attended,
}


@pytest.mark.parametrize("way", WAYS)
def test_however_hidden_units_are_read(way: str) -> None:
    details = check(double(WAYS[way](), X), 0.4, scope="local", round_to=1)
    recurrent = {name: counts for name, counts in details["channels"].items() if name in ("rnn", "a", "b")}
    assert recurrent
    assert all(after < before for before, after in recurrent.values())
    assert not set(recurrent) & set(details["left_alone"])


class Began(nn.Module):
    """It begins from states of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begun = torch.ones(1, x.shape[0], 16, dtype=x.dtype)
        return self.head(self.rnn(x, begun)[0])  # type: ignore[no-any-return]


class Residual(nn.Module):
    """What comes in is added."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.rnn, self.head = nn.Linear(6, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.head(x + self.rnn(x)[0])  # type: ignore[no-any-return]


class Own(nn.LSTM):
    """Anybody's."""


class Cells(nn.Module):
    """A loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.rnn, self.head = nn.Linear(6, 16), nn.LSTMCell(16, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in range(7):
            state = self.rnn(self.before(x[:, step]), state)
        return self.head(state[0])  # type: ignore[no-any-return, index]


def mixed(out: torch.Tensor, _h: torch.Tensor, _c: torch.Tensor) -> torch.Tensor:
    ahead, back = out.chunk(2, -1)
    return ahead + back.flip(-1)


def projected() -> nn.Module:
    net = Net(nn.LSTM, proj_size=8)
    net.head = nn.Linear(8, 5)
    return net


def tied() -> nn.Module:
    net = Stacked()
    net.a = nn.GRU(16, 16, batch_first=True)
    net.b = nn.GRU(16, 16)  # type: ignore[assignment]
    net.b.weight_hh_l0 = net.a.weight_hh_l0
    return net


REFUSED: list[tuple[str, Callable[[], nn.Module], str]] = [
    ("projected", projected, "proj_size"),
    ("begun", Began, "fails without some of them"),
    ("residual", Residual, "fails without some of them"),
    ("mixed", lambda: Around(mixed, H), "mixed with one another before head"),
    ("summed", lambda: Around(lambda out, _h, _c: out.cumsum(-1), 2 * H), "mixed with one another before head"),
    ("anybody's", lambda: Net(Own), "may do otherwise"),
    ("cells", Cells, "passes their states on by itself"),
    ("tied", tied, "the weights of"),
]


@pytest.mark.parametrize(("name", "make", "why"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_can_not_be_handled_is_named_with_the_reason(name: str, make: Callable[[], nn.Module], why: str) -> None:
    model = double(make(), X)
    channels = Channels(model)
    at = "b" if name == "tied" else "rnn"
    assert why in channels.left_alone[at]
    assert not any(at in group.layers for group in channels.groups)
    check(model, 0.2, round_to=1)


def test_states_that_are_outputs_are_kept() -> None:
    class Shown(Net):
        def forward(self, x: torch.Tensor) -> Any:
            out, states = self.rnn(x)
            return self.head(out), states

    assert "the shape of the output" in Channels(double(Shown(nn.GRU), X)).left_alone["rnn"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("read", ["outputs", "states"])
def test_what_stands_before_a_recurrent_layer_loses_channels_too(kind: type[nn.RNNBase], read: str) -> None:
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 6), nn.ReLU(), Net(kind, 1, read))
    channels = Channels(double(net, X))
    assert {"0", "2", "4.rnn"} <= {group.root for group in channels.groups}
    assert all("batch" not in why for why in channels.left_alone.values())


def test_each_layer_and_direction_loses_its_own_weakest_units() -> None:
    """One size holds for all of them, not one choice."""
    net = Net(nn.LSTM, 2, both=True)
    rnn: Any = net.rnn
    weak = {"l0": range(16), "l0_reverse": range(16, 32), "l1": range(8, 24), "l1_reverse": range(0, 32, 2)}
    with torch.no_grad():
        for part, units in weak.items():
            for gate, unit in product(range(4), units):
                for name in ("weight_ih", "weight_hh"):
                    getattr(rnn, f"{name}_{part}")[H * gate + unit] *= 1e-3
            getattr(rnn, f"weight_hh_{part}")[:, list(units)] *= 1e-3
        for number, part in enumerate(("l0", "l0_reverse")):
            for to in ("l1", "l1_reverse"):
                getattr(rnn, f"weight_ih_{to}")[:, [H * number + unit for unit in weak[part]]] *= 1e-3
        for number, part in enumerate(("l1", "l1_reverse")):
            net.head.weight[:, [H * number + unit for unit in weak[part]]] *= 1e-3
    channels = Channels(wrapped(net, X))
    (group,) = channels.groups
    cut = group.cut(range(16))
    for number, units in enumerate(weak.values()):
        assert cut[("rnn", "hidden", number)] == set(units)  # type: ignore[index]
    assert cut[("head", "in", 0)] == {*weak["l1"], *(H + unit for unit in weak["l1_reverse"])}  # type: ignore[index]


@pytest.mark.parametrize("importance", ["taylor", "obs"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_hidden_units_are_chosen_by_data_and_repaired(kind: type[nn.RNNBase], importance: Any, tmp_path: Path) -> None:
    """Half of the units can be had from the others: a copy of each, of which the reader reads both."""
    net = Net(kind, 1, "states")
    rnn: Any = net.rnn
    with torch.no_grad():
        for name, tensor in rnn.named_parameters():
            gates = tensor.view(GATES[kind], H, -1)
            gates[:, H // 2 :] = gates[:, : H // 2]
            if name.startswith("weight_hh"):
                gates[..., H // 2 :] = gates[..., : H // 2] = gates[..., : H // 2] / 2
    model = wrapped(net, X)
    x = np.random.default_rng(0).standard_normal((96, 7, 6)).astype(np.float32)
    data = Dataset("made up", {"x": x}, None, "x")
    given = PruneChannels(0.3, importance, round_to=1, data=data, calibration=data).run(model, tmp_path, quiet)
    assert given.details["channels"]["rnn"][1] < H
    found = RepairChannels(data).run(given.model, tmp_path, quiet)  # type: ignore[arg-type]
    assert found.details["kept"]
    assert list(found.details["layers"]) == ["head"]
    assert found.details["error_repaired"]["mean"] < 0.8 * found.details["error_pruned"]["mean"]
