"""The state of a training on disk, so that one that was killed goes on where it was."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from compress.errors import CheckpointError, printable
from compress.formats.pickles.read import unpickle
from compress.storage.steady import refuse_changed
from compress.vetting.replace import replacing_file

__all__ = ["KeptState"]

FORMAT = 2  # of the file; a state of another is not gone on from
WORDS = 300  # of why one can't be read
SHARE = 0.02  # of the time, at most, for keeping states


class KeptState:
    """One file, replaced whole.

    Args:
        path: of the file; None keeps nothing.
        seconds: between two states.
        writes: whether this process keeps states, or only looks for one.
    """

    def __init__(self, path: Path | None, seconds: float, *, writes: bool = True) -> None:
        self._path = path
        self._writes = writes
        self._seconds = seconds
        self._last = time.monotonic()
        self._took = 0.0

    def due(self) -> bool:
        """Whether it is time, and keeping one takes little of it."""
        return time.monotonic() - self._last >= max(self._seconds, self._took / SHARE)

    def keep(self, state: dict[str, Any]) -> None:
        """Write beside, then rename; a kill at any moment leaves the old one or the new one.

        Raises:
            ChangedError: the data is not what it was.
        """
        start = time.monotonic()
        if self._path is not None and self._writes:
            refuse_changed()  # the same command would go on from what another file has taught
            for left in self._path.parent.glob(f".{self._path.name}.*.part"):  # by a kill: it is as large as the model
                left.unlink()
            with replacing_file(self._path) as file:
                torch.save({"format": FORMAT, "state": state}, file)
        self._last = time.monotonic()
        self._took = self._last - start

    def written(self) -> float:
        """When the file was written, in seconds since 1970; 0 where there is none."""
        try:
            return 0.0 if self._path is None else self._path.stat().st_mtime
        except OSError:
            return 0.0

    def load(self) -> dict[str, Any] | None:
        """The last one, or None if there is none that is whole, runs no code and is of this format."""
        return self.read()[0]

    def read(self) -> tuple[dict[str, Any] | None, str]:
        """The same, and why there is none.

        Whether it is one of this training `compress.training.updates.vet_state` tells.
        """
        if self._path is None or not self._path.is_file():
            return None, "there is no such file"
        try:
            found = unpickle(self._path, trust=False)
        except CheckpointError as err:
            return None, printable(err.why)[:WORDS]
        if type(found) is not dict or found.keys() != {"format", "state"} or type(found["state"]) is not dict:
            return None, "it is no state of a training"
        if found["format"] != FORMAT:
            return None, "another release has written it"
        state: dict[str, Any] = found["state"]
        return state, ""

    def drop(self) -> None:
        """The training is through."""
        if self._path is not None and self._writes:
            self._path.unlink(missing_ok=True)
