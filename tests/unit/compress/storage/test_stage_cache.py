"""The cache of stages: found by key whatever the folder, bounded, shared, and believed in nothing."""

from __future__ import annotations

import json
import os
import pwd
import stat
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from compress import pipeline
from compress.cli import main
from compress.cli.commands import _cache
from compress.console.wording import AssumedWarning
from compress.errors import RecipeError
from compress.jobs.export import Silent
from compress.model import TorchModel
from compress.storage import stage_cache
from compress.storage.files import locked
from compress.storage.stage_cache import StageCache
from tests.unit.compress.jobs.test_pipeline import Scale
from tests.unit.compress.prune.test_prune_channels import loaded
from tests.unit.compress.training.networks import data, model

KB = 1000


@pytest.fixture(autouse=True)
def everything_is_worth_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CACHED_SECONDS", 0.0)


@pytest.fixture
def cache(tmp_path: Path) -> StageCache:
    return StageCache(tmp_path / "cache", 10**9)


def output(folder: Path, size: int = KB, did: str = "did it") -> Path:
    """As a stage leaves it."""
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(os.urandom(size))
    (folder / "stage.json").write_text(json.dumps({"did": did}), encoding="utf-8")
    return folder


def go(stages: list[Scale], work: Path, cache: StageCache | None) -> list[bool]:
    found = pipeline.run(stages, loaded("mlp"), work=work, source="s", watcher=Silent(), cache=cache)
    last = found[-1].given.model
    assert isinstance(last, TorchModel)
    wanted = loaded("mlp").module.get_parameter("2.bias") * 6
    assert torch.allclose(last.module.get_parameter("2.bias"), wanted)
    return [outcome.reused for outcome in found]


def test_a_run_in_another_folder_takes_what_one_before_it_did(tmp_path: Path, cache: StageCache) -> None:
    stages = [Scale(2.0), Scale(3.0)]
    assert go(stages, tmp_path / "first", cache) == [False, False]
    assert go(stages, tmp_path / "second", cache) == [True, True]
    assert [stage.ran for stage in stages] == [[2.0], [3.0]]
    assert go(stages, tmp_path / "second", None) == [True, True], "what was fetched is kept there, too"
    assert go(stages, tmp_path / "third", None) == [False, False]


def test_what_takes_no_time_is_not_kept(tmp_path: Path, cache: StageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CACHED_SECONDS", 3600.0)
    go([Scale(2.0), Scale(3.0)], tmp_path / "first", cache)
    assert cache.entries() == []


def test_what_machines_share_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, however fast it was made and however much there is: it is how another machine gets it."""
    monkeypatch.setattr(pipeline, "CACHED_SECONDS", 3600.0)
    shared = StageCache(tmp_path / "cache", 10**9, whole=True)
    stages = [Scale(2.0), Scale(3.0)]
    assert go(stages, tmp_path / "first", shared) == [False, False]
    last = shared.entry(stages[-1].name, pipeline.key_of(stages, "s"))
    assert (last / "stage.json").is_file()
    assert go(stages, tmp_path / "second", shared) == [True, True]


def test_what_was_kept_before_a_time_is_not_taken_after_it(
    tmp_path: Path, cache: StageCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As reproduce.sh asks: a copy is as old as what it is of."""
    stages = [Scale(2.0), Scale(3.0)]
    go(stages, tmp_path / "first", cache)
    for path in cache.folder.glob("*/*"):
        os.utime(path, (1000, 1000))
    monkeypatch.setenv(pipeline.AFRESH, "2000")
    assert go(stages, tmp_path / "second", cache) == [False, False]


def test_what_another_toolkit_made_is_not_taken(
    tmp_path: Path, cache: StageCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same release: it is being worked on."""
    stages = [Scale(2.0), Scale(3.0)]
    go(stages, tmp_path / "first", cache)
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed/prune.py").write_text("another algorithm")
    monkeypatch.setattr(stage_cache, "PACKAGE", tmp_path / "changed")
    stage_cache.code_digest.cache_clear()
    try:
        assert go(stages, tmp_path / "second", cache) == [False, False]
    finally:
        stage_cache.code_digest.cache_clear()


@pytest.mark.parametrize(
    "damage", ["other weights", "no weights", "another word", "a link", "a folder", "nothing said"]
)
def test_what_others_have_changed_is_done_again_and_goes(tmp_path: Path, cache: StageCache, damage: str) -> None:
    stages = [Scale(2.0), Scale(3.0)]
    go(stages, tmp_path / "first", cache)
    entry = cache.entries()[0].path
    weights, said = entry / "model.pt", entry / "stage.json"
    match damage:
        case "other weights":
            changed = bytearray(weights.read_bytes())
            changed[len(changed) // 2] ^= 255
            weights.write_bytes(changed)
        case "no weights":
            weights.unlink()
        case "another word":
            said.write_text(said.read_text().replace("times", "twice"))
        case "a link":
            weights.rename(tmp_path / "elsewhere.pt")
            weights.symlink_to(tmp_path / "elsewhere.pt")
        case "a folder":
            weights.unlink()
            weights.mkdir()
        case _:
            said.unlink()
    assert sorted(go(stages, tmp_path / "second", cache)) == [False, True]
    assert go(stages, tmp_path / "third", cache) == [True, True], "and is kept anew"


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    cache = StageCache(tmp_path / "cache", 3500)
    for nth, key in enumerate("abc"):
        cache.keep("prune", key, output(tmp_path / key))
        os.utime(cache.entries()[0].path, (1000 + nth, 1000 + nth))
    assert cache.fetch("prune", "a", tmp_path / "taken"), "which counts as use"
    cache.keep("prune", "d", output(tmp_path / "d"))
    assert [cache.fetch("prune", key, tmp_path / f"again {key}") for key in "abcd"] == [True, False, True, True]
    cache.keep("prune", "e", output(tmp_path / "e", 4 * KB))
    assert not cache.fetch("prune", "e", tmp_path / "large"), "larger than all of the cache"
    assert len(cache.entries()) == 3


def test_a_folder_that_others_may_write_into_is_left_alone(tmp_path: Path, cache: StageCache) -> None:
    cache.keep("prune", "a", output(tmp_path / "a"))
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    cache.folder.chmod(0o770)
    assert not cache.fetch("prune", "a", tmp_path / "taken")
    assert cache.entries() == []
    cache.keep("prune", "b", output(tmp_path / "b"))
    assert len([path for path in cache.folder.iterdir() if path.is_dir()]) == 1
    assert cache.clear() == (0, 0)


def test_a_folder_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    """Whoever may write into the folder above it could have it lead to any of the user's."""
    real = StageCache(tmp_path / "real", 10**9)
    real.keep("prune", "a", output(tmp_path / "a"))
    (tmp_path / "link").symlink_to(real.folder)
    linked = StageCache(tmp_path / "link", 10**9)
    assert linked.clear() == (0, 0)
    assert not linked.fetch("prune", "a", tmp_path / "taken")
    linked.keep("prune", "b", output(tmp_path / "b"))
    assert len(real.entries()) == 1


@pytest.mark.parametrize("whose", ["all may write above it", "another user's", "another user's, far above"])
def test_a_folder_below_one_where_others_could_exchange_it_is_left_alone_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whose: str
) -> None:
    """Between two steps of a run a link could stand in its place."""
    above = tmp_path / "above"
    monkeypatch.setenv("XDG_CACHE_HOME", str(above / "mine"))
    monkeypatch.setenv("COMPRESS_CACHE_GB", "1")
    cache = StageCache.of()
    cache.keep("prune", "a", output(tmp_path / "a"))
    assert len(cache.entries()) == 1
    if whose == "all may write above it":
        above.chmod(0o777)
    elif os.geteuid() != 0:
        pytest.skip("gives a folder to another user")
    else:
        os.chown(above / "mine" if whose == "another user's" else above, 65533, -1)
    assert not cache.fetch("prune", "a", tmp_path / "taken")
    assert cache.entries() == []
    cache.keep("prune", "b", output(tmp_path / "b"))
    assert cache.clear() == (0, 0)
    assert len([path for path in cache.folder.iterdir() if path.is_dir()]) == 1
    for word in ("list", "clear"):
        assert call("cache", word) == 2
        told = capsys.readouterr().err
        assert str(above) in told
        assert "XDG_CACHE_HOME" in told
    with pytest.warns(AssumedWarning, match=r"won't keep stages in .*; to mend it: .*--no-cache"):
        assert _cache(True) is None


def test_a_sticky_folder_above_it_is_none(tmp_path: Path) -> None:
    """As /tmp: nobody can take away there what is another's."""
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(0o1777)
    cache = StageCache(tmp_path / "above" / "mine", 10**9)
    cache.keep("prune", "a", output(tmp_path / "a"))
    assert cache.fetch("prune", "a", tmp_path / "taken")


def test_clearing_removes_entries_alone_and_follows_no_link(tmp_path: Path, cache: StageCache) -> None:
    cache.keep("prune", "a", output(tmp_path / "a"))
    (entry,) = cache.entries()
    other = output(tmp_path / "other")
    for link in (
        entry.path / "linked",
        cache.folder / f"b-{'0' * 64}",
        cache.folder / ".x.part",
        cache.folder / ".y.gone",
    ):
        link.symlink_to(other)
    (entry.path / "model.linked").symlink_to(other / "model.onnx")
    output(cache.folder / "mine")
    assert cache.clear()[0] == 1
    assert sorted(path.name for path in other.iterdir()) == ["model.onnx", "stage.json"]
    assert (cache.folder / "mine/stage.json").exists()
    assert not entry.path.exists()


def test_a_place_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert go([Scale(2.0), Scale(3.0)], tmp_path / "work", StageCache(tmp_path / "file/cache", 10**9)) == [False, False]


def test_while_another_process_bounds_it_nothing_waits(tmp_path: Path) -> None:
    cache = StageCache(tmp_path / "cache", 1500)
    cache.keep("prune", "a", output(tmp_path / "a"))
    with locked(cache.folder, inside=True):
        cache.keep("prune", "b", output(tmp_path / "b"))
        assert len(cache.entries()) == 2
    cache.keep("prune", "c", output(tmp_path / "c"))
    assert len(cache.entries()) == 1


AT_ONCE = """
import os, sys
from pathlib import Path
from compress.storage.stage_cache import StageCache
cache, folder, mine = StageCache(Path(sys.argv[1]), 40_000), Path(sys.argv[2]), sys.argv[3]
for turn in range(60):
    key = f"{turn % 7}"
    target = folder / f"{mine}-{turn}"
    if cache.fetch("prune", key, target):
        found = (target / "model.onnx").read_bytes()
        assert found == key.encode() * 10_000 or len(found) < 10_000, "half of it is seen by its digest"
    else:
        assert not target.exists()
        target.mkdir()
        (target / "model.onnx").write_bytes(key.encode() * 10_000)
        (target / "stage.json").write_text("{}")
        cache.keep("prune", key, target)
    if turn % 20 == 19:
        cache.clear()
"""


def test_processes_that_keep_take_and_remove_at_once_do_not_harm_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path / "cache"), str(tmp_path)]
    running = [subprocess.Popen([*command, str(nth)], stderr=subprocess.PIPE, text=True) for nth in range(3)]
    ended = [(process.communicate()[1], process.returncode) for process in running]
    assert ended == [("", 0)] * 3
    cache = StageCache(tmp_path / "cache", 40_000)
    cache.clear()
    assert [path.name for path in cache.folder.iterdir() if path.name != ".lock"] == []


@pytest.mark.parametrize(
    ("environ", "folder", "most"),
    [
        ({"HOME": "/home/a"}, "/home/a/.cache", 10**10),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/c", "COMPRESS_CACHE_GB": "0.5"}, "/c", 5 * 10**8),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "relative", "COMPRESS_CACHE_GB": "0"}, "/home/a/.cache", 0),
    ],
)
def test_where_it_is_and_how_large_it_may_become(environ: Mapping[str, str], folder: str, most: int) -> None:
    assert StageCache.of(environ) == StageCache(Path(folder, "compress-serve/stages"), most)


@pytest.mark.parametrize("said", ["much", "-1", "nan", "inf"])
def test_a_bound_that_is_no_number_is_refused(said: str) -> None:
    with pytest.raises(RecipeError, match="COMPRESS_CACHE_GB"):
        StageCache.of({"COMPRESS_CACHE_GB": said, "HOME": "/home/a"})


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_a_user_without_a_home_folder_goes_on_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container that is run by a number."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    with pytest.warns(AssumedWarning, match=r"there is no place to keep stages in: .*; to mend it: .*XDG_CACHE_HOME"):
        assert _cache(True) is None
    assert _cache(False) is None
    for word in ("list", "clear"):
        assert call("cache", word) == 2
        assert "why:  neither XDG_CACHE_HOME nor HOME" in capsys.readouterr().err


def test_a_home_folder_that_the_environment_does_not_tell_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert StageCache.of({"HOME": ""}).folder == Path(pwd.getpwuid(0).pw_dir, ".cache/compress-serve/stages")


@pytest.mark.parametrize(("gigabytes", "told"), [("1", True), ("0", False)])
def test_a_cache_that_can_t_be_written_is_told(
    gigabytes: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COMPRESS_CACHE_GB", gigabytes)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert _cache(True) is not None, "what is there may be read"
    words = [str(each.message) for each in found]
    assert [word for word in words if "are not kept for later runs" in word and "to mend it: " in word] == words
    assert bool(words) == told


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COMPRESS_CACHE_GB", "1")
    monkeypatch.chdir(tmp_path)
    model(tmp_path, "student", 8)
    data(tmp_path)
    return tmp_path


def test_a_training_is_found_again_whatever_the_output(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", "student.pt", "--data", "train.npz", "--epochs", "1", "-o"]
    assert call(*words, "first", "--no-cache") == 0
    assert not (users / "home").exists()
    assert call(*words, "second") == 0
    assert "kept from before" not in capsys.readouterr().err
    assert call(*words, "third") == 0
    assert "kept from before" in capsys.readouterr().err
    assert call(*words, "fourth", "--no-cache") == 0
    assert "kept from before" not in capsys.readouterr().err


def test_an_export_and_its_dry_run_know_what_another_has_done(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", "student.pt", "--finetune", "train.npz", "--epochs", "1", "-o"]
    assert call(*words, "first") == 0
    capsys.readouterr()
    assert call(*words, "second", "--dry-run") == 0
    assert capsys.readouterr().out.count("kept from before") == 4, "the original's export, and the three stages"
    assert not (users / "second.work").exists()
    assert call(*words, "second") == 0
    assert capsys.readouterr().err.count("kept from before") == 5


def test_what_is_kept_is_listed_and_cleared(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("cache", "list") == 0
    assert "0 stages" in capsys.readouterr().out
    assert call("finetune", "student.pt", "--data", "train.npz", "--epochs", "1", "-o", "out") == 0
    entry = StageCache.of().entries()[0]
    said = json.loads((entry.path / "stage.json").read_text(encoding="utf-8"))
    (entry.path / "stage.json").write_text(json.dumps(said | {"did": "trained [red]\x1b[2J"}), encoding="utf-8")
    capsys.readouterr()
    assert call("cache", "list") == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("finetune", "trained [red] [2J", " s ago", "of 1 GB"))
    assert "\x1b" not in shown
    assert call("cache", "clear") == 0
    assert capsys.readouterr().out.startswith("removed 1 stage, ")
    assert StageCache.of().entries() == []
