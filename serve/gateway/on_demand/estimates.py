"""What a model takes, in bytes and in seconds: a guess from its files at first, then what was seen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, median_low

from serve.gateway.on_demand.catalogue import Known

__all__ = ["Estimates"]

MIB = 1 << 20
PROCESS_BYTES = 80 * MIB  # a process of Triton's Python backend with ONNX Runtime in it, and no model
START_S, BYTES_A_SECOND = 3.0, 200e6  # of a load that nothing is known of
NEWEST = 0.5  # the weight of what was seen last
FADES_S = 300.0  # after which what a model had once no longer counts: one request must not keep it out for good
NEAR = 0.9  # of the most, which is seen again with it


@dataclass
class _Seen:
    """Of a model's bytes: the most, when it was seen last, and the least."""

    most: int
    at: float
    least: int

    def add(self, size: int, now: float) -> None:
        self.least = min(self.least, size)
        if now - self.at > FADES_S:
            self.most = size
        if size >= NEAR * self.most:
            self.most, self.at = max(size, self.most), now

    def bytes(self, now: float) -> int:
        return self.least if now - self.at > FADES_S else self.most


class Estimates:
    """By model; what is learnt of some corrects the guess for those that were never loaded."""

    def __init__(self) -> None:
        self._bytes: dict[str, _Seen] = {}
        self._settled: dict[str, _Seen] = {}
        self._loading: dict[str, _Seen] = {}
        self._seconds: dict[str, float] = {}
        self._models: dict[str, Known] = {}  # whose bytes were seen

    def bytes(self, model: Known) -> int:
        """Of memory, for the model alone, without what it needs."""
        if model.name in self._bytes:
            return self._of(self._bytes, model.name)
        # One that is large says little of the others.
        each = median_low([PROCESS_BYTES, *(self._each(known) for known in self._models.values() if known.processes)])
        return model.file_bytes + int(model.processes * each)

    def _each(self, model: Known) -> float:
        """Bytes of one of its processes beyond its files, as far as was seen."""
        return max(0, self._of(self._bytes, model.name) - model.file_bytes) / model.processes

    def loading(self, model: Known) -> int:
        """The same while it is loaded, which may take more than it has then."""
        return max(self.bytes(model), self._of(self._loading, model.name))

    def saw(self, model: str) -> bool:
        """Whether its bytes are no guess."""
        return model in self._bytes

    def settled(self, model: str) -> int:
        """The most that a model has had of late since it was loaded and asked, loading left aside; 0 where nobody has
        seen."""
        return self._of(self._settled, model)

    @staticmethod
    def _of(seen: Mapping[str, _Seen], model: str) -> int:
        return seen[model].bytes(time.monotonic()) if model in seen else 0

    def seconds(self, model: Known) -> float:
        """That loading it with its parts takes."""
        seen = self._seconds.get(model.name)
        if seen is not None:
            return seen
        guess = START_S + model.file_bytes / BYTES_A_SECOND
        return max(guess, median(self._seconds.values())) if self._seconds else guess

    def knows(self, model: str) -> bool:
        """Whether it was seen to be loaded."""
        return model in self._seconds

    def saw_bytes(self, model: Known, size: int, *, settled: bool = False) -> None:
        """What it has now, which is `settled` some time after its load; the most that it had of late counts."""
        self._models[model.name] = model
        for seen in (self._bytes, self._settled) if settled else (self._bytes,):
            _add(seen, model.name, size)

    def saw_loading(self, model: str, size: int) -> None:
        """The most that it had in its last load."""
        _add(self._loading, model, size)

    def saw_seconds(self, model: str, seconds: float) -> None:
        """What it took to load it, from when that began to when it could answer."""
        before = self._seconds.get(model, seconds)
        self._seconds[model] = before + NEWEST * (seconds - before)

    def shrinks(self, model: str, size: int) -> None:
        """It begins anew with so many bytes: what it has grown to counts no more."""
        for seen in (self._bytes, self._settled, self._loading):
            if model in seen:
                seen[model].most = min(seen[model].most, size)

    def forget(self, model: str) -> None:
        """It is another by now."""
        for seen in (self._bytes, self._settled, self._loading):
            seen.pop(model, None)
        self._seconds.pop(model, None)
        self._models.pop(model, None)


def _add(seen: dict[str, _Seen], model: str, size: int) -> None:
    now = time.monotonic()
    seen.setdefault(model, _Seen(size, now, size)).add(size, now)
