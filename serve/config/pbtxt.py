"""ModelConfig ⇄ config.pbtxt, through Triton's own protobuf schema, so that a wrong field can't be written.

What a dataclass of serve.config.model_config declares is read and written by name. A field of the schema that none
declares is understood in a file, and left out of what is read.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from compress.errors import MissingExtraError, RepositoryError
from compress.vetting.texts import read_text
from serve.config.model_config import ModelConfig

__all__ = ["config_text", "from_message", "from_pbtxt", "parse", "read_config", "text_of", "to_message", "to_pbtxt"]

LARGEST = 1 << 20


def to_pbtxt(config: ModelConfig) -> str:
    """The text of config.pbtxt; the same configuration always gives the same text."""
    return text_of(to_message(config))


def to_message(config: ModelConfig) -> Any:
    """The protobuf message of a configuration."""
    schema, _ = _protobuf()
    message = schema.ModelConfig()
    _write(config, message)
    return message


def text_of(message: Any) -> str:
    """A message as the text of config.pbtxt, with every field that it sets."""
    _, text_format = _protobuf()
    text: str = text_format.MessageToString(message, as_utf8=True)
    return text


def from_message(message: Any) -> ModelConfig:
    """What the dataclasses know of a message; its other fields are left out."""
    config: ModelConfig = _read(ModelConfig, message)
    return config


def read_config(path: Path) -> str:
    """The text of a config.pbtxt, which may be anybody's: a pipe never ends, and no configuration is large.

    Raises:
        OSError: it can't be read.
        ValueError: it is no file, no text, or longer than any is.
    """
    return read_text(path, 4 * LARGEST)


def config_text(path: Path) -> str:
    """As `read_config`, for a command that can't go on without it.

    Raises:
        RepositoryError: it can't be read.
    """
    try:
        return read_config(path)
    except (OSError, ValueError) as err:
        raise RepositoryError(
            f"can't read {path}", why=str(err), mend="write the model again with `serve pack`"
        ) from err


def from_pbtxt(text: str, *, source: str = "config.pbtxt") -> ModelConfig:
    """Read config.pbtxt; what `to_pbtxt` wrote comes back equal.

    Args:
        text: the file's text.
        source: the file's name, for the message.

    Raises:
        RepositoryError: the text is not a Triton model configuration.
    """
    try:
        message = parse(text)
    except ValueError as err:
        raise RepositoryError(
            f"can't read {source}",
            why=f"it is not a Triton model configuration: {err}",
            mend="mend that line, or write the model again with `serve pack`",
        ) from err
    return from_message(message)


def parse(text: str) -> Any:
    """The protobuf message of a config.pbtxt, with every field that its text sets.

    Raises:
        ValueError: the text is not a Triton model configuration, or longer than any is (the parser takes over a second
            for each million characters).
    """
    if len(text) > LARGEST:
        raise ValueError(f"it has {len(text)} characters, and at most {LARGEST} are read")
    schema, text_format = _protobuf()
    try:
        message = text_format.Parse(text, schema.ModelConfig())
    except text_format.ParseError as err:
        raise ValueError(str(err)) from err
    _refuse_unknown(message)
    return message


def _refuse_unknown(message: Any) -> None:
    """The text format takes any number for a word; those of Triton's enumerations have a name each."""
    for field, value in message.ListFields():
        if field.enum_type is None and field.message_type is None:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values = list(value.values()) if _is_message_map(field) else []
        else:
            values = [value] if isinstance(value, int) or hasattr(value, "DESCRIPTOR") else list(value)
        for each in values:
            if field.message_type is not None:
                _refuse_unknown(each)
            elif each not in field.enum_type.values_by_number:
                raise ValueError(f"{field.name} is {each}, which has no name in Triton")


def _protobuf() -> tuple[Any, Any]:
    """Triton's schema and the text format, imported here because tritonclient.grpc is slow to import."""
    try:
        text_format = importlib.import_module("google.protobuf.text_format")
        schema = importlib.import_module("tritonclient.grpc.model_config_pb2")
    except ImportError as err:
        raise MissingExtraError(
            "can't read or write config.pbtxt", module=err.name or "tritonclient", extra="serve"
        ) from err
    return schema, text_format


def _write(value: Any, message: Any) -> None:
    """Set the message's fields from the dataclass instance; None, zero and empty are left out, as proto3 does."""
    fields = message.DESCRIPTOR.fields_by_name
    for name in (field.name for field in dataclasses.fields(value)):
        item, target = getattr(value, name), getattr(message, name)
        if item is None:
            continue
        if dataclasses.is_dataclass(item):
            target.SetInParent()
            _write(item, target)
        elif isinstance(item, Mapping):
            for key, entry in item.items():
                if dataclasses.is_dataclass(entry):
                    _write(entry, target[key])
                elif _is_message_map(fields[name]):
                    target[key].string_value = entry
                else:
                    target[key] = entry
        elif isinstance(item, tuple):
            for entry in item:
                if dataclasses.is_dataclass(entry):
                    _write(entry, target.add())
                else:
                    target.append(entry)
        elif fields[name].enum_type is not None:
            setattr(message, name, fields[name].enum_type.values_by_name[item].number)
        elif item or not fields[name].containing_oneof:  # a False in a oneof would unset the one that is chosen
            setattr(message, name, item)


def _read(cls: Any, message: Any) -> Any:
    """The instance of the dataclass `cls` that a message holds."""
    fields = message.DESCRIPTOR.fields_by_name
    values: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        item = getattr(message, name)
        origin = typing.get_origin(hint)
        if origin is types.UnionType:
            inner = typing.get_args(hint)[0]
            values[name] = _read(inner, item) if message.HasField(name) else None
        elif origin is Mapping:
            inner = typing.get_args(hint)[1]
            nested = dataclasses.is_dataclass(inner)
            if not nested and _is_message_map(fields[name]):
                values[name] = {key: item[key].string_value for key in item}
                continue
            values[name] = {key: _read(inner, item[key]) if nested else item[key] for key in item}
        elif origin is tuple:
            inner = typing.get_args(hint)[0]
            values[name] = tuple(_read(inner, entry) if dataclasses.is_dataclass(inner) else entry for entry in item)
        elif fields[name].enum_type is not None:
            values[name] = fields[name].enum_type.values_by_number[item].name
        else:
            values[name] = item
    return cls(**values)


def _is_message_map(field: Any) -> bool:
    """Whether a map's values are messages; those of ModelConfig.parameters hold one string."""
    return field.message_type.fields_by_name["value"].message_type is not None


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return {field.name: typing.get_type_hints(cls)[field.name] for field in dataclasses.fields(cls)}
