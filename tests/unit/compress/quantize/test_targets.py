"""INT8 for each target, of every family; and which layers stay in float."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from compress.data.dataset import Dataset
from compress.errors import BudgetError, RecipeError, StageError
from compress.evaluate.metrics import METRICS
from compress.model import OnnxModel, TorchModel, sample_inputs
from compress.quantize.int8_onnx import dynamic
from compress.quantize.precision import LAYERS
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.quantize_within import QuantizeWithin
from compress.runtime.backends import OnnxBackend
from tests.families import family
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped
from tests.unit.compress.quantize.test_half_onnx import exported, random_data

STATIC = ("residual", "depthwise", "unet", "convnext", "bert", "vit", "lstm", "inverted", "two_towers", "grouped")


def layer_names(path: Path) -> list[str]:
    """The nodes of a float file that have weights."""
    graph = onnx.load(path, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type in LAYERS and node.input[1] in weights]


def cosine(a: OnnxModel, b: OnnxModel, data: Dataset) -> float:
    one, two = (OnnxBackend(model, 1).infer(data.inputs) for model in (a, b))
    x, y = (np.concatenate([v.reshape(len(v), -1) for v in outputs.values()], 1) for outputs in (one, two))
    return float(((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)).min())


@pytest.mark.parametrize("target", ["cpu", "tensorrt"])
@pytest.mark.parametrize("name", STATIC)
def test_a_family_in_static_int8_answers_nearly_the_same(name: str, target: str, tmp_path: Path) -> None:
    module, inputs = family(name)
    model = exported(module, inputs, tmp_path)
    data = random_data(model, 32)
    given = QuantizeOnnx("static", data, target=target).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    assert isinstance(given.model, OnnxModel)
    assert given.details["layers"]["int8"] > 0
    assert cosine(model, given.model, data) > 0.97
    if target == "tensorrt":
        assert zero_points(given.model.path) == {0}


@pytest.mark.parametrize("target", ["cpu", "tensorrt", "cuda"])
def test_a_transposed_convolution_in_groups_is_quantized_with_its_bias(target: str, tmp_path: Path) -> None:
    """Its weight has no axis of all output channels, which its bias has."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, 2, groups=2))
    model = exported(module.eval(), ("image:float32[batch,3,6,6]",), tmp_path)
    data = random_data(model, 32)
    given = QuantizeOnnx("static", data, target=target).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    assert isinstance(given.model, OnnxModel)
    assert given.details["layers"]["int8"] == 2
    assert cosine(model, given.model, data) > 0.99


def test_a_mask_of_minus_10000_does_not_ruin_attention(tmp_path: Path) -> None:
    """Added to the scores, it would leave them a single step of 8 bits."""
    module, inputs = family("bert")
    model = exported(module, inputs, tmp_path)
    data = random_data(model, 64)
    assert (data.inputs["mask"] == 0).any()
    given = QuantizeOnnx("static", data).run(model, tmp_path / "next", quiet)
    assert cosine(model, given.model, data) > 0.99  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_what_a_product_of_a_transformer_gives_is_not_rounded(name: str, tmp_path: Path) -> None:
    module, inputs = family(name)
    model = exported(module, inputs, tmp_path)
    given = QuantizeOnnx("static", random_data(model, 16)).run(model, tmp_path / "next", quiet)
    graph = onnx.load(given.model.path).graph  # type: ignore[union-attr]
    made = {node.output[0] for node in graph.node if node.op_type in ("MatMul", "Gemm")}
    rounded = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
    assert given.details["layers"]["int8"] > 1
    assert not made & rounded


def zero_points(path: Path) -> set[int]:
    """All zero-points of a file; one that is not written is 0."""
    graph = onnx.load(path).graph
    tensors = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    found = {0}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) > 2:
            found |= set(np.unique(tensors[node.input[2]]).tolist())
    return found


def test_for_tensorrt_no_bias_is_quantized_and_activations_are_signed(tmp_path: Path) -> None:
    module, inputs = family("residual")
    model = exported(module, inputs, tmp_path)
    given = QuantizeOnnx("static", random_data(model, 16), target="tensorrt").run(model, tmp_path / "next", quiet)
    graph = onnx.load(given.model.path).graph  # type: ignore[union-attr]
    kinds = {t.data_type for t in graph.initializer}
    assert onnx.TensorProto.INT8 in kinds
    assert not kinds & {onnx.TensorProto.INT32, onnx.TensorProto.UINT8}


@pytest.mark.parametrize("name", ["residual", "unet", "bert", "gqa", "convnext", "inverted", "mlp"])
def test_weights_alone_in_int8_shrink_the_file(name: str, tmp_path: Path) -> None:
    module, inputs = family(name)
    if name == "mlp":
        module, inputs = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), ("x:float32[batch,64]",)
    model = exported(module.eval(), inputs, tmp_path)
    given = QuantizeOnnx("weights").run(model, tmp_path / "next", quiet)
    assert isinstance(given.model, OnnxModel)
    assert cosine(model, given.model, random_data(model)) > 0.999
    weights = sum(int(np.prod(t.dims)) for t in onnx.load(model.path).graph.initializer)
    saved = model.path.stat().st_size - given.model.path.stat().st_size
    assert saved > 0.4 * 3 * weights, "most of what 8 bits save of 32"


def test_an_embedding_in_int8_restores_only_the_rows_looked_up(tmp_path: Path) -> None:
    module, inputs = family("bert")
    model = exported(module, inputs, tmp_path)
    given = QuantizeOnnx("weights").run(model, tmp_path / "next", quiet)
    graph = onnx.load(given.model.path).graph  # type: ignore[union-attr]
    tables = [t.name for t in graph.initializer if list(t.dims) == [50, 32]]
    assert tables
    assert all(node.op_type == "Gather" for node in graph.node if set(node.input) & set(tables))


def test_a_weight_that_two_layers_share_is_stored_once(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.relu(self.layer(x)))  # type: ignore[no-any-return]

    model = exported(Twice(), ("x:float32[batch,64]",), tmp_path)
    given = QuantizeOnnx("weights").run(model, tmp_path / "next", quiet)
    assert given.model.path.stat().st_size < 64 * 64 * 1.6  # type: ignore[union-attr]
    assert cosine(model, given.model, random_data(model)) > 0.999  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert", "vit", "two_towers"])
def test_dynamic_int8_needs_no_data(name: str, tmp_path: Path) -> None:
    module, inputs = family(name)
    model = exported(module, inputs, tmp_path)
    given = QuantizeOnnx("dynamic").run(model, tmp_path / "next", quiet)
    assert given.details["layers"]["int8"] > 0
    assert cosine(model, given.model, random_data(model)) > 0.97  # type: ignore[arg-type]


def test_dynamic_int8_is_for_the_cpu() -> None:
    module, inputs = family("bert")
    with pytest.raises(RecipeError, match="dynamically for tensorrt"):
        QuantizeOnnx("dynamic", target="tensorrt").check(wrapped(module, *inputs))


def test_layers_that_stay_in_float_are_named_with_the_reason(tmp_path: Path) -> None:
    module, inputs = family("lstm")
    model = exported(module, inputs, tmp_path)
    first = layer_names(model.path)[0]
    given = QuantizeOnnx("static", random_data(model, 16), exclude=(first,)).run(model, tmp_path / "next", quiet)
    reasons = given.details["layers_float"]
    assert reasons[first] == "left in float on purpose"
    assert len(given.details["layers_weights_only"]) == 1, "the recurrent layer"


def test_a_model_without_such_layers_is_an_error(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x) * 2

    model = exported(Plain(), ("x:float32[batch,4]",), tmp_path)
    with pytest.raises(StageError, match="nothing was quantized"):
        QuantizeOnnx("weights").run(model, tmp_path / "next", quiet)


@pytest.mark.parametrize("mode", ["static", "dynamic", "weights"])
def test_weights_in_float64_are_named_where_none_is_quantized(mode: Any, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)).double()
    model = exported(network, ("x:float64[batch,4]",), tmp_path)
    with pytest.raises(StageError, match="nothing was quantized") as caught:
        QuantizeOnnx(mode, random_data(model, 16)).run(model, tmp_path / "next", quiet)
    assert "float64" in caught.value.why


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchModel, OnnxModel, Dataset, Dataset]:
    return fragile_by(2000, tmp_path_factory.mktemp("fragile"))


def fragile_by(factor: float, folder: Path) -> tuple[TorchModel, OnnxModel, Dataset, Dataset]:
    """A network of which one hidden unit is so many times larger, and hardly read: with its export and its data."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        module.get_parameter("0.weight")[0] *= factor
        module.get_parameter("2.weight")[:, 0] /= factor
    model = exported(module, ("x:float32[batch,16]",), folder)
    inputs = sample_inputs(model.signature, 600, seed=5)
    original = wrapped(module, "x:float32[batch,16]")
    labels = module(torch.from_numpy(inputs["x"])).argmax(1).numpy()
    return original, model, Dataset("", inputs, labels, "eval"), random_data(model, 64)


def test_the_layer_that_costs_most_goes_back_to_float(
    fragile: tuple[TorchModel, OnnxModel, Dataset, Dataset], tmp_path: Path
) -> None:
    original, model, data, calibration = fragile
    stage = QuantizeWithin(QuantizeOnnx("static", calibration), original, data, METRICS["top1"], max_drop=3.0)
    given = stage.run(model, tmp_path, quiet)
    assert given.details["drop_all_int8"] > 3.0
    assert given.details["drop"] <= 3.0
    assert set(given.details["put_back"]) == set(layer_names(model.path)[:2]), "what makes it and what reads it"
    first = max(given.details["sensitivity"], key=given.details["sensitivity"].get)
    assert given.details["put_back"][first]["bytes"] == 3 * 32 * 32
    assert given.details["layers_float"][first] == "left in float on purpose"
    assert given.details["layers"] == {"int8": 1, "float": 2}


def test_what_answers_always_the_same_is_inside_no_limit(
    fragile: tuple[TorchModel, OnnxModel, Dataset, Dataset], tmp_path: Path
) -> None:
    original, model, data, calibration = fragile
    stage = QuantizeWithin(QuantizeOnnx("static", calibration), original, data, METRICS["top1"], max_drop=90.0)
    given = stage.run(model, tmp_path, quiet)
    most = np.bincount(np.asarray(data.labels)).max() / len(data)
    assert given.details["drop_all_int8"] == pytest.approx(100 * (1 - most)), "what a network has that looks at nothing"
    assert given.details["drop"] < 10
    assert given.details["put_back"]


def test_what_is_inside_the_limit_stays_in_int8(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    original, model, data, calibration = fragile_by(30, tmp_path / "model")
    stage = QuantizeWithin(QuantizeOnnx("static", calibration), original, data, METRICS["top1"], max_drop=90.0)
    given = stage.run(model, tmp_path, quiet)
    assert given.details["put_back"] == {}
    assert given.details["layers"]["float"] == 0


def test_a_limit_that_no_mixture_keeps_says_how_close_it_came(
    fragile: tuple[TorchModel, OnnxModel, Dataset, Dataset], tmp_path: Path
) -> None:
    original, model, data, calibration = fragile
    stage = QuantizeWithin(QuantizeOnnx("static", calibration), original, data, METRICS["top1"], max_drop=-1.0)
    with pytest.raises(BudgetError) as caught:
        stage.run(model, tmp_path, quiet)
    assert "that of the float model before it is 0 points" in caught.value.why
    assert caught.value.exit_code == 3


def test_what_a_file_says_of_a_weights_shape_does_not_hinder_dynamic_int8() -> None:
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((3, 8)).astype(np.float32), "weight")
    node = helper.make_node("Gemm", ["x", "weight"], ["y"], name="gemm", transB=1)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 8), ("y", 3))]
    said = [helper.make_tensor_value_info("weight", TensorProto.FLOAT, [3, 8])]
    graph = helper.make_graph([node], "head", ends[:1], ends[1:], [weight], value_info=said)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    given = dynamic(model, [], reduce_range=False)
    assert "MatMulInteger" in {node.op_type for node in given.graph.node}
