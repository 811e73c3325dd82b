"""A module from what a checkpoint holds: a pickled module, or weights and a factory that gives the module for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from compress.console.wording import counted
from compress.errors import CheckpointError
from compress.formats.keys import BESIDES, fitted
from compress.formats.native.layers import LayerError, layer_of, record_of
from compress.formats.pickles.names import Instance
from compress.options.user_code import user_code

__all__ = ["module_of"]

_USUAL = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
_DEPTH = 3


def module_of(content: Any, path: Path, factory: str | None) -> nn.Module:
    """The module that a checkpoint's content stands for.

    Args:
        content: what `unpickle` gives.
        path: for messages.
        factory: 'package.module:name', a callable that gives the module for a state_dict.

    Raises:
        CheckpointError: there is none in it, it needs a factory, or the weights don't fit.
    """
    if isinstance(content, nn.Module):  # only from a file that is trusted
        return content
    if isinstance(content, Instance) and content.name.startswith("torch.nn."):
        try:
            return layer_of(record_of(content, {}))
        except LayerError as err:
            raise CheckpointError(
                f"won't load {path}: it is more than layers of torch.nn",
                why=str(err),
                mend="save it by compress.save(module, path, inputs=…); or, if you trust whoever made it, add --trust",
            ) from err
    state = _state_dict(content, path)
    if state is None:
        raise CheckpointError(
            f"found no model in {path}",
            why=f"it holds {_held(content)}",
            mend="save the model with compress.save(module, path, inputs=…), or torch.save(model.state_dict(), path)",
        )
    if factory is None:
        raise CheckpointError(
            f"{path} holds weights but no architecture",
            why=f"it is a state_dict of {counted(len(state), 'tensors')}",
            mend="add --model package.module:factory (a function or class that gives the module) and --input",
        )
    module = _build(factory)
    try:
        module.load_state_dict(state)  # its own hooks may know other names, too
    except RuntimeError as err:
        wanted = {key: value for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
        fit = fitted(state, wanted, path, factory)
        try:
            module.load_state_dict(fit)
        except RuntimeError:
            lines = [line.strip() for line in str(err).splitlines()[1:3]] or [str(err)]
            why = "".join(char if char.isprintable() else "?" for char in " ".join(lines)[:300])
            raise CheckpointError(
                f"the weights of {path} don't fit {factory}", why=why, mend="name the factory that made them"
            ) from err
    return module


def _held(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"a {content.name[:100]!a}" if isinstance(content, Instance) else f"a {type(content).__name__}"
    keys = [ascii(key[:40]) if isinstance(key, str) else type(key).__name__ for key in list(content)[:5]]
    return f"a dict of {', '.join(keys)}"


def _state_dict(content: Any, path: Path) -> Mapping[str, torch.Tensor] | None:
    """The state_dict in a checkpoint: the dict itself, under one of the usual names, or the only one that there is."""
    if _tensors(content):
        return content
    usual = _usual(content)
    if usual is not None:
        return usual
    found = dict(_nested(content, set()))
    likely = {name: state for name, state in found.items() if not any(word in name.lower() for word in BESIDES)}
    choice = likely or {name: state for name, state in found.items() if "optim" not in name.lower()}
    if len(choice) > 1:
        names = ", ".join(ascii(name[:60]) for name in list(choice)[:5])
        raise CheckpointError(
            f"can't tell which weights of {path} are meant",
            why=f"it holds several: {names}",
            mend="save the ones that you mean by themselves: torch.save(checkpoint['generator'], path)",
        )
    return next(iter(choice.values()), None)


def _tensors(content: Any) -> TypeGuard[Mapping[str, torch.Tensor]]:
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content.items())
    )


def _usual(content: Any, depth: int = 0) -> Mapping[str, torch.Tensor] | None:
    for name in _USUAL if isinstance(content, Mapping) and depth < _DEPTH else ():
        inner = content.get(name)
        found = inner if _tensors(inner) else _usual(inner, depth + 1)
        if found is not None:
            return found
    return None


def _nested(content: Any, seen: set[int], name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """State_dicts by their path in nested dicts, each once; a mapping of numbers alone is none."""
    if not isinstance(content, Mapping) or id(content) in seen or depth > _DEPTH:
        return
    seen.add(id(content))
    if _tensors(content):
        if any(tensor.dim() > 0 for tensor in content.values()):
            yield name, content
        return
    for key, value in content.items():
        if isinstance(key, str):
            yield from _nested(value, seen, f"{name}.{key}" if name else key, depth + 1)


def _build(factory: str) -> nn.Module:
    mend = "write --model package.module:factory, and run from the folder that holds the package, or set PYTHONPATH"
    try:
        with user_code(factory) as make:
            made = make()
    except Exception as err:  # the user's module: anything may come out of it
        raise CheckpointError(
            f"can't build the model by {factory}", why=f"{type(err).__name__}: {err}", mend=mend
        ) from err
    if not isinstance(made, nn.Module):
        raise CheckpointError(f"{factory} is no model factory", why=f"it gave a {type(made).__name__}", mend=mend)
    return made
