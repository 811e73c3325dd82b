"""What a tensor of an ONNX graph is while the graph is taken back: known, computed when run, or a list of sizes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from compress.formats.exported.placed import Placed
from compress.formats.native.words import function_of, name_of

__all__ = ["Graph", "Live", "NotTakenBackError", "Sizes", "TooLargeError", "in_file", "is_count", "is_whole", "samples"]

MOST = 1 << 28  # elements of a tensor that is computed from constants
MOST_SIZES = 64


class NotTakenBackError(Exception):
    """An operator that has no form as a layer or function of torch here; says why."""


class TooLargeError(NotTakenBackError):
    """It would take more memory than a constant should, wherever it is computed."""


@dataclass(frozen=True, eq=False)
class Live:
    """What is computed when the graph is run.

    Attributes:
        sample: what it was once: a tensor, or a number for a size.
        counts: a number that is never negative, whatever comes in: a size, and what of sizes alone can't fall below 0.
    """

    node: fx.Node
    sample: Any
    counts: bool = False


@dataclass(frozen=True)
class Sizes:
    """Whole numbers with no axis or one, which are Python's: what shapes are computed with."""

    items: tuple[Any, ...]
    scalar: bool = False
    dtype: torch.dtype = torch.int64

    def of(self, items: tuple[Any, ...], *, scalar: bool = False) -> Sizes:
        """Others of the same type."""
        return Sizes(items, scalar, self.dtype)


class Graph:
    """A torch.fx graph that is computed on a sample while it grows; what hangs on constants alone is a constant."""

    def __init__(self) -> None:
        self.graph, self.placed = fx.Graph(), Placed()
        self.names: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []
        self._read: dict[int, fx.Node] = {}
        self._turned: dict[int, torch.Tensor] = {}
        self._once: dict[Any, torch.Tensor] = {}
        self._tables: dict[int, torch.Tensor] = {}
        self._vectors: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    def named(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A constant, whose name a layer of it will have."""
        self._kept.append(tensor)  # so that no other gets its id
        self.names[id(tensor)] = _path(name)
        return tensor

    def turned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A matrix transposed; of one that is so made, the first: what two layers share stays shared."""
        if id(tensor) not in self._turned:
            made = self.named(tensor.t().contiguous(), self.names.get(id(tensor), "weight"))
            self._turned[id(tensor)], self._turned[id(made)] = made, tensor
        return self._turned[id(tensor)]

    def once(self, part: Any, of: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """A part of a constant; of the same part the first that was made: layers of the same weights share it."""
        return self._once.setdefault((id(of), part), self.named(made, self.names.get(id(of), "weight")))

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """A function, or a method by name, of values; a constant where all of these are constants."""
        given, keyed = samples(args), samples(kwargs)
        constant = not _lives((args, kwargs))
        if constant:
            _refuse_large(function, given, keyed)
        with torch.no_grad():
            found = _applied(function, given, keyed)
        if constant:
            return self.named(found, "constant") if isinstance(found, torch.Tensor) else found
        create = self.graph.call_method if isinstance(function, str) else self.graph.call_function
        return Live(create(function, self._nodes(args), self._nodes(kwargs)), found)  # type: ignore[arg-type]

    def layer(
        self, kind: type[nn.Module], form: tuple[Any, ...], held: Mapping[str, torch.Tensor | None], *x: Any
    ) -> Live:
        """A layer of torch.nn with these weights, called with these values."""
        tensors = {
            name: None
            if each is None
            else (f"{self.names.get(id(each), 'layer').removesuffix(f'.{name}')}.{name}", each)
            for name, each in held.items()
        }
        # Exporters store equal vectors once: layers that have nothing else in common have biases of their own.
        every = tuple(id(each) for each in held.values())
        own = {name: each and (each[0], self._own(each[1], every)) for name, each in tensors.items()}
        path = self.placed.layer(kind, form, own)
        module = self.placed.root.get_submodule(path).eval()
        with torch.no_grad():
            found = module(*samples(x))
        return Live(self.graph.call_module(path, self._nodes(x)), found)

    def module(self, name: str, layer: nn.Module, x: Sequence[Any], found: Any) -> Live:
        """What a layer that is not torch's gives, which has been run."""
        path = self.placed.put(_path(name), layer)
        return Live(self.graph.call_module(path, self._nodes(tuple(x))), found)

    def table(self, tensor: torch.Tensor) -> torch.Tensor:
        """A constant that parts in ONNX read: one for all of them, and none of a layer's, which may lose channels."""
        if id(tensor) not in self._tables:
            self._kept.append(tensor)
            self._tables[id(tensor)] = self.named(tensor.detach().clone(), self.names.get(id(tensor), "table"))
        return self._tables[id(tensor)]

    def _own(self, tensor: torch.Tensor, every: tuple[int, ...]) -> torch.Tensor:
        if tensor.ndim != 1:
            return tensor
        return self._vectors.setdefault((id(tensor), every), tensor.clone())

    def size(self, x: Live, axis: int) -> Live:
        return Live(self.graph.call_method("size", (x.node, axis)), int(x.sample.shape[axis]), counts=True)

    def tensor(self, value: Any) -> Any:
        """Sizes as a tensor; any other as it is."""
        if not isinstance(value, Sizes):
            return value
        if not any(isinstance(each, Live) for each in value.items):
            return self.named(torch.tensor(value.items[0] if value.scalar else value.items, dtype=value.dtype), "sizes")
        parts = [self.call(torch.full, () if value.scalar else (1,), each, dtype=value.dtype) for each in value.items]
        return parts[0] if value.scalar else self.call(torch.cat, parts)

    def sizes(self, value: Any) -> Sizes:
        """A value as sizes.

        Raises:
            NotTakenBackError: it is computed from the inputs' values, or holds other than a few whole numbers.
        """
        if isinstance(value, Sizes):
            return value
        if isinstance(value, Live):
            raise NotTakenBackError("a size of it is computed from values of the inputs")
        if is_whole(value) and value.ndim <= 1 and value.numel() <= MOST_SIZES:
            return Sizes(tuple(value.reshape(-1).tolist()), value.ndim == 0, value.dtype)
        raise NotTakenBackError("its sizes are no list of a few whole numbers")

    def number(self, function: Callable[..., Any], one: Any, other: Any) -> Any:
        """Arithmetic of two sizes."""
        if isinstance(one, Live) or isinstance(other, Live):
            node = self.graph.call_function(function, (self._nodes(one), self._nodes(other)))
            counts = function is not operator.sub and is_count(one) and is_count(other)
            return Live(node, function(samples(one), samples(other)), counts)
        return function(one, other)

    def _nodes(self, value: Any) -> Any:
        if isinstance(value, Live):
            return value.node
        if isinstance(value, torch.Tensor):
            if id(value) not in self._read:
                self._kept.append(value)
                name = f"{self.names.get(id(value), 'constant')}_read"
                kept = self.placed.parameter(value) if value.is_floating_point() and value.ndim else value
                self._read[id(value)] = self.graph.get_attr(self.placed.put(name, kept))
            return self._read[id(value)]
        if isinstance(value, list | tuple):
            return type(value)(self._nodes(each) for each in value)
        if isinstance(value, slice):
            return slice(self._nodes(value.start), self._nodes(value.stop), value.step)
        if isinstance(value, dict):
            return {key: self._nodes(each) for key, each in value.items()}
        return value


def _path(name: str) -> str:
    return ".".join(re.sub(r"[^A-Za-z0-9_]", "_", word)[:90] or "_" for word in name.split(".")[:20])


def _applied(function: Callable[..., Any] | str, given: Any, keyed: Any) -> Any:
    if isinstance(function, str):
        return getattr(given[0], function)(*given[1:], **keyed)
    return function_of(name_of(function))(*given, **keyed)  # with what guards its kernel


def _refuse_large(function: Callable[..., Any] | str, given: Any, keyed: Any) -> None:
    """Refuse a constant that would take too much memory, by its shape: it is computed without values first.

    Raises:
        TooLargeError: it has more than `MOST` elements.
    """
    try:
        with torch.no_grad(), torch.device("meta"):
            found = _applied(function, _without_values(given), _without_values(keyed))
    except (NotImplementedError, RuntimeError):  # what it gives hangs on values; that only chooses among them
        return
    if isinstance(found, torch.Tensor) and found.numel() > MOST:
        raise TooLargeError(f"it makes a constant of {found.numel():,} elements, over {MOST:,}")


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, list | tuple):
        return type(value)(_without_values(each) for each in value)
    if isinstance(value, dict):
        return {key: _without_values(each) for key, each in value.items()}
    return value


def samples(value: Any) -> Any:
    """The values of the sample in place of what is computed."""
    if isinstance(value, Live):
        return value.sample
    if isinstance(value, list | tuple):
        return type(value)(samples(each) for each in value)
    if isinstance(value, slice):
        return slice(samples(value.start), samples(value.stop), value.step)
    if isinstance(value, dict):
        return {key: samples(each) for key, each in value.items()}
    return value


def in_file(x: list[Any], *places: int) -> None:
    """Refuse an operator whose weights, at these places, are no constants.

    Raises:
        NotTakenBackError: they are computed, or all that it gets is constant.
    """
    if not isinstance(x[0], Live):
        raise NotTakenBackError("it is of constants alone")
    if not all(x[at] is None or isinstance(x[at], torch.Tensor) for at in places if at < len(x)):
        raise NotTakenBackError("its weights are computed, and not in the file")


def _lives(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_lives, value))
    if isinstance(value, slice):
        return isinstance(value.start, Live) or isinstance(value.stop, Live)
    if isinstance(value, dict):
        return any(map(_lives, value.values()))
    return isinstance(value, Live)


def is_count(value: Any) -> bool:
    """Whether a number is never negative, at whatever sizes."""
    return value.counts if isinstance(value, Live) else bool(value >= 0)


def is_whole(value: Any) -> bool:
    """Whether it is sizes, or a constant of whole numbers: booleans are none."""
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return isinstance(value, Sizes)


ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.floordiv,
}  # fmt: skip
