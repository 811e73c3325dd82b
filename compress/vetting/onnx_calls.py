"""What an ONNX file calls, taken from its bytes as they are looked through: operators, and functions of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from compress.vetting.onnx_absent import Gaps, absent_in, needs
from compress.vetting.onnx_errors import ForeignOperatorError, FunctionsError, OnnxFileError
from compress.vetting.onnx_functions import MAX_FUNCTIONS, Called, Function, Given, bounded, graphs_twice

__all__ = ["SIZE", "Calling", "overload"]

SIZE = 0  # of a message's fields, which have other numbers: how many bytes it has
_STANDARD = {"", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft"}
_STANDARD |= {"com.microsoft.nchwc", "com.ms.internal.nhwc"}
# It names a file with what another runtime has compiled.
_LOADING = {"EPContext"}
Fields = dict[int, list[Any]]


@dataclass
class Calling:
    """Calls, as nodes and functions come.

    Args:
        text: of a field of a message, by its number.
        texts: of a field that may have several.
    """

    text: Callable[[Fields, int], str]
    texts: Callable[[Fields, int], list[str]]
    calls: list[Called] = field(default_factory=list)  # outside of functions
    gaps: dict[Called, Gaps] = field(default_factory=dict)  # of these
    given: dict[Called, Given] = field(default_factory=dict)  # of all calls
    function: Function | None = None  # that is read
    functions: dict[Called, Function] = field(default_factory=dict)

    def node(self, found: Fields) -> None:
        """Take a node."""
        called = self._domain(found, 7), self.text(found, 4), self.text(found, 8)
        inputs = found.get(1, ())
        empty = _empty(inputs)
        for places, what in ((empty, "an input"), (_empty(found.get(2, ())), "an output")):
            if any(needs(called, at, output=what == "an output") for at in places):
                raise OnnxFileError(f"a {called[1]} of it leaves {what} without a name, which ends ONNX Runtime")
        given = self.given.setdefault(called, Given())
        names = [place for number in (1, 2, 3, 4) for place in found.get(number, ())]
        given.name = max(given.name, max((end - start for start, end in names), default=0))
        self._attributes(found, 5, given)
        if self.function is not None:
            self.function.nodes.append((called, self.texts(found, 1)))
            self.function.names += len(names)
            self._taken(found, called, self.function)
            return
        self.calls.append(called)
        if called in self.gaps:
            self.gaps[called].add(len(inputs), empty)
        else:
            self.gaps[called] = Gaps(len(inputs), set(empty))

    def begin(self) -> None:
        """Nodes are a function's from here on."""
        self.function = Function()

    def end(self, found: Fields) -> None:
        """Take a function, whose nodes have come."""
        function, self.function = self.function, None
        assert function is not None  # noqa: S101  a function holds no other
        called = self._domain(found, 10), self.text(found, 1), self.text(found, 13)
        if called in self.functions:
            raise OnnxFileError(f"it holds two functions named {called[1]!r}{overload(called)}")
        if len(self.functions) >= MAX_FUNCTIONS:
            raise FunctionsError(f"it holds more than {MAX_FUNCTIONS:,} functions")
        function.inputs, function.imports = self.texts(found, 4), self.domains(found, 9)
        function.size = found[SIZE][0]
        self._attributes(found, 11, function.defaults)
        self.functions[called] = function

    def domains(self, found: Fields, number: int) -> frozenset[str]:
        """Of the opsets that a model or a function imports."""
        return frozenset(self._domain(each, 1) for each in found.get(number, ()))

    def check(self, imports: frozenset[str], size: int, *, runs: bool) -> Iterator[tuple[str, str]]:
        """Check that all that is called is known, and that calls of functions end; gives what is called.

        Args:
            imports: domains whose operators the model says it calls.
            size: bytes of the file, with those outside of it.
            runs: refuse what ONNX Runtime does not run, too.
        """
        bounded(self.calls, self.functions, self.given, size)
        if twice := graphs_twice(self.functions, self.given):
            raise FunctionsError(f"its function {twice[0]!r} takes the graph {twice[1][:80]!r} more than once")
        for operator, name in absent_in(self.gaps, self.functions):
            raise OnnxFileError(
                f"a function of it is called without its input {name[:80]!r}, and gives that to {operator}, which ends "
                "ONNX Runtime"
            )
        callers = [("it", imports | _STANDARD, {*self.calls})]
        for key, each in self.functions.items():
            callers.append((f"its function {key[1]!r}", each.imports, {called for called, _ in each.nodes}))
        for _, _, calls in callers:
            for called in calls:
                self._known(called, runs=runs)
                yield called[:2]
        for who, known, calls in callers if runs else ():
            for domain, name, _ in calls:
                if domain not in known:
                    raise OnnxFileError(
                        f"{who} calls {name!r} of {domain or 'ai.onnx'!r}, which it imports no version of"
                    )

    def _known(self, called: Called, *, runs: bool) -> None:
        domain, name, _ = called
        if name in _LOADING:
            raise OnnxFileError(f"it calls {name}, which loads what another program has compiled")
        if runs and domain not in _STANDARD and called not in self.functions:
            raise ForeignOperatorError(
                f"it calls {name!r}{overload(called)} of {domain!r}, which a library would have to bring"
            )

    def _attributes(self, found: Fields, number: int, given: Given) -> None:
        """Note what a call gives to an operator, or a function to itself."""
        for each in found.get(number, ()):
            given.add(self.text(each, 1), each[SIZE][0], graph=bool({6, 11} & each.keys()))

    def _taken(self, found: Fields, called: Called, function: Function) -> None:
        """Note which of a function's attributes a node in it takes."""
        for each in found.get(5, ()):
            if 21 in each:
                own = self.text(each, 21)
                function.taken[own] = function.taken.get(own, 0) + 1
                function.passed.append((called, self.text(each, 1), own))

    def _domain(self, found: Fields, number: int) -> str:
        """ONNX's own has two names, which readers take for one."""
        name = self.text(found, number)
        return "" if name == "ai.onnx" else name


def overload(called: Called) -> str:
    """Which of several functions of one name is meant, in words."""
    return f" (overload {called[2]!r})" if called[2] else ""


def _empty(names: Sequence[tuple[int, int]]) -> list[int]:
    """Places of empty names."""
    return [at for at, (start, end) in enumerate(names) if start == end]
