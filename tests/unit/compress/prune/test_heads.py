"""Heads of attention go whole, whatever way q, k and v are laid out, and what is left loads and runs anywhere."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import compress
from compress.data.dataset import Dataset
from compress.model import TorchModel, sample_inputs
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.prune.channels import Channels
from compress.prune.heads.open_heads import opened
from compress.prune.prove_channels import Proof
from compress.prune.prune_channels import PruneChannels
from compress.prune.rank_by_obs import shares_at
from compress.prune.repair.felt import felt
from compress.prune.repair.obs import Elimination
from compress.prune.repair.samples import Samples
from compress.prune.repair_channels import RepairChannels
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import open_model
from tests.families import family
from tests.modern_networks import Decoder
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped
from tests.unit.compress.prune.test_repair import data_for

X = "x:float32[batch,6,32]"
Mix = Callable[[torch.Tensor], torch.Tensor]


class Fused(nn.Module):
    """Attention of four heads of eight, and a feed-forward, around a way to lay out q, k and v in one matrix."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm1, self.qkv, self.proj = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, w = x.shape
        given = self.qkv(self.norm1(x))
        if self.way == "timm":
            q, k, v = given.reshape(n, t, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.way == "interleaved":
            q, k, v = given.unflatten(-1, (4, 3, 8)).permute(3, 0, 2, 1, 4).unbind(0)
        elif self.way == "chunks":
            q, k, v = given.chunk(3, -1)
            q, k, v = (part.view(n, -1, 4, 8).transpose(1, 2) for part in (q, k, v))
        else:  # cut by a size, and heads beside samples
            q, k, v = given.split(32, -1)
            q, k, v = (part.reshape(n, t, 4, 8).transpose(1, 2).reshape(n * 4, t, 8) for part in (q, k, v))
        if self.way == "flat":
            mixed = torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 8**-0.5).softmax(-1), v).view(n, 4, t, 8)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(mixed.transpose(1, 2).reshape(n, t, w))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


class Torch(nn.Module):
    """torch's own attention: by itself with a mask of truth values, or in its encoder with padding."""

    def __init__(self, *, encoder: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False) if encoder else None
        self.attention = None if encoder else nn.MultiheadAttention(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = x[..., 0] > 1.0
        x = self.embed(x)
        if self.body is not None:
            return self.body(x, src_key_padding_mask=padding)  # type: ignore[no-any-return]
        y = x.transpose(0, 1)
        later = torch.ones(6, 6, dtype=torch.bool).triu(1)
        assert self.attention is not None
        return x + self.attention(y, y, y, attn_mask=later)[0].transpose(0, 1)  # type: ignore[no-any-return]


class OneKey(nn.Module):
    """All heads share one key and value: none can go by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 32)
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q = self.q(x).view(n, t, 4, 8).transpose(1, 2)
        k, v = (part[:, None] for part in self.kv(x).chunk(2, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, 32))
        return x + self.narrow(F.relu(self.wide(x)))  # type: ignore[no-any-return]


def known(name: str) -> Callable[[], TorchModel]:
    def made() -> TorchModel:
        module, inputs = family(name)
        return wrapped(module, *inputs)

    return made


# By kind: a network, its groups of heads, how many there are in each, and what of each layer is a head's.
KINDS: dict[str, tuple[Callable[[], TorchModel], list[str], int]] = {
    "three matrices": (known("bert"), ["attention.q"], 4),
    "grouped queries": (known("gqa"), ["attention.q"], 2),
    "grouped queries, rotary": (lambda: wrapped(Decoder(), "ids:int64[batch,6]"), ["blocks.0.q", "blocks.1.q"], 2),
    "fused as timm's": (lambda: wrapped(Fused("timm"), X), ["qkv"], 4),
    "fused, head by head": (lambda: wrapped(Fused("interleaved"), X), ["qkv"], 4),
    "fused, in chunks": (lambda: wrapped(Fused("chunks"), X), ["qkv"], 4),
    "fused, heads beside samples": (lambda: wrapped(Fused("flat"), X), ["qkv"], 4),
    "nn.MultiheadAttention": (lambda: wrapped(Torch(encoder=False), X), ["attention.query"], 4),
    "nn.TransformerEncoder": (
        lambda: wrapped(Torch(encoder=True), X),
        ["body.layers.0.self_attn.query", "body.layers.1.self_attn.query"],
        4,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_found_and_what_is_left_without_some_loads_and_answers_as_if_they_were_silent(
    kind: str, tmp_path: Path
) -> None:
    make, roots, heads = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make()
    channels = Channels(model)
    found = {group.root: group for group in channels.groups}
    assert {root: found[root].units for root in roots if root in found} == dict.fromkeys(roots, heads)
    gone = {root: [heads - 1] for root in roots}
    assert not channels.leave(gone, quiet), "removing them is silencing them"
    silent = copy.deepcopy(channels.module)
    for (name, side, _), columns in channels.places(gone).items():
        if side == "in":
            with torch.no_grad():
                layer = silent.get_submodule(name)
                layer.get_parameter("weight")[:, sorted(columns)] = 0
    pruned = channels.pruned(gone)
    path = compress.save(pruned, tmp_path / "pruned.pt", inputs=list(map(str, model.signature.inputs)))
    arrays = data_for(model, 3).inputs
    inputs = [torch.as_tensor(arrays[spec.name]) for spec in model.signature.inputs]
    with torch.no_grad():
        have, whole = compress.load(path).module(*inputs), model.module(*inputs)
        torch.testing.assert_close(have, silent(*inputs), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(channels.module(*inputs), whole, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(have, whole, atol=1e-3), "a head that is gone said something"


def test_heads_that_share_one_key_stay_and_what_is_beside_them_goes() -> None:
    channels = Channels(wrapped(OneKey(), X))
    assert [group.root for group in channels.groups] == ["wide"]
    assert {"q", "kv", "out"} <= set(channels.left_alone)


def test_obs_takes_first_a_head_that_says_nothing_and_the_repair_takes_up_the_rest(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Fused("timm")
        nn.init.normal_(module.proj.weight, 0.0, 0.3)
        nn.init.zeros_(module.qkv.weight[64 + 16 : 64 + 24].detach())  # what the third head gives never varies
        model = wrapped(module, X)
    data = data_for(model, 256)
    prune = PruneChannels(0.3, importance="obs", calibration=data, round_to=1)
    prepared = prune.prepare(model, quiet, tmp_path)
    assert prepared.eliminated["qkv"].order[0] == 2
    given = prune.cut(prepared, quiet).model
    assert isinstance(given, TorchModel)
    repaired = RepairChannels(data).run(given, tmp_path, quiet)
    assert repaired.details["kept"]
    assert {"proj", "fc2"} <= set(repaired.details["layers"])
    error, before = repaired.details["error_repaired"], repaired.details["error_pruned"]
    assert error["mean"] < before["mean"] / 1.5
    assert error["worst"] < before["worst"]


def test_what_outputs_feel_of_a_channel_is_the_square_of_what_it_changes_in_them() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model = wrapped(module, "x:float32[batch,4]")
    data = data_for(model, 1024)
    found = felt(module, ["0"], Samples(data, model.module, model.signature), quiet)
    assert found is not None
    with torch.no_grad():
        size = module(torch.as_tensor(data.inputs["x"])).square().mean()
        wanted = module.get_parameter("1.weight").square().sum(0) / size
    torch.testing.assert_close(found["0"].float(), wanted, rtol=0.2, atol=1e-3)
    assert all(parameter.grad is None for parameter in module.parameters())


class Pooled(nn.Module):
    """One layer at each of 8 positions, one at their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.one, self.end = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = mask[:, :, None].to(x.dtype)
        tokens = self.each(x)
        return self.end(self.one((tokens * kept).sum(1) / kept.sum(1))), tokens


def test_what_outputs_feel_of_an_error_counts_each_position_of_a_sample_that_is_no_padding() -> None:
    model = wrapped(Pooled(), "x:float32[batch,8,4]", "attention_mask:int64[batch,8]")
    x = np.random.default_rng(0).normal(size=(512, 8, 4)).astype(np.float32)
    mask = np.ones((512, 8), np.int64)
    mask[:, 6:] = 0
    x[:, 6:] = 100.0
    samples = Samples(Dataset("drawn", {"x": x, "attention_mask": mask}, None, "0"), model.module, model.signature)
    module: Any = model.module
    found = felt(module, ["each", "one"], samples, quiet)
    assert found is not None
    with torch.no_grad():
        pooled, tokens = (one.square().mean() for one in _unpadded(module, x, mask))
        by_end = module.end.weight.square().sum(0) / pooled
        through = (module.end.weight @ module.one.weight).square().sum(0) / 6 / pooled
    torch.testing.assert_close(found["one"].float(), by_end, rtol=0.2, atol=1e-3)
    torch.testing.assert_close(found["each"].float(), through + 6 / tokens, rtol=0.2, atol=1e-3)


def _unpadded(module: Any, x: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    pooled, tokens = module(torch.as_tensor(x), torch.as_tensor(mask))
    return pooled, tokens[torch.as_tensor(mask).bool()]


def test_a_batch_holds_for_derivatives_what_memory_is_meant_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2))
    model = wrapped(module, "x:float32[batch,4]")
    data = data_for(model, 1024)
    whole = felt(module, ["0"], Samples(data, model.module, model.signature), quiet)
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])) if torch.is_grad_enabled() else None)
    monkeypatch.setattr("compress.prune.repair.felt.HELD", 300)  # bytes: some samples' worth
    found = felt(module, ["0"], Samples(data, model.module, model.signature), quiet)
    assert found is not None
    assert whole is not None
    assert 1 < max(seen) < 8
    torch.testing.assert_close(found["0"], whole["0"], rtol=0.2, atol=1e-3)


def test_units_are_priced_by_the_errors_of_the_best_way_there_and_what_is_cheapest_goes_first() -> None:
    neurons = Elimination((1, 0, 2), (0.1, 0.1, 0.5), macs=2.0)
    assert neurons.prices.tolist() == pytest.approx([0.025, 0.025, 0.2])
    heads = Elimination((0, 1), (1.0, 30.0), macs=100.0)
    at = [shares_at({"neurons": neurons, "heads": heads}, ratio / 100) for ratio in range(101)]
    assert at[0] == {"neurons": 0.0, "heads": 0.0}
    assert {"neurons": 0.0, "heads": 0.5} in at, "a head costs less for each multiply-accumulate"
    assert at[-1] == {"neurons": 1.0, "heads": 1.0}
    assert all(a[root] <= b[root] for a, b in itertools.pairwise(at) for root in a), "it rises with the ratio"


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_a_transformer_without_some_heads_goes_on_to_onnx_and_int8(kind: str, tmp_path: Path) -> None:
    module, inputs = family(kind)
    model = wrapped(module, *inputs)
    given: Any = PruneChannels(0.4, scope="local").run(model, tmp_path, quiet).model
    heads = [name for name, layer in given.module.named_modules() if isinstance(layer, nn.Linear) and name[-1] in "qy"]
    assert heads
    assert all(given.module.get_submodule(name).out_features < 32 for name in heads)
    for stage in (OnnxFromTorch(), FoldOnnx(), QuantizeOnnx("dynamic")):
        given = stage.run(given, tmp_path, quiet).model
    answers = open_model(given, threads=1).infer(sample_inputs(model.signature, 3))
    assert next(iter(answers.values())).shape == (3, 5)


class Reshaped(nn.Module):
    """Channels that a reshape holds together in blocks, and no attention; dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 16), nn.Linear(96, 24), nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.gelu(self.a(x)), 0.5, self.training)
        return self.c(F.gelu(self.b(x.reshape(-1, 96))))  # type: ignore[no-any-return]


def test_what_is_no_attention_has_no_heads_and_stays_the_module_that_it_is() -> None:
    model = wrapped(Reshaped(), X)
    found = opened(model)
    assert found.groups == ()
    assert found.model is model


class Wide(nn.Module):
    """Columns that are mixed along the tokens alone, so that each of them is a block of one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.end = nn.Linear(32, 512), nn.Linear(512, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.matmul(x, x.transpose(1, 2)).softmax(-1)
        return self.end(torch.matmul(mixed, self.a(x)).reshape(-1, 6, 512))  # type: ignore[no-any-return]


def test_each_column_by_itself_is_no_head_and_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    grad: Any = torch.autograd.grad

    def counted(outputs: object, *args: Any, **more: Any) -> Any:
        asked.append(outputs)
        return grad(outputs, *args, **more)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    assert opened(wrapped(Wide(), X)).groups == ()
    assert len(asked) < 10


class Padded(nn.Module):
    """torch's encoder, which takes padding out where it may."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.encoder, self.end = nn.TransformerEncoder(layer, 2), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        tokens = self.encoder(x, src_key_padding_mask=mask == 0)
        return self.end(tokens)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_takes_padding_out_has_heads() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = wrapped(Padded(), "x:float32[batch,6,32]", "mask:int64[batch,6]")
    assert len(Channels(model).heads) == 2


def test_where_no_head_stands_the_proof_the_model_stays_the_one_that_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, inputs = family("bert")
    model = wrapped(module, *inputs)
    heads = Channels(model).heads
    assert heads
    difference = Proof.difference

    def refused(proof: Proof, cut: Any, **more: Any) -> str | None:
        gone = {place.name for place in cut if place.side == "out"}
        return "as it was made up" if gone & heads else difference(proof, cut, **more)

    monkeypatch.setattr(Proof, "difference", refused)
    found = Channels(model)
    assert found.model is model
    assert not found.heads
    assert found.groups
    again = Channels(model, known=found.known)
    assert again.model is model
    assert [group.root for group in again.groups] == [group.root for group in found.groups]


class SharedAttention(nn.Module):
    """Two attentions with one matrix for q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
        self.b.in_proj_weight, self.b.in_proj_bias = self.a.in_proj_weight, self.a.in_proj_bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.a(x, x, x, need_weights=False)[0]
        return x + self.b(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def test_attentions_that_share_a_matrix_stay_tied() -> None:
    model = wrapped(SharedAttention(), X)
    count = sum(tensor.numel() for tensor in opened(model).model.module.parameters())
    assert count == sum(tensor.numel() for tensor in model.module.parameters())
