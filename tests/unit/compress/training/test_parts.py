"""The parts of the loop, each alone."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compress.training.batches.augment import augmentation
from compress.training.batches.batch_size import find_batch_size
from compress.training.batches.loader import Batch
from compress.training.batches.sampler import Sampler
from compress.training.machine.gpu_watch import GpuWatch
from compress.training.updates.average import Average
from compress.training.updates.kept_state import KeptState
from compress.training.updates.optimizers import optimizer_for
from compress.training.updates.precision import precision_for
from compress.training.updates.schedule import SCHEDULES, one_cycle_momentum
from tests.models import Depthwise

STEPS = st.integers(1, 500)


@given(STEPS)
def test_every_schedule_stays_between_nothing_and_its_peak_and_reaches_it(steps: int) -> None:
    for name, factor in SCHEDULES.items():
        values = [factor(step, steps) for step in range(steps)]
        assert all(0 <= value <= 1 for value in values), name
        if steps >= 20:
            assert max(values) == pytest.approx(1)


def test_warm_up_and_cosine_and_one_cycle_have_their_shapes() -> None:
    cosine = [SCHEDULES["cosine"](step, 100) for step in range(100)]
    assert cosine[:10] == pytest.approx([0.1 * (n + 1) for n in range(10)])
    assert cosine[55] == pytest.approx(0.5)
    assert cosine[-1] < 0.001
    cycle = [SCHEDULES["one-cycle"](step, 100) for step in range(100)]
    momentum = [one_cycle_momentum(step, 100) for step in range(100)]
    assert cycle[0] == pytest.approx(1 / 25)
    assert int(np.argmax(cycle)) == int(np.argmin(momentum)) == 30
    assert (momentum[0], momentum[30]) == (0.95, 0.85)


@given(count=st.integers(1, 300), size=st.integers(1, 64), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_uniform_shows_each_sample_once_in_batches_of_nearly_one_size(
    count: int, size: int, seed: int, epoch: int
) -> None:
    order = Sampler(count, size, seed).order(epoch)
    assert sorted(np.concatenate(order)) == list(range(count))
    assert len(order) == -(-count // size)
    assert max(map(len, order)) <= size
    assert max(map(len, order)) - min(map(len, order)) <= 1


def test_biases_and_normalizations_do_not_decay() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    groups = optimizer_for(module, 1e-3).param_groups
    assert {p.ndim for p in groups[0]["params"]} == {2, 4}
    assert {p.ndim for p in groups[1]["params"]} == {1}
    assert groups[0]["weight_decay"] > 0 == groups[1]["weight_decay"]


def test_an_average_follows_and_leaves_the_module_its_own_weights() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = Average(module, 0.9)
    start = average.state["0.weight"].clone()
    with torch.no_grad():
        module.get_parameter("0.weight").add_(1.0)
    module(torch.rand(4, 2))
    for step in range(1, 200):
        average.follow(step)
    assert torch.allclose(average.state["0.weight"], start + 1, atol=1e-3)
    assert average.state["1.num_batches_tracked"] == 1
    with torch.no_grad():
        module.get_parameter("0.weight").add_(1.0)
    with average.in_place():
        assert torch.allclose(module.get_parameter("0.weight"), start + 1, atol=1e-3)
    assert torch.allclose(module.get_parameter("0.weight"), start + 2)


@given(seed=st.integers(0, 50), most=st.integers(1, 3))
def test_a_shift_moves_each_image_by_whole_pixels(seed: int, most: int) -> None:
    image = torch.zeros(6, 2, 9, 9)
    image[:, :, 4, 4] = torch.arange(1.0, 7)[:, None]
    change = augmentation([f"shift:{most}"])
    assert change is not None
    moved = change({"x": image, "tokens": torch.ones(6, 3)}, torch.Generator().manual_seed(seed))
    assert moved["x"].sum((2, 3)).tolist() == image.sum((2, 3)).tolist()
    places = moved["x"][:, 0].flatten(1).argmax(1)
    assert all(abs(int(place) // 9 - 4) <= most and abs(int(place) % 9 - 4) <= most for place in places)
    assert torch.equal(moved["tokens"], torch.ones(6, 3))


def test_a_flip_mirrors_some_images_and_a_function_may_do_what_it_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.rand(64, 1, 4, 4)
    change = augmentation(["flip"])
    assert change is not None
    flipped = change({"x": images}, torch.Generator().manual_seed(0))["x"]
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(flipped, images, strict=True)]
    assert all(torch.equal(a, b) or m for a, b, m in zip(flipped, images, mirrored, strict=True))
    assert 16 < sum(mirrored) < 48
    (tmp_path / "noise_of_mine.py").write_text(
        "import torch\n"
        "def noisy(tensors, generator):\n"
        "    return {n: t + torch.rand(t.shape, generator=generator) for n, t in tensors.items()}\n"
        "def torn(tensors, generator):\n"
        "    return {}\n"
    )
    monkeypatch.chdir(tmp_path)
    noisy, torn = augmentation(["noise_of_mine:noisy"]), augmentation(["noise_of_mine:torn"])
    assert noisy is not None
    assert torn is not None
    assert not torch.equal(noisy({"x": images}, torch.Generator())["x"], images)
    with pytest.raises(Exception, match="can't use what the augmentation"):
        torn({"x": images}, torch.Generator())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stands still but for what a test adds."""
    now = [0.0]
    monkeypatch.setattr("compress.training.batches.batch_size.time.perf_counter", lambda: now[0])
    return now


def test_a_batch_size_grows_while_it_pays(clock: list[float]) -> None:
    """A step takes 10 ms up to 256 samples, and grows with them beyond."""

    def step(size: int) -> None:
        clock[0] += 0.01 * max(1, size / 256)

    found = find_batch_size(step, samples=100_000, epochs=10)
    assert found.size == 256
    assert found.throughput == pytest.approx({32: 3200, 64: 6400, 128: 12_800, 256: 25_600, 512: 25_600})


def test_a_batch_size_leaves_enough_steps_and_takes_what_fits(clock: list[float]) -> None:
    def step(size: int) -> None:
        if size > 64:
            raise torch.cuda.OutOfMemoryError("full")
        clock[0] += 0.01

    assert find_batch_size(step, samples=1500, epochs=10).throughput == {32: 3200}
    found = find_batch_size(step, samples=100_000, epochs=10)
    assert found.size == 64
    assert found.throughput[128] is None


def test_a_network_of_depthwise_convolutions_is_not_trained_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.training.updates.precision.fast_bfloat16", lambda: True)
    assert precision_for("auto", Depthwise(), "cpu") == ("32-true", None)
    assert precision_for("auto", nn.Conv2d(3, 3, 3), "cpu") == ("bf16-mixed", None)
    assert precision_for("auto", nn.Conv2d(3, 3, 3), "cpu", exact=True) == ("32-true", None)
    monkeypatch.setattr("compress.training.updates.precision.fast_bfloat16", lambda: False)
    assert precision_for("auto", nn.Conv2d(3, 3, 3), "cpu") == ("32-true", None)
    asked, note = precision_for("bf16-mixed", nn.Conv2d(3, 3, 3), "cpu")
    assert asked == "bf16-mixed"
    assert note is not None


@pytest.mark.parametrize("sizes", [(50, 49), (3, 2), (2, 2)])
def test_processes_whose_shares_differ_have_as_many_parts(sizes: tuple[int, int]) -> None:
    wanted = min(8, sum(sizes) // 2)
    parts = [Batch({"x": torch.zeros(size, 1)}, None, torch.arange(size)).parts(wanted) for size in sizes]
    assert [len(part) for part in parts] == [wanted, wanted]
    assert all(len(part.places) > 0 for mine in parts for part in mine)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 cut short", b"no zip at all"])
def test_a_state_that_can_not_be_read_is_none(tmp_path: Path, damage: bytes) -> None:
    kept = KeptState(tmp_path / "training.state", 0)
    assert kept.load() is None
    kept.keep({"step": 3})
    assert kept.load() == {"step": 3}
    (tmp_path / "training.state").write_bytes(damage)
    assert kept.load() is None
    torch.save({"step": 3}, tmp_path / "training.state")
    assert kept.load() is None, "of another format"
    kept.drop()
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_is_watched_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of its Python package: there is no GPU here."""
    nvml: Any = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetUtilizationRates = lambda _handle: types.SimpleNamespace(gpu=87, memory=40)
    nvml.nvmlDeviceGetMemoryInfo = lambda _handle: types.SimpleNamespace(used=5 << 30)
    nvml.nvmlDeviceGetPowerUsage = lambda _handle: 312_500
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: types.SimpleNamespace(uuid="abc"))
    with GpuWatch(0, seconds=0.01) as watch:
        while len(watch.samples) < 2:
            time.sleep(0.01)
    assert watch.samples[0] | {"seconds": 0} == {
        "utilization": 87.0, "memory_bytes": float(5 << 30), "power_watts": 312.5, "seconds": 0,
    }  # fmt: skip


def test_without_nvml_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with GpuWatch(0) as watch:
        assert watch.reason == "the Python package 'nvidia-ml-py' is not installed"
    with GpuWatch(None) as watch:
        assert watch.reason is None
    assert watch.samples == []
