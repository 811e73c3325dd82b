"""What `compress` hands to `serve`: a folder with a model file, its signature and how it was made.

Standard library and numpy only, so that a gateway host can read an artifact without torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from compress.errors import ArtifactError, first_line, printable
from compress.processor import LARGEST_FILE, Processor
from compress.signature import Signature, TensorSpec
from compress.vetting.files import open_file, refuse_larger
from compress.vetting.heard import Heard, unheard
from compress.vetting.onnx_wire import MAX_BYTES as ONNX_BYTES
from compress.vetting.onnx_wire import OnnxFileError, vet_onnx
from compress.vetting.paths import stands_inside
from compress.vetting.texts import read_json

__all__ = ["RUNTIMES", "Artifact", "Measured", "Runtime", "Signature", "StageReport", "TensorSpec", "sha256_of"]

SCHEMA_VERSION = 1
PROCESSOR = "processor"  # the folder of what makes inputs
BLOCK = 1 << 20
REASON = 200  # letters of an error that are told
READ = "bytes read once, to know them by"

Runtime = Literal["onnxruntime", "openvino"]
"""What runs an ONNX file on a CPU."""
FORMATS = ("onnx", "plan")
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
RUNTIME_NAMES: dict[Runtime, str] = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
RUNTIME_EXTRAS: dict[Runtime, str] = {"onnxruntime": "triton", "openvino": "openvino"}
"""Of this package, by what they bring to a server."""


def sha256_of(path: Path, most: int | None = None, tell: Heard = unheard) -> str:
    """Hex SHA-256 of a file, read in blocks.

    Args:
        path: of the file.
        most: bytes that a file of its kind has at most, looked at before any are read.
        tell: is told how it goes on.

    Raises:
        OSError: it can't be read; is a pipe, a socket or a device, mostly holes, or larger than it may be.
    """
    digest = hashlib.sha256()
    with open_file(path) as file:
        total = os.fstat(file.fileno()).st_size
        if most is not None:
            refuse_larger(path, file, most)
        done = 0
        tell(0, total, READ)
        while block := file.read(BLOCK):
            digest.update(block)
            done += len(block)
            tell(done, max(done, total), READ)
    return digest.hexdigest()


@dataclass(frozen=True)
class Measured:
    """What was measured of one stage's model; None is "not measured", never a guess.

    Attributes:
        macs: multiply-accumulates for one sample of representative sizes.
        params: number of weights.
        size_bytes: bytes of the model's file.
        accuracy: share of evaluation samples whose label is predicted, 0 to 1; where the judged output is class scores.
        agreement: share of evaluation samples with the original's top-1 answer, 0 to 1; likewise.
        metric: name of what the run judges by.
        metric_scale: what a difference of it is multiplied by to be a drop: 100 for shares, whose drops are in points.
        value: of the metric; `value_low` and `value_high` bound its 95% confidence interval.
        drop: loss of the metric against the original, in points for shares, paired by sample; `drop_low` and
            `drop_high` bound its 95% confidence interval.
        drop_constant: what the best answer that is always the same would lose, where one is known: no budget counts as
            kept by what has lost as much.
        stage_drop: the same loss against the stage before.
        cosine_similarity: mean over samples, outputs against the original's.
        max_abs_error: largest absolute difference from the original's outputs.
        batch_difference: largest absolute difference between the outputs of a sample alone and in a batch of 8 (of a
            slow model down to 4), as a share of the largest output; of the original and of the result.
        latency_p50_ms, latency_p99_ms: at batch 1, in milliseconds; `latency_p50_low_ms` and `latency_p50_high_ms` are
            the ends of the median's 95% confidence interval.
        latency_rounds_ms: the median of each round in which the models took turns, so that any two rows of a run can be
            compared round by round.
        load_ms: from the file to a model that is ready to run.
        peak_memory_bytes: what loading and running it at batch 1 adds to a fresh process, at most.
        runtime: what the latency was measured with, such as "torch eager".
    """

    macs: int | None = None
    params: int | None = None
    size_bytes: int | None = None
    accuracy: float | None = None
    agreement: float | None = None
    metric: str | None = None
    metric_scale: float | None = None
    value: float | None = None
    value_low: float | None = None
    value_high: float | None = None
    drop: float | None = None
    drop_low: float | None = None
    drop_high: float | None = None
    drop_constant: float | None = None
    stage_drop: float | None = None
    cosine_similarity: float | None = None
    max_abs_error: float | None = None
    batch_difference: float | None = None
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None
    latency_p50_low_ms: float | None = None
    latency_p50_high_ms: float | None = None
    latency_rounds_ms: tuple[float, ...] | None = None
    load_ms: float | None = None
    peak_memory_bytes: int | None = None
    runtime: str | None = None


@dataclass(frozen=True)
class StageReport:
    """One row of the report.

    Attributes:
        stage: the stage's name ("prune_channels").
        did: one sentence, what it did.
        measured: figures of the model that the stage gave.
        seconds: how long it took.
        warnings: what the user should know.
        details: the stage's own figures, JSON values by stable names.
        options: the options it ran with.
    """

    stage: str
    did: str
    measured: Measured
    seconds: float
    warnings: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"warnings": list(self.warnings)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        fields = dict(data)
        fields["measured"] = Measured(**{name: _figure(name, value) for name, value in fields["measured"].items()})
        fields["warnings"] = tuple(map(_text, fields["warnings"]))
        fields["seconds"] = _figure("seconds", fields["seconds"])
        found = cls(**fields)
        _text(found.stage), _text(found.did)
        if type(found.details) is not dict or type(found.options) is not dict:
            raise TypeError("a stage's details or options are no table")
        return found


@dataclass(frozen=True)
class Artifact:
    """A model file with its signature, its hash and the stages that made it.

    Attributes:
        folder: where it stands.
        model_file: the model's file name in it.
        format: "onnx", or "plan" of an engine.
        sha256: of the model file.
        signature: inputs and outputs, with a symbolic batch.
        stages: a report for each stage, the original first.
        toolkit_version: the release that wrote it.
        runtime: of an ONNX file: what runs it fastest on the machine where it was measured.
        processor: what makes inputs of texts or images, its files in the folder `processor`; None where the model came
            without.
        compared: by dimension that varies, the sizes at which OpenVINO gave the answers of ONNX Runtime; empty where
            that was not looked at.
    """

    folder: Path
    model_file: str
    format: str
    sha256: str
    signature: Signature
    stages: tuple[StageReport, ...] = ()
    toolkit_version: str = ""
    runtime: Runtime = "onnxruntime"
    processor: Processor | None = None
    compared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def model_path(self) -> Path:
        return self.folder / self.model_file

    def save(self) -> None:
        """Write artifact.json into the folder, beside the model file that must already be there."""
        data = {
            "schema_version": SCHEMA_VERSION,
            "toolkit_version": self.toolkit_version,
            "format": self.format,
            **({"runtime": self.runtime} if self.format == "onnx" else {}),
            "model_file": self.model_file,
            "sha256": self.sha256,
            "signature": self.signature.to_dict(),
            "stages": [stage.to_dict() for stage in self.stages],
        }
        if self.compared:
            data["compared"] = {dim: list(sizes) for dim, sizes in self.compared.items()}
        if self.processor is not None:
            data["processor"] = self.processor.to_dict()
        text = json.dumps(_finite(data), indent=2, allow_nan=False)
        (self.folder / "artifact.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read an artifact and check that its model file is the one that was written.

        Raises:
            ArtifactError: no such folder, damaged, of a newer schema, or the model file was changed.

        Examples:
            >>> artifact = Artifact.load(Path("artifact"))
            >>> artifact.model_path.name, [row.stage for row in artifact.stages][0]
            ('model.onnx', 'original')
        """
        path = folder / "artifact.json"
        again = "run `compress export` again, or name the folder that it wrote"
        if folder.is_file():
            raise ArtifactError(
                f"{folder} is not an artifact",
                why="it is a file, and an artifact is a folder",
                mend=f"name the folder that `compress export {folder}` writes, or the one that the file is in",
            )
        if not path.is_file():
            why = "there is no artifact.json in it" if folder.is_dir() else "there is no such folder"
            raise ArtifactError(f"{folder} is not an artifact", why=why, mend=again)
        try:
            data = read_json(path)
            if _version(data["schema_version"]) > SCHEMA_VERSION:
                raise ArtifactError(
                    f"can't read {path}",
                    why=f"its schema is version {data['schema_version']}, this release reads up to {SCHEMA_VERSION}",
                    mend="install the release that wrote it, or a newer one",
                )
            artifact = cls(
                folder=folder,
                model_file=_file_name(data["model_file"]),
                format=_format(data["format"]),
                sha256=_text(data["sha256"]),
                signature=Signature.from_dict(data["signature"]),
                stages=tuple(StageReport.from_dict(stage) for stage in data["stages"]),
                toolkit_version=_text(data["toolkit_version"]),
                runtime=_runtime(data.get("runtime", "onnxruntime")),
                processor=Processor.from_dict(found, folder / PROCESSOR) if (found := data.get("processor")) else None,
                compared={_text(dim): _sizes(sizes) for dim, sizes in data.get("compared", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OSError, RecursionError) as err:
            raise ArtifactError(f"can't read {path}", why=f"it is damaged: {_reason(err)}", mend=again) from err
        if not artifact.model_path.is_file():
            raise ArtifactError(f"{folder} is not whole", why=f"{artifact.model_file} is missing", mend=again)
        most = ONNX_BYTES if artifact.format == "onnx" else None
        if _digest(artifact.model_path, folder, again, most) != artifact.sha256:
            why = f"{artifact.model_file} is not the file that artifact.json was written for (its sha256 differs)"
            raise ArtifactError(f"{folder} is damaged", why=why, mend=again)
        if artifact.format == "onnx":
            _refuse_outside(artifact.model_path, folder, again)
        if artifact.processor is not None:
            _check_files(artifact.processor, folder, again)
        return artifact


def _refuse_outside(path: Path, folder: Path, mend: str) -> None:
    """Refuse weights that lie in other files: artifact.json tells the SHA-256 of one."""
    with suppress(OnnxFileError):  # who opens it says so
        if outside := sorted(vet_onnx(path, runs=False).outside):
            why = f"weights of {path.name} lie in {printable(outside[0])}, of which artifact.json has no sha256"
            raise ArtifactError(f"{folder} is not whole", why=why, mend=mend)


def _check_files(processor: Processor, folder: Path, mend: str) -> None:
    for name, sha256 in processor.files.items():
        path = processor.folder / name
        if not path.is_file():
            raise ArtifactError(f"{folder} is not whole", why=f"{PROCESSOR}/{name} is missing", mend=mend)
        if _digest(path, folder, mend, LARGEST_FILE) != sha256:
            why = f"{PROCESSOR}/{name} is not the file that artifact.json was written for (its sha256 differs)"
            raise ArtifactError(f"{folder} is damaged", why=why, mend=mend)


def _digest(path: Path, folder: Path, mend: str, most: int | None) -> str:
    try:
        return sha256_of(path, most)
    except OSError as err:
        raise ArtifactError(f"can't read {folder}", why=first_line(err), mend=mend) from err


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not list or not value or not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"{str(value)[:40]!r} are no sizes")
    return tuple(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _reason(err: Exception) -> str:
    """An error in some words: the repr of one that says where text is no UTF-8 holds the whole file."""
    if isinstance(err, UnicodeDecodeError):
        return f"byte {err.start:,} is no {err.encoding.upper()}"
    return printable(repr(err))[:REASON]


def _version(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"its schema_version is {str(value)[:40]!r}")
    return value


def _format(value: Any) -> str:
    """Each has checks of its own, which another name must not switch off."""
    if value not in FORMATS:
        raise ValueError(f"its format is {str(value)[:40]!r}")
    return str(value)


def _runtime(value: Any) -> Runtime:
    found = next((name for name in RUNTIMES if name == value), None)
    if found is None:
        raise ValueError(f"its runtime is {str(value)[:40]!r}")
    return found


def _file_name(value: Any) -> str:
    name = Path(_text(value)).name
    if not name or not stands_inside(name):
        raise ValueError(f"its model is to lie in {name[:40]!r}")
    return name


def _figure(name: str, value: Any) -> Any:
    """One that was measured: a number, a name, or, of the rounds, a row of numbers."""
    if name == "latency_rounds_ms" and value is not None:
        return tuple(_figure("latency_ms", part) for part in value)
    if value is not None and type(value) not in ((str,) if name in ("metric", "runtime") else (int, float)):
        raise TypeError(f"{name} is {str(value)[:40]!r}")
    if type(value) is int and abs(value) >= 1 << 63:
        raise ValueError(f"{name} is a number of more than 64 bits")
    if type(value) is float and not math.isfinite(value):  # what is written has null there
        raise ValueError(f"{name} is {value}")
    return value


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
