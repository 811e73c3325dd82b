"""Hot reload: what changes in a repository is loaded into the Triton that serves it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

from compress.errors import RepositoryError, ServerError
from serve.repository.lock import hold
from serve.repository.read import read_model
from serve.repository.served import Served
from serve.repository.signing import SIGNATURES
from serve.triton.control import tell
from serve.triton.rounds import Rounds

__all__ = ["Acts", "Follower", "TellTriton", "fingerprints", "follow", "plan"]

LOOK_S = 1.0
Fingerprint = frozenset[tuple[str, int, int]]


def fingerprints(repository: Path) -> dict[str, Fingerprint] | None:
    """What each model's folder holds: names, sizes and times of its files; None while somebody writes into it."""
    try:
        folder = hold(repository, wait_s=0.0, shared=True)
    except OSError:  # it is gone, or locked
        return None
    try:
        return {path.name: _of(path) for path in repository.iterdir() if path.is_dir() and path.name[0] != "."}
    except OSError:  # a file went while we looked
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
    times = [0]
    for name in SIGNATURES:
        with suppress(OSError):
            times.append((repository / name).stat().st_mtime_ns)
    return max(times)


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
    acts: Acts,
    on_event: Callable[[str], None],
    *,
    served: Served | None = None,
    look_s: float = LOOK_S,
) -> None:
    """Load what is new or changed and unload what is gone, until it is cancelled.

    A change is taken when it has settled: the same at two looks, and nobody holds the repository's lock. A model that
    can't be read or does not load leaves the one that was there, and holds up no other; it is tried again when it
    changes, or when another was loaded that it may be made of. While Triton can't be reached, changes wait.

    Args:
        repository: what the Triton serves.
        acts: what to do.
        on_event: is told what happens, a line each.
        served: checks what is to be loaded: all of what is signed, else the models that changed.
        look_s: seconds between two looks.
    """
    last = fingerprints(repository) or {}
    rounds = Rounds("can't follow the repository", on_event)
    follower = Follower(repository, acts, on_event, last, served)
    try:
        while True:
            await asyncio.sleep(look_s)
            with rounds.one():
                now = await asyncio.to_thread(fingerprints, repository)
                if now is not None and now == last:
                    await asyncio.to_thread(follower.take, now)
                last = now if now is not None else last
    finally:
        acts.stop()


class Acts(Protocol):
    """What is done with a model; gives what became of it, in words."""

    def load(self, model: str) -> str:
        """It is new, or has changed; raises ToolkitError, of which OSError is the cause where Triton is lost."""

    def unload(self, model: str) -> str:
        """It is gone; errors as of `load`."""

    def stop(self) -> None:
        """Nothing more is to be done; what another thread waits for here ends."""


class TellTriton:
    """Loads what changes, and unloads what is gone.

    Args:
        grpc_address: of Triton, which is in explicit mode.
        control: headers that its model control asks for.
        served: checks what is to be loaded, where nothing has to be signed.
    """

    def __init__(self, grpc_address: str, control: Mapping[str, str], served: Served | None) -> None:
        self._triton = grpc_address, control
        self._served = served
        self._stopped = False
        self._cancel: Callable[[], object] = lambda: None

    def load(self, model: str) -> str:
        if self._served is not None and not self._served.signed:
            self._served.renew((model,))
        self._tell("Load", model)
        return "is loaded"

    def unload(self, model: str) -> str:
        self._tell("Unload", model)
        return "is no longer served"

    def _tell(self, act: Literal["Load", "Unload"], model: str) -> None:
        address, control = self._triton
        tell(address, act, model, control, self._begun)

    def _begun(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        if self._stopped:
            cancel()

    def stop(self) -> None:
        self._stopped = True
        self._cancel()


class Follower:
    """What Triton has been told of a repository.

    Args:
        acts: as of `follow`.
        loaded: what it loaded when it started.
        served: checks what is to be loaded: all of what is signed, else the models that changed.
    """

    def __init__(
        self,
        repository: Path,
        acts: Acts,
        on_event: Callable[[str], None],
        loaded: Mapping[str, Fingerprint],
        served: Served | None = None,
    ) -> None:
        self._repository = repository
        self._acts = acts
        self._on_event = on_event
        self._loaded = dict(loaded)
        self._broken: dict[str, Fingerprint] = {}
        self._refused: dict[str, Fingerprint] = {}
        self._lost = False
        self._served = served
        self._seen: tuple[object, int] | None = None  # what was held against its signature last
        self._verified = True

    def take(self, now: Mapping[str, Fingerprint]) -> None:
        """Bring Triton into step with what the folders hold."""
        if now == self._loaded or not self._as_signed(now):
            return
        ensembles = set()
        for name in [name for name in now if now[name]]:
            try:
                model = read_model(self._repository / name)
            except RepositoryError as err:
                if self._broken.get(name) != now[name] and self._loaded.get(name) != now[name]:
                    self._broken[name] = now[name]
                    self._on_event(f"{err.what}: {err.why}; what was loaded goes on")
            else:
                self._broken.pop(name, None)
                if model.config.platform == "ensemble":
                    ensembles.add(name)
        changed, gone = plan(self._loaded, now, ensembles)
        for name in changed:
            if name in self._broken or self._refused.get(name) == now[name]:
                continue
            match self._act(name, self._acts.load):
                case "done":
                    self._loaded[name] = now[name]
                    self._refused.clear()
                case "refused":
                    self._refused[name] = now[name]
                case "lost":
                    return
        for name in gone:
            if self._act(name, self._acts.unload) == "lost":
                return
            del self._loaded[name]
        for known in (self._broken, self._refused):
            for name in known.keys() - now.keys():
                del known[name]

    def _as_signed(self, now: Mapping[str, Fingerprint]) -> bool:
        """Whether all of it is what was signed, if it has to be; what was verified is then what Triton is given."""
        if self._served is None or not self._served.signed:
            return True
        if (seen := (now, _signed(self._repository))) != self._seen:
            self._seen, self._verified = seen, False
            try:
                self._served.renew()
                self._verified = True
            except RepositoryError as err:
                self._on_event(f"{err.what}: {err.why}; what was loaded goes on")
        return self._verified

    def _act(self, name: str, act: Callable[[str], str]) -> Literal["done", "refused", "lost"]:
        """Tell Triton; "lost" where it can't be reached, and what is to be done waits."""
        try:
            done = act(name)
        except RepositoryError as err:
            self._on_event(f"{name}: {err.why}; what was loaded goes on")
            return "refused"
        except ServerError as err:
            if isinstance(err.__cause__, OSError):
                if not self._lost:
                    self._on_event(f"{name}: {err.why}; it is tried again")
                self._lost = True
                return "lost"
            self._lost = False
            self._on_event(f"{name}: {err.why}; what was loaded goes on")
            return "refused"
        self._lost = False
        self._on_event(f"{name} {done}")
        return "done"
