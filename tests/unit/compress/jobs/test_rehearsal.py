"""A stage that is tried does what a run would do, on less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compress.data.dataset import Dataset
from compress.jobs.rehearsal import Clock, rehearse
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.training.finetune import Finetune
from compress.training.loop import STATE_FILE
from compress.training.trial import Enough
from tests.unit.compress.training.networks import model, patterns, stage


def quiet(_done: int, _total: int, _note: str) -> None:
    pass


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_an_interrupted_training_is_tried_from_where_it_would_go_on(tmp_path: Path) -> None:
    student, kept = model(tmp_path, "student", 8), tmp_path / "work/02-finetune-abc"
    asked = stage(tmp_path, epochs=1000, checkpoint_seconds=0.0)

    def interrupted(done: int, _total: int, _note: str) -> None:
        if done == 20:
            raise KeyboardInterrupt

    part = folder(kept.with_name(kept.name + ".part"))
    with pytest.raises(KeyboardInterrupt):
        asked.run(student, part, interrupted)
    state = (part / STATE_FILE).read_bytes()
    tried = rehearse(asked, student, folder(tmp_path / "tried"), kept, quiet)
    assert tried.given.details["resumed_at_step"] > 0
    assert (part / STATE_FILE).read_bytes() == state
    assert isinstance(asked, Finetune)


def test_calibration_takes_some_of_the_samples(tmp_path: Path) -> None:
    student = model(tmp_path, "student", 8)
    np.savez(tmp_path / "many.npz", image=patterns(5000)[0])
    exported = OnnxFromTorch().run(student, folder(tmp_path / "onnx"), quiet).model
    folded = FoldOnnx().run(exported, folder(tmp_path / "folded"), quiet).model  # type: ignore[arg-type]
    quantize = QuantizeOnnx("static", Dataset.open(str(tmp_path / "many.npz"), student.signature))
    told: list[int] = []
    tried = rehearse(
        quantize, folded, folder(tmp_path / "tried"), tmp_path / "kept", lambda _d, total, _n: told.append(total)
    )
    assert 0 < max(told) <= 64
    assert tried.seconds is not None
    assert "INT8" in tried.given.did


def test_a_clock_tells_what_one_takes_by_all_but_the_first() -> None:
    clock = Clock(quiet)
    for done in (32, 64, 96):
        clock(done, 96, "calibrating")
        clock(1, 2, "something else")
    at = [moment for moment, _, _, note in clock.told if note == "calibrating"]
    assert clock.each("calibrating") == pytest.approx((at[2] - at[0]) / 64)
    assert clock.each("nothing such") == 0


def test_a_clock_ends_the_work_once_it_has_seen_enough() -> None:
    clock = Clock(quiet, enough=lambda clock: len(clock.told) == 2)
    clock(1, 9, "")
    with pytest.raises(Enough):
        clock(2, 9, "")
