"""`--int4 weights` through the whole job: what it refuses, what its report says, what is kept of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import compress
from compress import Artifact, ExportOptions
from compress.errors import RecipeError, StageError
from compress.formats.checkpoint import save
from compress.jobs import evidence
from compress.jobs.few_bits import few_bits_told
from compress.jobs.together import refuse_together
from compress.options.unused import unused
from compress.pipeline import Outcome
from compress.stage import Progress


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    save(module, tmp_path / "model.pt", inputs="x:float32[batch,64]")
    rng = np.random.default_rng(0)
    for name in ("calibration", "eval"):
        np.savez(tmp_path / f"{name}.npz", x=rng.standard_normal((64, 64)).astype(np.float32))
    return tmp_path / "model.pt"


class Seen:
    """Remembers what each stage gave."""

    def __init__(self) -> None:
        self.reused: dict[str, bool] = {}

    def started(self, stage: str) -> Progress:
        return lambda _done, _total, _note: None

    def ended(self, outcome: Outcome) -> None:
        self.reused[outcome.stage.name] = outcome.reused


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"int8": "dynamic"}, "can't make weights 8-bit and 4-bit"),
        ({"target": "tensorrt"}, "can't make 4-bit weights for tensorrt"),
        ({"target": "cuda"}, "can't make 4-bit weights for cuda"),
        ({"precision": "bf16"}, "can't make 4-bit weights and BF16"),
        ({"smooth": True, "calibration": "c.npz"}, "can't smooth activations"),
    ],
)
def test_what_4_bit_weights_can_t_go_with_is_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        refuse_together(ExportOptions(output=Path("out"), int4="weights", **more), judged=False)


def test_calibration_and_keep_float_have_a_use_with_4_bit_weights() -> None:
    options = ExportOptions(output=Path("out"), int4="weights", calibration="c.npz", keep_float=("node",))
    refuse_together(options, judged=False)
    assert unused(options) == ()


def test_the_report_says_what_4_bit_weights_cost_in_time(checkpoint: Path) -> None:
    folder = checkpoint.parent
    options = ExportOptions(
        output=folder / "artifact", int4="weights", calibration="calibration.npz", eval="eval.npz", metric="cosine",
        runtime="onnxruntime", max_drop=5,
    )  # fmt: skip
    seen = Seen()
    artifact, report = compress.export(checkpoint, options, watcher=seen)
    last = report.stages[-1]
    assert last.stage == "quantize_int4"
    assert "2 of 2 layers in INT4" in last.did
    assert "GPTQ by 64 samples, a fifth of them held out: there" in last.did
    assert last.details["layers"] == {"int4": 2, "int8": 0, "float": 0}
    assert last.measured.params == report.stages[0].measured.params
    assert last.measured.macs == report.stages[0].measured.macs
    told = next(each for each in report.findings if each.startswith("4-bit weights are for size: "))
    assert "times as long" in told
    assert "at batch 1" in told
    assert "at batch 8" in told
    assert report.gains["size"] > 3
    written = json.loads((artifact.folder / "report.json").read_text(encoding="utf-8"))
    assert written["stages"][-1]["options"]["bits"] == 4
    recipe = (artifact.folder / "recipe.toml").read_text(encoding="utf-8")
    assert 'int4 = "weights"' in recipe
    again = Seen()
    compress.export(checkpoint, options, watcher=again)
    assert again.reused["quantize_int4"], "kept from before"
    assert not seen.reused["quantize_int4"]


@pytest.mark.usefixtures("openvino")
def test_what_is_said_of_the_time_is_of_one_runtime_whatever_serves(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def told(rows: Any, timed: Any, *rest: Any) -> Any:
        seen.update({name: (rows[name].runtime, timed[name]) for name in ("fold_onnx", "quantize_int4")})
        return few_bits_told(rows, timed, *rest)

    monkeypatch.setattr(evidence, "few_bits_told", told)
    options = ExportOptions(output=checkpoint.parent / "artifact", int4="weights", runtime="openvino")
    _, report = compress.export(checkpoint, options)
    assert report.stages[-1].measured.runtime != "ONNX Runtime", "OpenVINO serves it"
    assert {runtime for runtime, _ in seen.values()} == {seen["fold_onnx"][0]}
    assert any("in ONNX Runtime on this machine" in each for each in report.findings)


def test_without_calibration_a_note_says_what_it_would_bring(checkpoint: Path) -> None:
    options = ExportOptions(output=checkpoint.parent / "artifact", int4="weights", runtime="onnxruntime")
    _, report = compress.export(checkpoint, options)
    assert any("rounded to nearest: with --calibration" in each for each in report.findings)
    assert Artifact.load(options.output).signature.inputs[0].name == "x"


def test_a_file_of_4_bit_weights_is_no_start_of_another_export(checkpoint: Path) -> None:
    options = ExportOptions(output=checkpoint.parent / "artifact", int4="weights", runtime="onnxruntime")
    artifact, _ = compress.export(checkpoint, options)
    with pytest.raises(StageError, match="MatMulNBits"):
        compress.export(artifact.model_path, ExportOptions(output=checkpoint.parent / "again"))
