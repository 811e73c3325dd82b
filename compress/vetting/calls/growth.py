"""How long Python's own numbers, lists and texts get in a graph: a few squares make one that no memory holds.

Tensors are as large as they are, and a kernel that makes one can be interrupted; a product of two numbers of gigabytes
can't. So sizes, and what is calculated of them, are followed from node to node, before anything is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

__all__ = ["Growth", "GrowthError"]

_MOST = 1 << 16
_NUMBER = (
    "dim element_size get_device is_complex is_contiguous is_floating_point is_nonzero is_same_size is_signed item "
    "ndimension nelement numel storage_offset allclose equal"
)
_NUMBERS = frozenset(_NUMBER.split())
_ROWS = ("size", "stride", "tolist", "dim_order", "type")
_SYMBOLIC = ("torch.sym_", "torch.broadcast_shapes", "torch.functional.broadcast_shapes")
_OF_TENSORS = ("builtins.len", "builtins.int", "builtins.float", "_operator.index", "_operator.truth", "_operator.not_")


class GrowthError(Exception):
    """A number, list or text of it can get longer than any network needs."""


@dataclass(frozen=True)
class _Length:
    """At most so many bits, or items in a row."""

    most: int
    row: bool


class Growth:
    """What the nodes so far give: those that may be no tensor, with their length."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, _Length] = {}

    def add(self, node: fx.Node, name: str) -> None:
        """Follow one more node.

        Args:
            node: of a graph that was checked.
            name: of its function, as in a file.

        Raises:
            GrowthError: what it gives can be too long.
        """
        found = self._of(node, name)
        if found is not None and found.most > _MOST:
            raise GrowthError(f"{name} makes a number, a list or a text that no network needs")
        if found is not None:
            self._known[node] = found

    def _of(self, node: fx.Node, name: str) -> _Length | None:
        first = node.args[0] if node.args else None
        if node.op == "call_method":
            if isinstance(first, fx.Node) and first in self._known:
                return self._known[first]
            given = len(node.args) > 1 or bool(node.kwargs)
            if name in _ROWS and not (name == "type" and given):
                return _Length(64, row=name != "size" or not given)
            return _Length(64, row=False) if name in _NUMBERS else None
        if node.op != "call_function":
            return None
        if name == "builtins.getattr":
            if node.args[1:] == ("shape",):
                return _Length(64, row=True)
            return self._known.get(first) if isinstance(first, fx.Node) else None
        if name.startswith(_SYMBOLIC):
            return self._calculated(name, self._lengths(node))
        if name.startswith("torch."):
            return _Length(64, row=False) if name.rpartition(".")[2] in _NUMBERS else None
        if name in _OF_TENSORS:
            return _Length(64, row=False)
        lengths = self._lengths(node)
        if any(length is None for length in lengths):  # a tensor is in it, and is what comes out
            return None
        if name == "_operator.getitem":
            container = lengths[0] if lengths else None
            part = len(node.args) > 1 and isinstance(node.args[1], slice)
            return None if container is None else _Length(container.most, row=container.row and part)
        return self._calculated(name, lengths, node.args)

    def _lengths(self, node: fx.Node) -> list[_Length | None]:
        return [self._length(value) for value in (*node.args, *node.kwargs.values())]

    def _length(self, value: Any) -> _Length | None:
        """Of an argument; None where it is a tensor, or holds one."""
        if isinstance(value, fx.Node):
            return self._known.get(value)
        if isinstance(value, list | tuple | dict):
            parts = [self._length(part) for part in (value.values() if isinstance(value, dict) else value)]
            known = [part.most for part in parts if part is not None]
            return None if len(known) < len(parts) else _Length(sum(known), row=True)
        if isinstance(value, str):
            return _Length(8 * len(value), row=True)
        if isinstance(value, slice):
            return _Length(64, row=False)
        return _Length(value.bit_length() if isinstance(value, int) else 64, row=False)

    def _calculated(self, name: str, lengths: list[_Length | None], args: tuple[Any, ...] = ()) -> _Length:
        known = [length for length in lengths if length is not None]
        longest = max((length.most for length in known), default=64)
        total = sum(length.most for length in known)
        row = any(length.row for length in known)
        if name.startswith("math."):  # prod and lcm multiply
            return _Length(64 + 64 * total, row=False)
        match name.removeprefix("_operator.").removeprefix("i"):
            case "mul":
                times = max((arg for arg in args if isinstance(arg, int)), default=_MOST) if row else 1
                return _Length(total * max(times, 1), row)
            case "pow" | "lshift" | "mod" if row:
                return _Length(_MOST + 1, row)
            case "pow" | "lshift":
                power = args[1] if len(args) > 1 and isinstance(args[1], int | float) else _MOST
                return _Length(int(max(longest, 1) * max(abs(power), 1)), row=False)
            case "add" if row:
                return _Length(total, row)
        return _Length(64 + total if name == "builtins.sum" else longest + 1, row)
