"""`compress export --drop-blocks`: fewer steps, the same answers as in torch, and what it did in the report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress import Artifact, ExportOptions
from compress.cli import main
from compress.errors import RecipeError
from compress.jobs.explain import explain
from compress.jobs.export import Silent
from compress.options import ExplainOptions
from compress.runtime.measure import onnx_macs
from tests.residual_networks import Basic, PreNorm, Residuals, TwoSided


def learnt(module: Residuals, samples: int, seed: int) -> dict[str, Any]:
    """Trains on where an image is bright, or a row is large; gives inputs and labels that it has not seen."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((samples, *((3, 6, 6) if module.images else (5, 3)))).astype(np.float32)
    halves = x[:, 0, :, :3].mean((1, 2)) > x[:, 0, :, 3:].mean((1, 2)) if module.images else x[:, :, 0].mean(1) > 0
    label = 2 * halves + (x[:, 1].mean((1, 2)) > 0 if module.images else x[:, :, 1].mean(1) > 0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        optimizer = torch.optim.Adam(module.train().parameters(), 1e-2)
        for _ in range(6):
            for index in torch.split(torch.randperm(samples // 2), 64):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(module(torch.from_numpy(x)[index]), torch.from_numpy(label)[index])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    module.eval()
    return {"x": x[samples // 2 :], "label": label[samples // 2 :].astype(np.int64)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    for name, steps in (("images", (Basic, Basic, Basic, TwoSided)), ("tokens", (PreNorm, PreNorm))):
        module = Residuals(steps)
        held = learnt(module, 1024, 0)
        compress.save(module, folder / f"{name}.pt", inputs=[module.inputs])
        np.savez(folder / f"{name}-calibration.npz", x=held["x"][:192])
        np.savez(folder / f"{name}-eval.npz", x=held["x"][192:], label=held["label"][192:])
    return folder


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return int(ended.value.code or 0)


def rows_of(output: Path) -> dict[str, Any]:
    return {stage["stage"]: stage for stage in json.loads((output / "report.json").read_text())["stages"]}


@pytest.mark.parametrize(("name", "blocks"), [("images", 3), ("tokens", 4)])
def test_blocks_are_dropped_and_what_comes_out_is_smaller_and_answers_as_torch_does(
    name: str, blocks: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    small = tmp_path / "small"
    data = ["--calibration", f"{name}-calibration.npz", "--eval", f"{name}-eval.npz"]
    assert run("export", f"{name}.pt", "-o", str(small), "--drop-blocks", "2", *data) == 0
    rows = rows_of(small)
    dropped = rows["drop_blocks"]
    assert list(rows)[2:4] == ["drop_blocks", "repair_channels"]
    assert len(dropped["details"]["blocks"]) == 2
    assert len(dropped["details"]["could_go"]) == blocks
    assert f"dropped 2 of {blocks} blocks that could go" in dropped["did"]
    artifact = Artifact.load(small)
    left = (1 - dropped["details"]["macs_removed"]) * rows["original_onnx"]["measured"]["macs"]
    assert onnx_macs(artifact.model_path, artifact.signature) == pytest.approx(left, rel=0.01)
    assert set(rows["onnx_from_torch"]["details"]["parity"]) == {"1", "2", "5", "data"}
    assert rows["repair_channels"]["measured"]["value"] >= dropped["measured"]["value"] - 0.02
    page = (small / "report.html").read_text()
    assert "drop_blocks" in page
    if name == "images":
        assert "steps.3" in page and "neither is a shortcut" in page  # noqa: PT018
    recipe = (small / "recipe.toml").read_text()
    assert "drop_blocks = 2" in recipe
    if name == "images":
        return
    capsys.readouterr()
    assert run("run", str(small / "recipe.toml"), "--dry-run") == 0
    assert "drop_blocks" in capsys.readouterr().out


def test_auto_comes_to_the_budget_and_a_run_that_was_cut_goes_on(folder: Path, tmp_path: Path) -> None:
    asked = ExportOptions(
        output=tmp_path / "out", drop_blocks="auto", prune=0.4, round_to=1, calibration="images-calibration.npz",
        eval="images-eval.npz", work=tmp_path / "work",
    )  # fmt: skip
    artifact, _ = compress.export(folder / "images.pt", asked)
    names = [row.stage for row in artifact.stages]
    assert names[2:6] == ["drop_blocks", "repair_channels", "prune_channels", "repair_channels 2"]
    macs = [row.measured.macs or 0 for row in artifact.stages]
    assert 1 - macs[-1] / macs[0] == pytest.approx(0.4, abs=0.03)
    for kept in (tmp_path / "work").glob("0[2-9]-*"):
        shutil.rmtree(kept)
    again, _ = compress.export(folder / "images.pt", asked)
    for one, other in zip(artifact.stages, again.stages, strict=True):
        assert one.did == other.did
        assert one.measured.macs == other.measured.macs


@pytest.mark.parametrize("budget", ["target_params", "target_latency_ms", "target_size_mb"])
def test_auto_keeps_each_kind_of_budget(budget: str, folder: Path, tmp_path: Path) -> None:
    data = {"calibration": "images-calibration.npz", "eval": "images-eval.npz"}
    first, _ = compress.export(folder / "images.pt", ExportOptions(output=tmp_path / "float"))
    whole = first.stages[-1].measured
    limits = {
        "target_params": (whole.params or 0) * 6 // 10,
        "target_size_mb": (whole.size_bytes or 0) / 1e6 * 0.7,
        "target_latency_ms": (whole.latency_p50_ms or 0) * 2,  # kept from the start: no test hangs on a time
    }
    asked = ExportOptions(output=tmp_path / "out", drop_blocks="auto", **data, **{budget: limits[budget]})  # type: ignore[arg-type]
    artifact, _ = compress.export(folder / "images.pt", asked)
    rows = {row.stage: row for row in artifact.stages}
    assert "drop_blocks" in rows
    kept = {
        "target_params": artifact.stages[-1].measured.params or 0,
        "target_size_mb": (artifact.stages[-1].measured.size_bytes or 0) / 1e6,
        "target_latency_ms": 0.0,
    }
    assert kept[budget] <= limits[budget]


def test_layers_behind_a_dropped_block_are_not_held_against_others_of_their_name(folder: Path, tmp_path: Path) -> None:
    data = str(folder / "images-calibration.npz")
    asked = ExportOptions(output=tmp_path / "out", drop_blocks=1, calibration=data, int8="static")
    compress.export(folder / "images.pt", asked)
    with pytest.raises(RecipeError, match="whole blocks were dropped") as refused:
        explain(folder / "images.pt", tmp_path / "out", ExplainOptions(data=data), Silent())
    assert "fold_onnx" in refused.value.mend
    (kept,) = (tmp_path / "out.work").glob("*fold_onnx*/model.onnx")
    found = explain(kept, tmp_path / "out", ExplainOptions(data=data), Silent())
    assert found.layers


def test_an_onnx_file_loses_its_blocks(folder: Path, tmp_path: Path) -> None:
    compress.export(folder / "images.pt", ExportOptions(output=tmp_path / "float"))
    asked = ExportOptions(output=tmp_path / "out", drop_blocks=1, calibration=str(folder / "images-calibration.npz"))
    artifact, _ = compress.export(tmp_path / "float/model.onnx", asked)
    rows = {row.stage: row for row in artifact.stages}
    assert len(rows["drop_blocks"].details["could_go"]) == 3
    assert (rows["drop_blocks"].measured.macs or 0) < (rows["torch_from_onnx"].measured.macs or 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--drop-blocks", "9"], ("can't drop 9 blocks", "3 can go: steps.0, steps.1, steps.2", "--drop-blocks 3")),
        (["--drop-blocks", "1"], ("can't choose blocks to drop", "there is none", "--calibration")),
        (["--drop-blocks", "auto"], ("can't weigh blocks", "there is no budget", "--prune 0.5")),
        (["--drop-blocks", "0"], ("--drop-blocks can't be 0", "from 1", "another --drop-blocks")),
        (["--drop-blocks", "some"], ("some", "drop-blocks", "")),
    ],
)
def test_what_can_not_be_is_told_in_three_lines(
    flags: list[str], said: tuple[str, ...], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    data = [] if "choose" in said[0] else ["--calibration", "images-calibration.npz"]
    assert run("export", "images.pt", "-o", str(tmp_path / "out"), *flags, *data) != 0
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert all(each in told for each in said), told
    assert not (tmp_path / "out").exists()
