"""A training stage run by several processes of this machine that share each batch: one for each GPU, or on the CPU."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self, cast

from compress.console.wording import as_notes, notes_in
from compress.errors import ChangedError, StageError, ToolkitError
from compress.formats.checkpoint import load, write
from compress.model import TorchModel
from compress.stage import Given, Progress
from compress.storage.steady import known, steady
from compress.training.machine.launch import ended_as, launch
from compress.vetting.replace import replace_file

__all__ = ["Shared", "in_processes"]

JOB, RESULT, ERROR = "job.json", "given.json", "error.json"
LAST_LINES = 5


class Shared(Protocol):
    """A training stage that another process can be told of, by JSON values and the files of its models."""

    @property
    def devices(self) -> int:
        """How many processes share it."""

    @property
    def teacher(self) -> TorchModel | None:
        """Goes over as a file."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What decides the output, as of any stage."""

    def described(self) -> dict[str, Any]:
        """All of its options as JSON values, data by source.

        Raises:
            RecipeError: data that another process can't open.
        """

    @classmethod
    def of(cls, described: Mapping[str, Any], model: TorchModel, teacher: TorchModel | None) -> Self:
        """The stage again, from that, for a model."""

    def run(self, model: Any, folder: Path, progress: Progress) -> Given:
        """Train, as one of the processes."""


def in_processes(stage: Shared, model: TorchModel, folder: Path, progress: Progress) -> Given:
    """Start them, follow them, and read what the first of them wrote.

    Raises:
        RecipeError: data that another process can't open.
        StageError: one of them failed.
    """
    job = folder / "processes"
    job.mkdir(parents=True, exist_ok=True)
    for name in (RESULT, ERROR):
        (job / name).unlink(missing_ok=True)
    _describe(stage, model, job)
    command = [sys.executable, "-P", "-m", "compress.training.process", str(job)]

    def told(line: str) -> None:
        try:
            found = json.loads(line)
            how = found["done"], found["total"], found["note"]
        except (ValueError, KeyError, TypeError):
            return  # the user's own code may print, too
        progress(*how)

    with (job / "log.txt").open("w", encoding="utf-8") as log:
        failed = ended_as(launch(command, stage.devices, log, told))
    if (job / ERROR).exists():
        error = json.loads((job / ERROR).read_text(encoding="utf-8"))
        kind = ChangedError if error["changed"] else StageError
        raise kind(error["what"], why=error["why"], mend=error["mend"])
    if failed is None and not (job / RESULT).exists():
        failed = "a process ended before the training did"
    if failed is not None:
        lines = [line for line in (job / "log.txt").read_text(encoding="utf-8").splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if "Error" in line), " ".join(lines[-LAST_LINES:]))[:400]
        raise StageError(
            "training in several processes failed",
            why=f"{failed}: {last}" if last else failed,
            mend=f"see {job / 'log.txt'}, or train with --devices 1",
        )
    given = json.loads((job / RESULT).read_text(encoding="utf-8"))
    trained = load(job / "trained.pt")
    shutil.rmtree(job)
    ranges = {name: (low, high) for name, (low, high) in given["ranges"].items()}
    written = TorchModel(trained.module, model.signature, ranges=ranges)
    return Given(written, given["did"], given["details"], as_notes(given["warnings"], given["notes"]))


def _describe(stage: Shared, model: TorchModel, job: Path) -> None:
    kind = type(stage)
    description = {"stage": f"{kind.__module__}:{kind.__qualname__}", "options": stage.described(), "known": known()}
    write(model, job / "student.pt")
    if stage.teacher is not None:
        write(stage.teacher, job / "teacher.pt")
    (job / JOB).write_text(json.dumps(description, indent=2), encoding="utf-8")


@contextmanager
def read_job(job: Path) -> Iterator[tuple[Shared, TorchModel]]:
    """The stage and the model, in one of the processes; what is read there is what was read before."""
    told: dict[str, Any] = json.loads((job / JOB).read_text(encoding="utf-8"))
    module, _, name = told["stage"].partition(":")
    kind = cast("type[Shared]", getattr(import_module(module), name))
    model = load(job / "student.pt")
    teacher = load(job / "teacher.pt") if (job / "teacher.pt").exists() else None
    with steady(told["known"]):
        yield kind.of(told["options"], model, teacher), model


def write_error(job: Path, error: ToolkitError) -> None:
    """By the one that meets it: the others may only see that it is gone."""
    told = {"what": error.what, "why": error.why, "mend": error.mend}
    replace_file(job / ERROR, json.dumps(told | {"changed": isinstance(error, ChangedError)}))


def write_result(job: Path, given: Given) -> None:
    """By the first of the processes."""
    assert isinstance(given.model, TorchModel)  # noqa: S101  a training gives one
    write(given.model, job / "trained.pt")
    told = {
        "did": given.did,
        "details": dict(given.details),
        "warnings": list(given.warnings),
        "notes": notes_in(given.warnings),
        "ranges": dict(given.model.ranges),
    }
    (job / RESULT).write_text(json.dumps(told), encoding="utf-8")
