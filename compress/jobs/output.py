"""Putting what a run gives in its place, whole or not at all, by one run at a time."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import onnx

from compress import __version__
from compress.artifact import PROCESSOR, Artifact, Signature, sha256_of
from compress.errors import ArtifactError, ResourceError, StageError
from compress.formats.onnx.outline import outline
from compress.model import EngineModel, OnnxModel
from compress.processor import Processor
from compress.report.export import Report
from compress.runtime.latency import Latency
from compress.storage.files import LOCK, locked, make_folder, remove_empty
from compress.storage.shortages import cant_write, shortages

__all__ = ["check_output", "claimed", "replacing", "write_artifact"]

# Bytes that a run needs to write, at the least, besides so many times the model.
ROOM, ROOM_TIMES = 1_000_000, 3
MARKERS = ("artifact.json", "training.json", "sensitivity.json")  # of what took a run to make
LONGEST = ".missed.part"  # what is put behind the name of an output, at most


@contextmanager
def claimed(output: Path, work: Path | None = None, inputs: Sequence[Path] = ()) -> Iterator[None]:
    """Hold the places of a run: nothing of value is in the way, nobody else writes them, and what fails leaves nothing.

    A work folder keeps the stages that are through, so that the same command goes on; it goes when there are none.

    Args:
        output: a file or a folder.
        work: the folder that keeps stages.
        inputs: files and folders that the run reads, the model first.

    Raises:
        ArtifactError: the run would remove what it reads, or the folder that it runs in; or what is kept in the work
            folder may be another user's word.
        ResourceError: a place can't be written, or another run holds it.
    """
    places = [output] if work is None else [output, work]
    _safe(output, work, inputs)
    need = ROOM + ROOM_TIMES * sum(path.stat().st_size for path in inputs[:1] if path.is_file())
    with shortages(*places, need=need), ExitStack() as stack:
        stack.callback(remove_empty, _reachable(_real(output)))
        stack.enter_context(locked(_real(output)))
        if work is not None:  # its own folder may be all that can be written
            stack.callback(remove_empty, _reachable(_real(work) / "stage"))
            _refuse_others(work)
            stack.enter_context(locked(_real(work), inside=True))
        try:
            yield
        except Exception as err:
            if work is None or (_real(work) / LOCK).exists():
                raise
            raise ResourceError(
                f"{work} is gone",
                why="something has removed it, and what this run kept in it, while the run was on",
                mend="give the same command again, with --work where nothing cleans up",
            ) from err


def _real(path: Path) -> Path:
    """The path without links, so that what a link names is replaced, not the link."""
    return Path(os.path.realpath(path))


def _reachable(place: Path) -> list[Path]:
    """Make the folder that a place is in; gives what was missing of it."""
    try:
        with suppress(FileNotFoundError):  # a name that is too long is another error
            place.with_name(place.name + LONGEST).lstat()
        return make_folder(place.parent)
    except OSError as err:
        raise cant_write(place, err) from err


def _safe(output: Path, work: Path | None, inputs: Sequence[Path]) -> None:
    mend = "name a new folder with -o"
    for path in (output,) if work is None else (output, work):
        try:
            os.fsencode(_real(path)).decode("utf-8")
        except ValueError as err:  # in a name that is no text, or has a NUL
            why = "its name is not UTF-8, which is all that ONNX Runtime takes"
            raise ArtifactError(f"can't write {path!r}", why=why, mend="name another folder with -o") from err
    real, here = _real(output), _real(Path())
    if real == here or real in here.parents:
        why = "it is the folder that this runs in, or one above it"
        raise ArtifactError(f"won't replace {output}", why=why, mend=mend)
    for path in inputs:
        if _real(path) == real or real in _real(path).parents:
            raise ArtifactError(f"won't replace {output}", why=f"{path}, which this run reads, is in it", mend=mend)
    if work is not None and (_real(work) == real or real in _real(work).parents or _real(work) in real.parents):
        raise ArtifactError(
            f"can't write {output} and keep stages in {work}",
            why="one is inside the other",
            mend="name folders apart with -o and --work",
        )


def _refuse_others(work: Path) -> None:
    """Refuse a work folder in which another user may have put stages, which this run would take for its own.

    Its default name is known beforehand, and in a folder as /tmp anybody can make one of that name. A folder may be
    written by this user's own group: where each user has one, folders are made so.
    """
    if not (real := _real(work)).is_dir():  # who writes there says so
        return
    told = real.stat()
    own = told.st_uid in (0, os.geteuid()) and work.lstat().st_uid in (0, os.geteuid())
    open_to = told.st_mode & (stat.S_IWOTH if told.st_gid == os.getegid() else stat.S_IWOTH | stat.S_IWGRP)
    if own and not open_to:
        return
    raise ArtifactError(
        f"won't keep stages in {work}",
        why="other users may write there, and what they put in would be taken for an earlier run's"
        if own
        else "it belongs to another user, and what is in it would be taken for an earlier run's",
        mend=(f"chmod go-w {shlex.quote(str(work))}, if nobody else has written there; or n" if own else "n")
        + "ame a folder of yours with --work",
    )


def _restore(output: Path, old: Path) -> None:
    """Put the earlier artifact back where a swap that was cut short had moved it from."""
    if old.exists() and not output.exists():
        old.rename(output)


def check_output(output: Path, marker: str = "artifact.json", kind: str = "an artifact") -> None:
    """Refuse to replace what is no such folder; one that an earlier run had set aside is put back.

    Args:
        output: the folder.
        marker: a file that each such folder has.
        kind: what it is called.

    Raises:
        ArtifactError: there is something else.
    """
    real = _real(output)
    if real.name and real.with_name(real.name + ".part").is_dir():  # as a run leaves it that was killed in between
        _restore(real, real.with_name(real.name + ".old"))
    try:
        if not os.path.lexists(real):
            return
        if os.path.ismount(real):
            why = "it is where a file system is mounted, and can't be swapped for another folder"
        elif not real.is_dir():
            why = "it is a file"
        elif any(real.iterdir()) and not (real / marker).exists():
            why = f"it is a folder that holds something other than {kind}"
        elif within := next((path for each in MARKERS for path in real.rglob(f"*/{each}")), None):
            why = (
                f"{output / within.parent.relative_to(real)}, the result of another run, is in it and would go with it"
            )
        else:
            return
    except OSError as err:
        raise cant_write(output, err) from err
    raise ArtifactError(f"won't replace {output}", why=why, mend="name a new folder with -o")


@contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """An empty folder beside the output, to be filled; at the end it is swapped for what was there.

    If anything fails, it is gone, and what was there stays.
    """
    output = _real(output)
    beside = output.with_name(output.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        yield beside
        _swap(beside, output)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _swap(beside: Path, output: Path) -> None:
    # A folder of the user's that happens to have the name is no leftover of ours.
    names = (output.name + ".old" + ("" if nth == 1 else str(nth)) for nth in itertools.count(1))
    old = next(path for path in map(output.with_name, names) if not os.path.lexists(path))
    try:
        if output.exists():
            output.rename(old)
        beside.rename(output)
    except BaseException:
        _restore(output, old)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_artifact(
    model: OnnxModel | EngineModel,
    output: Path,
    report: Report,
    timed: Mapping[str, Latency],
    processor: Processor | None = None,
) -> Artifact:
    """Fill a folder beside the output, then swap the two.

    An engine's folder has the ONNX file that it was built from, too, and engine.json, what TensorRT says of it. What
    makes inputs of texts or images is copied into the folder `processor`.

    Raises:
        StageError: the file's outputs are of other types than the signature says.
    """
    _refuse_other_types(model.path.with_name("model.onnx"), model.signature)
    engine = isinstance(model, EngineModel)
    files = ("model.plan", "model.onnx", "engine.json", "model.plan.stripped") if engine else ("model.onnx",)
    with replacing(output) as beside:
        for name in files:
            if (model.path.with_name(name)).exists():
                shutil.copyfile(model.path.with_name(name), beside / name)
        if processor is not None:
            processor = _copied(processor, beside / PROCESSOR)
        artifact = Artifact(
            folder=beside,
            model_file=files[0],
            format="plan" if engine else "onnx",
            sha256=sha256_of(beside / files[0]),
            signature=model.signature,
            stages=report.stages,
            toolkit_version=__version__,
            runtime="onnxruntime" if report.serving is None else report.serving.runtime,
            processor=processor,
        )
        artifact.save()
        report.write(beside, _thinned(timed))
    if processor is not None:
        processor = dataclasses.replace(processor, folder=output / PROCESSOR)
    return dataclasses.replace(artifact, folder=output, processor=processor)


def _refuse_other_types(path: Path, signature: Signature) -> None:
    """What serves the file reads the types of its answers in the signature."""
    for value, spec in zip(outline(path).graph.output, signature.outputs, strict=True):
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)).name
        if kind != spec.dtype:
            raise StageError(
                f"won't write {path.name}",
                why=f"its output {value.name!r} is {kind}, and the signature says {spec.dtype}",
                mend="report this model, and say what it was made of",
            )


def _copied(processor: Processor, folder: Path) -> Processor:
    """Its files as they are now: they were hashed when the model was loaded."""
    folder.mkdir()
    for name in processor.files:
        shutil.copyfile(processor.folder / name, folder / name)
    return dataclasses.replace(
        processor, files={name: sha256_of(folder / name) for name in processor.files}, folder=folder
    )


def _thinned(timed: Mapping[str, Latency]) -> dict[str, Sequence[float]]:
    """At most about a thousand latencies of each, for the plot."""
    return {name: found.samples_ms[:: max(1, len(found.samples_ms) // 1000)] for name, found in timed.items()}
