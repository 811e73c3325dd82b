"""What passes as an expression of sizes is evaluated by sympy, as torch has it, within what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from compress.formats.exported.expressions import MAX_BITS, clean_expression

# Limits of memory beyond what it has once torch is there, and of time only so that what has no end does not stay.
EVALUATES = """
import json, resource, sys
import sympy
from torch._subclasses.fake_tensor import FakeTensorMode
import torch.utils._sympy.functions as functions
known = {name: value for name, value in vars(functions).items() if isinstance(value, sympy.FunctionClass)}
known |= {"oo": sympy.oo, "int_oo": functions.int_oo}
sympy.sympify("FloorDiv(CeilDiv(s0 + 1, s1), 2)**2 > Mod(s0, Float('1.5'))", locals=known)
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
resource.setrlimit(resource.RLIMIT_CPU, (500, 500))
print("ready", flush=True)
for line in sys.stdin:
    bits = 0
    try:
        found = sympy.sympify(json.loads(line), locals=known)
        for each in sympy.preorder_traversal(found) if isinstance(found, sympy.Basic) else ():
            if isinstance(each, sympy.Float):
                _, digits, exponent, _ = each._mpf_
                bits = max(bits, abs(exponent), digits.bit_length(), each._prec)
            elif isinstance(each, sympy.Rational) and each.is_finite:
                bits = max(bits, each.p.bit_length(), each.q.bit_length())
        print(json.dumps(bits), flush=True)
    except MemoryError:
        print(json.dumps("memory"), flush=True)
    except Exception:  # what means nothing is refused when it is loaded; of torch's functions some call themselves
        print(json.dumps(bits), flush=True)
"""
HUGE = (0, 1, 2, 3, 7, 8, 9, 53, 213, 214, 3_000_000_000, 68_719_476_736, 2**63 - 1)
ONE = ("Abs", "floor", "ceiling", "ToFloat", "TruncToInt", "CeilToInt", "RoundToInt", "TruncToFloat", "Identity", "Not")
TWO = (
    "Add", "Mul", "Mod", "PythonMod", "Max", "Min", "FloorDiv", "CeilDiv", "CleanDiv", "IntTrueDiv", "FloatTrueDiv",
    "RoundDecimal", "Eq", "Lt", "Ge", "Pow", "PowByNatural", "FloatPow",
)  # fmt: skip
SIGNS = ("+", "-", "*", "/", "//", "%", "**")


def numbers() -> st.SearchStrategy[str]:
    whole = st.sampled_from([str(sign * number) for number in HUGE for sign in (1, -1)])
    real = st.sampled_from(["0.5", "1.5", "1e300", "1e-300", "0.0", "8.0"])
    return st.one_of(
        whole,
        real,
        whole.map("Integer({})".format),
        st.builds("Rational({}, {})".format, whole, whole),
        st.builds("Rational(1, Rational(1, {}))".format, whole),
        st.builds("Float('{}', precision={})".format, st.sampled_from(["1.5", "1e999", "1e-999", "7"]), whole),
        st.builds("Float({}, {})".format, real, whole),
        st.builds("Float({}, dps={})".format, real, whole),
    )


def expressions() -> st.SearchStrategy[str]:
    symbols = st.builds("Symbol('{}', positive=True, integer=True)".format, st.sampled_from(["s0", "s1", "u2"]))
    return st.recursive(
        st.one_of(numbers(), symbols, symbols),
        lambda inner: st.one_of(
            st.builds("{}({})".format, st.sampled_from(ONE), inner),
            st.builds("{}({}, {})".format, st.sampled_from(TWO), inner, inner),
            st.builds("ModularIndexing({}, {}, {})".format, inner, inner, inner),
            st.builds("({} {} {})".format, inner, st.sampled_from(SIGNS), inner),
            st.builds("Pow({}, Integer({}))".format, inner, st.sampled_from(["2", "3", "8", "-1", "-2"])),
        ),
        max_leaves=12,
    )


@pytest.fixture(scope="module")
def sympys() -> Iterator[subprocess.Popen[str]]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", EVALUATES], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@example("Mul(Float('1.5', precision=68719476736), Symbol('s77', positive=True, integer=True))")
@example("Pow(Integer(3), Rational(1, Rational(1, 3000000000)))")
@example("Float(1.5, 3000000000)*s0")
@example("Pow(Float('1e999'), 8)")
@example("floor(Float('1e999')*Float('1e999'))**2")
@given(expressions())
def test_what_passes_is_evaluated_within_what_was_measured(sympys: subprocess.Popen[str], text: str) -> None:
    try:
        clean = clean_expression(text)
    except ValueError:
        return
    assert sympys.stdin is not None
    assert sympys.stdout is not None
    sympys.stdin.write(json.dumps(clean) + "\n")
    sympys.stdin.flush()
    answer = sympys.stdout.readline()
    assert answer, "it took too long, or all memory"
    bits = json.loads(answer)
    assert isinstance(bits, int), bits
    assert bits <= MAX_BITS
