"""The layers of an exported program, found again: torch.export leaves operators on tensors, which can't be pruned.

An operator that takes weights becomes the layer of `torch.nn` that has them, under the name that they had; the others
become the functions and methods of torch that `compress.formats.native.words` can write. What has no such form is told,
and the program stays as it is.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn import functional as F

from compress.formats.exported.placed import Placed
from compress.vetting.calls.functions import functions, methods

__all__ = ["NoLayersError", "layered"]

aten = torch.ops.aten
# What only looks, or gives what it is given.
_CHECKS = {
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size",
}  # fmt: skip
_AS_GIVEN = {"alias", "detach", "detach_", "lift_fresh"}
# Where a tensor lies is decided when the module is run.
_PLACING = {"device", "layout", "pin_memory", "non_blocking", "memory_format", "copy"}
_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor,
    "_softmax": torch.softmax,
}  # fmt: skip
_CONVOLUTIONS: Mapping[str, type[nn.Module]] = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}
_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_SPACES = (
    (torch, "torch", ""), (F, "torch.nn.functional", ""), (torch.linalg, "torch.linalg", "linalg_"),
    (torch.special, "torch.special", "special_"),
)  # fmt: skip
_NORMALIZING = ("batch_norm", "_native_batch_norm_legit_no_training")


class NoLayersError(Exception):
    """A program uses what has no form as layers and functions of tensors; says what."""


def layered(program: ExportedProgram, prefix: str = "") -> fx.GraphModule:
    """The program as a module of layers, in evaluation mode; its parameters are the program's own.

    Args:
        program: of `torch.export.export`, before any decomposition, of a module in evaluation mode.
        prefix: taken off the names of weights.

    Returns:
        A module that takes the program's inputs by position, and gives what it gives: a tensor, or a dict of tensors.

    Raises:
        NoLayersError: an operator of it is none of a graph that could be saved.
    """
    if any(name.endswith("_") and not name.endswith("__") and name not in ("detach_",) for name in _names(program)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of itself
            program = program.run_decompositions({})  # what works in place becomes what gives anew
    return _Layering(program, prefix).made()


def _names(program: ExportedProgram) -> set[str]:
    targets = (node.target for node in program.graph.nodes)
    return {target._schema.name.split("::")[1] for target in targets if isinstance(target, torch._ops.OpOverload)}


class _Layering:
    def __init__(self, program: ExportedProgram, prefix: str) -> None:
        self._program, self._prefix = program, prefix
        self._placed, self._graph = Placed(), fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        self._tensors: dict[fx.Node, tuple[str, torch.Tensor]] = {}  # weights and constants, by their names
        self._first: fx.Node | None = None

    def made(self) -> fx.GraphModule:
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in self._program.graph_signature.output_specs):
            raise NoLayersError("it changes its inputs or its buffers")
        held: dict[str, tuple[str, torch.Tensor]] = {}
        for spec in self._program.graph_signature.input_specs:
            if spec.kind is not InputKind.USER_INPUT and spec.target is not None:
                tensors = {**self._program.state_dict, **self._program.constants}
                tensor = tensors.get(spec.target)
                if not isinstance(tensor, torch.Tensor):
                    raise NoLayersError(f"{spec.target} is no tensor")
                held[spec.arg.name] = spec.target.removeprefix(self._prefix), tensor
        for node in self._program.graph.nodes:
            if node.op == "placeholder" and node.name in held:
                self._tensors[node] = held[node.name]
            elif node.op == "placeholder":
                self._made[node] = self._graph.placeholder(node.name)
                self._first = self._first or self._made[node]
            elif node.op == "call_function":
                self._made[node] = self._call(node)
            elif node.op == "output":
                self._graph.output(self._outputs(node.args[0]))
            else:
                raise NoLayersError(f"{node.target} holds a graph of its own")
        module = fx.GraphModule(self._placed.root, self._graph)
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
        return module.eval()

    def _outputs(self, given: Any) -> Any:
        values = [self._value(value) for value in given]
        tree = self._program.call_spec.out_spec
        found = torch.utils._pytree.tree_unflatten(values, tree) if tree is not None else values
        return dict(found) if isinstance(found, Mapping) else found

    def _call(self, node: fx.Node) -> Any:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            if isinstance(target, torch._ops.HigherOrderOperator):
                raise NoLayersError(f"{target} holds a graph of its own")
            if target is operator.getitem and node.args[0].target is aten._native_batch_norm_legit_no_training.default:  # type: ignore[union-attr]
                return self._value(node.args[0])  # the layer gives one tensor alone
            return self._graph.call_function(target, self._value(node.args), self._value(dict(node.kwargs)))  # type: ignore[arg-type]
        name = target._schema.name.split("::")[1]
        if name in _CHECKS:
            return None
        if name in _AS_GIVEN:
            return self._value(node.args[0])
        layer = self._layer(name, node)
        if layer is not None:
            path, taken = layer
            return self._graph.call_module(path, (self._value(taken),))
        return self._function(name, target, node)

    # Layers

    def _layer(self, name: str, node: fx.Node) -> tuple[str, Any] | None:
        """The path of the layer that an operator stands for, and what it takes; None if it is none."""
        given = _arguments(node)
        if name == "linear" and self._weights(given, "weight", "bias"):
            weight = given["weight"]
            outputs, inputs = self._tensors[weight][1].shape
            bias = given["bias"] is not None
            return self._named(nn.Linear, (inputs, outputs, bias), given, ("weight", "bias")), given["input"]
        if name in _CONVOLUTIONS and self._weights(given, "weight", "bias"):
            return self._convolution(_CONVOLUTIONS[name], given), given["input"]
        if name == "embedding" and self._weights(given, "weight"):
            rows, width = self._tensors[given["weight"]][1].shape
            pad = given["padding_idx"] if given["padding_idx"] >= 0 else None
            return self._named(nn.Embedding, (rows, width, pad), given, ("weight",)), given["indices"]
        if name == "layer_norm" and self._weights(given, "weight", "bias"):
            norm = (tuple(given["normalized_shape"]), given["eps"], True, given["bias"] is not None)
            return self._named(nn.LayerNorm, norm, given, ("weight", "bias")), given["input"]
        if name == "group_norm" and self._weights(given, "weight", "bias") and given["bias"] is not None:
            groups = (given["num_groups"], len(self._tensors[given["weight"]][1]), given["eps"])
            return self._named(nn.GroupNorm, groups, given, ("weight", "bias")), given["input"]
        if name in _NORMALIZING and not given.get("training", False):
            return self._batch_norm(given)
        if name == "dropout":
            path = self._placed.put(f"{node.name}_layer", nn.Dropout(given["p"]))
            return path, given["input"]
        return None

    def _convolution(self, kind: type[nn.Module], given: Mapping[str, Any]) -> str:
        weight = self._tensors[given["weight"]][1]
        dims, padding = weight.ndim - 2, given["padding"]
        form = (
            weight.shape[1] * given["groups"],
            weight.shape[0],
            tuple(weight.shape[2:]),
            _spread(given["stride"], dims),
            padding if isinstance(padding, str) else _spread(padding, dims),
            _spread(given["dilation"], dims),
            given["groups"],
            given["bias"] is not None,
        )
        return self._named(kind, form, given, ("weight", "bias"))

    def _batch_norm(self, given: Mapping[str, Any]) -> tuple[str, Any] | None:
        names = ("weight", "bias", "running_mean", "running_var")
        if not all(given[name] in self._tensors for name in names):
            return None
        kind = _BATCH_NORMS.get(given["input"].meta["val"].ndim)
        if kind is None:
            return None
        form = (len(self._tensors[given["weight"]][1]), given["eps"], given["momentum"])
        return self._named(kind, form, given, names), given["input"]

    def _weights(self, given: Mapping[str, Any], name: str, *others: str) -> bool:
        """Whether an operator's weight is one of the network's, and the others, too, or not there."""
        parameters = [given[name], *(given[other] for other in others if given[other] is not None)]
        return all(node in self._tensors and self._tensors[node][1].is_floating_point() for node in parameters)

    def _named(
        self, kind: type[nn.Module], form: tuple[Any, ...], given: Mapping[str, Any], names: tuple[str, ...]
    ) -> str:
        held = {name: None if given[name] is None else self._tensors[given[name]] for name in names}
        return self._placed.layer(kind, form, held)

    # Functions

    def _function(self, name: str, target: torch._ops.OpOverload, node: fx.Node) -> Any:
        args, kwargs = self._value(tuple(node.args)), self._value(dict(node.kwargs))
        match name:
            case "sym_size":
                return self._graph.call_method("size", args)
            case "slice":
                return self._sliced(*args, **kwargs)
            case "index":
                places = tuple(slice(None) if index is None else index for index in args[1])
                return self._graph.call_function(operator.getitem, (args[0], places))
            case "to" | "_to_copy":
                return self._converted(node, args[0])
            case "view" | "_unsafe_view":  # memory may lie otherwise than where it was exported
                return self._graph.call_method("reshape", args)
            case "lift_fresh_copy" | "clone":
                return self._graph.call_method("clone", args[:1])
            case "contiguous":
                return self._graph.call_method("contiguous", args[:1])
            case "where" if target._overloadname.startswith("Scalar") or name == "where":
                return self._graph.call_function(torch.where, args)
        placed = "device" in kwargs and kwargs["device"] is not None
        kwargs = {key: value for key, value in kwargs.items() if key not in _PLACING and value is not None}
        if placed and not _takes_self(target) and self._first is not None:
            kwargs["device"] = self._graph.call_function(getattr, (self._first, "device"))
        if name in _OPERATORS:
            return self._graph.call_function(_OPERATORS[name], args[:2], kwargs)
        if _takes_self(target) and name in methods() and isinstance(args[0], fx.Node):
            return self._graph.call_method(name, args, kwargs)
        for space, told, begins in _SPACES:
            word = name.removeprefix(begins)
            if name.startswith(begins) and f"{told}.{word}" in functions():
                return self._graph.call_function(getattr(space, word), args, kwargs)
        raise NoLayersError(f"{target} is no function that a model file may name")

    def _sliced(self, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
        everything = isinstance(end, int) and end >= (1 << 62)
        part = slice(start if start != 0 else None, None if everything else end, None if step == 1 else step)
        if isinstance(part.start, type(None)) and part.stop is None and part.step is None:
            return x
        axes: Any = (..., part, *[slice(None)] * (-1 - dim)) if dim < 0 else (*[slice(None)] * dim, part)
        return self._graph.call_function(operator.getitem, (x, axes))

    def _converted(self, node: fx.Node, x: Any) -> Any:
        """To another dtype; where a tensor lies is no matter of the graph's."""
        given, made = node.args[0], node.meta["val"]
        if isinstance(given, fx.Node) and given.meta["val"].dtype == made.dtype:
            return x
        return self._graph.call_method("to", (x, made.dtype))

    def _value(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value in self._tensors and value not in self._made:
                name, tensor = self._tensors[value]
                parameter = isinstance(tensor, nn.Parameter)
                # One that a layer has, too, is read under a name of its own, and is the same.
                kept = self._placed.parameter(tensor) if parameter else tensor.detach()
                path = self._placed.put(f"{name}_read", kept)
                self._made[value] = self._graph.get_attr(path)
            return self._made[value]
        if isinstance(value, list | tuple):
            kind = list if isinstance(value, list) else tuple
            return kind(self._value(each) for each in value)
        if isinstance(value, dict):
            return {key: self._value(each) for key, each in value.items()}
        return value


def _arguments(node: fx.Node) -> dict[str, Any]:
    """An operator's arguments by name, defaults and all."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)  # noqa: S101
    names = [argument.name for argument in target._schema.arguments]
    given = {argument.name: argument.default_value for argument in target._schema.arguments}
    return given | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _takes_self(target: torch._ops.OpOverload) -> bool:
    arguments = target._schema.arguments
    return bool(arguments) and arguments[0].name == "self" and str(arguments[0].type) == "Tensor"


def _spread(value: Any, dims: int) -> tuple[int, ...]:
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    return found * dims if len(found) == 1 else found
