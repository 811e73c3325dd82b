"""What a model is known by: all that decides its answers. Results are kept under it, so two models must never share it.

A graph that can be traced tells all of it, with its layers. Of any other, it is the code and all that it holds. What
can't be told makes a name of its own, which nothing is found under again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import warnings
from collections.abc import Hashable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import nn

from compress.console.wording import AssumedWarning
from compress.formats.native.graph import GraphError, to_data
from compress.model import TorchModel
from compress.model.answers import read_by
from compress.options.user_code import user_code
from compress.storage.hashing import digest_of_files, is_users
from compress.storage.plain_form import NoPlainFormError, PlainForms, place

__all__ = ["fingerprint_of_module", "unknown_of"]

# By module: what of it can't be told, and the name that it has instead, as long as it lives.
_unknown: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()


def fingerprint_of_module(model: TorchModel) -> str:
    """Hex SHA-256 of graph and layers (or their code) and weights; which tensors are one and the same is a part.

    Where something of it can't be told, it is another for each module that is loaded, and an AssumedWarning says why.
    """
    module = model.module
    digest = hashlib.sha256(f"{_code(model)}\n".encode())
    first: dict[int, str] = {}
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        shared = first.setdefault(id(tensor), name)
        digest.update(f"\n{name} {shared} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if shared == name:
            numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            digest.update(numbers.numpy())  # type: ignore[arg-type]  # a buffer, not a copy
    return digest.hexdigest()


def unknown_of(model: TorchModel) -> str:
    """Why nothing of a model is found again, a clause; "" where all that decides its answers is known."""
    fingerprint_of_module(model)
    return _unknown.get(model.module, ("", ""))[0]


def _code(model: TorchModel) -> str:
    module = model.module
    if isinstance(module, torch.jit.ScriptModule):
        # Its constants are in the file alone, whose entries carry no times.
        return hashlib.sha256(module.save_to_buffer()).hexdigest()
    if module in _unknown:
        return _unknown[module][1]
    try:
        return _of_graph(model)
    except (GraphError, NoPlainFormError):
        pass
    try:
        return _of_code(model)
    except NoPlainFormError as err:
        _unknown[module] = str(err), secrets.token_hex(32)
        told = f"nothing that is made of this model is taken again by a later run: {err}, which nothing tells apart"
        warnings.warn(told, AssumedWarning, stacklevel=4)
        return _unknown[module][1]


def _of_graph(model: TorchModel) -> str:
    # What a layer was made with need not be in its repr: an attention's heads, what a pool counts.
    data = to_data(model.module, inputs=len(model.signature.inputs))
    return json.dumps(PlainForms(_tensors(model.module)).of(data))


def _of_code(model: TorchModel) -> str:
    module = model.module
    modules = {type(layer).__module__ for layer in module.modules()}
    factory = model.factory.partition(":")[0]
    forms = PlainForms(_tensors(module), module)
    parts = [
        [name, getattr(layer, "code", "") if isinstance(layer, torch.fx.GraphModule) else "", forms.layer(layer)]
        for name, layer in module.named_modules()
    ]
    files = {name: _files(name) for name in sorted({*filter(is_users, modules), *filter(None, [factory])})}
    read = read_by(model)
    if read.beyond:
        raise NoPlainFormError(f"its forward asks others ({', '.join(sorted(read.beyond))})")
    return json.dumps([files, parts, repr(module), read.digests()])


def _files(module: str) -> str:
    try:
        with user_code(f"{module}:__name__"):
            return digest_of_files(module)
    except Exception:  # it was imported once, and is not there any more: what it made is told by `PlainForms`
        return ""


def _tensors(module: nn.Module) -> Mapping[Hashable, str]:
    """Names of a module's tensors by their place; their numbers are hashed under these."""
    found: dict[Hashable, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
            found.setdefault(place(tensor), name)
    return found
