"""The one file of a form (multipart/form-data, RFC 7578), found in a body that is there whole.

Nothing is decoded: whoever sends a form names neither a codec, nor how often one runs. What is searched for is found by
the C library in windows, between which others have their turn.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from serve.gateway.errors import BadRequestError

__all__ = ["file_of"]

WINDOW = 128 * 1024  # about a millisecond, of a body that is made to take long
MOST_PARTS = 17  # fields, and the file
LONGEST_TYPE, LONGEST_HEAD = 1024, 8 * 1024
BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046, section 5.1.1
PARAMETER = re.compile(rb';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*+"|[^;]*+)', re.DOTALL)


async def file_of(content_type: str, body: bytes) -> bytes:
    """The bytes of the one part that has a file's name.

    Args:
        content_type: the request's header.
        body: of the request.

    Raises:
        BadRequestError: it is no form, or one with another number of files or too many fields.
    """
    delimiter = b"\r\n--" + _boundary(content_type)
    at = -2 if body.startswith(delimiter[2:]) else await _found(body, delimiter, 0)
    if at == -1:
        raise _unreadable("its boundary is not in it")
    files: list[slice] = []
    for number in range(MOST_PARTS + 1):
        at += len(delimiter)
        if body.startswith(b"--", at):
            if body[at + 2 : at + 4].strip(b" \t") not in (b"", b"\r\n", b"\r"):
                raise _unreadable("a line begins with its boundary, and goes on")
            break
        if number == MOST_PARTS:
            raise _unreadable(f"it has more than {MOST_PARTS} parts")
        end = await _found(body, delimiter, at)
        if end < 0:
            raise _unreadable("it ends in the middle of a part")
        head = body.find(b"\r\n\r\n", at, min(end, at + LONGEST_HEAD))
        if head < 0:
            raise _unreadable("a part has no headers, or too long ones")
        rest, *lines = body[at:head].split(b"\r\n")
        if rest.strip():
            raise _unreadable("a line begins with its boundary, and goes on")
        if not {b"filename", b"filename*"}.isdisjoint(_names(lines)):
            files.append(slice(head + 4, end))
        at = end
    if len(files) != 1:
        raise _unreadable("it holds no file" if not files else f"it holds {len(files)} files")
    return body[files[0]]


def _boundary(content_type: str) -> bytes:
    said = content_type.encode("latin-1", "replace")
    given: list[tuple[bytes, bytes]] = PARAMETER.findall(said[:LONGEST_TYPE])
    found = [value.strip() for name, value in given if name.lower() == b"boundary"]
    boundary = found[0] if len(found) == 1 else b""
    if boundary.startswith(b'"'):
        boundary = re.sub(rb"\\(.)", rb"\1", boundary[1:-1], flags=re.DOTALL)
    if len(said) > LONGEST_TYPE or not BOUNDARY.fullmatch(boundary):
        raise _unreadable("Content-Type names no boundary of 1 to 70 letters, or several")
    return boundary


def _names(lines: Sequence[bytes]) -> list[bytes]:
    """Of the parameters of a part's Content-Disposition; of several, readers take different ones."""
    parted = [line.partition(b":") for line in lines]
    found = [value for name, _, value in parted if name.strip().lower() == b"content-disposition"]
    if len(found) > 1:
        raise _unreadable("a part has several headers Content-Disposition")
    return [name.lower() for value in found for name, _ in PARAMETER.findall(value)]


async def _found(body: bytes, what: bytes, at: int) -> int:
    """Where it begins, from there on; -1 for nowhere."""
    while at < len(body):
        found = body.find(what, at, at + WINDOW + len(what) - 1)
        if found >= 0:
            return found
        at += WINDOW
        await asyncio.sleep(0)
    return -1


def _unreadable(why: str) -> BadRequestError:
    return BadRequestError("the form can't be read", why=why, mend="send a form with one file: curl -F file=@image.png")
