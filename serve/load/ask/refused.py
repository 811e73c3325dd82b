"""What a server says instead of describing its model, in three parts: what it is asked, what it says, what to do."""

from __future__ import annotations

from http import HTTPStatus

import orjson

from compress.errors import ServerError
from serve.load.options import LoadOptions

__all__ = ["refused"]

MOST = 300  # letters that are shown of what it says


def refused(options: LoadOptions, status: int, named: str, said: str, retry_after: str = "") -> ServerError:
    """The error for an answer to a question about the model that is no description of it.

    Args:
        options: name the model and the server.
        status: of HTTP, or the one that stands for gRPC's.
        named: the status as the protocol has it, such as "status 403".
        said: the body or the details of the answer; of JSON with an "error", that.
        retry_after: seconds after which the server wants to be asked again; "" where it says nothing.
    """
    what, mend = _told(options, status, retry_after if retry_after.isdecimal() else "")
    return ServerError(what, why=f"it answers with {named}: {_error_in(said)[:MOST] or 'nothing else'}", mend=mend)


def _told(options: LoadOptions, status: int, seconds: str) -> tuple[str, str]:
    at = f"the model {options.model!r} at {options.url}"
    if status == HTTPStatus.UNAUTHORIZED:
        return f"{options.url} wants a key before it says anything of its models", "add --header 'X-API-Key: KEY'"
    if status == HTTPStatus.FORBIDDEN:
        return f"the key may not ask {at}", "take a key that may: `serve keys list` shows each key's models"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        when = f" in {seconds} s" if seconds else " later"
        return f"can't ask {at} now", f"try again{when}, or take a key with a larger rate"
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
        what = f"there is no model {options.model!r} at {options.url}"
        return what, "look up the name in the model repository, and whether the model loaded"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        when = f"try again in {seconds} s; " if seconds else "try again when it is ready; "
        return f"can't ask {at} now", f"{when}if it stays so, look into the server's log, or at {options.url}/readyz"
    return f"can't ask {at}", "name a server of the Open Inference Protocol with --url"


def _error_in(said: str) -> str:
    """The text under "error", as Triton and the gateway write it; all of it otherwise."""
    try:
        found = orjson.loads(said)
    except orjson.JSONDecodeError:
        return said.strip()
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, str) else said.strip()
