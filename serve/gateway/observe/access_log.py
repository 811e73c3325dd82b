"""The access log: a line of JSON for each request, without payloads and without keys."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from compress.errors import ServerError
from compress.vetting.replace import mend_of

__all__ = ["AccessLog"]

FLUSH_S = 0.5
MOST_LINES = 10_000

logger = logging.getLogger(__name__)


class AccessLog:
    """Lines are written together, twice a second; what can't be written is counted and dropped, never waited for.

    Args:
        path: of the file, opened anew when it has been moved away; "-" for stdout.

    Raises:
        ServerError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self._failed = False
        self._torn = False  # whether it ends within a line
        self.dropped = 0
        try:
            self._file = self._opened()
        except OSError as err:
            raise ServerError(
                f"can't write the access log {path}",
                why=err.strerror or str(err),
                mend=mend_of(err, "name a file that can be written"),
            ) from err

    def add(self, **values: Any) -> None:
        """One request."""
        if len(self._lines) >= MOST_LINES:
            self.dropped += 1
            return
        at = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        self._lines.append(orjson.dumps({"time": at, **values}, option=orjson.OPT_APPEND_NEWLINE))

    async def run(self) -> None:
        """Write until cancelled, then the rest."""
        try:
            while True:
                await asyncio.sleep(FLUSH_S)
                await asyncio.to_thread(self.flush)
        finally:
            self.close()

    def close(self) -> None:
        """Write the rest, and close the file."""
        self.flush()
        if str(self._path) != "-":
            self._file.close()

    def flush(self) -> None:
        """Write what there is."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            if self._moved():
                self._file.close()
                self._file, self._torn = self._opened(), False
            self._write(lines)
            self._failed = False
        except (OSError, ValueError) as err:
            if not self._failed:
                logger.error("the access log can't be written: %s", err)
            self._failed = True

    def _write(self, lines: Sequence[bytes]) -> None:
        """Write lines, of which a disk that is full takes a part; what it did not take whole is dropped.

        Raises:
            OSError, ValueError: the file takes no more.
        """
        torn = b"\n" if self._torn else b""
        data, done = torn + b"".join(lines), 0
        try:
            while done < len(data):
                if not (taken := self._file.write(memoryview(data)[done:])):
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                done += taken
            self._file.flush()
        finally:
            self.dropped += data.count(b"\n", max(done, len(torn)))
            self._torn = not data[:done].endswith(b"\n") if done else self._torn

    def _opened(self) -> BinaryIO:
        if str(self._path) == "-":
            if sys.stdout is None:  # it was closed before the process began
                raise OSError(errno.EBADF, "standard output is closed")
            return sys.stdout.buffer
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        return os.fdopen(handle, "ab", buffering=0)

    def _moved(self) -> bool:
        if str(self._path) == "-":
            return False
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return True
