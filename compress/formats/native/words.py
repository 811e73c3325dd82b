"""What a graph in a file may say: functions on tensors by name, and arguments of exact, plain types."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.return_types import all_return_types

from compress.vetting.calls.functions import functions, methods

__all__ = ["Decoder", "GraphError", "encode", "function_of", "methods", "name_of"]

_DEPTH = 16
_ITEMS = 500_000
_LITERALS = (type(None), bool, int, float, str)
_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 contiguous_format preserve_format channels_last channels_last_3d strided"
)
_CONSTANTS = {name: getattr(torch, name) for name in _NAMES.split()}
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d{1,3})?", re.ASCII)
_ATTRIBUTES = (
    "shape", "dtype", "device", "ndim", "T", "H", "mT", "mH", "real", "imag", "data", "itemsize", "nbytes", "layout",
)  # fmt: skip


class GraphError(Exception):
    """The module's forward can't be written down as a graph of tensor functions."""


def _tensor_attribute(value: Any, name: str) -> Any:
    """`getattr` in a graph: of a tensor, or of the several that a function like max gives."""
    if name not in (type(value).__match_args__ if type(value) in all_return_types else _ATTRIBUTES):
        raise GraphError(f"{name!r} is not an attribute of tensors that a file may read")
    return getattr(value, name)


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    return {"builtins.getattr": _tensor_attribute, **functions()}


@functools.cache
def _names() -> dict[Callable[..., Any], str]:
    own = {getattr(function, "__wrapped__", function): name for name, function in functions().items()}
    return own | {function: name for name, function in _functions().items()} | {getattr: "builtins.getattr"}


def name_of(function: Callable[..., Any]) -> str:
    if function not in _names():
        name = getattr(function, "__qualname__", repr(function))
        raise GraphError(f"{getattr(function, '__module__', '?')}.{name} is not a function on tensors")
    return _names()[function]


def function_of(name: str) -> Callable[..., Any]:
    if name not in _functions():
        raise GraphError(f"{name!r} is not a function on tensors")
    return _functions()[name]


def encode(value: Any, names: Mapping[fx.Node, str]) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            # Of a subclass, such as an enumeration's member, the number or text that it stands for.
            return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)
        case fx.Node():
            return {"node": names[value]}
        case list():
            return {"list": [encode(item, names) for item in value]}
        case tuple():
            return {"tuple": [encode(item, names) for item in value]}
        case dict():
            return {"dict": [[key, encode(item, names)] for key, item in value.items()]}
        case slice():
            return {"slice": [encode(part, names) for part in (value.start, value.stop, value.step)]}
        case torch.dtype() | torch.memory_format() | torch.layout():
            return {"torch": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
        case _ if value is ...:
            return {"ellipsis": True}
    raise GraphError(f"a {type(value).__name__} as an argument has no plain form")


class Decoder:
    """Arguments of nodes from plain data; each value is of an exact type, so that its repr is a literal.

    Attributes:
        made: the nodes so far, by the names that the data has for them.
    """

    def __init__(self) -> None:
        self.made: dict[str, fx.Node] = {}
        self._items = 0

    def decode(self, value: Any, depth: int = 0) -> Any:
        self._items += 1
        if self._items > _ITEMS or depth > _DEPTH:
            raise GraphError("its arguments are nested too deep, or too many")
        if type(value) is not dict:
            return _literal(value)
        if len(value) != 1:
            raise GraphError("an argument of it is of no kind")
        ((kind, inner),) = value.items()
        match kind:
            case "node" if type(inner) is str and inner in self.made:
                return self.made[inner]
            case "list" | "tuple" if type(inner) is list:
                items = [self.decode(item, depth + 1) for item in inner]
                return items if kind == "list" else tuple(items)
            case "dict" if type(inner) is list:
                pairs = [pair for pair in inner if type(pair) in (list, tuple) and len(pair) == 2]
                if len(pairs) == len(inner):
                    return {_literal(key): self.decode(item, depth + 1) for key, item in pairs}
            case "slice" if type(inner) is list and len(inner) == 3:
                return slice(*(self.decode(part, depth + 1) for part in inner))
            case "torch" if type(inner) is str and inner in _CONSTANTS:
                return _CONSTANTS[inner]
            case "device" if type(inner) is str and _DEVICE.fullmatch(inner):
                return torch.device(inner)
            case "ellipsis":
                return ...
        raise GraphError(f"{ascii(kind)[:100] if type(kind) is str else type(kind)} is not such an argument")


def _literal(value: Any) -> Any:
    if type(value) not in _LITERALS:
        raise GraphError(f"an argument of it is a {type(value).__name__}, which is no plain value")
    if type(value) is int and abs(value) >= 1 << 63:
        raise GraphError("an argument of it is a number of more than 64 bits")
    if type(value) is str and (len(value) > 1000 or not value.isprintable()):
        raise GraphError("an argument of it is a long text, or one that can't be printed")
    return value
