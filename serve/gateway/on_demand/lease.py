"""What a request holds of the models that it needs: none of them goes while it does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from serve.gateway.on_demand.resident import Resident

if TYPE_CHECKING:
    from serve.gateway.on_demand.residency import Residency

__all__ = ["Lease"]


class Lease:
    """Of one request; to be closed in the end, once or more often.

    Args:
        residency: of the models; None where all are loaded for good, and nothing is held.
    """

    __slots__ = ("_held", "_residency")

    def __init__(self, residency: Residency | None) -> None:
        self._residency = residency
        self._held: list[Resident] = []

    async def need(self, models: Iterable[str], who: str, deadline: float) -> None:
        """Wait until models are loaded, and hold them.

        Args:
            models: their names; one that is not known is Triton's to refuse.
            who: id of the key.
            deadline: on the monotonic clock.

        Raises:
            LoadingError: it can't be waited for; says how long it takes.
            LoadFailedError: it could not be loaded a moment ago.
            RateLimitedError: the key has had too many loaded.
            UpstreamDownError: Triton is down.
        """
        if self._residency is None:
            return
        for model in models:
            if any(each.name == model and self._residency.has(each) for each in self._held):
                continue  # it may be about to go, which waits for us
            resident = await self._residency.need(model, who, deadline)
            if resident is not None:
                resident.leases += 1
                self._held.append(resident)

    def close(self) -> None:
        """Hold them no longer."""
        for resident in self._held:
            resident.leases -= 1
        self._held.clear()
