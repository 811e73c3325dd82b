"""`serve pack --config FILE`: a TOML file with a key for each flag, and tables of Triton's own fields."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection

from compress.errors import RepositoryError
from serve.config.flags import fill_flags
from serve.config.named import named_text

__all__ = ["flags_of_file", "read_tables"]


def read_tables(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A file for `serve pack --config`: a key for each flag, and a table of Triton's own fields for each model.

    Returns:
        The flags by their field names, and the tables by role.

    Raises:
        RepositoryError: it is missing, or no TOML.
    """
    try:
        values = tomllib.loads(named_text(path))
    except OSError as err:
        raise RepositoryError(f"can't read {path}", why=err.strerror or str(err), mend="name a TOML file") from err
    except (ValueError, RecursionError) as err:
        raise RepositoryError(f"can't read {path}", why=f"it is not TOML: {err}", mend="mend that line") from err
    tables = {key: value for key, value in values.items() if isinstance(value, dict) and key != "metric_tags"}
    return {key: value for key, value in values.items() if key not in tables}, tables


def flags_of_file(_app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give each flag that was not given what the file of `serve pack --config FILE` says; cyclopts calls it.

    Raises:
        RepositoryError: the file can't be read, or has a key that is no flag.
    """
    if commands != ("pack",):
        return
    by_flag = {flag: argument for argument in arguments for flag in argument.names}
    config = by_flag["--config"]
    if not config.tokens:
        return
    path = Path(config.tokens[0].value)
    values = read_tables(path)[0]
    for key in values:
        flag = f"--{key.replace('_', '-')}"
        if flag not in by_flag or flag == "--config":
            close = difflib.get_close_matches(flag, by_flag, 1)
            raise RepositoryError(
                f"can't read {path}",
                why=f"`serve pack` has no flag for {key!r}",
                mend=f"did you mean {close[0][2:].replace('-', '_')!r}?" if close else "see `serve pack --help`",
            )
    fill_flags(arguments, values, str(path))
