"""Random samples of a torch Dataset are the same whenever they are judged by, and others in each step of a training."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from compress.artifact import TensorSpec
from compress.console.wording import AssumedWarning
from compress.data.dataset import Dataset
from compress.data.sources import Fetcher
from compress.data.steady_samples import refuse_unsteady
from compress.errors import DatasetError
from compress.signature import Signature
from compress.training.batches.loader import tensors_of

ONE = Signature((TensorSpec("x", "float32", ("batch", 3)),), (TensorSpec("y", "float32", ("batch", 2)),))
CODE = """
import random
import time
import uuid
import numpy as np
import torch


class Noisy:
    def __len__(self):
        return 20

    def __getitem__(self, at):
        return torch.full((3,), float(at)) + random.random() + float(np.random.rand()) + torch.rand(3), at % 2


class Own(Noisy):
    rng = np.random.default_rng(0)

    def __getitem__(self, at):
        return self.rng.random(3, np.float32), at % 2


class Unknown(Noisy):
    def __getitem__(self, at):
        return torch.tensor([at, 1.0, float("nan")]), at % 2


class Told(Noisy):
    # What is beside the inputs and the label is another one each time, or nothing that numbers are made of.
    def __getitem__(self, at):
        told = {"at": time.time_ns(), "id": str(uuid.uuid4()), "of": {"box": np.arange(4)}, "uneven": [[1], [2, 3]]}
        return {"x": torch.full((3,), float(at)), "label": at % 2, **told}


class Three(Noisy):
    def __getitem__(self, at):
        return torch.full((3,), float(at)), 10 + at, at % 2


class Later(Noisy):
    def __getitem__(self, at):
        return {"x": torch.zeros(3)} | ({"label": at % 2} if at else {})


class Unlabelled(Told):
    def __getitem__(self, at):
        return {name: value for name, value in super().__getitem__(at).items() if name != "label"}
"""


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "steadily.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "steadily", raising=False)
    return lambda name: Dataset.open(f"steadily:{name}", ONE)


def test_a_sample_is_the_same_whenever_and_beside_whatever_it_is_read(opened: object) -> None:
    data: Dataset = opened("Noisy")  # type: ignore[operator]
    whole = data.take(slice(0, 20))[0]["x"]
    assert (np.concatenate([inputs["x"] for inputs, _ in data.batches(7)]) == whole).all()
    assert (data.inputs["x"][:] == whole).all()
    assert (data.part(np.array([3, 11])).take(slice(0, 2))[0]["x"] == whole[[3, 11]]).all()
    assert len(np.unique(whole - np.arange(20)[:, None])) == 60, "each has noise of its own"
    again: Dataset = opened("Noisy")  # type: ignore[operator]
    assert (again.take(slice(0, 20))[0]["x"] == whole).all()
    assert again.sha256 == data.sha256


def test_what_is_judged_leaves_the_generators_as_they_were(opened: object) -> None:
    data: Dataset = opened("Noisy")  # type: ignore[operator]
    before = random.getstate(), torch.get_rng_state()
    data.take(slice(0, 5))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_training_has_others_in_each_step(opened: object) -> None:
    data: Dataset = opened("Noisy")  # type: ignore[operator]
    first, second, again = (tensors_of(data, np.arange(5), seed)[0]["x"] for seed in (1, 2, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_samples_of_a_generator_of_their_own_are_no_evaluation_data(opened: object) -> None:
    with pytest.raises(DatasetError, match="can't judge on steadily:Own") as caught:
        refuse_unsteady("--eval", opened("Own"))  # type: ignore[operator]
    assert "sample 0 of --eval is another one each time" in caught.value.why
    refuse_unsteady("--eval", opened("Noisy"))  # type: ignore[operator]
    refuse_unsteady("--eval", opened("Unknown"))  # type: ignore[operator]


def signature_of(*named: str) -> Signature:
    """x, and more inputs of a number each."""
    numbers = (TensorSpec(name, "int64", ("batch",)) for name in named)
    return Signature((ONE.inputs[0], *numbers), ONE.outputs)


@pytest.mark.parametrize("name", ["y2", "label", "target", "y"])
@pytest.mark.usefixtures("opened")
def test_an_input_that_is_called_as_labels_are_is_no_label(name: str) -> None:
    data = Dataset.open("steadily:Three", signature_of(name))
    inputs, labels = data.take(slice(0, 3))
    assert inputs[name].tolist() == [10, 11, 12]
    assert labels is not None
    assert labels.tolist() == [0, 1, 0]


@pytest.mark.usefixtures("opened")
def test_where_inputs_have_all_names_of_labels_a_label_is_refused() -> None:
    class Seven:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, at: int) -> tuple[object, ...]:
            return (torch.zeros(3), *range(6))

    names = ["label", "labels", "target", "targets", "y"]
    with pytest.raises(DatasetError, match="can't use the samples of them") as caught:
        Fetcher(Seven(), ["x", *names], "them", names)
    assert "have all names of labels" in caught.value.why


@pytest.mark.usefixtures("opened")
def test_labels_that_the_first_sample_lacks_are_not_left_out_in_silence() -> None:
    data = Dataset.open("steadily:Later", ONE)
    with pytest.raises(DatasetError, match="unlike each other") as caught:
        data.take(slice(0, 3))
    assert "the first sample has no 'label'" in caught.value.why


def test_what_no_model_takes_of_a_sample_is_never_looked_at(opened: object) -> None:
    data: Dataset = opened("Told")  # type: ignore[operator]
    refuse_unsteady("--eval", data)
    inputs, labels = data.take(slice(0, 3))
    assert inputs.keys() == {"x"}
    assert labels is not None
    assert labels.tolist() == [0, 1, 0]
    assert data.sha256 == opened("Told").sha256  # type: ignore[operator]
    with pytest.warns(AssumedWarning, match=r"no labels in steadily:Unlabelled \(not used: at, id, of, uneven\)"):
        opened("Unlabelled")  # type: ignore[operator]
