"""Every file that replaces an older one is written so that a link which waits beside it leads nowhere."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from compress import pipeline
from compress.artifact import TensorSpec
from compress.errors import StageError, ToolkitError
from compress.formats.native import file as native
from compress.model import TorchModel, infer_signature
from compress.prune.known_channels import Known, KnownChannels
from compress.storage.files import write_files
from compress.tensorrt import build
from compress.training.batches.answers import Answers
from compress.training.in_processes import ERROR, write_error
from compress.training.updates.kept_state import KeptState
from compress.vetting.replace import replace_file, replacing_file
from serve.deploy.cluster import render
from serve.deploy.monitoring.monitoring import MonitoringOptions, write_monitoring
from serve.gateway.access.keys import add_key
from serve.load.report.report import write_text
from serve.repository import signing, versions
from serve.tune import report, run
from serve.tune.candidate import Candidate
from serve.tune.state import State
from serve.tune.trial import Trial

VICTIM = "another's"


def _native(path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 2))
    native.write(TorchModel(module, infer_signature(module, (TensorSpec.parse("x:float32[batch,4]"),))), path)


def _answers(path: Path) -> None:
    answers = object.__new__(Answers)
    answers._folder, answers._tables = path.parent, {}
    answers._note(3)


def _channels(path: Path) -> None:
    known = object.__new__(KnownChannels)
    known._folder, known._graph, known._model = path.parent, "graph", "model"
    known.write(Known())


def _tuned(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(report, "to_dict", lambda _tuned: {})
        patched.setattr(report, "_page", lambda _tuned: "page")
        tuned: Any = SimpleNamespace(subject=SimpleNamespace(name="tiny"))
        report.write_report(tuned, path.parent)


PLACES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "files": ("report.json", lambda path: write_files({path: "text"})),
    "model": ("model.pt", _native),
    "training": ("state.pt", lambda path: KeptState(path, 0.0).keep({})),
    "error": (ERROR, lambda path: write_error(path.parent, StageError("what", why="why", mend="mend"))),
    "answers": ("answers.json", _answers),
    "channels": ("channels-graph-model.json", _channels),
    "monitoring": ("prometheus/alerts.yml", lambda path: write_monitoring(path.parents[1], MonitoringOptions())),
    "keys": ("keys.json", lambda path: add_key(path, "ada")),
    "load": ("load.html", lambda path: write_text(path, "text")),
    "tuned page": ("tiny.html", _tuned),
    "tuned data": ("tiny.json", _tuned),
    "trials": ("tiny.state", lambda path: State(path, "key").put(0, Trial(Candidate(1, 0, 1, None, 0), 1.0, ()))),
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text(VICTIM)
    return path


def _path(tmp_path: Path, name: str, victim: Path, *planted: str) -> Path:
    path = tmp_path / "place" / name
    path.parent.mkdir(parents=True)
    for each in planted:
        path.with_name(each.format(path.name)).symlink_to(victim)
    return path


@pytest.mark.parametrize("place", PLACES)
def test_a_link_beside_or_in_place_is_not_followed(place: str, tmp_path: Path, victim: Path) -> None:
    name, write = PLACES[place]
    path = _path(tmp_path, name, victim, ".{}.part", "{}.part", ".{}.new", f"{{}}.{os.getpid()}")
    if place != "keys" and place != "trials":  # these read first what is there
        path.symlink_to(victim)
    write(path)
    assert victim.read_text() == VICTIM
    assert path.is_file()
    assert not path.is_symlink()
    assert not [each for each in path.parent.iterdir() if each.name.endswith(".part") and not each.is_symlink()]


@pytest.mark.parametrize("place", [each for each in PLACES if each != "training"])  # which removes what is left
def test_nor_is_one_of_the_very_name(place: str, tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, write = PLACES[place]
    monkeypatch.setattr(secrets, "token_hex", lambda _size=None: "guessed")
    path = _path(tmp_path, name, victim, ".{}.guessed.part")
    with pytest.raises((OSError, ToolkitError)):
        write(path)
    assert victim.read_text() == VICTIM
    assert not path.exists()


def test_so_it_is_with_what_goes_to_another_machine(tmp_path: Path, victim: Path) -> None:
    path = _path(tmp_path, "model.plan", victim, ".{}.part", "{}.part")
    build._write(path, b"plan")
    assert (victim.read_text(), path.read_bytes()) == (VICTIM, b"plan")


def test_repository_and_tuning_write_by_the_same_function() -> None:
    for module in (versions, signing, run):
        assert vars(module)["replace_file"] is replace_file


def test_a_stage_fills_no_folder_that_a_link_leads_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "01-stage.part").symlink_to(elsewhere)

    class Stage:
        name = "stage"
        options: dict[str, Any] = {}  # noqa: RUF012

        def run(self, _model: object, folder: Path, _progress: object) -> None:
            (folder / "made").touch()
            raise StageError("can't", why="why", mend="mend")

    stage: Any = Stage()
    model: Any = None
    with pytest.raises(StageError, match="can't"):
        pipeline._run(stage, model, tmp_path / "01-stage", lambda *_: None)
    assert not list(elsewhere.iterdir())


def test_nor_do_manifests_go_where_one_leads_or_cost_what_is_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".k8s.new").symlink_to(elsewhere)
    (tmp_path / ".k8s.old").mkdir()
    (tmp_path / ".k8s.old" / "mine").touch()
    monkeypatch.setattr(render, "workload_of", lambda *_: None)
    monkeypatch.setattr(render, "files", lambda *_: {"a/b.yaml": "text"})
    monkeypatch.setattr(render, "warnings_of", lambda *_: [])
    options: Any = SimpleNamespace(load=None, plan=None)
    for _ in range(2):
        render.render(tmp_path / "repository", tmp_path / "k8s", options)
        assert not list(elsewhere.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".k8s.new", ".k8s.old", "elsewhere", "k8s"]
    assert (tmp_path / ".k8s.old" / "mine").exists()
    options.load = tmp_path / "k8s" / "load.json"
    with pytest.raises(ToolkitError, match="can't write into"):
        render.render(tmp_path / "repository", tmp_path / "k8s", options)


def test_a_file_keeps_its_mode_and_a_new_one_has_the_usual(tmp_path: Path) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    path, new = tmp_path / "file", tmp_path / "new"
    path.touch(0o640)
    path.chmod(0o640)
    before = os.umask(0o027)
    try:
        replace_file(path, "text")
        replace_file(new, "text")
    finally:
        os.umask(before)
    assert (mode(path), mode(new), path.read_text()) == (0o640, 0o640, "text")
    replace_file(path, b"key", mode=0o600)
    assert mode(path) == 0o600


def test_a_failure_leaves_the_old_file_and_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing_file(path) as file:
        file.write(b"new " + "\ud800".encode())
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", "text")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "pipe", "text")
    assert {each.name for each in tmp_path.iterdir()} == {"file", "folder", "pipe"}
    assert path.read_text() == "old"


def test_of_several_files_none_is_replaced_when_one_can_t_be(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()
    with pytest.raises(ToolkitError, match="can't write"):
        write_files({tmp_path / "a": "new", tmp_path / "b": "new"})
    assert (tmp_path / "a").read_text() == "old"
    assert {each.name for each in tmp_path.iterdir()} == {"a", "b"}


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ToolkitError, match="a device, a pipe or a socket"):
        write_files({tmp_path / "pipe": "new"})
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)


def test_what_a_kill_left_of_a_training_goes_with_the_next_state(tmp_path: Path) -> None:
    left = tmp_path / ".state.pt.01234567.part"
    left.touch()
    KeptState(tmp_path / "state.pt", 0.0).keep({})
    assert not left.exists()


def test_a_name_as_long_as_names_may_be(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    replace_file(path, "text")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["text"]
