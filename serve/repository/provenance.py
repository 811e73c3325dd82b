"""Where a packed version comes from: its files' checksums, and what its compression cost; written beside the files."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from compress.artifact import Artifact, sha256_of
from compress.errors import RepositoryError
from compress.vetting.paths import stands_inside
from compress.vetting.texts import read_json
from serve.repository.entries import CACHE, irregular, is_byte_code
from serve.repository.folders import files_of, folders_of
from serve.repository.versions import versions_of

__all__ = ["PROVENANCE_FILE", "Provenance", "provenance_of", "read_provenance", "verify_checksums", "write_provenance"]

PROVENANCE_FILE = "provenance.json"
SCHEMA_VERSION = 1
CODE = (".py", ".so")
KEPT = ".gitkeep"


@dataclass(frozen=True)
class Provenance:
    """Of one version of one model.

    Attributes:
        files: SHA-256 by path in the version's folder.
        toolkit_version: the release that compressed it; "" for a file from elsewhere, as below.
        stages: what compression did, in order; empty for hooks, too.
        metric: what it was judged by; None where it was not measured.
        drop: points of it that were lost; drop_high: at most, with 95% confidence.
        drop_constant: what the best answer that is always the same would lose, where that is known.
    """

    files: dict[str, str]
    toolkit_version: str = ""
    stages: tuple[str, ...] = ()
    metric: str | None = None
    drop: float | None = None
    drop_high: float | None = None
    drop_constant: float | None = None
    schema_version: int = field(default=SCHEMA_VERSION)


def provenance_of(folder: Path, artifact: Artifact | None) -> Provenance:
    """Of the files of a version's folder.

    Args:
        folder: MODEL/VERSION.
        artifact: what the network is from; None for hooks.
    """
    files = {
        str(path.relative_to(folder)): sha256_of(path) for path in files_of(folder) if path.name != PROVENANCE_FILE
    }
    if artifact is None or not artifact.stages:
        return Provenance(files)
    last = artifact.stages[-1].measured
    stages = tuple(stage.stage for stage in artifact.stages)
    return Provenance(
        files, artifact.toolkit_version, stages, last.metric, last.drop, last.drop_high, last.drop_constant
    )


def write_provenance(folder: Path, artifact: Artifact | None) -> None:
    """Write it into a version's folder."""
    text = json.dumps(asdict(provenance_of(folder, artifact)), indent=2, allow_nan=False)
    (folder / PROVENANCE_FILE).write_text(text + "\n", encoding="utf-8")


def read_provenance(folder: Path) -> Provenance | None:
    """Of a version's folder; None where nothing was written.

    Raises:
        RepositoryError: it is damaged.
    """
    path = folder / PROVENANCE_FILE
    if not path.is_file():
        return None
    try:
        data = read_json(path)
        if data["schema_version"] > SCHEMA_VERSION:
            raise ValueError(f"its schema is version {data['schema_version']}, this release reads {SCHEMA_VERSION}")
        return _checked(Provenance(**data | {"stages": tuple(data["stages"])}))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as err:
        raise RepositoryError(f"can't read {path}", why=f"it is damaged: {err!r}", mend="pack the model again") from err


def _checked(told: Provenance) -> Provenance:
    """What a file says, where each value is of its field's kind and each file lies in the folder.

    Raises:
        TypeError, ValueError: one is not.
    """
    for name, digest in told.files.items():
        if type(digest) is not str or not stands_inside(name):
            raise ValueError("its files are no checksums of files in its folder")
    if not all(type(word) is str for word in (told.toolkit_version, *told.stages, told.metric or "")):
        raise TypeError("its words are no texts")
    for number in (told.drop, told.drop_high, told.drop_constant):
        if number is not None and (type(number) not in (int, float) or not abs(number) <= sys.float_info.max):
            raise TypeError("its points are no numbers")
    return told


def verify_checksums(
    repository: Path, sums: Mapping[Path, str] | None = None, models: Collection[str] | None = None
) -> int:
    """Check each packed version against its checksums.

    Args:
        repository: holds the models.
        sums: SHA-256 of files that were read just now.
        models: those to check; None for all.

    Returns:
        How many files were checked.

    Raises:
        RepositoryError: a file is missing or another one, or there is one that was not packed.
    """
    sums = sums or {}
    count = 0
    for model in folders_of(repository, models):
        packed = [version for version in versions_of(model) if (model / str(version) / PROVENANCE_FILE).exists()]
        for path in sorted(model.iterdir()) if packed else ():
            if path.suffix in CODE or is_byte_code(path.name):  # Triton looks for backends there, too
                raise _changed(path, "`serve pack` did not write it, and Triton may run it")
        for version in packed:
            folder = model / str(version)
            told = read_provenance(folder)
            if told is None:
                continue
            for name, wanted in told.files.items():
                path = folder / name
                if not path.is_file():
                    raise _changed(path, "it is missing")
                if (sums.get(path) or sha256_of(path)) != wanted:
                    raise _changed(path, "it is not the file that `serve pack` wrote (its sha256 differs)")
                count += 1
            for path in sorted(folder.rglob("*")):
                _check_entry(path, str(path.relative_to(folder)), told)
    return count


def _check_entry(path: Path, name: str, told: Provenance) -> None:
    """Whether an entry of a packed version is one of its own."""
    if why := irregular(path):
        raise _changed(path, f"{why}, and `serve pack` writes none")
    # What Triton's Python has compiled by itself is no change. Who means harm could write checksums, too.
    if path.is_dir() or (path.parent.name == CACHE and is_byte_code(name)):
        return
    if name not in told.files and name not in (PROVENANCE_FILE, KEPT):
        raise _changed(path, "`serve pack` did not write it, and Triton may run it")


def _changed(path: Path, why: str) -> RepositoryError:
    return RepositoryError(
        f"won't serve {path}", why=why, mend="pack the model again, or give --trust-changes if the change is yours"
    )
