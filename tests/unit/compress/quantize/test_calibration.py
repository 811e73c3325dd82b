"""Ranges: the same however the data comes in pieces, in flat memory, and better where they promise to be."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.model import OnnxModel
from compress.quantize import calibrate as calibrate_module
from compress.quantize.calibrate import batch_for, calibrate, samples_within
from compress.quantize.histogram import BINS, LEVELS, METHODS, Histogram, Method
from compress.quantize.quantize_onnx import QuantizeOnnx
from tests.unit.compress.onnx_export.test_stages import exported, folded
from tests.unit.compress.prune.test_prune_channels import loaded, quiet

values = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-1e6, 1e6, width=32))


def filled(*pieces: np.ndarray[Any, Any]) -> Histogram:
    histogram = Histogram()
    for piece in pieces:
        histogram.add(piece)
    return histogram


# Whole numbers: no rounding puts one of them on the other side of a bin's edge.
@given(hnp.arrays(np.float32, st.integers(1, 60), elements=st.integers(-1_000_000, 1_000_000)), st.integers(0, 60))
@example(np.array([1, 2], np.float32), 1)
@settings(max_examples=300)
def test_the_counts_do_not_depend_on_how_the_data_is_cut(data: np.ndarray[Any, Any], cut: int) -> None:
    whole, pieces = filled(data), filled(data[:cut], data[cut:])
    assert pieces.reach == whole.reach
    assert np.array_equal(pieces.counts, whole.counts)
    assert whole.counts.sum() == data.size
    assert (pieces.lowest, pieces.highest) == (whole.lowest, whole.highest)


@given(values, st.sampled_from(METHODS))
def test_every_range_is_finite_holds_zero_and_stays_within_what_was_seen(
    data: np.ndarray[Any, Any], method: Method
) -> None:
    low, high = filled(data).range(method)
    assert np.isfinite([low, high]).all()
    assert low <= 0 <= high
    assert low >= min(float(data.min()), 0)
    assert high <= max(float(data.max()), 0)


@given(values)
def test_minmax_is_exact(data: np.ndarray[Any, Any]) -> None:
    assert filled(data).range("minmax") == (min(float(data.min()), 0.0), max(float(data.max()), 0.0))


def test_a_percentile_is_that_of_the_data_within_a_bin() -> None:
    data = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    low, high = filled(data).range("percentile")
    bin_width = 2 * filled(data).reach / BINS
    assert low == pytest.approx(np.quantile(data, 1e-4), abs=2 * bin_width)
    assert high == pytest.approx(np.quantile(data, 1 - 1e-4), abs=2 * bin_width)


def squared_error(data: np.ndarray[Any, Any], bounds: tuple[float, float]) -> float:
    """Of 8-bit quantization with these bounds."""
    low, high = bounds
    step = (high - low) / LEVELS
    quantized = np.clip(np.round((data - low) / step), 0, LEVELS) * step + low
    return float(np.square(quantized - data).mean())


@pytest.mark.parametrize("distribution", ["laplace", "standard_normal", "standard_exponential"])
def test_mse_is_the_best_of_the_methods_by_its_own_measure(distribution: str) -> None:
    data = getattr(np.random.default_rng(0), distribution)(size=100_000).astype(np.float32)
    errors = {method: squared_error(data, filled(data).range(method)) for method in METHODS}
    assert errors["mse"] <= 1.02 * min(errors.values())
    assert errors["mse"] < errors["minmax"]


def test_entropy_cuts_an_outlier_off_and_leaves_a_uniform_distribution_whole() -> None:
    rng = np.random.default_rng(0)
    spoilt = np.append(rng.standard_normal(100_000), 100.0).astype(np.float32)
    assert filled(spoilt).range("entropy")[1] < 20
    even = rng.uniform(-1, 1, 100_000).astype(np.float32)
    assert filled(even).range("entropy")[1] > 0.9


def test_zeros_alone_have_an_empty_range() -> None:
    assert all(filled(np.zeros(10, np.float32)).range(method) == (0, 0) for method in METHODS)


def data_for(model: OnnxModel, folder: Path, count: int) -> Dataset:
    shape = (count, *model.signature.inputs[0].shape[1:])
    np.save(folder / "x.npy", np.random.default_rng(1).standard_normal(shape).astype(np.float32))  # type: ignore[arg-type]
    return Dataset.open(str(folder / "x.npy"), model.signature)


def test_memory_is_flat_in_the_number_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_module, "LARGEST_BATCH", 8)
    model = folded(exported(loaded("residual"), tmp_path / "onnx"), tmp_path / "folded")
    peaks = []
    for count in (16, 16, 160):  # the first run imports things
        data = data_for(model, tmp_path, count)
        tracemalloc.start()
        calibrate(model.path, data, "entropy", quiet)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1]


def test_the_batch_shrinks_with_the_activations() -> None:
    assert samples_within(10) == 32
    assert samples_within(1024 * 1024) == 16
    assert samples_within(1024 * 1024 * 64) == 1


@pytest.mark.parametrize(("length", "batch"), [(16, 32), (1024, 16), (4096, 1)])
def test_the_sizes_of_the_data_decide_the_batch_and_not_those_that_the_file_leaves_open(
    length: int, batch: int, tmp_path: Path
) -> None:
    """Each sample's scores are as long as it is, by as much: 4 MiB for 1,024 tokens, 64 MiB for 4,096."""
    graph = helper.make_graph(
        [helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), helper.make_node("MatMul", ["x", "t"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "seq", "seq"])],
    )
    path = tmp_path / "scores.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    x, y = TensorSpec.parse("x:float32[batch,seq,1]"), TensorSpec.parse("y:float32[batch,seq,seq]")
    np.save(tmp_path / "x.npy", np.zeros((40, length, 1), np.float32))
    data = Dataset.open(str(tmp_path / "x.npy"), Signature((x,), (y,)))
    assert batch_for(path, ["y"], data) == batch


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_close_int8_model_with_a_ragged_last_batch(tmp_path: Path, method: Method) -> None:
    from compress.evaluate.compare import cosine_similarity
    from compress.runtime.backends import OnnxBackend

    model = folded(exported(loaded("residual"), tmp_path / "onnx"), tmp_path / "folded")
    data = data_for(model, tmp_path, 37)
    (tmp_path / "int8").mkdir()
    given = QuantizeOnnx("static", data, method).run(model, tmp_path / "int8", quiet)
    assert isinstance(given.model, OnnxModel)
    inputs, _ = data.take(slice(0, 37))
    expected, got = OnnxBackend(model, 1).infer(inputs)["output"], OnnxBackend(given.model, 1).infer(inputs)["output"]
    assert cosine_similarity(expected, got).min() > 0.97


def test_the_range_reaches_the_scales_in_the_file(tmp_path: Path) -> None:
    model = folded(exported(loaded("residual"), tmp_path / "onnx"), tmp_path / "folded")
    data = data_for(model, tmp_path, 20)
    low, high = calibrate(model.path, data, "minmax", quiet)["image"]
    (tmp_path / "int8").mkdir()
    given = QuantizeOnnx("static", data).run(model, tmp_path / "int8", quiet)
    assert isinstance(given.model, OnnxModel)
    graph = onnx.load(given.model.path).graph
    scale = next(node.input[1] for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] == "image")
    stored = next(numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name == scale)
    assert float(stored) == pytest.approx((high - low) / LEVELS, rel=1e-5)


def test_an_overflow_in_the_model_is_told_by_tensor(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Log", ["x"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
    )  # fmt: skip
    path = tmp_path / "log.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    signature = Signature((TensorSpec.parse("x:float32[batch,3]"),), (TensorSpec.parse("y:float32[batch,3]"),))
    np.save(tmp_path / "x.npy", np.zeros((4, 3), np.float32))
    with pytest.raises(StageError) as caught:
        calibrate(path, Dataset.open(str(tmp_path / "x.npy"), signature), "minmax", quiet)
    assert "'y'" in caught.value.why


@pytest.mark.parametrize(("samples", "told"), [(1, "1 sample"), (7, "7 samples"), (8, "")])
def test_ranges_of_few_samples_are_told(samples: int, told: str, tmp_path: Path) -> None:
    model = folded(exported(loaded("residual"), tmp_path / "onnx"), tmp_path / "folded")
    shape = tuple(model.signature.inputs[0].at({"batch": samples}))
    rows = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    data = Dataset("few", {model.signature.inputs[0].name: rows}, None, "0" * 64)
    (tmp_path / "int8").mkdir()
    said = QuantizeOnnx("static", data).run(model, tmp_path / "int8", quiet).warnings
    assert bool(said) == bool(told)
    assert told in "".join(said)
