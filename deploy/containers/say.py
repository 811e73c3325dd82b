"""What a command says on the way: nobody who stopped listening keeps it from its work."""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["say"]


def say(text: str, *, error: bool = False) -> None:
    """Print a line at once. Where nobody reads any more, as of a closed terminal or pipe, it and what follows is lost.

    Args:
        text: what is said.
        error: say it on stderr.
    """
    stream = sys.stderr if error else sys.stdout
    try:
        print(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding), file=stream, flush=True)
    except (AttributeError, OSError, ValueError):  # there is none, it is closed, or its other end is
        with contextlib.suppress(AttributeError, OSError, ValueError):
            # What is left in its buffer would fail once more at the end of the process.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
