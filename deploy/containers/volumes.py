"""A file or a folder packed for a volume, the digest that names it, and volumes that nobody has any more."""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.containers.application import PART_OF
from deploy.containers.engine import Engine
from serve.repository.fingerprint import fingerprint

__all__ = ["digest", "packed", "readable", "sweep"]


def digest(repository: Path, trusted: str = "") -> str:
    """Of names and contents, and of whose signature they need: the same files, verified, are another version."""
    return fingerprint(repository, trusted)[:10]


@contextmanager
def packed(source: Path, entry: str, at: Path) -> Iterator[Path]:
    """An archive of a file or a folder, for anybody in a pod to read; gone at the end.

    Args:
        source: what is packed.
        entry: its name there; "." for what is in a folder.
        at: where the archive stands meanwhile, for its owner alone.
    """
    at.unlink(missing_ok=True)
    at.touch(mode=0o600)
    try:
        with tarfile.open(at, "w") as archive:
            archive.add(source, entry, filter=readable)
        yield at
    finally:
        at.unlink(missing_ok=True)


def readable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Owned by root: Triton may read what it serves, and nobody in a pod may write it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def sweep(engine: Engine, name: str, pods: Collection[str], folder: Path) -> None:
    """Remove volumes of pods that are gone, but for what lasts: found by the pods that are there.

    Args:
        engine: Podman.
        name: of the application.
        pods: that are there.
        folder: where archives stand that volumes are filled from; a command that was killed leaves one.
    """
    tritons, there = f"{name}-triton-", tuple(f"{pod}-" for pod in pods)
    ours = engine.run("volume", "ls", "--filter", f"label={PART_OF}={name}", "--format", "{{.Name}}").stdout.split()
    every = engine.run("volume", "ls", "--format", "{{.Name}}").stdout.split()
    gone = [each for each in ours if each.startswith("models-") and f"{tritons}{each}" not in pods]
    gone += [each for each in every if each.startswith(tritons) and not each.startswith(there)]
    for part, suffixes in (("gateway", ("", "-tmp")), ("prometheus", ("",))):  # "" has settings, written anew
        own = {f"{name}-{part}{suffix}" for suffix in suffixes if f"{name}-{part}" not in pods}
        gone += [each for each in every if each in own]
    for volume in gone:
        engine.run("volume", "rm", "--force", volume, check=False)
    for archive in (each for part in ("models", name) for each in folder.glob(f"{part}-*.tar")):
        archive.unlink(missing_ok=True)
