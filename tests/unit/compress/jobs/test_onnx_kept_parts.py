"""ONNX files with recurrent layers and with branches through the whole job; the report says what they lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper

import compress
from compress import ExportOptions
from compress.errors import StageError
from tests.unit.compress.onnx_graphs import normal, written

Maker = Callable[[Path], None]
WIDTH = 24


def before() -> list[NodeProto]:
    return [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1]),
        helper.make_node("Relu", ["a"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["b"], pads=[1, 1]),
        helper.make_node("Relu", ["b"], ["m"]),
    ]


def behind() -> list[NodeProto]:
    return [
        helper.make_node("Conv", ["p", "w3"], ["c"], pads=[1, 1]),
        helper.make_node("Relu", ["c"], ["r3"]),
        helper.make_node("GlobalAveragePool", ["r3"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w4"], ["y"]),
    ]


def recurrent(folder: Path) -> None:
    """An LSTM of both directions between convolutions and a linear layer, as torch's exporter writes it."""
    middle = [
        helper.make_node("Transpose", ["m"], ["steps"], perm=[2, 0, 1]),
        helper.make_node("LSTM", ["steps", "W", "R", "B"], ["Y"], hidden_size=WIDTH, direction="bidirectional"),
        helper.make_node("Transpose", ["Y"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["t", "joined"], ["u"]),
        helper.make_node("Transpose", ["u"], ["p"], perm=[1, 2, 0]),
    ]
    weights = {
        "w1": normal(32, 4, 3), "w2": normal(16, 32, 3), "W": normal(2, 4 * WIDTH, 16), "R": normal(2, 4 * WIDTH, WIDTH),
        "B": normal(2, 8 * WIDTH), "w3": normal(32, 2 * WIDTH, 3), "w4": normal(32, 5), "joined": np.array([0, 0, -1]),
    }  # fmt: skip
    made(folder, [*before(), *middle, *behind()], weights)


def branching(folder: Path) -> None:
    """An If by the size of the batch, whose branches compute the same in other ways."""
    out = [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]
    single = helper.make_graph([helper.make_node("Mul", ["m", "two"], ["out"])], "single", [], out)
    several = helper.make_graph([helper.make_node("Add", ["m", "m"], ["out"])], "several", [], out)
    middle = [
        helper.make_node("Shape", ["m"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "at0"], ["n"], axis=0),
        helper.make_node("Equal", ["n", "one"], ["alone"]),
        helper.make_node("If", ["alone"], ["p"], name="branches", then_branch=single, else_branch=several),
    ]
    weights = {
        "w1": normal(32, 4, 3), "w2": normal(8, 32, 3), "w3": normal(32, 8, 3), "w4": normal(32, 5),
        "at0": np.array(0), "one": np.array(1), "two": np.float32(2),
    }  # fmt: skip
    made(folder, [*before(), *middle, *behind()], weights)


def made(folder: Path, nodes: list[NodeProto], weights: dict[str, Any]) -> None:
    written(nodes, weights, folder, inputs=("x:float32[batch,4,20]",), outputs=("y:float32[batch,5]",), opset=18)
    (folder / "model.onnx").rename(folder / "m.onnx")
    rng = np.random.default_rng(0)
    for name, count in (("c", 48), ("e", 80), ("t", 32)):
        np.savez(folder / f"{name}.npz", x=rng.standard_normal((count, 4, 20)).astype(np.float32))


@pytest.mark.parametrize("maker", [recurrent, branching], ids=lambda each: each.__name__)
def test_the_pruned_file_answers_as_the_report_says(maker: Maker, tmp_path: Path) -> None:
    maker(tmp_path)
    options = ExportOptions(
        output=tmp_path / "out", prune=0.3, calibration=str(tmp_path / "c.npz"), eval=str(tmp_path / "e.npz"),
        metric="cosine",
    )  # fmt: skip
    artifact, report = compress.export(tmp_path / "m.onnx", options)
    x = np.load(tmp_path / "e.npz")["x"]
    one, other = (
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for path in (tmp_path / "m.onnx", artifact.model_path)
    )
    cosine = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    assert cosine.mean() == pytest.approx(report.stages[-1].measured.value, abs=0.02)
    assert cosine.mean() > 0.9
    kinds = [node.op_type for node in onnx.load(artifact.model_path).graph.node]
    assert ("LSTM" in kinds) == (maker is recurrent)
    told = [warning for row in report.stages for warning in row.warnings if "If at 'branches'" in warning]
    assert bool(told) == (maker is branching) == ("If" in kinds)


def test_work_is_counted_by_one_rule_before_and_after_and_in_between(tmp_path: Path) -> None:
    """A part that stays in ONNX has work of its own, and so has the branch that folding leaves."""

    def scaled(name: str, width: int) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Conv", ["m", f"u{width}"], [f"wide{width}"]),
            helper.make_node("Conv", [f"wide{width}", f"v{width}"], ["out"]),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)])

    middle = [
        helper.make_node("Shape", ["m"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "at0"], ["n"], axis=0),
        helper.make_node("Equal", ["n", "none"], ["empty"]),
        helper.make_node(
            "If", ["empty"], ["p"], name="branches", then_branch=scaled("a", 64), else_branch=scaled("b", 6)
        ),
    ]
    weights = {
        "w1": normal(32, 4, 3), "w2": normal(8, 32, 3), "w3": normal(32, 8, 3), "w4": normal(32, 5),
        "at0": np.array(0), "none": np.array(0),
        **{f"u{width}": normal(width, 8, 1) for width in (64, 6)},
        **{f"v{width}": normal(8, width, 1) for width in (64, 6)},
    }  # fmt: skip
    made(tmp_path, [*before(), *middle, *behind()], weights)
    _, report = compress.export(tmp_path / "m.onnx", ExportOptions(output=tmp_path / "out", prune=0.3))
    macs = {row.stage: row.measured.macs or 0 for row in report.stages}
    inside = 20 * 2 * 6 * 8
    assert macs["original"] == macs["torch_from_onnx"] == 20 * 3 * (4 * 32 + 32 * 8 + 8 * 32) + 32 * 5 + inside
    assert macs["prune_channels"] == macs["onnx_from_torch"] == macs["fold_onnx"]
    (pruned,) = (row for row in report.stages if row.stage == "prune_channels")
    left = 1 - pruned.details["macs_removed"]
    assert macs["fold_onnx"] == pytest.approx(left * (macs["original"] - inside) + inside, abs=2)
    assert pruned.details["macs_removed"] >= 0.28, "of what can be pruned"
    assert report.gains["macs"] == macs["original"] / macs["fold_onnx"]


def test_what_stands_behind_it_is_trained(tmp_path: Path) -> None:
    branching(tmp_path)
    options = ExportOptions(
        output=tmp_path / "out", prune=0.3, calibration=str(tmp_path / "c.npz"), finetune=str(tmp_path / "t.npz"), epochs=1
    )  # fmt: skip
    _, report = compress.export(tmp_path / "m.onnx", options)
    assert "finetune" in [row.stage for row in report.stages]


ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "can't rank channels by taylor": ({"importance": "taylor"}, "If at 'branches'; of its 4 parameters, 2 get none"),
    "can't train this model in fake INT8": ({"int8": "qat"}, "If at 'branches'"),
}


@pytest.mark.parametrize("what", ASKED)
def test_where_no_gradient_goes_it_is_said_before_any_work(what: str, tmp_path: Path) -> None:
    branching(tmp_path)
    more, why = ASKED[what]
    options = ExportOptions(output=tmp_path / "out", prune=0.3, finetune=str(tmp_path / "t.npz"), **more)
    with pytest.raises(StageError, match=what) as caught:
        compress.export(tmp_path / "m.onnx", options)
    assert why in caught.value.why
    assert not (tmp_path / "out.work").exists()


def test_a_training_that_would_reach_nothing_is_refused(tmp_path: Path) -> None:
    branching(tmp_path)
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.node.append(helper.make_node("CumSum", ["y", "one"], ["z"], name="sums"))
    model.graph.output[0].name = "z"
    onnx.save(model, tmp_path / "m.onnx")
    options = ExportOptions(output=tmp_path / "out", prune=0.3, finetune=str(tmp_path / "t.npz"))
    with pytest.raises(StageError, match="can't train this model") as caught:
        compress.export(tmp_path / "m.onnx", options)
    assert "CumSum at 'sums'" in caught.value.why
