"""From torch to ONNX to INT8: equal where it must be, and proven so at several batch sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import compress
from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.evaluate.compare import cosine_similarity
from compress.formats.checkpoint import load
from compress.model import OnnxModel, TorchModel, example_inputs, sample_inputs
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import IR_VERSION, OPSET, OnnxFromTorch
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import OnnxBackend, TorchBackend
from compress.runtime.measure import onnx_macs, onnx_params, torch_macs
from tests.families import FAMILIES, family
from tests.models import ZOO
from tests.unit.compress.formats.test_checkpoint import WRITERS, X
from tests.unit.compress.prune.test_prune_channels import loaded, quiet, wrapped


def exported(model: TorchModel, folder: Path) -> OnnxModel:
    folder.mkdir(exist_ok=True)
    given = OnnxFromTorch().run(model, folder, quiet).model
    assert isinstance(given, OnnxModel)
    return given


def folded(model: OnnxModel, folder: Path) -> OnnxModel:
    folder.mkdir(exist_ok=True)
    given = FoldOnnx().run(model, folder, quiet).model
    assert isinstance(given, OnnxModel)
    return given


def calibration(model: TorchModel | OnnxModel, folder: Path, count: int) -> Dataset:
    arrays = example_inputs(model.signature.inputs, {"batch": count}, seed=1)
    np.savez(folder / "calibration.npz", **arrays)  # type: ignore[arg-type]
    return Dataset.open(str(folder / "calibration.npz"), model.signature)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found + torch.randn_like(found)


class Counting(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        found: torch.Tensor = self.layer(x)
        return found + self.count


@pytest.mark.parametrize("kind", [Noisy, Counting])
def test_a_forward_whose_answers_are_others_each_time_is_told_so(kind: type[nn.Module], tmp_path: Path) -> None:
    specs = (TensorSpec.parse("x:float32[batch,4]"),)
    signature = Signature(specs, (TensorSpec.parse("y:float32[batch,3]"),))
    with pytest.raises(StageError, match="whose answers are others each time") as refused:
        exported(TorchModel(kind().eval(), signature, layered=False), tmp_path / "made")
    assert "draws random numbers, or writes into what it reads" in refused.value.why
    assert "self.training" in refused.value.mend


@pytest.mark.parametrize("name", ZOO)
def test_every_network_exports_with_its_names_a_dynamic_batch_and_its_answers(name: str, tmp_path: Path) -> None:
    model = loaded(name)
    result = exported(model, tmp_path)
    file = onnx.load(result.path)
    assert file.ir_version == IR_VERSION
    assert file.opset_import[0].version == OPSET
    assert [value.name for value in file.graph.input] == [spec.name for spec in model.signature.inputs]
    assert [value.name for value in file.graph.output] == [spec.name for spec in model.signature.outputs]
    assert list(tmp_path.iterdir()) == [result.path], "the weights are inside the file"
    inputs = example_inputs(model.signature.inputs, {"batch": 7}, seed=3)
    expected, got = TorchBackend(model, 1).infer(inputs), OnnxBackend(result, 1).infer(inputs)
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, atol=1e-4)


def fused(model: OnnxModel, path: Path) -> list[str]:
    """Kinds of the nodes that ONNX Runtime runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(path).graph.node]


def test_additions_before_a_layer_norm_are_kept_from_the_slow_fusion(tmp_path: Path) -> None:
    module, inputs = family("bert")
    model = exported(wrapped(module, *inputs), tmp_path / "onnx")
    kinds, answers = {}, {}
    for unfuse in (False, True):
        folder = tmp_path / str(unfuse)
        folder.mkdir()
        given = FoldOnnx(unfuse=unfuse).run(model, folder, quiet)
        assert isinstance(given.model, OnnxModel)
        assert (given.details["unfused"] > 0) == unfuse
        kinds[unfuse] = fused(given.model, folder / "optimized.onnx")
        answers[unfuse] = OnnxBackend(given.model, 1).infer(sample_inputs(model.signature, 2))
    assert "SkipLayerNormalization" in kinds[False], "if it is fused no more, the rewriting can go"
    assert "SkipLayerNormalization" not in kinds[True]
    for name, values in answers[False].items():
        np.testing.assert_allclose(answers[True][name], values, atol=1e-5)


@pytest.mark.parametrize("writer", ["TorchScript", "exported program"])
def test_files_without_layers_export_too(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    WRITERS[writer](path)
    told: dict[str, Any] = {"inputs": [X], "trust": True} if writer == "TorchScript" else {}
    model = load(path, **told)
    result = exported(model, tmp_path / "onnx")
    assert OnnxBackend(result, 1).infer({model.signature.inputs[0].name: np.zeros((6, 4), np.float32)})[
        "output"
    ].shape == (6, 3)


class ReshapesToTwo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1, 4).sum(0) if x.shape[0] == 2 else x


class BranchesOnBatchOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == 1 else x


@pytest.mark.parametrize("module", [ReshapesToTwo, BranchesOnBatchOne])
def test_a_batch_that_only_looks_dynamic_is_refused(module: type[nn.Module], tmp_path: Path) -> None:
    from compress.artifact import Signature, TensorSpec

    specs = (TensorSpec.parse("x:float32[batch,4]"),)
    model = TorchModel(module().eval(), Signature(specs, (TensorSpec.parse("output:float32[batch,4]"),)))
    with pytest.raises(StageError):
        exported(model, tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_macs_counted_in_the_file_are_those_counted_in_torch(name: str, tmp_path: Path) -> None:
    module, inputs = family(name)
    model = wrapped(module, *inputs)
    result = folded(exported(model, tmp_path / "onnx"), tmp_path / "folded")
    assert onnx_macs(result.path, model.signature) == torch_macs(model.module, model.signature)


def test_folding_drops_what_only_takes_room(tmp_path: Path) -> None:
    before = exported(loaded("residual"), tmp_path / "onnx")
    after = folded(before, tmp_path / "folded")
    assert after.path.stat().st_size < before.path.stat().st_size
    assert not any(node.doc_string or node.metadata_props for node in onnx.load(after.path).graph.node)
    assert {entry.domain for entry in onnx.load(after.path).opset_import} == {""}


@pytest.mark.parametrize(("name", "mode"), [("mlp", "dynamic"), ("residual", "dynamic"), ("residual", "weights")])
def test_int8_without_calibration_has_as_many_weights_as_before(name: str, mode: str, tmp_path: Path) -> None:
    before = folded(exported(loaded(name), tmp_path / "onnx"), tmp_path / "folded")
    (tmp_path / "int8").mkdir()
    given = QuantizeOnnx(mode).run(before, tmp_path / "int8", quiet)  # type: ignore[arg-type]
    assert isinstance(given.model, OnnxModel)
    assert onnx_params(given.model.path) == onnx_params(before.path)


@pytest.mark.parametrize("count", [16, 37])
def test_static_int8_is_small_close_and_per_channel_also_with_a_ragged_last_batch(tmp_path: Path, count: int) -> None:
    model = loaded("residual")
    before = folded(exported(model, tmp_path / "onnx"), tmp_path / "folded")
    stage = QuantizeOnnx("static", calibration(before, tmp_path, count))
    (tmp_path / "int8").mkdir()
    given = stage.run(before, tmp_path / "int8", quiet)
    assert isinstance(given.model, OnnxModel)
    assert given.details["layers"] == {"int8": 6, "float": 0}
    assert onnx_params(given.model.path) == onnx_params(before.path)
    graph = onnx.load(given.model.path).graph
    scales = {node.input[1] for node in graph.node if node.op_type == "DequantizeLinear"}
    assert any(len(t.dims) == 1 and t.dims[0] > 1 for t in graph.initializer if t.name in scales), "one scale a channel"
    inputs = example_inputs(model.signature.inputs, {"batch": 20}, seed=2)
    expected, got = OnnxBackend(before, 1).infer(inputs)["output"], OnnxBackend(given.model, 1).infer(inputs)["output"]
    assert cosine_similarity(expected, got).min() > 0.98


def test_dynamic_int8_needs_no_data(tmp_path: Path) -> None:
    before = folded(exported(loaded("mlp"), tmp_path / "onnx"), tmp_path / "folded")
    (tmp_path / "int8").mkdir()
    given = QuantizeOnnx("dynamic").run(before, tmp_path / "int8", quiet)
    assert given.details["layers"]["int8"] == 2


def test_static_int8_without_calibration_data_is_refused_before_any_work() -> None:
    with pytest.raises(RecipeError) as caught:
        QuantizeOnnx("static").check(loaded("mlp"))
    assert "--calibration" in caught.value.mend
    assert "--int8 dynamic" in caught.value.mend


def test_a_model_without_layers_to_quantize_is_an_error_not_a_float_model(tmp_path: Path) -> None:
    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x) * 2

    before = exported(wrapped(Doubles(), X), tmp_path / "onnx")
    (tmp_path / "int8").mkdir()
    with pytest.raises(StageError, match="nothing was quantized"):
        QuantizeOnnx("static", calibration(before, tmp_path, 8)).run(before, tmp_path / "int8", quiet)


def test_an_output_may_have_the_name_of_a_tensor_inside(tmp_path: Path) -> None:
    """The exporter calls what an embedding gives `embedding`, and does not see that the output is called so, too."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.linear = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, relu: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(torch.nn.functional.embedding(relu, self.words.weight).mean(1)))

    path = compress.save(Named(), tmp_path / "model.pt", inputs="relu:int64[batch,5]", outputs=["embedding"])
    given = OnnxFromTorch().run(compress.load(path), tmp_path, quiet)
    graph = onnx.load(given.model.path).graph  # type: ignore[union-attr]
    assert [value.name for value in (*graph.input, *graph.output)] == ["relu", "embedding"]
