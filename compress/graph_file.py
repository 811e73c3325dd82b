"""A module as plain data: its torch.fx graph, its `torch.nn` leaves and its free tensors.

A file made of this needs none of the user's classes to be loaded again, runs no pickled code (its leaves are
`torch.nn` modules, which `torch.load(weights_only=True)` builds when those classes are allowed by name), and the
module that comes back still has its layers, so it can be pruned and trained.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import get_overridable_functions

__all__ = ["GraphError", "from_data", "to_data"]


class GraphError(Exception):
    """The module's forward can't be written down as a graph of tensor functions."""


def to_data(module: nn.Module, *, inputs: int) -> dict[str, Any]:
    """Trace a module in eval mode and give its graph as lists, strings, numbers, leaves and tensors.

    Args:
        module: any module; further parameters of its forward keep their defaults.
        inputs: how many positional arguments its forward is called with.

    Raises:
        GraphError: the forward depends on tensor values, or uses something that has no plain form.
    """
    traced = module if isinstance(module, fx.GraphModule) else _trace(module, inputs)
    nodes: list[dict[str, Any]] = []
    modules: dict[str, nn.Module] = {}
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for node in traced.graph.nodes:
        target = node.target
        if node.op == "call_module":
            modules[target] = _plain_leaf(target, traced.get_submodule(target))
        elif node.op == "get_attr":
            tensor = operator.attrgetter(target)(traced)
            if not isinstance(tensor, torch.Tensor):
                raise GraphError(f"{target} is a {type(tensor).__name__}, not a tensor")
            (parameters if isinstance(tensor, nn.Parameter) else buffers)[target] = tensor.detach()
        elif node.op == "call_function":
            target = _name_of(target)
        nodes.append(
            {"name": node.name, "op": node.op, "target": target}
            | {"args": _encode(node.args), "kwargs": _encode(node.kwargs)}
        )
    return {"nodes": nodes, "modules": modules, "parameters": parameters, "buffers": buffers}


def from_data(data: Mapping[str, Any]) -> fx.GraphModule:
    """Build the module again; only functions on tensors can be named in the data.

    Raises:
        GraphError: the data names a function that is not one on tensors, or is malformed.
    """
    root = nn.Module()
    for path, leaf in data["modules"].items():
        if not isinstance(leaf, nn.Module):
            raise GraphError(f"{path} is a {type(leaf).__name__}, not a module")
        _set(root, path, leaf)
    for path, tensor in data["parameters"].items():
        _set(root, path, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    for path, tensor in data["buffers"].items():
        _set(root, path, tensor)
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for node in data["nodes"]:
        target: Any = node["target"]
        # torch.fx writes these into source code and compiles it: nothing but plain names may pass.
        for word in (node["name"], *target.split("."), *(key for key, _ in node["kwargs"]["dict"])):
            if not re.fullmatch(r"[A-Za-z0-9_]+", word):
                raise GraphError(f"{word!r} is not a plain name")
        if node["op"] == "call_function":
            target = _function(target)
        elif node["op"] == "call_method" and target not in _methods():
            raise GraphError(f"{target!r} is not a method of tensors")
        args, kwargs = _decode(node["args"], made), _decode(node["kwargs"], made)
        made[node["name"]] = graph.create_node(node["op"], target, args, kwargs, name=node["name"])
    module = fx.GraphModule(root, graph)
    graph.lint()
    return module.eval()


def _trace(module: nn.Module, inputs: int) -> fx.GraphModule:
    parameters = list(inspect.signature(module.forward).parameters.values())
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    fixed = {p.name: p.default for p in parameters[inputs:] if p.kind not in kinds}
    was_training = module.training
    module.eval()
    try:
        traced = fx.symbolic_trace(module, concrete_args=fixed or None)
    except Exception as err:  # tracing runs the user's forward: anything may come out of it
        raise GraphError(f"torch.fx can't trace its forward: {err}") from err
    finally:
        module.train(was_training)
    # A fixed argument leaves behind a placeholder that only an assertion reads.
    for node in [n for n in traced.graph.nodes if n.op == "placeholder"][inputs:]:
        for user in list(node.users):
            for reader in list(user.users):
                traced.graph.erase_node(reader)
            traced.graph.erase_node(user)
        traced.graph.erase_node(node)
    traced.recompile()
    return traced


def _plain_leaf(path: str, leaf: nn.Module) -> nn.Module:
    if not type(leaf).__module__.startswith("torch.nn."):
        raise GraphError(f"{path} is a {type(leaf).__module__}.{type(leaf).__name__}, not a torch.nn module")
    return leaf


def _set(root: nn.Module, path: str, value: nn.Module | torch.Tensor) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    if isinstance(value, nn.Module):
        root.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
    else:
        root.register_buffer(name, value)


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """What a file may call, by name: the functions on tensors that torch lets one override, operator, math."""
    table: dict[str, Callable[..., Any]] = {"builtins.getattr": _tensor_attribute}
    for namespace, functions in get_overridable_functions().items():
        if not isinstance(namespace, types.ModuleType):
            continue
        prefix = namespace.__name__
        table |= {f"{prefix}.{f.__name__}": f for f in functions if getattr(namespace, f.__name__, None) is f}
    table |= {f"_operator.{name}": getattr(operator, name) for name in operator.__all__ if name not in _CALLERS}
    table |= {f"math.{name}": f for name in dir(math) if callable(f := getattr(math, name)) and name[0] != "_"}
    for name in ("arange", "eye", "full", "linspace", "ones", "zeros"):
        table[f"torch.{name}"] = getattr(torch, name)
    for name in ("abs", "float", "int", "len", "max", "min", "round", "sum"):
        table[f"builtins.{name}"] = getattr(builtins, name)
    return table


_CALLERS = ("call", "methodcaller", "attrgetter", "itemgetter")
_TAKE_CALLABLES = {"apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook"}


@functools.cache
def _names() -> dict[Callable[..., Any], str]:
    return {function: name for name, function in _functions().items()} | {getattr: "builtins.getattr"}


@functools.cache
def _methods() -> frozenset[str]:
    names = {f.__name__ for f in get_overridable_functions()[torch.Tensor] if hasattr(f, "__name__")}
    return frozenset(name for name in names if not name.startswith("_")) - _TAKE_CALLABLES


def _tensor_attribute(value: Any, name: str) -> Any:
    if name not in ("shape", "dtype", "device", "ndim", "T", "mT", "real", "imag"):
        raise GraphError(f"{name!r} is not an attribute of tensors that a file may read")
    return getattr(value, name)


def _name_of(function: Callable[..., Any]) -> str:
    if function not in _names():
        name = getattr(function, "__qualname__", repr(function))
        raise GraphError(f"{getattr(function, '__module__', '?')}.{name} is not a function on tensors")
    return _names()[function]


def _function(name: str) -> Callable[..., Any]:
    if name not in _functions():
        raise GraphError(f"{name!r} is not a function on tensors")
    return _functions()[name]


def _encode(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case fx.Node():
            return {"node": value.name}
        case list():
            return {"list": [_encode(item) for item in value]}
        case tuple():
            return {"tuple": [_encode(item) for item in value]}
        case dict():
            return {"dict": [[key, _encode(item)] for key, item in value.items()]}
        case slice():
            return {"slice": [_encode(part) for part in (value.start, value.stop, value.step)]}
        case torch.dtype() | torch.memory_format() | torch.layout():
            return {"torch": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
        case _ if value is ...:
            return {"ellipsis": True}
    raise GraphError(f"a {type(value).__name__} as an argument has no plain form")


def _decode(value: Any, made: Mapping[str, fx.Node]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "node":
            return made[inner]
        case "list":
            return [_decode(item, made) for item in inner]
        case "tuple":
            return tuple(_decode(item, made) for item in inner)
        case "dict":
            return {key: _decode(item, made) for key, item in inner}
        case "slice":
            return slice(*(_decode(part, made) for part in inner))
        case "torch":
            constant = getattr(torch, inner, None)
            if isinstance(constant, torch.dtype | torch.memory_format | torch.layout):
                return constant
        case "device":
            return torch.device(inner)
        case "ellipsis":
            return ...
    raise GraphError(f"{kind!r} is not a kind of argument")
