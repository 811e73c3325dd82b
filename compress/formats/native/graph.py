"""A module as plain data: its torch.fx graph, its `torch.nn` leaves and its free tensors.

A file made of this needs none of the user's classes to be loaded again, and the module that comes back still has its
layers, so it can be pruned and trained. The file may be anybody's. torch.fx writes a graph as Python source and
compiles it, so a graph that is read is made of words of our own: nodes are numbered anew, functions and methods come
from tables, paths are plain names, and an argument is a node or a plain value of an exact type, whose repr is a
literal. Layers are made anew by their constructors (`compress.formats.native.layers`).
"""

from __future__ import annotations

import inspect
import keyword
import operator
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from compress.formats.native.layers import (
    LayerError,
    Made,
    clean,
    layer_of,
    plain_name,
    record_of,
    refuse_changed,
    refuse_many,
)  # fmt: skip
from compress.formats.native.words import Decoder, GraphError, encode, function_of, methods, name_of
from compress.formats.pickles.names import Instance
from compress.vetting.calls.growth import Growth, GrowthError
from compress.vetting.calls.guards import AS_FUNCTIONS

__all__ = ["GraphError", "from_data", "to_data", "traced_of"]

_NODES = 50_000
_TYPES = {
    f"torch.{kind}Tensor"
    for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
}
_KEYS = {"name", "op", "target", "args", "kwargs"}


_EMPTY = fx.GraphModule(nn.Module(), fx.Graph())


def to_data(module: nn.Module, *, inputs: int) -> dict[str, Any]:
    """Trace a module in eval mode and give its graph as lists, strings, numbers, descriptions of leaves and tensors.

    Nodes are named n0, n1…; a parameter that is used in several places is the same object in each of them.

    Args:
        module: any module; further parameters of its forward keep their defaults.
        inputs: how many positional arguments its forward is called with.

    Raises:
        GraphError: the forward depends on tensor values, or uses something that has no plain form.
    """
    traced = traced_of(module, inputs)
    nodes: list[dict[str, Any]] = []
    modules: dict[str, Any] = {}
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    names: dict[fx.Node, str] = {}
    met: dict[int, Any] = {}
    for number, node in enumerate(traced.graph.nodes):
        name = names[node] = f"n{number}"
        target = node.target
        try:
            if node.op == "call_module":
                layer = traced.get_submodule(target)
                refuse_changed(layer, inside=True)
                modules[target] = record_of(layer, met)
            elif node.op == "get_attr":
                tensor = operator.attrgetter(target)(traced)
                if not isinstance(tensor, torch.Tensor):
                    raise GraphError(f"{target} is a {type(tensor).__name__}, not a tensor")
                table: dict[str, Any] = parameters if isinstance(tensor, nn.Parameter) else buffers
                table[target] = clean(tensor, met)
        except LayerError as err:
            raise GraphError(f"{target}: {err}") from err
        if node.op == "call_function":
            target = name_of(target)
        elif node.op in ("placeholder", "output"):
            target = name
        args, kwargs = encode(node.args, names), encode(dict(node.kwargs), names)
        nodes.append({"name": name, "op": node.op, "target": target, "args": args, "kwargs": kwargs})
    return {"nodes": nodes, "modules": modules, "parameters": parameters, "buffers": buffers}


def traced_of(module: nn.Module, inputs: int) -> fx.GraphModule:
    """The module's steps as a graph that has the very layers of the module, not copies; itself, if it is one.

    Args:
        module: in eval mode.
        inputs: how many positional arguments its forward is called with.

    Raises:
        GraphError: its forward can't be traced, or is not all that it does.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise GraphError("TorchScript has no forward in Python to be traced")
    try:
        refuse_changed(module)
    except LayerError as err:
        raise GraphError(f"its graph is not all of it: {err}") from err
    return module if isinstance(module, fx.GraphModule) else _trace(module, inputs)


def from_data(data: Mapping[str, Any]) -> fx.GraphModule:
    """Build the module again; only functions on tensors can be named in the data.

    Args:
        data: what `to_data` gave, or an earlier release of it, whose leaves are descriptions of modules in a pickle.

    Raises:
        GraphError: the data names a function that is not one on tensors, or is malformed.
    """
    if type(data) is not dict:
        raise GraphError("its graph is no mapping")
    nodes = data.get("nodes")
    if type(nodes) is not list or len(nodes) > _NODES:
        raise GraphError("it has no list of nodes, or one that is too long")
    root = _root(data)
    graph = fx.Graph()
    decoder, growth = Decoder(), Growth()
    try:
        for number, node in enumerate(nodes):
            growth.add(_add(graph, node, f"n{number}", root, decoder), node["target"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # a constant that is called is the file's fault
            module = fx.GraphModule(root, graph)
        graph.lint()
    except GraphError:
        raise
    except GrowthError as err:
        raise GraphError(str(err)) from err
    except Exception as err:  # torch.fx checks nothing: a graph that makes no sense may end in any of its lines
        raise GraphError(f"its graph is malformed: {err}") from err
    return module.eval()


def _root(data: Mapping[str, Any]) -> nn.Module:
    """The layers and the free tensors, under their names."""
    root = nn.Module()
    made: Made = {}
    reached = 0
    met: dict[int, Any] = {}
    for kind in ("modules", "parameters", "buffers"):
        table = data.get(kind)
        if type(table) is not dict:
            raise GraphError(f"it has no table of {kind}")
        shared = {_memory(tensor): tensor for tensor in root.parameters() if tensor.numel()}
        for path, value in table.items():
            try:
                if kind == "modules":
                    record = _record(value, met)
                    layer = layer_of(record, made)
                    refuse_many(reached := reached + made[id(record)][1])
                    _put(root, path, layer)
                else:
                    _put(root, path, _free(value, met, shared, parameter=kind == "parameters"))
            except (GraphError, LayerError, KeyError) as err:
                shown = ascii(path)[:100] if type(path) is str else "a path that is no text"
                raise GraphError(f"{shown}: {err}") from err
    return root


def _free(value: Any, met: dict[int, Any], shared: Mapping[Any, nn.Parameter], *, parameter: bool) -> torch.Tensor:
    """A tensor outside of layers; one that a layer has, too, is that layer's."""
    if clean(value, {}) is None:
        raise GraphError("it is not there")
    tensor: torch.Tensor = met.get(id(value), value)
    if not parameter or isinstance(tensor, nn.Parameter):
        return tensor
    # Version 1 told by its memory alone which parameter a tensor is.
    known = shared.get(_memory(tensor)) if tensor.numel() else None
    return nn.Parameter(tensor, requires_grad=tensor.is_floating_point()) if known is None else known


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _record(value: Any, met: dict[int, Any]) -> Any:
    """The description of a layer, also where the file is of version 1, or was trusted and holds the layer itself."""
    return record_of(value, met) if isinstance(value, Instance | nn.Module) else value


def _put(root: nn.Module, path: Any, value: nn.Module | torch.Tensor) -> None:
    if type(path) is not str or len(path) > 1000:
        raise GraphError("it is no path")
    *parents, name = words = [plain_name(word) for word in path.split(".")]
    if hasattr(_EMPTY, words[0]):
        raise GraphError(f"{words[0]!r} is a name that modules use themselves")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    if isinstance(value, nn.Module):
        if name in root._modules:
            raise GraphError("it is there twice")
        root.add_module(name, value)
        return
    tensors: dict[str, Any] = root._parameters if isinstance(value, nn.Parameter) else root._buffers
    if type(root) is not nn.Module and not (name in tensors and getattr(tensors[name], "shape", None) == value.shape):
        raise GraphError("it is no tensor of that layer")
    # A layer's own tensor, which the forward reads besides, is there already.
    if name not in tensors:
        if isinstance(value, nn.Parameter):
            root.register_parameter(name, value)
        else:
            root.register_buffer(name, value)


def _add(graph: fx.Graph, node: Any, name: str, root: nn.Module, decoder: Decoder) -> fx.Node:
    if type(node) is not dict or node.keys() != _KEYS or type(node["name"]) is not str or len(node["name"]) > 1000:
        raise GraphError("a node of it has not the parts of one")
    op, given = node["op"], node["target"]
    args, kwargs = decoder.decode(node["args"]), decoder.decode(node["kwargs"])
    if (
        type(op) is not str
        or type(given) is not str
        or len(given) > 1000
        or type(args) is not tuple
        or type(kwargs) is not dict
    ):
        raise GraphError("a node of it has not the parts of one")
    for key in kwargs:
        if type(key) is not str or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", key) or keyword.iskeyword(key):
            raise GraphError(f"{key!r} is not a plain name")
    target: Any
    match op:
        case "placeholder" | "output":
            if kwargs or len(args) > 1:
                raise GraphError(f"a node of the kind {op} has arguments that it can't have")
            target = name if op == "placeholder" else "output"
        case "call_function":
            target = function_of(given)
            if given == "torch.div" and "rounding_mode" in kwargs:
                target = function_of("torch.divide")  # the same, looked at first
        case "call_method":
            if given not in methods() or not args or not isinstance(args[0], fx.Node):
                raise GraphError(f"{given!r} is not a method of tensors")
            target = given
            if given == "type" and not _names_no_memory(args, kwargs):
                raise GraphError("a type that it asks for is none of plain tensors")
            if given in AS_FUNCTIONS:
                op, target = "call_function", function_of(f"torch.{given}")
                if given == "split" and "split_size" in kwargs:
                    kwargs = {
                        "split_size_or_sections" if key == "split_size" else key: each for key, each in kwargs.items()
                    }
            if given.strip("_") in ("div", "divide") and "rounding_mode" in kwargs:
                op, target = "call_function", function_of("torch.divide")
                kwargs = {**kwargs, "out": args[0]} if given.endswith("_") else kwargs
        case "call_module":
            if _at(root, given) is None:
                raise GraphError(f"{ascii(given)[:100]} is not a layer of it")
            target = given
        case "get_attr":
            if not isinstance(_at(root, given, tensor=True), torch.Tensor):
                raise GraphError(f"{ascii(given)[:100]} is not a tensor of it")
            target = given
        case _:
            raise GraphError(f"{ascii(op)[:100]} is no kind of node")
    made = decoder.made[node["name"]] = graph.create_node(op, target, args, kwargs, name=name)
    return made


def _names_no_memory(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether what `Tensor.type` is asked for is a dtype: a text names sparse tensors, too."""
    given = (*args[1:], *(value for key, value in kwargs.items() if key != "non_blocking"))
    return all(
        (isinstance(value, torch.dtype | bool))
        or (type(value) is str and value in _TYPES)
        or (isinstance(value, fx.Node) and (value.target == "type" or value.args[1:] == ("dtype",)))
        for value in given
    )


def _at(root: nn.Module, path: str, *, tensor: bool = False) -> Any:
    """The layer or tensor of that path, by the tables of modules alone; None if there is none."""
    *parents, name = path.split(".")
    for parent in parents:
        found = root._modules.get(parent)
        if found is None:
            return None
        root = found
    if tensor:
        return root._parameters.get(name, root._buffers.get(name))
    layer = root._modules.get(name)
    return None if type(layer) is nn.Module else layer


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
