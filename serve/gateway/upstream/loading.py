"""Before Triton is asked to load a model: its repository is checked again, and a load may bring nothing along.

Triton's load takes a configuration and whole files in its parameters: code that no signature covers. Where the
repository has to be signed, what goes on to Triton is written here, from the model's name alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import orjson

from compress.errors import ToolkitError
from serve.gateway.errors import BadRequestError, ForbiddenError, GatewayError

__all__ = ["Loading", "UncheckedError", "overridden"]


class UncheckedError(GatewayError):
    """The repository is not what was packed or signed."""

    status = 409


class Loading:
    """The check of one gateway.

    Args:
        check: reads a model, or all of its repository, again, in a thread; raises ToolkitError where it is not to be
            loaded.
        bare: whether a load may bring nothing along.
    """

    def __init__(self, check: Callable[[Collection[str]], object] | None = None, *, bare: bool = False) -> None:
        self._check = check
        self.bare = bare

    async def check(self, model: str) -> None:
        """Read a model again, where its repository is on this machine.

        Raises:
            UncheckedError: it is not what was packed, or signed.
        """
        if self._check is None:
            return
        try:
            await asyncio.to_thread(self._check, (model,))
        except ToolkitError as err:
            raise UncheckedError(err.what, why=err.why, mend=err.mend) from err

    async def body(self, model: str, body: bytes) -> bytes:
        """The body of a load over HTTP as it goes on, once the repository is checked.

        Raises:
            BadRequestError: it can't be read.
            ForbiddenError: it brings a configuration or files along, and may not.
            UncheckedError: as `check`.
        """
        if self.bare:
            try:
                asked = orjson.loads(body or b"{}")
            except orjson.JSONDecodeError as err:
                raise BadRequestError("the request's JSON can't be read", why=str(err)) from err
            if not isinstance(asked, dict) or asked.get("parameters"):
                raise overridden()
            body = b"{}"
        await self.check(model)
        return body


def overridden() -> ForbiddenError:
    """A load that brings along what no signature covers."""
    return ForbiddenError(
        "a load may bring no configuration and no files along",
        why="the repository has to be signed, and they would not be",
        mend="put them into the repository, sign it, and load the model by its name alone",
    )
