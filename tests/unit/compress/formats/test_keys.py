"""Weights behind a trainer's prefix fit as they are; what is dropped is told, and doubt is an error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.cli import main
from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError
from compress.formats.checkpoint import load
from tests.models import mlp

FACTORY = "tests.models:mlp"
X = "x:float32[batch,4]"


WEIGHTS = mlp().state_dict()


def behind(prefix: str, scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {f"{prefix}{key}": scale * value for key, value in WEIGHTS.items()}


LIGHTNING = {
    "epoch": 3, "global_step": 70, "pytorch-lightning_version": "2.5.0", "loops": {"fit_loop": {"state_dict": {}}},
    "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
    "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}],
    "lr_schedulers": [], "hyper_parameters": {"width": 8},
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (behind("net."), ["behind 'net.'"]),
        (behind("model.encoder."), ["behind 'model.encoder.'"]),
        (behind("_orig_mod.net."), ["behind 'net.'"]),
        (behind("net._orig_mod."), ["behind 'net.'"]),
        ({**behind(""), **behind("model_ema.", 9.0)}, ["left out", "model_ema.0.weight"]),
        ({**behind(""), **behind("ema.", 9.0), **behind("teacher.", 8.0)}, ["left out", "ema.0.weight"]),
        ({**behind("module."), "n_averaged": torch.tensor(3)}, ["left out", "n_averaged"]),
        ({**behind("semantic."), **behind("ema_net.", 9.0)}, ["behind 'semantic.'"]),
        ({**behind("net."), **behind("model.")}, ["behind 'net.'", "model.0.weight"]),
        (behind("ema."), ["are a copy, behind 'ema.'; there are no others"]),
        ({**behind("model."), **behind("model.ema.", 9.0)}, ["behind 'model.'", "model.ema.0.weight"]),
        ({**behind(""), **behind("model_ema.", 9.0), "model_ema.decay": torch.ones(1)}, ["model_ema.decay"]),
        ({**behind(""), **{f"netEma.{n}": torch.ones(1) for n in range(3)}}, ["netEma.0"]),
        ({"state_dict": {**behind(""), "num_updates": 5}, "ema": behind("", 9.0)}, ["another set of weights: ema"]),
        ({"state_dict": {"model": behind(""), "ema": behind("", 9.0)}}, ["another set of weights: state_dict.ema"]),
        ({"teacher": behind(""), "epoch": 3}, ["are a copy, under 'teacher'; there are no others"]),
        ({"model": None, "ema": {"module": behind("")}}, ["are a copy, under 'ema.module'"]),
        ({**behind("net."), "criterion.weight": torch.ones(3)}, ["behind 'net.'", "criterion.weight"]),
        ({**behind("net."), **behind("net_ema.", 9.0)}, ["behind 'net.'", "net_ema.0.weight"]),
        ({**behind("teacher.", 9.0), **behind("student.")}, ["behind 'student.'"]),
        ({"state_dict": behind("net."), **LIGHTNING}, ["behind 'net.'"]),
    ],
)
def test_a_prefix_is_taken_off_and_told(content: dict[str, Any], told: list[str], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "model.ckpt")
    with pytest.warns(AssumedWarning) as caught:
        model = load(tmp_path / "model.ckpt", model=FACTORY, inputs=[X])
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    assert torch.equal(model.module(x), fitting(x))
    assert all(word in str(caught[0].message) for word in told)


def fitting(x: torch.Tensor) -> torch.Tensor:
    module = mlp().eval()
    module.load_state_dict(WEIGHTS)
    return module(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({**behind("a."), **behind("b.", 2.0)}, ["can't tell which weights", "'a.' and those behind 'b.'"]),
        (
            {**behind(""), **behind("b.", 2.0)},
            ["can't tell which weights", "those behind 'b.' and those without a prefix"],
        ),
        ({**behind("net."), "net.0.weight": torch.ones(7, 4), **behind("ema.")}, ["only the copy behind 'ema.' does"]),
        ({**behind(""), "more": torch.ones(1), **behind("ema.")}, ["unexpected keys", "more"]),
        ({**behind("q."), "q.queue": torch.ones(1), **behind("k.", 9.0)}, ["those behind 'k.' and those behind 'q.'"]),
        ({**behind("model."), **behind("model.frozen.", 9.0)}, ["can't tell", "behind 'model.frozen.'"]),
        ({**behind("ema."), **behind("swa.", 2.0)}, ["can't tell", "behind 'ema.' and those behind 'swa.'"]),
        ({"model": behind(""), "net": behind("", 9.0)}, ["can't tell", "under 'model' and those under 'net'"]),
        ({"state_dict": behind(""), "model_state_dict": behind("", 9.0)}, ["can't tell", "under 'model_state_dict'"]),
        ({"best_model": behind(""), "last_model": behind("", 9.0)}, ["can't tell", "'best_model'", "'last_model'"]),
        ({"geometric_net": behind(""), "baseline": behind("", 9.0)}, ["can't tell", "'geometric_net'", "'baseline'"]),
        ({"model_cfg": {"a": 1}, "opt": {"exp_avg": behind("")}}, ["found no model", "'model_cfg', 'opt'"]),
        ({"epoch": 1, "grads": behind("")}, ["found no model"]),
        ({"student": {"a": torch.ones(3)}, "teacher": behind("")}, ["only the copy under 'teacher'", "4 missing keys"]),
        ({"weights": {"class_weights": torch.ones(3)}, "net": behind("x")}, ["under 'net': ", "missing", "x0.weight"]),
        ({key: value.to(torch.int8) for key, value in WEIGHTS.items()}, ["0.weight int8 for float32"]),
        ({key: value.bool() for key, value in WEIGHTS.items()}, ["0.weight bool for float32"]),
        ({key: value.to(torch.complex64) for key, value in WEIGHTS.items()}, ["0.weight complex64 for float32"]),
        ({**behind("net."), "net.9.weight": torch.ones(2)}, ["don't fit", "missing keys", "unexpected keys"]),
        (dict(list(behind("net.").items())[1:]), ["missing keys", "0.weight"]),
        ({**behind(""), "0.weight": torch.ones(7, 4)}, ["other shape", "0.weight [7, 4] for"]),
        ({**behind(""), **{f"more.{n}": torch.ones(1) for n in range(30)}}, ["30 unexpected keys", "and 20 more"]),
        ({**behind(""), "evil\n\x1b[31m": torch.ones(1)}, [r"evil\n\x1b[31m"]),
        ({**behind(""), "x" * 5000: torch.ones(1)}, ["x" * 80]),
    ],
)
def test_what_does_not_fit_is_named_on_both_sides(
    state: dict[str, torch.Tensor], what: list[str], tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "model.pt", model=FACTORY, inputs=[X])
    told = f"{caught.value}"
    assert all(word in told for word in what), told
    assert len(told) < 3000


def test_the_command_line_tells_it_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({**behind("net."), "criterion.weight": torch.ones(3)}, tmp_path / "model.ckpt")
    with warnings.catch_warnings(action="always"), pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "model.ckpt"), "--model", FACTORY, "--input", X])
    told = " ".join("".join(capsys.readouterr()).split())
    assert "warning" in told
    assert "is taken off; left out" in told
    assert "criterion.weight" in told


@pytest.mark.parametrize(
    "state",
    [
        behind("module."), behind("_orig_mod."), behind("module._orig_mod."), {**behind(""), "version": 1},
        {"weights": {"class_weights": torch.ones(3)}, "generator": behind("")}, {**behind(""), "_extra_state": None},
        {"cinema": behind(""), "optimizer": {"state": {"exp_avg": behind("", 9.0)}}},
        {key: value.double() for key, value in WEIGHTS.items()},
    ],
)  # fmt: skip
def test_what_is_plainly_meant_is_taken_without_a_word(state: dict[str, Any], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "model.pt")
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    assert torch.equal(load(tmp_path / "model.pt", model=FACTORY, inputs=[X]).module(x), fitting(x))
