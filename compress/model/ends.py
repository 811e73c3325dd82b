"""What a forward takes and gives, as users write it: keywords, dataclasses, tuples in tuples, None among them.

All else here calls a module with tensors by position, and takes from it a tensor, a tuple or a dict of tensors.
A module of any other kind is made such a one when it is loaded.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from compress.console.wording import counted
from compress.errors import CheckpointError
from compress.signature import TensorSpec

__all__ = ["is_plain", "keywords_to_places", "left_out", "outputs_of", "plain_outputs"]

_FIELDS = "a tensor, or a tuple, dict, NamedTuple or dataclass of tensors"


def outputs_of(result: Any) -> dict[str, Any]:
    """The tensors of what a forward gave, by name: `output`, `output_0`…, keys of a dict, fields of a dataclass or
    a NamedTuple.

    What holds others gives its name to theirs: `state_0`, `state_1` are of a tuple `state`.

    Raises:
        CheckpointError: there is none among it, or two have one name.
    """
    pairs = list(_named(result))
    found = dict(pairs)
    if found and len(found) == len(pairs):
        return found
    told = f"its forward gives a {type(result).__name__}"
    why = f"{told}; {_FIELDS} works" if not pairs else f"{told}, in which {counted(len(pairs), 'tensors')} share names"
    raise CheckpointError(
        "can't use the model's output", why=why, mend="wrap the model in a module whose forward gives one of these"
    )


def _named(result: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors by name, in order; all else is passed over. While torch.fx traces, what stands for a tensor is one."""
    if isinstance(result, torch.Tensor | fx.Proxy):
        yield name or "output", result
    for key, value in _parts(result, name):
        yield from _named(value, key)


def left_out(result: Any, name: str = "") -> Iterator[str]:
    """What of a forward's result is no tensor, in words; a field or a key that is None says itself that nothing is."""
    for key, value in _parts(result, name):
        if value is None:
            if isinstance(result, list | tuple) and not _fields(result):
                yield f"{key} (None)"
        elif not isinstance(value, torch.Tensor):
            if not _holds(value):
                yield f"{key} ({type(value).__name__})"
            yield from left_out(value, key)


def _taken_by(module: nn.Module, specs: Sequence[TensorSpec]) -> tuple[str | None, ...]:
    """For each input the keyword that it is given by; None for one that goes by its position.

    They go by name where all are named as parameters are, those that it needs among them, and where the forward takes
    them in no other way.
    """
    parameters = inspect.signature(module.forward).parameters
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    by_position = [n for n, kind in kinds.items() if kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)]
    either = [name for name, kind in kinds.items() if kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)]
    names = [spec.name for spec in specs]
    if names == by_position[: len(names)]:
        return (None,) * len(names)
    needed = {name for name in either if parameters[name].default is inspect.Parameter.empty}
    if needed <= set(names) <= set(either):
        return tuple(names)
    only = {name for name, kind in kinds.items() if kind is kind.KEYWORD_ONLY}
    variadic = inspect.Parameter.VAR_POSITIONAL in kinds.values()
    rest = [name for name in names if name not in only]
    if len(rest) > len(by_position) and not variadic and inspect.Parameter.VAR_KEYWORD in kinds.values():
        only |= set(rest) - set(by_position)
    return tuple(name if name in only else None for name in names)


def keywords_to_places(module: nn.Module, specs: Sequence[TensorSpec]) -> None:
    """Have a module take all inputs by position, in place, where any has to go by its keyword.

    Args:
        module: any that is no TorchScript.
        specs: its inputs, in order.
    """
    if any(keywords := _taken_by(module, specs)):
        _become(module, keywords, lambda result: result)


def plain_outputs(module: nn.Module, specs: Sequence[TensorSpec]) -> None:
    """Have a module that takes its inputs by position give a dict of tensors, in place: `outputs_of` what it gave."""
    _become(module, (None,) * len(specs), outputs_of)


def _become(module: nn.Module, keywords: tuple[str | None, ...], give: Callable[[Any], Any]) -> None:
    """By another class of its own, so that its layers keep their names, and torch.fx follows it where it did."""
    kind = type(module)
    space: dict[str, Any] = {"forward": _forward(kind.forward, keywords, give)}
    if not kind.__module__.startswith("torch."):  # what it does is the user's code still
        space |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), space)


def _forward(
    inner: Callable[..., Any], keywords: tuple[str | None, ...], give: Callable[[Any], Any]
) -> Callable[..., Any]:
    """A forward with a parameter for each input: torch.fx counts them, and the exporter."""

    def given(self: nn.Module, tensors: tuple[Any, ...]) -> Any:
        pairs = list(zip(keywords, tensors, strict=True))
        positional = [tensor for keyword, tensor in pairs if keyword is None]
        return give(inner(self, *positional, **{keyword: tensor for keyword, tensor in pairs if keyword}))

    space: dict[str, Any] = {}
    names = ", ".join(f"input_{place}" for place in range(len(keywords)))
    code = f"def made(given):\n    def forward(self, {names}): return given(self, ({names},))\n    return forward"
    exec(code, space)  # noqa: S102
    found: Callable[..., Any] = space["made"](given)
    found.__module__ = __name__
    return found


def is_plain(result: Any) -> bool:
    """Whether all else takes it as it is: torch.fx and the exporter know no dataclass, and write no number."""
    if isinstance(result, Mapping):
        return all(value is None or isinstance(value, torch.Tensor) for value in result.values())
    if isinstance(result, list | tuple):
        return not _fields(result) and all(isinstance(value, torch.Tensor) for value in result)
    return isinstance(result, torch.Tensor)


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    stem = f"{name}_" if name else ""
    if isinstance(value, Mapping):
        yield from ((f"{stem}{key}", each) for key, each in value.items())
    elif fields := _fields(value):
        yield from ((f"{stem}{field}", getattr(value, field)) for field in fields)
    elif isinstance(value, list | tuple):
        yield from ((f"{name or 'output'}_{place}", each) for place, each in enumerate(value))


def _fields(value: Any) -> tuple[str, ...]:
    """Of a dataclass or a NamedTuple."""
    if isinstance(value, type):
        return ()
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    return tuple(getattr(value, "_fields", ())) if isinstance(value, tuple) else ()


def _holds(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or bool(_fields(value))
