"""A run removes nothing that it reads, and nothing that is not its own: it is refused before any work, in three lines."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import compress
from compress import ExportOptions
from compress.cli import main
from compress.errors import ArtifactError, ResourceError
from compress.jobs.places import TRAINING, check_output, claimed
from compress.pipeline import _is_ours
from compress.storage.files import locked
from compress.storage.work_folder import MARK, keep_log
from compress.training.loop import TRACE_FILE
from tests.models import build

X = "x:float32[batch,4]"
CODE = "import numpy as np\ndef make():\n    return {'x': np.ones((40, 4), np.float32)}\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.pt, eval.npz and an artifact, in one folder."""
    folder = tmp_path_factory.mktemp("made")
    compress.save(build("mlp")[0], folder / "model.pt", inputs=X)
    np.savez(folder / "eval.npz", x=np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32))
    compress.export(folder / "model.pt", ExportOptions(output=folder / "artifact"))
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with copies of these."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The why and what to do of an error in three lines."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    lines = capsys.readouterr().err.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("error: "))
    assert (ended.value.code, len(lines[at:])) == (2, 3), lines
    return " ".join(lines[at:])


def test_an_input_in_a_folder_of_any_name_beside_the_output_stays(here: Path) -> None:
    for name in ("b.part", "b.old", "b.new"):
        Path(name).mkdir()
        shutil.copy("model.pt", name)
        (here / name / "thesis.txt").write_text("mine")
    shutil.copy("eval.npz", "b.part")
    for _ in range(2):
        compress.export("b.part/model.pt", ExportOptions(output=Path("b"), eval="b.part/eval.npz"))
    for name in ("b.part", "b.old", "b.new"):
        assert (here / name / "thesis.txt").read_text() == "mine"
        assert (here / name / "model.pt").is_file()
    assert not [path.name for path in here.iterdir() if path.name.startswith(".b.")]


READ = [
    (["export", "b/model.pt"], "b/model.pt"),
    (["export", "b.work/01-x/model.pt"], "b.work/01-x/model.pt"),
    (["export", "kept/01-x/model.pt", "--work", "kept"], "kept/01-x/model.pt"),
    (["export", "link.pt"], "link.pt"),
    (["export", "b/link.pt"], "b/link.pt"),
    (["export", "model.pt", "--eval", "b.work/eval.npz"], "b.work/eval.npz"),
    (["export", "b.missed/model.onnx", "--int8", "dynamic", "--eval", "eval.npz", "--max-drop", "1"], "b.missed"),
    (["export", "b.missed/model.onnx", "--target-size-mb", "1"], "b.missed"),
    (["optimize", "b.missed/model.onnx", "--eval", "eval.npz"], "b.missed"),
    (["optimize", "model.pt", "--eval", "b.work/eval.npz"], "b.work/eval.npz"),
    (["finetune", "b.work/model.pt", "--data", "eval.npz"], "b.work/model.pt"),
    (["finetune", "model.pt", "--data", "eval.npz", "--teacher", "b.work/model.pt"], "b.work/model.pt"),
    (["sensitivity", "b/sensitivity.html/model.pt", "--eval", "eval.npz"], "b/sensitivity.html"),
    (["export", "model.pt", "--eval", "b.code:make"], "b/code.py"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "named"), READ, ids=[" ".join(words) for words, _ in READ])
def test_what_a_run_reads_is_held_against_all_that_it_may_remove(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    for place in ("b", "b.work", "b.work/01-x", "kept/01-x", "b/sensitivity.html", "b.missed"):
        Path(place).mkdir(parents=True, exist_ok=True)
        shutil.copy("model.pt", place)
    shutil.copy("eval.npz", "b.work")
    for name in ("artifact.json", "training.json"):
        shutil.copy("artifact/artifact.json", f"b/{name}")
    shutil.copytree("artifact", "b.missed", dirs_exist_ok=True)
    Path("b/code.py").write_text(CODE)
    Path("link.pt").symlink_to("b/model.pt")
    Path("b/link.pt").symlink_to("../model.pt")
    before = held(here)
    text = refused(capsys, *words, "-o", "b")
    assert named in text
    assert "which this run reads, is in it" in text
    assert held(here) == before


def test_without_a_budget_what_missed_one_can_be_gone_on_with(here: Path) -> None:
    shutil.copytree("artifact", "b.missed")
    before = held(here / "b.missed")
    compress.export("b.missed/model.onnx", ExportOptions(output=Path("b")))
    assert held(here / "b.missed") == before


def test_a_folder_that_a_missed_budget_would_replace_is_looked_at_before_the_work(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("b.missed").mkdir()
    Path("b.missed/thesis.txt").write_text("mine")
    words = ["export", "model.pt", "-o", "b", "--int8", "dynamic", "--eval", "eval.npz", "--max-drop", "0"]
    assert "b.missed" in refused(capsys, *words)
    assert not Path("b.work").exists()


@pytest.mark.parametrize("extra", [[], ["--work", "b.work"]])
def test_a_folder_that_no_run_made_keeps_no_stages(
    here: Path, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    for name in ("01-raw/data.txt", "log.txt"):
        Path("b.work", name).parent.mkdir(parents=True, exist_ok=True)
        Path("b.work", name).write_text("precious")
    before = held(here)
    assert "01-raw" in refused(capsys, "export", "model.pt", "-o", "b", *extra)
    assert held(here) == before


def test_one_of_an_earlier_release_which_marked_none_is_gone_on_with(here: Path) -> None:
    left = Path("artifact.work")
    (left / MARK).unlink()
    (left / "09-prune_channels-0123456789ab").mkdir()
    (left / "09-prune_channels-0123456789ab" / "stage.json").write_text("{}")
    for name in ("log.txt", "channels-01ab-23cd.json", ".channels-01ab-23cd.json.0123abcd.part"):
        (left / name).write_text("old")
    for name in (".01-fold_onnx-0123456789ab.0123abcd.part", "training-0123456789ab"):
        (left / name).mkdir()
    compress.export("model.pt", ExportOptions(output=Path("artifact")))
    assert (left / MARK).is_file()
    assert not (left / "09-prune_channels-0123456789ab").exists()


def test_of_a_work_folder_only_what_runs_made_is_tidied(here: Path) -> None:
    mine = [Path("artifact.work", name) for name in ("01-raw", "01-raw-202611271200", "02-x-202611271200.part")]
    for path in mine:
        path.mkdir()
        (path / "data.txt").write_text("precious")
    compress.export("model.pt", ExportOptions(output=Path("artifact"), int8="dynamic"))
    assert [path for path in mine if not (path / "data.txt").exists()] == []


@pytest.mark.parametrize(
    ("name", "file", "ours"),
    [
        ("01-fold_onnx-0123456789ab", "stage.json", True),
        ("01-fold_onnx-0123456789ab.part", ".stage", True),
        ("01-fold_onnx-0123456789ab.part", "model.onnx", False),
        ("01-raw", "stage.json", False),
        ("01-raw-0123456789abc", "stage.json", False),
    ],
)
def test_a_stage_s_folder_is_known_by_its_name_and_what_is_in_it(
    tmp_path: Path, name: str, file: str, ours: bool
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / file).touch()
    assert _is_ours(tmp_path / name) is ours


def test_an_empty_folder_is_taken_and_a_failed_run_leaves_it_empty(tmp_path: Path) -> None:
    (tmp_path / "out.work").mkdir()

    def run() -> None:
        with claimed(tmp_path / "out", tmp_path / "out.work"):
            assert (tmp_path / "out.work" / MARK).is_file()
            raise ArtifactError("a", why="b", mend="c")

    with pytest.raises(ArtifactError):
        run()
    assert held(tmp_path) == {}


@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_a_log_goes_to_no_folder_that_a_run_would_not_keep_stages_in(tmp_path: Path, mode: int) -> None:
    victim, work = tmp_path / "victim", tmp_path / "work"
    victim.write_text("mine")
    work.mkdir()
    (work / "log.txt").symlink_to(victim)
    keep_log(work, "text")
    (work / MARK).touch()
    work.chmod(mode)
    keep_log(work, "text")
    assert victim.read_text() == "mine"
    assert (work / "log.txt").is_symlink() is (mode == 0o777)


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_of_something_else_that_has_a_lock_s_name_stays(tmp_path: Path, inside: bool) -> None:
    """`-o poetry` beside poetry.lock."""
    (tmp_path / "poetry").mkdir()
    file = tmp_path / ("poetry/.lock" if inside else "poetry.lock")
    file.write_text("[[package]]\n")
    with pytest.raises(ResourceError, match="can't write") as caught, locked(tmp_path / "poetry", inside=inside):
        pass
    assert file.name in caught.value.why
    assert file.read_text() == "[[package]]\n"


@pytest.mark.parametrize("left", ["", "process 1: compress export model.pt -o poetry\n"])
def test_a_lock_that_was_left_behind_blocks_nobody(tmp_path: Path, left: str) -> None:
    (tmp_path / "out.lock").write_text(left)
    with locked(tmp_path / "out"):
        pass
    assert not (tmp_path / "out.lock").exists()


# --- what others have put into a folder that is replaced


@pytest.mark.parametrize(
    ("command", "kind", "files"),
    [
        (["export", "model.pt"], "artifact", ["notes.txt"]),
        (["export", "model.pt"], "artifact", ["a.txt", "b.txt", "mine/c.txt", "processor/vocab.bak", "z.txt"]),
        (["export", "model.pt", "--int8", "dynamic", "--eval", "eval.npz", "--max-drop", "1"], "missed", ["notes.txt"]),
        (["optimize", "model.pt", "--eval", "eval.npz"], "artifact", ["model.onnx.data"]),
        (["finetune", "model.pt", "--data", "eval.npz"], "training", ["model.onnx"]),
    ],
)
def test_what_no_run_has_put_into_its_output_is_not_lost(
    here: Path, capsys: pytest.CaptureFixture[str], command: list[str], kind: str, files: list[str]
) -> None:
    folder = Path("b.missed" if kind == "missed" else "b")
    if kind == "training":
        folder.mkdir()
        (folder / "training.json").write_text("{}")
    else:
        shutil.copytree("artifact", folder)
    (folder / "empty/deeper").mkdir(parents=True)
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    before = held(here)
    text = refused(capsys, *command, "-o", "b")
    assert ", ".join(map(repr, files[:3])) in text
    assert ("and 2 more" in text) == (len(files) == 5)
    assert "move that to another folder" in text
    assert held(here) == before


def test_all_that_runs_write_is_known_as_theirs(here: Path) -> None:
    recipe("mine.toml", OWN + 'eval = "eval.npz"\n')
    train = [
        "finetune",
        "model.pt",
        "-o",
        "c",
        "--data",
        "eval.npz",
        "--teacher",
        "model.pt",
        "--epochs",
        "1",
        "--profile",
    ]
    for words in (["run", "mine.toml"], train):
        for _ in range(2):
            with pytest.raises(SystemExit) as ended:
                main(words)
            assert ended.value.code == 0
    check_output(Path("b"))
    check_output(Path("c"), TRAINING)
    assert {path.name for path in here.glob("[bc]/*")} >= {"recipe.toml", "model.onnx", "model.pt"}
    assert TRACE_FILE in TRAINING.files


# --- single files


@pytest.mark.parametrize(
    "words",
    [
        ["measure", "model.pt", "--rounds", "1", "--json", "model.pt"],
        ["measure", "artifact", "--rounds", "1", "--json", "artifact/artifact.json"],
        ["explain", "model.pt", "artifact", "--data", "eval.npz", "--json", "eval.npz"],
        ["explain", "model.pt", "artifact", "--data", "eval.npz", "--json", "artifact/model.onnx"],
        ["engine-script", "artifact", "-o", "artifact/model.onnx"],
        ["export", "model.pt", "-o", "b", "--save-config", "model.pt"],
        ["export", "model.pt", "-o", "artifact", "--save-config", "artifact/mine.toml"],
        ["optimize", "model.pt", "-o", "b", "--eval", "eval.npz", "--save-config", "eval.npz"],
    ],
    ids=" ".join,
)
def test_a_file_that_is_asked_for_is_none_that_the_command_reads(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    before = held(here)
    assert "won't write" in refused(capsys, *words)
    assert held(here) == before


@pytest.mark.parametrize("place", ["/dev/full", "pipe"])
@pytest.mark.parametrize(
    "words",
    [["measure", "model.pt", "--rounds", "1", "--json"], ["engine-script", "artifact", "-o"]],
    ids=" ".join,
)
@pytest.mark.usefixtures("here")
def test_what_is_no_file_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], words: list[str], place: str
) -> None:
    os.mkfifo("pipe")
    told = refused(capsys, *words, place)
    assert f"won't write {place}" in told
    assert "a device, a pipe or a socket" in told


# --- recipes


def recipe(path: str, text: str) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(text)


OWN = 'command = "export"\ncheckpoint = "model.pt"\noutput = "b"\n'


@pytest.mark.parametrize("more", ["# why it is so\n", "prune = 0.5\n"])
def test_a_recipe_in_the_output_is_not_lost(here: Path, capsys: pytest.CaptureFixture[str], more: str) -> None:
    shutil.copytree("artifact", "b")
    recipe("b/mine.toml", OWN + more)
    before = held(here)
    assert "b/mine.toml" in refused(capsys, "run", "b/mine.toml")
    recipe("b/recipe.toml", OWN + "# a word of mine\n")
    before["b/recipe.toml"] = Path("b/recipe.toml").read_bytes()
    assert "b/recipe.toml" in refused(capsys, "run", "b/recipe.toml")
    assert held(here) == before


def test_an_artifact_s_own_recipe_runs_again_in_its_place(here: Path) -> None:
    shutil.copytree("artifact", "b")
    recipe("b/recipe.toml", OWN)
    with pytest.raises(SystemExit) as ended:
        main(["run", "b/recipe.toml"])
    assert ended.value.code == 0
    assert Path("b/recipe.toml").read_text() == OWN


# --- the script that builds engines elsewhere


def test_the_engine_script_leaves_what_is_beside_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.tensorrt import run_script

    source = tmp_path / "art" / "model.onnx"
    source.parent.mkdir()
    source.write_bytes(b"onnx")
    source.with_name("artifact.json").write_text("{}")
    (tmp_path / "plan.part").mkdir()
    (tmp_path / "plan.part" / "thesis.txt").write_text("mine")
    monkeypatch.setattr(run_script, "MODEL_SHA256", hashlib.sha256(b"onnx").hexdigest())
    monkeypatch.setattr(run_script, "SETTINGS", {"timing_cache": None})
    monkeypatch.setattr(run_script, "_by_trtexec", lambda *_: 1 / 0)
    monkeypatch.setattr(run_script, "_tensorrt", lambda: None)
    with pytest.raises(ZeroDivisionError):
        run_script.make(tmp_path / "art", tmp_path / "plan")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["art", "plan.part"]
    assert (tmp_path / "plan.part" / "thesis.txt").read_text() == "mine"
