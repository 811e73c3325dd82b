"""What attributes, functions and objects are, as JSON can hold it, the same in every process: what a model is known by.

Code is known by what Python made of it, with its constants, defaults, the values that it closes over and the globals
that it names. What is installed is known by its name: its version is a part of every key elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from compress.storage.hashing import digest_of_arrays, is_users

__all__ = ["NoPlainFormError", "PlainForms", "place"]

MOST = 1_000_000
"""Values that are looked at: a vocabulary has fewer."""
DEEPEST = 100
_OF_ANY_MODULE = vars(nn.Module()).keys()
_OF_ANY_GRAPH = {"_graph", "_code", "_codegen", "_tracer_cls", "_tracer_extras", "meta", "_replace_hooks"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_KINDS_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_OF_C = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)  # fmt: skip
_BY_REPR = (torch.dtype, torch.device, torch.layout, torch.memory_format, types.EllipsisType, complex)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


class NoPlainFormError(Exception):
    """It can't be told from others of its kind, as a lock or a generator can't."""


def place(tensor: torch.Tensor) -> Hashable:
    """Where a tensor's numbers lie, and how: two of one place hold the same."""
    return tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()


class PlainForms:
    """Of the values of one model; one that is met again is told by its number, so that circles end.

    Args:
        tensors: names of tensors by their `place`, whose numbers are hashed elsewhere under these.
        layers: a module, whose layers are told elsewhere, each by its name.
    """

    def __init__(self, tensors: Mapping[Hashable, str], layers: nn.Module | None = None) -> None:
        self._tensors = tensors
        self._layers = {} if layers is None else {id(layer): name for name, layer in layers.named_modules()}
        self._met: dict[int, tuple[int, Any]] = {}  # the value, too: what is gone leaves its id to another
        self._looked_at = self._depth = 0

    def of(self, value: Any) -> Any:
        """What tells it from others.

        Raises:
            NoPlainFormError: nothing does.
        """
        self._looked_at += 1
        if self._looked_at > MOST or self._depth > DEEPEST:
            raise NoPlainFormError("there is more to it than is looked at")
        self._depth += 1
        try:
            return self._of(value)
        finally:
            self._depth -= 1

    def layer(self, layer: nn.Module) -> Any:
        """Of a layer, without its tensors and the layers in it: class, attributes, hooks."""
        apart = _OF_ANY_MODULE | (_OF_ANY_GRAPH if isinstance(layer, torch.fx.GraphModule) else set())
        own = {key: value for key, value in vars(layer).items() if key not in apart}
        return [self.of(type(layer)), self.of(own), self._changes(layer)]

    def _changes(self, layer: nn.Module) -> Any:
        """What is done before and after its forward, and a forward that someone put in the place of a library's."""
        kind, found = type(layer), []
        for name in _HOOKS:
            hooks: Mapping[int, Any] = getattr(layer, name)
            for number, hook in hooks.items():
                kinds = [each for each in _KINDS_OF_HOOKS if number in getattr(layer, each, ())]
                found.append([name, kinds, self.of(hook)])
        if not is_users(kind.__module__) and is_users(str(getattr(kind.forward, "__module__", ""))):
            found.append(["forward", [], self.of(kind.forward)])
        return found

    def _of(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Enum):
            return [self.of(type(value)), value.name]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", hashlib.sha256(value).hexdigest()]
        if isinstance(value, _BY_REPR):
            return repr(value)
        if type(value) in (tuple, list, torch.Size):
            return [type(value).__name__, *(self.of(item) for item in value)]
        if type(value) in (dict, OrderedDict, types.MappingProxyType):
            return [[self.of(key), self.of(held)] for key, held in value.items()]
        if isinstance(value, (set, frozenset)):
            return ["set", *sorted(json.dumps(self.of(item)) for item in value)]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._met:
            return ["again", self._met[id(value)][0]]
        if id(value) in self._layers:
            return ["layer", self._layers[id(value)]]
        self._met[id(value)] = len(self._met), value
        return self._new(value)

    def _tensor(self, value: torch.Tensor) -> Any:
        try:
            if (name := self._tensors.get(place(value))) is not None:
                return ["tensor", name]
            held = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError) as err:
            raise NoPlainFormError(f"a tensor that is {value.layout} on {value.device}") from err
        return [str(value.dtype), list(value.shape), digest_of_arrays({"": held})]

    def _new(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.of(value.tolist()) if value.dtype.hasobject else digest_of_arrays({"": value})
        if isinstance(value, torch.jit.ScriptModule):
            return hashlib.sha256(value.save_to_buffer()).hexdigest()
        if isinstance(value, torch.jit.ScriptFunction):
            return [value.name, value.code, repr(value.graph)]
        if isinstance(value, nn.Module):
            return [self.layer(value), self.of(value._parameters), self.of(value._buffers), self.of(value._modules)]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, (staticmethod, classmethod)):
            return [type(value).__name__, self.of(value.__func__)]
        if isinstance(value, property):
            return ["property", self.of(value.fget)]
        if isinstance(value, functools.cached_property):
            return ["property", self.of(value.func)]
        if isinstance(value, _OF_C):
            holder = getattr(value, "__self__", None)
            of = None if holder is None or isinstance(holder, types.ModuleType) else self.of(holder)
            return ["built in", str(getattr(value, "__module__", "")), value.__qualname__, of]
        return self._object(value)

    def _class(self, kind: type) -> Any:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not is_users(kind.__module__):
            return name
        held = {
            key: value
            for key, value in sorted(vars(kind).items())
            if key != "_abc_impl" and (isinstance(value, _METHODS) if key.startswith("__") else True)
            and not isinstance(value, _SLOTS)
        }  # fmt: skip
        return [name, [self.of(base) for base in kind.__bases__], self.of(held)]

    def _function(self, function: types.FunctionType) -> Any:
        name = f"{function.__module__}.{function.__qualname__}"
        held = [_content(cell) for cell in function.__closure__ or ()]
        if not is_users(function.__module__ or ""):
            return [name] if _named(function) else [name, self.of(held)]
        names = [
            each for each in dict.fromkeys(_names(function.__code__)) if not each.startswith("__")
        ]  # not where it is
        used = {each: function.__globals__[each] for each in names if each in function.__globals__}
        return [
            name, self.of(function.__code__), self.of(function.__defaults__), self.of(function.__kwdefaults__),
            self.of(held), self.of(vars(function)), [[each, self._global(got, names)] for each, got in used.items()],
        ]  # fmt: skip

    def _global(self, value: Any, names: list[str]) -> Any:
        """A value that a function names; of a module, what of it the function may name."""
        if not isinstance(value, types.ModuleType):
            return self.of(value)
        users = is_users(value.__name__)
        there = {name: vars(value)[name] for name in names if name in vars(value)}
        told = {name: got for name, got in there.items() if users or type(got) in (bool, int, float, str)}
        return ["module", value.__name__, self.of(told)]

    def _code(self, code: types.CodeType) -> Any:
        return [
            code.co_code.hex(), code.co_exceptiontable.hex(), self.of(code.co_consts), list(code.co_names),
            list(code.co_varnames), list(code.co_freevars), code.co_argcount, code.co_kwonlyargcount, code.co_flags,
        ]  # fmt: skip

    def _object(self, value: Any) -> Any:
        kind = type(value)
        try:
            if kind.__module__.partition(".")[0] in ("torch", "sympy") and " at 0x" not in (text := repr(value)):
                return [self.of(kind), text]
            if is_users(kind.__module__) and hasattr(value, "__dict__"):
                slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
                items = list(value.items()) if isinstance(value, Mapping) else None
                items = list(value) if isinstance(value, (tuple, list)) else items
                return [self.of(kind), self.of(vars(value)), self.of(slots), self.of(items)]
            reduced = value.__reduce_ex__(4)
        except NoPlainFormError:
            raise
        except Exception as err:  # whatever an object's own code says
            raise NoPlainFormError(f"a {kind.__module__}.{kind.__qualname__}") from err
        if isinstance(reduced, str):
            return [self.of(kind), reduced]
        return [self.of(list(part) if isinstance(part, Iterator) else part) for part in reduced]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return "empty"


def _named(function: types.FunctionType) -> bool:
    """Whether a library's function is what its name says, none that another function made."""
    found: Any = sys.modules.get(function.__module__ or "")
    for word in function.__qualname__.split("."):
        found = getattr(found, word, None)
    return found is function


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _slots(kind: type) -> list[str]:
    found = [
        name
        for each in kind.__mro__
        for name, held in vars(each).items()
        if isinstance(held, types.MemberDescriptorType)
    ]
    return sorted(set(found))
