"""Keys whose requests, never the same, end a model's process again and again: refused for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serve.gateway.errors import OverloadedError
from serve.gateway.health.flights import within

__all__ = ["DEATHS_OF_KEY", "BarredError", "BarredKeys"]

DEATHS_OF_KEY = 4  # in a row, of one key alone: it is then refused for a while
BARRED_S, LONGEST_BARRED_S = 15.0, 600.0


class BarredError(OverloadedError):
    """A key whose requests end the model's process again and again."""

    def __init__(self, model: str, seconds: float) -> None:
        super().__init__(
            f"the model {model!r} is not asked for this key for now",
            why="its process has ended several times while it had this key's requests",
            mend="try again when Retry-After says, with other requests",
            retry_after_s=seconds,
        )


@dataclass
class _Record:
    """How often a key alone ended these models (None for the model server), and until when it is refused.

    `left` counts deaths that it may have brought about without waiting for them.
    """

    models: frozenset[str] | None
    count: int
    when: float
    until: float
    left: int = 0


class BarredKeys:
    """The keys that ended models with nobody else there.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[str, list[_Record]] = {}
        self._barred: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether the key was refused of late, for whatever model."""
        return bool(self._barred) and key in self._barred

    def known(self, key: str, model: str) -> bool:
        """Whether the key ended this model's process, or the model server, with nobody else there."""
        return bool(key) and any(within(model, record.models) for record in self._records.get(key, ()))

    def check(self, key: str, model: str) -> None:
        """Refuse the key for as long as it has earned.

        Raises:
            BarredError: it is not asked for this key yet.
        """
        for record in self._records.get(key, ()):
            if within(model, record.models) and (left := record.until - self._clock()) > 0:
                raise BarredError(model, left)

    def count(self, key: str, models: frozenset[str] | None) -> None:
        """It ended these models, with nobody else there."""
        if not key:
            return
        record = self._record(key, models)
        record.count += 1
        if record.count >= DEATHS_OF_KEY:
            self._barred.add(key)
            seconds = BARRED_S * 2.0 ** min(record.count - DEATHS_OF_KEY, 16)
            record.until = record.when + min(seconds, LONGEST_BARRED_S)

    def count_left(self, key: str, models: frozenset[str] | None) -> None:
        """It had left requests that these models may have been at work on when they died, with one other key there.

        Either of the two did it. Whoever leaves each time is refused for a short time, so that the next death tells:
        else two keys, one of which leaves, could end the models for ever, and so could one that leaves before they do.
        """
        if not key:
            return
        record = self._record(key, models)
        record.left += 1
        if record.left >= DEATHS_OF_KEY:
            record.left = 0
            self._barred.add(key)
            record.until = max(record.until, record.when + BARRED_S)

    def forget(self, before: float) -> None:
        """What was over before that time, on the clock."""
        for key, records in list(self._records.items()):
            self._records[key] = [each for each in records if max(each.when, each.until) >= before]
            if not self._records[key]:
                del self._records[key]
                self._barred.discard(key)

    def _record(self, key: str, models: frozenset[str] | None) -> _Record:
        now = self._clock()
        records = self._records.setdefault(key, [])
        record = next((each for each in records if each.models == models), None)
        if record is None:
            record = _Record(models, 0, now, 0.0)
            records.append(record)
        record.when = now
        return record
