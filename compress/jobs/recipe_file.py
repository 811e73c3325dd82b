"""Options ⇄ TOML: a recipe has a key for each flag, by the field's name.

command = "export"
checkpoint = "model.pt"
output = "artifact"
prune = 0.5
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.errors import RecipeError, first_line
from compress.options import ExportOptions, OptimizeOptions
from compress.storage.files import write_files
from compress.vetting.texts import read_text

__all__ = ["read", "recipe_text", "says", "write"]

MAX_BYTES = 1 << 20
MAX_DOTS = 10_000  # for a key of many parts Python's parser takes time by their square: some seconds for so many
COMMANDS = {"export": ExportOptions, "optimize": OptimizeOptions}


def recipe_text(checkpoint: Path, options: ExportOptions | OptimizeOptions) -> str:
    """The TOML of a run: every option that is not at its default, and the two that have none."""
    command = next(name for name, kind in COMMANDS.items() if isinstance(options, kind))
    values: dict[str, Any] = {"command": command, "checkpoint": checkpoint}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            values[field.name] = value
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def write(path: Path, checkpoint: Path, options: ExportOptions | OptimizeOptions) -> None:
    """Write a recipe whole, or not at all."""
    head = "# Again: compress run FILE; a flag after it overrides its key.\n"
    write_files({path: head + recipe_text(checkpoint, options)})


def read(path: Path) -> tuple[str, Mapping[str, Any]]:
    """The command of a recipe, and its other keys as they stand; their types are the command line's to check.

    It may come from a pipe, or a terminal: it is read once, to its end or its limit.

    Raises:
        RecipeError: missing, no TOML, or of a command that there is not.
    """
    mend = "write one with --save-config, or see its keys with `compress export --help`"
    try:
        values = tomllib.loads(_vetted(read_text(path, MAX_BYTES, named=True)))
    except tomllib.TOMLDecodeError as err:
        raise RecipeError(f"can't read the recipe {path}", why=f"it is not TOML: {err}", mend=mend) from err
    except (OSError, ValueError, RecursionError) as err:  # numbers of thousands of digits, lists in lists
        why = err.strerror if isinstance(err, OSError) and err.strerror else first_line(err)
        raise RecipeError(f"can't read the recipe {path}", why=why, mend=mend) from err
    command = values.pop("command", "export")
    if type(command) is not str or command not in COMMANDS:
        known = " and ".join(COMMANDS)
        why = f"its command is {command!r}; there are {known}"
        raise RecipeError(f"can't run the recipe {path}", why=why, mend=mend)
    if "checkpoint" not in values:
        why = "it has no key `checkpoint`"
        raise RecipeError(f"can't run the recipe {path}", why=why, mend='add checkpoint = "model.pt"')
    nul = next((name for name, value in values.items() if _has_nul(value)), None)
    if nul is not None:  # as no command line can have
        why = f"its {nul!a} holds the character NUL, which ends a name"
        raise RecipeError(f"can't run the recipe {path}", why=why, mend=f"write {nul!a} without it")
    keys = {name.replace("_", "-"): value for name, value in values.items()}
    if "trust-pickle" in keys:
        print(f"warning: the key trust_pickle of {path} is now named trust", file=sys.stderr)
        keys["trust"] = keys.pop("trust-pickle")
    return command, keys


def says(path: Path, checkpoint: Path, options: ExportOptions | OptimizeOptions) -> bool:
    """Whether a recipe is, to the letter, what a run of these options writes into its artifact."""
    try:
        return read_text(path, MAX_BYTES) == recipe_text(checkpoint, options)
    except (OSError, ValueError):
        return False


def _vetted(text: str) -> str:
    """The text of a recipe, as it is.

    Raises:
        ValueError: it takes long to parse.
    """
    if text.count(".") > MAX_DOTS:
        raise ValueError(f"it has more than {MAX_DOTS:,} dots, which no recipe's keys and names need")
    return text


def _has_nul(value: Any) -> bool:
    return any(map(_has_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\0" in value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
