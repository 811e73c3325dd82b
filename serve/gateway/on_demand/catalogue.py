"""The models that can be loaded: what each is made of, and what is known of its size before it ever was."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compress.errors import RepositoryError
from serve.config.pbtxt import parse, read_config
from serve.repository.ends import finishes
from serve.repository.folders import files_of, folders_of
from serve.repository.needs import needs_of
from serve.repository.read import ModelInfo, instance_count, read_model
from serve.repository.versions import all_served

__all__ = ["Known", "catalogue_of"]

IDLE_S = 1.0  # after which Triton ends a sequence, where a model's configuration says nothing else


@dataclass(frozen=True)
class Known:
    """A model of the repository.

    Attributes:
        name: of it.
        parts: what it can't answer without, each after what it needs itself; the model last.
        rounds: in which its parts are loaded: those of a round don't need each other.
        file_bytes: of the files that are loaded, once for each process that holds them.
        processes: that it runs in, where every backend is the Python backend; 0 for an ensemble.
        part_of: the packed model that it is a step of; "" where it stands for itself.
        idle_s: how long it must have been left alone before it may go: a sequence's state is in it until then.
        finishes: whether code of its own may have something to do at its end, which it is given time for.
        info: what its folder says of it, to be told while it is not loaded.
    """

    name: str
    parts: tuple[str, ...]
    rounds: tuple[tuple[str, ...], ...]
    file_bytes: int
    processes: int
    part_of: str = ""
    idle_s: float = 0.0
    finishes: bool = True
    info: ModelInfo | None = None

    def serves(self, version: str) -> bool:
        """Whether a version is one that is loaded with it."""
        info = self.info
        return info is None or version in map(str, all_served(info.config, info.versions))


def catalogue_of(repository: Path) -> dict[str, Known]:
    """The models of a repository that can be read; those of which a part can't be are left out.

    Raises:
        RepositoryError: there is no such folder, or no model in it.
    """
    models: list[ModelInfo] = []
    for folder in folders_of(repository):
        with contextlib.suppress(RepositoryError):  # `serve up` has refused it, or it was changed since
            models.append(read_model(folder))
    needs, idle = needs_of(models), {model.name: _idle_s(repository / model.name) for model in models}
    return {
        model.name: _known(repository / model.name, model, needs, idle)
        for model in models
        if needs[model.name] <= needs.keys()
    }


def _known(folder: Path, model: ModelInfo, needs: Mapping[str, frozenset[str]], idle: Mapping[str, float]) -> Known:
    parts = sorted(needs[model.name], key=lambda part: (len(needs[part]), part))
    depths = sorted({len(needs[part]) for part in parts})
    rounds = tuple(tuple(part for part in parts if len(needs[part]) == depth) for depth in depths)
    count, served = instance_count([model]), all_served(model.config, model.versions)
    size = count * sum(_bytes_in(folder / str(version)) for version in served)
    whole = model.config.parameters.get("part_of", "")
    return Known(
        model.name, tuple(parts), rounds, size, count * len(served), "" if whole == model.name else whole,
        max(idle[part] for part in parts), finishes(folder, model.config.backend), model,
    )  # fmt: skip


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in files_of(folder):
        with contextlib.suppress(OSError):  # it went while we looked
            total += path.stat().st_size
    return total


def _idle_s(folder: Path) -> float:
    try:
        message = parse(read_config(folder / "config.pbtxt"))
    except (OSError, ValueError):
        return 0.0
    if not message.HasField("sequence_batching"):
        return 0.0
    idle_us: int = message.sequence_batching.max_sequence_idle_microseconds
    return max(IDLE_S, idle_us / 1e6)
