"""Versions of a packed model: which one comes next, whether it may, and the way back."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from compress.errors import RepositoryError
from serve.lock import locked
from serve.model_config import ModelConfig, ModelSpecificVersions, ModelVersionPolicy
from serve.model_folders import parts_of
from serve.pbtxt import from_pbtxt, to_pbtxt

__all__ = ["add_version", "fits", "newest", "roll_back", "served", "versions_of"]

SAME = ("stage", "arguments", "results", "returns", "part_of")  # parameters that hold for all versions


def versions_of(folder: Path) -> tuple[int, ...]:
    """The versions in a model's folder, ascending."""
    numbers = (int(sub.name) for sub in folder.iterdir() if sub.is_dir() and sub.name.isdecimal())
    return tuple(sorted(number for number in numbers if number > 0))


def newest(repository: Path, names: Sequence[str]) -> int:
    """The highest version of any of the models; 0 when there is none."""
    return max((number for name in names for number in versions_of(repository / name)), default=0)


def fits(old: ModelConfig, new: ModelConfig) -> bool:
    """Whether one config.pbtxt can stand for both: the same tensors, wiring and hook arguments."""

    def meaning(config: ModelConfig) -> tuple[object, ...]:
        parameters = {key: value for key, value in config.parameters.items() if key in SAME}
        return (
            config.backend, config.platform, config.input, config.output, config.ensemble_scheduling, parameters,
            config.max_batch_size > 0,
        )  # fmt: skip

    return meaning(old) == meaning(new)


def add_version(repository: Path, staged: Path, configs: Mapping[str, str], version: int, keep: int) -> list[int]:
    """Move a staged version folder into each model, then each config.pbtxt; versions beyond `keep` go.

    A Triton that serves the repository goes on with what it has loaded. When a step fails, what was moved is taken
    back.

    Args:
        repository: holds the models.
        staged: a folder with MODEL/VERSION for each, on the same file system.
        configs: the new text of config.pbtxt, by model.
        version: its number.
        keep: how many versions stay.

    Returns:
        The versions that were removed.
    """
    moved: list[Path] = []
    old = {name: (repository / name / "config.pbtxt").read_text(encoding="utf-8") for name in configs}
    try:
        for name in configs:
            target = repository / name / str(version)
            (staged / name / str(version)).rename(target)
            moved.append(target)
        for name, text in configs.items():
            _replace(repository / name / "config.pbtxt", text)
    except BaseException:
        for target in moved:
            shutil.rmtree(target, ignore_errors=True)
        for name, text in old.items():
            _replace(repository / name / "config.pbtxt", text)
        raise
    gone: set[int] = set()
    for name in configs:
        for number in versions_of(repository / name)[:-keep]:
            shutil.rmtree(repository / name / str(number), ignore_errors=True)  # the new version stands
            gone.add(number)
    return sorted(gone)


def served(config: ModelConfig, versions: Sequence[int]) -> int | None:
    """The version that a request without one gets."""
    policy = config.version_policy
    if policy is not None and policy.specific is not None:
        there = [number for number in versions if number in policy.specific.versions]
        return max(there, default=None)
    return max(versions, default=None)


def roll_back(repository: Path, name: str) -> tuple[int, int]:
    """Let the version before the one that is served be served, in all parts of a packed model.

    Args:
        repository: holds it.
        name: that it was packed under.

    Returns:
        The version that was served, and the one that is from the next load on.

    Raises:
        RepositoryError: it was not packed here, or there is no version before.
    """
    with locked(repository):
        parts = parts_of(repository, name)
        if not parts:
            raise RepositoryError(
                f"can't roll back {name!r}",
                why=f"`serve pack` wrote no such model into {repository}",
                mend="name a model that it wrote",
            )
        paths = {part: repository / part / "config.pbtxt" for part in parts}
        configs = {part: from_pbtxt(path.read_text(encoding="utf-8"), source=str(path)) for part, path in paths.items()}
        now = served(configs[name], versions_of(repository / name)) or 0
        common = set.intersection(*(set(versions_of(repository / part)) for part in parts))
        before = max((number for number in common if number < now), default=None)
        if before is None:
            raise RepositoryError(
                f"can't roll back {name!r}",
                why=f"there is no version before {now}",
                mend="pack the older artifact again: it becomes a new version",
            )
        policy = ModelVersionPolicy(specific=ModelSpecificVersions((before,)))
        for part, config in configs.items():
            _replace(paths[part], to_pbtxt(dataclasses.replace(config, version_policy=policy)))
        return now, before


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
