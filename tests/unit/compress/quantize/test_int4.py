"""4-bit weights: packed as ONNX Runtime reads them, chosen by what layers read, each matrix stored once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.evaluate.metrics import cosine_similarity
from compress.formats.onnx.read import signature_of_onnx
from compress.model import OnnxModel
from compress.quantize import grams as grams_module
from compress.quantize.blocks import LEVELS, SIZE, Blocks, Steps, fitted, packed, rounded
from compress.quantize.gptq import chosen, lost
from compress.quantize.int4_onnx import DOMAIN, LAYER, TABLE
from compress.quantize.quantize_int4 import QuantizeInt4
from compress.runtime.backends import open_model
from compress.runtime.measure import onnx_layer_bytes, onnx_macs, onnx_params
from compress.tensorrt.lint_cpu import lint_cpu

Array = np.ndarray[Any, Any]
Inputs = dict[str, tuple[int, list[Any]]]
node = helper.make_node


def quiet(_done: int, _total: int, _note: str) -> None:
    """No progress."""


def model_of(
    folder: Path, nodes: list[onnx.NodeProto], weights: dict[str, Array], inputs: Inputs,
    outputs: tuple[str, ...] = ("y",),
) -> OnnxModel:  # fmt: skip
    """An ONNX file of opset 20; outputs are float32."""
    given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    made = [onnx.ValueInfoProto(name=name) for name in outputs]
    kept = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", given, made, kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.shape_inference.infer_shapes(model), folder / "model.onnx")
    return OnnxModel(folder / "model.onnx", signature_of_onnx(folder / "model.onnx"))


def normal(*shape: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) / 8).astype(np.float32)


def two_layers(folder: Path, width: int = 64) -> OnnxModel:
    """Two products with an activation between; the second is a Gemm with a bias, its weight turned."""
    nodes = [
        node("MatMul", ["x", "v"], ["a"], name="first"), node("Relu", ["a"], ["r"], name="relu"),
        node("Gemm", ["r", "w", "b"], ["y"], name="second", transB=1),
    ]  # fmt: skip
    weights = {"v": normal(width, 48), "w": normal(40, 48, seed=1), "b": normal(40, seed=2)}
    return model_of(folder, nodes, weights, {"x": (TensorProto.FLOAT, ["batch", width])})


def correlated(width: int, rows: int = 256) -> Array:
    """Inputs of which a few directions hold nearly all, as activations are."""
    rng = np.random.default_rng(3)
    few = rng.standard_normal((rows, max(2, width // 8))) @ rng.standard_normal((max(2, width // 8), width))
    return (few + 0.1 * rng.standard_normal((rows, width))).astype(np.float32)


def data_of(**arrays: Array) -> Dataset:
    digest = str(sum(float(np.float64(array).sum()) for array in arrays.values()))
    return Dataset("data", arrays, None, digest)


def quantized(model: OnnxModel, folder: Path, stage: QuantizeInt4 | None = None) -> OnnxModel:
    folder.mkdir(parents=True, exist_ok=True)
    given = (stage or QuantizeInt4()).run(model, folder, quiet).model
    assert isinstance(given, OnnxModel)
    return given


def answers(model: OnnxModel, **inputs: Array) -> dict[str, Array]:
    return open_model(model, threads=1).infer(inputs)


def nodes_of(model: OnnxModel) -> dict[str, onnx.NodeProto]:
    return {each.name: each for each in onnx.load(model.path).graph.node}


@st.composite
def blocks(draw: st.DrawFn, columns: st.SearchStrategy[int]) -> Blocks:
    rows, width = draw(st.integers(1, 5)), draw(columns)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = -(-width // SIZE)
    scale = rng.uniform(0.01, 2, (rows, count)).astype(np.float32)
    zero = rng.integers(0, LEVELS + 1, (rows, count)).astype(np.uint8)
    return Blocks(rng.integers(0, LEVELS + 1, (rows, width)).astype(np.uint8), Steps(scale, zero))


def run_one(operator: onnx.NodeProto, weights: dict[str, Array], name: str, value: Array) -> Array:
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    graph = helper.make_graph(
        [operator], "g", [helper.make_tensor_value_info(name, kind, value.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, each) for each, array in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    running = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    found: Array = running.run(None, {name: value})[0]
    return found


@settings(max_examples=60, deadline=None)
@given(blocks(st.integers(1, 100)))
def test_onnx_runtime_multiplies_by_the_very_weights_that_were_packed(made: Blocks) -> None:
    codes, scale, zero = packed(made)
    rows, columns = made.codes.shape
    operator = node(
        LAYER, ["x", "codes", "scale", "zero"], ["y"], domain=DOMAIN, K=columns, N=rows, bits=4, block_size=SIZE
    )
    weights = {"codes": codes, "scale": scale, "zero": zero}
    found = run_one(operator, weights, "x", np.eye(columns, dtype=np.float32))
    np.testing.assert_allclose(found.T, made.restored(), rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(blocks(st.sampled_from([64, 128, 192])))
def test_onnx_runtime_looks_up_the_very_rows_that_were_packed(made: Blocks) -> None:
    codes, scale, zero = packed(made)
    operator = node(
        TABLE, ["codes", "ids", "scale", "zero"], ["y"], domain=DOMAIN, gather_axis=0, quantize_axis=1, block_size=SIZE
    )
    weights = {"codes": codes.reshape(len(codes), -1), "scale": scale, "zero": zero}
    np.testing.assert_array_equal(run_one(operator, weights, "ids", np.arange(len(codes))), made.restored())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([7, 32, 50, 64]), st.booleans())
def test_scales_of_least_error_are_never_worse_than_those_of_the_range(
    seed: int, columns: int, symmetric: bool
) -> None:
    weights = np.random.default_rng(seed).standard_t(3, (4, columns)).astype(np.float32)
    wide = np.pad(weights, ((0, 0), (0, -columns % SIZE))).reshape(4, -1, SIZE)
    low, high = np.minimum(wide.min(-1), 0), np.maximum(wide.max(-1), 0)
    if symmetric:
        scale, zero = np.maximum(-low / 8, high / 7), np.full(low.shape, 8)
    else:
        scale = (high - low) / LEVELS
        zero = np.rint(-low / np.where(scale > 0, scale, 1))
    plain = rounded(weights, Steps(np.where(scale > 0, scale, 1).astype(np.float32), zero.astype(np.uint8)))
    made = rounded(weights, fitted(weights, symmetric=symmetric))
    errors = [float(np.square(weights - each.restored()).sum()) for each in (made, plain)]
    assert errors[0] <= errors[1] * (1 + 1e-5)
    assert not symmetric or (made.steps.zero == 8).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 100), st.integers(1, 150))
def test_gptq_loses_no_more_on_the_calibration_data_than_rounding(seed: int, columns: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    read = rng.standard_normal((rows, columns)) * rng.uniform(0, 3, columns)
    weights = rng.standard_normal((6, columns)).astype(np.float32)
    gram = read.T @ read
    found = chosen(weights, gram)
    nearest = lost(weights, rounded(weights, fitted(weights)), gram)
    assert (lost(weights, found, gram) <= nearest).all()


def test_gptq_loses_far_less_than_rounding_where_inputs_go_together() -> None:
    read = correlated(96).astype(np.float64)
    weights, gram = normal(32, 96), read.T @ read
    nearest = lost(weights, rounded(weights, fitted(weights)), gram)
    assert lost(weights, chosen(weights, gram), gram).sum() < 0.4 * nearest.sum()


def test_columns_that_were_never_read_are_rounded_and_harm_nothing() -> None:
    read = correlated(64).astype(np.float64)
    read[:, 10:20] = 0
    weights = normal(16, 64)
    gram = read.T @ read
    found, nearest = chosen(weights, gram), rounded(weights, fitted(weights))
    assert np.abs(found.restored() - weights)[:, 10:20].max() < 0.1
    assert lost(weights, found, gram).sum() < 0.6 * lost(weights, nearest, gram).sum()


@pytest.mark.parametrize("gram", [np.zeros((64, 64)), np.full((64, 64), np.nan)], ids=["nothing read", "no numbers"])
def test_where_inputs_tell_nothing_weights_are_rounded(gram: Array) -> None:
    weights = normal(8, 64)
    np.testing.assert_array_equal(chosen(weights, gram).codes, rounded(weights, fitted(weights)).codes)


@pytest.mark.parametrize("width", [64, 50], ids=["whole blocks", "a last block that is not full"])
def test_answers_stay_close_and_closer_with_calibration(width: int, tmp_path: Path) -> None:
    model = two_layers(tmp_path / "float", width)
    x = correlated(width)
    before = answers(model, x=x)["y"]
    plain = quantized(model, tmp_path / "plain")
    tuned = quantized(model, tmp_path / "tuned", QuantizeInt4(data_of(x=x)))
    errors = [float(np.square(before - answers(each, x=x)["y"]).sum()) for each in (plain, tuned)]
    assert cosine_similarity(before, answers(plain, x=x)["y"]).min() > 0.97
    assert errors[1] < 0.5 * errors[0]
    assert {LAYER} == {nodes_of(tuned)[name].op_type for name in ("first", "second")}


def test_what_is_counted_of_the_file_is_what_the_float_file_has(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "float")
    made = quantized(model, tmp_path / "made")
    assert onnx_params(made.path) == onnx_params(model.path) == 64 * 48 + 48 * 40 + 40
    assert onnx_macs(made.path, made.signature) == onnx_macs(model.path, model.signature)
    assert onnx_layer_bytes(made.path) == {"first": 64 * 48 // 2, "second": 64 * 40 // 2}  # 48 columns are two blocks


def test_a_matrix_that_two_layers_share_is_stored_once_and_chosen_by_what_both_read(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="first"), node("Tanh", ["a"], ["t"], name="t"),
        node("MatMul", ["t", "w"], ["y"], name="second"),
    ]  # fmt: skip
    model = model_of(tmp_path, nodes, {"w": normal(64, 64)}, {"x": (TensorProto.FLOAT, ["batch", 64])})
    made = quantized(model, tmp_path / "made", QuantizeInt4(data_of(x=correlated(64))))
    both = nodes_of(made)
    assert list(both["first"].input[1:]) == list(both["second"].input[1:])
    x = correlated(64)
    assert cosine_similarity(answers(model, x=x)["y"], answers(made, x=x)["y"]).min() > 0.97


@pytest.mark.parametrize("width", [64, 96], ids=["two blocks", "three blocks, without zero-points"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_table_and_the_layer_tied_to_it_read_the_same_numbers(width: int, calibrated: bool, tmp_path: Path) -> None:
    table = normal(50, width)
    nodes = [
        node("Gather", ["table", "ids"], ["rows"], name="look"),
        node("MatMul", ["rows", "head"], ["y"], name="head"),
    ]
    ids = np.random.default_rng(1).integers(0, 50, (64, 3))
    model = model_of(
        tmp_path, nodes, {"table": table, "head": np.ascontiguousarray(table.T)},
        {"ids": (TensorProto.INT64, ["batch", "seq"])}, ("rows", "y"),
    )  # fmt: skip
    made = quantized(model, tmp_path / "made", QuantizeInt4(data_of(ids=ids) if calibrated else None))
    held = [t for t in onnx.load(made.path).graph.initializer if t.data_type == TensorProto.UINT8]
    assert sum(int(np.prod(t.dims)) for t in held if "int4" in t.name) == 50 * width // 2, "one copy of the codes"
    assert onnx_params(made.path) == 50 * width
    before, after = answers(model, ids=ids), answers(made, ids=ids)
    assert cosine_similarity(before["rows"], after["rows"]).min() > 0.97
    by_hand = after["rows"] @ answers(made, ids=np.arange(50)[None])["rows"][0].T
    np.testing.assert_allclose(after["y"], by_hand, atol=0.02 * np.abs(by_hand).max())


def test_an_answer_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    made = quantized(two_layers(tmp_path), tmp_path / "made")
    x = correlated(64, 9)
    x[1:] *= 100
    alone, among = answers(made, x=x[:1])["y"], answers(made, x=x)["y"][:1]
    np.testing.assert_allclose(alone, among, rtol=1e-5, atol=1e-5)


def test_a_table_without_whole_blocks_has_8_bit_rows_and_convolutions_8_bit_kernels(tmp_path: Path) -> None:
    nodes = [
        node("Gather", ["table", "ids"], ["rows"], name="look"), node("MatMul", ["rows", "w"], ["y"], name="layer"),
        node("Conv", ["image", "kernel"], ["z"], name="conv"),
    ]  # fmt: skip
    weights = {"table": normal(60, 40), "w": normal(40, 64), "kernel": normal(16, 16, 3, 3)}
    inputs: Inputs = {"ids": (TensorProto.INT64, ["batch"]), "image": (TensorProto.FLOAT, ["batch", 16, 8, 8])}
    model = model_of(tmp_path, nodes, weights, inputs, ("y", "z"))
    (tmp_path / "made").mkdir()
    given = QuantizeInt4().run(model, tmp_path / "made", quiet)
    assert given.details["layers"] == {"int4": 1, "int8": 2, "float": 0}
    assert given.did.startswith("1 of 3 layers in INT4, 2 in INT8, weights alone")
    feed = {"ids": np.arange(8), "image": normal(8, 16, 8, 8)}
    before, after = answers(model, **feed), answers(given.model, **feed)  # type: ignore[arg-type]
    assert min(cosine_similarity(before[name], after[name]).min() for name in ("y", "z")) > 0.97


def test_a_product_that_is_scaled_or_turned_on_its_way_is_left_to_8_bits(tmp_path: Path) -> None:
    nodes = [
        node("Gemm", ["x", "v"], ["a"], name="scaled", alpha=0.5),
        node("MatMul", ["a", "w"], ["y"], name="plain"),
    ]
    weights = {"v": normal(64, 64), "w": normal(64, 64, seed=1)}
    model = model_of(tmp_path, nodes, weights, {"x": (TensorProto.FLOAT, ["batch", 64])})
    made = nodes_of(quantized(model, tmp_path / "made"))
    assert {name: made[name].op_type for name in ("scaled", "plain")} == {"scaled": "Gemm", "plain": LAYER}


def test_a_named_node_stays_in_float_and_is_told(tmp_path: Path) -> None:
    model = two_layers(tmp_path)
    (tmp_path / "made").mkdir()
    given = QuantizeInt4(exclude=("second",)).run(model, tmp_path / "made", quiet)
    assert given.details["layers"] == {"int4": 1, "int8": 0, "float": 1}
    assert given.details["layers_float"] == {"second": "left in float on purpose"}
    with pytest.raises(RecipeError, match="can't keep nowhere in float"):
        QuantizeInt4(exclude=("nowhere",)).run(model, tmp_path / "made", quiet)


def test_matrices_summed_in_portions_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stage = two_layers(tmp_path), QuantizeInt4(data_of(x=correlated(64)))
    whole = quantized(model, tmp_path / "whole", stage).path.read_bytes()
    monkeypatch.setattr(grams_module, "GRAM_BYTES", 1)
    assert quantized(model, tmp_path / "parts", stage).path.read_bytes() == whole


def test_values_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    nodes = [node("Log", ["x"], ["l"], name="log"), node("MatMul", ["l", "w"], ["y"], name="layer")]
    model = model_of(tmp_path, nodes, {"w": normal(64, 64)}, {"x": (TensorProto.FLOAT, ["batch", 64])})
    with pytest.raises(StageError, match="the tensor 'l', which a Log gives, is NaN"):
        quantized(model, tmp_path / "made", QuantizeInt4(data_of(x=np.full((64, 64), -1, np.float32))))


@pytest.mark.parametrize("tied", [False, True])
def test_an_id_that_the_table_lacks_is_refused_as_in_float(tied: bool, tmp_path: Path) -> None:
    nodes = [node("Gather", ["table", "ids"], ["rows"], name="look")]
    nodes += [node("MatMul", ["rows", "head"], ["y"], name="head")] if tied else []
    table = normal(50, 64)
    weights = {"table": table} | ({"head": np.ascontiguousarray(table.T)} if tied else {})
    inputs: Inputs = {"ids": (TensorProto.INT64, ["batch", "seq"])}
    model = model_of(tmp_path, nodes, weights, inputs, ("y" if tied else "rows",))
    made = quantized(model, tmp_path / "made")
    for file in (model, made):
        for wrong in (50, -51, 10**6):
            with pytest.raises(StageError, match="a table of 50 rows was asked for row"):
                answers(file, ids=np.full((2, 3), wrong))
    last = [next(iter(answers(made, ids=np.full((1, 1), at)).values())) for at in (49, -1)]
    np.testing.assert_array_equal(last[0], last[1])
    assert made.path.stat().st_size < 50 * 64 + 4000, "the check takes no byte for each row"


def test_a_table_without_whole_blocks_that_a_layer_shares_is_stored_once(tmp_path: Path) -> None:
    table = normal(200, 40)
    nodes = [
        node("Gather", ["table", "ids"], ["rows"], name="look"), node("MatMul", ["rows", "head"], ["a"], name="head"),
        node("MatMul", ["a", "w"], ["y"], name="other"),
    ]  # fmt: skip
    weights = {"table": table, "head": np.ascontiguousarray(table.T), "w": normal(200, 64, seed=1)}
    model = model_of(tmp_path, nodes, weights, {"ids": (TensorProto.INT64, ["batch", "seq"])})
    made = quantized(model, tmp_path / "made")
    whole = [int(np.prod(t.dims)) for t in onnx.load(made.path).graph.initializer if len(t.dims) > 1]
    assert sum(whole) < 200 * 40 + 200 * 64 // 2 + 200 * 64 // 16 + 1000
    assert nodes_of(made)["other"].op_type == LAYER
    ids = np.arange(20).reshape(2, 10)
    assert cosine_similarity(answers(model, ids=ids)["y"], answers(made, ids=ids)["y"]).min() > 0.97


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e20, 1e29, 1e37])
def test_weights_of_any_size_are_fitted_alike(size: float) -> None:
    weights = normal(8, 64)
    made = rounded(weights * np.float32(size), fitted(weights * np.float32(size))).restored().astype(np.float64)
    if size > 1e-38:
        np.testing.assert_allclose(made / size, rounded(weights, fitted(weights)).restored(), atol=0.05)
    assert np.isfinite(made).all()


def test_the_file_tells_the_first_opset_and_format_that_it_needs(tmp_path: Path) -> None:
    """ONNX Runtime 1.17, the first with these operators, reads formats up to 9."""
    made = onnx.load(quantized(two_layers(tmp_path), tmp_path / "made").path)
    opset = next(entry.version for entry in made.opset_import if entry.domain == "")
    assert made.ir_version <= 9
    assert opset <= 20
    assert made.producer_name == "compress"
    onnx.checker.check_model(made)


def test_what_is_new_in_an_opset_keeps_it(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"], name="layer"), node("Gelu", ["a"], ["y"], name="gelu")]
    model = model_of(tmp_path, nodes, {"w": normal(64, 64)}, {"x": (TensorProto.FLOAT, ["batch", 64])})
    made = onnx.load(quantized(model, tmp_path / "made").path)
    assert next(entry.version for entry in made.opset_import if entry.domain == "") == 20
    assert made.ir_version == 9


def test_a_table_that_stays_in_float_is_counted(tmp_path: Path) -> None:
    nodes = [
        node("Gather", ["table", "ids"], ["rows"], name="look"),
        node("MatMul", ["rows", "w"], ["y"], name="layer"),
    ]
    weights = {"table": normal(50, 64), "w": normal(64, 64)}
    model = model_of(tmp_path, nodes, weights, {"ids": (TensorProto.INT64, ["batch", "seq"])})
    (tmp_path / "made").mkdir()
    given = QuantizeInt4(exclude=("look",)).run(model, tmp_path / "made", quiet)
    assert given.details["layers"] == {"int4": 1, "int8": 0, "float": 1}
    assert given.details["layers_float"] == {"look": "left in float on purpose"}


@pytest.mark.usefixtures("openvino")
def test_a_tied_table_made_for_openvino_is_read_by_it(tmp_path: Path) -> None:
    table = normal(50, 64)
    nodes = [
        node("Gather", ["table", "ids"], ["rows"], name="look"),
        node("MatMul", ["rows", "head"], ["y"], name="head"),
    ]
    model = model_of(
        tmp_path, nodes, {"table": table, "head": np.ascontiguousarray(table.T)},
        {"ids": (TensorProto.INT64, ["batch", "seq"])},
    )  # fmt: skip
    (tmp_path / "made").mkdir()
    given = QuantizeInt4(openvino=True).run(model, tmp_path / "made", quiet)
    made = given.model
    assert isinstance(made, OnnxModel)
    assert any("stored twice" in each for each in given.warnings)
    ids = np.arange(50).reshape(5, 10)
    other = dataclasses.replace(made, runtime="openvino")
    np.testing.assert_allclose(answers(made, ids=ids)["y"], answers(other, ids=ids)["y"], atol=0.02)


def test_lint_tells_the_bits_of_a_layer(tmp_path: Path) -> None:
    made = onnx.load(quantized(two_layers(tmp_path), tmp_path / "made").path)
    next(each for node in made.graph.node for each in node.attribute if each.name == "bits").i = 8
    onnx.save(made, tmp_path / "eight.onnx")
    counts = lint_cpu(tmp_path / "eight.onnx").counts
    assert (counts["INT8"], counts["INT4"]) == (1, 1)


def test_a_network_without_matrices_is_sent_to_8_bits(tmp_path: Path) -> None:
    nodes = [node("Conv", ["image", "kernel"], ["y"], name="conv")]
    shape = ["batch", 16, 8, 8]
    model = model_of(tmp_path, nodes, {"kernel": normal(16, 16, 3, 3)}, {"image": (TensorProto.FLOAT, shape)})
    with pytest.raises(StageError, match="nothing was quantized") as raised:
        quantized(model, tmp_path / "made")
    assert "--int8 weights" in raised.value.mend


def test_lint_tells_the_runtime_that_is_needed(tmp_path: Path) -> None:
    found = lint_cpu(quantized(two_layers(tmp_path), tmp_path / "made").path)
    assert found.counts["INT4"] == 2
    assert any("MatMulNBits needs ONNX Runtime 1.17, in Triton 24.03" in each.what for each in found.findings)
    assert not found.refused


@pytest.mark.parametrize(
    ("width", "four"), [(8, False), (17, False), (18, True), (32, True), (33, False), (37, False), (38, True)]
)
def test_a_layer_is_4_bit_where_that_is_smaller_than_8(width: int, four: bool, tmp_path: Path) -> None:
    """Codes are of whole blocks of 32."""
    nodes = [
        node("MatMul", ["x", "v"], ["y"], name="narrow"),
        node("MatMul", ["z", "w"], ["q"], name="wide"),
    ]
    inputs: Inputs = {"x": (TensorProto.FLOAT, ["batch", width]), "z": (TensorProto.FLOAT, ["batch", 64])}
    weights = {"v": normal(width, 1000), "w": normal(64, 64)}
    model = model_of(tmp_path / "float", nodes, weights, inputs, ("y", "q"))
    made = quantized(model, tmp_path / "made")
    assert (nodes_of(made)["narrow"].op_type == LAYER) == four
    held = map(numpy_helper.to_array, onnx.load(made.path).graph.initializer)
    assert sum(array.nbytes for array in held) <= 1000 * (width + 4) + 64 * 64
    x = normal(5, width, seed=3)
    have, want = (answers(each, x=x, z=normal(5, 64))["y"] for each in (made, model))
    np.testing.assert_allclose(have, want, atol=0.2 * np.abs(want).max())
