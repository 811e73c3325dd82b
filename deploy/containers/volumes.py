"""A file or a folder packed for a volume, the digest that names it, and volumes that nobody has any more."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.errors import ServerError
from deploy.containers.application import PART_OF
from deploy.containers.engine import Engine

__all__ = ["claim_of", "digest", "packed", "readable", "same", "sweep"]

LASTING = ("keys", "metrics-key", "gateway-state", "prometheus-data", "up", "signer")


class _Hashed(io.RawIOBase):
    """Where bytes go that only their digest is wanted of."""

    def __init__(self, begun: bytes) -> None:
        self.sha256 = hashlib.sha256(begun)

    def write(self, some: Any) -> int:
        self.sha256.update(some)
        return len(some)


def digest(source: Path, trusted: str = "") -> str:
    """Of an archive, or of a folder as it would be packed, and of whose signature it needs.

    The same files, verified, are another version.

    Raises:
        OSError: it can't be read.
    """
    found = _Hashed(trusted.encode())
    if source.is_dir():
        with tarfile.open(fileobj=found, mode="w|") as archive:
            archive.add(source.resolve(), ".", filter=readable)
    else:
        with source.open("rb") as file:
            while some := file.read(1 << 20):
                found.write(some)
    return found.sha256.hexdigest()[:10]


@contextmanager
def packed(source: Path, entry: str, at: Path) -> Iterator[Path]:
    """An archive of a file or a folder, for anybody in a pod to read; gone at the end.

    Args:
        source: what is packed.
        entry: its name there; "." for what is in a folder.
        at: where the archive stands meanwhile, for its owner alone.

    Raises:
        ServerError: it can't be read, or the archive not written.
    """
    try:
        try:
            at.unlink(missing_ok=True)
            at.touch(mode=0o600)
            with tarfile.open(at, "w") as archive:
                archive.add(source.resolve(), entry, filter=readable)
        except OSError as err:
            mend = f"see that {source} can be read and nobody writes to it, and that there is space at {at.parent}"
            raise ServerError(f"can't pack {source} for a volume", why=str(err), mend=mend) from err
        yield at
    finally:
        at.unlink(missing_ok=True)


def same(repository: Path, archive: Path) -> None:
    """Nobody wrote to a repository while it was packed and what it needs was read.

    Raises:
        ServerError: somebody did: what was packed may be half of one version and half of another.
    """
    try:
        why = "" if digest(repository) == digest(archive) else "it was written to while it was packed"
    except OSError as err:
        why = f"it was written to while it was packed: {err}"
    if why:
        raise ServerError(f"can't serve {repository}", why=why, mend="the same command again, once nobody writes to it")


def readable(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Owned by root: Triton may read what it serves, and nobody in a pod may write it.

    Of no time, so that the same files are the same bytes; what Python compiled is left out.
    """
    if entry.name.rpartition("/")[2] == "__pycache__":
        return None
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def claim_of(name: str, pod: str) -> str:
    """The volume with the repository of a pod that serves."""
    return f"{name}-{pod.removeprefix(f'{name}-triton-')}"


def sweep(engine: Engine, name: str, pods: Collection[str]) -> None:
    """Remove the application's volumes whose pods are gone, but for what lasts; found by the pods that are there.

    What Podman refuses is left to the next one.

    Args:
        engine: Podman.
        name: of the application.
        pods: that are there.
    """
    listed = engine.run(
        "volume", "ls", "--filter", f"label={PART_OF}={name}", "--format", "{{.Name}}", check=False
    )  # fmt: skip
    if listed.returncode:
        return
    lasting = {f"{name}-{part}" for part in LASTING}
    live = [each for pod in pods for each in (pod, claim_of(name, pod))]
    for volume in listed.stdout.split():
        used = any(volume == each or volume.startswith(f"{each}-") for each in live)
        if volume not in lasting and not used:
            engine.run("volume", "rm", volume, check=False)
