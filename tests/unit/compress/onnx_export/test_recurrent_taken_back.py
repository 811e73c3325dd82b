"""LSTM, GRU and RNN of ONNX become torch's where these compute the same; what does otherwise is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from torch import nn

from compress.formats.onnx.load import load_onnx
from compress.model import TorchModel
from compress.onnx_export.torch_from_onnx import TorchFromOnnx, taken_back
from compress.prune.prune_channels import PruneChannels
from tests.unit.compress.onnx_export.test_torch_from_onnx import stored
from tests.unit.compress.onnx_graphs import normal

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
WIDTH, SIZE = 8, 6
ZEROS_BY_BATCH = [
    helper.make_node("Shape", ["x"], ["sizes"]),
    helper.make_node("Gather", ["sizes", "at0"], ["n"]),
    helper.make_node("Concat", ["directions", "n", "width"], ["of"], axis=0),
]
STATES = {
    "none": [],
    "zeros of the batch": [*ZEROS_BY_BATCH, helper.make_node("ConstantOfShape", ["of"], ["state"])],
    "zeros that are repeated": [*ZEROS_BY_BATCH, helper.make_node("Expand", ["zero", "of"], ["state"])],
    "values": [*ZEROS_BY_BATCH, helper.make_node("Expand", ["some", "of"], ["state"])],
}
READ = {  # as torch and Paddle write it, as Keras does, and what is passed on
    "steps": [
        helper.make_node("Transpose", ["Y"], ["turned"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["turned", "joined"], ["y"]),
    ],
    "last": [helper.make_node("Transpose", ["H"], ["t"], perm=[1, 0, 2]), helper.make_node("Flatten", ["t"], ["y"])],
    "cell": [helper.make_node("Transpose", ["C"], ["t"], perm=[1, 0, 2]), helper.make_node("Flatten", ["t"], ["y"])],
    "squeezed": [helper.make_node("Squeeze", ["Y", "at1"], ["y"])],
}


def written(
    folder: Path, kind: str, *, read: str = "steps", states: str = "none", bias: bool = True, behind: bool = False,
    peephole: Any = None, **attributes: Any,
) -> Path:  # fmt: skip
    """x [batch, 5, SIZE] through a recurrent layer as its exporters write it; `behind`: and a product after it."""
    count = 2 if attributes.get("direction") == "bidirectional" else 1
    rows = GATES[kind] * WIDTH
    weights: dict[str, Any] = {
        "rnn.W": normal(count, rows, SIZE), "rnn.R": normal(count, rows, WIDTH, seed=1),
        "rnn.B": normal(count, 2 * rows, seed=2), "at0": np.array([0]), "at1": np.array([1]),
        "directions": np.array([count]), "width": np.array([WIDTH]), "zero": np.zeros((1, 1, 1), np.float32),
        "some": normal(1, 1, WIDTH), "joined": np.array([0, 0, -1]), "head": normal(count * WIDTH, 3),
    }  # fmt: skip
    state = "" if states == "none" else "state"
    given = ["turned_x", "rnn.W", "rnn.R", "rnn.B" if bias else "", "", *([state] * (2 if kind == "LSTM" else 1))]
    if peephole is not None:
        weights["rnn.P"] = peephole
        given.append("rnn.P")
    outs = ["Y", "H", "C"] if kind == "LSTM" else ["Y", "H"]
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned_x"], perm=[1, 0, 2]),
        *STATES[states],
        helper.make_node(kind, given, outs, name="rnn", hidden_size=WIDTH, **attributes),
        *READ[read],
    ]
    if behind:
        nodes[-1].output[0] = "before"
        nodes.append(helper.make_node("MatMul", ["before", "head"], ["y"]))
    return stored(nodes, weights, ("batch", 5, SIZE), folder)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{kind}, {way}": (kind, {"direction": way} | ({"linear_before_reset": 1} if kind == "GRU" else {}))
       for kind in GATES for way in ("forward", "reverse", "bidirectional")},
    **{f"LSTM, {states}": ("LSTM", {"states": states}) for states in STATES},
    **{f"GRU, both ways, {states}": ("GRU", {"states": states, "direction": "bidirectional", "linear_before_reset": 1})
       for states in STATES},
    **{f"LSTM, both ways, its {read}": ("LSTM", {"read": read, "direction": "bidirectional"}) for read in ("last", "cell")},
    "LSTM, squeezed": ("LSTM", {"read": "squeezed"}),
    "GRU, its last": ("GRU", {"read": "last", "linear_before_reset": 1}),
    "RNN, its last, from behind": ("RNN", {"read": "last", "direction": "reverse"}),
    "RNN with ReLU": ("RNN", {"activations": ["Relu", "Relu"], "direction": "bidirectional"}),
    "LSTM with its usual activations": ("LSTM", {"activations": ["Sigmoid", "Tanh", "Tanh"]}),
    "LSTM without a bias": ("LSTM", {"bias": False}),
    "LSTM whose peepholes are 0": ("LSTM", {"peephole": np.zeros((1, 3 * WIDTH), np.float32)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_recurrent_layer_answers_as_in_onnx_runtime(case: str, tmp_path: Path) -> None:
    kind, more = CASES[case]
    model = taken_back(load_onnx(written(tmp_path, kind, **more)))  # which proves it at three batches
    (layer,) = [each for each in model.module.modules() if isinstance(each, nn.RNNBase)]
    assert (type(layer).__name__, layer.input_size, layer.hidden_size) == (kind, SIZE, WIDTH)


@pytest.mark.parametrize("read", ["steps", "last"])
@pytest.mark.parametrize("states", ["none", "zeros of the batch", "zeros that are repeated"])
@pytest.mark.parametrize("way", ["forward", "bidirectional"])
def test_its_hidden_units_can_go(way: str, states: str, read: str, tmp_path: Path) -> None:
    """Zeros that an exporter writes for the states have a number of units, and are left out."""
    path = written(tmp_path, "LSTM", read=read, states=states, behind=True, direction=way)
    given = PruneChannels(0.5).run(taken_back(load_onnx(path)), tmp_path, lambda *_: None)
    assert isinstance(given.model, TorchModel)
    (layer,) = [each for each in given.model.module.modules() if isinstance(each, nn.RNNBase)]
    assert layer.hidden_size < WIDTH


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a reset before the product": ("GRU", {}, "linear_before_reset=0"),
    "peepholes": ("LSTM", {"peephole": normal(1, 3 * WIDTH)}, "peepholes"),
    "clipping": ("LSTM", {"clip": 0.5}, "clips"),
    "other activations": ("RNN", {"activations": ["Softsign"]}, "other activations"),
    "coupled gates": ("LSTM", {"input_forget": 1}, "couples"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_torch_has_not_stays_as_it_is_by_name(case: str, tmp_path: Path) -> None:
    kind, more, why = OTHERS[case]
    path = written(tmp_path, kind, behind=True, **more)
    given = TorchFromOnnx().run(load_onnx(path), tmp_path, lambda *_: None)
    (told,) = given.details["kept_as_they_are"].items()
    assert told[0] == f"{kind} at 'rnn'"
    assert why in told[1]
