"""When two answers count as the same, by output: what `--agree` says, read once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from compress.errors import ServerError

__all__ = ["Agree", "Kind", "check_agrees"]

Kind = Literal["equal", "first", "overlap", "argmax", "close", "ignore", "function"]
PLAIN: dict[str, Kind] = {"equal": "equal", "first": "first", "argmax": "argmax", "ignore": "ignore"}
NUMBER = re.compile(r"(?:\d{1,30}\.?\d{0,30}|\.\d{1,30})(?:[eE][+-]?\d{1,3})?")
LONGEST = 256
RULES = (
    "equal, first, overlap=0.6, argmax, tolerance=0.05, rtol=0.01 (or both, with a comma), ignore, or function=NAME of "
    "the gateway's --agree-module"
)
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True)
class Agree:
    """One output's rule.

    Attributes:
        output: its name.
        kind: equal (every value), first (the first value along the last axis), overlap (of the values as sets), argmax
            (where the largest along the last axis stands), close (every number), ignore, function (of the operator's).
        overlap: share of the larger set that both must have, above 0.
        atol, rtol: for close: the two may differ by atol + rtol * |the baseline's|.
        function: its name in the gateway's --agree-module.
    """

    output: str
    kind: Kind
    overlap: float = 0.0
    atol: float = 0.0
    rtol: float = 0.0
    function: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read OUTPUT:RULE; a name may hold colons, a rule does not.

        Raises:
            ServerError: it is none.
        """
        output, colon, rule = text.rpartition(":")
        if not colon or not 0 < len(output) <= LONGEST or not output.isprintable():
            raise _no_rule(text, "it names no output")
        if rule in PLAIN:
            return cls(output, PLAIN[rule])
        if rule.startswith("function="):
            if not NAME.fullmatch(function := rule.removeprefix("function=")):
                raise _no_rule(text, f"{function!r} is no name of a function")
            return cls(output, "function", function=function)
        given: dict[str, float] = {}
        for part in rule.split(","):
            name, equals, number = part.partition("=")
            if not equals or name in given or name not in ("overlap", "tolerance", "rtol"):
                raise _no_rule(text, f"{part!r} is no rule")
            if not NUMBER.fullmatch(number):
                raise _no_rule(text, f"{number!r} is no number of 0 or more")
            given[name] = float(number)
        if "overlap" in given:
            if len(given) > 1 or not 0 < given["overlap"] <= 1:
                raise _no_rule(text, "an overlap is a share above 0, at most 1, and stands alone")
            return cls(output, "overlap", overlap=given["overlap"])
        if max(given.values()) == float("inf"):
            raise _no_rule(text, "it would take anything for the same")
        return cls(output, "close", atol=given.get("tolerance", 0.0), rtol=given.get("rtol", 0.0))

    @property
    def rule(self) -> str:
        """As `parse` reads it, without the output."""
        if self.kind == "overlap":
            return f"overlap={self.overlap!r}"
        if self.kind == "function":
            return f"function={self.function}"
        if self.kind != "close":
            return self.kind
        parts = [f"tolerance={self.atol!r}"] if self.atol or not self.rtol else []
        return ",".join(parts + ([f"rtol={self.rtol!r}"] if self.rtol else []))

    def __str__(self) -> str:
        return f"{self.output}:{self.rule}"


def check_agrees(agrees: Sequence[Agree]) -> None:
    """Raises ServerError where two rules are for one output."""
    seen: set[str] = set()
    for agree in agrees:
        if agree.output in seen:
            raise ServerError(
                "the rollout can't be started", why=f"--agree names the output {agree.output!r} twice",
                mend="give each output one rule",
            )  # fmt: skip
        seen.add(agree.output)


def _no_rule(text: str, why: str) -> ServerError:
    return ServerError(
        "the rollout can't be started", why=f"--agree {text!r}: {why}", mend=f"write OUTPUT:RULE; a rule is {RULES}"
    )
