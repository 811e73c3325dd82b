"""Mixed precision: one quantized graph, any part of which goes back to float; all of it back is the float model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from compress.data.dataset import Dataset
from compress.evaluate.metrics import METRICS
from compress.model import OnnxModel
from compress.quantize.calibrate import calibrate
from compress.quantize.int8_onnx import finish, plain
from compress.quantize.precision import precisions
from compress.quantize.put_back import Mixed
from compress.quantize.quantize_onnx import QuantizeOnnx, Target, quantize, quantized
from compress.quantize.quantize_within import QuantizeWithin
from compress.quantize.tied_tables import ties
from compress.runtime.backends import OnnxBackend
from tests.families import family
from tests.unit.compress.onnx_graphs import branching, data_for, error_of, looping
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped
from tests.unit.compress.quantize.test_half_onnx import exported, random_data

FAMILIES = ("residual", "convnext", "bert", "inverted")
TARGETS: tuple[Target, ...] = ("cpu", "tensorrt")


class Mixing:
    """A model's mixtures, and how far each is from float."""

    def __init__(self, model: OnnxModel, data: Dataset, target: Target, folder: Path) -> None:
        self._model, self._data, self._path, self._target = model, data, folder / "mixed.onnx", target
        self._expected = OnnxBackend(model, 1).infer(data.inputs)
        self.options = QuantizeOnnx("static", data, target=target)
        self.ranges = calibrate(model.path, data, "minmax", quiet)
        self.plain = plain(model.path)
        eight = quantized(self.options, self.plain, self.ranges)
        self.mixed = Mixed(self.plain, eight, rounds_outputs=target == "cpu")

    def error(self, back: Collection[str]) -> float:
        """Of the outputs, as a share of their scale."""
        finish(self.mixed.model(back), self._path, ties(self.plain), integers=self._target != "tensorrt")
        return error_of(
            self._expected, OnnxBackend(OnnxModel(self._path, self._model.signature), 1).infer(self._data.inputs)
        )

    def kinds(self) -> set[str]:
        """Kinds of nodes in the file that was last asked for."""
        return {node.op_type for node in onnx.load(self._path).graph.node}

    def float_layers(self) -> set[str]:
        """Layers of the file that was last asked for that are in float."""
        return set(precisions(self._path).floats)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FAMILIES)
def test_with_all_put_back_the_outputs_are_the_float_models(name: str, target: Target, tmp_path: Path) -> None:
    module, inputs = family(name)
    model = exported(module, inputs, tmp_path)
    mixing = Mixing(model, random_data(model, 16), target, tmp_path)
    eight = mixing.error(())
    assert eight > 1e-4
    assert mixing.error(mixing.mixed.units) <= 1e-6
    assert not mixing.kinds() & {"QuantizeLinear", "DequantizeLinear"}
    rng = np.random.default_rng(0)
    for share in (0.2, 0.5, 0.8):  # each mixture runs, and none is much worse than all in INT8
        assert mixing.error([unit for unit in mixing.mixed.units if rng.random() < share]) < 2 * eight


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("graph", [branching, looping])
def test_so_they_are_with_branches_and_loops(
    graph: Callable[[Path], OnnxModel], target: Target, tmp_path: Path
) -> None:
    model = graph(tmp_path / "float")
    mixing = Mixing(model, data_for(model), target, tmp_path)
    for unit in mixing.mixed.units:
        assert mixing.error([unit]) < 0.1
    assert mixing.error(mixing.mixed.units) == 0


@pytest.mark.parametrize("target", TARGETS)
def test_with_none_put_back_the_file_is_the_quantizers(target: Target, tmp_path: Path) -> None:
    module, inputs = family("residual")
    model = exported(module, inputs, tmp_path)
    mixing = Mixing(model, random_data(model, 16), target, tmp_path)
    mixing.error(())
    quantize(mixing.options, model.path, tmp_path / "alone.onnx", mixing.ranges)
    assert (tmp_path / "alone.onnx").read_bytes() == (tmp_path / "mixed.onnx").read_bytes()


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_put_back_is_in_float_and_nothing_else(target: Target, tmp_path: Path) -> None:
    module, inputs = family("residual")
    model = exported(module, inputs, tmp_path)
    mixing = Mixing(model, random_data(model, 16), target, tmp_path)
    layers = [unit for unit in mixing.mixed.units if "conv" in unit.lower()]
    for layer in layers:
        mixing.error([layer])
        assert mixing.float_layers() == {layer}


class Saturated(nn.Module):
    """Products on both sides of a function that ONNX Runtime's quantizer does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)
        self.before, self.after = nn.Buffer(torch.rand(32) + 1), nn.Buffer(torch.rand(32) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x) * self.before) * self.after)  # type: ignore[no-any-return]


def test_what_is_put_back_alone_is_the_file_that_excludes_it(tmp_path: Path) -> None:
    """So that what `compress explain` measures is what --keep-float makes."""
    torch.manual_seed(0)
    model = exported(Saturated().eval(), ("x:float32[batch,16]",), tmp_path)
    data = random_data(model, 32)
    mixing = Mixing(model, data, "cpu", tmp_path)
    products = [node.name for node in mixing.plain.graph.node if node.op_type == "Mul"]
    assert set(products) < set(mixing.mixed.units)
    for name in products:
        mixing.error((name,))
        quantize(replace(mixing.options, exclude=(name,)), model.path, tmp_path / "kept.onnx", mixing.ranges)
        mine, kept = (
            OnnxBackend(OnnxModel(tmp_path / file, model.signature), 1).infer(data.inputs)
            for file in ("mixed.onnx", "kept.onnx")
        )
        assert error_of(kept, mine) < 1e-6, name


def test_additions_and_normalizations_can_be_put_back(tmp_path: Path) -> None:
    for name, kind in (("residual", "Add"), ("convnext", "LayerNormalization")):
        module, inputs = family(name)
        (tmp_path / name).mkdir()
        model = exported(module, inputs, tmp_path / name)
        mixing = Mixing(model, random_data(model, 16), "cpu", tmp_path)
        kinds = {node.name: node.op_type for node in mixing.plain.graph.node}
        assert kind in {kinds[unit] for unit in mixing.mixed.units}


class Tiny(nn.Module):
    """A sum of a large and a small activation, whose difference decides: one scale for the sum loses the small."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = 1000 * torch.relu(self.a(x))
        return self.head(torch.relu(self.b(x)) + large - large.detach())  # type: ignore[no-any-return]


def test_a_budget_that_needs_all_in_float_is_kept(tmp_path: Path) -> None:
    """It was out of reach as long as additions stayed in INT8."""
    torch.manual_seed(0)
    module = Tiny()
    model = exported(module, ("x:float32[batch,16]",), tmp_path)
    data = random_data(model, 400)
    labels = module(torch.from_numpy(data.inputs["x"])).argmax(1).numpy()
    judged = Dataset("", data.inputs, labels, "eval")
    stage = QuantizeWithin(
        QuantizeOnnx("static", data),
        wrapped(module, "x:float32[batch,16]"),
        judged,
        METRICS["top1"],
        max_drop=0.0,
        confidence=None,
    )
    given = stage.run(model, tmp_path / "next", quiet)
    assert given.details["drop_all_int8"] > 3
    assert given.details["drop"] <= 0
    assert isinstance(given.model, OnnxModel)
    got = OnnxBackend(given.model, 1).infer(data.inputs)["output"].argmax(1)
    assert (got == labels).mean() == 1
