"""What libraries print is kept out of sight: only the toolkit's own lines are shown, unless all are asked for.

torch, torch.onnx and ONNX Runtime print from Python and from C++; the latter writes to the file descriptors. So these
are what is turned aside, and the toolkit's own lines go to copies of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rich.markup import escape

from compress.console.plain import Console
from compress.console.wording import AssumedWarning
from compress.errors import ToolkitError, printable

__all__ = ["Streams", "errors_only", "quiet"]

LAST_LINES = 30


@dataclass(frozen=True)
class Streams:
    """Where the toolkit's own lines go."""

    out: TextIO
    err: TextIO


@contextmanager
def errors_only() -> Iterator[None]:
    """Within it, the root logger, which ONNX Runtime's Python code logs to, keeps warnings and less to itself."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet(*, verbose: bool = False, keep: Callable[[str], object] | None = None) -> Iterator[Streams]:
    """Within it, what anything else writes to stdout and stderr goes to a log.

    Args:
        verbose: show it instead.
        keep: is given the log at the end, if something was written.

    A bug, that is, any error but those that are a user's, shows the last lines of the log before its traceback.
    """
    if verbose:
        with _assumptions_shown(sys.stderr):
            yield Streams(sys.stdout, sys.stderr)
        return
    shown = sys.stdout, sys.stderr
    for stream in shown:
        stream.flush()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace", buffering=1) as log:
        try:
            with _aside(log) as streams, _assumptions_shown(streams.err):
                yield streams
        except (ToolkitError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            sys.stderr.writelines(f"  log: {printable(line)}\n" for line in _read(log).splitlines()[-LAST_LINES:])
            raise
        finally:
            if keep is not None:
                with contextlib.suppress(OSError):
                    if text := _read(log):
                        keep(text)


@contextmanager
def _assumptions_shown(err: TextIO) -> Iterator[None]:
    """Within it, what was assumed of a user's file is a line there, as other warnings of the toolkit's are."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, AssumedWarning):
            Console(file=err).print(f"[yellow]warning[/] {escape(str(message))}", highlight=False, soft_wrap=True)
        else:
            usual(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


@contextmanager
def _aside(log: TextIO) -> Iterator[Streams]:
    shown = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        own = []
        for number, stream in enumerate(shown, 1):
            own.append(_own(stream, number, stack))
            stack.callback(_put_back, number, os.dup(number))
            os.dup2(log.fileno(), number)
        sys.stdout = sys.stderr = log
        try:
            yield Streams(*own)
        finally:
            sys.stdout, sys.stderr = shown
            for each in (log, *own):
                with contextlib.suppress(OSError, ValueError):
                    each.flush()


def _own(stream: TextIO, number: int, stack: contextlib.ExitStack) -> TextIO:
    """A stream to where this one leads; itself, where it does not lead to the descriptor."""
    try:
        if stream.fileno() != number:
            return stream
    except (OSError, ValueError):  # not a file at all, as in a test
        return stream
    return stack.enter_context(
        open(os.dup(number), "w", encoding=stream.encoding, errors="backslashreplace", buffering=1)  # noqa: PTH123
    )


def _put_back(number: int, kept: int) -> None:
    os.dup2(kept, number)
    os.close(kept)


def _read(log: TextIO) -> str:
    log.flush()
    log.seek(0)
    return log.read()
