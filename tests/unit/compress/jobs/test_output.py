"""What can't be written is told in three lines, leaves nothing behind, and never costs what was there before."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

import compress
from compress import ExportOptions
from compress.artifact import Artifact
from compress.cli import main
from compress.errors import ArtifactError, CheckpointError, ResourceError, StageError
from compress.formats.checkpoint import save
from compress.jobs.export import Silent, export, optimize
from compress.jobs.output import write_artifact
from compress.jobs.places import check_output, claimed
from compress.jobs.sensitivity import sensitivity
from compress.model import OnnxModel
from compress.options import OptimizeOptions, SensitivityOptions
from compress.pipeline import Outcome
from compress.report.export import Report
from compress.runtime.footprint import footprint
from compress.stage import Progress
from compress.storage.files import locked, write_files
from compress.storage.shortages import shortages
from compress.vetting.swap import replacing_folder
from tests.full_disk import full_disk
from tests.models import build

X = "x:float32[batch,4]"


def test_no_file_is_written_whose_answers_are_of_another_type_than_its_signature_says(
    made: Path, tmp_path: Path
) -> None:
    artifact = Artifact.load(made / "artifact")
    (output,) = artifact.signature.outputs
    other = dataclasses.replace(artifact.signature, outputs=(dataclasses.replace(output, dtype="int32"),))
    report = cast(Report, None)  # which is not come to
    with pytest.raises(StageError, match=r"won't write model\.onnx") as caught:
        write_artifact(OnnxModel(artifact.model_path, other), tmp_path / "out", report, {})
    assert "is float32, and the signature says int32" in caught.value.why
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.pt, eval.npz and an artifact, in one folder."""
    folder = tmp_path_factory.mktemp("made")
    save(build("mlp")[0], folder / "model.pt", inputs=X)  # fixed weights: by chance, others answer all alike
    np.savez(folder / "eval.npz", x=np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32))
    compress.export(folder / "model.pt", ExportOptions(output=folder / "artifact"))
    shutil.rmtree(folder / "artifact.work")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with copies of these."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def halves(folder: Path) -> list[str]:
    return [name for name in tree(folder) if name.endswith((".part", ".old", ".lock"))]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines of an error with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert ended.value.code == 2, lines
    at = next(at for at, line in enumerate(lines) if line.startswith("error: "))
    assert len(lines[at:]) == 3, lines
    assert lines[at + 1].startswith("  why:  ")
    assert lines[at + 2].startswith("  mend: ")
    return lines[at:]


PLACES = (
    (".", "the folder that this runs in"),
    ("..", "the folder that this runs in"),
    ("/", "the folder that this runs in"),
    ("", "the folder that this runs in"),
    ("model.pt", "this run reads"),
    ("eval.npz", "it is a file"),
    ("/dev/null", "it is a file"),
    ("model.pt/below", "Not a directory"),
    ("/proc/nothing", "No such file"),
    ("/proc/self/nothing/deeper", "No such file"),
    ("n" * 250, "File name too long"),
    ("n" * 300, "File name too long"),
    ("/".join(["deep" * 50] * 25), "File name too long"),
    ("full", "holds something other than an artifact"),
    ("loop", "it is a file"),
)


@pytest.mark.parametrize(("output", "why"), PLACES)
def test_an_output_that_can_t_be_is_refused_before_any_work(
    here: Path, capsys: pytest.CaptureFixture[str], output: str, why: str
) -> None:
    (here / "full").mkdir()
    (here / "full" / "mine.txt").write_text("mine")
    (here / "loop").symlink_to("loop")
    before = tree(here)
    lines = said(capsys, "export", "model.pt", "-o", output)
    assert why in lines[1]
    assert tree(here) == before


@pytest.mark.parametrize("output", ["model.pt", "model.pt/below", "n" * 300, "/proc/nothing"])
@pytest.mark.parametrize(
    "command",
    [("optimize", "--eval", "eval.npz"), ("finetune", "--data", "eval.npz"), ("sensitivity", "--eval", "eval.npz")],
)
def test_so_it_is_with_the_other_commands(
    here: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], output: str
) -> None:
    before = tree(here)
    said(capsys, command[0], "model.pt", "-o", output, *command[1:])
    assert tree(here) == before


@pytest.mark.parametrize("output", ["model.pt/below", "n" * 300, "/proc/nothing"])
def test_and_with_files_that_are_asked_for(here: Path, capsys: pytest.CaptureFixture[str], output: str) -> None:
    before = tree(here)
    said(capsys, "measure", "model.pt", "--rounds", "1", "--json", output)
    said(capsys, "engine-script", "artifact", "-o", output)
    said(capsys, "export", "model.pt", "-o", "new", "--save-config", output)
    assert tree(here) == before


def test_a_sensitivity_may_be_written_where_one_is(here: Path) -> None:
    """Two files are added: the folder is not replaced, and nothing beside it is written."""
    sensitivity("model.pt", SensitivityOptions(output=Path(), eval="eval.npz", samples=10, ratios=(0.5,)))
    assert (here / "sensitivity.json").exists()
    assert halves(here) == []
    assert not (here.parent / f"{here.name}.lock").exists()


def test_what_goes_in_is_never_replaced_by_what_comes_out(here: Path) -> None:
    shutil.copy("model.pt", "artifact/model.pt")
    shutil.copy("eval.npz", "artifact/eval.npz")
    for checkpoint, more in (("artifact/model.pt", {}), ("model.pt", {"eval": "artifact/eval.npz"})):
        with pytest.raises(ArtifactError, match="which this run reads"):
            compress.export(checkpoint, ExportOptions(output=Path("artifact"), **more))  # type: ignore[arg-type]
    assert (here / "artifact/model.pt").exists()


@pytest.mark.parametrize(
    ("output", "work"), [("w/out", "w"), ("artifact", "artifact/work"), ("same", "same"), ("w/../w", "w")]
)
def test_the_output_and_the_stages_are_kept_apart(here: Path, output: str, work: str) -> None:
    before = tree(here)
    with pytest.raises(ArtifactError, match="one is inside the other"):
        compress.export("model.pt", ExportOptions(output=Path(output), work=Path(work)))
    assert tree(here) == before


def test_where_a_link_leads_is_replaced_and_the_link_stays(here: Path) -> None:
    (here / "link").symlink_to("artifact")
    compress.export("model.pt", ExportOptions(output=Path("link"), int8="dynamic"))
    assert (here / "link").is_symlink()
    assert Artifact.load(here / "artifact").stages[-1].stage == "quantize_onnx"
    assert halves(here) == []


def test_a_folder_of_the_user_s_that_has_the_name_of_a_leftover_stays(here: Path) -> None:
    """`mv artifact artifact.old` is how one keeps an artifact."""
    kept = Artifact.load(here / "artifact").sha256
    (here / "artifact").rename(here / "artifact.old")
    for _ in range(2):
        compress.export("model.pt", ExportOptions(output=Path("artifact"), int8="dynamic"))
        assert Artifact.load(here / "artifact.old").sha256 == kept
    assert halves(here) == ["artifact.old"]


@pytest.mark.parametrize("size", [0, 600, 2500, 6000, 20_000])
def test_files_that_can_t_grow_leave_the_old_artifact_and_no_half(here: Path, size: int) -> None:
    """The limit strikes at a stage's model, its description, the artifact, the report's JSON or its page."""
    before = Artifact.load(here / "artifact").sha256
    options = ExportOptions(output=Path("artifact"), int8="dynamic", prune=0.2)
    with full_disk(size), pytest.raises(ResourceError) as caught:
        compress.export("model.pt", options)
    assert "can't write" in caught.value.what
    assert Artifact.load(here / "artifact").sha256 == before
    assert halves(here) == []


@pytest.mark.parametrize("work", ["artifact.work", "a/new/place"])
def test_a_run_whose_first_stage_fails_leaves_no_folder(here: Path, work: str) -> None:
    before = tree(here)
    with full_disk(0), pytest.raises(ResourceError):
        compress.export("model.pt", ExportOptions(output=Path("artifact"), work=Path(work)))
    assert tree(here) == before


@pytest.mark.parametrize("name", ["artifact.json", "training.json"])
def test_a_result_inside_an_artifact_does_not_go_with_it(here: Path, name: str) -> None:
    inner = here / "artifact/deeper/inner"
    inner.mkdir(parents=True)
    (inner / name).write_text("{}")
    with pytest.raises(ArtifactError, match=f"would go with it: 'deeper/inner/{name}'"):
        compress.export("model.pt", ExportOptions(output=Path("artifact")))
    assert (inner / name).exists()


def test_the_other_commands_leave_nothing_either(here: Path) -> None:
    before = tree(here)
    with full_disk(100):
        with pytest.raises(ResourceError):
            sensitivity("model.pt", SensitivityOptions(output=Path("s"), eval="eval.npz", samples=10, ratios=(0.5,)))
        options = OptimizeOptions(output=Path("o"), eval="eval.npz", prune=(0,), int8=("dynamic",), budget_by="point")
        with pytest.raises(ResourceError):
            optimize("model.pt", options)
        with pytest.raises(ResourceError):
            write_files({here / "new/a.json": "1" * 50, here / "new/b.json": "1" * 200})
    assert [name for name in tree(here) if name not in before and not name.startswith("o.work")] == []
    assert halves(here) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=800k", "none", folder], capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run([str(shutil.which("umount")), "-l", str(folder)], check=True)


def test_a_full_disk_is_told_with_what_is_free(
    here: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("artifact", small_disk / "artifact")
    (small_disk / "more").write_bytes(bytes(shutil.disk_usage(small_disk).free - 20_000))
    left = tree(small_disk)
    lines = said(
        capsys, "export", "model.pt", "-o", str(small_disk / "artifact"), "--work", "work", "--int8", "dynamic"
    )
    assert "No space left on device" in lines[1]
    assert "MB are free" in lines[1]
    assert tree(small_disk) == left
    Artifact.load(small_disk / "artifact")


def test_a_disk_that_can_t_be_written_is_told_before_any_work(
    here: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([str(shutil.which("mount")), "-o", "remount,ro", str(small_disk)], check=True)
    for words in (("-o", str(small_disk / "artifact")), ("-o", "new", "--work", str(small_disk / "work"))):
        assert "Read-only file system" in said(capsys, "export", "model.pt", *words)[1]
    assert not (here / "new").exists()


def test_a_mounted_folder_is_no_output_since_it_can_t_be_swapped(
    here: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "mounted" in said(capsys, "export", "model.pt", "-o", str(small_disk))[1]


# --- what runs out elsewhere


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
        (RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed writing file data/1"), "failed writing"),
        (RuntimeError('[ONNXRuntimeError] : 1 : FAIL : Failed to write external initializers to file: "w"'), "Failed to write"),
        (RuntimeError("[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Protobuf serialization failed."), "serialization failed"),
        (MemoryError("Unable to allocate 8 GiB"), "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes"), "not enough memory"),
        (RuntimeError("std::bad_alloc"), "not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "not enough memory"),
        (BrokenProcessPool("A process in the process pool was terminated abruptly"), "ended by the system"),
    ],
)  # fmt: skip
def test_what_a_machine_lacks_is_no_traceback(tmp_path: Path, error: Exception, says: str) -> None:
    def stage() -> None:
        try:
            raise error
        except type(error) as err:
            raise RuntimeError("a stage failed") from err

    with pytest.raises(ResourceError) as caught, shortages(tmp_path):
        stage()
    assert says in str(caught.value)


def test_memory_that_is_really_not_there(tmp_path: Path) -> None:
    for greedy in (lambda: np.empty(1 << 55, np.uint8), lambda: torch.empty(1 << 55, dtype=torch.uint8)):
        with pytest.raises(ResourceError, match="not enough memory"), shortages(tmp_path):
            greedy()


@pytest.mark.parametrize(
    "error",
    [ValueError("a bug"), FileNotFoundError(2, "No such file", "/elsewhere/x"), PermissionError(13, "no", "/x/y")],
)
def test_a_bug_stays_a_traceback(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), shortages(tmp_path / "out"):
        raise error


@pytest.mark.parametrize(("program", "says"), [("os.kill(os.getpid(), 9)", "memory"), ("raise MemoryError", "memory")])
def test_a_process_that_the_system_ended_is_told(
    made: Path, monkeypatch: pytest.MonkeyPatch, program: str, says: str
) -> None:
    monkeypatch.setattr("compress.runtime.footprint._PROGRAM", f"import os\n{program}")
    artifact = Artifact.load(made / "artifact")
    with pytest.raises(ResourceError, match="in a process of its own") as caught:
        footprint(OnnxModel(artifact.model_path, artifact.signature), 1)
    assert says in caught.value.why


# --- Ctrl-C


@pytest.mark.parametrize(
    ("begun", "after"),
    [
        ("artifact.lock", 0.0),
        ("artifact.work/original", 0.0),
        ("artifact.work/original", 0.7),
        ("artifact.work/02-fold_onnx-*", 0.5),
    ],
)
def test_ctrl_c_at_any_time_is_one_line_and_leaves_no_half(here: Path, begun: str, after: float) -> None:
    command = [sys.executable, "-m", "compress", "export", "model.pt", "-o", "artifact"]
    before = Artifact.load(here / "artifact").sha256
    run = subprocess.Popen([*command, "--int8", "dynamic"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(here.glob(begun)) and run.poll() is None:
        time.sleep(0.01)
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all its processes
    _, err = run.communicate(timeout=60)
    assert run.returncode in (0, 130), err
    assert "Traceback" not in err
    assert run.returncode == 0 or err.splitlines()[-1].startswith("interrupted")
    assert run.returncode == 0 or Artifact.load(here / "artifact").sha256 == before
    assert halves(here) == []


@pytest.mark.parametrize("begun", ["at the end of a stage", "when one starts"])
def test_a_work_folder_that_vanishes_is_named(here: Path, begun: str) -> None:
    class Removing(Silent):
        def started(self, stage: str) -> Progress:
            if begun == "when one starts" and stage == "quantize_onnx":
                shutil.rmtree(here / "artifact.work")
            return super().started(stage)

        def ended(self, outcome: Outcome) -> None:
            if begun != "when one starts":
                shutil.rmtree(here / "artifact.work")

    before = Artifact.load(here / "artifact").sha256
    with pytest.raises(ResourceError, match="work is gone"):
        export(here / "model.pt", ExportOptions(output=Path("artifact"), int8="dynamic"), watcher=Removing())
    assert Artifact.load(here / "artifact").sha256 == before
    assert halves(here) == []


# --- two runs, one place


HOLD = """
import sys, time
from pathlib import Path
from compress.storage.files import locked
with locked(Path(sys.argv[1]), inside=sys.argv[1].endswith(".work")):
    print("held", flush=True)
    time.sleep(60)
"""
HOLD_AND_FORK = """
import os, sys, time
from pathlib import Path
from compress.storage.files import locked
with locked(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(30)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), 9)
"""
COUNT = """
import sys, time
from pathlib import Path
from compress.errors import ResourceError
from compress.storage.files import locked
place, won = Path(sys.argv[1]), 0
while won < 40:
    try:
        with locked(place):
            count = int(place.read_text())
            time.sleep(0.0005)
            place.write_text(str(count + 1))
            won += 1
    except ResourceError:
        time.sleep(0.0005)
"""


@contextlib.contextmanager
def holder(place: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("place", ["artifact", "artifact.work"])
def test_the_second_run_is_told_who_holds_the_place(here: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    (here / "artifact.work").mkdir()
    with holder(here / place) as first:
        lines = said(capsys, "export", "model.pt", "-o", "artifact")
        assert f"can't write {here / place} while another run does" in lines[0]
        assert f"process {first.pid}: " in lines[1]
        assert str(here / place) in lines[1], "the command"
    compress.export("model.pt", ExportOptions(output=Path("artifact")))
    assert halves(here) == [], "a dead holder's lock neither blocks nor stays"


def test_a_lock_is_free_again_at_once_when_its_holder_was_killed(tmp_path: Path) -> None:
    for _ in range(3):
        with holder(tmp_path / "out"), pytest.raises(ResourceError), locked(tmp_path / "out"):
            pass
        assert (tmp_path / "out.lock").exists()
        with locked(tmp_path / "out"):
            pass
        assert tree(tmp_path) == []


def test_a_child_that_outlives_its_parent_does_not_hold_its_lock(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLD_AND_FORK, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    child = int(done.stdout)
    try:
        time.sleep(0.2)
        with locked(tmp_path / "out"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_many_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    """Each counts up a file that it alone may write; where a lock leaks, a count is lost."""
    (tmp_path / "count").write_text("0")
    running = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path / "count")]) for _ in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
    assert (tmp_path / "count").read_text() == "160"
    assert tree(tmp_path) == ["count"]


def test_a_run_that_fails_removes_the_folders_that_it_made(tmp_path: Path) -> None:
    places = tmp_path / "a/b/out", tmp_path / "a/b/out.work"
    with pytest.raises(CheckpointError), claimed(*places):
        compress.load(tmp_path / "a/b/nothing.pt")
    assert tree(tmp_path) == []


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replacing_folder(out) as beside:
        (beside / "artifact.json").write_text("1")

    def again() -> None:
        with replacing_folder(out) as beside:
            (beside / "artifact.json").write_text("2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again()
    assert (out / "artifact.json").read_text() == "1"
    check_output(out)
    assert tree(tmp_path) == ["out", "out/artifact.json"]


@pytest.mark.parametrize(
    "how",
    ["open to all", "below one that is", "a link through one that is", "of a group", "another's", "another's link"],
)
def test_a_work_folder_that_others_may_have_filled_is_not_gone_on_with(
    here: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """In a folder as /tmp anybody can put one there first, by the name that is known beforehand."""
    work = here / "new.work"
    work.mkdir()
    if how == "open to all":
        work.chmod(0o777)
    elif how == "below one that is":
        here.chmod(0o777)
    elif how == "a link through one that is":
        (here / "open" / "in").mkdir(parents=True)
        work.rename(here / "open" / "in" / "stages")
        work.symlink_to("open/in/stages")
        (here / "open").chmod(0o777)
    else:
        if os.geteuid():
            pytest.skip("only root can give a file away")
        if how == "of a group":
            os.chown(work, -1, os.getegid() + 12345)
            work.chmod(0o775)
        elif how == "another's":
            os.chown(work, 65534, -1)
        else:
            work.rename(here / "elsewhere")
            work.symlink_to("elsewhere")
            os.lchown(work, 65534, -1)
    lines = said(capsys, "export", "model.pt", "-o", "new")
    assert "won't keep stages in new.work" in lines[0]
    assert "earlier run's" in lines[1]
    assert "--work" in lines[2]
    assert not (here / "new").exists()
    assert not halves(here)
    assert not list(work.iterdir())


def test_one_below_a_sticky_folder_is_gone_on_with_and_so_is_a_link_of_ones_own(here: Path) -> None:
    """As /tmp: nobody can take away there what is another's."""
    here.chmod(0o1777)
    (here / "elsewhere").mkdir()
    (here / "new.work").symlink_to("elsewhere")
    compress.export("model.pt", ExportOptions(output=Path("new")))
    assert list((here / "elsewhere").glob("*/stage.json"))


def test_one_that_this_users_own_group_may_write_is(here: Path) -> None:
    """Where each user has a group, folders are made so."""
    work = here / "new.work"
    work.mkdir()
    work.chmod(0o775)
    with claimed(here / "new", work):
        pass


def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out.lock")
    with pytest.raises(ResourceError, match="can't write") as found, locked(tmp_path / "out"):
        pass
    assert "no file" in found.value.why
    assert (tmp_path / "out.lock").exists(), "it is not ours to remove"
