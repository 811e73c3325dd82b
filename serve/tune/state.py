"""What was measured so far, in a file: an interrupted search goes on where it stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from pathlib import Path

from compress.artifact import sha256_of
from compress.errors import ServerError
from compress.host.cores import cores_here
from compress.vetting.replace import replace_file
from compress.vetting.texts import read_json
from serve.repository.folders import files_of
from serve.tune.candidate import Candidate
from serve.tune.trial import Point, Subject, Trial

__all__ = ["State", "key_of"]

SCHEMA = 1


def key_of(subject: Subject, *, bound_ms: float, seed: int, cpus: tuple[int, ...]) -> str:
    """A hash of all that makes measurements comparable: the model's files, the bound, the machine."""
    files = [
        (str(path.relative_to(subject.repository)), sha256_of(path))
        for name in sorted(subject.texts)
        for path in files_of(subject.repository / name)
    ]
    machine = (platform.node(), platform.processor(), cores_here().count, cpus, bound_ms, seed, SCHEMA)
    return hashlib.sha256(repr((files, machine)).encode()).hexdigest()


class State:
    """Trials by rung and candidate, written after each."""

    def __init__(self, path: Path, key: str) -> None:
        """Read the file; what it holds of another key is not used.

        Raises:
            ServerError: it can't be read.
        """
        self.path, self.key = path, key
        self._trials: dict[tuple[int, Candidate], Trial] = {}
        if not path.exists():
            return
        try:
            data = read_json(path)
            if data["key"] == key:
                for rung, trial in data["trials"]:
                    candidate = Candidate(**trial["candidate"])
                    points = tuple(Point(**point) for point in trial["points"])
                    self._trials[rung, candidate] = Trial(candidate, trial["seconds"], points)
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise ServerError(
                f"can't go on with {path}", why=f"it can't be read: {err}", mend="remove it; the search begins anew"
            ) from err

    def get(self, rung: int, candidate: Candidate) -> Trial | None:
        return self._trials.get((rung, candidate))

    def put(self, rung: int, trial: Trial) -> None:
        """Keep a trial, in the file, too."""
        self._trials[rung, trial.candidate] = trial
        rows = [[number, dataclasses.asdict(each)] for (number, _), each in self._trials.items()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, json.dumps({"key": self.key, "trials": rows}, indent=1))
