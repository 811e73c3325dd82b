"""Read text of someone else's: of bounded size; JSON of a bounded number of values.

A parsed value takes up to a hundred bytes for each that it has in the text, and the parser checks nothing of that.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from compress.vetting.files import NoFileError, open_file

__all__ = ["parse_json", "read_bytes", "read_json", "read_text"]

MAX_BYTES = 16 << 20
MAX_VALUES = 2_000_000


def read_text(path: Path, limit: int = MAX_BYTES, *, named: bool = False) -> str:
    """What a file says, in UTF-8.

    Args:
        path, limit: of the file; of its bytes.
        named: by the user, on the command line: it may be a pipe, then.

    Raises:
        OSError, ValueError: as for bytes, or it is no text.
    """
    return read_bytes(path, limit, named=named).decode("utf-8")


def read_bytes(path: Path, limit: int = MAX_BYTES, *, named: bool = False) -> bytes:
    """What is in a file.

    Raises:
        OSError: it can't be read.
        ValueError: it is no file, or too large; says what.
    """
    try:
        opened = path.open("rb") if named else open_file(path)
    except NoFileError as err:
        raise ValueError("it is no file") from err
    with opened as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return data


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        OSError, ValueError: as for a text, or it is no JSON.
    """
    return parse_json(read_text(path).encode())


def parse_json(data: bytes, most: int = MAX_VALUES) -> Any:
    """The value of a JSON text. A key that stands twice in a table is refused: of its values each reader takes one.

    Args:
        data: the text, in UTF-8.
        most: values that it may hold.

    Raises:
        ValueError: it is none, holds too much, has a key twice, or is nested too deeply; says what.
    """
    if sum(data.count(sign) for sign in (b"[", b"{", b",", b":")) > most:
        raise ValueError(f"holds more than {most:,} values")
    try:
        return json.loads(data, object_pairs_hook=_once)
    except _TwiceError:
        raise
    except ValueError as err:  # also of numbers that are too long for Python, and of bytes that are no UTF-8
        raise ValueError(f"is no JSON: {err}") from err
    except RecursionError as err:
        raise ValueError("is nested too deeply") from err


class _TwiceError(ValueError):
    """A key stands twice in a table."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise _TwiceError(f"has the key {twice[:60]!a} twice, and each reader takes another: leave one of them")
    return found
