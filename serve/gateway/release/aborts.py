"""Aborts that were asked of this gateway: they hold here at once, and are written until the state file has them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from compress.errors import ServerError
from serve.rollout.store import Row, StateFileError, Store

__all__ = ["Aborts"]

PENDING = "aborted in this gateway, as was asked for; others go on until it is written down and they have seen it"
OVERRULED = (
    "another gateway promoted it before an abort that was asked for here could be written down; to go back, start a "
    "rollout to the one before"
)

logger = logging.getLogger(__name__)


class Aborts:
    """Of one gateway.

    Args:
        store: of its state file.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked: set[tuple[int, float]] = set()
        self._overruled: set[tuple[int, float]] = set()

    def __contains__(self, row: Row) -> bool:
        return row.rollout in self._asked

    def ask(self, row: Row) -> None:
        """From now on it is aborted here, whatever the file says."""
        self._asked.add(row.rollout)

    async def write(self, row: Row) -> None:
        """Write that it is to be aborted.

        Raises:
            StateFileError: it can't be written.
            ServerError: it has ended, so that it holds here no more.
        """
        try:
            await asyncio.to_thread(self._store.wish, row.model, "abort", row.rollout)
        except StateFileError:
            raise
        except ServerError:
            self._asked.discard(row.rollout)
            raise

    async def repeated(self, row: Row, *, judges: bool) -> Row:
        """A rollout under way, with the wish for its end if that was asked for here.

        Args:
            judges: whether this gateway writes what becomes of it: it writes the end itself.

        Raises:
            StateFileError: another gateway is to be told, and can't be.
        """
        if row not in self:
            return row
        if not judges and row.wish != "abort":
            try:
                await self.write(row)
            except StateFileError:
                raise
            except ServerError:  # it has ended meanwhile, as the next look sees
                self.ask(row)
                return row
            logger.info("the abort of the rollout of %s is in the state file now", row.model)
        return replace(row, wish="abort")

    def ended(self, row: Row) -> None:
        """A rollout has ended, as it is written."""
        if row in self:
            self._asked.discard(row.rollout)
            if row.state == "promoted":
                self._overruled.add(row.rollout)
                logger.error("the rollout of %s was not aborted: %s", row.model, OVERRULED)

    def shown(self, row: Row) -> dict[str, str]:
        """What is to be told of a rollout besides what is written."""
        if row.rollout in self._overruled:
            return {"why": OVERRULED}
        return {"state": "aborted", "why": PENDING} if row.active and row in self else {}
