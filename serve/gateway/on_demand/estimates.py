"""What a model takes, in bytes and in seconds: a guess from its files at first, then what was seen."""

from __future__ import annotations

from statistics import median, median_low

from serve.gateway.on_demand.catalogue import Known

__all__ = ["Estimates"]

MIB = 1 << 20
PROCESS_BYTES = 80 * MIB  # a process of Triton's Python backend with ONNX Runtime in it, and no model
START_S, BYTES_A_SECOND = 3.0, 200e6  # of a load that nothing is known of
NEWEST = 0.5  # the weight of what was seen last


class Estimates:
    """By model; what is learnt of some corrects the guess for those that were never loaded."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._settled: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._each: dict[str, float] = {}  # bytes of a process beyond its files

    def bytes(self, model: Known) -> int:
        """Of memory, for the model alone, without what it needs."""
        seen = self._bytes.get(model.name)
        if seen is not None:
            return seen
        each = median_low([PROCESS_BYTES, *self._each.values()])  # one that is large says little of the others
        return model.file_bytes + int(model.processes * each)

    def saw(self, model: str) -> bool:
        """Whether its bytes are no guess."""
        return model in self._bytes

    def settled(self, model: str) -> int:
        """The most that a model has had since it was loaded and asked, loading left aside; 0 where nobody has seen."""
        return self._settled.get(model, 0)

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
        """What it has now, which is `settled` some time after its load; the most that it ever had counts."""
        if settled:
            self._settled[model.name] = max(size, self._settled.get(model.name, 0))
        if size > self._bytes.get(model.name, 0):
            self._bytes[model.name] = size
            if model.processes:
                self._each[model.name] = max(0, size - model.file_bytes) / model.processes

    def saw_seconds(self, model: str, seconds: float) -> None:
        """What it took to load it, from when that began to when it could answer."""
        before = self._seconds.get(model, seconds)
        self._seconds[model] = before + NEWEST * (seconds - before)

    def forget(self, model: str) -> None:
        """It is another by now."""
        for known in (self._bytes, self._settled, self._seconds, self._each):
            known.pop(model, None)
