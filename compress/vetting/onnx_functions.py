"""What an ONNX file's functions make where their calls stand: counted before anything writes them out.

ONNX Runtime and onnx write each call out, one in the other. A few kilobytes can say so a billion nodes, or one tensor a
million times; and the calls of functions in functions are a stack of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from compress.vetting.onnx_errors import FunctionsError

__all__ = [
    "MAX_DEPTH",
    "MAX_FUNCTIONS",
    "MAX_GROWN",
    "MAX_INLINED",
    "Called",
    "Function",
    "Given",
    "bounded",
    "graphs_twice",
]

MAX_DEPTH = 64
"""Of functions that call each other: ONNX Runtime's stack takes some thousands."""
MAX_FUNCTIONS = 10_000
"""onnx's own bound."""
MAX_INLINED = 1_000_000
"""Nodes, with all calls written out."""
MAX_GROWN = 1 << 29
"""Bytes that a file may grow by where its calls are written out."""

Called = tuple[str, str, str]  # an operator's domain and name, and which of several functions of that name


@dataclass
class Given:
    """What calls of one operator give it.

    Attributes:
        name: bytes of the longest name: of a node, its operator, or a tensor.
        value: bytes of the largest attribute without a graph.
        graphs: names of attributes that are graphs.
    """

    name: int = 0
    value: int = 0
    graphs: set[str] = field(default_factory=set)

    def add(self, attribute: str, size: int, *, graph: bool) -> None:
        """One more attribute."""
        if graph:
            self.graphs.add(attribute)
        else:
            self.value = max(self.value, size)


@dataclass
class Function:
    """A function of a file.

    Attributes:
        inputs: their names.
        nodes: of it and of the bodies in it: what each calls, with the names of what it reads.
        imports: domains whose operators it says it calls.
        size: its bytes, with those that its tensors have outside of the file, or take when they are unpacked.
        names: how many its nodes have and say.
        taken: its attributes that its nodes take, by name, and how often.
        passed: of these, those that calls take: what is called, its attribute, and the function's own.
        defaults: what its attributes are where a call does not say them.
    """

    inputs: Sequence[str] = ()
    nodes: list[tuple[Called, Sequence[str]]] = field(default_factory=list)
    imports: frozenset[str] = frozenset()
    size: int = 0
    names: int = 0
    taken: dict[str, int] = field(default_factory=dict)
    passed: list[tuple[Called, str, str]] = field(default_factory=list)
    defaults: Given = field(default_factory=Given)

    def readers(self) -> Mapping[str, list[tuple[Called, int]]]:
        """By name of a tensor, what reads it, and as which of its inputs."""
        found: dict[str, list[tuple[Called, int]]] = {}
        for called, inputs in self.nodes:
            for at, name in enumerate(inputs):
                found.setdefault(name, []).append((called, at))
        return found


@dataclass(frozen=True)
class _Made:
    """By one call, with all calls in it written out."""

    nodes: int
    names: int
    size: int
    height: int  # of functions in functions


def bounded(
    calls: Iterable[Called], functions: Mapping[Called, Function], given: Mapping[Called, Given], size: int
) -> None:
    """Check that calls of functions end, and that what they make together is bounded.

    What is written out has no more bytes than are counted: each name in a function may become the longest of a call's
    and, call by call, gets another one put before it; each attribute that it takes may be the largest of a call.

    Args:
        calls: of the graph and the bodies in it.
        given: what calls give, those in functions included.
        size: bytes of the file, with those outside of it.

    Raises:
        FunctionsError: they do not.
    """
    of_calls = [given[each] for each in functions if each in given]
    longest = max((each.name for each in of_calls), default=0)
    largest = max((each.value for each in (*of_calls, *(f.defaults for f in functions.values()))), default=0)
    made: dict[Called, _Made] = {}

    def sum_of(calls: Iterable[Called], within: tuple[Called, ...], names: int = 0, own: int = 0) -> _Made:
        nodes = height = 0
        for call in calls:
            if call not in functions:
                nodes += 1
                continue
            each = of_function(call, within)
            nodes, names, height = nodes + each.nodes, names + each.names, max(height, each.height)
            own += each.size + each.names * longest
            if nodes > MAX_INLINED:
                raise FunctionsError(f"its functions make more than {MAX_INLINED:,} nodes")
            if own > MAX_GROWN + size:
                raise FunctionsError(
                    f"its functions make more than {MAX_GROWN >> 20:,} MiB of {size:,} bytes where they are called"
                )
        return _Made(nodes, names, own, height)

    def of_function(key: Called, within: tuple[Called, ...]) -> _Made:
        known = made.get(key)
        if known is None:
            if key in within or len(within) >= MAX_DEPTH:
                raise FunctionsError(_deep(key))
            function = functions[key]
            own = function.size + sum(function.taken.values()) * largest
            inner = sum_of((called for called, _ in function.nodes), (*within, key), function.names, own)
            known = made[key] = _Made(inner.nodes + 1, inner.names, inner.size, inner.height + 1)
        if len(within) + known.height > MAX_DEPTH:  # also where it was counted before what calls it
            raise FunctionsError(_deep(key))
        return known

    for key in functions:
        of_function(key, ())
    sum_of(calls, ())


def _deep(key: Called) -> str:
    return f"its function {key[1]!r} calls itself, or calls are nested too deeply"


def graphs_twice(functions: Mapping[Called, Function], given: Mapping[Called, Given]) -> tuple[str, str] | None:
    """A function, and its attribute, that is a graph and is used more than once: graphs in graphs double each time."""
    waiting = [(key, name) for key in functions if key in given for name in given[key].graphs]
    waiting += [(key, name) for key, each in functions.items() for name in each.defaults.graphs]
    seen: set[tuple[Called, str]] = set()
    passed: dict[Called, dict[str, list[tuple[Called, str]]]] = {}
    while waiting:
        place = key, name = waiting.pop()
        if place in seen or key not in functions:
            continue
        seen.add(place)
        function = functions[key]
        if function.taken.get(name, 0) > 1:
            return key[1], name
        if key not in passed:
            passed[key] = {}
            for called, attribute, own in function.passed:
                passed[key].setdefault(own, []).append((called, attribute))
        waiting += passed[key].get(name, ())
    return None
