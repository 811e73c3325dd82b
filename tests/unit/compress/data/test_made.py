"""Samples that are made when they are asked for are held to what arrays are held to."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from compress.data.dataset import Dataset
from compress.errors import DatasetError
from compress.options.training import TrainingOptions
from compress.prune.importance import squared_changes
from compress.training.finetune import Finetune
from tests.unit.compress.training.networks import model, patterns

IMAGES, LABELS = patterns(64)
BAD = 40


class Samples:
    """As a torch Dataset gives them; one is another."""

    def __init__(self, image: Any = None, label: Any = None) -> None:
        self._other = {"image": image, "label": label}

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, place: int) -> dict[str, Any]:
        given = {"image": IMAGES[place], "label": LABELS[place]}
        return given | {name: value for name, value in self._other.items() if place == BAD and value is not None}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("samples_by_hand")
    monkeypatch.setitem(sys.modules, "samples_by_hand", module)

    def opened(folder: Path, **other: Any) -> Dataset:
        module.samples = lambda: Samples(**other)  # type: ignore[attr-defined]
        return Dataset.open("samples_by_hand:samples", model(folder, "student", 8).signature)

    return opened


@pytest.mark.parametrize("kept", [False, True], ids=["made each time", "kept on disk"])
def test_a_made_value_that_the_first_samples_type_does_not_hold_is_refused(
    tmp_path: Path, made: Any, *, kept: bool
) -> None:
    data = made(tmp_path, image=IMAGES[0].astype(np.float64) + 1e300)
    if kept:
        data.fetcher.keep_in(tmp_path / "cache")
    with pytest.raises(DatasetError, match="does not fit 'image'"):
        list(data.batches(16))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_made_sample_that_is_not_finite_is_named(tmp_path: Path, made: Any, value: float) -> None:
    data = made(tmp_path, image=np.full_like(IMAGES[0], value))
    for taken in (data, data.part(np.arange(10, 64)), data.part(np.arange(10, 64)).part(np.arange(5, 54))):
        with pytest.raises(DatasetError, match="holds NaN or infinite values") as caught:
            list(taken.batches(16))
        assert caught.value.why == f"in sample {BAD}, in the input 'image'", "as the user's dataset counts"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"label": 0.5}, "'label' is int64 in some and float64 in others"),
        ({"label": np.nan}, "'label' is int64 in some and float64 in others"),
        ({"image": IMAGES[0].astype(np.complex64)}, "'image' is float32 in some and complex64 in others"),
    ],
)
def test_made_samples_are_of_one_kind(tmp_path: Path, made: Any, other: dict[str, Any], why: str) -> None:
    with pytest.raises(DatasetError, match="unlike each other") as caught:
        list(made(tmp_path, **other).batches(16))
    assert caught.value.why == why


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("label", [-1, -100, 4, 255])
def test_a_made_label_that_is_no_class_is_no_label_to_train_on(
    tmp_path: Path, made: Any, label: int, workers: int
) -> None:
    student, data = model(tmp_path, "student", 8), made(tmp_path, label=label)
    tuned = Finetune(data, None, TrainingOptions(epochs=1, batch_size=16, loader_workers=workers))
    tuned.check(student)
    with pytest.raises(DatasetError, match="can't train on the labels") as caught:
        tuned.run(student, tmp_path, lambda _d, _t, _n: None)
    assert caught.value.why == f"sample {BAD} has the label {label}, the classes of 'logits' go from 0 to 3"
    assert not multiprocessing.active_children(), "what fetched samples has ended, though the error is still held"


def test_nor_to_tell_the_importance_of_channels_by(tmp_path: Path, made: Any) -> None:
    student = model(tmp_path, "student", 8)
    with pytest.raises(DatasetError, match="can't train on the labels"):
        squared_changes(student.module, student.signature, made(tmp_path, label=-1), 0, lambda _d, _t, _n: None)


def test_values_to_train_on_are_numbers(tmp_path: Path) -> None:
    wanted = np.random.default_rng(0).random((64, 4)).astype(np.float32)
    wanted[BAD, 2] = np.nan
    np.savez(tmp_path / "values.npz", image=IMAGES, label=wanted)
    student = model(tmp_path, "student", 8)
    with pytest.raises(DatasetError, match="can't train on the labels") as caught:
        Finetune(Dataset.open(str(tmp_path / "values.npz"), student.signature), None).check(student)
    assert caught.value.why == f"sample {BAD} has NaN or infinite values in its label"
