"""Whether a model's compression kept its budget: what a canary has to pass first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compress.errors import RepositoryError
from serve.config.pbtxt import config_text, from_pbtxt
from serve.repository.folders import parts_of
from serve.repository.provenance import Provenance, read_provenance, verify_checksums
from serve.repository.versions import served, versions_of

__all__ = ["Judged", "judge"]


@dataclass(frozen=True)
class Judged:
    """One model's newest version.

    Attributes:
        version: the one that is served.
        kept: whether it lost no more than it may, to the end of the 95% interval; without an interval it did not.
        words: what it lost, by what measure.
    """

    model: str
    version: int
    kept: bool
    words: str


def judge(repository: Path, model: str, max_drop: float) -> Judged:
    """Look up what the compression report says of the version that is served.

    Args:
        repository: its files are verified first.
        model: that was packed.
        max_drop: in points of the metric.

    Raises:
        RepositoryError: there is no such model, or a file was changed.
    """
    verify_checksums(repository)
    version, told = _network(repository, model)
    if told is None or told.drop is None:
        return Judged(model, version, kept=False, words="its drop was not measured: export it with --eval")
    word = "gained" if told.drop < 0 else "lost"
    shown = f"{word} {abs(told.drop):.2f} points of {told.metric or 'its metric'}"
    if told.drop_high is None:
        words = f"{shown}, and nobody knows how surely: export it with a metric that scores each sample"
        return Judged(model, version, kept=False, words=words)
    shown += f" (with 95% confidence it lost at most {max(told.drop_high, 0.0):.2f})"
    kept = told.drop <= max_drop and told.drop_high <= max_drop  # a NaN keeps nothing
    if told.drop_constant is not None and not told.drop < told.drop_constant:
        words = f"{shown}, and an answer that is always the same loses {told.drop_constant:.2f}"
        return Judged(model, version, kept=False, words=words)
    return Judged(model, version, kept, f"{shown}; {max_drop:g} may be lost")


def _network(repository: Path, model: str) -> tuple[int, Provenance | None]:
    parts = parts_of(repository, model) if (repository / model).is_dir() else []
    if not parts:
        raise RepositoryError(
            f"can't judge {model!r}",
            why=f"`serve pack` wrote no such model into {repository}",
            mend="name one that it wrote",
        )
    version = 0
    for part in parts:
        folder = repository / part
        config = from_pbtxt(config_text(folder / "config.pbtxt"), source=str(folder))
        version = served(config, versions_of(folder)) or 0
        told = read_provenance(folder / str(version))
        if told is not None and told.stages:
            return version, told
    return version, None
