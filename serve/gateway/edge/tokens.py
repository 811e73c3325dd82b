"""The tokens of one request's texts: taken as they are estimated, settled by what the model has read."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.types import Scope

from serve.gateway.access.identity import Identity
from serve.gateway.edge.openai_errors import ParameterError

__all__ = ["Tokens"]


class Tokens:
    """Of one request of a key, which may have no such rate; to be closed in the end."""

    def __init__(self) -> None:
        self._identity: Identity | None = None
        self._taken = 0
        self._sizes: Sequence[int] = ()

    def take(self, identity: Identity, sizes: Sequence[int], param: str, samples: str) -> None:
        """Take what texts of so many bytes are estimated to come to.

        Args:
            param: the field that holds them; `samples` what they are, for people.

        Raises:
            RateLimitedError: the key has to wait.
            ParameterError: waiting would not help.
        """
        if identity.tokens is None:
            return
        estimate = identity.tokens.estimate(sizes)
        if estimate > identity.tokens.per_minute:
            raise ParameterError(
                param,
                f"{param} is too long for the key {identity.name!r}",
                why=f"it has some {estimate:,} tokens, and the key may send {identity.tokens.per_minute:,} a minute",
                mend=f"send fewer {samples} at a time, or shorter ones",
            )
        identity.take_tokens(estimate)
        self._identity, self._taken, self._sizes = identity, estimate, sizes

    def read(self, scope: Scope, count: int | None) -> list[tuple[bytes, bytes]]:
        """The model has read so many, None where it does not tell: those that were taken stay. Gives the fields of the
        answer's head."""
        scope["state"]["tokens"] = count or 0  # for what counts requests
        rate = None if self._identity is None else self._identity.tokens
        if rate is None:
            return []
        if count is not None:
            rate.settle(self._taken, count, self._sizes)
        self._taken = 0
        return rate.fields(time.monotonic())

    def close(self, begun: Sequence[int]) -> None:
        """Where no answer came: give back what is not of texts of these sizes, which the model was asked for."""
        if self._identity is not None and self._identity.tokens is not None and self._taken:
            rate = self._identity.tokens
            rate.give_back(self._taken - min(self._taken, rate.estimate(begun)))
            self._taken = 0
