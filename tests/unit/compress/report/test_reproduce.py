"""reproduce.sh runs the very command in the very folder, whatever the names, once the inputs are the same."""

from __future__ import annotations

import hashlib
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compress
from compress.cli import main
from compress.jobs.evidence import script_of
from compress.options import ExportOptions
from compress.report.reproduce import script
from compress.storage import hashing
from compress.storage.hashing import loaded_code

CHECKOUT = Path(__file__).parents[4]
SHELLS = [shell for name in ("bash", "dash", "sh") if (shell := shutil.which(name))]
NASTY = [
    "plain", "two words", "it's", 'say "no"', "a\nb", "a\n", "\n", "$(touch canary)", "`touch canary`", "${HOME}", "$HOME",
    "-x", "--", "-", "~", "!!", "a\\b", "a\\", "\\n", "*", "?", "[a]", "{a,b}", "a;touch canary", "a&&touch canary",
    "a|b", ">canary", "<a", "#a", "END", "a\tb", "é", "日本", "\udcff\udcfe", "a\udc80b", "%s", "%n%d", "\r", "\x01", "'",
    "''", "'\"'\"'", "\u202e",
]  # fmt: skip

FAKE = """#!/bin/sh
pwd >"$SEEN.folder"
for word in "$@"; do printf '%s\\0' "$word"; done >"$SEEN"
"""


@pytest.fixture(autouse=True)
def no_code_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has imported hundreds of the tests' own files, which a run of a user's has not: each would be compared."""
    monkeypatch.setattr(hashing, "OWN", hashing.OWN | {CHECKOUT})


def ran(shell: str, home: Path, name: str, words: list[str], again: list[str] | None = None) -> list[str]:
    """What the script gave the command, when its folder and its input have that name."""
    folder = home / f"in {name}"
    if name in ("-", "--", "-x"):
        folder = home / name
    folder.mkdir()
    bin_, seen = home / "bin", home / "seen"
    bin_.mkdir(exist_ok=True)
    (bin_ / "compress").write_text(FAKE)
    (bin_ / "compress").chmod(0o755)
    (folder / name).write_bytes(b"input")
    digest = hashlib.sha256(b"input").hexdigest()
    command = shlex.join(["compress", *words])
    text = script(command, folder, {Path(name): digest, folder / name: digest}, {"torch": "2.9"})
    (home / "reproduce.sh").write_bytes(os.fsencode(text))
    environment = {"PATH": f"{bin_}:{os.environ['PATH']}", "SEEN": str(seen), "CDPATH": "/"}
    done = subprocess.run([shell, "reproduce.sh", *(again or [])], cwd=home, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert not list(home.rglob("canary"))
    return [os.fsdecode(word) for word in seen.read_bytes().split(b"\0")[:-1]]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", NASTY)
def test_any_name_is_taken_for_what_it_is(shell: str, name: str, tmp_path: Path) -> None:
    words = ["export", name, "-o", f"./{name}", f"--eval={name}"]
    assert ran(shell, tmp_path, name, words) == words


names = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0") | st.sampled_from([chr(0xDC00 + byte) for byte in range(128, 256)]),
    min_size=1, max_size=40,
).filter(lambda name: name not in (".", "..") and len(os.fsencode(name)) < 200 and os.fsdecode(os.fsencode(name)) == name)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(name=names, words=st.lists(names, max_size=4))
def test_so_are_all_others(name: str, words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as home:
        assert ran(SHELLS[0], Path(home), name, words) == words


def test_another_folder_can_be_named_even_one_that_looks_like_an_option(tmp_path: Path) -> None:
    assert ran(SHELLS[0], tmp_path, "-x", ["a"], ["-x"]) == ["a"]


@pytest.mark.parametrize("name", ["plain", "a\nb", "-x", "it's"])
def test_changed_and_missing_inputs_are_told_and_nothing_runs(name: str, tmp_path: Path) -> None:
    text = script("touch canary", tmp_path, {Path(name): "0" * 64}, {})
    (tmp_path / "reproduce.sh").write_bytes(os.fsencode(text))
    for content in (b"other", None):
        (tmp_path / name).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / name).write_bytes(content)
        done = subprocess.run([SHELLS[0], "reproduce.sh"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1
        assert f"{name} is not what it was" in done.stderr
        assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("folder", ["plain", "a\nb", "-x", "it's", "*", "a b/[c]"])
def test_a_file_that_came_to_a_folder_is_told_and_nothing_runs(shell: str, folder: str, tmp_path: Path) -> None:
    data = tmp_path / folder
    data.mkdir(parents=True)
    text = script("touch canary", tmp_path, {}, {}, {(Path(folder), ".npz"): 3, (Path(folder), ".npy"): 0})
    (tmp_path / "reproduce.sh").write_bytes(os.fsencode(text))

    def runs() -> bool:
        (tmp_path / "canary").unlink(missing_ok=True)
        done = subprocess.run([shell, "reproduce.sh"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == (0 if (tmp_path / "canary").exists() else 1)
        return (tmp_path / "canary").exists()

    for name in ("1.npz", ".2.npz", ".npz"):
        assert not runs()
        (data / name).write_bytes(b"shard")
    (data / "readme.txt").touch()
    assert sorted(path.name for path in data.glob("*.npz")) == [".2.npz", ".npz", "1.npz"], "all of them are read"
    assert runs()
    for name in ("3.npz", "x.npy", ".x.npy"):
        (data / name).touch()
        assert not runs()
        (data / name).unlink()


def write(path: str, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    np.savez(path, x=values) if path.endswith(".npz") else np.save(path, values)


@pytest.mark.parametrize(
    ("had", "comes", "words"),
    [
        ("data/x.npy", "data/x.npy", "x.npy is not what it was"),
        ("data/1.npz", "data/1.npz", "1.npz is not what it was"),
        ("data/1.npz", "data/2.npz", "data has not as many files *.npz as it had: 2, not 1"),
        ("data/1.npz", "data/x.npy", "data has not as many files *.npy as it had: 1, not 0"),
        ("data/x.npy", "data/labels.npy", "data has not as many files *.npy as it had: 2, not 1"),
    ],
)
def test_data_in_a_folder_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had: str, comes: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    compress.save(torch.nn.Linear(4, 3), tmp_path / "model.pt", inputs="x:float32[batch,4]")
    Path("data").mkdir()
    write(had, np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32))
    arguments = ["export", "model.pt", "-o", "out", "--eval", "data"]
    monkeypatch.setattr("sys.argv", ["compress", *arguments])
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/compress").write_text("#!/bin/sh\ntouch ran\n")
    (tmp_path / "bin/compress").chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([SHELLS[0], "out/reproduce.sh"], env=environment, capture_output=True, text=True)

    assert run().returncode == 0
    Path("ran").unlink()
    write(comes, np.zeros((40, 4), np.float32))
    done = run()
    assert done.returncode == 1
    assert words in done.stderr
    assert not Path("ran").exists()


def test_in_its_own_place_it_runs_each_stage_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compress.save(torch.nn.Linear(4, 3), tmp_path / "model.pt", inputs="x:float32[batch,4]")
    arguments = ["export", "model.pt", "-o", "out"]
    monkeypatch.setattr("sys.argv", ["compress", *arguments])
    with pytest.raises(SystemExit):
        main(arguments)
    stages = sorted(Path("out.work").rglob("stage.json"))
    for path in stages:  # as of an earlier day
        os.utime(path, (1e9, 1e9))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/compress").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m compress "$@"\n')
    (tmp_path / "bin/compress").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    done = subprocess.run([SHELLS[0], "out/reproduce.sh"], env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "kept from before" not in done.stdout + done.stderr
    assert stages
    assert all(path.stat().st_mtime > 1e9 for path in stages)


def again(folder: Path, options: ExportOptions, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[bool, str]]:
    """Whether reproduce.sh, written now, runs its command when it is called, and what it says."""
    monkeypatch.setattr("sys.argv", ["compress", "export", "model.pt"])
    (folder / "reproduce.sh").write_bytes(os.fsencode(script_of(Path("model.pt"), options, None)))
    (folder / "bin").mkdir()
    (folder / "bin/compress").write_text("#!/bin/sh\ntouch ran\n")
    (folder / "bin/compress").chmod(0o755)
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def run() -> tuple[bool, str]:
        (folder / "ran").unlink(missing_ok=True)
        done = subprocess.run([SHELLS[0], "reproduce.sh"], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == (0 if (folder / "ran").exists() else 1), done.stderr
        return (folder / "ran").exists(), done.stderr

    return run


@pytest.mark.parametrize("folder", ["img", "a\nb", "-x", "it's [c]"])
def test_images_in_a_folder_are_all_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_bytes(b"model")
    images = tmp_path / folder
    for name in ("cat/1.png", "cat/a\nb.JPG", ".dog/2.webp", ".3.bmp", "..png"):
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        (images / name).write_bytes(name.encode())
    for name in (".png", "cat/readme.txt", "cat/._1.png", "cat/deeper/4.png"):  # are none of them
        (images / name).parent.mkdir(parents=True, exist_ok=True)
        (images / name).touch()
    run = again(tmp_path, ExportOptions(output=Path("out"), eval=folder), monkeypatch)
    assert run() == (True, "")
    for name in ("cat/1.png", "cat/a\nb.JPG", ".dog/2.webp", ".3.bmp", "..png"):
        (images / name).write_bytes(b"other")
        assert not run()[0], name
        (images / name).write_bytes(name.encode())
    for name in ("cat/5.png", "new/1.PNG", ".6.jpeg", "x.npy"):
        (images / name).parent.mkdir(exist_ok=True)
        (images / name).touch()
        assert not run()[0], name
        (images / name).unlink()
    (images / "cat/1.png").unlink()
    assert not run()[0]


@pytest.mark.parametrize(
    ("files", "comes"),
    [
        ({"state.json": '{"_data_files": [{"filename": "a.arrow"}]}', "dataset_info.json": "{}", "a.arrow": ""}, None),
        ({"a.parquet": "a", "b.parquet": "b"}, "c.parquet"),
    ],
    ids=["that datasets saved", "of Parquet files"],
)
def test_files_of_a_folder_of_texts_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], comes: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_bytes(b"model")
    Path("texts").mkdir()
    for name, text in files.items():
        Path("texts", name).write_text(text)
    run = again(tmp_path, ExportOptions(output=Path("out"), eval="texts"), monkeypatch)
    assert run() == (True, "")
    for name, text in files.items():
        Path("texts", name).write_text(text + " ")
        assert not run()[0], name
        Path("texts", name).write_text(text)
    if comes is not None:
        Path("texts", comes).touch()
        assert not run()[0]


def test_code_that_went_in_is_looked_at_and_what_it_reads_is_told_to_be_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("model.pt").write_bytes(b"model")
    files = {"went_in.py": "import went_in_too\ndef make(): ...\n", "went_in_too.py": "VALUE = 1\n", "by_pickle.py": ""}
    for name, text in files.items():
        Path(name).write_text(text)
    command = ModuleType("__mp_main__")  # as multiprocessing calls it
    command.__file__ = str(tmp_path / "model.pt")
    monkeypatch.setitem(sys.modules, "__mp_main__", command)
    assert tmp_path / "model.pt" not in loaded_code()
    for name in ("went_in", "by_pickle"):  # one is named, another one came with a model
        importlib.import_module(name)
    options = ExportOptions(
        output=Path("out"), eval="went_in:make", metric="went_in:make", timing_cache=Path("t.cache")
    )
    run = again(tmp_path, options, monkeypatch)
    ran, told = run()
    assert ran
    assert told.count("went_in:make: its code is compared, not what that reads") == 1
    assert "t.cache" in told
    for name, text in files.items():
        Path(name).write_text("VALUE = 2\n")
        assert f"{name} is not what it was" in run()[1]
        Path(name).write_text(text)


def test_what_an_earlier_run_wrote_into_a_folder_that_is_read_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_bytes(b"model")
    for name in ("img/1.png", "img/out/plot.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    monkeypatch.setattr("sys.argv", ["compress", "export", "model.pt"])
    text = script_of(Path("model.pt"), ExportOptions(output=Path("img/out"), eval="img"), None)
    assert "img/1.png" in text
    assert "plot.png" not in text


def test_each_file_is_looked_at_once_however_many_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    texts = {"looked_a": "import looked_c", "looked_b": "import looked_a, looked_c", "looked_c": "import looked_d"}
    for name, text in (texts | {"looked_d": ""}).items():
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)  # of an earlier try
    for name in texts:
        importlib.import_module(name)
    looked: list[Path] = []
    imported = hashing._imported

    def look(path: Path, package: str) -> Iterator[str]:
        looked.append(path)
        return imported(path, package)

    monkeypatch.setattr(hashing, "_imported", look)
    assert {tmp_path / f"looked_{letter}.py" for letter in "abcd"} <= {*loaded_code()} & {*looked}
    assert len(looked) == len(set(looked))
