"""Half precision where the numbers allow it, and FP32 where they don't."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from compress.artifact import Signature
from compress.data.dataset import Dataset
from compress.model import OnnxModel, example_inputs
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.quantize.half.graph import ELEMENT, convert
from compress.quantize.half.half_onnx import HalfOnnx
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import OnnxBackend
from tests.families import family
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped

EXPORTED: dict[str, tuple[bytes, Signature]] = {}


def exported(module: nn.Module, inputs: tuple[str, ...], folder: Path) -> OnnxModel:
    """A module as a folded ONNX file; the export, which takes seconds, is done once for each in a test process."""
    for name in ("torch", "fold", "next"):
        (folder / name).mkdir()
    digest = hashlib.sha256(f"{type(module).__qualname__} {module} {inputs}".encode())
    for key, tensor in module.state_dict().items():
        digest.update(key.encode() + tensor.detach().numpy().tobytes())
    which = digest.hexdigest()
    if which not in EXPORTED:
        given = OnnxFromTorch().run(wrapped(module, *inputs), folder / "torch", quiet).model
        assert isinstance(given, OnnxModel)
        folded = FoldOnnx().run(given, folder / "fold", quiet).model
        assert isinstance(folded, OnnxModel)
        EXPORTED[which] = folded.path.read_bytes(), folded.signature
    data, signature = EXPORTED[which]
    path = folder / "fold/model.onnx"
    path.write_bytes(data)
    return OnnxModel(path, signature)


def random_data(model: OnnxModel, count: int = 8) -> Dataset:
    return Dataset("", example_inputs(model.signature.inputs, {"batch": count, "seq": 7}, seed=3), None, "data")


@pytest.mark.parametrize("name", ["residual", "unet", "convnext", "bert", "vit", "lstm", "inverted", "two_towers"])
def test_a_family_in_fp16_answers_nearly_the_same(name: str, tmp_path: Path) -> None:
    module, inputs = family(name)
    model = exported(module, inputs, tmp_path)
    given = HalfOnnx("fp16", random_data(model)).run(model, tmp_path / "next", quiet)
    assert given.details["cosine"] > 0.9999
    assert given.details["precision"]["fp16"] > 0
    assert given.model.path.stat().st_size < 0.75 * model.path.stat().st_size + 4000  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["residual", "bert"])
def test_the_inputs_and_outputs_stay_float32(name: str, tmp_path: Path) -> None:
    module, inputs = family(name)
    model = exported(module, inputs, tmp_path)
    given = HalfOnnx("fp16", random_data(model)).run(model, tmp_path / "next", quiet)
    graph = onnx.load(given.model.path).graph  # type: ignore[union-attr]
    kinds = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert onnx.TensorProto.FLOAT16 not in kinds


class Large(nn.Module):
    """Its middle layer gives values beyond 65,504, which the last brings back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.middle.weight.mul_(1e6)
            self.last.weight.mul_(1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))  # type: ignore[no-any-return]


def test_a_layer_that_would_overflow_stays_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = exported(Large(), ("x:float32[batch,8]",), tmp_path)
    data = random_data(model)
    given = HalfOnnx("fp16", data).run(model, tmp_path / "next", quiet)
    assert given.details["cosine"] > 0.9999
    assert any("reaches" in reason for reason in given.details["kept_float32"].values())
    careless = onnx.load(model.path)
    convert(careless, ELEMENT["fp16"], set())
    path = tmp_path / "careless.onnx"
    onnx.save(careless, path)
    wrong = OnnxBackend(OnnxModel(path, model.signature), 1).infer(data.inputs)["output"]
    right = OnnxBackend(model, 1).infer(data.inputs)["output"]
    assert not np.allclose(wrong, right, rtol=0.1), "without the guard it is another answer"


@pytest.mark.parametrize("name", ["residual", "unet", "convnext", "bert", "vit", "lstm", "inverted", "two_towers"])
def test_a_family_in_bf16_is_emulated_and_says_so(name: str, tmp_path: Path) -> None:
    module, inputs = family(name)
    model = exported(module, inputs, tmp_path)
    given = HalfOnnx("bf16", random_data(model)).run(model, tmp_path / "next", quiet)
    assert 0.999 < given.details["cosine"] < 1, "nearly the same, but not float32"
    assert "emulated" in given.warnings[-1]
    assert "can't open the file" in given.warnings[-1]
    assert "speed" not in given.warnings[-1], "what serves the file is not known here"
    assert (name in ("residual", "unet", "convnext", "vit", "lstm", "inverted", "two_towers")) == (
        len(given.warnings) == 2
    )
    assert given.details["precision"]["bf16"] > 0
    assert isinstance(given.model, OnnxModel)
    onnx.checker.check_model(onnx.load(given.model.path), full_check=True)
    assert OnnxBackend(given.model, 1).emulated
    with pytest.raises(Exception, match="Could not find an implementation"):  # if it loads, emulate no longer
        ort.InferenceSession(given.model.path, providers=["CPUExecutionProvider"])


def test_emulated_bf16_answers_as_torch_in_bf16_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model = exported(module, ("x:float32[batch,16]",), tmp_path)
    data = random_data(model, 64)
    given = HalfOnnx("bf16", data).run(model, tmp_path / "next", quiet)
    assert isinstance(given.model, OnnxModel)
    got = next(iter(OnnxBackend(given.model, 1).infer(data.inputs).values()))
    with torch.no_grad():
        expected = module.bfloat16()(torch.from_numpy(data.inputs["x"]).bfloat16())
    assert np.array_equal(got, torch.from_numpy(got).bfloat16().float().numpy()), "BF16 holds every answer"
    same = got == expected.float().numpy()
    assert same.mean() > 0.95, "sums in another order may round otherwise"
    assert np.allclose(got, expected.float().numpy(), rtol=2**-6, atol=2**-8)


def test_bf16_weights_are_the_nearest(tmp_path: Path) -> None:
    module, inputs = family("mlp")
    model = exported(module, inputs, tmp_path)
    given = HalfOnnx("bf16").run(model, tmp_path / "next", quiet)
    before = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(model.path).graph.initializer}
    for tensor in onnx.load(given.model.path).graph.initializer:  # type: ignore[union-attr]
        if tensor.data_type == onnx.TensorProto.BFLOAT16:
            values = (np.frombuffer(tensor.raw_data, "<u2").astype(np.uint32) << 16).view(np.float32)
            want = torch.from_numpy(before[tensor.name.removesuffix("_half")].ravel().copy()).bfloat16().float().numpy()
            assert np.array_equal(values, want)


def test_what_is_int8_stays_so(tmp_path: Path) -> None:
    module, inputs = family("residual")
    model = exported(module, inputs, tmp_path)
    data = random_data(model, 32)
    (tmp_path / "int8").mkdir()
    names = [node.name for node in onnx.load(model.path).graph.node if node.op_type == "Conv"]
    quantize = QuantizeOnnx("static", data, target="tensorrt", exclude=tuple(names[:2]))
    int8 = quantize.run(model, tmp_path / "int8", quiet)
    assert isinstance(int8.model, OnnxModel)
    given = HalfOnnx("fp16", data, "cuda").run(int8.model, tmp_path / "next", quiet)
    assert given.details["cosine"] > 0.999
    reasons = given.details["kept_float32"].values()
    assert "runs in INT8" in reasons
    assert given.details["precision"]["fp16"] >= 1


def test_without_calibration_a_warning_says_what_was_looked_at(tmp_path: Path) -> None:
    module, inputs = family("mlp")
    given = HalfOnnx("fp16").run(exported(module, inputs, tmp_path), tmp_path / "next", quiet)
    assert "random inputs" in given.warnings[0]
