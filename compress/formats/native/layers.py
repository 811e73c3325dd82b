"""Layers of `torch.nn` as plain data: the class by name, its constructor's arguments, its tensors, its children.

A layer that comes from a file is made anew by its class's constructor, from plain arguments, and gets the file's
tensors. Nothing else of the file's object reaches it: no hooks, no methods, no attributes. That what was made has the
same attributes as what was described is checked.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from compress.formats.native.layer_classes import CLASSES, CONTAINERS
from compress.formats.native.plain_values import plain, shown
from compress.formats.pickles.names import Global, Instance

__all__ = ["LayerError", "Made", "clean", "layer_of", "plain_name", "record_of", "refuse_changed", "refuse_many"]

Record = dict[str, Any]
Made = dict[int, tuple[nn.Module, int]]
"""By a record's id, its layer, and how many layers are reached through it, each as often as it is used."""

_ACTIVATIONS = {"torch.nn.functional.relu": "relu", "torch.nn.functional.gelu": "gelu", "torch._C._nn.gelu": "gelu"}

_MODULE = vars(nn.Module())
_HOOKS = {name for name in _MODULE if "hook" in name and isinstance(_MODULE[name], dict)}
_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
# Made by the constructor from the arguments and the tensors; a module's own tensors never stand here.
_DERIVED = {"activation", "_flat_weights", "_flat_weight_refs"}
_WORD = re.compile(r"(?!__)[A-Za-z0-9_]{1,100}")
_DEPTH = 32
_REACHED = 100_000  # a layer that stands eight times in one that stands eight times in… is called 8^30 times
_RESERVED = set(dir(nn.Module())) | {"graph", "meta", "code"}


class LayerError(Exception):
    """It is no layer of torch.nn, or more than one."""


def plain_name(word: Any) -> str:
    """A module's or tensor's own name.

    Raises:
        LayerError: it is no plain word, or one that modules use themselves.
    """
    if type(word) is not str or not _WORD.fullmatch(word) or word in _RESERVED:
        raise LayerError(f"{shown(word)} is not a plain name")
    return word


def record_of(layer: Any, met: dict[int, Any], depth: int = 0) -> Record:
    """What describes a layer.

    Args:
        layer: a module of torch.nn, or a pickle's description of one.
        met: by id, the tensors and layers that were met before, of this module; one that is shared stays one.

    Raises:
        LayerError: it is no layer of torch.nn, or its attributes are none of that class.
    """
    if id(layer) in met:
        return met[id(layer)]  # type: ignore[no-any-return]
    name, state = _described(layer)
    if depth > _DEPTH:
        raise LayerError("its layers are nested too deep")
    children = {
        plain_name(child): None if inner is None else record_of(inner, met, depth + 1)
        for child, inner in _mapping(state, "_modules").items()
    }
    parameters = {plain_name(key): clean(value, met) for key, value in _mapping(state, "_parameters").items()}
    buffers = {plain_name(key): clean(value, met) for key, value in _mapping(state, "_buffers").items()}
    foreign = isinstance(layer, Instance)
    own = {key: value if foreign else _bare(value) for key, value in state.items() if key not in _MODULE}
    if foreign:
        for key in sorted(_HOOKS & state.keys()):
            if type(state[key]) not in (dict, OrderedDict) or state[key]:
                raise LayerError(f"a {name} of it has hooks ({key}), which are code")
        for key, value in own.items():
            if type(key) is not str or not (key in _DERIVED or plain(value)):
                raise LayerError(f"a {name} of it has {shown(key)}, which is no attribute of one")
    record: Record = {"class": name, "parameters": parameters, "buffers": buffers, "children": children}
    if name not in CONTAINERS:
        record["arguments"] = _arguments(name, own, parameters, children)
        made = layer_of(record)
        for key, value in own.items():
            want = vars(made).get(key, value)
            if key not in _DERIVED and plain(want) and (not plain(value) or value != want):
                raise LayerError(f"the {shown(key)} of a {name} of it is {shown(value)}, not {shown(want)}")
    met[id(layer)] = record
    return record


def refuse_changed(layer: nn.Module, *, inside: bool = False) -> None:
    """Refuse a module that does more than its class says, whose description would leave that out.

    Hooks of torch itself are left: they hold sizes against what was exported, or weights that are folded elsewhere.

    Args:
        layer: whose description it is.
        inside: whether the layers in it are described with it, and not followed.

    Raises:
        LayerError: it has hooks around its forward, or a forward of its own.
    """
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if "forward" in vars(layer):
        raise LayerError(f"someone gave this {kind} another forward")
    for inner in layer.modules() if inside else [layer]:
        hooks = (*inner._forward_hooks.values(), *inner._forward_pre_hooks.values())
        if any(not _torchs(hook) for hook in hooks):
            raise LayerError(f"a {type(inner).__qualname__} of it has a hook around its forward, which is code")
    forward = getattr(type(layer).forward, "__module__", None) or kind
    if kind.startswith("torch.nn.") and forward.partition(".")[0] != "torch":
        raise LayerError(f"someone gave all {kind} another forward")


def _torchs(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] in ("torch", "compress")


def refuse_many(reached: int) -> None:
    """Refuse so many layers, of which torch goes through each as often as it is used.

    Raises:
        LayerError: there are more than a model has.
    """
    if reached > _REACHED:
        raise LayerError(f"it has more than {_REACHED:,} layers, each counted as often as it is used")


def layer_of(record: Any, made: Made | None = None, depth: int = 0) -> nn.Module:
    """Make a layer.

    Args:
        record: what `record_of` gives, or a file that says it is that.
        made: those made before: a layer that is used twice stays one.

    Raises:
        LayerError: it describes no layer of torch.nn, its tensors don't fit, or too many layers are in it.
    """
    made = {} if made is None else made
    if id(record) in made:
        return made[id(record)][0]
    if type(record) is not dict or depth > _DEPTH:
        raise LayerError("it holds what is no description of a layer")
    name, children = record.get("class"), _mapping(record, "children")
    inner = {
        plain_name(key): None if child is None else layer_of(child, made, depth + 1) for key, child in children.items()
    }
    reached = 1 + sum(made[id(child)][1] for child in children.values() if child is not None)
    refuse_many(reached)
    parameters, buffers = _mapping(record, "parameters"), _mapping(record, "buffers")
    if type(name) is str and name in CONTAINERS:
        layer = CONTAINERS[name]()
        if parameters or buffers:
            raise LayerError(f"a {name} of it has tensors of its own")
    elif type(name) is str and name in CLASSES:
        layer = _constructed(name, record.get("arguments"), inner, parameters)
        if layer._modules.keys() != inner.keys():
            raise LayerError(f"a {name} of it has the parts {', '.join(inner)}, not {', '.join(layer._modules)}")
    else:
        raise LayerError(f"{shown(name)} is no layer that is known here")
    for key, child in inner.items():
        layer._modules.pop(key, None)
        try:
            layer.add_module(key, child)
        except KeyError as err:
            raise LayerError(f"a {name} of it has a part named {key}, which is a method") from err
    for kind, given, slots in (("parameter", parameters, layer._parameters), ("buffer", buffers, layer._buffers)):
        if given.keys() != slots.keys():
            raise LayerError(f"a {name} of it has the {kind}s {shown(list(given))}, not {shown(list(slots))}")
        for key, value in given.items():
            slot = slots[key]
            if value is not slot and not (slot is not None and _plain_tensor(value) and value.shape == slot.shape):
                raise LayerError(f"the {kind} {shown(key)} of a {name} of it does not fit its sizes")
            if value is not None:
                _put(layer, key, value, kind)
    made[id(record)] = layer, reached
    return layer


def _put(layer: nn.Module, key: str, value: torch.Tensor, kind: str) -> None:
    if kind == "parameter" and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=value.is_floating_point())
    setattr(layer, key, value)  # by its name: recurrent layers keep a list of theirs


def _constructed(
    name: str, arguments: Any, children: Mapping[str, nn.Module | None], parameters: Mapping[str, Any]
) -> nn.Module:
    """The layer as its class makes it, without memory for its tensors."""
    kind = CLASSES[name]
    if type(arguments) is not dict or not all(type(key) is str and plain(value) for key, value in arguments.items()):
        raise LayerError(f"the arguments of a {name} of it are not plain")
    if arguments.keys() - set(_constructor(name)):
        raise LayerError(f"a {name} of it has arguments that there are not: {shown(sorted(arguments))}")
    given: dict[str, Any] = dict(arguments)
    if name in ("RNN", "LSTM", "GRU") and not 0 < given.get("num_layers", 1) <= len(parameters):
        raise LayerError(f"a {name} of it has more layers than weights")
    stacked = 0
    if name in ("TransformerEncoder", "TransformerDecoder"):
        stack = children.get("layers")
        if not isinstance(stack, nn.ModuleList) or len(stack) == 0:
            raise LayerError(f"a {name} of it has no layers")
        stacked, given["num_layers"] = len(stack), 1
        given[name.removeprefix("Transformer").lower() + "_layer"] = stack[0]
        given["norm"] = children.get("norm")
    elif name == "Transformer":
        # It draws the weights of what it is given anew.
        given |= {"custom_encoder": nn.Identity(), "custom_decoder": nn.Identity()}
    elif name in ("TransformerEncoderLayer", "TransformerDecoderLayer") and "activation" in children:
        given["activation"] = children["activation"]
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            layer = kind(**given)
    except Exception as err:  # a constructor refuses what makes no sense in a way of its own
        raise LayerError(f"no {name} can be made as it is described: {err}") from err
    if stacked:
        vars(layer)["num_layers"] = stacked
        layer._modules["layers"] = nn.ModuleList()
    return layer


def _constructor(name: str) -> list[str]:
    """The names of its constructor's arguments that decide what the layer does."""
    if name in ("RNN", "LSTM", "GRU"):
        return [*_RECURRENT, *{"RNN": ["nonlinearity"], "LSTM": ["proj_size"], "GRU": []}[name]]
    taken = ("self", "args", "kwargs", "device", "dtype", "process_group", "_weight", "_freeze")
    return [key for key in inspect.signature(CLASSES[name].__init__).parameters if key not in taken]


def _arguments(
    name: str, own: Mapping[str, Any], parameters: Mapping[str, Any], children: Mapping[str, Any]
) -> dict[str, Any]:
    """What the constructor was called with, as far as it matters, from what it left behind."""
    if name not in CLASSES:
        raise LayerError(f"{shown(name)} is no layer that is known here")
    found = {key: own[key] for key in _constructor(name) if key in own and key not in _DERIVED}
    for key in _constructor(name):
        if key in parameters and key not in own:  # a bias that is there or not
            found[key] = parameters[key] is not None
    try:
        match name:
            case "PairwiseDistance":
                found["p"] = own["norm"]
            case "MultiheadAttention":
                found["bias"] = parameters["in_proj_bias"] is not None
                found["add_bias_kv"] = parameters.get("bias_k") is not None
            case "TransformerEncoderLayer" | "TransformerDecoderLayer":
                attention, linear = children["self_attn"]["arguments"], children["linear1"]["arguments"]
                found |= {
                    "d_model": attention["embed_dim"],
                    "nhead": attention["num_heads"],
                    "batch_first": attention["batch_first"],
                    "dropout": children["dropout"]["arguments"]["p"],
                    "dim_feedforward": linear["out_features"],
                    "bias": linear["bias"],
                    "layer_norm_eps": children["norm1"]["arguments"]["eps"],
                }
                if "activation" not in children:
                    found["activation"] = _activation(own.get("activation"))
    except (KeyError, TypeError) as err:
        raise LayerError(f"a {name} of it lacks {err}") from err
    if not all(plain(value) for value in found.values()):
        raise LayerError(f"a {name} of it has attributes that are not plain")
    return found


def _activation(function: Any) -> str:
    if isinstance(function, Global):
        name = function.name
    else:
        name = {F.relu: "torch.nn.functional.relu", F.gelu: "torch.nn.functional.gelu"}.get(function, "")
    if name not in _ACTIVATIONS:
        raise LayerError("a transformer's layer of it has an activation of its own")
    return _ACTIVATIONS[name]


def _described(layer: Any) -> tuple[str, Mapping[Any, Any]]:
    """The class's name, if it is one of those above, and the `__dict__`."""
    if isinstance(layer, Instance):
        module, _, name = layer.name.rpartition(".")
        known = CLASSES.get(name) or CONTAINERS.get(name)
        if known is None or not module.startswith("torch.nn.modules.") or layer.args or type(layer.state) is not dict:
            raise LayerError(f"a {layer.name[:100]!a} is no layer that is known here")
        return name, layer.state
    name = type(layer).__name__
    if type(layer) is not (CLASSES.get(name) or CONTAINERS.get(name)):
        raise LayerError(f"a {type(layer).__module__}.{name} is no torch.nn layer that is known here")
    return name, vars(layer)


def _mapping(state: Mapping[Any, Any], key: str) -> Mapping[Any, Any]:
    value = state.get(key, {})
    if type(value) not in (dict, OrderedDict):
        raise LayerError(f"its {key} are no mapping")
    return value  # type: ignore[no-any-return]


def clean(value: Any, met: dict[int, Any]) -> torch.Tensor | None:
    """The tensor without hooks and attributes of its own; the same one for the same one."""
    if value is None:
        return None
    if not _plain_tensor(value):
        raise LayerError(f"a tensor of it is a {type(value).__name__}")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise LayerError("a tensor of it is sparse, quantized, or without memory")
    if id(value) not in met:
        bare = torch.Tensor.detach(value)
        met[id(value)] = nn.Parameter(bare, value.requires_grad) if isinstance(value, nn.Parameter) else bare
    return met[id(value)]  # type: ignore[no-any-return]


def _plain_tensor(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter)


def _bare(value: Any) -> Any:
    """A number or text of a module at hand, of the exact type: sizes are often numpy's, or torch.Size."""
    if isinstance(value, tuple):
        return tuple(_bare(item) for item in value)
    if value is None or isinstance(value, bool):
        return value
    kinds: tuple[tuple[type, type], ...] = ((numbers.Integral, int), (numbers.Real, float), (str, str))
    return next((exact(value) for kind, exact in kinds if isinstance(value, kind)), value)
