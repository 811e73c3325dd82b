"""The whole job through the Python API: all or nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compress
from compress import Artifact, ExportOptions
from compress.cli import main
from compress.errors import ToolkitError
from compress.formats.checkpoint import save
from compress.report.export import stage_table
from tests.models import build, mlp

X = "x:float32[batch,4]"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    save(mlp(), tmp_path / "model.pt", inputs=X)
    compress.export(tmp_path / "model.pt", ExportOptions(output=tmp_path / "artifact"))
    return tmp_path


def test_an_artifact_is_replaced_by_the_next_run(exported: Path) -> None:
    first = Artifact.load(exported / "artifact").sha256
    compress.export(exported / "model.pt", ExportOptions(output=exported / "artifact", int8="dynamic"))
    assert Artifact.load(exported / "artifact").sha256 != first
    assert sorted(path.name for path in exported.iterdir()) == ["artifact", "artifact.work", "model.pt"]


def test_a_swap_that_fails_leaves_the_old_artifact(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Artifact.load(exported / "artifact").sha256
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "new" and self.parent.name.startswith(".artifact."):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(KeyboardInterrupt):
        compress.export(exported / "model.pt", ExportOptions(output=exported / "artifact", int8="dynamic"))
    assert Artifact.load(exported / "artifact").sha256 == first


def test_an_artifact_left_aside_by_a_kill_is_put_back(exported: Path) -> None:
    first = Artifact.load(exported / "artifact").sha256
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom compress.vetting.swap import replacing_folder\n"
        "sys.addaudithook(lambda event, args: event == 'os.rename' and str(args[0]).endswith('new') and os.kill(os.getpid(), 9))\n"
        f"with replacing_folder(Path({str(exported / 'artifact')!r})):\n    pass\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert not (exported / "artifact").exists()
    with pytest.raises(ToolkitError):
        compress.export(exported / "nothing.pt", ExportOptions(output=exported / "artifact"))
    assert Artifact.load(exported / "artifact").sha256 == first
    assert not list(exported.glob(".artifact.*"))


def test_another_model_in_the_same_place_is_not_taken_for_the_first(exported: Path) -> None:
    first = Artifact.load(exported / "artifact").sha256
    other = mlp()
    other.get_parameter("0.weight").data += 1
    save(other, exported / "model.pt", inputs=X)
    compress.export(exported / "model.pt", ExportOptions(output=exported / "artifact"))
    assert Artifact.load(exported / "artifact").sha256 != first


@pytest.mark.parametrize("name", ["encoder", "two_inputs", "recurrent"])
def test_networks_that_are_no_image_classifiers_go_through(name: str, tmp_path: Path) -> None:
    module, inputs = build(name)
    save(module, tmp_path / "model.pt", inputs=inputs)
    artifact, report = compress.export(
        tmp_path / "model.pt", ExportOptions(output=tmp_path / "artifact", int8="dynamic")
    )
    assert len(artifact.signature.inputs) == len(inputs)
    assert ("The file has grown" in " ".join(report.findings)) == (report.gains["size"] < 1)
    assert report.stages[-1].details["layers"]["int8"] > 0


def test_the_eval_data_judges_every_stage(tmp_path: Path) -> None:
    module, inputs = build("residual")
    save(module, tmp_path / "model.pt", inputs=inputs)
    x = np.random.default_rng(0).standard_normal((30, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "eval.npz", image=x, label=np.arange(30) % 5)
    options = ExportOptions(output=tmp_path / "artifact", prune=0.5, eval="eval.npz")
    compress.export(tmp_path / "model.pt", options)
    stages = json.loads((tmp_path / "artifact" / "report.json").read_text())["stages"]
    assert all(stage["measured"]["accuracy"] is not None for stage in stages)
    assert stages[1]["measured"]["agreement"] == 1.0


def test_bf16_is_judged_by_emulation_and_timed_not_at_all(exported: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 4), dtype=np.float32)
    np.savez(exported / "eval.npz", x=x, labels=rng.integers(0, 3, 50))
    options = ExportOptions(output=exported / "half", precision="bf16", eval=str(exported / "eval.npz"), batches=(1, 4))
    _, report = compress.export(exported / "model.pt", options)
    last = report.stages[-1].measured
    assert last.runtime == "ONNX Runtime, BF16 emulated"
    assert last.cosine_similarity is not None
    assert 0.999 < last.cosine_similarity < 1
    assert last.latency_p50_ms is last.load_ms is None
    assert {cell.model for cell in report.grid} == {"original", "original_onnx"}
    assert list(report.rooflines) == ["original_onnx"]
    assert "latency_over_torch" not in report.gains
    assert "emulated" in (exported / "half" / "report.html").read_text(encoding="utf-8")


def test_the_originals_own_export_is_made_once_where_nothing_comes_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.onnx_export.from_torch import OnnxFromTorch

    real, runs = OnnxFromTorch.run, 0

    def counted(*given: Any) -> Any:
        nonlocal runs
        runs += 1
        return real(*given)

    monkeypatch.setattr(OnnxFromTorch, "run", counted)
    save(mlp(), tmp_path / "model.pt", inputs=X)
    _, report = compress.export(tmp_path / "model.pt", ExportOptions(output=tmp_path / "artifact"))
    assert runs == 1
    assert [row.stage for row in report.stages] == ["original", "original_onnx", "onnx_from_torch", "fold_onnx"]


def test_an_artifact_tells_what_it_is_what_it_is_worth_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = mlp()
    torch.save({"model_state": module.state_dict(), "optimizer": {"m": torch.zeros(100_000)}}, tmp_path / "model.pt")
    np.savez(tmp_path / "eval.npz", x=np.random.default_rng(0).standard_normal((60, 4)).astype(np.float32))
    made = {"model": "tests.models:mlp", "input": (X,), "int8": "dynamic"}
    options = ExportOptions(output=tmp_path / "artifact", eval="eval.npz", confidence=0.8, **made)  # type: ignore[arg-type]
    _, report = compress.export(tmp_path / "model.pt", options)
    weights = sum(tensor.nbytes for tensor in module.state_dict().values())
    original = report.stages[0]
    assert original.measured.size_bytes == weights, "not the optimizer's state in its file"
    assert f"a file of {(tmp_path / 'model.pt').stat().st_size:,} bytes, {weights:,} of them weights" in original.did
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "artifact")])
    told = capsys.readouterr().out
    for words in (
        "kind     artifact of compress ", "model.onnx, ", "from     ", "target   cpu", "quantize_onnx: ", "metric   agreement",
        "60 samples, 80% confidence", "latency  p50 ", "size     ", "inputs   x:float32[batch,4]",
        "next     serve pack ",
    ):  # fmt: skip
        assert words in told, words
    (tmp_path / "artifact" / "report.json").write_text("[1")
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path / "artifact")])
    assert not ended.value.code, "it is whole without a report"


def test_a_batch_that_is_fixed_is_not_told_as_another(tmp_path: Path) -> None:
    """Four samples in each call: no figure is one of batch 1, or of 8."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 5))
    compress.save(module.eval(), tmp_path / "model.pt", inputs="x:float32[4,8]")
    _, report = compress.export(tmp_path / "model.pt", ExportOptions(output=tmp_path / "out", thread_counts=(1,)))
    assert report.stages[0].measured.macs == 4 * 8 * 5
    assert {cell.batch for cell in report.grid} == {4}
    assert all(cell.throughput == pytest.approx(4000 / cell.p50_ms) for cell in report.grid)
    assert any("Each call takes 4 samples" in note for note in report.notes)
    page = (tmp_path / "out" / "report.html").read_text()
    for told in (page, str(stage_table(report).title), *map(str, report.findings)):
        assert not re.search("at batch [^4]", told)
    assert "atency at batch 4, 1 thread" in str(stage_table(report).title)
    assert "Latency at batch 4" in page
    assert "batches" not in next(row.did for row in report.stages if row.stage == "onnx_from_torch")
    with pytest.raises(ToolkitError, match="batch 8"):
        compress.export(tmp_path / "model.pt", ExportOptions(output=tmp_path / "out", batches=(1, 8)))


def test_where_a_size_is_from_is_this_run_s_word(tmp_path: Path) -> None:
    """Stages that are kept were made when the size was given."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    save(module, tmp_path / "model.pt", inputs="x:float32[batch,seq,4]")
    np.savez(tmp_path / "eval.npz", x=np.random.default_rng(0).standard_normal((40, 6, 4)).astype(np.float32))
    told = []
    for size in (("seq=6",), ()):
        options = ExportOptions(
            output=tmp_path / "artifact", size=size, eval=str(tmp_path / "eval.npz"), metric="cosine", int8="dynamic"
        )
        artifact, _ = compress.export(tmp_path / "model.pt", options)
        assert artifact.signature.sizes["seq"] == 6
        told.append(Artifact.load(tmp_path / "artifact").signature.sources["seq"])
    assert told[0] != told[1]
    assert "eval" in told[1]
