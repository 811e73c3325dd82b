"""Data that need not fit into memory behaves as arrays do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from compress.data.dataset import Dataset
from compress.data.sources import KEPT, Fetcher, open_shards
from compress.errors import DatasetError, SignatureError
from compress.options.training import TrainingOptions
from tests.unit.compress.training.networks import model, patterns, same, stage, weights

IMAGES, LABELS = patterns(100)


def shards(folder: Path, *, compressed: bool, cuts: tuple[int, ...] = (0, 30, 31, 75, 100)) -> Path:
    folder.mkdir(exist_ok=True)
    write = np.savez_compressed if compressed else np.savez
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        write(folder / f"part-{number}.npz", image=IMAGES[start:stop], label=LABELS[start:stop])
    return folder


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    return [shards(folder / str(compressed), compressed=compressed) for compressed in (False, True)]


@given(index=st_numpy.arrays(np.int64, st.integers(0, 40), elements=st.integers(0, 99)), start=st.integers(0, 100))
def test_shards_give_the_rows_of_the_whole(both: list[Path], index: Any, start: int) -> None:
    for folder in both:
        arrays, _ = open_shards(folder)
        assert np.array_equal(arrays["image"][index], IMAGES[index])
        assert np.array_equal(arrays["label"][start:], LABELS[start:])


def test_few_compressed_shards_are_in_memory_and_stored_ones_are_mapped(both: list[Path]) -> None:
    stored, packed = (open_shards(folder) for folder in both)
    assert stored[1] == ()
    assert packed[1] == (0, 30, 31, 75)
    for arrays, _ in (stored, packed):
        assert np.array_equal(np.asarray(arrays["image"]), IMAGES)
    files = packed[0]["image"].files
    assert len(files._kept) <= KEPT * 2
    assert not stored[0]["image"].files._kept
    assert all(isinstance(array, np.memmap) for array in stored[0]["image"].files._maps.values())


def test_a_dataset_of_shards_trains_as_one_in_memory(tmp_path: Path) -> None:
    tuned = stage(tmp_path, count=100)
    student = model(tmp_path, "student", 8)
    opened = Dataset.open(str(shards(tmp_path / "shards", compressed=False)), student.signature)
    assert len(opened) == 100
    assert opened.labels is not None
    found = [
        type(tuned)(data, None, tuned.training).run(student, tmp_path, lambda _d, _t, _n: None)
        for data in (tuned.data, opened)
    ]
    assert same(weights(found[0]), weights(found[1]))


def test_compressed_shards_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    from compress.training.batches.sampler import Sampler

    sampler = Sampler(100, 10, 0, (0, 30, 31, 75))
    order = np.concatenate(sampler.order(0))
    shard = np.searchsorted((0, 30, 31, 75), order, side="right") - 1
    assert sorted(order) == list(range(100))
    changes = np.flatnonzero(np.diff([len(set(shard[: at + 1])) for at in range(100)]))
    first_two = set(shard[: changes[1] + 1]) if len(changes) > 1 else set(shard)
    assert len(first_two) <= KEPT
    assert not np.array_equal(order, np.concatenate(sampler.order(1)))


def test_shards_that_are_unlike_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=IMAGES[:10], label=LABELS[:10])
    np.savez(tmp_path / "b.npz", image=IMAGES[:10, :, :3], label=LABELS[:10])
    with pytest.raises(DatasetError, match="don't fit each other"):
        Dataset.open(str(tmp_path), model(tmp_path, "student", 8).signature)


MODULE = """
import numpy as np, torch
from torch.utils.data import Dataset

class Images(Dataset):
    asked = []
    def __len__(self): return 64
    def __getitem__(self, place):
        self.asked.append(place)
        rng = np.random.default_rng(place)
        return torch.from_numpy(rng.standard_normal((1, 6, 6)).astype(np.float32)) + {noise}, int(rng.integers(4))

class Broken(Images):
    def __getitem__(self, place):
        if place == 40: raise OSError("the disk is gone")
        return super().__getitem__(place)

class Odd(Images):
    def __getitem__(self, place): return 1, 2, 3

def images(): return Images()
def broken(): return Broken()
def odd(): return Odd()
def empty():
    class Empty(Images):
        def __len__(self): return 0
    return Empty()
def wide():
    class Wide(Images):
        def __getitem__(self, place): return {{"image": super().__getitem__(place)[0].double(), "label": 1}}
    return Wide()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = "made_" + "".join(c if c.isalnum() else "_" for c in tmp_path.name)
    noise = getattr(request, "param", "0")
    (tmp_path / f"{name}.py").write_text(MODULE.format(noise=noise))
    monkeypatch.chdir(tmp_path)
    return name


def test_a_torch_dataset_gives_its_samples_when_they_are_asked_for(tmp_path: Path, module: str) -> None:
    opened = Dataset.open(f"{module}:images", model(tmp_path, "student", 8).signature)
    inputs, labels = opened.take(np.array([3, 5]))
    assert inputs["image"].shape == (2, 1, 6, 6)
    assert labels is not None
    assert labels.shape == (2,)
    assert opened.labels is not None
    assert opened.labels.ndim == 1
    assert np.asarray(opened.labels).shape == (64,)
    assert opened.sha256 == Dataset.open(f"{module}:images", model(tmp_path, "student", 8).signature).sha256


@pytest.mark.parametrize("module", ["torch.rand(1)"], indirect=True)
def test_random_samples_are_the_same_whoever_fetches_them(tmp_path: Path, module: str) -> None:
    student = model(tmp_path, "student", 8)
    found = []
    for workers in (0, 2):
        opened = Dataset.open(f"{module}:images", student.signature)
        tuned = type(stage(tmp_path))(opened, None, TrainingOptions(epochs=2, batch_size=16, loader_workers=workers))
        found.append(weights(tuned.run(student, tmp_path, lambda _d, _t, _n: None)))
    assert same(*found)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_can_not_be_had_is_told_whoever_fetches_it(tmp_path: Path, module: str, workers: int) -> None:
    student = model(tmp_path, "student", 8)
    opened = Dataset.open(f"{module}:broken", student.signature)
    tuned = type(stage(tmp_path))(opened, None, TrainingOptions(epochs=1, batch_size=16, loader_workers=workers))
    with pytest.raises(DatasetError, match=f"can't get sample 40 of {module}:broken"):
        tuned.run(student, tmp_path, lambda _d, _t, _n: None)


def test_a_cache_makes_each_sample_once(tmp_path: Path, module: str) -> None:
    import importlib

    student = model(tmp_path, "student", 8)
    opened = Dataset.open(f"{module}:images", student.signature)
    asked = importlib.import_module(module).Images.asked
    asked.clear()
    options = TrainingOptions(epochs=3, batch_size=16, cache_data=True, loader_workers=0)
    type(stage(tmp_path))(opened, None, options).run(student, tmp_path, lambda _d, _t, _n: None)
    assert sorted(set(asked)) == list(range(64))
    assert len(asked) <= 64 + 2, "and two for the first look"
    assert not (tmp_path / "cache").exists()


def test_a_part_of_a_torch_dataset_makes_no_more_than_it_holds(tmp_path: Path, module: str) -> None:
    import importlib

    opened = Dataset.open(f"{module}:images", model(tmp_path, "student", 8).signature)
    asked = importlib.import_module(module).Images.asked
    asked.clear()
    part = opened.part(np.array([5, 9, 60]))
    inputs, labels = part.take(slice(0, 2))
    assert set(asked) <= {5, 9}
    assert np.array_equal(inputs["image"], opened.take(np.array([5, 9]))[0]["image"])
    assert labels is not None
    assert np.asarray(part.labels).shape == (3,)


def test_another_width_is_converted_when_it_is_taken(tmp_path: Path, module: str) -> None:
    opened = Dataset.open(f"{module}:wide", model(tmp_path, "student", 8).signature)
    assert opened.take(slice(0, 4))[0]["image"].dtype == np.float32
    assert opened.part(np.array([1, 2])).take(slice(0, 2))[0]["image"].dtype == np.float32


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("odd", DatasetError, "one has 3 parts"),
        ("empty", DatasetError, "it holds no samples"),
        ("broken", DatasetError, "the disk is gone"),
    ],
)
def test_a_torch_dataset_that_can_not_be_used(
    tmp_path: Path, module: str, name: str, error: type[Exception], why: str
) -> None:
    signature = model(tmp_path, "student", 8).signature
    with pytest.raises(error, match=why):
        Dataset.open(f"{module}:{name}", signature).take(np.arange(64))


def test_samples_of_the_wrong_shape_are_named(tmp_path: Path, module: str) -> None:
    import compress

    wide = compress.save(torch.nn.Flatten(), tmp_path / "wide.pt", inputs="image:float32[batch,1,9,9]")
    with pytest.raises(SignatureError):
        Dataset.open(f"{module}:images", compress.load(wide).signature)


def test_a_large_npy_of_another_width_stays_on_disk(tmp_path: Path) -> None:
    np.save(tmp_path / "image.npy", IMAGES.astype(np.float64))
    opened = Dataset.open(str(tmp_path / "image.npy"), model(tmp_path, "student", 8).signature)
    assert not isinstance(opened.inputs["image"], np.ndarray)
    assert np.array_equal(opened.take(np.array([5, 2]))[0]["image"], IMAGES[[5, 2]])


def test_samples_are_kept_whatever_an_input_is_called(tmp_path: Path) -> None:
    samples = [{"serve/x:0": np.full(3, at, np.float32)} for at in range(5)]
    fetcher = Fetcher(samples, ["serve/x:0"], "samples")
    fetcher.keep_in(tmp_path / "kept")
    for _ in range(2):
        assert fetcher.rows(np.array([1, 4]))["serve/x:0"].tolist() == [[1, 1, 1], [4, 4, 4]]
