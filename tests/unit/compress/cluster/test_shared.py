"""The folder that machines share: what is put there is found by its content, and others may not write there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compress.cluster.shared import LAYERS, Shared
from compress.errors import ArtifactError, RecipeError, ResourceError


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared.at(tmp_path / "shared")


@pytest.mark.parametrize("named", ["s3://bucket/work", "gs://bucket", "file:///tmp/x"])
@pytest.mark.parametrize("as_path", [False, True])
def test_an_address_is_no_folder(named: str, as_path: bool) -> None:
    with pytest.raises(RecipeError, match="--shared can't be"):
        Shared.at(Path(named) if as_path else named)


def test_a_file_is_found_under_its_name_and_by_its_content(shared: Shared, tmp_path: Path) -> None:
    file = tmp_path / "eval.npz"
    file.write_bytes(b"one")
    first = shared.place(file)
    assert (first.name, first.read_bytes()) == ("eval.npz", b"one")
    assert shared.place(file) == first
    file.write_bytes(b"two")
    assert shared.place(file) != first
    assert first.read_bytes() == b"one"


def test_a_folder_keeps_its_files_where_they_were(shared: Shared, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    (folder / "a").mkdir(parents=True)
    (folder / "a/1.png").write_bytes(b"1")
    (folder / "link.png").symlink_to(folder / "a/1.png")
    placed = shared.place(folder)
    assert placed.is_dir()
    assert {path.relative_to(placed).as_posix() for path in placed.rglob("*.png")} == {"a/1.png", "link.png"}
    assert not (placed / "link.png").is_symlink()


def test_a_model_has_its_weights_beside_it_and_nothing_else(shared: Shared, tmp_path: Path) -> None:
    for name in ("model.onnx", "model.data", "private"):
        (tmp_path / name).write_text(name)
    placed = shared.place(tmp_path / "model.onnx", [tmp_path / "model.onnx", tmp_path / "model.data"])
    assert sorted(path.name for path in placed.parent.iterdir()) == ["model.data", "model.onnx"]


def test_what_lies_in_the_folder_is_read_where_it_is(shared: Shared) -> None:
    file = shared.given / "eval.npz"
    file.write_bytes(b"one")
    assert shared.place(file) == file


def test_a_folder_that_others_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ArtifactError, match="won't keep stages"):
        Shared.at(folder)


def test_where_nothing_was_kept_nothing_is_left(shared: Shared, tmp_path: Path) -> None:
    shared.remove_empty()
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_is_not_seen_is_told(shared: Shared, tmp_path: Path) -> None:
    word = shared.write_probe()
    assert shared.see_probe(word) == ""
    assert shared.remove_probe(word) == 1
    assert "is not in the folder of that name there" in shared.see_probe(word)
    shared.remove_empty()
    assert shared.see_probe(word) == "it has no such folder"


def test_what_a_sensitivity_removes_is_its_own(tmp_path: Path) -> None:
    search, layers = Shared.at(tmp_path), Shared.at(tmp_path, LAYERS)
    (search.root / "stages" / "kept").write_text("")
    (layers.root / "stages" / "kept").write_text("")
    (layers.root / "mine.txt").write_text("")
    layers.clear()
    assert (search.root / "stages" / "kept").exists()
    assert [path.name for path in layers.root.iterdir()] == ["mine.txt"]


def test_a_folder_that_is_reached_by_a_link_keeps_its_form(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "1_Pooling/config.json"):
        (real / name).write_text(name)
    (tmp_path / "link").symlink_to("real")
    shared = Shared.at(tmp_path / "shared")
    for path in (real, tmp_path / "link"):
        there = shared.place(path, [path / "config.json", path / "1_Pooling/config.json"])
        assert (there / "1_Pooling/config.json").read_text() == "1_Pooling/config.json"
        assert (there / "config.json").read_text() == "config.json"


def test_files_of_one_name_in_several_folders_are_refused(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "weights.bin").write_text(folder)
    (tmp_path / "a" / "model.onnx").write_text("")
    files = [tmp_path / "a/model.onnx", tmp_path / "a/weights.bin", tmp_path / "b/weights.bin"]
    with pytest.raises(ResourceError, match="can't bring"):
        Shared.at(tmp_path / "shared").place(tmp_path / "a/model.onnx", files)


def test_a_shared_folder_keeps_the_path_that_it_is_named_by(tmp_path: Path) -> None:
    (tmp_path / "disk7").mkdir()
    (tmp_path / "mnt").symlink_to("disk7")
    shared = Shared.at(tmp_path / "mnt")
    assert (shared.given, shared.root) == (tmp_path / "mnt", tmp_path / "mnt/ray")
    (tmp_path / "disk7/eval.npz").write_bytes(b"1")
    (tmp_path / "model.pt").write_bytes(b"2")
    for there in (tmp_path / "mnt/eval.npz", tmp_path / "disk7/eval.npz"):
        assert shared.place(there) == tmp_path / "mnt/eval.npz"
    assert tmp_path / "mnt/ray/inputs" in shared.place(tmp_path / "model.pt").parents


def damaged_by(change: str, placed: Path) -> None:
    file = placed / "a/1.png" if placed.is_dir() else placed
    if change == "other bytes":
        file.write_bytes(b"2")
    elif change == "cut off":
        file.write_bytes(b"")
    elif change == "one file more":
        (file.parent / "2.png").write_bytes(b"2")
    else:
        file.unlink()


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("change", ["other bytes", "cut off", "one file more", "gone"])
def test_an_input_that_is_no_longer_what_it_is_named_by_is_told_and_put_there_anew(
    shared: Shared, tmp_path: Path, change: str, folder: bool
) -> None:
    (tmp_path / "images/a").mkdir(parents=True)
    (tmp_path / "images/a/1.png").write_bytes(b"1")
    source = tmp_path / "images" if folder else tmp_path / "images/a/1.png"
    placed = shared.place(source)
    assert shared.check(placed) == ""
    damaged_by(change, placed)
    assert str(placed) in shared.check(placed)
    assert shared.place(source) == placed
    assert shared.check(placed) == ""
    assert [path.read_bytes() for path in placed.parent.rglob("*.png")] == [b"1"]
    assert [path.name for path in (shared.root / "inputs").iterdir()] == [placed.parent.name], "nothing is left beside"


def test_what_the_user_keeps_in_the_folder_has_no_name_to_be_held_against(shared: Shared) -> None:
    assert shared.check(shared.given / "eval.npz") == ""


def test_a_file_that_changes_while_it_is_copied_is_told(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "eval.npz"
    file.write_bytes(b"1")
    copy = shutil.copyfile

    def written_meanwhile(source: Path, target: Path) -> None:
        file.write_bytes(b"2")
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", written_meanwhile)
    with pytest.raises(ResourceError, match="can't bring"):
        shared.place(file)
    assert list((shared.root / "inputs").iterdir()) == []
