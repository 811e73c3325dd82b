"""A model that never ends is given up in three lines, by every command that would run it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from compress.cli import main as compress
from compress.data.dataset import Dataset
from compress.errors import RecipeError, ResourceError, StageError
from compress.formats.onnx.read import signature_of_onnx
from compress.model import watched as endless
from compress.model.watched import Watched
from compress.quantize.calibrate import calibrate
from compress.vetting.loops import loop_seconds, may_not_end
from serve.cli.main import main as serve
from tests.hostile.endless import ENDLESS, loop
from tests.hostile.onnx_files import artifact

STOPS = [name for name in ENDLESS if name not in ("without_nodes", "by_reference")]
INPUTS = {"x": np.ones((1, 4), np.float32)}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_LOOP_SECONDS", "0.5")


def told(capsys: pytest.CaptureFixture[str], run: object, arguments: list[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        run(arguments)  # type: ignore[operator]
    assert ended.value.code == 2
    return [line.strip() for line in capsys.readouterr().err.splitlines() if line.strip()][-3:]


@pytest.mark.parametrize("name", STOPS)
def test_measuring_ends_in_three_lines(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(ENDLESS[name](), tmp_path / "m.onnx")
    lines = told(capsys, compress, ["measure", str(tmp_path / "m.onnx"), "--batches", "1", "--rounds", "1"])
    assert lines[0] == "error: m.onnx does not come to an end"
    assert [line.split(":")[0] for line in lines[1:]] == ["why", "mend"]
    assert not [thread for thread in threading.enumerate() if thread.name == "onnx-loop"]  # it has stopped


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "m.onnx"],
        ["export", "m.onnx", "-o", "out"],
        ["export", "m.onnx", "-o", "out", "--int8", "static", "--calibration", "data.npz"],
        ["export", "m.onnx", "-o", "out", "--dry-run"],
        ["optimize", "m.onnx", "-o", "out", "--eval", "data.npz", "--max-drop", "1"],
    ],
    ids=" ".join,
)
def test_each_command_that_takes_onnx_files_gives_it_up(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(loop(), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=np.ones((64, 4), np.float32), label=np.arange(64) % 4)
    monkeypatch.chdir(tmp_path)
    assert told(capsys, compress, words)[0] == "error: m.onnx does not come to an end"
    assert not (tmp_path / "out").exists()


def test_calibrating_gives_up_a_loop_that_samples_alone_bring_into_being(tmp_path: Path) -> None:
    """It ends on the ones that are drawn, and not on the user's: as many rounds as the first number says."""
    made = loop(trips=1)
    del made.graph.initializer[1]
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "first"))
    head = [
        onnx.helper.make_node("Gather", ["x", "first"], ["row"], axis=0),
        onnx.helper.make_node("Gather", ["row", "first"], ["number"], axis=0),
        onnx.helper.make_node("Cast", ["number"], ["n"], to=onnx.TensorProto.INT64),
    ]
    nodes = [*head, *made.graph.node]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    onnx.save(made, tmp_path / "m.onnx")
    signature = signature_of_onnx(tmp_path / "m.onnx")
    np.savez(tmp_path / "many.npz", x=np.full((4, 4), 1e18, np.float32))
    np.savez(tmp_path / "few.npz", x=np.ones((4, 4), np.float32))
    assert calibrate(tmp_path / "m.onnx", Dataset.open(str(tmp_path / "few.npz"), signature), "minmax", lambda *_: None)
    with pytest.raises(StageError, match="does not come to an end"):
        calibrate(tmp_path / "m.onnx", Dataset.open(str(tmp_path / "many.npz"), signature), "minmax", lambda *_: None)


def test_one_that_does_not_stop_when_told_to_goes_with_its_process(tmp_path: Path) -> None:
    onnx.save(ENDLESS["without_nodes"](), tmp_path / "m.onnx")
    command = [sys.executable, "-m", "compress", "measure", str(tmp_path / "m.onnx"), "--batches", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=os.environ)
    assert done.returncode == 2
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()] == ["error", "why", "mend"]


def test_a_roofline_of_one_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact(tmp_path, loop().SerializeToString())
    assert "does not come to an end" in told(capsys, compress, ["inspect", str(tmp_path), "--roofline"])[0]


HOOKS = """
import numpy as np

def preprocess(a: float) -> dict[str, np.ndarray]:
    return {"x": np.full(4, a, np.float32)}

def example() -> dict[str, float]:
    return {"a": 1.0}
"""


def test_a_check_of_hooks_gives_it_up_and_waits_for_one_that_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESS_LOOP_SECONDS", "8")  # onnxruntime is imported within it, too
    (tmp_path / "hooks.py").write_text(HOOKS)
    arguments = ["hooks", "check", str(tmp_path / "hooks.py"), "--artifact", str(tmp_path)]
    artifact(tmp_path, loop(trips=3).SerializeToString())
    with pytest.raises(SystemExit) as ended:
        serve(arguments)
    assert ended.value.code == 0
    artifact(tmp_path, ENDLESS["without_nodes"]().SerializeToString())
    assert told(capsys, serve, arguments)[1] == "why:  it does not come to an end within 8 s"


@pytest.mark.parametrize("name", ENDLESS)
def test_what_only_reads_such_a_file_comes_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, repository = tmp_path / "m.onnx", str(tmp_path / "repository")
    onnx.save(ENDLESS[name](), path)
    begun = time.monotonic()
    for run, arguments in (
        (compress, ["lint", str(path)]),
        (serve, ["pack", str(path), "--repository", repository, "--name", "m"]),
        (serve, ["lint", repository]),
    ):
        with contextlib.suppress(SystemExit):
            run(arguments)
        assert "Traceback" not in capsys.readouterr().err
    assert time.monotonic() - begun < 60


def test_a_loop_that_ends_gives_what_it_gives(tmp_path: Path) -> None:
    onnx.save(loop(trips=3), tmp_path / "m.onnx")
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    watched = Watched(tmp_path / "m.onnx")
    for _ in range(2):
        assert np.array_equal(watched.run(session, None, INPUTS)[0], 2 * INPUTS["x"])
    with pytest.raises(Exception, match=r"ONNXRuntimeError|INVALID"):  # its own error comes through
        watched.run(session, None, {"x": np.ones((1, 5), np.float32)})


def test_a_loop_that_takes_all_memory_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_LOOP_SECONDS", "100")
    monkeypatch.setattr(endless, "LEAST_MEMORY", 1 << 60)  # a machine that has less left than it should
    onnx.save(ENDLESS["that_collects"](), tmp_path / "m.onnx")
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    with pytest.raises(ResourceError, match="takes all memory"):
        Watched(tmp_path / "m.onnx").run(session, None, INPUTS)


def test_only_what_repeats_itself_is_watched(tmp_path: Path) -> None:
    plain = onnx.helper.make_node("Relu", ["x"], ["z"])
    straight = loop()
    straight.graph.node[0].CopyFrom(plain)
    for name, made, watched in (
        ("straight", straight, False),
        *((name, make(), True) for name, make in ENDLESS.items()),
    ):
        onnx.save(made, tmp_path / "m.onnx")
        assert may_not_end(tmp_path / "m.onnx") is watched, name
    (tmp_path / "m.onnx").write_text("no model")
    assert not may_not_end(tmp_path / "m.onnx")


@pytest.mark.parametrize("said", ["0", "-1", "soon", "nan", "inf"])
def test_a_bound_that_is_no_number_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_LOOP_SECONDS", said)
    with pytest.raises(RecipeError, match="COMPRESS_LOOP_SECONDS"):
        loop_seconds()
