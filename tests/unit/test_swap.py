"""Folders that take the places of others: all of them or none, whenever the process is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compress.vetting.swap import MARK, MOVES, move, put_back, replacing_folder, staging

# Ends itself at the step that it is told, as the kernel would end it; the steps are calls that change a name.
KILLED = """
import os, signal, sys, time
from pathlib import Path
from compress.vetting import swap
left = int(sys.argv[2])
def step(event, args):
    global left
    if event in ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(step)
"""
FOLDER = (
    KILLED
    + """
with swap.replacing_folder(Path(sys.argv[1])) as beside:
    (beside / "sub").mkdir()
    (beside / "sub/file").write_text("new")
"""
)
SEVERAL = (
    KILLED
    + """
place = Path(sys.argv[1])
with swap.staging(place) as staged:
    for name in "ab":
        (staged / name).mkdir()
        (staged / name / "config").write_text("new")
        (staged / name / "2").mkdir()
    moves = [(staged / name / "2", place / name / "2") for name in "ab"]
    swap.move(staged, moves, {place / name / "config": staged / name / "config" for name in "abc"[:2]})
"""
)
STEPS = range(16)


def tree(folder: Path) -> dict[str, str | None]:
    return {str(path.relative_to(folder)): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


def killed(program: str, place: Path, step: int) -> bool:
    ended = subprocess.run([sys.executable, "-c", program, str(place), str(step)], capture_output=True, text=True)
    assert ended.returncode in (0, -9), ended.stderr
    return ended.returncode != 0


def test_a_folder_is_the_old_one_or_the_new_one_wherever_the_process_was_killed(tmp_path: Path) -> None:
    seen, ends = set(), set()
    for step in STEPS:
        place = tmp_path / str(step) / "out"
        (place / "sub").mkdir(parents=True)
        (place / "sub/file").write_text("old")
        ends.add(killed(FOLDER, place, step))
        put_back(place)
        found = (place / "sub/file").read_text()
        seen.add(found)
        assert [path.name for path in place.parent.iterdir()] == ["out"], step
    assert (seen, ends) == ({"old", "new"}, {True, False})


def test_several_moves_and_files_are_all_done_or_none(tmp_path: Path) -> None:
    old = {"a": None, "b": None, "a/config": "old", "b/config": "old"}
    new = {**old, "a/config": "new", "b/config": "new", "a/2": None, "b/2": None}
    seen = []
    for step in STEPS:
        place = tmp_path / str(step) / "repository"
        for name in "ab":
            (place / name).mkdir(parents=True)
            (place / name / "config").write_text("old")
        killed(SEVERAL, place, step)
        put_back(place)
        assert tree(place) in (old, new)
        seen.append(tree(place) == new)
    assert seen == sorted(seen)
    assert {*seen} == {False, True}


def test_a_move_that_fails_takes_back_those_before(tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    (place / "kept").write_text("old")
    with staging(place) as staged:
        (staged / "one").write_text("new")
        (staged / "kept").write_text("new")
        files = {place / "kept": staged / "kept", place / "more": staged / "nothing"}
        with pytest.raises(FileNotFoundError):
            move(staged, [(staged / "one", place / "one")], files)
    assert tree(tmp_path) == {"out": None, "out/kept": "old"}


def test_what_somebody_has_put_in_its_place_meanwhile_stays_and_so_does_what_was_set_aside(tmp_path: Path) -> None:
    for step in STEPS:
        place = tmp_path / str(step) / "out"
        place.mkdir(parents=True)
        (place / "file").write_text("old")
        killed(FOLDER, place, step)
        if not place.exists():
            break
    place.mkdir()
    (place / "file").write_text("somebody's")
    for _ in range(2):
        put_back(place)
    assert (place / "file").read_text() == "somebody's"
    assert [path.read_text() for path in place.parent.glob(".out.*/old/file")] == ["old"]


def test_one_that_is_at_work_is_left_alone(tmp_path: Path) -> None:
    with staging(tmp_path / "out") as staged:
        put_back(tmp_path / "out")
        assert (staged / MARK).exists()
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        (".out.01234567.part", None),
        (".out.0123456g.part", ""),
        (".other.01234567.part", ""),
        ("out.part", ""),
        (".out.01234567.old", ""),
    ],
)
def test_a_folder_without_name_and_mark_is_the_user_s(tmp_path: Path, name: str, mark: str | None) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("mine")
    if mark is not None:
        (tmp_path / name / MARK).write_text(mark)
    before = tree(tmp_path)
    with replacing_folder(tmp_path / "out") as beside:
        (beside / "made").touch()
    assert tree(tmp_path) == {**before, "out": None, "out/made": ""}


@pytest.mark.parametrize(
    "text",
    [
        '{"moves": [["../victim", "out"]], "files": []}',
        '{"moves": [["/etc/nothing", "victim"]], "files": []}',
        '{"moves": [], "files": [["victim", "../../victim"]]}',
        '{"moves": [], "files": [["here/.out.01234567.part/hook", "victim"]]}',
        '{"moves": [[".out.01234567.part/x", "victim"]], "files": []}',
        '{"mark": [1, 2], "moves": [[".out.01234567.part/x", "victim"]], "files": []}',
        '{"moves": 7}',
        "[" * 1000,
        "",
    ],
)
def test_moves_that_no_run_has_written_down_are_not_made(tmp_path: Path, text: str) -> None:
    left = tmp_path / "here" / ".out.01234567.part"
    left.mkdir(parents=True)
    (left / MARK).touch()
    (left / MOVES).write_text(text)
    (tmp_path / "here" / "victim").write_text("mine")
    before = tree(tmp_path)
    put_back(tmp_path / "here" / "out")
    assert tree(tmp_path) == before


def test_what_a_killed_run_left_elsewhere_is_not_done_in_a_copy(tmp_path: Path) -> None:
    """A repository that is cloned, or an archive, may hold such a folder, and links that lead anywhere."""
    (tmp_path / "theirs" / "out").mkdir(parents=True)
    (tmp_path / "theirs" / "victim").write_text("theirs")
    for left in range(40):
        subprocess.run([sys.executable, "-c", FOLDER, str(tmp_path / "theirs" / "out"), str(left)], check=False)
        if list((tmp_path / "theirs").glob(f".out.*.part/{MOVES}")):
            break
    (staged,) = {path.parent for path in (tmp_path / "theirs").glob(f".out.*.part/{MOVES}")}
    copy = tmp_path / "ours" / staged.name
    shutil.copytree(staged, copy)
    told = json.loads((copy / MOVES).read_text())
    (copy / "hook").write_text("evil")
    (copy / MOVES).write_text(json.dumps({**told, "files": [[f"{staged.name}/hook", "victim"]]}))
    (tmp_path / "ours" / "victim").write_text("mine")
    before = tree(tmp_path / "ours")
    put_back(tmp_path / "ours" / "out")
    assert tree(tmp_path / "ours") == before
    put_back(tmp_path / "theirs" / "out")  # where it was made, it is
    assert not staged.exists()


def test_another_user_s_folder_is_left_alone(tmp_path: Path) -> None:
    left = tmp_path / ".out.01234567.part"
    left.mkdir()
    (left / MARK).touch()
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(left, 12345, 12345)
    put_back(tmp_path / "out")
    assert left.exists()
