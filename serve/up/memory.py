"""`serve up --memory`, as it is written: sizes, and what can't go together."""

from __future__ import annotations

import re

from compress.errors import ServerError
from serve.triton.memory import MIB

__all__ = ["bytes_of", "check_flags"]

UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]I?|)B?", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """The bytes of a size such as 8GiB, 512MiB or 2GB.

    Raises:
        ServerError: it is none, or less than a mebibyte.
    """
    match = SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * UNITS[match[2].upper()])
    if size < MIB:
        why = "it is no size" if match is None else "it is less than 1MiB"
        raise ServerError(f"can't keep models within --memory {text!r}", why=why, mend="write it as in 8GiB or 512MiB")
    return size


def check_flags(
    memory: str | None,
    pin: tuple[str, ...],
    *,
    triton: str | None = None,
    docker: str | None = None,
    model_control: bool = False,
) -> None:
    """Refuse what can't go together.

    Raises:
        ServerError: says what.
    """
    if memory is None:
        if pin:
            raise ServerError(
                f"can't pin {pin[0]}", why="without --memory every model stays loaded", mend="leave --pin out"
            )
        return
    bytes_of(memory)
    others = {
        "--triton": (triton is not None, "what that Triton has loaded is its own affair", "give a repository"),
        "--docker": (docker is not None, "the memory of a container's processes is not seen from here", "leave it out"),
        "--model-control": (
            model_control, "what others load would not keep to the memory", "leave it out: what is asked for is loaded",
        ),
    }  # fmt: skip
    for flag, (given, why, mend) in others.items():
        if given:
            raise ServerError(f"can't keep models within --memory beside {flag}", why=why, mend=mend)
