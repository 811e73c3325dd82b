"""Any field of Triton's own schema, laid over a configuration from plain tables: what TOML or a dict says."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from compress.errors import RepositoryError

__all__ = ["lay_over"]


def lay_over(message: Any, table: Mapping[str, Any], *, where: str) -> None:
    """Set the fields of a protobuf message that a table names, under the schema's own names.

    A table goes into the message that it names, or adds to a map; a list takes the place of what was there.

    Args:
        message: is changed.
        table: such as {"max_batch_size": 8, "dynamic_batching": {"priority_levels": 2}}.
        where: the table's name, for the message of an error.

    Raises:
        RepositoryError: the schema has no such field, or it takes no such value.
    """
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in table.items():
        if name not in fields:
            close = difflib.get_close_matches(name, fields, 1)
            raise RepositoryError(
                f"can't set {name!r} in [{where}]",
                why="Triton's model configuration has no such field there",
                mend=f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(fields))}",
            )
        _set(message, fields[name], value, f"{where}.{name}")


def _set(message: Any, field: Any, value: Any, where: str) -> None:
    name = field.name
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _map(getattr(message, name), field.message_type, _table(value, where), where)
    elif field.is_repeated:
        if not isinstance(value, list | tuple):
            raise _wrong(where, value, "a list")
        message.ClearField(name)
        for number, item in enumerate(value):
            if field.message_type is not None:
                lay_over(getattr(message, name).add(), _table(item, where), where=f"{where}[{number}]")
            else:
                _try(where, item, getattr(message, name).append, _number(field, item, where))
    elif field.message_type is not None:
        target = getattr(message, name)
        target.SetInParent()
        lay_over(target, _table(value, where), where=where)
    else:
        _try(where, value, lambda item: setattr(message, name, item), _number(field, value, where))


def _map(target: Any, entry: Any, table: Mapping[str, Any], where: str) -> None:
    key_of = str if entry.fields_by_name["key"].type == entry.fields_by_name["key"].TYPE_STRING else int
    inner = entry.fields_by_name["value"].message_type
    for key, value in table.items():
        try:
            typed = key_of(key)
        except ValueError as err:
            raise _wrong(where, key, "a number as key") from err
        if inner is None:
            _try(f"{where}.{key}", value, lambda item, typed=typed: target.__setitem__(typed, item), value)
        elif list(inner.fields_by_name) == ["string_value"]:  # `parameters`: KEY = "text" says it all
            _try(f"{where}.{key}", value, lambda item, typed=typed: setattr(target[typed], "string_value", item), value)
        else:
            lay_over(target[typed], _table(value, f"{where}.{key}"), where=f"{where}.{key}")


def _number(field: Any, value: Any, where: str) -> Any:
    """An enum's number for its name; other values as they are."""
    if field.enum_type is None:
        if field.type == field.TYPE_BOOL and not isinstance(value, bool):
            raise _wrong(where, value, "true or false")
        return value
    names = field.enum_type.values_by_name
    if value not in names:
        raise _wrong(where, value, f"one of {', '.join(names)}")
    return names[value].number


def _try(where: str, shown: Any, setter: Any, value: Any) -> None:
    try:
        setter(value)
    except (TypeError, ValueError) as err:
        raise _wrong(where, shown, "another value", str(err)) from err


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "a table of fields")
    return value


def _wrong(where: str, value: Any, wanted: str, detail: str = "") -> RepositoryError:
    return RepositoryError(
        f"can't set {where} to {value!r}", why=detail or f"it takes {wanted}", mend=f"give {wanted}, as Triton names it"
    )
