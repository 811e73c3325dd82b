"""What the layers of a network take is told by their shapes, kept, and decides how much each group loses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.model import TorchModel, call, infer_outputs, sample_inputs
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.prune.channels import Channels
from compress.prune.latency import tables
from compress.prune.latency.by_latency import ByLatency, _Measurements, nearest
from compress.prune.latency.graphs import layer_model
from compress.prune.latency.layers import Shape, layers_of
from compress.prune.latency.tables import Clocked, Table, tables_of
from compress.prune.prune_channels import TOLERANCE, PruneChannels
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import open_model
from compress.storage.stage_cache import StageCache
from tests.families import family

PRECISIONS = [None, QuantizeOnnx("static"), QuantizeOnnx("dynamic"), QuantizeOnnx("weights")]


def loaded(name: str) -> TorchModel:
    module, inputs = family(name)
    specs = tuple(TensorSpec.parse(text) for text in inputs)
    return TorchModel(module, Signature(specs, infer_outputs(module, specs)))


def quiet(_done: int, _total: int, _note: str) -> None:
    pass


def by_work(shape: Shape, _on: Clocked) -> tuple[Table, float]:
    """As if each layer took its multiply-accumulates, and a call 0.01 ms."""
    return tables._scaled(shape, 1e-6), 0.01


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Layers take what their work says; gives the shapes that were looked at."""
    seen: list[str] = []

    def measured(shape: Shape, on: Clocked) -> tuple[Table, float]:
        seen.append(str(shape))
        return by_work(shape, on)

    monkeypatch.setattr(tables, "_measured", measured)
    return seen


@pytest.mark.parametrize("name", ["residual", "depthwise", "grouped", "concat", "hourglass", "bert", "vit", "inverted"])
def test_layers_are_seen_as_they_are_called_with_the_channels_of_their_groups(name: str) -> None:
    channels = Channels(loaded(name))
    found = {layer.name: layer for layer in layers_of(channels)}
    assert {one for group in channels.groups for one in group.layers} <= set(found)
    by_root = {group.root: group for group in channels.groups}
    for layer in found.values():
        for units, whole in ((layer.reads, layer.shape.inputs), (layer.gives, layer.shape.outputs)):
            gone = sum(each * by_root[root].units for root, each in units.items())
            assert gone <= whole
        for side in (0, 1):
            assert layer.shape.counts(side)[-1] == (layer.shape.inputs, layer.shape.outputs)[side]


@pytest.mark.parametrize("name", ["residual", "depthwise", "grouped", "hourglass", "bert"])
@pytest.mark.parametrize("quantize", PRECISIONS)
def test_a_layer_alone_gives_what_it_gives_in_the_network(
    name: str, quantize: QuantizeOnnx | None, tmp_path: Path
) -> None:
    channels = Channels(loaded(name))
    layers = layers_of(channels)
    given: dict[str, tuple[int, ...]] = {}

    def seen(layer: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        return lambda _module, _given, output: given.update({layer: tuple(output.shape)})

    for layer in layers:
        channels.module.get_submodule(layer.name).register_forward_hook(seen(layer.name))
    call(channels.module, channels.signature.inputs, sample_inputs(channels.signature, 1))
    for number, layer in enumerate(layers):
        shape = layer.shape
        model = layer_model(shape, shape.inputs, shape.outputs, quantize, tmp_path / f"{number}.onnx")
        (output,) = open_model(model, threads=1).infer(sample_inputs(model.signature, 1)).values()
        assert output.shape == given[layer.name]
        few = layer_model(shape, shape.counts(0)[0], shape.counts(1)[0], quantize, tmp_path / f"few-{number}.onnx")
        (output,) = open_model(few, threads=1).infer(sample_inputs(few.signature, 1)).values()
        assert np.isfinite(output).all()


def test_what_static_int8_layers_hand_on_is_8_bit_at_their_ends(tmp_path: Path) -> None:
    layer = layers_of(Channels(loaded("residual")))[1]
    model = layer_model(layer.shape, 32, 32, QuantizeOnnx("static"), tmp_path / "a.onnx")
    assert [spec.dtype for spec in (*model.signature.inputs, *model.signature.outputs)] == ["uint8", "uint8"]


def test_a_table_is_measured_once_and_taken_from_the_cache(tmp_path: Path, counted: list[str]) -> None:
    cache = StageCache(tmp_path, 10_000_000, whole=True)
    layers = layers_of(Channels(loaded("residual")))
    first = tables_of(layers, Clocked(), quiet, cache)
    assert len(counted) == len({layer.shape.key for layer in layers})
    counted.clear()
    again = tables_of(layers, Clocked(), quiet, cache)
    assert not counted
    assert {key: held.ms.tolist() for key, held in again.found.items()} == {
        key: held.ms.tolist() for key, held in first.found.items()
    }
    tables_of(layers, Clocked(threads=2), quiet, cache)
    assert counted, "with other threads it is another table"


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "no json",
        lambda told: json.dumps(told | {"ms": [[-1.0]]}),
        lambda told: json.dumps(told | {"ms": [row[::-1] for row in told["ms"][::-1]]}),
        lambda told: json.dumps(told | {"ms": [[1e400 for _ in row] for row in told["ms"]]}),
        lambda told: json.dumps(told | {"ms": [[*row, 9.0] for row in told["ms"]]}),
        lambda told: json.dumps(told | {"ms": None}),
        lambda told: json.dumps(told | {"overhead_ms": float("nan")}),
        lambda _: "[]",
    ],
)
def test_a_table_that_is_not_as_it_was_written_is_measured_anew(
    damage: Callable[[Any], str], tmp_path: Path, counted: list[str]
) -> None:
    cache = StageCache(tmp_path, 10_000_000, whole=True)
    layers = layers_of(Channels(loaded("mlp")))
    tables_of(layers, Clocked(), quiet, cache)
    expected = sorted(counted)
    for path in tmp_path.rglob("table.json"):
        path.write_text(damage(json.loads(path.read_text())))
    counted.clear()
    tables_of(layers, Clocked(), quiet, cache)
    assert sorted(counted) == expected


def test_an_interruption_keeps_the_tables_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = StageCache(tmp_path, 10_000_000, whole=True)
    layers = layers_of(Channels(loaded("residual")))
    seen: list[str] = []

    def interrupted(shape: Shape, on: Clocked) -> tuple[Table, float]:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(str(shape))
        return by_work(shape, on)

    monkeypatch.setattr(tables, "_measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tables_of(layers, Clocked(), quiet, cache)
    assert len(cache.entries()) == 2


def test_layers_that_time_ran_out_for_are_told_by_their_work(counted: list[str]) -> None:
    layers = layers_of(Channels(loaded("residual")))
    found = tables_of(layers, Clocked(), quiet, seconds=0.0)
    assert len(counted) == 1
    assert len(found.scaled) == len({layer.name for layer in layers}) - sum(
        str(layer.shape) == counted[0] for layer in layers
    )
    whole = tables_of(layers, Clocked(), quiet)
    for key, held in found.found.items():
        np.testing.assert_allclose(held.ms, whole.found[key].ms)


def by_latency(model: TorchModel, fraction: float, **options: Any) -> PruneChannels:
    data = Dataset("", sample_inputs(model.signature, 64), None, "")
    by = ByLatency(Clocked(), (OnnxFromTorch(data), FoldOnnx()), **options)
    return PruneChannels(fraction, "obs", calibration=data, latency=by)


@pytest.mark.parametrize("name", ["residual", "depthwise", "bert"])
@pytest.mark.parametrize("fraction", [0.3, 0.6])
def test_a_share_of_the_time_goes_by_the_tables(name: str, fraction: float, tmp_path: Path, counted: list[str]) -> None:
    model = loaded(name)
    prune = by_latency(model, fraction)
    prepared = prune.prepare(model, quiet, tmp_path)
    given = prune.cut(prepared, quiet)
    assert isinstance(given.model, TorchModel)
    assert counted
    assert prepared.timed is not None
    assert given.details["macs_removed"] > 0
    assert "each layer by what its time is worth" in given.did
    share, gone, _ = nearest(prepared.timed, prepared.channels.groups, prepared.eliminated, fraction, None)
    assert share >= fraction - TOLERANCE
    assert prepared.timed.predicted.total(gone) <= prepared.timed.whole * (1 - fraction + TOLERANCE)


def test_more_than_can_go_is_an_error_that_names_the_nearest(tmp_path: Path, counted: list[str]) -> None:
    model = loaded("residual")
    prune = by_latency(model, 0.999)
    prepared = prune.prepare(model, quiet, tmp_path)
    with pytest.raises(StageError, match="of the latency") as caught:
        prune.cut(prepared, quiet)
    assert counted
    assert "--prune 0." in caught.value.mend


def test_a_layer_whose_time_does_not_fall_keeps_its_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By MACs it would lose some; here its table is flat, and the others pay."""

    def measured(shape: Shape, on: Clocked) -> tuple[Table, float]:
        table, overhead = by_work(shape, on)
        flat = shape.given[-1] == 8
        return Table(table.inputs, table.outputs, np.full_like(table.ms, table.whole) if flat else table.ms), overhead

    monkeypatch.setattr(tables, "_measured", measured)
    model = loaded("residual")
    prune = by_latency(model, 0.2)
    given = prune.cut(prune.prepare(model, quiet, tmp_path), quiet)
    assert given.details["channels"]["c.0"][1] > 32
    assert given.details["channels"]["a.0"][1] < 32


def test_a_recurrent_layer_is_refused_by_name(tmp_path: Path) -> None:
    model = loaded("lstm")
    with pytest.raises(StageError, match="share of the latency") as caught:
        by_latency(model, 0.3).run(model, tmp_path, quiet)
    assert "lstm" in caught.value.why


@pytest.mark.parametrize("changes", [{"importance": "magnitude"}, {"curves": {"a.0": ((0.5, 1.0),)}}])
def test_what_tells_no_cost_of_a_number_of_channels_is_refused(changes: dict[str, Any]) -> None:
    model = loaded("residual")
    with pytest.raises(RecipeError, match="by latency"):
        dataclasses.replace(by_latency(model, 0.3), **changes).check(model)


@pytest.mark.clock  # measured beside others that compute, the network may gain so little that the share is refused
def test_the_whole_is_measured_and_held_against_the_choice_by_macs(tmp_path: Path) -> None:
    model = loaded("residual")
    cache = StageCache(tmp_path / "cache", 10_000_000, whole=True)
    given = by_latency(model, 0.1, cache=cache).run(model, tmp_path, quiet)
    told = given.details["by_latency"]
    assert told["runtime"] == "onnxruntime"
    assert 1 <= len(told["tried"]) <= 3
    assert told["whole_ms"] > 0 < told["latency_ms"]
    assert told["off"] == pytest.approx(told["predicted_ms"] / told["latency_ms"] - 1)
    assert any("by tables of the layers' shapes" in warning for warning in given.warnings)
    assert any("MACs" in warning for warning in given.warnings)
    json.dumps(given.details)
    assert all(entry.did.startswith("timed ") for entry in cache.entries())


def test_where_the_whole_gains_far_less_than_its_layers_the_share_is_refused(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables alone would have let it go: half of the layers' time is a tenth of the network's."""
    monkeypatch.setattr(_Measurements, "share_gone", lambda *_: 0.1)
    model = loaded("residual")
    with pytest.raises(StageError, match="of the latency"):
        by_latency(model, 0.5).run(model, tmp_path, quiet)
    assert counted
