"""What a run reads is not written to while it runs, or nothing comes of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import compress
from compress import ExportOptions
from compress.artifact import Signature, TensorSpec, sha256_of
from compress.cluster.shared import Shared
from compress.data import dataset
from compress.data.dataset import Dataset
from compress.errors import ChangedError
from compress.formats.checkpoint import load, save
from compress.jobs.branch import Setting, Silent
from compress.jobs.branches import _alone
from compress.jobs.places import held
from compress.jobs.recovery import finetune
from compress.options import FinetuneOptions, OptimizeOptions
from compress.options.training import TrainingOptions
from compress.stage import Progress
from compress.storage.steady import known, refuse_changed, seen, steady
from compress.training.finetune import Finetune
from compress.training.in_processes import _describe, in_processes, read_job, write_error
from compress.training.loop import STATE_FILE
from tests.models import mlp

ONE = Signature((TensorSpec.parse("a:float32[batch,2]"),), ())
FIRST = b"first and more"


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"other")


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(b"another")
    path.with_name("new").rename(path)


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {  # and whether it is refused
    "nothing": (lambda _path: None, False),
    "overwritten": (overwritten, True),
    "replaced": (replaced, True),
    "gone": (Path.unlink, False),
    "touched": (lambda path: os.utime(path, (1, 1)), False),
    "written again": (lambda path: path.write_bytes(FIRST), False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("process", ["this one", "another"])
def test_a_file_that_was_written_to_is_refused_for_good(tmp_path: Path, change: str, process: str) -> None:
    happen, refused = CHANGES[change]
    path = tmp_path / "data"
    path.write_bytes(FIRST)
    with steady():
        assert seen(path) == sha256_of(path)
        read = known()
        with steady(read) if process == "another" else nullcontext():
            happen(path)
            if refused:
                with pytest.raises(ChangedError, match="data was written to or replaced while this ran"):
                    seen(path)
                path.write_bytes(FIRST)  # what was computed meanwhile is of the other
                with pytest.raises(ChangedError, match="data was written to or replaced while this ran"):
                    refuse_changed()
            else:
                refuse_changed()
    refuse_changed()  # which is over


def test_files_that_come_to_a_folder_are_refused_when_it_is_read_again(tmp_path: Path) -> None:
    for name in ("a.npy", "b.npy"):
        np.save(tmp_path / name, np.zeros((4, 2), np.float32))
    signature = Signature(tuple(TensorSpec.parse(f"{name}:float32[batch,2]") for name in "ab"), ())
    with steady():
        Dataset.open(str(tmp_path), signature)
        np.save(tmp_path / "c.npy", np.zeros((4, 2), np.float32))
        with pytest.raises(ChangedError, match=r"files came to .*, or went, while this ran"):
            Dataset.open(str(tmp_path), signature)


@pytest.mark.parametrize("form", ["npz", "packed", "npy"])
def test_data_is_known_by_what_was_read_of_it(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file took the name while the first was read: either its hash is the first's, or the run ends."""
    path = tmp_path / ("x.npy" if form == "npy" else "x.npz")
    other = path.with_name(f"other{path.suffix}")
    for at, value in ((path, 0), (other, 1)):
        array = np.full((64, 2), value, np.float32)
        np.save(at, array) if form == "npy" else (np.savez_compressed if form == "packed" else np.savez)(at, a=array)
    first = sha256_of(path)
    reader = "open_npy" if form == "npy" else "open_npz"
    read = getattr(dataset, reader)

    def meanwhile(file: Path) -> Any:
        found = read(file)
        other.replace(path)
        return found

    monkeypatch.setattr(dataset, reader, meanwhile)
    with steady():
        data = Dataset.open(str(path), ONE)
        assert data.sha256 == first
        assert not data.inputs["a"].any()
        with pytest.raises(ChangedError, match="was written to or replaced while this ran"):
            refuse_changed()


def test_a_change_while_it_is_hashed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    path.write_bytes(FIRST)

    def meanwhile(file: Path, *_: Any) -> str:
        found = sha256_of(file)
        replaced(path)
        return found

    monkeypatch.setattr("compress.storage.steady.sha256_of", meanwhile)
    with steady(), pytest.raises(ChangedError):
        seen(path)


class At(Silent):
    """Something happens when a stage of this name begins, once."""

    def __init__(self, stage: str, happen: Callable[[], object]) -> None:
        self.stage, self.happen, self.done = stage, happen, False

    def started(self, stage: str) -> Progress:
        if self.stage in stage and not self.done:
            self.done = True
            self.happen()
        return super().started(stage)


def data(path: Path, scale: float = 1.0, count: int = 64) -> Path:
    rng = np.random.default_rng(0)
    np.savez(path, x=(scale * rng.standard_normal((count, 4))).astype(np.float32), label=rng.integers(0, 3, count))
    return path


def other_model(path: Path) -> Path:
    torch.manual_seed(7)
    return save(mlp(), path, inputs="x:float32[batch,4]")


@pytest.mark.parametrize("what", ["eval", "calibration", "model"])
def test_a_search_ends_where_what_it_reads_is_replaced_between_two_readings(tmp_path: Path, what: str) -> None:
    """It was taken for the fault of a candidate, or hashed anew: the winner was of one file, the original of another."""
    torch.manual_seed(0)
    save(mlp(), tmp_path / "model.pt", inputs="x:float32[batch,4]")
    files = {
        "model": tmp_path / "model.pt",
        "eval": data(tmp_path / "eval.npz"),
        "calibration": data(tmp_path / "c.npz"),
    }
    other = other_model(tmp_path / "other.pt") if what == "model" else data(tmp_path / "other.npz", 9.0)
    options = OptimizeOptions(
        output=tmp_path / "best", eval=str(files["eval"]), calibration=str(files["calibration"]), metric="cosine",
        prune=(0.0, 0.5), int8=("none", "static"), calibrators=("minmax",), precision=("fp32",), max_drop=100,
        goal="size", runtime="onnxruntime",
    )  # fmt: skip
    watcher = At("whole · INT8", lambda: other.replace(files[what]))
    with pytest.raises(ChangedError, match=f"{files[what].name} was written to or replaced while this ran"):
        compress.optimize(files["model"], options, watcher=watcher)
    assert watcher.done
    assert not (tmp_path / "best").exists()
    assert not (tmp_path / "best.search").exists()


@pytest.mark.parametrize("outside", [False, True])
def test_no_stage_of_another_onnx_file_is_kept_for_the_first(tmp_path: Path, *, outside: bool) -> None:
    for name, seed in (("first", 0), ("second", 7)):
        torch.manual_seed(seed)
        (tmp_path / name).mkdir()
        compress.export(
            save(mlp(), tmp_path / name / "m.pt", inputs="x:float32[batch,4]"), ExportOptions(output=tmp_path / "once")
        )
        model, place = onnx.load(tmp_path / "once" / "model.onnx"), tmp_path / name / "m.onnx"
        onnx.save(model, place, save_as_external_data=outside, location="w.bin", size_threshold=0)
    path, other = tmp_path / "first" / "m.onnx", tmp_path / "second" / "m.onnx"
    options = ExportOptions(output=tmp_path / "a", int8="dynamic", runtime="onnxruntime", work=tmp_path / "work")
    expected, _ = compress.export(path, options)
    shutil.rmtree(tmp_path / "work")
    changed = path.with_name("w.bin") if outside else path
    first = changed.read_bytes()

    def happen() -> None:
        content = (other.with_name("w.bin") if outside else other).read_bytes()
        changed.write_bytes(content) if outside else (other.replace(path))

    with pytest.raises(ChangedError, match=f"{changed.name} was written to or replaced while this ran"):
        compress.export(path, options, watcher=At("fold", happen))
    changed.write_bytes(first)
    again, _ = compress.export(path, options)
    assert again.sha256 == expected.sha256


def test_a_training_in_processes_finds_what_was_read_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = load(save(mlp(), tmp_path / "model.pt", inputs="x:float32[batch,4]"))
    path, other = data(tmp_path / "x.npz"), data(tmp_path / "other.npz", 9.0)
    with steady():
        stage = Finetune(Dataset.open(str(path), model.signature), None, TrainingOptions(devices=2))
        (tmp_path / "job").mkdir()
        _describe(stage, model, tmp_path / "job")
        other.replace(path)
    with pytest.raises(ChangedError), read_job(tmp_path / "job"):
        pass


def test_a_worker_of_a_search_finds_what_was_read_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, other = data(tmp_path / "x.npz"), data(tmp_path / "other.npz", 9.0)
    checkpoint = save(mlp(), tmp_path / "model.pt", inputs="x:float32[batch,4]")
    options = OptimizeOptions(output=tmp_path / "best", eval=str(path), prune=(0.0,), max_drop=100, goal="size")
    with steady():
        Dataset.open(str(path), load(checkpoint).signature)
        read = known()
    other.replace(path)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ChangedError):
        pool.submit(_alone, Setting(checkpoint, options, "", tmp_path, None), (), 0, 64, read).result()


def test_a_node_finds_the_content_that_was_read_before_whatever_its_times_there(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o700)
    (tmp_path / "here").symlink_to(tmp_path / "shared")  # by another name
    path, there = tmp_path / "here" / "x.npz", tmp_path / "shared" / "x.npz"
    first = data(path).read_bytes()
    shared = Shared.at(tmp_path / "shared")
    with steady():
        seen(path)
        read = shared.known()
    with steady(read):
        os.utime(there, (1, 1))
        seen(there)
        refuse_changed()
    there.write_bytes(first[:-1] + b"?")
    with steady(read), pytest.raises(ChangedError):
        seen(there)


def test_what_changed_in_a_process_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = load(save(mlp(), tmp_path / "model.pt", inputs="x:float32[batch,4]"))
    stage = Finetune(Dataset.open(str(data(tmp_path / "x.npz")), model.signature), None, TrainingOptions(devices=2))

    def launched(command: list[str], *_: Any) -> list[int]:
        write_error(Path(command[-1]), ChangedError("x", why="y", mend="z"))
        return [2, 2]

    monkeypatch.setattr("compress.training.in_processes.launch", launched)
    with pytest.raises(ChangedError):
        in_processes(stage, model, tmp_path, lambda *_: None)


def test_no_state_of_a_training_is_kept_after_its_data_has_changed(tmp_path: Path) -> None:
    """The same command went on from it: what other data had taught was kept under the key of the first."""
    torch.manual_seed(0)
    path, first = data(tmp_path / "x.npz"), (tmp_path / "x.npz").read_bytes()
    save(mlp(), tmp_path / "model.pt", inputs="x:float32[batch,4]")
    other, begun = data(tmp_path / "other.npz", 9.0), list[str]()

    class During(Silent):
        def started(self, stage: str) -> Progress:
            def progress(done: int, _total: int, _note: str) -> None:
                if stage == "finetune" and done > 4 and not begun:
                    begun.append(stage)
                    path.write_bytes(other.read_bytes())
                if stage == "finetune" and done > 13:  # epochs have ended since, each with a state
                    raise KeyboardInterrupt

            return progress

    options = FinetuneOptions(output=tmp_path / "out", data=str(path), epochs=4, batch_size=16, checkpoint_seconds=0)
    with pytest.raises(ChangedError):
        finetune(tmp_path / "model.pt", options, watcher=During())
    assert begun
    assert not (tmp_path / "out").exists()
    assert not [*tmp_path.glob(f"out.work/**/{STATE_FILE}")]
    path.write_bytes(first)
    finetune(tmp_path / "model.pt", options, watcher=Silent())


@pytest.mark.parametrize("stage", ["quantize_onnx", "measure"])
def test_no_artifact_comes_of_data_that_changed_and_no_stage_is_kept(tmp_path: Path, stage: str) -> None:
    """The samples were read from the disk as they were needed, of two files under one name."""
    save(mlp(), tmp_path / "model.pt", inputs="x:float32[batch,4]")
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "x.npy"
    np.save(path, np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32))
    whole = path.read_bytes()
    told: list[str] = []

    class Meanwhile(Silent):
        def started(self, stage_name: str) -> Progress:
            told.append(stage_name)
            if stage_name == stage:
                with path.open("r+b") as file:
                    file.seek(200)
                    file.write(np.full(8, 7.0, np.float32).tobytes())
            return super().started(stage_name)

    options = ExportOptions(
        output=tmp_path / "artifact", int8="static", calibration=str(tmp_path / "data"), eval=str(tmp_path / "data")
    )
    with pytest.raises(ChangedError, match=r"x\.npy was written to or replaced while this ran"):
        compress.export(tmp_path / "model.pt", options, watcher=Meanwhile())
    assert stage in told
    assert not (tmp_path / "artifact").exists()
    kept = [each.name for each in (tmp_path / "artifact.work").rglob("*") if each.name.startswith("0")]
    assert any("quantize_onnx" in name for name in kept) == (stage == "measure")
    path.write_bytes(whole)
    compress.export(tmp_path / "model.pt", options)
    assert (tmp_path / "artifact" / "report.json").exists()


def test_a_log_beside_the_weights_of_a_model_may_grow(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "train.log"):
        (tmp_path / name).write_text("{}")
    with steady():
        held(tmp_path)
        (tmp_path / "train.log").write_text("more")
        refuse_changed()
        (tmp_path / "model.safetensors").write_text("other")
        with pytest.raises(ChangedError, match=r"model\.safetensors"):
            refuse_changed()
