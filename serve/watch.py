"""Hot reload: what changes in a repository is loaded into the Triton that serves it."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from compress.errors import RepositoryError, ServerError
from serve.control import load_alone, unload_model
from serve.repository import read_models
from serve.served import Served
from serve.signing import SIGNATURE

__all__ = ["fingerprints", "follow", "plan"]

LOOK_S = 1.0
Fingerprint = frozenset[tuple[str, int, int]]


def fingerprints(repository: Path) -> dict[str, Fingerprint] | None:
    """What each model's folder holds: names, sizes and times of its files; None while somebody writes into it."""
    try:
        folder = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return {path.name: _of(path) for path in repository.iterdir() if path.is_dir() and path.name[0] != "."}
    except OSError:  # it is locked, or a file went while we looked
        return None
    finally:
        os.close(folder)


def _of(folder: Path) -> Fingerprint:
    found = set()
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.name[0] != ".":
            status = path.stat()
            found.add((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return frozenset(found)


def _signed(repository: Path) -> int:
    """When it was last signed: what was refused may hold from then on."""
    try:
        return (repository / SIGNATURE).stat().st_mtime_ns
    except OSError:
        return 0


def plan(
    before: Mapping[str, Fingerprint], now: Mapping[str, Fingerprint], ensembles: set[str]
) -> tuple[list[str], list[str]]:
    """The models to load, the parts of ensembles first, and those to unload, ensembles first."""
    changed = [name for name in now if now[name] and before.get(name) != now[name]]
    gone = [name for name in before if name not in now or not now[name]]
    return (
        sorted(changed, key=lambda name: (name in ensembles, name)),
        sorted(gone, key=lambda name: (name not in ensembles, name)),
    )


async def follow(
    repository: Path,
    url: str,
    on_event: Callable[[str], None],
    *,
    served: Served | None = None,
    look_s: float = LOOK_S,
) -> None:
    """Load what is new or changed and unload what is gone, until it is cancelled.

    A change is taken when it has settled: the same at two looks, and nobody holds the repository's lock. A model that
    does not load leaves the one that was there.

    Args:
        repository: what the Triton serves.
        url: of its HTTP endpoint; it is in explicit mode.
        on_event: is told what happens, a line each.
        served: checks what is to be loaded: all of what is signed, else the models that changed.
        look_s: seconds between two looks.
    """
    loaded = last = fingerprints(repository) or {}
    refused: object = None
    while True:
        await asyncio.sleep(look_s)
        now = await asyncio.to_thread(fingerprints, repository)
        if now is None or now != last or now == loaded:
            last = now if now is not None else last
            continue
        if served is not None and served.signed:
            if (now, signed := _signed(repository)) == refused:
                continue
            try:
                await asyncio.to_thread(served.renew)
            except RepositoryError as err:
                on_event(f"{err.what}: {err.why}; what was loaded goes on")
                refused = now, signed
                continue
        try:
            ensembles = {model.name for model in read_models(repository) if model.config.platform == "ensemble"}
        except RepositoryError as err:
            on_event(f"{err.what}: {err.why}; what was loaded goes on")
            loaded = now
            continue
        changed, gone = plan(loaded, now, ensembles)
        loaded = now
        for name, act in (*((name, load_alone) for name in changed), *((name, unload_model) for name in gone)):
            try:
                if served is not None and not served.signed and act is load_alone:
                    await asyncio.to_thread(served.renew, (name,))
                await asyncio.to_thread(act, url, name)
            except (RepositoryError, ServerError) as err:
                on_event(f"{name}: {err.why}; what was loaded goes on")
            else:
                on_event(f"{name} is {'loaded' if act is load_alone else 'no longer served'}")
