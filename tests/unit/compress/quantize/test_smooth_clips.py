"""Smoothing scales a channel on one axis, and only where a Clip on the way stays exact on all of the calibration data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

from compress.data.dataset import Dataset
from compress.model import OnnxModel
from compress.quantize.graph import Array, Graph
from compress.quantize.scale_links import find_links
from compress.quantize.smooth_onnx import PROVEN, SmoothOnnx
from compress.runtime.backends import OnnxBackend
from tests.unit.compress.onnx_export.test_stages import exported, folded
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped

WIDE = 8
SAMPLES = 40
RNG = np.random.default_rng(3)

Maker = Callable[[torch.Tensor], torch.Tensor]


class Between(nn.Module):
    """Two layers of uneven channels, and what is between them; a softmax makes it a transformer's where `attends`."""

    def __init__(self, first: nn.Module, last: nn.Module, between: Maker | nn.Module, *, attends: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.attends, self.between = first, last, attends, between
        assert isinstance(first.weight, torch.Tensor)
        assert isinstance(first.bias, torch.Tensor)
        assert isinstance(last.weight, torch.Tensor)
        for layer in (first, last):
            for weight in layer.parameters():
                nn.init.normal_(weight, std=0.4)
        with torch.no_grad():  # channels 0 to 3 stay far below the bound, 4 and 5 come near, 6 and 7 reach it
            size = torch.tensor([0.02, 0.05, 0.1, 0.2, 1.0, 2.0, 6.0, 9.0])
            first.weight *= size.reshape(-1, *[1] * (first.weight.ndim - 1)) if first.weight.ndim > 1 else size
            first.bias *= size
            if last.weight.shape[1] == WIDE:  # so that the weights alone would have 7 scaled below the Clip's bound
                last.weight[:, 7] *= 50

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attends:
            x = x + F.softmax(x @ x.transpose(1, 2), -1) @ x
        return self.last(self.between(self.first(x)))  # type: ignore[no-any-return]


def linear(between: Maker | nn.Module, into: int = WIDE, *, attends: bool = True) -> nn.Module:
    return Between(nn.Linear(6, WIDE), nn.Linear(into, 5), between, attends=attends)


def conv(between: Maker | nn.Module, last: nn.Module | None = None) -> nn.Module:
    return Between(nn.Conv2d(3, WIDE, 3), last or nn.Conv2d(WIDE, 4, 1), between)


def conv1d(between: Maker | nn.Module, last: nn.Module) -> nn.Module:
    return Between(nn.Conv1d(6, WIDE, 1), last, between)


def normed(between: Maker | nn.Module) -> nn.Module:
    return Between(nn.LayerNorm(WIDE), nn.Linear(WIDE, 5), between, attends=True)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        module: with what is between its layers.
        sample: the shape of one.
        scaled: whether its channels may be scaled.
        late: whether the last sample but one alone reaches the bound, and is not among those proven at last.
    """

    module: Callable[[], nn.Module]
    sample: tuple[int, ...]
    scaled: bool
    late: bool = False


TOKENS, SQUARE, IMAGE = (11, 6), (WIDE, 6), (3, 6, 6)
CASES = {
    "linear, ReLU6, linear": Case(lambda: linear(F.relu6), TOKENS, True),
    "as many tokens as channels": Case(lambda: linear(F.relu6), SQUARE, True),
    "as many tokens as channels, late": Case(lambda: linear(F.relu6), SQUARE, True, late=True),
    "as many tokens as channels, late, without attention": Case(
        lambda: linear(F.relu6, attends=False), SQUARE, True, late=True
    ),
    "without attention": Case(lambda: linear(F.relu6, attends=False), TOKENS, True),
    "without tokens": Case(lambda: linear(F.relu6, attends=False), (6,), True),
    "hardtanh from 0": Case(lambda: linear(nn.Hardtanh(0.0, 2.5)), TOKENS, True),
    "hardtanh from -1": Case(lambda: linear(nn.Hardtanh(-1.0, 1.0)), TOKENS, False),
    "two clips": Case(lambda: linear(nn.Sequential(nn.ReLU6(), nn.Hardtanh(0.0, 2.0))), TOKENS, True),
    "norm, ReLU6, linear": Case(lambda: normed(F.relu6), (WIDE, WIDE), True),
    "convolution, ReLU6, convolution": Case(lambda: conv(F.relu6), IMAGE, True),
    "convolution, late": Case(lambda: conv(F.relu6), IMAGE, True, late=True),
    "depthwise": Case(lambda: conv(F.relu6, nn.Conv2d(WIDE, WIDE, 3, groups=WIDE)), IMAGE, True),
    "convolution, pool, ReLU6": Case(lambda: conv(lambda x: F.relu6(F.max_pool2d(x, 2))), IMAGE, True),
    "convolution, ReLU6, mean, linear": Case(
        lambda: conv(lambda x: F.relu6(x).mean((2, 3)), nn.Linear(WIDE, 5)), IMAGE, True
    ),
    "convolution, ReLU6, transposed, linear": Case(
        lambda: conv1d(lambda x: F.relu6(x).transpose(1, 2), nn.Linear(WIDE, 5)), (6, 11), False
    ),
    "convolution into linear on its other axis": Case(
        lambda: conv1d(F.relu6, nn.Linear(WIDE, 5)), (6, WIDE), False
    ),
    "linear into convolution on its other axis": Case(
        lambda: Between(nn.Linear(6, WIDE), nn.Conv1d(WIDE, 5, 1), F.relu6), SQUARE, False
    ),
    "linear, transposed, linear": Case(lambda: linear(lambda x: F.relu6(x).transpose(1, 2)), SQUARE, False),
    "linear, reshaped, linear": Case(
        lambda: linear(lambda x: F.relu6(x).reshape(-1, WIDE, 11), 11), TOKENS, False
    ),
    "linear, flattened, linear": Case(lambda: linear(lambda x: F.relu6(x).flatten(1), 88), TOKENS, False),
    "max pool, channels last": Case(lambda: linear(lambda x: F.max_pool1d(F.relu6(x), 3, 1, 1)), TOKENS, False),
    "max pool, channels last, halved": Case(lambda: linear(lambda x: F.max_pool1d(F.relu(x), 2), 4), TOKENS, False),
    "mean pool, channels last": Case(lambda: linear(lambda x: F.avg_pool1d(F.relu6(x), 3, 1, 1)), TOKENS, False),
    "global pool, channels last": Case(
        lambda: Between(
            nn.Linear(6, WIDE), nn.Linear(1, 5), lambda x: F.adaptive_avg_pool1d(F.relu(x), 1), attends=True
        ),
        TOKENS,
        False,
    ),
    "PReLU, channels last": Case(lambda: linear(nn.PReLU()), TOKENS, True),
    "PReLU of tokens, ReLU6": Case(lambda: linear(nn.Sequential(nn.PReLU(WIDE), nn.ReLU6())), SQUARE, True),
    "PReLU, ReLU6, convolution": Case(lambda: conv(nn.Sequential(nn.PReLU(WIDE), nn.ReLU6())), IMAGE, True),
    "multiplied by tokens": Case(
        lambda: linear(lambda x: F.relu6(x) * torch.linspace(0.1, 2, WIDE)[:, None]), SQUARE, False
    ),
    "a table of tokens added": Case(
        lambda: linear(lambda x: F.relu6(x + torch.linspace(0.1, 2, WIDE)[:, None])), SQUARE, False
    ),
}  # fmt: skip


def calibration(case: Case) -> dict[str, Array]:
    """Samples, of which those that are proven at last are the smallest."""
    x = RNG.standard_normal((SAMPLES, *case.sample)).astype(np.float32)
    proven = np.unique(np.linspace(0, SAMPLES - 1, PROVEN).astype(np.int64))
    assert SAMPLES - 2 not in proven
    x[proven] *= np.float32(0.05)
    if case.late:
        x *= np.float32(0.02)
        x[-2, 0] *= 200  # of its first token alone
    return {"x": x}


def prepared(case: Case, folder: Path) -> OnnxModel:
    sizes = ",".join(map(str, case.sample))
    return folded(exported(wrapped(case.module().eval(), f"x:float32[batch,{sizes}]"), folder / "onnx"), folder / "f")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_float_graph_answers_as_before_on_all_of_the_calibration_data(case: Case, tmp_path: Path) -> None:
    model, inputs = prepared(case, tmp_path), calibration(case)
    (tmp_path / "smooth").mkdir()
    given = SmoothOnnx(Dataset("", inputs, None, "0" * 64), alpha=0.5).run(model, tmp_path / "smooth", quiet)
    assert isinstance(given.model, OnnxModel)
    want = OnnxBackend(model, 1).infer(inputs)["output"]
    got = OnnxBackend(given.model, 1).infer(inputs)["output"]
    np.testing.assert_allclose(got, want, atol=1e-5 * float(np.abs(want).max()), rtol=1e-5)
    assert not any("left as it is" in warning for warning in given.warnings), "no link was a mistake"
    assert [link["spread"] > 2 for link in given.details["links"]] == [True] * case.scaled


@pytest.mark.parametrize(
    ("name", "axis"), [("linear, ReLU6, linear", 2), ("without tokens", 1), ("convolution, ReLU6, convolution", 1)]
)
def test_a_link_has_its_channels_on_one_axis(name: str, axis: int, tmp_path: Path) -> None:
    (link,) = find_links(Graph(prepared(CASES[name], tmp_path).path))
    assert (link.axis, link.channels, set(link.clips.values())) == (axis, WIDE, {6.0})


def drawn(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


FOUR = [4, 4]
ON_ANOTHER_AXIS = {
    "a Gemm's bias for each row": [
        helper.make_node("Gemm", ["x", "w", "rows"], ["h"]), helper.make_node("MatMul", ["h", "v"], ["y"])
    ],
    "a norm's scale for each row": [
        helper.make_node("LayerNormalization", ["x", "table"], ["h"]), helper.make_node("MatMul", ["h", "v"], ["y"])
    ],
    "a norm's one scale": [
        helper.make_node("LayerNormalization", ["x", "one"], ["h"]), helper.make_node("MatMul", ["h", "v"], ["y"])
    ],
    "a mean over no axis named, which is over all": [
        helper.make_node("Gemm", ["x", "w"], ["m"]), helper.make_node("ReduceMean", ["m", "none"], ["h"]),
        helper.make_node("MatMul", ["h", "v"], ["y"]),
    ],
    "pooled channels": [
        helper.make_node("MatMul", ["t", "w"], ["m"]),
        helper.make_node("MaxPool", ["m"], ["h"], kernel_shape=[3], pads=[1, 1]),
        helper.make_node("MatMul", ["h", "v"], ["y"]),
    ],
    "none, all on the last": [helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
                              helper.make_node("MatMul", ["h", "v"], ["y"])],
}  # fmt: skip


@pytest.mark.parametrize("name", ON_ANOTHER_AXIS)
def test_parameters_on_another_axis_of_the_same_size_end_a_link(name: str, tmp_path: Path) -> None:
    tables = {"w": drawn(4, 4), "v": drawn(4, 4), "rows": drawn(4, 1), "table": drawn(4, 4), "one": drawn(1)}
    tables |= {"b": drawn(4), "none": np.zeros(0, np.int64)}
    nodes = ON_ANOTHER_AXIS[name]
    given = nodes[0].input[0]
    shape = FOUR if given == "x" else [2, *FOUR]
    values = {each: helper.make_tensor_value_info(each, TensorProto.FLOAT, shape) for each in (given, "m", "h", "y")}
    graph = helper.make_graph(
        nodes, "g", [values[given]], [values["y"]],
        [numpy_helper.from_array(table, each) for each, table in tables.items()],
        value_info=[values[each] for each in ("m", "h")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    assert len(find_links(Graph(tmp_path / "m.onnx"))) == name.startswith("none")
