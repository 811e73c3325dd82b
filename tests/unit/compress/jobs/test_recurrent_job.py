"""`compress export` of a network for speech, an LSTM and a linear layer: smaller in all ways, and right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress import Artifact
from compress.cli import main
from compress.runtime.measure import onnx_macs

FRAMES, BANDS, WORDS = 20, 24, 6


class Speech(nn.Module):
    """[batch, frames, bands] of a spectrogram -> the word that was said."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(BANDS, 48, 2, batch_first=True, bidirectional=True)
        self.words = nn.Linear(96, WORDS)

    def forward(self, spectrum: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(spectrum)
        return self.words(states.mean(1))  # type: ignore[no-any-return]


def spoken(count: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bands that rise or fall, from a place that says which word it is."""
    random = np.random.default_rng(seed)
    word = random.integers(0, WORDS, count)
    at = 3 + 3.5 * word[:, None, None] + np.linspace(-2, 2, FRAMES)[None, :, None] * (1 - 2 * (word[:, None, None] % 2))
    spectrum = np.exp(-(((np.arange(BANDS) - at) / 1.5) ** 2)) + 0.5 * random.standard_normal((count, FRAMES, BANDS))
    return spectrum.astype(np.float32), word


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert not ended.value.code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    x, word = spoken(512, 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Speech()
        optimizer = torch.optim.Adam(net.parameters(), 5e-3)
        for _ in range(4):
            for index in torch.split(torch.randperm(len(x)), 64):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(torch.from_numpy(x)[index]), torch.from_numpy(word)[index])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    compress.save(net.eval(), tmp_path / "speech.pt", inputs=[f"spectrum:float32[batch,{FRAMES},{BANDS}]"])
    np.savez(tmp_path / "calibration.npz", spectrum=spoken(128, 1)[0])
    held, said = spoken(256, 2)
    np.savez(tmp_path / "eval.npz", spectrum=held, label=said)
    return tmp_path


@pytest.mark.parametrize("int8", [("--int8", "dynamic"), ()], ids=["int8", "float"])
def test_a_network_for_speech_is_exported_smaller_and_answers_as_torch_does(
    folder: Path, int8: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    small = folder / "small"
    data = ["--calibration", "calibration.npz", "--eval", "eval.npz"]
    run("export", "speech.pt", "-o", str(small), "--prune", "0.5", "--importance", "obs", *int8, *data)
    artifact = Artifact.load(small)
    report = json.loads((small / "report.json").read_text())
    rows = {stage["stage"]: stage for stage in report["stages"]}
    before, after = rows["prune_channels"]["details"]["channels"]["lstm"]
    assert (before, after < before) == (48, True)
    assert rows["prune_channels"]["details"]["left_alone"].keys() == {"words"}, "which gives the outputs"
    assert rows["repair_channels"]["details"]["layers"].keys() == {"words"}
    whole = rows["original_onnx"]["measured"]
    assert onnx_macs(artifact.model_path, artifact.signature) == pytest.approx(0.5 * whole["macs"], rel=0.05)
    assert artifact.model_path.stat().st_size < 0.65 * whole["size_bytes"]
    assert rows["repair_channels"]["measured"]["accuracy"] > 0.95
    last = report["stages"][-1]["measured"]
    assert last["accuracy"] > 0.95
    parity = rows["onnx_from_torch"]["details"]["parity"]
    assert set(parity) == {"1", "2", "5", "data"}, "the outputs are those of the pruned network in torch"
    capsys.readouterr()
    run("inspect", str(small))
    told = capsys.readouterr().out
    assert "prune_channels: removed" in told
    assert f"MACs     {last['macs']:,}" in told
