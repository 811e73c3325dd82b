"""Figures and shapes in an artifact of someone else's: half of them may be missing, or none that a machine holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.artifact import Artifact, Measured, Signature, StageReport, TensorSpec
from compress.errors import SignatureError
from compress.jobs.examine import told_of


def test_an_interval_with_one_end_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    measured = Measured(metric="accuracy", value=90.0, drop=1.0, drop_low=0.5)
    artifact = Artifact(
        tmp_path, "model.onnx", "onnx", "", Signature((), ()), (StageReport("quantize", "did", measured, 1.0),)
    )
    assert told_of(artifact)["metric"] == "accuracy 90.0000; drop +1.00"


def test_a_dimension_fits_64_bits() -> None:
    assert TensorSpec.parse(f"x:float32[{(1 << 63) - 1}]").shape == ((1 << 63) - 1,)
    with pytest.raises(SignatureError, match="a dimension is a positive number"):
        TensorSpec.parse(f"x:float32[{1 << 63}]")
