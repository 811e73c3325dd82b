"""What bounds a layer, what a model costs alone, and the table over batch sizes and threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifact import sha256_of
from compress.errors import StageError
from compress.model import Model, OnnxModel, sample_inputs
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.report.reproduce import script
from compress.report.roofline import roofline_plot, roofline_table
from compress.runtime.footprint import footprint
from compress.runtime.grid import measure_grid
from compress.runtime.measure import onnx_layer_bytes, onnx_macs
from compress.runtime.roofline import Layer, Roofline, _fastest, roofline, same_roofs
from compress.runtime.roofs import TRIES, Machine, machine
from tests.families import family
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped
from tests.unit.compress.quantize.test_half_onnx import exported, random_data


@pytest.fixture
def roofs_once() -> None:
    """Measured as a run does: these tests are about that."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    """A large product of matrices, then an addition that only moves memory."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.layer(x)) + x

    return exported(Wide(), ("x:float32[batch,512]",), tmp_path_factory.mktemp("wide"))


def test_operations_and_bytes_are_those_of_the_shapes(wide: OnnxModel) -> None:
    found = roofline(wide.path, sample_inputs(wide.signature, 64), calls=10)
    product = max(found.layers, key=lambda layer: layer.ops)
    assert product.ops == 2 * 64 * 512 * 512
    assert product.bytes_moved == pytest.approx(4 * (2 * 64 * 512 + 512 * 512 + 512), rel=0.02)
    assert all(layer.microseconds >= 0 and layer.bound in ("compute", "memory", "overhead") for layer in found.layers)
    assert sum(found.share(bound) for bound in ("compute", "memory", "overhead")) == pytest.approx(1)


MULTIPLYING = ("Conv", "Gemm", "MatMul", "LSTM", "GRU")


@pytest.mark.parametrize("name", ["residual", "bert", "lstm", "recurrent", "unet"])
def test_the_operations_of_a_model_are_its_multiply_accumulates(name: str, tmp_path: Path) -> None:
    module, inputs = family(name)
    model = exported(module, inputs, tmp_path)
    found = roofline(model.path, sample_inputs(model.signature, 1), calls=5)
    multiplying = sum(layer.ops for layer in found.layers if any(k in layer.kind for k in MULTIPLYING))
    assert multiplying >= 2 * onnx_macs(model.path, model.signature) * 0.99, "and padding of ONNX Runtime's own layouts"


@pytest.mark.usefixtures("own_products")
def test_int8_layers_have_a_roof_of_their_own(tmp_path: Path) -> None:
    module, inputs = family("residual")
    model = exported(module, inputs, tmp_path)
    int8 = QuantizeOnnx("static", random_data(model, 16)).run(model, tmp_path / "next", quiet).model
    assert isinstance(int8, OnnxModel)
    found = roofline(int8.path, sample_inputs(int8.signature, 1), calls=5)
    assert any(layer.int8 for layer in found.layers if "Conv" in layer.kind)
    assert "<svg" in roofline_plot(found)
    assert roofline_table(found).row_count == min(20, len(found.layers))
    assert set(found.to_dict()["time_share"]) == {"compute", "memory", "overhead"}


def reached(microseconds: float, gops: float, *, int8: bool = False) -> Layer:
    """A layer of that speed."""
    ops = gops * 1e9 * microseconds / 1e6
    return Layer("layer", "Conv", microseconds, ops, ops / 100, int8, "overhead")


def test_no_layer_of_a_telling_length_is_above_its_roof() -> None:
    busy = Machine(1, 50e9, 200e9, 10e9)
    layers = (reached(1000, 80), reached(1000, 150, int8=True), reached(2, 900))
    lifted = busy.lifted_to(_fastest(layers))
    assert lifted.float_ops == pytest.approx(80e9)
    assert (lifted.int8_ops, lifted.lifted) == (200e9, ("float",))
    found = Roofline(lifted, layers).under(lifted)
    assert [layer.bound for layer in found.layers[:2]] == ["compute", "compute"]
    table = roofline_table(found)
    assert "80* GFLOP/s in float, 200 GOP/s" in str(table.title)
    assert "busy" in str(table.caption)
    assert "float 80* GOP/s" in roofline_plot(found)
    assert roofline_table(Roofline(busy, layers)).caption is None


def test_the_best_of_all_measurements_counts_for_all_models_of_a_report() -> None:
    first, second = Machine(1, 50e9, 300e9, 10e9, tries=8), Machine(1, 80e9, 200e9, 9e9, tries=16, lifted=("float",))
    found = same_roofs({"a": Roofline(first, (reached(100, 10),)), "b": Roofline(second, (reached(100, 70),))})
    assert found["a"].machine == found["b"].machine == Machine(1, 80e9, 300e9, 10e9, tries=16, lifted=("float",))
    assert found["a"].layers[0].bound == "overhead", "8 times below, now"
    better = second.or_better(Machine(1, 90e9, 1e9, 1e9))
    assert better.lifted == (), "once it is measured above the layer, it is no layer's own"
    assert same_roofs({}) == {}


def test_roofs_are_measured_again_beside_each_model(wide: OnnxModel) -> None:
    before = machine(1).tries
    assert roofline(wide.path, sample_inputs(wide.signature, 1), calls=5).machine.tries == before + 2 * TRIES
    after = roofline(wide.path, sample_inputs(wide.signature, 1), calls=5, follows=True)
    assert after.machine.tries == before + 3 * TRIES, "those after the first stand before the second"


def test_this_machine_was_measured_once() -> None:
    assert machine(1) is machine(1)
    assert min(machine(1).float_ops, machine(1).int8_ops, machine(1).bytes_per_second) > 1e8


def test_a_larger_model_takes_more_memory(wide: OnnxModel, tmp_path: Path) -> None:
    module, inputs = family("mlp")
    small = footprint(exported(module, inputs, tmp_path), 1)
    (tmp_path / "large").mkdir()
    large = footprint(exported(nn.Linear(4096, 4096), ("x:float32[batch,4096]",), tmp_path / "large"), 1)
    assert small.peak_memory_bytes is not None
    assert large.peak_memory_bytes is not None
    assert large.peak_memory_bytes > small.peak_memory_bytes + 60_000_000
    assert large.load_ms > 0


def test_a_file_that_does_not_run_alone_is_told(wide: OnnxModel, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(StageError, match="process of its own"):
        footprint(OnnxModel(tmp_path / "broken.onnx", wide.signature), 1)


def test_the_grid_has_a_cell_for_each_setting(tmp_path: Path) -> None:
    module, inputs = family("residual")
    models: dict[str, Model] = {"torch": wrapped(module, *inputs), "onnx": exported(module, inputs, tmp_path)}
    cells = measure_grid(models, (1, 4), (1, 2))
    assert {(c.model, c.batch, c.threads) for c in cells} == {(m, b, t) for m in models for b in (1, 4) for t in (1, 2)}
    assert all(c.throughput == pytest.approx(1000 * c.batch / c.p50_ms) for c in cells)


def test_the_bytes_of_a_layer_fall_to_a_quarter_in_int8(tmp_path: Path) -> None:
    module, inputs = family("residual")
    model = exported(module, inputs, tmp_path)
    int8 = QuantizeOnnx("static", random_data(model, 16)).run(model, tmp_path / "next", quiet).model
    before, after = onnx_layer_bytes(model.path), onnx_layer_bytes(int8.path)  # type: ignore[union-attr]
    assert set(before) == set(after)
    assert all(after[name] * 4 == before[name] for name in before)


def test_reproduce_runs_the_command_where_it_was_run(tmp_path: Path) -> None:
    folder, data = tmp_path / "my folder", tmp_path / "my folder/data.npz"
    folder.mkdir()
    data.write_bytes(b"samples")
    text = script("echo again > done.txt", folder, {data: sha256_of(data)}, {"onnx": "1.0"})
    path = tmp_path / "reproduce.sh"
    path.write_text(text, encoding="utf-8")
    subprocess.run(["/bin/sh", path], check=True)
    assert (folder / "done.txt").read_text() == "again\n"


def test_reproduce_stops_when_an_input_has_changed(tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    data.write_bytes(b"samples")
    text = script("echo again > done.txt", tmp_path, {data: sha256_of(data)}, {})
    data.write_bytes(b"others")
    (tmp_path / "reproduce.sh").write_text(text, encoding="utf-8")
    assert subprocess.run(["/bin/sh", tmp_path / "reproduce.sh"], check=False, capture_output=True).returncode != 0
    assert not (tmp_path / "done.txt").exists()
