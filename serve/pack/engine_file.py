"""What engine.json says of a TensorRT plan: how far its shapes go, for each of its profiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from compress.artifact import Artifact, Signature
from compress.errors import RepositoryError
from compress.vetting.texts import read_json
from serve.pack.options import PackOptions

__all__ = ["Engine", "for_plan"]

_LARGEST = (1 << 31) - 1  # of a dimension in TensorRT
Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]  # smallest, best, largest, by input


@dataclass(frozen=True)
class Engine:
    """The optimization profiles of a plan, in TensorRT's order."""

    profiles: tuple[Shapes, ...]

    def largest(self, name: str) -> int:
        """The largest batch that an input may come in."""
        return max(profile[name][2][0] for profile in self.profiles)


def for_plan(source: Artifact, options: PackOptions) -> tuple[PackOptions, Engine | None]:
    """Options as a plan wants them, and its profiles, where engine.json is beside it; anything else as it is.

    A plan runs on GPUs only, takes no larger batch than it was built for, and each instance gets all of its profiles.

    Raises:
        RepositoryError: an asked profile is not there, or engine.json is damaged.
    """
    if source.format != "plan":
        if options.profiles:
            raise RepositoryError(
                f"can't use profiles {', '.join(map(str, options.profiles))}",
                why=f"only a TensorRT plan has any, and this is a file of {source.format}",
                mend="leave --profiles out",
            )
        return options, None
    options = replace(options, device="gpu")
    engine = _read(source.folder / "engine.json", source.signature)
    if engine is None or not engine.profiles:
        return options, None
    beyond = [number for number in options.profiles if number >= len(engine.profiles)]
    if beyond:
        raise RepositoryError(
            f"can't use profile {beyond[0]} of {source.model_path}",
            why=f"it has {len(engine.profiles)}, counted from 0",
            mend="give others, or leave --profiles out for all of them",
        )
    numbers = options.profiles or tuple(range(len(engine.profiles)))
    engine = Engine(tuple(engine.profiles[number] for number in numbers))
    if len(numbers) > 1:
        options = replace(options, profiles=numbers)
    first = next((spec.name for spec in source.signature.inputs if spec.name in engine.profiles[0]), None)
    if source.signature.batched and first is not None:
        largest = min(options.max_batch_size, engine.largest(first))
        best = {profile[first][1][0] for profile in engine.profiles}
        preferred = options.preferred_batch_size or tuple(sorted(size for size in best if 1 < size <= largest))
        if not options.dynamic_batching or len(engine.profiles) == 1:
            preferred = options.preferred_batch_size  # one size to tune for is no reason to hold requests back
        sizes = tuple(size for size in preferred if size <= largest)
        options = replace(options, max_batch_size=largest, preferred_batch_size=sizes)
    return options, engine


def _read(path: Path, signature: Signature) -> Engine | None:
    if not path.is_file():
        return None
    try:
        engine = Engine(tuple(map(_profile, read_json(path)["profiles"])))
        _fit(engine, signature)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise RepositoryError(
            f"can't read {path}", why=f"it is damaged: {err!r}"[:300], mend="build the engine again"
        ) from err
    return engine


def _profile(told: dict[str, Any]) -> Shapes:
    return {name: _three(shapes) for name, shapes in told.items()}


def _three(shapes: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    if type(shapes) is not list or not all(type(shape) is list for shape in shapes):
        raise TypeError("a profile has shapes that are no lists")
    low, best, high = map(tuple, shapes)
    for sizes in zip(low, best, high, strict=True):
        if not all(type(size) is int for size in sizes):
            raise TypeError("a profile has sizes that are no whole numbers")
        if not all(first <= second for first, second in pairwise((1, *sizes, _LARGEST))):
            raise ValueError("a profile has sizes that are not the smallest, the best and the largest")
    return low, best, high


def _fit(engine: Engine, signature: Signature) -> None:
    """Whether each profile speaks of the same inputs, in as many dimensions as they have."""
    if len({frozenset(profile) for profile in engine.profiles}) > 1:
        raise ValueError("its profiles are of different inputs")
    axes = {spec.name: len(spec.shape) for spec in signature.inputs}
    for profile in engine.profiles:
        for name, (shape, *_) in profile.items():
            if len(shape) != axes.get(name, len(shape)):
                raise ValueError("a profile has other dimensions than the input that it is of")
