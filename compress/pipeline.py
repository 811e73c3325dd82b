"""A pipeline is a list of stages: check it, run it, keep each stage's output so that an interrupted run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from compress import __version__
from compress.artifact import Signature, sha256_of
from compress.console.wording import Note, as_notes, notes_in
from compress.errors import ChangedError, CheckpointError, RecipeError, ToolkitError
from compress.formats.checkpoint import load, write
from compress.formats.files import size_of
from compress.formats.onnx.read import vetted_onnx
from compress.model import EngineModel, Lost, Model, OnnxModel, TorchModel
from compress.model.answers import answers_of, apart
from compress.runtime.memory import give_back
from compress.stage import Given, Progress, Stage
from compress.storage.files import make_folder, remove_empty
from compress.storage.shortages import shortages
from compress.storage.stage_cache import StageCache
from compress.storage.steady import refuse_changed
from compress.vetting.heard import heard
from compress.vetting.texts import read_json

__all__ = ["Outcome", "Watcher", "check", "hashing_shown", "kept_from_before", "key_of", "run", "with_seen"]

SHORT_SECONDS = 1.0  # what takes no longer is not shown
AFRESH = "COMPRESS_AFRESH"  # seconds since 1970
CACHED_SECONDS = 1.0  # what took no longer is done again as fast
SAID = "stage.json"  # in the folder of an output: what the stage did
BEGUN = ".stage"  # in it from the first: a run has made it
KEPT = re.compile(r"\d\d-\w+-[0-9a-f]{12}(\.part|\.fetched)?")  # its name: see _folders


OTHER = "what was kept of it was made of a model that answers otherwise, and looks the same: it is made anew"


class _OtherModelError(Exception):
    """What is kept of a stage is of another model."""


@dataclass(frozen=True)
class Outcome:
    """A stage that has run (or whose kept output was taken): its model and what it says of it."""

    stage: Stage
    given: Given
    seconds: float
    reused: bool
    size_bytes: int | None


class Watcher(Protocol):
    """Who wants to know how a run goes on."""

    def started(self, stage: str) -> Progress:
        """A stage begins; its progress goes to what is returned."""

    def ended(self, outcome: Outcome) -> None:
        """A stage is through."""


def hashing_shown(watcher: Watcher) -> contextlib.AbstractContextManager[None]:
    """Show how the hashing of data goes on, of large files or of samples: where it takes long, as a stage does."""
    begun: float = 0.0
    shown: Progress | None = None

    def tell(done: int, total: int, what: str) -> None:
        nonlocal begun, shown
        if not done:
            begun, shown = time.perf_counter(), None
        elif shown is None and time.perf_counter() - begun > SHORT_SECONDS:
            shown = watcher.started("data")
        if shown is not None:
            shown(done, total, what)

    return heard(tell)


def check(stages: Sequence[Stage], model: Model) -> None:
    """Refuse a chain that can't work, before any of it runs.

    Raises:
        RecipeError: a stage would be given what it does not take.
    """
    kind: type = type(model)
    for stage in stages:
        if stage.takes is not kind:
            raise RecipeError(
                f"the stage {stage.name} can't stand there",
                why=f"it takes a {stage.takes.__name__}, the stages before it give a {kind.__name__}",
                mend="put the torch stages (prune, finetune) before the export, and the ONNX stages after it",
            )
        stage.check(model)
        kind = stage.gives


def run(
    stages: Sequence[Stage], model: Model, *, work: Path, source: str, watcher: Watcher, tidy: bool = True,
    cache: StageCache | None = None,
) -> list[Outcome]:  # fmt: skip
    """Run the stages in order; the output of each is the input of the next.

    A stage whose input and options are those of an earlier run is not run again: its output is taken from the
    work folder, or from the cache.

    Args:
        stages: checked before.
        model: what goes in.
        work: a folder that keeps the outputs; made if missing.
        source: a hash of what `model` was loaded from.
        watcher: is told when a stage starts, goes on and ends.
        tidy: drop the outputs of earlier runs that this one did not use; not where several runs share the folder.
        cache: gets what took a while, for runs with other work folders; None for none.
    """
    made = make_folder(work)
    kept: set[Path] = set()
    outcomes: list[Outcome] = []
    other = False
    try:
        for stage, folder, key in _folders(stages, work, source):
            kept.add(folder)
            progress = watcher.started(stage.name)
            give_back()
            outcome, found = None, False
            try:
                outcome = None if other else _take(stage, folder, model) or _fetch(stage, folder, key, cache, model)
            except _OtherModelError:  # so are all that follow
                other = found = True
            if other:
                shutil.rmtree(folder.with_name(folder.name + ".part"), ignore_errors=True)
                if cache is not None:
                    cache.drop(stage.name, key)
            if outcome is None:
                outcome = _run(stage, model, folder, progress)
                outcome = _with_words(outcome, (Note(OTHER),)) if found else outcome
                worth = cache is not None and (cache.whole or outcome.seconds >= CACHED_SECONDS)
                if cache is not None and worth and (folder / SAID).exists():
                    cache.keep(stage.name, key, folder)
            outcome = with_seen(outcome)
            outcomes.append(outcome)
            watcher.ended(outcome)
            model = outcome.given.model
    finally:
        remove_empty(made)  # where nothing came to be kept
    for folder in work.glob("[0-9][0-9]-*") if tidy else ():
        if folder not in kept and _is_ours(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def _is_ours(folder: Path) -> bool:
    """Whether a run has made it: it has a key in its name, and in it a stage's word, or the mark of one begun."""
    return bool(KEPT.fullmatch(folder.name)) and any((folder / name).is_file() for name in (SAID, BEGUN))


def with_seen(outcome: Outcome) -> Outcome:
    """With the stage's word (`seen`) on what it saw of the evaluation data, where it has one.

    It is of this run's evaluation, which is no part of the stage's options: what is kept of an earlier run says none.
    """
    return _with_words(outcome, getattr(outcome.stage, "seen", ()))


def _with_words(outcome: Outcome, words: tuple[str, ...]) -> Outcome:
    given = dataclasses.replace(outcome.given, warnings=(*outcome.given.warnings, *words))
    return dataclasses.replace(outcome, given=given)


def kept_from_before(
    stages: Sequence[Stage], work: Path, source: str, cache: StageCache | None = None, beside: Path | None = None,
    model: Model | None = None,
) -> list[tuple[Outcome | None, Path]]:  # fmt: skip
    """Of each stage, what `run` would not do again, and the folder that holds it, or would.

    Args:
        stages, work, source, cache: as in `run`.
        beside: a folder, to look at what the cache has.
        model: what goes in.
    """
    found: list[tuple[Outcome | None, Path]] = []
    other = False
    for stage, folder, key in _folders(stages, work, source):
        outcome = None
        try:
            outcome = None if other else _take(stage, folder, model)
            if outcome is None and beside is not None and not other:
                outcome = _fetch(stage, beside / f"{folder.name}.cached", key, cache, model)
        except _OtherModelError:  # so are all that follow
            other = True
        found.append((outcome, folder))
        model = None if outcome is None else outcome.given.model
    return found


def key_of(stages: Sequence[Stage], source: str) -> str:
    """By which a cache keeps the output of the last."""
    return [key for _, _, key in _folders(stages, Path(), source)][-1]


def _folders(stages: Sequence[Stage], work: Path, source: str) -> Iterator[tuple[Stage, Path, str]]:
    """Where the output of each is kept: by what went into it, and all that decides what comes out: the key."""
    key = hashlib.sha256(f"{__version__} {source}".encode()).hexdigest()
    for index, stage in enumerate(stages, 1):
        key = hashlib.sha256(json.dumps([key, stage.name, dict(stage.options)], sort_keys=True).encode()).hexdigest()
        yield stage, work / f"{index:02d}-{stage.name}-{key[:12]}", key


def _fetch(stage: Stage, folder: Path, key: str, cache: StageCache | None, before: Model | None) -> Outcome | None:
    """What the cache has of a stage, in its folder."""
    beside = folder.with_name(folder.name + ".fetched")
    shutil.rmtree(beside, ignore_errors=True)
    if cache is None or not cache.fetch(stage.name, key, beside):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
    outcome = None
    try:
        outcome = _take(stage, folder, before)
    finally:
        if outcome is None:  # not as it was written, or of another model
            shutil.rmtree(folder, ignore_errors=True)
            cache.drop(stage.name, key)
    return outcome


def _run(stage: Stage, model: Model, folder: Path, progress: Progress) -> Outcome:
    beside = folder.with_name(folder.name + ".part")
    if not getattr(stage, "resumes", False) or _is_old(beside):
        shutil.rmtree(beside, ignore_errors=True)
    if beside.is_symlink():  # it may lead elsewhere
        beside.unlink()
    beside.mkdir(exist_ok=True)
    try:
        with shortages(beside):
            (beside / BEGUN).touch()
            return _fill(stage, model, folder, beside, progress)
    except BaseException as err:
        if not getattr(stage, "resumes", False) or isinstance(err, ChangedError):  # what it would go on from is neither
            shutil.rmtree(beside, ignore_errors=True)
        raise


def _fill(stage: Stage, model: Model, folder: Path, beside: Path, progress: Progress) -> Outcome:
    """Run a stage in a folder beside its own, and rename that."""
    start = time.perf_counter()
    given = stage.run(model, beside, progress)
    seconds = time.perf_counter() - start
    refuse_changed()
    if isinstance(given.model, TorchModel):
        try:
            write(given.model, beside / "model.pt")
        except CheckpointError:  # a forward that can't be traced: the run goes on, but can't be resumed from here
            shutil.rmtree(beside)
            return Outcome(stage, given, seconds, reused=False, size_bytes=None)
    data = {
        "did": given.did,
        "details": given.details,
        "warnings": given.warnings,
        "notes": notes_in(given.warnings),
        "seconds": seconds,
        "signature": given.model.signature.to_dict(),
        "model": "model.pt" if isinstance(given.model, TorchModel) else given.model.path.name,
    }
    if not isinstance(given.model, EngineModel) and given.model.ranges:
        data["ranges"] = dict(given.model.ranges)
    if isinstance(given.model, TorchModel) and given.model.lost is not None:
        data["lost"] = [[*place, sorted(gone)] for place, gone in given.model.lost.channels.items()]
        data["lost_blocks"] = [list(ends) for ends in given.model.lost.blocks.items()]
    if isinstance(given.model, TorchModel) and given.model.macs_gone:
        data["macs_gone"] = given.model.macs_gone
    if isinstance(model, TorchModel):
        data["given"] = answers_of(model)
    data["sha256"] = _digest(data, beside)
    (beside / SAID).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
    if not isinstance(given.model, TorchModel):
        moved = dataclasses.replace(given.model, path=folder / given.model.path.name)
        given = dataclasses.replace(given, model=moved)
    return Outcome(stage, given, seconds, reused=False, size_bytes=size_of(folder / str(data["model"])))


def _digest(data: Mapping[str, Any], folder: Path) -> str:
    """SHA-256 of all that a stage leaves: what it says, and its model's files.

    A damaged file is often one that still loads, with other numbers in it.

    Raises:
        ValueError: what bears a model's name is no file.
    """
    said = json.loads(json.dumps({name: value for name, value in data.items() if name != "sha256"}))  # keys as text
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for path in sorted(folder.glob("model*")):
        if not path.is_file():
            raise ValueError("it is no file")
        digest.update(f"\n{path.name} {sha256_of(path)}".encode())
    return digest.hexdigest()


def _is_old(path: Path) -> bool:
    """Whether it is of before the time that the environment names, if it does: reproduce.sh takes nothing of that."""
    try:
        return path.stat().st_mtime < float(os.environ.get(AFRESH, ""))
    except (OSError, ValueError):
        return False


def _take(stage: Stage, folder: Path, before: Model | None) -> Outcome | None:
    """What a stage gave, as it is kept; `before`, what went into it, where that is known.

    Raises:
        _OtherModelError: it was given a model that answers otherwise.
    """
    if _is_old(folder / SAID):
        return None
    try:
        data: Mapping[str, Any] = read_json(folder / SAID)
        if data["sha256"] != _digest(data, folder):
            return None
        path = folder / Path(data["model"]).name
        did, details, told, seconds = _said(data)
        signature = Signature.from_dict(data["signature"])
        model = load(path) if stage.gives is TorchModel else stage.gives(path, signature)
        if stage.gives is OnnxModel:
            vetted_onnx(path)
        if "ranges" in data:
            model = dataclasses.replace(
                model, ranges={name: (_number(low), _number(high)) for name, (low, high) in data["ranges"].items()}
            )
        if "lost" in data and isinstance(before, TorchModel):
            blocks = _lost_blocks(data.get("lost_blocks", []))
            model = dataclasses.replace(model, lost=Lost(before, _lost(data["lost"]), blocks))
        if "macs_gone" in data:
            model = dataclasses.replace(model, macs_gone=_number(data["macs_gone"]))
        if isinstance(before, TorchModel) and _answers_otherwise(before, data["given"]):
            raise _OtherModelError
        given = Given(model, did, details, told)
        return Outcome(stage, given, seconds, reused=True, size_bytes=size_of(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ToolkitError):  # not as it was written
        return None


def _answers_otherwise(model: TorchModel, kept: Any) -> bool:
    """Whether a model is not what a stage was given, whatever it is known by: code may do what none of it tells.

    Raises:
        KeyError, TypeError: what is kept are no answers.
    """
    now = answers_of(model)
    if now is None or kept is None:
        return now is not kept
    return apart(now, [[None if value is None else _number(value) for value in output] for output in kept])


def _said(data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], tuple[str, ...], float]:
    """What a kept stage says of itself, each as reports take it: a sentence, figures, warnings and seconds.

    Raises:
        KeyError, TypeError: one is missing, or of another kind.
    """
    did, details, warnings, seconds = (data[name] for name in ("did", "details", "warnings", "seconds"))
    if type(did) is not str or type(details) is not dict or type(warnings) is not list:
        raise TypeError("what it did is told in no words")
    if not all(type(text) is str for text in warnings):
        raise TypeError("a warning of it is no text")
    notes = data.get("notes", [])
    if type(notes) is not list or not all(type(place) is int for place in notes):
        raise TypeError("which of its warnings are notes is told otherwise")
    return did, details, as_notes(warnings, notes), _number(seconds)


def _lost(told: Any) -> dict[tuple[str, str, int], frozenset[int]]:
    """Channels by place; raises TypeError or ValueError where it is no list of places, each with its channels."""
    found = {}
    for name, side, axis, gone in told:
        numbers = all(type(at) is int and at >= 0 for at in gone)
        if not (type(name) is type(side) is str and type(axis) is int and numbers):
            raise TypeError("what it lost is told otherwise")
        found[name, side, axis] = frozenset(gone)
    return found


def _lost_blocks(told: Any) -> dict[int, int]:
    """What sums of a graph have become; raises TypeError or ValueError where it is no list of pairs of numbers."""
    found = {}
    for end, shortcut in told:
        if not (type(end) is type(shortcut) is int and shortcut >= 0 and end >= 0):
            raise TypeError("which blocks it lost is told otherwise")
        found[end] = shortcut
    return found


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise TypeError("what should be a number is none")
    return float(value)
