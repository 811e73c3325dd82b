"""What compress.save writes loads and gives the same answers: norms folded, ties kept, memory shared with the file."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import compress
from compress.artifact import TensorSpec
from compress.cli import main
from compress.errors import CheckpointError
from compress.formats.checkpoint import fingerprint, load, save
from compress.model import call, example_inputs, symbols_of
from tests.models import ZOO, build, mlp

X = "x:float32[batch,4]"
TOKENS = "tokens:int64[batch,6]"


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old ones are deprecated, and in many a checkpoint
        return nn.Sequential(norm(nn.Linear(4, 8)), nn.ReLU(), norm(nn.Linear(8, 3)))


NORMS: dict[str, Callable[[Any], Any]] = {
    "old weight norm": weight_norm,
    "old spectral norm": spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_the_weights_is_folded_into_them_and_stays_in_the_original(tmp_path: Path, norm: str) -> None:
    module = normed(NORMS[norm])
    before = copy.deepcopy(module.state_dict())
    again = load(save(module, tmp_path / "model.pt", inputs=X)).module
    assert set(again.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert module.training
    assert module.state_dict().keys() == before.keys()
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(again(x), module.eval()(x))


@pytest.mark.parametrize("norm", NORMS)
def test_weights_with_norms_load_into_their_factory(tmp_path: Path, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_norm.py").write_text(
        "from tests.unit.compress.formats.test_what_saves_loads import NORMS, normed\n"
        f"def make():\n    return normed(NORMS[{norm!r}])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "of_a_norm", raising=False)
    module = normed(NORMS[norm])
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    again = load(tmp_path / "weights.pt", inputs=[X], model="of_a_norm:make").module
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(again(x), module.eval()(x))
    assert type(again.get_submodule("0")) is nn.Linear


def test_what_a_hook_adds_is_not_lost_in_silence(tmp_path: Path) -> None:
    module = mlp()
    module.get_submodule("0").register_forward_hook(lambda _module, _given, output: output * 2)
    with pytest.raises(CheckpointError) as caught:
        save(module, tmp_path / "model.pt", inputs=X)
    assert "hook" in caught.value.why
    assert not list(tmp_path.iterdir())


def test_a_layer_that_its_attributes_do_not_describe_is_not_written(tmp_path: Path) -> None:
    module = mlp()
    module.get_submodule("0").weight = nn.Parameter(torch.zeros(16, 3))
    with pytest.raises(CheckpointError, match="can't write"):
        save(module, tmp_path / "model.pt", inputs="x:float32[batch,3]")


class TiedHead(nn.Module):
    """An embedding shared with the output head, as in GPT-2 and BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(100, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(x)))  # type: ignore[no-any-return]


class TiedByFunction(TiedHead):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.middle(self.embedding(x)), self.embedding.weight)


class Shared(nn.Module):
    """A layer used twice, a weight that two layers share, and a bias that the forward reads by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b, self.c = self.a, nn.Linear(4, 4)
        self.c.weight = self.a.weight
        self.shift = self.a.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x))) + self.shift  # type: ignore[no-any-return]


TIED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "head": (TiedHead, TOKENS),
    "function": (TiedByFunction, TOKENS),
    "shared": (Shared, X),
}


@pytest.mark.parametrize("name", TIED)
def test_ties_survive_saving_and_loading(tmp_path: Path, name: str) -> None:
    make, inputs = TIED[name]
    module = make()
    path = save(module, tmp_path / "model.pt", inputs=inputs)
    again = load(path)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert sum(parameter.numel() for parameter in again.module.parameters()) == count
    assert path.stat().st_size < 4 * count + 6000
    twice = save(again.module, tmp_path / "again.pt", inputs=inputs)
    assert twice.stat().st_size < path.stat().st_size + 500
    assert fingerprint(load(twice)) == fingerprint(again)


def test_a_tied_weight_is_one_parameter_that_trains_in_both_places(tmp_path: Path) -> None:
    module = load(save(TiedHead(), tmp_path / "model.pt", inputs=TOKENS)).module
    assert module.get_parameter("head.weight") is module.get_parameter("embedding.weight")
    assert copy.deepcopy(module).get_parameter("head.weight") is not module.get_parameter("head.weight")
    module(torch.zeros(1, 6, dtype=torch.int64)).sum().backward()
    with torch.no_grad():
        module.get_parameter("head.weight").sub_(1)
    assert torch.equal(module.get_parameter("head.weight"), module.get_parameter("embedding.weight"))


def test_a_fingerprint_tells_tied_weights_from_equal_ones(tmp_path: Path) -> None:
    tied, apart = TiedHead(), TiedHead()
    apart.load_state_dict(tied.state_dict())
    apart.head.weight = nn.Parameter(tied.embedding.weight.detach().clone())
    prints = [fingerprint(load(save(m, tmp_path / "model.pt", inputs=TOKENS))) for m in (tied, apart)]
    assert prints[0] != prints[1]


def release_1(module: nn.Module, inputs: tuple[str, ...], path: Path) -> Path:
    """Write as the first release did: its leaves as pickled modules, its free tensors detached."""
    from compress.formats.native.graph import to_data

    signature = load(save(module, path, inputs=inputs)).signature
    data = to_data(module, inputs=len(inputs))
    traced = module if isinstance(module, torch.fx.GraphModule) else torch.fx.symbolic_trace(module)
    data["modules"] = {name: traced.get_submodule(name) for name in data["modules"]}
    for table in ("parameters", "buffers"):
        data[table] = {name: torch.fx.graph_module._get_attr(traced, name).detach() for name in data[table]}
    for node in data["nodes"]:
        if node["op"] == "placeholder":
            node["target"] = "x"
    torch.save({"format": "compress.model", "version": 1, "signature": signature.to_dict(), "graph": data}, path)
    return path


@pytest.mark.parametrize("name", ZOO)
def test_files_of_the_first_release_load(tmp_path: Path, name: str) -> None:
    module, inputs = build(name)
    specs = tuple(TensorSpec.parse(text) for text in inputs)
    again = load(release_1(module, inputs, tmp_path / "model.pt")).module
    arrays = example_inputs(specs, dict.fromkeys(symbols_of(specs), 3))
    with torch.no_grad():
        for key, value in call(module, specs, arrays).items():
            assert torch.equal(call(again, specs, arrays)[key], value)


def test_ties_in_files_of_the_first_release_are_found_by_their_memory(tmp_path: Path) -> None:
    again = load(release_1(Shared().eval(), (X,), tmp_path / "model.pt")).module
    assert sum(parameter.numel() for parameter in again.parameters()) == 24


@pytest.mark.parametrize("layout", ["save", "state_dict", "module"])
def test_weights_are_mapped_from_the_file_not_read(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "model.pt"
    module = nn.Sequential(nn.Linear(4, 3))
    if layout == "save":
        save(module, path, inputs=X)
    else:
        torch.save(module.state_dict() if layout == "state_dict" else module, path)
    if layout == "state_dict":
        from compress.formats.pickles.read import unpickle

        weight = unpickle(path, trust=False)["0.weight"]
    else:
        weight = load(path, inputs=[X] if layout == "module" else ()).module.get_parameter("0.weight")
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    ranges = [tuple(int(end, 16) for end in entry[0].split("-")) for entry in maps]
    assert any(start <= weight.data_ptr() < end for start, end in ranges)
    before = path.read_bytes()
    with torch.no_grad():
        weight.zero_()
    assert path.read_bytes() == before, "the file was written through its mapping"


@pytest.mark.parametrize(
    "layout",
    [
        lambda state: {"model_state": state, "optimizer": {"state": {0: {"step": torch.ones(1)}}, "groups": [1]}},
        lambda state: {"epoch": 3, "state": state},
        lambda state: {"ema": state},
        lambda state: {"ema": {k: v + 1 for k, v in state.items()}, "network": state, "loss": torch.tensor(0.5)},
        lambda state: {"generator": state, "metrics": {"accuracy": torch.tensor(0.5)}},
        lambda state: {"checkpoint": {"weights_of_it": state}},
        lambda state: {"model_state": {f"module.{name}": tensor for name, tensor in state.items()}},
        lambda state: {"model": {"state_dict": state}, "optimizer": {"a": torch.ones(3)}},
    ],
)
@pytest.mark.filterwarnings("ignore::compress.console.wording.AssumedWarning")
def test_weights_are_found_under_any_name_that_is_the_only_one(tmp_path: Path, layout: Callable[[Any], Any]) -> None:
    module = mlp()
    torch.save(layout(module.state_dict()), tmp_path / "model.pt")
    again = load(tmp_path / "model.pt", inputs=[X], model="tests.models:mlp").module
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in module.state_dict().items())


def test_of_several_sets_of_weights_none_is_chosen(tmp_path: Path) -> None:
    torch.save({"generator": mlp().state_dict(), "discriminator": mlp().state_dict()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "model.pt", inputs=[X], model="tests.models:mlp")
    assert "generator" in caught.value.why
    assert "discriminator" in caught.value.why


def succeeds(*arguments: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    assert left.value.code == 0


def test_the_former_name_of_trust_works_and_names_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from compress.options import ExportOptions

    path = tmp_path / "model.pt"
    torch.save(build("residual")[0], path)
    inputs = ["image:float32[batch,3,16,16]"]
    with pytest.warns(FutureWarning, match="now named trust"):
        compress.load(path, inputs=inputs, trust_pickle=True)
    with pytest.warns(FutureWarning, match="now named trust"):
        options = ExportOptions(output=tmp_path / "out", trust_pickle=True)
    assert options.trust
    succeeds("inspect", str(path), "--input", *inputs, "--trust-pickle")
    assert "--trust-pickle is now named --trust" in capsys.readouterr().err
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'checkpoint = "{path}"\noutput = "{tmp_path / "out"}"\ninput = {inputs}\ntrust_pickle = true\n')
    succeeds("run", str(recipe), "--dry-run")
    assert "now named trust" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--int8", "dynamic"]])
def test_torchscript_that_is_trusted_exports(tmp_path: Path, arguments: list[str]) -> None:
    from compress.artifact import Artifact
    from tests.unit.compress.formats.test_checkpoint import scripted

    scripted(tmp_path / "model.pt")
    given = ["export", str(tmp_path / "model.pt"), "--input", X, "-o", str(tmp_path / "out"), *arguments]
    with pytest.raises(SystemExit) as refused:
        main(given)
    assert refused.value.code == 2
    succeeds(*given, "--trust")
    assert Artifact.load(tmp_path / "out").signature.outputs[0].shape == ("batch", 3)


def test_a_fingerprint_of_torchscript_follows_its_weights_and_constants(tmp_path: Path) -> None:
    def of(module: nn.Module) -> tuple[str, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.save(torch.jit.trace(module.eval(), torch.zeros(2, 4)), tmp_path / "model.pt")  # type: ignore[no-untyped-call]
        first, second = (fingerprint(load(tmp_path / "model.pt", inputs=[X], trust=True)) for _ in range(2))
        return first, second

    class Scaled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = torch.tensor([by] * 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by

    twos, threes = of(Scaled(2)), of(Scaled(3))
    assert twos[0] == twos[1]
    assert twos[0] != threes[0]
