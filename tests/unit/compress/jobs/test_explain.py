"""`compress explain` names the layer that lost, ranges that clip, channels that died, and exclusions that mend."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import compress
from compress.console.wording import AssumedWarning
from compress.errors import RecipeError, StageError
from compress.jobs.explain import Explanation, explain
from compress.jobs.export import Silent
from compress.options import ExplainOptions, ExportOptions
from compress.report.explain import exclusions_told
from compress.runtime.backends.onnxrt import is_emulated


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network in float and in INT8, with an outlier that coarsens the middle layer's weights, and its data."""
    folder = tmp_path_factory.mktemp("explain")
    torch.manual_seed(0)
    first, coarse = nn.Linear(8, 16), nn.Linear(16, 16)
    with torch.no_grad():
        first.weight.data[0], first.bias.data[0] = 0.0, 0.0
        coarse.weight.data[:, 0] = 40.0  # it reads a channel that is 0: only the other weights' step grows, to 0.3
    module = nn.Sequential(first, nn.ReLU(), coarse, nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    compress.save(module, folder / "model.pt", inputs="x:float32[batch,8]", outputs=["y"])
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=x)
    np.savez(folder / "narrow.npz", x=0.2 * x)
    compress.export(folder / "model.pt", ExportOptions(output=folder / "float"))
    return folder


def quantized(folder: Path, name: str, calibration: str = "data.npz", **asked: object) -> Path:
    options = ExportOptions(output=folder / name, int8="static", calibration=str(folder / calibration), **asked)  # type: ignore[arg-type]
    compress.export(folder / "model.pt", options)
    return folder / name


def explained(folder: Path, first: Path, second: Path) -> Explanation:
    return explain(first, second, ExplainOptions(data=str(folder / "data.npz")), Silent())


def changed(folder: Path, layer: int, edit: str) -> Path:
    """The float file with one layer's weights changed."""
    model = onnx.load(folder / "float" / "model.onnx")
    node = [node for node in model.graph.node if node.op_type == "Gemm"][layer]
    for tensor in model.graph.initializer:
        if tensor.name == node.input[1]:
            values = numpy_helper.to_array(tensor).copy()
            values += np.random.default_rng(1).normal(0, 0.3, values.shape).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values if edit == "noise" else 0 * values, tensor.name))
    path = folder / f"{edit}{layer}.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_the_layer_whose_weights_were_changed_has_the_whole_share(exported: Path, layer: int) -> None:
    graph = onnx.load(exported / "float" / "model.onnx").graph
    gemms = [node.name for node in graph.node if node.op_type == "Gemm"]

    found = explained(exported, exported / "float" / "model.onnx", changed(exported, layer, "noise"))

    assert found.layers[0].name == gemms[layer]
    assert found.layers[0].share == pytest.approx(1.0, abs=1e-6)
    first = next(tensor for tensor in found.tensors if tensor.snr_db is not None)
    assert first.name == graph.node[[node.name for node in graph.node].index(gemms[layer])].output[0]


def test_the_layer_that_int8_rounds_coarsely_comes_first_and_its_recipe_mends(exported: Path) -> None:
    found = explained(exported, exported / "model.pt", quantized(exported, "int8"))

    assert found.layers[0].share > 0.5, found.layers
    assert found.keep_float[0] == found.layers[0].name
    assert found.error is not None
    assert found.error_mended is not None
    assert found.error_mended < found.error / 2
    assert found.gone is not None
    assert found.gone.low is not None
    assert found.gone.samples == 32, "of 64, those that had no part in the choice"
    assert 0 < found.gone.low < found.gone.share

    again = explained(exported, exported / "model.pt", quantized(exported, "mended", keep_float=found.keep_float))
    assert again.error is not None
    assert again.error < found.error / 2
    assert not {layer.name for layer in again.layers} & set(found.keep_float)


class Decaying(nn.Module):
    """Exponentials of a column that a layer takes, too: no rule keeps them from 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rates = nn.Buffer(torch.exp(torch.linspace(0, -6, 16)))
        self.layer, self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 48), nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.exp(-(x[:, :1] * self.rates)) + 1e-5 * self.layer(x)
        return self.b(torch.relu(self.a(mixed)))  # type: ignore[no-any-return]


def test_an_export_that_keeps_the_nodes_is_as_good_as_was_promised(tmp_path: Path) -> None:
    compress.save(Decaying().eval(), tmp_path / "model.pt", inputs="x:float32[batch,8]", outputs=["y"])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 8)).astype(np.float32)
    x[:, 0] = rng.random(128) ** 3 * 5_000
    np.savez(tmp_path / "data.npz", x=x)
    found = explained(tmp_path, tmp_path / "model.pt", quantized(tmp_path, "int8"))
    assert found.keep_float
    assert found.error is not None
    assert found.error_mended is not None
    assert found.error_mended < 0.5 * found.error
    again = explained(tmp_path, tmp_path / "model.pt", quantized(tmp_path, "kept", keep_float=found.keep_float))
    assert again.error is not None
    assert again.error < 1.5 * found.error_mended


class Unlike(nn.Module):
    """An amount of thousands and two scores: all that there is to quantize loses the scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 48), nn.Linear(48, 3)
        with torch.no_grad():
            self.b.weight[0] *= 5_000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))  # type: ignore[no-any-return]


def test_where_nothing_but_all_layers_mends_it_int8_is_to_be_left_out(tmp_path: Path) -> None:
    """An export that keeps them all would have nothing to quantize, and say that they are the reason."""
    compress.save(Unlike().eval(), tmp_path / "model.pt", inputs="x:float32[batch,8]", outputs=["y"])
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32))
    found = explained(tmp_path, tmp_path / "model.pt", quantized(tmp_path, "int8"))
    assert found.emptied
    assert not found.keep_float
    assert set(found.tried) == {layer.name for layer in found.layers}
    assert exclusions_told(found).endswith("leave --int8 out of the export")
    with pytest.raises(StageError, match=r"of its 2 layers with weights, all are to stay in float \(--keep-float\)"):
        quantized(tmp_path, "kept", keep_float=found.tried)
    assert not (tmp_path / "kept").exists()


def test_a_file_in_bf16_is_explained_by_its_emulation(exported: Path) -> None:
    """ONNX Runtime has no kernels for it on a CPU; its rounding is 0.4% of a value at most."""
    options = ExportOptions(output=exported / "bf16", precision="bf16")
    compress.export(exported / "model.pt", options)
    assert is_emulated(exported / "bf16" / "model.onnx")
    for first in (exported / "model.pt", exported / "float" / "model.onnx"):
        with pytest.warns(AssumedWarning, match="BF16"):
            found = explained(exported, first, exported / "bf16")
        assert found.error is not None
        assert 1e-8 < found.error < 0.004**2 * 10
        assert found.layers, "each layer's weights are put back"
        ratios = [tensor.snr_db for tensor in found.tensors if tensor.snr_db is not None]
        assert ratios, "tensors inside are compared, too"
        assert 30 < min(ratios) < 70, "in dB"


def test_ranges_of_too_small_data_clip_with_their_share(exported: Path) -> None:
    whole = explained(exported, exported / "model.pt", quantized(exported, "whole"))
    narrow = explained(exported, exported / "model.pt", quantized(exported, "narrow", "narrow.npz"))

    x = np.load(exported / "data.npz")["x"]
    clipped = next(each for each in narrow.ranges if each.tensor == "x")
    step = (clipped.high - clipped.low) / 255
    beyond = (x < clipped.low - step / 2) | (x > clipped.high + step / 2)
    assert clipped.clipped == pytest.approx(beyond.mean())
    assert clipped.clipped > 0.1
    assert "x" not in {each.tensor for each in whole.ranges}
    assert {"relu", "relu_1", "relu_2", "y"} <= {tensor.name for tensor in whole.tensors}


def test_channels_that_died_are_found_and_those_dead_before_are_not(exported: Path) -> None:
    graph = onnx.load(exported / "float" / "model.onnx").graph
    gemm = next(node for node in graph.node if node.op_type == "Gemm")

    found = explained(exported, exported / "float" / "model.onnx", changed(exported, 0, "zero"))

    dead = {tensor.name: tensor.dead_channels for tensor in found.tensors}
    assert dead[gemm.output[0]] == tuple(range(1, 16))


def test_an_artifact_stands_for_its_file_as_the_original_too(exported: Path) -> None:
    second = quantized(exported, "of_artifact")
    found, same = (explained(exported, exported / "float" / name, second) for name in ("", "model.onnx"))
    assert found == same
    assert found.layers


def test_a_file_of_other_inputs_is_refused(exported: Path, tmp_path: Path) -> None:
    compress.save(nn.Linear(8, 4), tmp_path / "other.pt", inputs="z:float32[batch,8]", outputs=["y"])

    with pytest.raises(RecipeError, match="other inputs"):
        explained(exported, tmp_path / "other.pt", exported / "float")


def test_a_file_of_other_outputs_is_refused_with_both(exported: Path, tmp_path: Path) -> None:
    compress.save(nn.Linear(8, 4), tmp_path / "other.pt", inputs="x:float32[batch,8]", outputs=["z"])

    with pytest.raises(RecipeError, match=r"→ y:float32.* beside .*→ z:float32"):
        explained(exported, tmp_path / "other.pt", exported / "float")


def test_a_name_that_is_no_node_is_refused(exported: Path) -> None:
    with pytest.raises(RecipeError, match="no node of that name"):
        quantized(exported, "none", keep_float=("nowhere",))


def test_layers_of_a_pruned_file_that_do_not_fit_are_named(exported: Path) -> None:
    artifact = quantized(exported, "pruned", prune=0.5, repair=False)

    found = explained(exported, exported / "model.pt", artifact)

    assert found.error
    assert "node_linear_1" in found.unmatched
    assert "before" in found.unmatched["relu"]


def test_weights_in_another_scale_are_not_put_back(exported: Path) -> None:
    artifact = quantized(exported, "scaled")
    model = onnx.load(artifact / "model.onnx")
    gemm = next(node for node in model.graph.node if node.op_type == "Gemm")
    restored = next(node for node in model.graph.node if gemm.input[1] in node.output)
    for tensor in model.graph.initializer:
        if tensor.name == restored.input[1]:
            tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, exported / "scaled.onnx")

    found = explained(exported, exported / "model.pt", exported / "scaled.onnx")

    assert "not the original's" in found.unmatched[gemm.name]
    assert gemm.name not in {layer.name for layer in found.layers}


def test_what_the_original_does_not_round_is_named_not_guessed(exported: Path) -> None:
    artifact = quantized(exported, "foreign")
    model = onnx.load(artifact / "model.onnx")
    link = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    model.graph.node.insert(0, onnx.helper.make_node("Mul", [link.input[0], link.input[1]], ["evened"], name="even"))
    restored = next(node for node in model.graph.node if link.output[0] in node.input)
    readers = [node for node in model.graph.node if restored.output[0] in node.input]
    link.input[0] = "evened"
    for node in readers:
        node.input[:] = ["evened_back" if name == restored.output[0] else name for name in node.input]
    restored.output[0] = "evened_back"
    onnx.save(model, exported / "foreign.onnx")

    found = explained(exported, exported / "model.pt", exported / "foreign.onnx")

    assert "does not have" in found.unmatched["layers"]
    assert not found.layers


def written(path: Path, nodes: list[onnx.NodeProto], weights: dict[str, object]) -> Path:
    """A file from x [batch, 4] to y."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 4])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 4])
    kept = [numpy_helper.from_array(np.asarray(values, np.float32), name) for name, values in weights.items()]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], kept)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def two(folder: Path, nodes: list[onnx.NodeProto], changed: object, **weights: object) -> Explanation:
    """What is told of a file beside the same with another weight w; 40 samples, which are batches of 32 and 8."""
    first = written(folder / "first.onnx", nodes, {"w": 2 * np.eye(4), **weights})
    second = written(folder / "second.onnx", nodes, {"w": changed, **weights})
    np.savez(folder / "data.npz", x=np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32))
    return explain(first, second, ExplainOptions(data=str(folder / "data.npz"), samples=40), Silent())


node = onnx.helper.make_node


def test_tensors_that_samples_do_not_lead_are_compared_whatever_the_batch(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "a"), node("Transpose", ["a"], ["turned"], "turn"),
        node("Transpose", ["turned"], ["y"], "back"),
    ]  # fmt: skip

    found = two(tmp_path, nodes, 2.2 * np.eye(4))

    assert {tensor.name: round(tensor.snr_db or 0, 3) for tensor in found.tensors} == {"a": 20, "turned": 20, "y": 20}


def test_a_mask_is_left_out_of_signal_and_noise_where_both_have_it(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "a"), node("Add", ["a", "mask"], ["masked"], "mask"),
        node("Softmax", ["masked"], ["y"], "y"),
    ]  # fmt: skip

    found = two(tmp_path, nodes, 2.2 * np.eye(4), mask=[0, 0, 0, -np.inf])

    decibels = {tensor.name: tensor.snr_db for tensor in found.tensors}
    assert decibels["masked"] == pytest.approx(20, abs=0.01)
    assert found.not_finite == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_outputs_that_are_not_finite_are_said_to_be_and_give_no_figures(tmp_path: Path, value: float) -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"], "a"), node("Relu", ["a"], ["y"], "y")]

    found = two(tmp_path, nodes, np.diag([2, 2, 2, value]))

    assert found.not_finite > 0
    assert found.error is None
    assert found.layers == ()
    assert "NaN or infinities" in found.unmatched["a"]
    json.dumps(found.to_dict(), allow_nan=False)


def test_scales_of_channels_that_are_gone_in_the_outputs_are_no_noise(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "a"), node("Relu", ["a"], ["r"], "r"),
        node("MatMul", ["r", "v"], ["y"], "b"),
    ]  # fmt: skip
    scales, noise = np.diag([0.1, 1, 3, 8]), 0.01 * np.ones((4, 4))
    first = written(tmp_path / "first.onnx", nodes, {"w": np.eye(4), "v": np.eye(4)})
    second = written(
        tmp_path / "second.onnx", nodes, {"w": np.eye(4) @ scales + noise @ scales, "v": np.linalg.inv(scales)}
    )
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32))

    found = explain(first, second, ExplainOptions(data=str(tmp_path / "data.npz")), Silent())

    tensors = {tensor.name: tensor for tensor in found.tensors}
    assert {name for name, tensor in tensors.items() if tensor.rescaled} == {"a", "r"}
    assert tensors["y"].snr_db is not None
    assert tensors["a"].snr_db is not None
    assert 30 < tensors["a"].snr_db < 40, "0.01 beside 1, in each of four products"
    assert 30 < tensors["y"].snr_db < 40


def test_a_pruned_file_whose_layers_have_other_names_is_said_to_have_none_to_put_back(tmp_path: Path) -> None:
    first = [node("MatMul", ["x", "w"], ["a"], "one"), node("MatMul", ["a", "v"], ["y"], "two")]
    second = [node("MatMul", ["x", "w"], ["b"], "other"), node("MatMul", ["b", "v"], ["y"], "last")]
    rng = np.random.default_rng(0)
    before = written(tmp_path / "a.onnx", first, {"w": rng.normal(size=(4, 8)), "v": rng.normal(size=(8, 4))})
    after = written(tmp_path / "b.onnx", second, {"w": rng.normal(size=(4, 6)), "v": rng.normal(size=(6, 4))})
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(40, 4)).astype(np.float32))

    found = explain(before, after, ExplainOptions(data=str(tmp_path / "data.npz")), Silent())

    assert "pruned" in found.unmatched["layers"]
    assert "none can be put back" in found.unmatched["layers"]


def test_layers_and_tables_of_4_bits_are_put_back_one_by_one(tmp_path: Path) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.first, self.last = nn.Embedding(40, 64), nn.Linear(64, 64), nn.Linear(64, 64)
            self.conv = nn.Conv1d(64, 16, 3, padding=1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.last(self.first(self.table(ids)).relu())
            return self.conv(hidden.transpose(1, 2))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module = Network().eval()
    with torch.no_grad():
        module.first.weight[:, ::32] *= 40  # the others of each block have few levels left
    compress.save(module, tmp_path / "model.pt", inputs="ids:int64[batch,6]", outputs=["y"])
    np.savez(tmp_path / "data.npz", ids=np.random.default_rng(0).integers(0, 40, (64, 6)))
    compress.export(tmp_path / "model.pt", ExportOptions(output=tmp_path / "few", int4="weights"))
    found = explained(tmp_path, tmp_path / "model.pt", tmp_path / "few")
    kinds = sorted(layer.kind for layer in found.layers)
    assert kinds == ["Conv", "Gather", "MatMul", "MatMul"], found.unmatched
    assert "the other has no such tensor" not in found.unmatched.values(), "an operator of another kind gives it now"
    assert found.layers[0].kind == "MatMul"
    assert found.layers[0].share > 0.3
    assert found.searched
    kept = ExportOptions(
        output=tmp_path / "kept", int4="weights", keep_float=tuple(each.name for each in found.layers[:1])
    )
    compress.export(tmp_path / "model.pt", kept)
    again = explained(tmp_path, tmp_path / "model.pt", tmp_path / "kept")
    assert len(again.layers) == 3


class Cutting(nn.Module):
    """Layers whose Relu and Clip an INT8 file has in the ranges of what they take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 32, 3), nn.Conv2d(32, 32, 3)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.clamp(self.last(self.first(x).relu()), -0.1, 0.1)
        return self.head(hidden.mean((2, 3))).relu()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file with names of its own, a pruned INT8 file of it by the same data that it is explained on."""
    folder = tmp_path_factory.mktemp("cutting")
    torch.manual_seed(0)
    compress.save(Cutting().eval(), folder / "model.pt", inputs="x:float32[batch,2,9,9]", outputs=["y"])
    np.savez(folder / "data.npz", x=np.random.default_rng(0).normal(size=(64, 2, 9, 9)).astype(np.float32))
    compress.export(folder / "model.pt", ExportOptions(output=folder / "float"))
    model = onnx.load(folder / "float" / "model.onnx")
    for each in model.graph.node:
        each.name = f"their_{each.name}"
        each.input[:] = [name if name in ("x", "") else f"their_{name}" for name in each.input]
        each.output[:] = [name if name == "y" else f"their_{name}" for name in each.output]
    for tensor in model.graph.initializer:
        tensor.name = f"their_{tensor.name}"
    del model.graph.value_info[:]
    onnx.save(model, folder / "theirs.onnx")
    asked = ExportOptions(output=folder / "int8", int8="static", calibration=str(folder / "data.npz"), prune=0.5)
    compress.export(folder / "theirs.onnx", asked)
    return folder


def test_a_relu_or_clip_in_a_range_is_no_clipping_whatever_its_tensor_is_called(renamed: Path) -> None:
    graph = onnx.load(renamed / "int8" / "model.onnx").graph
    assert not {"Relu", "Clip"} & {each.op_type for each in graph.node}

    found = explained(renamed, renamed / "theirs.onnx", renamed / "int8")

    assert max((each.clipped for each in found.ranges), default=0) < 0.01, found.ranges


def test_of_anothers_file_what_a_relu_may_cut_is_left_out_and_said(renamed: Path) -> None:
    model = onnx.load(renamed / "int8" / "model.onnx")
    del model.metadata_props[:]
    onnx.save(model, renamed / "others.onnx")

    found = explained(renamed, renamed / "theirs.onnx", renamed / "others.onnx")

    assert any("may be cut on purpose" in why for why in found.unmatched.values()), found.unmatched
    assert not {each.tensor for each in found.ranges if each.low == 0}
