"""Inputs and outputs that ONNX Runtime takes for granted: a file that leaves one of them out ends the process.

A node leaves one out by an empty name. In a function it does so, too, by the name of an input of the function that a
call leaves out.

Source: found by opening a model of each operator of ONNX Runtime 1.31 with each of its inputs and outputs left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Function", "Gaps", "absent_in", "needs"]

Called = tuple[str, str]  # an operator's domain and name
_ALL = range(1 << 31)
_INPUTS: Mapping[Called, Sequence[int]] = {
    **{("", name): _ALL for name in ("Einsum", "LayerNormalization", "Max", "Mean", "Min", "Sum")},
    ("", "DFT"): (2,),
}
_OUTPUTS: Mapping[Called, Sequence[int]] = {("", "Split"): _ALL, ("", "If"): _ALL}


def needs(called: Called, at: int, *, output: bool = False) -> bool:
    """Whether ONNX Runtime ends where that operator's input (or output) at that place is left out."""
    return at in (_OUTPUTS if output else _INPUTS).get(called, ())


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


@dataclass
class Function:
    """A function of a file.

    Attributes:
        inputs: their names.
        nodes: of it and of the bodies in it: what each calls, with the names of what it reads.
    """

    inputs: Sequence[str] = ()
    nodes: list[tuple[Called, Sequence[str]]] = field(default_factory=list)

    def readers(self) -> Mapping[str, list[tuple[Called, int]]]:
        """By name of a tensor, what reads it, and as which of its inputs."""
        found: dict[str, list[tuple[Called, int]]] = {}
        for called, inputs in self.nodes:
            for at, name in enumerate(inputs):
                found.setdefault(name, []).append((called, at))
        return found


def absent_in(
    calls: Mapping[Called, Gaps], functions: Mapping[Called, Sequence[Function]]
) -> Iterator[tuple[str, str]]:
    """Operators in functions that lack an input which they need, since a call leaves out an input of the function.

    Args:
        calls: of the graph and the bodies in it.
        functions: by what calls them; several under one name are overloads, of which each may be meant.

    Yields:
        The operator's name, and that of the function's input.
    """
    reached: dict[Called, Gaps] = {}
    readers: dict[Called, list[tuple[Sequence[str], Mapping[str, list[tuple[Called, int]]]]]] = {}
    seen: set[tuple[Called, int]] = set()
    waiting: list[tuple[Called, int]] = []
    within: list[tuple[Called, Sequence[str]]] = []

    def call(called: Called, count: int, empty: Iterable[int]) -> None:
        """Each place of each function is looked at once, however often the function is called."""
        known = reached.get(called)
        last = max(len(each.inputs) for each in functions[called]) if known is None else known.count
        waiting.extend((called, at) for at in (*range(count, last), *empty))
        if known is not None:
            known.count = min(known.count, count)
            return
        reached[called] = Gaps(count, set())
        readers[called] = [(each.inputs, each.readers()) for each in functions[called]]
        within.extend(node for each in functions[called] for node in each.nodes)

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
        for names, read_by in readers[called]:
            for reader, where in read_by.get(names[at], ()) if at < len(names) else ():
                if needs(reader, where):
                    yield reader[1], names[at]
                if reader in functions:
                    waiting.append((reader, where))
