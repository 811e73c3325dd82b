"""Static INT8 of transformers: what no layer can take in is evened out by a multiplication, where that pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.jobs.recipe import stages_for
from compress.model import OnnxModel, TorchModel
from compress.options import ExportOptions
from compress.quantize.attends import attends
from compress.quantize.exponents import ALPHAS, Seen, error, scale_of
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.smooth_onnx import SmoothOnnx
from compress.runtime.backends import OnnxBackend
from tests.unit.compress.onnx_export.test_stages import exported, folded
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped

WIDE, HEADS = 32, 4
TOKENS = f"x:float32[batch,6,{WIDE}]"
RNG = np.random.default_rng(0)


class PostNorm(nn.Module):
    """An encoder's layer as in BERT; `uneven` has channels a hundred times as large as their like in four places."""

    def __init__(self, *, uneven: bool = True, attention: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = attention
        self.norm, self.norm1 = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDE, WIDE) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)
        if not uneven:
            return
        with torch.no_grad():
            for norm, takers in ((self.norm, (self.q, self.k, self.v)), (self.norm1, (self.wide,))):
                norm.weight[3] *= 50.0
                for taker in takers:
                    taker.weight[:, 3] /= 50
            for maker, taker in ((self.v, self.out), (self.wide, self.narrow)):
                maker.weight[5] *= 100.0
                taker.weight[:, 5] /= 100

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        q, k, v = (layer(x).reshape(-1, 6, HEADS, WIDE // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) / 3
        mixed = (F.softmax(scores, -1) if self.attention else torch.tanh(scores)) @ v
        x = self.norm1(x + self.out(mixed.transpose(1, 2).reshape(-1, 6, WIDE)))
        return x + self.narrow(F.gelu(self.wide(x)))  # type: ignore[no-any-return]


def data(samples: int, seed: int) -> Dataset:
    x = np.random.default_rng(seed).standard_normal((samples, 6, WIDE)).astype(np.float32)
    return Dataset("", {"x": x}, None, f"{seed:064d}")


def prepared(folder: Path, **options: Any) -> OnnxModel:
    return folded(exported(wrapped(PostNorm(**options), TOKENS), folder / "onnx"), folder / "folded")


def answers(model: OnnxModel, given: Dataset) -> np.ndarray[Any, Any]:
    return OnnxBackend(model, 1).infer(given.inputs)["output"]


def added(model: OnnxModel) -> list[str]:
    return [node.input[0] for node in onnx.load(model.path).graph.node if node.name.endswith("_scaled")]


def smoothed(model: OnnxModel, folder: Path, **options: Any) -> tuple[OnnxModel, dict[str, Any], tuple[str, ...], str]:
    folder.mkdir()
    given = SmoothOnnx(data(64, 1), **options).run(model, folder, quiet)
    assert isinstance(given.model, OnnxModel)
    return given.model, dict(given.details), given.warnings, given.did


def test_norms_with_a_residual_gelus_and_heads_are_evened_out_and_the_answers_stay(tmp_path: Path) -> None:
    model = prepared(tmp_path)
    after, details, warnings, did = smoothed(model, tmp_path / "smooth", scalings=True)
    assert len(added(after)) == 4
    assert [link["added"] for link in details["links"]] == [True] * 4
    assert all(link["exponent"] in ALPHAS and link["spread"] > 5 for link in details["links"])
    assert "4 multiplications added" in did
    assert not warnings
    onnx.checker.check_model(onnx.load(after.path), full_check=True)
    other = data(32, 2)
    want = answers(model, other)
    np.testing.assert_allclose(answers(after, other), want, atol=1e-4 * float(np.abs(want).max()))


@pytest.mark.parametrize(("mode", "better"), [("static", 20), ("dynamic", 4)])
def test_int8_comes_much_nearer_to_the_float_model(mode: Any, better: float, tmp_path: Path) -> None:
    model, other = prepared(tmp_path), data(64, 2)
    want = answers(model, other)
    errors = []
    for number, given in enumerate((model, smoothed(model, tmp_path / "smooth", scalings=True)[0])):
        folder = tmp_path / str(number)
        folder.mkdir()
        int8 = QuantizeOnnx(mode, data(64, 1) if mode == "static" else None).run(given, folder, quiet).model
        assert isinstance(int8, OnnxModel)
        errors.append(float(np.square(answers(int8, other) - want).mean()))
    assert errors[1] * better < errors[0]


class Shown(PostNorm):
    """One that gives what its second norm gives, too, as networks do that show their hidden states."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x = self.norm(x)
        q, k, v = (layer(x).reshape(-1, 6, HEADS, WIDE // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = (F.softmax(q @ k.transpose(2, 3) / 3, -1) @ v).transpose(1, 2).reshape(-1, 6, WIDE)
        hidden = self.norm1(x + self.out(mixed))
        return hidden + self.narrow(F.gelu(self.wide(hidden))), hidden


def test_what_is_an_output_too_is_evened_out_for_its_layers_alone(tmp_path: Path) -> None:
    model = folded(exported(wrapped(Shown(), TOKENS), tmp_path / "onnx"), tmp_path / "folded")
    after, details, _, _ = smoothed(model, tmp_path / "smooth", scalings=True)
    assert len(details["links"]) == 4
    want = OnnxBackend(model, 1).infer(data(32, 2).inputs)
    for name, got in OnnxBackend(after, 1).infer(data(32, 2).inputs).items():
        np.testing.assert_allclose(got, want[name], atol=1e-4 * float(np.abs(want[name]).max()))
    (tmp_path / "int8").mkdir()
    int8 = QuantizeOnnx("static", data(64, 1)).run(after, tmp_path / "int8", quiet).model
    assert isinstance(int8, OnnxModel)
    assert set(OnnxBackend(int8, 1).infer(data(8, 2).inputs)) == set(want)


def test_nothing_is_multiplied_where_it_does_not_pay(tmp_path: Path) -> None:
    assert added(smoothed(prepared(tmp_path, uneven=False), tmp_path / "smooth", scalings=True)[0]) == []


def test_nothing_is_multiplied_without_leave_or_attention(tmp_path: Path) -> None:
    """Without attention, INT8 rounds what the multiplication takes, too: it would come too late."""
    assert added(smoothed(prepared(tmp_path), tmp_path / "smooth")[0]) == []
    (tmp_path / "other").mkdir()
    none = prepared(tmp_path / "other", attention=False)
    assert added(smoothed(none, tmp_path / "none", scalings=True)[0]) == []
    after, _, warnings, did = smoothed(none, tmp_path / "only", scalings=True, attention_only=True)
    assert onnx.load(after.path).graph.node == onnx.load(none.path).graph.node
    assert (warnings, did) == ((), "no attention in it: left as it is")


@pytest.mark.parametrize(
    ("module", "takes", "expected"),
    [
        (nn.TransformerEncoderLayer(WIDE, 4, 64, batch_first=True), TOKENS, True),
        (PostNorm(), TOKENS, True),
        (torch.fx.symbolic_trace(PostNorm()), TOKENS, True),
        (PostNorm(attention=False), TOKENS, False),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "x:float32[batch,4]", False),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid()), "x:float32[batch,3,8,8]", False),
    ],
    ids=["torch's encoder", "its own forward", "traced", "none", "perceptron", "convolution"],
)
def test_attention_is_known_before_the_export(module: nn.Module, takes: str, expected: bool) -> None:
    signature = Signature((TensorSpec.parse(takes),), ())
    assert attends(TorchModel(module.eval(), signature)) is expected


def test_attention_is_known_of_an_onnx_file(tmp_path: Path) -> None:
    assert attends(prepared(tmp_path))
    (tmp_path / "none").mkdir()
    assert not attends(prepared(tmp_path / "none", attention=False))


@pytest.mark.parametrize("levels", [64, 127])
def test_the_simulated_error_is_that_of_8_bit_products(levels: int) -> None:
    """Worked out sample by sample: rounding to 256 steps of the range, and to so many of a weight's largest value."""
    x = RNG.standard_normal((40, 8)).astype(np.float32) * np.float32(1 + 9 * (np.arange(8) == 2))
    weight = RNG.standard_normal((5, 8)).astype(np.float32)
    seen = Seen.of(8)
    seen.add(x, len(x))
    scale = scale_of(seen.largest, np.abs(weight).max(0), 0.5)
    for by in (np.ones(8, np.float32), scale):
        low, high = (x / by).min(), (x / by).max()
        step = (high - low) / 255
        zero = round(-low / step)
        rounded = np.array([[(min(max(round(v / step) + zero, 0), 255) - zero) * step for v in row] for row in x / by])
        weights = np.array([[round(w / top) * top for w in row] for row in weight * by
                            for top in [np.abs(row).max() / levels]])  # fmt: skip
        wanted = x @ weight.T
        share = np.square(rounded @ weights.T - wanted).sum() / np.square(wanted - wanted.mean(0)).sum()
        assert error(seen, [weight], by, levels) == pytest.approx(share, rel=1e-3)
    assert error(seen, [weight], scale, levels) < error(seen, [weight], np.ones(8, np.float32), levels)


def test_what_is_dead_or_no_number_is_left_as_it_is() -> None:
    top = np.array([1.0, 0.0, 4.0, np.inf, 2.0])
    weight = np.array([1.0, 1.0, 1.0, 1.0, 0.0])
    scale = scale_of(top, weight, 0.5)
    assert scale.tolist()[1] == scale.tolist()[3] == scale.tolist()[4] == 1.0
    assert scale[2] / scale[0] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("attention", "asked", "smooths"),
    [
        (True, {}, True),
        (True, {"smooth": False}, False),
        (True, {"target": "tensorrt"}, False),
        (True, {"int8": "auto"}, True),
        (False, {}, False),
        (False, {"smooth": True}, True),
    ],
    ids=str,
)
def test_static_int8_of_a_transformer_for_cpus_smooths_by_default(
    attention: bool,
    asked: dict[str, Any],
    smooths: bool,
    tmp_path: Path,
) -> None:
    np.savez(tmp_path / "c.npz", x=data(8, 1).inputs["x"])
    model = wrapped(PostNorm(attention=attention), TOKENS)
    given: dict[str, Any] = {"output": tmp_path, "int8": "static", "calibration": str(tmp_path / "c.npz")}
    options = ExportOptions(**(given | asked))
    assert any(stage.name == "smooth_onnx" for stage in stages_for(options, model, tmp_path / "m.pt")) is smooths
