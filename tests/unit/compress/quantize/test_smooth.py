"""Smoothing moves scales between layers: the function stays, INT8 comes nearer to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

from compress.artifact import sha256_of
from compress.data.dataset import Dataset
from compress.model import Arrays, OnnxModel, example_inputs
from compress.quantize.graph import Graph, observe
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.scale_links import find_links, find_scalings
from compress.quantize.smooth_onnx import SmoothOnnx
from compress.runtime.backends import OnnxBackend
from tests.models import IMAGE, ZOO
from tests.unit.compress.onnx_export.test_stages import calibration, exported, folded
from tests.unit.compress.prune.test_prune_channels import loaded, quiet, wrapped


class Relu6(nn.Module):
    """Convolutions around ReLU6, one depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
        self.c = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.relu6(self.b(F.relu6(9 * self.a(x)))))  # type: ignore[no-any-return]


class BadlyScaled(nn.Module):
    """Two convolutions whose channels lie five orders of magnitude apart; the function itself is harmless."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 8, 3)
        scale = torch.logspace(-2.5, 2.5, 32)
        with torch.no_grad():
            self.a.weight *= scale[:, None, None, None]
            self.a.bias *= scale  # type: ignore[operator]
            self.b.weight /= scale[None, :, None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(self.a(x)))  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Twice a LayerNorm that goes to layers and a residual, with a Softmax inside, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 16)
        with torch.no_grad():
            self.first.weight[3] = self.second.weight[3] = 50.0
            for layer in (self.left, self.right, self.head):
                layer.weight[:, 3] /= 50

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.second(x + F.softmax(self.left(x), -1) * self.right(x))
        return x + self.head(x)  # type: ignore[no-any-return]


class PreNorm(nn.Module):
    """A LayerNorm with one large channel that goes to two layers and nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)
        with torch.no_grad():
            self.norm.weight[3] = 50.0
            self.left.weight[:, 3] /= 50
            self.right.weight[:, 3] /= 50

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return torch.tanh(self.left(x)) * self.right(x)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight in two layers, of which the first alone is scaled at its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(F.relu(self.a(x)))  # type: ignore[no-any-return]


TOKENS = "x:float32[batch,6,16]"
OURS: dict[str, tuple[type[nn.Module], str]] = {
    "ReLU6": (Relu6, IMAGE),
    "badly scaled": (BadlyScaled, IMAGE),
    "LayerNorm": (PreNorm, TOKENS),
    "LayerNorm and residual": (Branches, TOKENS),
    "tied": (Tied, "x:float32[batch,8]"),
}


def prepared(name: str, folder: Path) -> OnnxModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = loaded(name) if name in ZOO else wrapped(OURS[name][0](), OURS[name][1])
    return folded(exported(model, folder / "onnx"), folder / "folded")


def smoothed(model: OnnxModel, data: Dataset, folder: Path, **options: Any) -> OnnxModel:
    folder.mkdir()
    given = SmoothOnnx(data, **options).run(model, folder, quiet).model
    assert isinstance(given, OnnxModel)
    return given


def answers(model: OnnxModel, inputs: Arrays) -> Arrays:
    return OnnxBackend(model, 1).infer(inputs)


@pytest.mark.parametrize("name", [*ZOO, "badly scaled", "LayerNorm", "LayerNorm and residual", "tied"])
def test_the_answers_stay_on_any_input(name: str, tmp_path: Path) -> None:
    model = prepared(name, tmp_path)
    before = sha256_of(model.path)
    data = calibration(model, tmp_path, 20)
    inputs = example_inputs(model.signature.inputs, {"batch": 5}, seed=7)
    wanted = answers(model, inputs)
    for alpha in (0.0, 0.5, 1.0):
        after = smoothed(model, data, tmp_path / f"alpha {alpha}", alpha=alpha, scalings=True)
        onnx.checker.check_model(onnx.load(after.path))
        for key, want in wanted.items():
            tolerance = 1e-4 * max(1.0, float(np.abs(want).max()))
            np.testing.assert_allclose(answers(after, inputs)[key], want, atol=tolerance)
    assert sha256_of(model.path) == before, "the input is left as it is"


def test_a_link_that_would_change_the_answers_is_left_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the mistake: here what divides forgets the first producer."""
    from compress.quantize import scale_links, smooth_onnx

    model = prepared("LayerNorm and residual", tmp_path)
    data = calibration(model, tmp_path, 20)
    first = find_scalings(Graph(model.path), ())[0].producer.name
    divide = scale_links.divide_producer
    monkeypatch.setattr(
        smooth_onnx,
        "divide_producer",
        lambda graph, link, scale: None if link.producer.name == first else divide(graph, link, scale),
    )
    (tmp_path / "smooth").mkdir()
    given = SmoothOnnx(data, scalings=True).run(model, tmp_path / "smooth", quiet)
    assert isinstance(given.model, OnnxModel)
    inputs, _ = data.take(slice(None))
    np.testing.assert_allclose(answers(given.model, inputs)["output"], answers(model, inputs)["output"], atol=1e-4)
    assert [first in warning for warning in given.warnings] == [True]
    assert first not in {link["from"] for link in given.details["links"]}
    assert given.details["links"], "the others are evened out"


def test_across_relu6_the_answers_stay_on_the_calibration_data(tmp_path: Path) -> None:
    model = prepared("ReLU6", tmp_path)
    data = calibration(model, tmp_path, 20)
    assert [set(link.clips.values()) for link in find_links(Graph(model.path))] == [{6.0}, {6.0}]
    after = smoothed(model, data, tmp_path / "smooth")
    inputs, _ = data.take(slice(None))
    np.testing.assert_allclose(answers(after, inputs)["output"], answers(model, inputs)["output"], atol=1e-4)
    assert onnx.load(after.path) != onnx.load(model.path)


@pytest.mark.parametrize(("name", "better"), [("badly scaled", 10), ("LayerNorm", 2)])
def test_int8_comes_nearer_to_the_float_model(name: str, better: float, tmp_path: Path) -> None:
    model = prepared(name, tmp_path)
    data = calibration(model, tmp_path, 64)
    inputs = example_inputs(model.signature.inputs, {"batch": 40}, seed=9)
    want = answers(model, inputs)["output"]
    errors = []
    for number, float_model in enumerate((model, smoothed(model, data, tmp_path / "smooth"))):
        folder = tmp_path / f"int8-{number}"
        folder.mkdir()
        int8 = QuantizeOnnx("static", data).run(float_model, folder, quiet).model
        assert isinstance(int8, OnnxModel)
        errors.append(float(np.square(answers(int8, inputs)["output"] - want).mean()))
    assert errors[1] * better < errors[0]


@pytest.mark.parametrize(("name", "links"), [("residual", 1), ("depthwise", 4), ("concat", 0), ("mlp", 1)])
def test_links_are_found_where_a_scale_cancels_out(name: str, links: int, tmp_path: Path) -> None:
    assert len(find_links(Graph(prepared(name, tmp_path).path))) == links


def test_a_model_without_links_is_told_so(tmp_path: Path) -> None:
    model = prepared("recurrent", tmp_path)
    given = SmoothOnnx(calibration(model, tmp_path, 8)).run(model, tmp_path, quiet)
    assert "nothing was evened out" in given.warnings[0]


def test_depthwise_consumers_get_an_even_activation(tmp_path: Path) -> None:
    model = prepared("depthwise", tmp_path)
    data = calibration(model, tmp_path, 20)
    after = smoothed(model, data, tmp_path / "smooth", alpha=0.0)
    graph = Graph(after.path)
    depthwise = next(node for node in graph.layers() if graph.split(node).shape[0] > 1)
    ((tensors, _),) = observe(after.path, [depthwise.input[0]], data)
    largest = np.abs(tensors[depthwise.input[0]]).max(axis=(0, 2, 3))
    np.testing.assert_allclose(largest, largest[0], rtol=1e-4)


def test_what_the_body_of_an_if_takes_stays_as_it_is(tmp_path: Path) -> None:
    def graph_of(body_takes: str) -> Path:
        rng = np.random.default_rng(0)
        weights = [numpy_helper.from_array(rng.standard_normal((4, 4)).astype(np.float32), name) for name in "ab"]
        yes = numpy_helper.from_array(np.array(True), "yes")
        result = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 4])
        body = helper.make_graph([helper.make_node("Identity", [body_takes], ["z"])], "body", [], [result])
        nodes = [
            helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
            helper.make_node("MatMul", ["h", "b"], ["y"], name="second"),
            helper.make_node("If", ["yes"], ["w"], name="if", then_branch=body, else_branch=body),
        ]
        values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xhyw"}
        graph = helper.make_graph(
            nodes, "g", [values["x"]], [values["y"], values["w"]], [*weights, yes], value_info=[values["h"]]
        )
        path = tmp_path / f"{body_takes}.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
        return path

    assert len(find_links(Graph(graph_of("x")))) == 1
    assert find_links(Graph(graph_of("h"))) == []
