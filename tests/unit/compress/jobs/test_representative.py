"""A model that takes no random inputs is measured on the data that there is, whatever it was given for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress.errors import StageError
from compress.options import ExportOptions


class LooksUp(nn.Module):
    """A table that is looked up by a column of floats; a random one may be no row of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(3000, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(x[:, 0].long()))  # type: ignore[no-any-return]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    compress.save(LooksUp().eval(), tmp_path / "model.pt", inputs="x:float32[batch,8]")
    x = np.random.default_rng(0).integers(0, 3000, (64, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    return tmp_path


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("given", ["calibration", "eval"])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_it_is_timed_and_compared_on_data_alone(files: Path, given: str, runtime: str) -> None:
    more = {given: str(files / "x.npz")} | ({"int8": "static"} if given == "calibration" else {})
    asked = ExportOptions(output=files / "a", batches=(1, 8), runtime=runtime, **more)  # type: ignore[arg-type]
    artifact, report = compress.export(files / "model.pt", asked)
    assert artifact.runtime == runtime
    assert report.stages[-1].measured.latency_p50_ms
    assert len({cell.batch for cell in report.grid}) == 2


def test_without_any_the_error_names_what_takes_it(files: Path) -> None:
    with pytest.raises(StageError) as refused:
        compress.export(files / "model.pt", ExportOptions(output=files / "a"))
    assert "--eval" in refused.value.mend
    assert "--calibration" in refused.value.mend
