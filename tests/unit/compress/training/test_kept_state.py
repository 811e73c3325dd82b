"""A state that was kept of a training, damaged or made by somebody else: none of its code runs, and training begins anew."""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.training.batches.answers import Answers
from compress.training.finetune import Finetune
from compress.training.loop import STATE_FILE
from compress.training.machine.launch import launch
from compress.training.updates.kept_state import KeptState
from compress.training.updates.newest import OTHER
from compress.training.updates.vet_state import fits, is_state
from tests.unit.compress.training.networks import model, same, stage, weights

ANEW = "what an interrupted run had kept of this training can't be used: it began anew"


class Pulled(Exception):  # noqa: N818
    """The plug."""


def tuned(folder: Path, **more: Any) -> Finetune:
    return stage(folder, taught=True, epochs=3, hold_out=0.2, ema=0.9, batch_size=64, **more)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with what was kept after an epoch, and what the whole training gives."""
    folder = tmp_path_factory.mktemp("kept")
    student = model(folder, "student", 4)
    (folder / "whole").mkdir()
    whole = tuned(folder).run(student, folder / "whole", lambda _d, _t, _n: None)

    def pull(_done: int, _total: int, note: str) -> None:
        if note.startswith("epoch 2"):
            raise Pulled

    (folder / "work").mkdir()
    with pytest.raises(Pulled):
        tuned(folder).run(student, folder / "work", pull)
    return folder, whole


class RunsCode:
    """Leaves a file, when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (Path.touch, (self.canary,))


def tree(change: Callable[[dict[str, Any]], None]) -> Callable[[Path, Path], None]:
    """A file that says something else, and is whole."""

    def write(path: Path, _canary: Path) -> None:
        found = torch.load(path, weights_only=True)
        change(found["state"])
        torch.save(found, path)

    return write


def put(*place: Any) -> Callable[[Path, Path], None]:
    """Another value at a place."""
    *path, last, value = place

    def change(state: dict[str, Any]) -> None:
        at: Any = state
        for name in path:
            at = at[name]
        at[last] = value

    return tree(change)


def lacks(*place: Any) -> Callable[[Path, Path], None]:
    *path, last = place

    def change(state: dict[str, Any]) -> None:
        at: Any = state
        for name in path:
            at = at[name]
        del at[last]

    return tree(change)


def other_bit(path: Path, _canary: Path) -> None:
    """In the middle of the weights, where nothing but a checksum tells it."""
    whole = bytearray(path.read_bytes())
    at = whole.index(
        np.float32(torch.load(path)["state"]["position"]["stepper"]["module"]["0.weight"][1, 0, 1, 1]).tobytes()
    )
    whole[at] ^= 1
    path.write_bytes(whole)


def script(path: Path, _canary: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 2)).save(path)  # type: ignore[no-untyped-call]


def pipe(path: Path, _canary: Path) -> None:
    """To open it waits for somebody who writes."""
    path.unlink()
    os.mkfifo(path)


POSITION = ("position", "stepper")
NAN = torch.full((4, 1, 3, 3), torch.nan)
CASES: dict[str, Callable[[Path, Path], object]] = {
    "code": lambda path, canary: torch.save({"format": 2, "state": RunsCode(canary)}, path),
    "code_of_old": lambda path, canary: path.write_bytes(pickle.dumps(RunsCode(canary))),
    "script": script,
    "cut": lambda path, _: path.write_bytes(path.read_bytes()[:-100]),
    "text": lambda path, _: path.write_text("no state"),
    "other_bit": other_bit,
    "list": lambda path, _: torch.save([1], path),
    "no_position": lacks("position"),
    "negative_step": put("position", "step", -1),
    "later_step": put("position", "step", 10**9),
    "step_of_text": put("position", "step", "1"),
    "no_weight": lacks(*POSITION, "module", "0.weight"),
    "other_shape": put(*POSITION, "module", "0.weight", torch.ones(5)),
    "nan": put(*POSITION, "module", "0.weight", NAN),
    "average_of_text": put(*POSITION, "average", "0.weight", "w"),
    "moments_of_another": put(*POSITION, "optimizer", "state", 0, "exp_avg", torch.ones(999, 999)),
    "moments_of_text": put(*POSITION, "optimizer", "state", 0, "exp_avg", "m"),
    "groups": put(*POSITION, "optimizer", "param_groups", []),
    "best_of_another": put("position", "best", {"value": 1.0, "epoch": 0, "state": {"a": torch.ones(1)}}),
    "best_of_text": put("position", "best", {"value": "much", "epoch": 0, "state": {}}),
    "journal": put("position", "journal", "epochs", [{"epoch": "<script>"}]),
    "curve": put("position", "journal", "curve", [[1, 2]]),
    "seconds": put("position", "journal", "seconds", float("inf")),
    "rate": put("rollback", "scale", 1e30),
    "size": put("size", "64"),
    "warning": put("warnings", [1]),
    "pipe": pipe,
}


def usable(path: Path, good: Path) -> bool:
    """Whether a training with the good state's shapes would go on from a file."""
    samples, kept = 256, KeptState(path, 0.0)
    wanted = KeptState(good, 0.0).load()
    assert wanted is not None
    assert kept.written()
    found = kept.load()
    return (
        found is not None and is_state(found, samples) and fits(found["position"], wanted["position"], 12, judged=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_what_this_training_did_not_write_is_not_gone_on_from(
    name: str, interrupted: tuple[Path, Any], tmp_path: Path
) -> None:
    good, path = interrupted[0] / "work" / STATE_FILE, tmp_path / STATE_FILE
    path.write_bytes(good.read_bytes())
    assert usable(path, good)
    CASES[name](path, tmp_path / "canary")
    assert not usable(path, good)
    assert not (tmp_path / "canary").exists(), "its code ran"


@pytest.mark.parametrize("name", ["code", "moments_of_another"])
def test_a_training_that_can_not_go_on_begins_anew_and_says_so(
    name: str, interrupted: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, whole = interrupted
    (tmp_path / STATE_FILE).write_bytes((folder / "work" / STATE_FILE).read_bytes())
    CASES[name](tmp_path / STATE_FILE, tmp_path / "canary")
    given = tuned(folder).run(model(folder, "student", 4), tmp_path, lambda _d, _t, _n: None)
    assert not (tmp_path / "canary").exists(), "its code ran"
    assert given.details["resumed_at_step"] is None
    assert [str(warning) for warning in given.warnings].count(ANEW) == 1
    assert same(weights(given), weights(whole))


def test_what_it_wrote_is(interrupted: tuple[Path, Any], tmp_path: Path) -> None:
    folder, whole = interrupted
    tree(lambda _: None)(folder / "work" / STATE_FILE, tmp_path)
    (tmp_path / STATE_FILE).write_bytes((folder / "work" / STATE_FILE).read_bytes())
    given = tuned(folder).run(model(folder, "student", 4), tmp_path, lambda _d, _t, _n: None)
    assert given.details["resumed_at_step"]
    assert ANEW not in given.warnings
    assert same(weights(given), weights(whole))


TWO_DISKS = """
import json, sys
from pathlib import Path
from compress.training.machine.launch import end_with_parent
from compress.training.machine.setup import rank
from tests.unit.compress.training.networks import model
from tests.unit.compress.training.test_kept_state import tuned
end_with_parent()
folder = Path(sys.argv[1]) / str(rank())
given = tuned(folder, devices=2).run(model(folder, "student", 4), folder / "work", lambda _d, _t, _n: None)
if rank() == 0:
    told = {"resumed": given.details["resumed_at_step"], "warnings": list(map(str, given.warnings))}
    print(json.dumps(told), flush=True)
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [("cut", "it is truncated"), ("step_of_text", OTHER), ("no_position", OTHER), ("list", "it is no state")],
)
def test_an_older_state_of_another_machine_is_gone_on_from_where_the_newest_is_of_no_use(
    name: str, why: str, interrupted: tuple[Path, Any], tmp_path: Path
) -> None:
    good = (interrupted[0] / "work" / STATE_FILE).read_bytes()
    for rank in (0, 1):
        (tmp_path / str(rank) / "work").mkdir(parents=True)
        (tmp_path / str(rank) / "work" / STATE_FILE).write_bytes(good)
    CASES[name](tmp_path / "0/work" / STATE_FILE, tmp_path / "canary")
    os.utime(tmp_path / "1/work" / STATE_FILE, (1000, 1000))
    lines: list[str] = []
    with (tmp_path / "log").open("w") as log:
        codes = launch([sys.executable, "-c", TWO_DISKS, str(tmp_path)], 2, log, lines.append)
    assert codes == [0, 0], (tmp_path / "log").read_text()
    told = json.loads(lines[-1])
    assert told["resumed"] > 0
    (said,) = (words for words in told["warnings"] if "left out" in words)
    assert said.startswith("what process 1 found kept")
    assert why in said
    assert ANEW not in told["warnings"]


def counted(text: str) -> Callable[[Path, np.ndarray[Any, Any]], object]:
    return lambda folder, _table: (folder / "answers.json").write_text(text)


COUNTS = ("[]", "-5", "1e999", str(10**9), "true", "[" * 100_000)
ANSWERS: dict[str, Callable[[Path, np.ndarray[Any, Any]], object]] = {
    **{f"count {text[:9]}": counted(text) for text in COUNTS},
    "objects": lambda folder, table: np.save(folder / "answers.logits.npy", table.astype(object)),
    "doubles": lambda folder, table: np.save(folder / "answers.logits.npy", table.astype(np.float64)),
    "short": lambda folder, table: np.save(folder / "answers.logits.npy", table[:-1]),
    "nan": lambda folder, table: np.save(folder / "answers.logits.npy", table * np.nan),
    "text": lambda folder, _: (folder / "answers.logits.npy").write_text("no table"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_were_not_kept_here_are_asked_for_again(name: str, tmp_path: Path) -> None:
    made = Answers.__new__(Answers)
    made._count, made._folder = 256, tmp_path
    table = np.ones((256, 4), np.float32)
    np.save(tmp_path / "answers.logits.npy", table)
    (tmp_path / "answers.json").write_text("256")
    assert made._noted({"logits": (4,)}) == 256
    ANSWERS[name](tmp_path, table)
    assert made._noted({"logits": (4,)}) == 0


@pytest.mark.parametrize("name", ["head/scale_0.tmp_1", "../out", "/root", "a" * 300, "¿", "nul\0"])
def test_answers_are_kept_in_their_folder_whatever_an_output_is_called(name: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    made = Answers.__new__(Answers)
    made._count, made._folder = 4, tmp_path / "work"
    made._tables = {name: made._table(name, (2,), anew=True), "head": made._table("head", (2,), anew=True)}
    made._note(4)
    assert made._noted({name: (2,), "head": (2,)}) == 4
    assert len(list((tmp_path / "work").iterdir())) == 3
    made.drop()
    assert not list((tmp_path / "work").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


def test_a_table_that_is_a_link_leaves_what_it_leads_to_as_it_is(interrupted: tuple[Path, Any], tmp_path: Path) -> None:
    folder, whole = interrupted
    work, mine = tmp_path / "work", tmp_path / "mine.npy"
    work.mkdir()
    np.save(mine, np.ones((205, 4), np.float32))
    kept = mine.read_bytes()
    (work / "answers.json").write_text("205")
    (work / "answers.logits.npy").symlink_to(mine)
    given = tuned(folder).run(model(folder, "student", 4), work, lambda _d, _t, _n: None)
    assert mine.read_bytes() == kept
    assert same(weights(given), weights(whole))
