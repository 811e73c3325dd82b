"""A training stage run by several processes of this machine that share each batch: one for each GPU, or on the CPU."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError, ToolkitError
from compress.formats.checkpoint import load, write
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.stage import Given, Progress
from compress.training.loop import TRACE_FILE
from compress.training.machine.launch import ended_as, launch

if TYPE_CHECKING:
    from compress.quantize.qat.train_quantized import TrainQuantized
    from compress.training.finetune import Finetune

__all__ = ["in_processes"]

JOB, RESULT, ERROR = "job.json", "given.json", "error.json"
LAST_LINES = 5


def in_processes(stage: Finetune | TrainQuantized, model: TorchModel, folder: Path, progress: Progress) -> Given:
    """Start them, follow them, and read what the first of them wrote.

    Raises:
        RecipeError: data that another process can't open.
        StageError: one of them failed.
    """
    job = folder / "processes"
    job.mkdir(parents=True, exist_ok=True)
    for name in (RESULT, ERROR):
        (job / name).unlink(missing_ok=True)
    devices = stage.finetune.training.devices
    _describe(stage, model, job)
    command = [sys.executable, "-m", "compress.training.process", str(job)]

    def told(line: str) -> None:
        try:
            found = json.loads(line)
            how = found["done"], found["total"], found["note"]
        except (ValueError, KeyError, TypeError):
            return  # the user's own code may print, too
        progress(*how)

    with (job / "log.txt").open("w", encoding="utf-8") as log:
        failed = ended_as(launch(command, devices, log, told))
    if (job / ERROR).exists():
        error = json.loads((job / ERROR).read_text(encoding="utf-8"))
        raise StageError(error["what"], why=error["why"], mend=error["mend"])
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
    if (job / TRACE_FILE).exists():
        (job / TRACE_FILE).replace(folder / TRACE_FILE)
    shutil.rmtree(job)
    ranges = {name: (low, high) for name, (low, high) in given["ranges"].items()}
    written = TorchModel(trained.module, model.signature, ranges=ranges)
    return Given(written, given["did"], given["details"], tuple(given["warnings"]))


def _describe(stage: Finetune | TrainQuantized, model: TorchModel, job: Path) -> None:
    tuned = stage.finetune
    asked = getattr(stage, "quantize", None)
    for data in (tuned.data, tuned.validation, None if asked is None else asked.calibration):
        if data is not None and not data.source:
            raise RecipeError(
                "can't train in several processes",
                why="the data is in this process's memory alone",
                mend="give it as a file, a folder or package.module:function",
            )
    write(model, job / "student.pt")
    if tuned.teacher is not None:
        write(tuned.teacher, job / "teacher.pt")
    description = {
        "stage": stage.name,
        "target": getattr(stage, "target", None),
        "unfuse": getattr(stage, "unfuse", False),
        "quantize": None
        if asked is None
        else {
            "calibration": asked.calibration.source,
            "calibrator": asked.calibrator,
            "reduce_range": asked.reduce_range,
            "target": asked.target,
            "exclude": list(asked.exclude),
        },
        "data": tuned.data.source,
        "validation": None if tuned.validation is None else tuned.validation.source,
        "seed": tuned.seed,
        "evaluation": tuned.evaluation,
        "training": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(tuned.training).items()
        },
    }
    (job / JOB).write_text(json.dumps(description, indent=2), encoding="utf-8")


def read_job(job: Path) -> tuple[Finetune | TrainQuantized, TorchModel]:
    """The stage and the model, in one of the processes."""
    from compress.quantize.qat.train_quantized import TrainQuantized
    from compress.quantize.quantize_onnx import QuantizeOnnx
    from compress.training.finetune import Finetune

    told: dict[str, Any] = json.loads((job / JOB).read_text(encoding="utf-8"))
    model = load(job / "student.pt")
    values = told["training"]
    values["augment"] = tuple(values["augment"])
    values["tensorboard"] = None if values["tensorboard"] is None else Path(values["tensorboard"])
    tuned = Finetune(
        Dataset.open(told["data"], model.signature),
        load(job / "teacher.pt") if (job / "teacher.pt").exists() else None,
        TrainingOptions(**values),
        told["seed"],
        None if told["validation"] is None else Dataset.open(told["validation"], model.signature),
        told["evaluation"],
    )
    if told["stage"] != "train_quantized":
        return tuned, model
    asked = told["quantize"]
    if asked is not None:
        asked |= {
            "calibration": Dataset.open(asked["calibration"], model.signature),
            "exclude": tuple(asked["exclude"]),
        }
    quantize = None if asked is None else QuantizeOnnx("static", **asked)
    return TrainQuantized(tuned, told["target"], quantize, told["unfuse"]), model


def write_error(job: Path, error: ToolkitError) -> None:
    """By the one that meets it: the others may only see that it is gone."""
    beside = job / f"{ERROR}.{os.getpid()}"
    beside.write_text(json.dumps({"what": error.what, "why": error.why, "mend": error.mend}), encoding="utf-8")
    beside.replace(job / ERROR)


def write_result(job: Path, given: Given) -> None:
    """By the first of the processes."""
    assert isinstance(given.model, TorchModel)  # noqa: S101  a training gives one
    write(given.model, job / "trained.pt")
    told = {
        "did": given.did,
        "details": dict(given.details),
        "warnings": list(given.warnings),
        "ranges": dict(given.model.ranges),
    }
    (job / RESULT).write_text(json.dumps(told), encoding="utf-8")
