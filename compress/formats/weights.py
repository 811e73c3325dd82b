"""A module from what a checkpoint holds: a pickled module, or weights and a factory that gives the module for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.console.wording import counted
from compress.errors import CheckpointError
from compress.formats.keys import State, best_of, by_other_names, fitted, misfit, words_of
from compress.formats.native.layers import LayerError, layer_of, record_of
from compress.formats.pickles.names import Instance
from compress.formats.tied import with_tied
from compress.options.user_code import user_code

__all__ = ["module_of"]

# Words of mappings of tensors that are no weights.
NO_WEIGHTS = {
    *("optim", "optims", "optimizer", "optimizers", "opt", "exp", "moments", "sched", "scheduler", "schedulers"),
    *(
        "grad",
        "grads",
        "gradients",
        "loss",
        "losses",
        "metric",
        "metrics",
        "rng",
        "scaler",
        "scales",
        "callbacks",
        "loops",
    ),
}
_DEPTH = 3
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def module_of(content: Any, path: Path, factory: str | None) -> tuple[nn.Module, str]:
    """The module that a checkpoint's content stands for, and what was assumed of the content, in words.

    Args:
        content: what `unpickle` gives.
        path: for messages.
        factory: 'package.module:name', a callable that gives the module for a state_dict.

    Raises:
        CheckpointError: there is none in it, it needs a factory, or the weights don't fit.
    """
    if isinstance(content, nn.Module):  # only from a file that is trusted
        return content, ""
    if isinstance(content, Instance) and content.name.startswith("torch.nn."):
        try:
            return layer_of(record_of(content, {})), ""
        except LayerError as err:
            raise CheckpointError(
                f"won't load {path}: it is more than layers of torch.nn",
                why=str(err),
                mend="save it by compress.save(module, path, inputs=…); or, if you trust whoever made it, add --trust",
            ) from err
    sets = dict(_sets(content, set()))
    if not sets:
        raise CheckpointError(
            f"found no model in {path}",
            why=f"it holds {_held(content)}",
            mend="save the model with compress.save(module, path, inputs=…), or torch.save(model.state_dict(), path)",
        )
    if factory is None:
        raise CheckpointError(
            f"{path} holds weights but no architecture",
            why=f"it is a state_dict of {counted(len(best_of(sets)[1]), 'tensors')}",
            mend="add --model package.module:factory (a function or class that gives the module) and --input",
        )
    module = _build(factory)
    own = module.state_dict()
    wanted = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    fit = fitted(sets, wanted, path, factory) or fitted(with_tied(sets, wanted), wanted, path, factory)
    state, assumed = fit if fit is not None else (by_other_names(sets, wanted), "")
    if state is None:
        raise misfit(sets, wanted, path, factory)
    try:
        module.load_state_dict(state, strict=len(own) == len(wanted))  # what is no tensor stays as the factory made it
    except RuntimeError as err:
        if fit is None:
            raise misfit(sets, wanted, path, factory) from err
        lines = [line.strip() for line in str(err).splitlines()[1:3]] or [str(err)]
        why = " ".join(lines)[:300]
        raise CheckpointError(
            f"the weights of {path} don't fit {factory}", why=why, mend="name the factory that made them"
        ) from err
    return module, assumed


def _held(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"a {content.name[:100]!a}" if isinstance(content, Instance) else f"a {type(content).__name__}"
    keys = [ascii(key[:40]) if isinstance(key, str) else type(key).__name__ for key in list(content)[:5]]
    return f"a dict of {', '.join(keys)}"


def _sets(content: Any, seen: set[int], name: str = "", depth: int = 0) -> Iterator[tuple[str, State]]:
    """Sets of weights by their path in nested dicts, each once: of a mapping, what is tensors in it.

    What is known not to be weights (an optimizer's moments, gradients, metrics) and numbers by themselves are none.
    """
    if not isinstance(content, Mapping) or id(content) in seen or depth > _DEPTH:
        return
    seen.add(id(content))
    state = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, torch.Tensor)}
    if any(tensor.dim() > 0 for tensor in state.values()):
        yield name, state
    for key, value in content.items():
        if isinstance(key, str) and NO_WEIGHTS.isdisjoint(words_of(key)):
            yield from _sets(value, seen, f"{name}.{key}" if name else key, depth + 1)


def _build(factory: str) -> nn.Module:
    mend = "write --model package.module:factory, and run from the folder that holds the package, or set PYTHONPATH"
    try:
        with user_code(factory) as make:
            _refuse_arguments(make, factory)
            made = make()
    except CheckpointError:
        raise
    except Exception as err:  # the user's module: anything may come out of it
        raise CheckpointError(
            f"can't build the model by {factory}", why=f"{type(err).__name__}: {err}", mend=mend
        ) from err
    if not isinstance(made, nn.Module):
        raise CheckpointError(f"{factory} is no model factory", why=f"it gave a {type(made).__name__}", mend=mend)
    return made


def _refuse_arguments(make: Any, factory: str) -> None:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # what is no function, or of C: calling it tells
        return
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
    if needed:
        name = factory.rpartition(":")[2]
        given = ", ".join(f"{each}=…" for each in needed)
        raise CheckpointError(
            f"can't build the model by {factory}",
            why=f"it needs {counted(len(needed), 'arguments')}: {', '.join(needed)}",
            mend=f"write a function, def network(): return {name}({given}) in mine.py, and --model mine:network",
        )
