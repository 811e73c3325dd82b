"""Networks with recurrent layers, at lengths other than the one that they were traced at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compress.model import example_inputs
from compress.runtime.backends import OnnxBackend, TorchBackend
from tests.unit.compress.onnx_export.test_stages import exported, folded
from tests.unit.compress.prune.test_prune_channels import wrapped


class InARow(nn.Module):
    """Two recurrent layers, one behind the other."""

    def __init__(self, first: nn.RNNBase, second: nn.RNNBase) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.out = nn.Linear(second.hidden_size, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.first(x)
        h, _ = self.second(h)
        return self.out(h.mean(1 if self.first.batch_first else 0))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kinds", "both", "takes"),
    [
        ((nn.LSTM, nn.GRU), False, "x:float32[batch,seq,6]"),
        ((nn.LSTM, nn.LSTM), True, "x:float32[batch,seq,6]"),
        ((nn.GRU, nn.LSTM), True, "x:float32[seq,batch,6]"),
        ((nn.LSTM, nn.GRU), True, "x:float32[batch,9,6]"),
    ],
    ids=["dynamic", "bidirectional", "batch second", "fixed"],
)
def test_two_in_a_row_take_any_batch_and_length(
    kinds: tuple[Any, Any],
    both: bool,
    takes: str,
    tmp_path: Path,
) -> None:
    first = not takes.startswith("x:float32[seq")
    layers = (
        kinds[0](6, 12, batch_first=first, bidirectional=both),
        kinds[1](24 if both else 12, 20, batch_first=first),
    )
    model = wrapped(InARow(*layers), takes)
    given = exported(model, tmp_path / "onnx")
    for file in (given, folded(given, tmp_path / "folded")):
        for batch, length in ((1, 9), (3, 9), *([] if "9" in takes else [(2, 5), (4, 21)])):
            inputs = example_inputs(model.signature.inputs, {"batch": batch, "seq": length}, seed=1)
            want = TorchBackend(model, 1).infer(inputs)["output"]
            np.testing.assert_allclose(OnnxBackend(file, 1).infer(inputs)["output"], want, atol=1e-5)


class Flattened(nn.Module):
    """A layer on every place, flattened: what torch puts in between is one step with the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(6, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.layer(x)
        return self.out(h.reshape(-1, 12))  # type: ignore[no-any-return]


def test_a_reshape_of_the_users_own_behind_it_stays(tmp_path: Path) -> None:
    model = wrapped(Flattened(), "x:float32[time,batch,6]")
    given = exported(model, tmp_path)
    inputs = example_inputs(model.signature.inputs, {"batch": 3, "time": 7}, seed=1)
    want = TorchBackend(model, 1).infer(inputs)["output"]
    np.testing.assert_allclose(OnnxBackend(given, 1).infer(inputs)["output"], want, atol=1e-5)
