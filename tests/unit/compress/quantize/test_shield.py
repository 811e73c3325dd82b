"""What stays in float inside an INT8 file is computed in float by ONNX Runtime as anybody opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import nn

import compress
from compress.jobs.explain import explain
from compress.jobs.export import Silent
from compress.options import ExplainOptions, ExportOptions
from compress.quantize.shield import shield, unshield

WIDTH, LAYERS = 8, 4


class Chain(nn.Module):
    """Layers of one kind, one of which has an outlier among its weights, where its input has nothing to say."""

    def __init__(self, kind: str, coarse: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        makes: dict[str, Any] = {
            "Conv": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            "ConvTranspose": lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 3, padding=1),
            "Gemm": lambda: nn.Linear(WIDTH, WIDTH),
        }
        layers: list[Any] = [makes[kind]() for _ in range(LAYERS)]
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        self.mean = kind != "Gemm"
        weight, before = layers[coarse].weight, layers[coarse - 1]
        with torch.no_grad():
            silent = before.weight[0] if kind != "ConvTranspose" else before.weight[:, 0]
            silent.zero_()
            before.bias[0] = 1e-4
            outlier = weight[0] if kind == "ConvTranspose" else weight[:, 0]
            outlier.copy_(60.0 * outlier.sign())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return x.mean((2, 3)) if self.mean else x


@pytest.fixture(scope="module", params=["Conv", "ConvTranspose", "Gemm"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network in float, and its data."""
    folder = tmp_path_factory.mktemp("shield")
    shape = (WIDTH,) if request.param == "Gemm" else (WIDTH, 8, 8)
    random = np.random.default_rng(0)
    # Samples that differ as a whole, or the answers hardly would: INT8 might be no better than one answer for all.
    x = random.normal(size=(2048, *shape)) + 6 * random.normal(size=(2048, WIDTH, *[1] * (len(shape) - 1)))
    np.savez(folder / "data.npz", x=x.astype(np.float32))
    spec = f"x:float32[batch,{','.join(map(str, shape))}]"
    compress.save(Chain(request.param, coarse=2).eval(), folder / "model.pt", inputs=spec, outputs=["y"])
    compress.export(folder / "model.pt", ExportOptions(output=folder / "float"))
    return folder


def int8(folder: Path, name: str, **asked: object) -> Path:
    options = ExportOptions(output=folder / name, int8="static", calibration=str(folder / "data.npz"), **asked)  # type: ignore[arg-type]
    compress.export(folder / "float" / "model.onnx", options)
    return folder / name / "model.onnx"


def coarse_of(folder: Path) -> str:
    layers: list[str] = [
        node.name
        for node in onnx.load(folder / "float" / "model.onnx").graph.node
        if node.op_type in ("Conv", "ConvTranspose", "Gemm")
    ]
    return layers[2]


def error(folder: Path, path: Path) -> float:
    """Of a file in a session as anybody makes it, relative to the size of the outputs."""
    x = np.load(folder / "data.npz")["x"]
    sessions = (
        onnxruntime.InferenceSession(each, providers=["CPUExecutionProvider"])
        for each in (folder / "float" / "model.onnx", path)
    )
    want, got = (session.run(None, {"x": x})[0].astype(np.float64) for session in sessions)
    return float(np.square(got - want).mean() / np.square(want).mean())


def test_a_layer_that_is_kept_in_float_keeps_its_weights(original: Path) -> None:
    whole, kept = int8(original, "whole"), int8(original, "kept", keep_float=(coarse_of(original),))

    assert error(original, kept) < 0.25 * error(original, whole)


def test_a_drop_that_one_layer_makes_is_mended_by_that_layer_alone(original: Path) -> None:
    within = int8(
        original, "within", metric="cosine", max_drop=0.25, eval=str(original / "data.npz"),
    )  # fmt: skip

    assert error(original, within) < 0.25 * error(original, int8(original, "again"))


def test_explain_names_the_layer(original: Path) -> None:
    found = explain(
        original / "float" / "model.onnx",
        int8(original, "explained"),
        ExplainOptions(data=str(original / "data.npz")),
        Silent(),
    )

    assert found.layers[0].name == coarse_of(original)
    assert found.layers[0].share > 0.75
    assert found.keep_float[0] == coarse_of(original)


def test_explain_looks_into_what_was_mended_so(original: Path) -> None:
    name = coarse_of(original)
    found = explain(
        original / "float" / "model.onnx",
        int8(original, "mended", keep_float=(name,)),
        ExplainOptions(data=str(original / "data.npz")),
        Silent(),
    )

    assert name not in {layer.name for layer in found.layers}
    assert not {"layers", name} & set(found.unmatched)


def graph(carrier: str | None, restored: bool) -> ModelProto:
    """A float convolution that reads what was restored from 8 bits, or what is float, through another node."""
    weight = numpy_helper.from_array(np.ones((2, 2, 1, 1), np.float32), "w")
    scale, zero = numpy_helper.from_array(np.float32(0.1), "s"), numpy_helper.from_array(np.uint8(0), "z")
    nodes = []
    last = "x"
    if restored:
        nodes += [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
                  helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"])]  # fmt: skip
        last = "d"
    if carrier:
        more = {"kernel_shape": [1, 1]} if carrier == "MaxPool" else {}
        nodes.append(helper.make_node(carrier, [last], ["c"], **more))
        last = "c"
    nodes.append(helper.make_node("Conv", [last, "w"], ["y"]))
    shape = ["n", 2, 4, 4]
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, shape)],
        [value("y", TensorProto.FLOAT, shape)],
        [weight, scale, zero],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("carrier", "restored", "count"),
    [
        (None, True, 1), ("MaxPool", True, 1), ("Identity", True, 1), ("Relu", True, 0), (None, False, 0),
        ("MaxPool", False, 0),
    ],
)  # fmt: skip
def test_only_what_onnx_runtime_would_round_is_shielded_and_it_can_be_undone(
    carrier: str | None, restored: bool, count: int
) -> None:
    model = graph(carrier, restored)
    before = model.SerializeToString(deterministic=True)

    assert shield(model) == count
    onnx.checker.check_model(model, full_check=True)
    assert shield(model) == 0, "once is enough"
    unshield(model)

    assert model.SerializeToString(deterministic=True) == before
