"""A request's path, parsed once: what is authorized is what is routed and sent on."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import Scope

from serve.gateway.errors import UnknownModelError

__all__ = ["take_path"]

# The letters of every route and of every name that Triton serves over HTTP; a slash only parts segments.
_SEGMENT = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9_.+:@=~-]{1,256}"
_PATH = re.compile(rf"/|(?:/{_SEGMENT})+/?")


def take_path(scope: Scope) -> str:
    """The path of a request, percent-decoded; the scope holds this spelling alone from then on.

    A slash at the end is dropped. Nothing else is mended: a path with control characters, dot segments, doubled or
    encoded slashes, or letters that no route has, is refused before anybody looks at it.

    Raises:
        UnknownModelError: it is such a path.
    """
    raw: bytes = scope["raw_path"]
    path = unquote(raw.decode("latin-1"), "latin-1")  # of which no letter beyond ASCII passes
    if b"%2f" in raw.lower() or not _PATH.fullmatch(path):
        raise UnknownModelError(
            "the path is not one that is served",
            why="it holds control characters, dot segments, doubled or encoded slashes, or letters that no name has",
            mend="write it as /docs shows it",
        )
    path = path.rstrip("/") or "/"
    scope["path"], scope["raw_path"] = path, path.encode()
    return path
