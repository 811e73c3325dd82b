"""Names of files on the standard streams, whatever bytes they are of."""

from __future__ import annotations

import codecs
import io
import sys

__all__ = ["print_any_name"]

HANDLER = "compress-names"


def print_any_name() -> None:
    """Let what is printed hold any name: bytes that are no UTF-8 go out as they are, what can't be written escaped."""
    codecs.register_error(HANDLER, _printed)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def _printed(err: UnicodeError) -> tuple[str | bytes, int]:
    try:
        return codecs.lookup_error("surrogateescape")(err)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(err)
