"""The gateway's settings from a TOML file and the environment, under the names of `Settings`.

A flag comes before a variable of the environment (SERVE_GATEWAY_TIMEOUT_S, ...), and that before the file. In a
variable, several upstreams are separated by blanks.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compress.errors import ServerError
from compress.vetting.ours import check_ours
from serve.config.named import named_text
from serve.gateway.settings import ModelSettings, Settings

__all__ = ["PREFIX", "load_settings", "read_settings"]

PREFIX = "SERVE_GATEWAY_"
FIELDS = tuple(field.name for field in dataclasses.fields(Settings))
LISTS = ("upstream", "grpc_upstream")


def load_settings(path: Path | None, environment: Mapping[str, str], **given: Any) -> Settings:
    """Settings from a file, the environment and what is given, which comes before both.

    Raises:
        ServerError: the file can't be read, a name is none of the settings', or a value can't work.
    """
    from pydantic import TypeAdapter, ValidationError

    values = {**read_settings(path, environment), **given}
    try:
        return TypeAdapter(Settings).validate_python(values)
    except ValidationError as err:
        first = err.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ServerError(
            "the gateway can't be set up", why=f"{name}: {first['msg'].lower()}", mend="see `serve gateway --help`"
        ) from err


def read_settings(path: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """What a file and the environment say, by the names of `Settings`.

    Raises:
        ServerError: the file can't be read, or a name is none of the settings'.
    """
    values = _of_file(path) if path is not None else {}
    for variable, text in environment.items():
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            _check(f"the environment's {variable}", [name], set(FIELDS) - {"models"})
            values[name] = text.split() if name in LISTS else text
    return values


def _of_file(path: Path) -> dict[str, Any]:
    try:
        check_ours(path)
        values = tomllib.loads(named_text(path))
    except OSError as err:
        raise ServerError(f"can't read {path}", why=err.strerror or str(err), mend="name a TOML file") from err
    except (ValueError, RecursionError) as err:
        raise ServerError(f"can't read {path}", why=f"it is not TOML: {err}", mend="mend that line") from err
    _check(str(path), values, FIELDS)
    tables = values.get("models", {})
    names = [field.name for field in dataclasses.fields(ModelSettings)]
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ServerError(f"can't read {path}", why="models holds no tables", mend="write [models.NAME]")
    for table in tables.values():
        _check(str(path), table, names)
    for key in ("keys", "state", "agree_module", "tls_certificate", "tls_key", "access_log"):
        if isinstance(values.get(key), str) and values[key] != "-":
            values[key] = str(path.parent / values[key])  # beside the file, wherever the gateway is started
    for key in LISTS:
        if isinstance(values.get(key), str):
            values[key] = [values[key]]
    return values


def _check(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = sorted(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise ServerError(
                f"can't read {where}",
                why=f"the gateway has no setting {name!r}",
                mend=f"did you mean {close[0]!r}?" if close else "see `serve gateway --help`",
            )
