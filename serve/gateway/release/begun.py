"""Which version has which sequence: it goes on with the one that it began with, whoever answers for the name by now.

What a model remembers of a sequence, no other version of it knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from serve.gateway.access.slots import Batcher
from serve.gateway.errors import BadRequestError, UnknownModelError
from serve.gateway.oip.contracts import Contracts
from serve.gateway.oip.sequence import Named
from serve.gateway.release.release import Release
from serve.rollout.plan import Target

__all__ = ["Begun", "SequenceLostError"]

MOST = 65536
SPARE_S = 1.0  # Triton ends a sequence somewhat after its idle time


class SequenceLostError(BadRequestError):
    """The version that a sequence began with is gone."""

    def __init__(self, target: Target) -> None:
        super().__init__(
            "the sequence has ended",
            why=f"it began with {target}, which is no longer served",
            mend="begin it anew (sequence_start); keep both versions loaded until sequences have ended",
        )


@dataclass(slots=True)
class _Kept:
    target: Target
    until: float
    owner: str
    well: bool  # whether a request of it was answered


class Begun:
    """The sequences that this gateway has seen, by model and id; of too many, the oldest of the key that has most go.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, int | str], _Kept] = {}
        self._of_key: dict[str, dict[tuple[str, int | str], None]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._kept)

    async def who(
        self, contracts: Contracts, asked: Target, release: Release | None, sequence: Named
    ) -> tuple[Target, Batcher | None]:
        """Who is to be asked for a request of a sequence, and the batcher there.

        Args:
            contracts: of the models.
            asked: by the client; who names a version has it.
            release: of the model, where no version is named; None where Triton's own choice answers.
            sequence: of the request.

        Raises:
            SequenceLostError: the version that it began with is gone.
            GatewayError: the model is not known.
        """
        kept = asked if release is None else release.kept
        batcher = (await contracts.of(kept)).batcher
        if asked.version is not None or batcher is None:
            return kept, batcher
        target = self._target(asked.model, kept, release, sequence, batcher)
        if target != kept:
            try:
                batcher = (await contracts.of(target)).batcher
            except UnknownModelError as err:
                self.forget(asked.model, sequence)
                raise SequenceLostError(target) from err
        return target, batcher

    def _target(self, model: str, kept: Target, release: Release | None, sequence: Named, batcher: Batcher) -> Target:
        now, key = self._clock(), (model, sequence.sent)
        found = self._kept.get(key)
        target = kept
        if found is not None and not sequence.start and now < found.until:
            # What Triton chose before there was a release is what a release goes on from.
            chosen = release is not None and found.target == Target(model)
            target = release.baseline if release is not None and chosen else found.target
        well = found is not None and found.well and not sequence.start
        self._forget(key)  # it becomes the newest
        self._kept[key] = _Kept(target, now + batcher.idle_s + SPARE_S, sequence.owner, well)
        self._of_key.setdefault(sequence.owner, {})[key] = None
        if len(self._kept) > MOST:
            crowding = max(self._of_key, key=lambda owner: len(self._of_key[owner]))
            self._forget(next(iter(self._of_key[crowding])))
        return target

    def answered(
        self, asked: Target, by: Target, sequence: Named, batcher: Batcher | None, status: int, *, gone: bool
    ) -> None:
        """A request was answered: its sequence's idle time begins, or the sequence has ended.

        Args:
            asked: as for `who`, which gave `by` and `batcher`.
            status: as over HTTP.
            gone: whether Triton says that it does not serve who was asked.

        Raises:
            SequenceLostError: it is gone, and the sequence goes on nowhere.
        """
        if asked.version is not None or (found := self._kept.get((asked.model, sequence.sent))) is None:
            return
        if gone and by.version is not None and not sequence.start:
            self.forget(asked.model, sequence)
            raise SequenceLostError(by)
        refused = 400 <= status < 500 and not found.well  # there is none, unless one of its requests was answered
        if refused or (status == 200 and sequence.end):
            self.forget(asked.model, sequence)
        elif status == 200 and batcher is not None:
            found.until, found.well = self._clock() + batcher.idle_s + SPARE_S, True

    def forget(self, model: str, sequence: Named) -> None:
        """It is begun elsewhere, or can't go on."""
        self._forget((model, sequence.sent))

    def _forget(self, key: tuple[str, int | str]) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            own = self._of_key[found.owner]
            del own[key]
            if not own:
                del self._of_key[found.owner]
