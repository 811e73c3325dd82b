"""What is trained under 8 bits is what is exported: the same tensors, the same levels, bit for bit but for rounding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from compress.data.dataset import Dataset
from compress.jobs.export import Silent
from compress.jobs.recipe import stages_for
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import exported
from compress.options import ExportOptions
from compress.pipeline import run
from compress.quantize.calibrate import calibrate
from compress.quantize.qat.fake_quantize import FakeActivation, FakeWeight
from compress.quantize.qat.scheme import FloatGraph, Scheme
from compress.quantize.qat.simulate import Simulation, simulate
from compress.quantize.qat.train_quantized import TrainQuantized
from compress.quantize.quantize_onnx import QuantizeOnnx, quantize
from tests.families import family
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped

ALL, NONE = ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL


class Everything(nn.Module):
    """Convolution, normalization, ReLU and ReLU6, SiLU, a squeeze-and-excitation, an addition, pools, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2))
        self.one = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=4), nn.BatchNorm2d(8), nn.SiLU())
        self.two = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.uniform_(layer.weight, 0.5, 2)
                nn.init.normal_(layer.bias, 0, 0.2)
                layer.running_mean.normal_(0, 0.2)  # type: ignore[union-attr]
                layer.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[n, 3, 16, 16] → [n, 5]."""
        x = self.stem(image)
        y = self.two(self.one(x))
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        x = self.up(nn.functional.avg_pool2d(torch.relu(x + y * gate), 2))
        logits: torch.Tensor = self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


class Tokens(nn.Module):
    """Linear layers over sequences, whose biases the file adds apart, and no attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.place = nn.Parameter(torch.randn(1, 6, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 6, 8] → [n, 3]."""
        x = x + self.place
        logits: torch.Tensor = self.head(self.norm(x + self.two(nn.functional.gelu(self.one(x)))).mean(1))
        return logits


class Lookups(nn.Module):
    """A table, whose rows are rounded with it; a layer used twice; what is computed twice; gates that are split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.place = nn.Parameter(torch.randn(8))
        self.table, self.twice, self.head = nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 5, 8] → [n, 3]."""
        rows = self.table((x[..., 0] > 0).long() + (x[..., 1] > 0).long())
        y = nn.functional.silu(self.twice(rows)) * nn.functional.hardswish(self.twice(self.twice(rows) * 2 - 1))
        logits: torch.Tensor = self.head((y + self.place).mean(1))
        return logits


NETWORKS: dict[str, tuple[Any, str]] = {
    "everything": (Everything, "image:float32[batch,3,16,16]"),
    "tokens": (Tokens, "x:float32[batch,6,8]"),
    "lookups": (Lookups, "x:float32[batch,5,8]"),
    "transformer": (lambda: family("vit")[0], "image:float32[batch,3,16,16]"),
    "groups": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 3)), "x:float32[batch,4,5,5]"),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4), nn.Softmax(1)), "x:float32[batch,8]"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A network, exported and folded once."""

    model: TorchModel
    program: Any
    folded: OnnxModel
    data: Dataset

    def simulation(self, asked: QuantizeOnnx, folder: Path, stretch: float) -> tuple[Simulation, Path, dict[str, Any]]:
        """With scales that differ from those calibrated, and the file that is quantized with them."""
        before = calibrate(self.folded.path, self.data, asked.calibrator, quiet)
        target = folder / "int8.onnx"
        quantize(asked, self.folded.path, target, before)
        floats = FloatGraph(self.folded.path)
        names = tuple(spec.name for spec in self.model.signature.outputs)
        made = simulate(self.program, self.model.module, names, floats, Scheme.read(floats, target))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for fake in dict.fromkeys(made.activations.values()):
                if isinstance(fake.growth, nn.Parameter):
                    fake.growth.add_(stretch * (torch.rand((), generator=generator) - 0.7))
        ranges = {**dict.fromkeys(before, (0.0, 0.0)), **made.ranges()}
        quantize(asked, self.folded.path, target, ranges)
        return made, target, ranges


@pytest.fixture(scope="module", params=NETWORKS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    make, spec = NETWORKS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = wrapped(make().eval(), spec)
    program = exported(model, folder / "float.onnx")
    (folder / "folded").mkdir()
    given = FoldOnnx(unfuse=True).run(OnnxModel(folder / "float.onnx", model.signature), folder / "folded", quiet)
    assert isinstance(given.model, OnnxModel)
    x = (
        np.random.default_rng(0)
        .standard_normal(model.signature.inputs[0].at(model.signature.at(64)))
        .astype(np.float32)
    )
    name = model.signature.inputs[0].name
    return Case(model, program, given.model, Dataset("", {name: x}, None, "some"))


def answers(path: Path, data: Dataset, level: Any) -> np.ndarray[Any, Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    # It rounds biases that the file keeps in float (docs/decisions/0021); this project runs such files without it.
    session = ort.InferenceSession(str(path), options, disabled_optimizers=["WeightBiasQuantization"])
    return np.asarray(session.run(None, dict(data.inputs))[0])


@pytest.mark.parametrize("stretch", [0.0, 0.5])
@pytest.mark.parametrize(("target", "reduced"), [("cpu", False), ("cpu", True), ("tensorrt", False)])
def test_the_file_answers_as_the_network_in_training(
    case: Case, target: Any, reduced: bool, stretch: float, tmp_path: Path
) -> None:
    asked = QuantizeOnnx("static", case.data, target=target, reduce_range=reduced)
    made, path, _ = case.simulation(asked, tmp_path, stretch)
    assert made.missing == ()
    assert made.layers > 0
    with torch.no_grad():
        mine = next(iter(made.module(torch.from_numpy(next(iter(case.data.inputs.values())))).values())).numpy()
        plain = case.model.module(torch.from_numpy(next(iter(case.data.inputs.values())))).numpy()
    fake = made.activations.get(case.model.signature.outputs[0].name)
    level = float(np.abs(mine).max()) / 127 if fake is None else float(fake.scale().detach())
    for optimized in (NONE, ALL):
        off = np.abs(answers(path, case.data, optimized) - mine) / level
        # One level; where a value in the middle lies on an edge, and attention spreads it, rarely another.
        assert off.max() < 2.01
        assert (off > 1.01).mean() < 0.02
        if optimized == NONE:  # else ONNX Runtime has integer kernels, which round as they like
            assert np.sqrt(np.square(off).mean()) < 0.2 * np.sqrt(np.square((plain - mine) / level).mean())


@pytest.mark.parametrize(("target", "reduced"), [("cpu", True), ("tensorrt", False)])
def test_a_quantizer_finds_the_learned_scales_again(case: Case, target: Any, reduced: bool, tmp_path: Path) -> None:
    asked = QuantizeOnnx("static", case.data, target=target, reduce_range=reduced)
    made, path, _ = case.simulation(asked, tmp_path, stretch=0.5)
    for plan in Scheme.read(FloatGraph(case.folded.path), path).activations:
        fake = made.activations[plan.name]
        assert plan.scale == pytest.approx(float(fake.scale().detach()), rel=1e-6)
        assert (plan.zero, plan.low, plan.high) == (fake.zero, fake.low, fake.high)


def test_tensors_that_are_not_rounded_do_not_widen_a_scale_that_was_learned(tmp_path: Path) -> None:
    """What a pool gives shares the scale of what it takes, and is rounded behind the flattening alone."""
    from tests.unit.compress.quantize.test_train_quantized import training

    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(196, 3))
    model = wrapped(nn.Sequential(*layers).eval(), "x:float32[batch,3,16,16]")
    given = TrainQuantized(training(model, 32, epochs=3, learning_rate=0.05), "tensorrt").run(model, tmp_path, quiet)
    assert isinstance(given.model, TorchModel)
    ranges = given.model.ranges
    program = exported(given.model, tmp_path / "float.onnx")
    assert program is not None
    (tmp_path / "folded").mkdir()
    floats = OnnxModel(tmp_path / "float.onnx", model.signature, ranges)
    folded = FoldOnnx().run(floats, tmp_path / "folded", quiet).model
    last = QuantizeOnnx("static", training(model, 8).data, target="tensorrt").run(folded, tmp_path, quiet)  # type: ignore[arg-type]
    plans = Scheme.read(FloatGraph(folded.path), last.model.path).activations  # type: ignore[union-attr]
    assert len(plans) >= 3
    for plan in plans:
        assert plan.scale == pytest.approx(ranges[plan.name][1] / 127, rel=1e-5)
    assert given.details["off_levels"]["output"]["largest"] < 1.01


@pytest.mark.parametrize("reduced", [False, True])
def test_weights_have_as_many_levels_as_the_export_gives_them(case: Case, reduced: bool, tmp_path: Path) -> None:
    made, _, _ = case.simulation(QuantizeOnnx("static", case.data, reduce_range=reduced), tmp_path, 0.0)
    signed = [layer for layer in made.module.modules() if isinstance(layer, FakeWeight) and layer.symmetric]
    assert {(layer.low, layer.high) for layer in signed} == {(-64, 64) if reduced else (-127, 127)}


def test_gradients_reach_every_weight_and_every_scale(case: Case, tmp_path: Path) -> None:
    made, _, _ = case.simulation(QuantizeOnnx("static", case.data), tmp_path, 0.0)
    for parameter in case.model.module.parameters():
        parameter.grad = None
    out = next(iter(made.module(torch.from_numpy(next(iter(case.data.inputs.values())))).values()))
    (out - out.detach().roll(1, 1) - 1).square().sum().backward()
    without = [name for name, p in made.module.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert without == []
    assert {id(p) for p in case.model.module.parameters()} <= {id(p) for p in made.module.parameters()}


def test_the_gradient_of_a_scale_is_that_of_learned_step_size_quantization() -> None:
    """Esser et al., equation 3, times the scale, as its logarithm is what moves."""
    fake = FakeActivation(0.1, 3, 0, 255)
    x = torch.tensor([0.26, -0.12, 100.0, -100.0], requires_grad=True)
    fake(x).sum().backward()
    assert fake.growth.grad is not None
    assert float(fake.growth.grad) == pytest.approx(0.1 * ((3 - 2.6) + (-1 + 1.2) + 252 - 3), rel=1e-4)
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 0, 0]


def test_a_clip_that_the_quantizer_takes_away_still_bounds() -> None:
    fake = FakeActivation(6 / 255, 0, 0, 255, most=6.0)
    with torch.no_grad():
        fake.growth.add_(1.0)
    assert fake.range() == pytest.approx((0.0, 6.0))


def test_an_export_quantizes_with_what_was_trained_also_when_it_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU whose 8-bit products saturate."""
    monkeypatch.setattr("compress.jobs.recipe.int8_saturates", lambda: True)
    model = wrapped(Everything().eval(), "image:float32[batch,3,16,16]")
    x = np.random.default_rng(0).standard_normal((32, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", image=x)
    source = str(tmp_path / "data.npz")
    options = ExportOptions(
        int8="qat",
        finetune=source,
        calibration=source,
        epochs=4,
        output=tmp_path / "out",
        smooth=True,
        train_precision="32",
    )
    stages = stages_for(options, model, tmp_path / "model.pt")
    assert [stage.name for stage in stages] == [
        "finetune",
        "train_quantized",
        "onnx_from_torch",
        "fold_onnx",
        "quantize_onnx",
    ]
    first = run(stages, model, work=tmp_path / "work", source="", watcher=Silent())
    assert stages[1].options["quantize"]["reduce_range"] is True
    trained, last = first[1].given, first[-1].given
    assert isinstance(trained.model, TorchModel)
    assert isinstance(last.model, OnnxModel)
    assert "the ranges of the training" in last.did
    assert last.warnings == ()
    assert trained.details["off_levels"]["output"]["largest"] < 1.01
    scales = {plan.name: plan.scale for plan in Scheme.read(FloatGraph(first[-2].given.model.path), last.model.path).activations}  # type: ignore[union-attr]  # fmt: skip
    for name, scale in scales.items():
        low, high = trained.model.ranges[name]
        assert scale == pytest.approx((high - low) / 255, rel=1e-5)
    for folder in (tmp_path / "work").glob("0[345]-*"):
        for file in folder.iterdir():
            file.unlink()
    again = run(stages, model, work=tmp_path / "work", source="", watcher=Silent())
    assert [outcome.reused for outcome in again] == [True, True, False, False, False]
    assert again[-1].given.did == last.did
    assert answers(again[-1].given.model.path, Dataset("", {"image": x}, None, ""), ALL) == pytest.approx(  # type: ignore[union-attr]
        answers(last.model.path, Dataset("", {"image": x}, None, ""), ALL), abs=1e-6
    )


def test_a_graph_that_was_not_trained_is_calibrated_and_says_so(case: Case, tmp_path: Path) -> None:
    import dataclasses

    other = dataclasses.replace(case.folded, ranges={"another": (0.0, 1.0)})
    given = QuantizeOnnx("static", case.data).run(other, tmp_path, quiet)
    assert "minmax ranges" in given.did
    assert "calibrated anew" in given.warnings[0]


def test_the_stage_is_keyed_by_how_the_export_will_be_quantized(case: Case) -> None:
    from tests.unit.compress.quantize.test_train_quantized import training

    asked = [QuantizeOnnx("static", case.data, reduce_range=reduced) for reduced in (False, True)]
    stages = [TrainQuantized(training(case.model, 8), quantize=each) for each in asked]
    assert stages[0].options != stages[1].options


def test_what_is_not_simulated_is_named_with_its_layer(tmp_path: Path) -> None:
    """The file has padding, parts and a normalization written out, which the program has not."""
    inner = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(2, 8), nn.ELU())
    model = wrapped(nn.Sequential(inner, nn.Conv2d(8, 4, 3)).eval(), "image:float32[batch,3,6,6]")
    program = exported(model, tmp_path / "float.onnx")
    (tmp_path / "folded").mkdir()
    folded = FoldOnnx().run(OnnxModel(tmp_path / "float.onnx", model.signature), tmp_path / "folded", quiet).model
    assert isinstance(folded, OnnxModel)
    image = np.random.default_rng(0).standard_normal((16, 3, 6, 6)).astype(np.float32)
    data = Dataset("", {"image": image}, None, "0" * 64)
    made, _, _ = Case(model, program, folded, data).simulation(QuantizeOnnx("static", data), tmp_path, 0.0)
    assert made.missing
    assert all(name.endswith(("(in 0.0)", "(in 0.1)", "(in 0.2)", "(in 1)")) for name in made.missing)
