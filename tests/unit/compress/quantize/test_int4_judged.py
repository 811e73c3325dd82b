"""What calibration tells of 4-bit weights: judged on samples held out, padding left out, wide layers in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from compress.model import OnnxModel
from compress.quantize import grams as grams_module
from compress.quantize.blocks import fitted, rounded
from compress.quantize.grams import FEWEST, MOST_HELD, held_out, portions, readings, slices
from compress.quantize.held_out import in_8_bits, judged
from compress.quantize.quantize_int4 import QuantizeInt4
from compress.stage import Given
from tests.unit.compress.quantize.test_int4 import (
    Array,
    Inputs,
    answers,
    correlated,
    data_of,
    model_of,
    node,
    nodes_of,
    normal,
    quantized,
    quiet,
    two_layers,
)


def given_by(model: OnnxModel, folder: Path, stage: QuantizeInt4) -> Given:
    folder.mkdir(parents=True)
    return stage.run(model, folder, quiet)


def level(model: OnnxModel, name: str) -> int:
    return next(int(each.i) for each in nodes_of(model)[name].attribute if each.name == "accuracy_level")


def looked_up(folder: Path, table: Array, weights: Array) -> OnnxModel:
    """A float table, then a layer: what comes in are ids."""
    nodes = [
        node("Gather", ["table", "ids"], ["rows"], name="look"),
        node("MatMul", ["rows", "w"], ["y"], name="layer"),
    ]
    return model_of(folder, nodes, {"table": table, "w": weights}, {"ids": (TensorProto.INT64, ["batch", "seq"])})


def test_the_figure_of_the_report_is_that_of_samples_that_had_no_part_in_choosing(tmp_path: Path) -> None:
    """Few noisy samples are followed closely: on themselves nearly nothing is lost, on others most of it."""
    model, x = two_layers(tmp_path / "float"), np.random.default_rng(0).standard_normal((60, 64)).astype(np.float32)
    given = given_by(model, tmp_path / "made", QuantizeInt4(data_of(x=x)))
    others = np.random.default_rng(1).standard_normal((4000, 64)).astype(np.float32)
    (weights,) = (each for each in onnx.load(model.path).graph.initializer if each.name == "v")
    values = np.ascontiguousarray(onnx.numpy_helper.to_array(weights).T)
    read = readings(model.path, {"x": 64}, data_of(x=x), np.arange(4, 60, 5), lambda _: None)["x"]
    found = judged(values, read, symmetric=False, table=False)
    nearest = rounded(values, fitted(values))
    errors = [np.square(others @ (values - each.restored()).T).sum() for each in (found.blocks, nearest)]
    assert found.lost / found.lost_rounded == pytest.approx(errors[0] / errors[1], abs=0.25)
    assert given.details["held_out"]["error_of_rounding"] > 0.5, "nothing is told of the samples themselves"
    assert "a fifth of them held out" in given.did


def test_a_layer_that_rounding_serves_better_on_what_was_held_out_is_rounded() -> None:
    """What judges reads other columns than what GPTQ looked at."""
    rng = np.random.default_rng(0)
    seen, held = rng.standard_normal((200, 64)), rng.standard_normal((200, 64)).astype(np.float32)
    seen[:, :32] *= 0.01
    held[:, 32:] *= 0.01
    weights = normal(16, 64)
    found = judged(weights, grams_module.Reading((seen.T @ seen,), held, held), symmetric=False, table=False)
    assert found.lost == found.lost_rounded
    np.testing.assert_array_equal(found.blocks.codes, rounded(weights, fitted(weights)).codes)


def test_a_layer_that_rounding_serves_better_on_what_was_taken_for_padding_is_rounded() -> None:
    rng = np.random.default_rng(0)
    few = rng.standard_normal((8, 64))
    seen, held = (rng.standard_normal((400, 8)) @ few for _ in range(2))
    every = rng.standard_normal((400, 64))
    every -= every @ np.linalg.pinv(few) @ few  # nothing of what the others are made of
    held, every = held.astype(np.float32), every.astype(np.float32)
    weights, gram = normal(16, 64), (seen.T @ seen,)
    taken = judged(weights, grams_module.Reading(gram, held, held), symmetric=False, table=False)
    found = judged(weights, grams_module.Reading(gram, held, every), symmetric=False, table=False)
    assert taken.lost < taken.lost_rounded
    assert found.lost == found.lost_rounded
    np.testing.assert_array_equal(found.blocks.codes, rounded(weights, fitted(weights)).codes)


def test_too_few_samples_to_judge_make_no_claim_and_weights_are_rounded(tmp_path: Path) -> None:
    model, x = two_layers(tmp_path / "float"), correlated(64)[: FEWEST - 1]
    given = given_by(model, tmp_path / "made", QuantizeInt4(data_of(x=x)))
    plain = quantized(model, tmp_path / "plain")
    assert given.did.endswith("rounded to nearest")
    assert given.details["held_out"] is None
    assert any("a fifth of 39 samples is too few to say" in each for each in given.warnings)
    assert given.model.path.read_bytes() == plain.path.read_bytes()  # type: ignore[union-attr]


def test_a_model_of_one_fixed_batch_has_nothing_held_out(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"], name="layer")]
    model = model_of(tmp_path, nodes, {"w": normal(64, 64)}, {"x": (TensorProto.FLOAT, [64, 64])})
    assert held_out(model.path, data_of(x=correlated(64, 64))) is None
    given = given_by(model, tmp_path / "made", QuantizeInt4(data_of(x=correlated(64, 64))))
    assert any("64 samples go in one call" in each for each in given.warnings)


def test_tables_alone_are_rounded_and_samples_are_not_blamed(tmp_path: Path) -> None:
    nodes = [node("Gather", ["table", "ids"], ["y"], name="look")]
    model = model_of(tmp_path / "f", nodes, {"table": normal(50, 64)}, {"ids": (TensorProto.INT64, ["batch", "seq"])})
    given = given_by(model, tmp_path / "made", QuantizeInt4(data_of(ids=np.zeros((64, 4), np.int64))))
    assert given.did.endswith("rounded to nearest")
    assert given.warnings == ()


def test_without_calibration_activations_stay_in_float(tmp_path: Path) -> None:
    made = quantized(looked_up(tmp_path / "float", normal(50, 64), normal(64, 40)), tmp_path / "made")
    assert level(made, "layer") == 0


def test_activations_become_8_bit_where_that_costs_less_than_the_weights_do(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (64, 8))
    even, odd = np.random.default_rng(1).standard_normal((2, 50, 64)).astype(np.float32)
    odd[:, ::32] *= 1e4  # beside a far larger number, 8 bits leave nothing of the others
    weights = normal(64, 40)
    weights[::32] *= 1e-5
    made = {}
    for name, table in (("even", even), ("odd", odd)):
        model = looked_up(tmp_path / name, table, weights)
        stage = QuantizeInt4(data_of(ids=ids), exclude=("look",))
        made[name] = quantized(model, tmp_path / f"{name} made", stage)
    assert level(made["even"], "layer") == 4
    assert level(made["odd"], "layer") == 0


def test_a_caller_s_nan_stays_one_with_and_without_calibration(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "float")
    for name, data in (("plain", None), ("tuned", data_of(x=correlated(64)))):
        made = quantized(model, tmp_path / name, QuantizeInt4(data))
        assert np.isnan(answers(made, x=np.full((1, 64), np.nan, np.float32))["y"]).all()


def test_features_of_very_different_scales_keep_their_classes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    scales = np.where(np.arange(64) % 2, 1e3, 1).astype(np.float32)
    classes = rng.standard_normal((10, 64)).astype(np.float32)
    classes[:, 1::2] = 0
    x = ((classes[np.arange(400) % 10] * 3 + rng.standard_normal((400, 64))) * scales).astype(np.float32)
    nodes = [node("MatMul", ["x", "w"], ["y"], name="layer"), node("Identity", ["y"], ["z"], name="z")]
    pad = np.zeros((10, 64), np.float32)
    weights = np.ascontiguousarray(np.concatenate([classes / scales, pad]).T)
    model = model_of(tmp_path / "float", nodes, {"w": weights}, {"x": (TensorProto.FLOAT, ["batch", 64])}, ("z",))
    before = answers(model, x=x)["z"].argmax(1)
    for name, data in (("plain", None), ("tuned", data_of(x=x))):
        after = answers(quantized(model, tmp_path / name, QuantizeInt4(data)), x=x)["z"].argmax(1)
        assert (before == after).mean() > 0.95


def test_8_bit_activations_are_told_as_onnx_runtime_makes_them(tmp_path: Path) -> None:
    model = looked_up(tmp_path / "float", correlated(64, 128), normal(64, 40))
    stage = QuantizeInt4(data_of(ids=np.random.default_rng(0).integers(0, 128, (64, 8))), exclude=("look",))
    made = quantized(model, tmp_path / "made", stage)
    file = onnx.load(made.path)
    ids = np.arange(128)[None]
    found = answers(made, ids=ids)["y"][0]
    for each in file.graph.node:
        for attribute in each.attribute:
            if attribute.name == "accuracy_level":
                assert attribute.i == 4
                attribute.i = 0
    onnx.save(file, tmp_path / "in_float.onnx")
    table = next(onnx.numpy_helper.to_array(t) for t in file.graph.initializer if list(t.dims) == [128, 64])
    running = ort.InferenceSession(tmp_path / "in_float.onnx")
    exact = running.run(None, {"ids": ids})[0][0]
    by_hand = exact + (in_8_bits(table) - table) @ np.linalg.lstsq(table, exact, rcond=None)[0]
    np.testing.assert_allclose(found, by_hand, atol=2e-3 * np.abs(exact).max())


@pytest.mark.parametrize("width", [64, 96, 3072, 3073, 6000, 9000])
def test_parts_of_a_wide_layer_are_whole_blocks_and_bounded(width: int) -> None:
    parts = slices(width)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == width
    assert all((part.stop - part.start) % 32 == 0 for part in parts[:-1])
    assert max(part.stop - part.start for part in parts) <= grams_module.WIDEST


def test_a_wide_layer_is_chosen_in_parts_with_bounded_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grams_module, "WIDEST", 64)
    model, x = two_layers(tmp_path / "float", 160), correlated(160, 400)
    read = readings(model.path, {"x": 160}, data_of(x=x), np.arange(4, 400, 5), lambda _: None)["x"]
    assert [gram.shape for gram in read.grams] == [(64, 64), (64, 64), (32, 32)]
    made = quantized(model, tmp_path / "made", QuantizeInt4(data_of(x=x)))
    plain = quantized(model, tmp_path / "plain")
    before = answers(model, x=x)["y"]
    errors = [float(np.square(before - answers(each, x=x)["y"]).sum()) for each in (made, plain)]
    assert errors[0] < 0.8 * errors[1]


def test_rows_that_judge_are_bounded(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (100, 600))
    model = looked_up(tmp_path, normal(50, 64), normal(64, 40))
    places = held_out(model.path, data_of(ids=ids))
    assert places is not None
    assert len(places) == 20
    read = readings(model.path, {"rows": 64}, data_of(ids=ids), places, lambda _: None)["rows"]
    assert 0.9 * MOST_HELD < len(read.held) < 1.1 * MOST_HELD
    assert len(portions({"a": 3072, "b": 3072, "c": 20000})) > 1


@pytest.mark.parametrize("order", ["samples first", "tokens first", "samples first, flat", "tokens first, flat"])
@pytest.mark.parametrize("tokens", [4, 32], ids=["few tokens", "as many as samples in a batch"])
def test_padding_has_no_say_whatever_the_order(order: str, tokens: int, tmp_path: Path) -> None:
    turned = order.startswith("tokens")
    nodes = [node("Transpose", ["x"], ["t"], name="turn", perm=[1, 0, 2] if turned else [0, 1, 2])]
    nodes += [node("Reshape", ["t", "flat"], ["f"], name="flat")] if "flat" in order else []
    nodes += [node("MatMul", ["f" if "flat" in order else "t", "w"], ["y"], name="layer")]
    inputs: Inputs = {
        "x": (TensorProto.FLOAT, ["batch", "seq", 64]),
        "attention_mask": (TensorProto.INT64, ["batch", "seq"]),
    }
    weights = {"w": normal(64, 64)} | ({"flat": np.asarray([-1, 64])} if "flat" in order else {})
    model = model_of(tmp_path, nodes, weights, inputs)
    x = correlated(64, 96 * tokens).reshape(96, tokens, 64)
    mask = (np.arange(tokens) < np.random.default_rng(0).integers(1, tokens, (96, 1))).astype(np.int64)
    loud = np.where(mask[..., None] == 0, np.float32(100), x)
    name = "f" if "flat" in order else "t"
    quiet_one, loud_one = (
        readings(model.path, {name: 64}, data_of(x=each, attention_mask=mask), np.arange(4, 96, 5), lambda _: None)[
            name
        ]
        for each in (x, loud)
    )
    np.testing.assert_array_equal(quiet_one.grams, loud_one.grams)
    np.testing.assert_array_equal(quiet_one.held, loud_one.held)
    assert loud_one.every.max() == 100 > loud_one.held.max(), "beside, all rows judge"


@pytest.mark.parametrize("name", ["src_key_padding_mask", "padding_mask", "global_attention_mask", "mask"])
def test_a_mask_that_hides_nothing_leaves_no_token_out(tmp_path: Path, name: str) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"], name="layer")]
    inputs: Inputs = {"x": (TensorProto.FLOAT, ["batch", "seq", 64]), name: (TensorProto.INT64, ["batch", "seq"])}
    model = model_of(tmp_path, nodes, {"w": normal(64, 64)}, inputs)
    x = correlated(64, 256).reshape(64, 4, 64)
    files = [
        quantized(model, tmp_path / str(each), QuantizeInt4(data_of(x=x, **{name: np.tile(each, (64, 1))})))
        for each in ([0, 0, 0, 1], [1, 1, 1, 1])
    ]
    assert files[0].path.read_bytes() == files[1].path.read_bytes()


def padded(random: np.random.Generator, *, left: bool = False) -> tuple[Array, Array]:
    """Ids and their mask."""
    mask = (np.arange(12) < random.integers(3, 8, (80, 1))).astype(np.int64)
    mask = mask[:, ::-1].copy() if left else mask
    return np.where(mask == 1, random.integers(1, 50, mask.shape), 0), mask


def pooled(ids: str, mask: str, made: str) -> list[onnx.NodeProto]:
    """A table, a layer, and a sum over what the mask says counts."""
    return [
        node("Gather", ["table", ids], [f"{made}_rows"], name=f"{made} look"),
        node("MatMul", [f"{made}_rows", "w"], [f"{made}_h"], name=f"{made} layer"),
        node("Cast", [mask], [f"{made}_m"], name=f"{made} cast", to=TensorProto.FLOAT),
        node("Unsqueeze", [f"{made}_m", "last"], [f"{made}_c"], name=f"{made} column"),
        node("Mul", [f"{made}_h", f"{made}_c"], [f"{made}_k"], name=f"{made} kept"),
        node("ReduceSum", [f"{made}_k", "axis"], [made], name=f"{made} sum", keepdims=0),
    ]


WEIGHTS = {"table": normal(50, 64), "w": normal(64, 64), "last": np.asarray([2]), "axis": np.asarray([1])}


def counted_rows(model: OnnxModel, names: list[str], inputs: dict[str, Array]) -> dict[str, int]:
    """Rows that judge, of sixteen samples of twelve tokens."""
    data = data_of(**inputs)
    read = readings(model.path, dict.fromkeys(names, 64), data, np.arange(4, 80, 5), lambda _: None)
    return {name: len(each.held) for name, each in read.items()}


@pytest.mark.parametrize("batch", ["batch", 1])
def test_rows_that_were_turned_round_all_count(tmp_path: Path, batch: str | int) -> None:
    ids, mask = padded(np.random.default_rng(0))
    ends = {"first": np.asarray([-1]), "end": np.asarray([-100]), "step": np.asarray([-1])}
    turn = [
        node("Slice", [name, "first", "end", "axis", "step"], [f"turned_{name}"], name=f"turn {name}")
        for name in ("input_ids", "attention_mask")
    ]
    nodes = [
        *turn,
        *pooled("turned_input_ids", "turned_attention_mask", "y"),
        *pooled("input_ids", "attention_mask", "z"),
    ]
    kinds: Inputs = {name: (TensorProto.INT64, [batch, 12]) for name in ("input_ids", "attention_mask")}
    model = model_of(tmp_path, nodes, WEIGHTS | ends, kinds, ("y", "z"))
    counted = counted_rows(model, ["y_rows", "z_rows"], {"input_ids": ids, "attention_mask": mask})
    assert counted == {"y_rows": 16 * 12, "z_rows": mask[4::5].sum()}


def test_of_two_sequences_of_one_length_each_has_the_padding_of_its_own_mask(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    (ids, mask), (others, other_mask) = padded(random), padded(random, left=True)
    nodes = pooled("input_ids", "attention_mask", "y")
    nodes += pooled("decoder_input_ids", "decoder_attention_mask", "z")
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": others,
        "decoder_attention_mask": other_mask,
    }
    kinds: Inputs = {name: (TensorProto.INT64, ["batch", "seq"]) for name in inputs}
    model = model_of(tmp_path, nodes, WEIGHTS, kinds, ("y", "z"))
    assert counted_rows(model, ["y_rows", "z_rows"], inputs) == {
        "y_rows": mask[4::5].sum(),
        "z_rows": other_mask[4::5].sum(),
    }


def test_a_mask_in_torch_s_words_leaves_out_what_the_model_hides_by_it(tmp_path: Path) -> None:
    """Of `src_key_padding_mask`, 1 is what does not count."""
    ids, mask = padded(np.random.default_rng(0))
    nodes = [node("Sub", ["one", "src_key_padding_mask"], ["counts"], name="counts"), *pooled("ids", "counts", "y")]
    kinds: Inputs = {name: (TensorProto.INT64, ["batch", "seq"]) for name in ("ids", "src_key_padding_mask")}
    model = model_of(tmp_path, nodes, WEIGHTS | {"one": np.asarray([1])}, kinds, ("y",))
    assert counted_rows(model, ["y_rows"], {"ids": ids, "src_key_padding_mask": 1 - mask}) == {
        "y_rows": mask[4::5].sum()
    }
