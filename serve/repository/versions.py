"""Versions of a packed model: which one comes next, whether it may, and the way back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from compress.errors import RepositoryError
from compress.vetting.replace import replace_file
from compress.vetting.swap import move
from serve.config.model_config import ModelConfig
from serve.config.pbtxt import config_text, from_pbtxt, parse, text_of
from serve.repository.folders import PACKED_FILE, parts_of, recover
from serve.repository.lock import locked

__all__ = ["add_version", "beyond", "fits", "newest", "roll_back", "served", "versions_of"]

SAME = ("stages", "network", "network_outputs", "part_of")  # parameters that hold for all versions


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


def add_version(repository: Path, staged: Path, names: Sequence[str], version: int, keep: int) -> list[int]:
    """Move a staged version folder into each model, then the staged files; versions beyond `keep` go.

    A Triton that serves the repository goes on with what it has loaded. When a step fails, what was moved is taken
    back.

    Args:
        repository: holds the models.
        staged: a folder with MODEL/VERSION and MODEL/config.pbtxt for each, on the same file system.
        names: of the models.
        version: its number.
        keep: how many versions stay.

    Returns:
        The versions that were removed.

    Raises:
        RepositoryError: a file that would be replaced is no file.
    """
    real = repository.resolve()
    files = [path for name in names for path in sorted((staged / name).iterdir()) if path.is_file()]
    targets = {real / path.parent.name / path.name: path for path in files}
    for target in targets:
        if os.path.lexists(target) and not target.is_file():
            raise RepositoryError(f"can't replace {target}", why="it is no file", mend="remove it, then pack again")
    move(staged, [(staged / name / str(version), real / name / str(version)) for name in names], targets)
    gone: set[int] = set()
    for name in names:
        for folder in beyond(repository / name, keep, coming=0):
            shutil.rmtree(folder, ignore_errors=True)  # the new version stands
            gone.add(int(folder.name))
    return sorted(gone)


def beyond(folder: Path, keep: int, coming: int = 1) -> list[Path]:
    """A model's versions that go when so many are to stay, where some are to come."""
    return [folder / str(number) for number in versions_of(folder)[: -(keep - coming) or None]]


def served(config: ModelConfig, versions: Sequence[int]) -> int | None:
    """The version that a request without one gets."""
    return max(all_served(config, versions), default=None)


def all_served(config: ModelConfig, versions: Sequence[int]) -> list[int]:
    """The versions that are loaded, ascending."""
    policy, there = config.version_policy, sorted(versions)
    if policy is not None and policy.all is not None:
        return there
    if policy is not None and policy.specific is not None:
        return [version for version in there if version in policy.specific.versions]
    latest = policy.latest.num_versions if policy is not None and policy.latest is not None else 1
    return there[-max(1, latest) :]


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
        recover(repository)
        parts = parts_of(repository, name)
        if not parts:
            raise RepositoryError(
                f"can't roll back {name!r}",
                why=f"`serve pack` wrote no such model into {repository}",
                mend="name a model that it wrote",
            )
        paths = {part: repository / part / "config.pbtxt" for part in parts}
        configs = {part: from_pbtxt(config_text(path), source=str(path)) for part, path in paths.items()}
        now = served(configs[name], versions_of(repository / name)) or 0
        common = set.intersection(*(set(versions_of(repository / part)) for part in parts))
        before = max((number for number in common if number < now), default=None)
        if before is None:
            raise RepositoryError(
                f"can't roll back {name!r}",
                why=f"there is no version before {now}",
                mend="pack the older artifact again: it becomes a new version",
            )
        for path in paths.values():
            for file in (path, path.with_name(PACKED_FILE)):  # in both, because it is no edit by hand
                if file.exists():
                    message = parse(config_text(file))
                    message.version_policy.Clear()
                    message.version_policy.specific.versions.append(before)
                    replace_file(file, text_of(message).encode())
        return now, before
