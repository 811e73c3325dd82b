"""Data is checked against the model before any work starts, and every flaw is named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.artifact import Signature, TensorSpec
from compress.console.wording import AssumedWarning
from compress.data.dataset import Dataset
from compress.errors import DatasetError, SignatureError, ToolkitError

X = TensorSpec.parse("x:float32[batch,3]")
ONE = Signature((X,), (TensorSpec.parse("y:float32[batch,2]"),))
TWO = Signature((X, TensorSpec.parse("kind:int64[batch]")), ONE.outputs)
x = np.arange(15, dtype=np.float32).reshape(5, 3)


def given_by_function() -> dict[str, np.ndarray[Any, Any]]:
    return {"x": x, "label": np.arange(5)}


def saved(folder: Path, **arrays: np.ndarray[Any, Any]) -> str:
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    return str(folder / "data.npz")


@pytest.mark.parametrize("label", ["label", "labels", "target", "targets", "y"])
def test_labels_go_by_their_usual_names(tmp_path: Path, label: str) -> None:
    data = Dataset.open(saved(tmp_path, x=x, **{label: np.arange(5)}), ONE)
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["y", "target", "label"])
def test_an_input_of_a_usual_name_of_labels_is_an_input(tmp_path: Path, name: str) -> None:
    other = TensorSpec(name, "float32", ("batch", 3))
    arrays = {"x": x, name: x + 1}
    data = Dataset.open(saved(tmp_path, **arrays), Signature((X, other), ONE.outputs))
    assert np.array_equal(data.inputs[name], x + 1)
    assert data.labels is None
    labelled = Dataset.open(saved(tmp_path, **arrays, targets=np.arange(5)), Signature((X, other), ONE.outputs))
    assert labelled.labels is not None
    alone = Dataset.open(saved(tmp_path, **{name: x}), Signature((other,), ONE.outputs))
    assert alone.labels is None


def test_one_input_takes_the_only_array_whatever_its_name(tmp_path: Path) -> None:
    with pytest.warns(AssumedWarning, match="'pictures'"):
        assert np.array_equal(Dataset.open(saved(tmp_path, pictures=x), ONE).inputs["x"], x)


BEYOND = {
    "an int64 for int32": (
        "int32",
        np.array([0, 1 << 40]),
        "it holds 1099511627776, and int32, which that takes, goes",
    ),
    "below, for int8": ("int8", np.array([-129, 5], np.int16), "it holds -129, and int8"),
    "a uint64 for uint8": ("uint8", np.array([256, 0], np.uint64), "it holds 256, and uint8"),
    "a float64 for float32": ("float32", np.array([0.0, -1e300]), r"it holds -1e\+300, and float32"),
    "a float32 for float16": ("float16", np.array([70000.0, 0], np.float32), r"it holds 70000\.0, and float16"),
}


@pytest.mark.parametrize("kept", ["npz", "npy", "shards"])
@pytest.mark.parametrize("case", BEYOND)
def test_values_that_the_models_type_does_not_hold_are_refused(tmp_path: Path, case: str, kept: str) -> None:
    """An integer would wrap: a token would be another token."""
    dtype, values, why = BEYOND[case]
    takes = Signature((TensorSpec("t", dtype, ("batch",)),), ONE.outputs)
    if kept == "npy":
        np.save(tmp_path / "t.npy", values)
    else:
        np.savez_compressed(tmp_path / "1.npz", t=values)
    source = str(tmp_path / "1.npz") if kept == "npz" else str(tmp_path)
    with pytest.raises(DatasetError, match=why) as caught:
        Dataset.open(source, takes)
    assert caught.value.what == f"{source} does not fit 't'"
    fits = np.zeros(3, values.dtype)
    np.save(tmp_path / "t.npy", fits)
    assert Dataset.open(str(tmp_path / "t.npy"), takes).take(slice(0, 3))[0]["t"].dtype == np.dtype(dtype)


def test_the_same_numbers_in_another_width_are_taken(tmp_path: Path) -> None:
    data = Dataset.open(saved(tmp_path, x=x.astype(np.float64)), ONE)
    assert data.inputs["x"].dtype == np.float32


def test_npy_and_folders_and_functions_give_the_same_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", x)
    sources = [str(tmp_path / "x.npy"), str(tmp_path), "tests.unit.compress.data.test_dataset:given_by_function"]
    for source in sources:
        assert np.array_equal(Dataset.open(source, ONE).inputs["x"], x)


def test_several_inputs_go_by_name_and_stay_together_in_batches(tmp_path: Path) -> None:
    data = Dataset.open(saved(tmp_path, x=x, kind=np.arange(5)), TWO)
    batches = [inputs for inputs, _ in data.batches(2)]
    assert [len(batch["x"]) for batch in batches] == [2, 2, 1]
    assert np.concatenate([batch["kind"] for batch in batches]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arrays", "kind", "says"),
    [
        ({}, DatasetError, "lacks the input"),
        ({"x": x[:0], "kind": np.zeros(0, np.int64)}, DatasetError, "is empty"),
        ({"x": x, "kind": np.arange(4)}, DatasetError, "unequal length"),
        ({"x": x, "kind": np.arange(5), "label": np.arange(3)}, DatasetError, "unequal length"),
        ({"x": x[:, :2], "kind": np.arange(5)}, SignatureError, "float32[5, 2]"),
        ({"x": x.astype(np.int32), "kind": np.arange(5)}, SignatureError, "int32"),
        ({"x": np.full((5, 3), np.nan, np.float32), "kind": np.arange(5)}, DatasetError, "NaN"),
        ({"x": x, "sort": np.arange(5)}, DatasetError, "lacks the input 'kind'"),
        ({"x": np.array([{}] * 5), "kind": np.arange(5)}, DatasetError, "not a whole .npz"),
    ],
)
def test_flaws_are_named(tmp_path: Path, arrays: dict[str, Any], kind: type[ToolkitError], says: str) -> None:
    with pytest.raises(kind) as caught:
        Dataset.open(saved(tmp_path, **arrays), TWO)
    assert says in str(caught.value)


@pytest.mark.parametrize("given", [np.float32(2), np.ones(1, np.float32), np.ones(5, np.float32)])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("first", [True, False])
def test_an_input_that_a_call_takes_one_of_is_told(
    tmp_path: Path, given: Any, shape: tuple[int, ...], *, first: bool
) -> None:
    specs = (TensorSpec("x", "float32", ("batch", 3)), TensorSpec("k", "float32", shape))
    signature = Signature(specs[::-1] if first else specs, ONE.outputs)
    with pytest.raises(DatasetError) as caught:
        Dataset.open(saved(tmp_path, x=x, k=given), signature)
    assert f"a call takes one {specs[1]}" in caught.value.why
    assert "k:float32[batch" in caught.value.mend


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (lambda _: "nothing.npz", "no such file"),
        (lambda f: str((f / "a.npz").write_bytes(b"PK\3\4 cut") and f / "a.npz"), "not a whole"),
        (lambda f: str((f / "a.npz").write_bytes(b"text") and f / "a.npz"), "not a whole"),
        (lambda _: "no_such_module:function", "ModuleNotFoundError"),
        (lambda _: "tests.unit.compress.data.test_dataset:nothing", "AttributeError"),
        (lambda _: "tests.unit.compress.data.test_dataset:saved", "TypeError"),
    ],
)
def test_sources_that_cannot_be_read_are_errors(tmp_path: Path, source: Callable[[Path], str], says: str) -> None:
    with pytest.raises(DatasetError) as caught:
        Dataset.open(source(tmp_path), ONE)
    assert says in caught.value.why


def test_the_hash_follows_the_content(tmp_path: Path) -> None:
    first = Dataset.open(saved(tmp_path, x=x), ONE).sha256
    assert Dataset.open(saved(tmp_path, x=x), ONE).sha256 == first
    assert Dataset.open(saved(tmp_path, x=x + 1), ONE).sha256 != first


STRANGERS = {
    ".made-of": "stranger:data",
    "images.json": '{"files": ["/etc/hostname"], "labels": null, "processor": "/", "digest": "another\'s"}',
}


@pytest.mark.parametrize("where", ["anywhere", "among temporary files"])
def test_what_the_toolkit_tells_itself_is_not_believed_in_a_folder_that_somebody_has_brought(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one named code to run, the other files to read and whose results they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "samples"
    if where == "among temporary files":  # one like it of a process that has ended
        folder = tmp_path / "compress-stranger/arrays/samples"
        folder.mkdir(parents=True)
        (tmp_path / "compress-stranger/owner").write_text("-")
    folder.mkdir(exist_ok=True)
    np.save(folder / "x.npy", x)
    (tmp_path / "stranger.py").write_text("import pathlib\npathlib.Path('canary').touch()\ndef data(): return {}\n")
    for name, text in STRANGERS.items():
        (folder / name).write_text(text)
    data = Dataset.open(str(folder), ONE)
    assert data.source == str(folder)
    assert len(data) == len(x)
    assert data.sha256 != "another's"
    assert not (tmp_path / "canary").exists()


NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "its name": ({"x": x}, ""),
    "its name, with labels": ({"x": x, "label": np.arange(5)}, ""),
    "another": ({"pictures": x}, "no array named 'x': the model's input takes 'pictures'"),
    "another, with labels": ({"pictures": x, "y": np.arange(5)}, "the model's input takes 'pictures'"),
    "labels by another name": ({"x": x, "classes": np.arange(5)}, "no labels in .* .not used: classes.*label, labels"),
    "two that may be labels": (
        {"x": x, "target": np.ones(5), "label": np.arange(5)},
        r"labels in .* are 'label' .not used: 'target'.*alone, as 'label'",
    ),
    "three that may be labels": (
        {"x": x, "y": np.ones(5), "labels": np.arange(5), "label": np.arange(5)},
        "are 'label' .not used: 'labels', 'y'",
    ),
    "labels, and one that nothing takes": ({"x": x, "id": np.arange(5), "y": np.arange(5)}, ""),
}


@pytest.mark.parametrize("case", NAMED)
def test_which_array_goes_to_which_input_is_told_where_names_do_not_say(tmp_path: Path, case: str) -> None:
    arrays, told = NAMED[case]
    source = saved(tmp_path, **arrays)
    with pytest.warns(AssumedWarning, match=told) if told else contextlib.nullcontext():
        data = Dataset.open(source, ONE)
    assert np.array_equal(data.inputs["x"], x)
    assert (data.labels is not None) == bool({"y", "label"} & arrays.keys())
    if "label" in arrays:
        assert np.array_equal(data.labels, np.arange(5))  # type: ignore[arg-type]


@pytest.mark.parametrize("arrays", [{"x": x, "sort": np.arange(5)}, {"p": x, "q": np.arange(5)}, {"x": x}])
def test_names_that_fit_in_part_or_not_at_all_are_refused_where_there_are_several_inputs(
    tmp_path: Path, arrays: dict[str, Any]
) -> None:
    with pytest.raises(DatasetError, match="lacks the input") as caught:
        Dataset.open(saved(tmp_path, **arrays), TWO)
    assert all(name in caught.value.why for name in arrays)
