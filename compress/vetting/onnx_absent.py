"""Inputs and outputs that ONNX Runtime takes for granted: a file that leaves one of them out ends the process.

A node leaves one out by an empty name. In a function it does so, too, by the name of an input of the function that a
call leaves out.

Source: found by opening a model of each operator of ONNX Runtime 1.31 with each of its inputs and outputs left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from compress.vetting.onnx_functions import Called, Function

__all__ = ["Gaps", "absent_in", "needs"]

_ALL = range(1 << 31)
_INPUTS: Mapping[tuple[str, ...], Sequence[int]] = {
    **{("", name): _ALL for name in ("Einsum", "LayerNormalization", "Max", "Mean", "Min", "Sum")},
    ("", "DFT"): (2,),
}
_OUTPUTS: Mapping[tuple[str, ...], Sequence[int]] = {("", "Split"): _ALL, ("", "If"): _ALL}


def needs(called: Called, at: int, *, output: bool = False) -> bool:
    """Whether ONNX Runtime ends where that operator's input (or output) at that place is left out."""
    return at in (_OUTPUTS if output else _INPUTS).get(called[:2], ())


@dataclass
class Gaps:
    """What calls of one operator leave out.

    Attributes:
        count: the fewest inputs that one of them names, empty names included.
        empty: places of empty names.
    """

    count: int
    empty: set[int]

    def add(self, count: int, empty: Sequence[int]) -> None:
        """One more call, with so many inputs, and empty names at these places."""
        self.count = min(self.count, count)
        self.empty.update(empty)


def absent_in(calls: Mapping[Called, Gaps], functions: Mapping[Called, Function]) -> Iterator[tuple[str, str]]:
    """Operators in functions that lack an input which they need, since a call leaves out an input of the function.

    Args:
        calls: of the graph and the bodies in it.
        functions: by what calls them.

    Yields:
        The operator's name, and that of the function's input.
    """
    reached: dict[Called, Gaps] = {}
    readers: dict[Called, Mapping[str, list[tuple[Called, int]]]] = {}
    seen: set[tuple[Called, int]] = set()
    waiting: list[tuple[Called, int]] = []
    within: list[tuple[Called, Sequence[str]]] = []

    def call(called: Called, count: int, empty: Iterable[int]) -> None:
        """Each place of each function is looked at once, however often the function is called."""
        known = reached.get(called)
        last = len(functions[called].inputs) if known is None else known.count
        waiting.extend((called, at) for at in (*range(count, last), *empty))
        if known is not None:
            known.count = min(known.count, count)
            return
        reached[called] = Gaps(count, set())
        readers[called] = functions[called].readers()
        within.extend(functions[called].nodes)

    for called, gaps in calls.items():
        if called in functions:
            call(called, gaps.count, gaps.empty)
    while within:
        called, inputs = within.pop()
        if called in functions:
            call(called, len(inputs), (at for at, name in enumerate(inputs) if not name))
    while waiting:
        place = called, at = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        names = functions[called].inputs
        for reader, where in readers[called].get(names[at], ()) if at < len(names) else ():
            if needs(reader, where):
                yield reader[1], names[at]
            if reader in functions:
                waiting.append((reader, where))
