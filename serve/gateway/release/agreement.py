"""Do two models give the same answer to a request?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.protocol import InferResponse
from serve.gateway.oip.tensors import DATATYPES, Tensor
from serve.gateway.release.differ import differing, has_rows, in_blocks
from serve.rollout.agree import Agree, Kind

__all__ = ["Agreement", "FunctionError", "Functions", "agreement", "misfit", "unlike"]

Functions = Mapping[str, Callable[..., Any]]


class FunctionError(Exception):
    """A function of the operator's gave no judgement."""


@dataclass(frozen=True)
class Agreement:
    """How alike two answers are.

    Attributes:
        items: of the request.
        disagreed: items for which an output is another.
        difference: mean absolute difference of all numbers.
        largest: the largest of them.
        judged: whether anything was held to a rule; single numbers have none by default, and need only be numbers.
    """

    items: int
    disagreed: int
    difference: float
    largest: float
    judged: bool = True


def agreement(
    candidate: InferResponse,
    baseline: InferResponse,
    *,
    batched: bool,
    tolerance: float | None,
    texts: Collection[str] | None = None,
    agrees: Sequence[Agree] = (),
    functions: Functions | None = None,
) -> Agreement | None:
    """Compare two answers, item by item; None where there is nothing that is to be compared.

    An output is held to its rule among `agrees`. Without one: whole numbers, booleans and BYTES must be equal;
    floating-point numbers must differ by at most `tolerance`; without a tolerance, the largest along the last axis must
    stand at the same place (the class), and a number that stands alone is not judged. NaN is like NaN only. Outputs
    that one of the two does not give, or in another shape (but for the first value, and sets), are others.

    Where a client asked for classes of scores (`classification`), Triton writes them as BYTES, the best first, as
    b"score:index[:label]". They are judged as the scores would be: by the best class, or, with a tolerance, by the
    score at each rank.

    Args:
        batched: whether the first dimension of each output is the batch.
        tolerance: absolute.
        texts: names of the models' outputs that are BYTES by themselves; None for all that come so.
        agrees: rules of single outputs.
        functions: of rules that name one: (candidate's, baseline's) of one item -> whether they agree.

    Raises:
        FunctionError: one of them failed.
    """
    rules = {agree.output: agree for agree in agrees}
    theirs, mine = (
        {each.name: each for each in answer.outputs if each.name not in rules or rules[each.name].kind != "ignore"}
        for answer in (baseline, candidate)
    )
    if not theirs and not mine:
        return None
    sizes = {tensor.shape[0] for tensor in theirs.values() if batched and tensor.shape}
    items = max(sizes.pop(), 1) if len(sizes) == 1 else 1
    others = np.zeros(items, dtype=bool)
    total, count, largest, judged = 0.0, 0, 0.0, False
    for name in theirs.keys() | mine.keys():
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None or a.datatype != b.datatype:
            others[:] = True
            judged = True
            continue
        classes = a.datatype == "BYTES" and texts is not None and name not in texts
        agree = rules.get(name) or _usual(name, a, tolerance, classes=classes)
        if agree.kind == "function":
            others |= _by_function(a, b, items, agree.function, functions or {}, batched=batched)
            judged = True
        else:
            others |= differing(a, b, items, agree, batched=batched, classes=classes)
            judged |= agree.kind != "argmax" or classes or has_rows(a.data, items)
        if a.data.dtype.kind != "O" and a.shape == b.shape and a.data.size:
            for x, y in in_blocks(a.data, b.data):
                with np.errstate(invalid="ignore"):
                    difference = np.abs(x - y)
                difference = difference[np.isfinite(difference)]
                total += float(difference.sum())
                count += difference.size
                largest = max(largest, float(difference.max(initial=0.0)))
    disagreed = int(others.sum())
    return Agreement(items, disagreed, total / count if count else 0.0, largest, judged or disagreed > 0)


def _by_function(
    a: Tensor, b: Tensor, items: int, name: str, functions: Functions, *, batched: bool
) -> np.ndarray[Any, Any]:
    """For each item, whether a function says that the two are others."""
    if batched and a.shape[:1] != b.shape[:1]:
        return np.ones(items, dtype=bool)
    pairs = zip(a.data, b.data, strict=True) if batched and len(a.data) == items else [(a.data, b.data)]
    found = []
    for mine, theirs in pairs:
        try:
            same = functions[name](np.array(mine, a.data.dtype), np.array(theirs, b.data.dtype))  # its own to change
        except (Exception, SystemExit) as err:  # the operator's code: anything may come out of it
            raise FunctionError(name) from err
        if not isinstance(same, bool | np.bool_):
            raise FunctionError(f"{name} gave {str(same)[:100]} ({type(same).__name__}), and True or False is wanted")
        found.append(not same)
    return np.array(found) if len(found) == items else np.full(items, any(found))


def _usual(name: str, tensor: Tensor, tolerance: float | None, *, classes: bool) -> Agree:
    """The rule of an output that none was given for."""
    if tensor.data.dtype.kind != "f" and not classes:
        return Agree(name, "equal")
    return Agree(name, "argmax") if tolerance is None else Agree(name, "close", atol=tolerance)


def unlike(candidate: ModelMetadata, baseline: ModelMetadata) -> str:
    """Why the candidate can't take the baseline's requests; "" where it can."""
    for kind in ("inputs", "outputs"):
        mine = {tensor.name: tensor for tensor in getattr(candidate, kind)}
        theirs = {tensor.name: tensor for tensor in getattr(baseline, kind)}
        if mine.keys() != theirs.keys():
            return f"its {kind} are {', '.join(sorted(mine))}, the baseline's {', '.join(sorted(theirs))}"
        for name, tensor in mine.items():
            other = theirs[name]
            fits = len(tensor.shape) == len(other.shape) and all(
                a == b or -1 in (a, b) for a, b in zip(tensor.shape, other.shape, strict=True)
            )
            if tensor.datatype != other.datatype or not fits:
                return f"it has {tensor}, the baseline {other}"
    return ""


# By rule: the datatypes that it compares (None for all), and what to write for others.
NUMBERS = frozenset(DATATYPES) - {"BYTES", "BOOL"}
LABELS = frozenset(name for name, dtype in DATATYPES.items() if dtype.kind in "iuO")
FITS: Mapping[Kind, tuple[frozenset[str], str]] = {
    "first": (LABELS, "whole numbers and BYTES; take argmax or tolerance=…"),
    "overlap": (LABELS, "whole numbers and BYTES; take argmax or tolerance=…"),
    "argmax": (NUMBERS, "numbers; take equal or first"),
    "close": (NUMBERS, "numbers; take equal or first"),
}


def misfit(agrees: Sequence[Agree], metadata: ModelMetadata, functions: Collection[str] = ()) -> str:
    """Why the rules can't be held against a model's outputs; and, behind "; ", what to write. "" where they can."""
    outputs = {output.name: output for output in metadata.outputs}
    for agree in agrees:
        output = outputs.get(agree.output)
        if output is None:
            return f"--agree {agree}: {metadata.name} has no such output; name one of {', '.join(sorted(outputs))}"
        if agree.kind == "function" and agree.function not in functions:
            has = f"it has {', '.join(sorted(functions))}" if functions else "start it with --agree-module FILE"
            return f"--agree {agree}: the gateway has no such function; {has}"
        if agree.kind in FITS and output.datatype not in FITS[agree.kind][0]:
            return f"--agree {agree}: the output is {output}, and this compares {FITS[agree.kind][1]}"
        each = output.shape[1:] if metadata.batched else output.shape
        if agree.kind == "argmax" and each[-1:] in ((), (1,)):
            return f"--agree {agree}: the output is {output}, which has no row of scores; take tolerance=…"
        if agree.kind == "overlap" and all(dim == 1 for dim in each):
            return f"--agree {agree}: the output is {output}, one value and no set; take equal or first"
    if agrees and outputs.keys() == {agree.output for agree in agrees if agree.kind == "ignore"}:
        return "--agree ignores every output; leave one, or take --shadow 0 or --expect-change"
    return ""
