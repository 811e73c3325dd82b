"""Flags that were not given, from values found elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cyclopts import ArgumentCollection, Token

__all__ = ["fill_flags"]


def fill_flags(arguments: ArgumentCollection, values: Mapping[str, Any], source: str) -> None:
    """Give each flag that was not given its value.

    Args:
        arguments: of a command, as cyclopts hands them to its `config`.
        values: by the names of fields; each is one of the command's flags.
        source: where they come from, for messages.
    """
    by_flag = {flag: argument for argument in arguments for flag in argument.names}
    for key, value in values.items():
        flag = f"--{key.replace('_', '-')}"
        argument = by_flag[flag]
        if argument.tokens or any(other.tokens for other in argument.children):
            continue
        items = value if isinstance(value, list) else [value]
        keyed: list[tuple[tuple[str, ...], object]] = [((), item) for item in items]
        if isinstance(value, dict):
            keyed = [((name,), item) for name, item in value.items()]
        for number, (keys, item) in enumerate(keyed):
            text = str(item).lower() if isinstance(item, bool) else str(item)
            index = number if isinstance(value, list) else 0
            argument.append(Token(keyword=flag, value=text, source=source, index=index, keys=keys))
