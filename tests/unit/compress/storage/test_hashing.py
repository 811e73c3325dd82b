"""A result is found again only for the same data: all of it that is used."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from compress import pipeline
from compress.artifact import Signature, TensorSpec
from compress.data import dataset
from compress.evaluate.metric_choice import find_metric
from compress.formats import checkpoint
from compress.jobs import export as job
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.quantize_within import QuantizeWithin
from compress.storage import plain_form
from compress.storage.hashing import digest_of_arrays, digest_of_files, digest_of_samples
from compress.training.finetune import Finetune

ONE = Signature((TensorSpec("x", "float32", ("batch", 3)),), ())
X = torch.arange(3000, dtype=torch.float32).reshape(1000, 3)
Y = torch.arange(1000) % 7


def with_one_other(labels: torch.Tensor, at: int = 333) -> torch.Tensor:
    changed = labels.clone()
    changed[at] = 6 - changed[at]
    return changed


class Computed(Dataset[Any]):
    """A class of the user's own, which counts what is asked of it."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.labels, self.asked = labels, 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked += 1
        return X[place], self.labels[place]


class Shifted(TensorDataset):
    """Holds the tensors of its base, and gives others."""

    shift = 0

    def __getitem__(self, place: int) -> tuple[torch.Tensor, ...]:
        x, y = super().__getitem__(place)  # type: ignore[no-untyped-call]
        return x + self.shift, y


class Noisy(Computed):
    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[place] + torch.rand(3), self.labels[place]


def sha256(given: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("tests.unit.compress.storage.test_hashing.GIVEN", given)
    return dataset.Dataset.open("tests.unit.compress.storage.test_hashing:given", ONE).sha256


GIVEN: Any = None


def given() -> Any:
    return GIVEN


@pytest.mark.parametrize(
    "make",
    [
        lambda y: TensorDataset(X, y),
        lambda y: Subset(TensorDataset(X, y), range(1000)),
        lambda y: ConcatDataset([TensorDataset(X[:500], y[:500]), TensorDataset(X[500:], y[500:])]),
        Computed,
        lambda y: Subset(Computed(y), range(1000)),
        lambda y: Shifted(X, y),
        lambda y: [(x, label) for x, label in zip(X, y, strict=True)],
        lambda y: {"x": X.numpy(), "label": y.numpy()},
        Noisy,
    ],
)
def test_one_label_among_many_makes_other_data(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sha256(make(Y), monkeypatch) == sha256(make(Y), monkeypatch)
    assert sha256(make(Y), monkeypatch) != sha256(make(with_one_other(Y)), monkeypatch)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Subset(TensorDataset(X, Y), range(500)), Subset(TensorDataset(X, Y), range(500, 1000))),
        (Subset(TensorDataset(X, Y), [1, 2]), Subset(TensorDataset(X, Y), [2, 1])),
        (TensorDataset(X, Y), TensorDataset(X, Y.int())),
        (TensorDataset(X, Y), TensorDataset(X.reshape(1000, 3, 1), Y)),
    ],
)
def test_other_samples_order_types_and_shapes_are_other_data(first: Any, second: Any) -> None:
    assert digest_of_samples(first, nothing) != digest_of_samples(second, nothing)


def nothing(_index: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    raise AssertionError("no sample is made of a dataset that holds tensors")


def test_what_a_derived_class_computes_counts_not_what_its_base_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = Shifted(X, Y)
    shifted.shift = 1
    assert sha256(Shifted(X, Y), monkeypatch) != sha256(shifted, monkeypatch)


def test_how_a_long_hash_goes_on_is_told_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []

    class Watching(job.Silent):
        def started(self, stage: str) -> Any:
            return lambda done, total, _note: told.append((stage, done, total))

    def digest() -> str:
        labels = Computed(Y)
        return digest_of_samples(labels, lambda index: {"y": np.array([int(labels[int(i)][1]) for i in index])})

    alone = digest()
    with pipeline.hashing_shown(Watching()):
        monkeypatch.setattr(pipeline, "SHORT_SECONDS", 1e9)
        assert digest() == alone
        assert told == []
        monkeypatch.setattr(pipeline, "SHORT_SECONDS", -1.0)
        assert digest() == alone
    assert told == [("data", 256, 1000), ("data", 512, 1000), ("data", 768, 1000), ("data", 1000, 1000)]
    digest()
    assert len(told) == 4, "nobody listens any more"


def test_samples_are_made_for_the_hash_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Computed(Y)
    monkeypatch.setattr("tests.unit.compress.storage.test_hashing.GIVEN", counted)
    opened = dataset.Dataset.open("tests.unit.compress.storage.test_hashing:given", ONE)
    assert counted.asked < 10
    first = opened.sha256
    assert 1000 <= counted.asked < 1010
    assert opened.sha256 == first
    assert counted.asked < 1010


def boxes(changed: int) -> np.ndarray[Any, Any]:
    """Labels of unequal length, one of which is so long that numpy prints its ends alone."""
    found = np.empty(2, object)
    found[0], found[1] = np.zeros(3000), np.zeros(4)
    found[0][1500] = changed
    return found


def test_labels_of_unequal_length_are_known_by_what_is_in_them() -> None:
    assert digest_of_arrays({"label": boxes(1)}) == digest_of_arrays({"label": boxes(1)})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.zeros(8, np.int8), np.zeros(8, np.uint8)),
        (np.zeros((2, 6)), np.zeros((3, 4))),
        (np.array(["a", "bc"]), np.array(["ab", "c"])),
        (np.array(["a", None], object), np.array(["a", 1], object)),
        (boxes(0), boxes(1)),
    ],
)
def test_the_same_bytes_of_another_type_or_shape_are_other_data(first: Any, second: Any) -> None:
    assert digest_of_arrays({"x": first}) != digest_of_arrays({"x": second})
    assert digest_of_arrays({"x": first}) != digest_of_arrays({"y": first})


def test_a_folder_whose_files_change_names_is_other_data(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    np.save(tmp_path / "label.npy", Y.numpy())
    first = dataset.Dataset.open(str(tmp_path), ONE).sha256
    (tmp_path / "label.npy").rename(tmp_path / "labels.npy")
    assert dataset.Dataset.open(str(tmp_path), ONE).sha256 != first


SCORES = """
import numpy as np
from {name}_inner import sign
def score(outputs, labels):
    return sign * np.ones(len(labels))
def change(tensors, generator):
    return tensors
"""


def test_code_is_known_by_what_it_says_not_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result kept under a function's name is not that of the function as it is now."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "hashed_code"
    own, inner = tmp_path / f"{name}.py", tmp_path / f"{name}_inner.py"
    inner.write_text("sign = 1\n", encoding="utf-8")
    own.write_text(SCORES.format(name=name), encoding="utf-8")
    data = dataset.Dataset("", {"x": X.numpy()}, Y.numpy(), "0" * 64)
    model = TorchModel(torch.nn.Linear(3, 2), ONE)

    def keys() -> list[str]:
        metric = find_metric(f"{name}:score", data, ONE)
        within = QuantizeWithin(QuantizeOnnx("static", data, "minmax", False), model, data, metric, 1.0)
        training = TrainingOptions(augment=("flip", f"{name}:change"))
        return [json.dumps(dict(stage.options)) for stage in (within, Finetune(data, model, training))]

    before = keys()
    assert keys() == before
    for file in (own, inner):
        file.write_text(file.read_text(encoding="utf-8") + "# other\n", encoding="utf-8")
        after = keys()
        assert all(one != other for one, other in zip(before, after, strict=True))
        before = after


def test_the_output_that_chose_is_a_part_of_what_a_result_is_kept_under() -> None:
    outputs = tuple(TensorSpec(name, "float32", ("batch", 4)) for name in ("a", "b"))
    signature = Signature(ONE.inputs, outputs)
    data = dataset.Dataset("", {"x": X.numpy()}, Y.numpy() % 4, "0" * 64)
    model = TorchModel(torch.nn.Linear(3, 2), signature)
    keys = {
        json.dumps(
            dict(
                QuantizeWithin(
                    QuantizeOnnx("static", data, "minmax", False),
                    model,
                    data,
                    find_metric("top1", data, signature, output=name),
                    1.0,
                ).options
            )
        )
        for name in ("a", "b")
    }
    assert len(keys) == 2


class Buffered(nn.Module):
    """A table that its graph names, one that a layer holds, and one that the graph alone has."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", table)
        self.register_buffer("unused", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)
        self.first = table[:1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x) + self.table.to(x.dtype) + self.first
        return found


def test_numbers_of_buffers_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = digest_of_arrays

    def spy(arrays: Any) -> str:
        hashed.extend(array.nbytes for array in arrays.values())
        return real(arrays)

    monkeypatch.setattr(plain_form, "digest_of_arrays", spy)
    found = []
    for at, value in ((0, 0.0), (0, 1.0), (5, 1.0)):
        table = torch.zeros(2, 3)
        table.view(-1)[at] = value
        found.append(checkpoint.fingerprint_of_module(TorchModel(Buffered(table).eval(), ONE)))
    assert len(set(found)) == 3, "they are in it still"
    assert hashed == [12, 12, 12], "what is no buffer, as `first`, is hashed with the graph"


def test_code_is_known_by_the_releases_of_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric of scikit-learn's may be another one in its next release."""
    (tmp_path / "judging.py").write_text("import numpy\nfrom helper import wanted\n\ndef metric(): ...\n")
    (tmp_path / "helper.py").write_text("import thirdparty.part\nwanted = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "site-packages"
    (package / "thirdparty").mkdir(parents=True)
    (package / "thirdparty" / "__init__.py").touch()
    (package / "thirdparty" / "part.py").touch()
    monkeypatch.syspath_prepend(package)

    def release(version: str) -> str:
        for old in package.glob("*.dist-info"):
            shutil.rmtree(old)
        told = package / f"thirdparty-{version}.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: thirdparty\nVersion: {version}\n")
        (told / "top_level.txt").write_text("thirdparty\n")
        importlib.invalidate_caches()
        return digest_of_files("judging")

    first = release("1.0")
    assert release("1.0") == first
    assert release("2.0") != first
