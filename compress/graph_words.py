"""What a graph in a file may say: functions on tensors by name, and arguments of exact, plain types."""

from __future__ import annotations

import builtins
import functools
import math
import operator
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.overrides import get_overridable_functions

__all__ = ["Decoder", "GraphError", "encode", "function_of", "methods", "name_of"]

_DEPTH = 16
_ITEMS = 500_000
_LITERALS = (type(None), bool, int, float, str)
_CONSTANTS = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout)
}
_CALLERS = ("call", "methodcaller", "attrgetter", "itemgetter")
_TAKE_CALLABLES = {"apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook"}
# Those that give or change the memory behind a tensor, not its values.
_MEMORY = re.compile(
    r".*(storage|resize|data_ptr|pinned|pin_memory|shared?_|is_shared).*|set_|numpy|module_load|backward"
)
# Kernels of one backend, which trust what they are given: packed weights hold pointers.
_KERNELS = re.compile(r"_.*|(fbgemm|miopen|cudnn|mkldnn|quantized|rocm|xnnpack)_.*|q_.*|.*(loss|qparams).*")
# Of a few words of a file, these make numbers of any length.
_GROWING = ("factorial", "comb", "perm")


class GraphError(Exception):
    """The module's forward can't be written down as a graph of tensor functions."""


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """What a file may call, by name: the functions on tensors that torch lets one override, operator, math."""
    table: dict[str, Callable[..., Any]] = {"builtins.getattr": _tensor_attribute}
    for namespace, functions in get_overridable_functions().items():
        if not isinstance(namespace, types.ModuleType):
            continue
        prefix = namespace.__name__
        table |= {
            f"{prefix}.{f.__name__}": f
            for f in functions
            if getattr(namespace, f.__name__, None) is f and not _KERNELS.fullmatch(f.__name__)
        }
    table |= {f"_operator.{name}": getattr(operator, name) for name in operator.__all__ if name not in _CALLERS}
    table |= {
        f"math.{name}": f
        for name in dir(math)
        if callable(f := getattr(math, name)) and name[0] != "_" and name not in _GROWING
    }
    for name in ("arange", "eye", "full", "linspace", "ones", "zeros"):
        table[f"torch.{name}"] = getattr(torch, name)
    for name in ("abs", "float", "int", "len", "max", "min", "round", "sum"):
        table[f"builtins.{name}"] = getattr(builtins, name)
    return table


@functools.cache
def _names() -> dict[Callable[..., Any], str]:
    return {function: name for name, function in _functions().items()} | {getattr: "builtins.getattr"}


@functools.cache
def methods() -> frozenset[str]:
    names = {f.__name__ for f in get_overridable_functions()[torch.Tensor] if hasattr(f, "__name__")}
    return frozenset(n for n in names if not _KERNELS.fullmatch(n) and not _MEMORY.fullmatch(n)) - _TAKE_CALLABLES


def _tensor_attribute(value: Any, name: str) -> Any:
    if name not in ("shape", "dtype", "device", "ndim", "T", "mT", "real", "imag"):
        raise GraphError(f"{name!r} is not an attribute of tensors that a file may read")
    return getattr(value, name)


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
            case "device" if type(inner) is str and re.fullmatch(r"[a-z]{2,10}(:\d{1,3})?", inner):
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
