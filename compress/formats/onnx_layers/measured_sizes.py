"""How the sizes of what parts in ONNX give hang on those that they get: what varies is tried, how it does is proven."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from compress.errors import ToolkitError, first_line
from compress.formats.native.onnx_part import ANY, OnnxPart
from compress.formats.onnx_layers.proven_sizes import Shape, Told, alike, apart, steady, told, tried_alone
from compress.formats.onnx_layers.values import NotTakenBackError
from compress.storage.shortages import raise_shortage

__all__ = ["UnprovenError", "measured"]

_FACTORS = range(1, 9)


class UnprovenError(NotTakenBackError):
    """How large that is what parts give is not proven by their graphs.

    Attributes:
        paths: of these parts, in the module.
    """

    def __init__(self, paths: Sequence[str], why: str) -> None:
        super().__init__(why)
        self.paths = paths


def measured(module: fx.GraphModule, runs_on: Sequence[Sequence[torch.Tensor]]) -> None:
    """Find how the sizes of what parts give hang on those that they get, as their graphs prove it; in place.

    Args:
        module: with parts that know one size alone.
        runs_on: inputs of its forward, at sizes that it takes, which tell what varies.

    Raises:
        UnprovenError: a size hangs on other things, or may, and what comes behind would not know it.
        NotTakenBackError: it does not run at these sizes.
    """
    seen: dict[OnnxPart, list[tuple[list[Shape], list[Shape]]]] = {
        part: [] for part in module.modules() if isinstance(part, OnnxPart)
    }
    samples_of: dict[OnnxPart, list[torch.Tensor]] = {}

    def hook(part: nn.Module, given: Any, found: Any) -> None:
        samples_of.setdefault(part, list(given))  # type: ignore[arg-type]
        seen[part].append(([tuple(x.shape) for x in given], [tuple(y.shape) for y in found]))  # type: ignore[index]

    for part in seen:  # at any size, until it is known which vary
        part.inputs = tuple((dtype, *(ANY for _ in sizes)) for dtype, *sizes in part.inputs)
    hooks = [part.register_forward_hook(hook) for part in seen]
    failed = ""
    try:
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # where torch.fx prints what fails
            for sample in runs_on:
                module(*sample)
    except ToolkitError:
        raise
    except Exception as err:  # of what comes behind a part, and ONNX Runtime's own classes
        raise_shortage(err)
        failed = first_line(err)[:150]
    finally:
        for each in hooks:
            each.remove()
    paths = {part: path for path, part in module.named_modules() if isinstance(part, OnnxPart)}
    several = [
        part
        for part, runs in seen.items()
        if any(len({len(found[at]) for _, found in runs}) > 1 for at in range(len(part.outputs)))
        and not _is_last(module, part)
    ]
    if several:
        raise UnprovenError([paths[each] for each in several], "how many axes what it gives has hangs on what it gets")
    if failed:
        raise NotTakenBackError(f"at other sizes, what was made of the file fails: {failed}")
    unproven = [
        part for part, runs in seen.items() if not _sized(part, runs, samples_of[part], free=_is_last(module, part))
    ]
    if unproven:
        why = "its graph does not prove how large what it gives is by the sizes of what it gets"
        raise UnprovenError([paths[each] for each in unproven], why)


def _sized(
    part: OnnxPart, runs: Sequence[tuple[list[Shape], list[Shape]]], sample: Sequence[torch.Tensor], *, free: bool
) -> bool:
    """Give a part the rules of its sizes, as they are proven; whether all are that must be.

    Args:
        part: in place.
        runs: shapes of what it got and gave.
        sample: what it got once.
        free: whether nothing but outputs of the graph come behind, whose sizes may hang on values.
    """
    data, given = part.onnx(), [shapes for shapes, _ in runs]
    inputs = alike(given)

    def holds(found: Sequence[Sequence[Any]]) -> bool:
        return free or all(rule != ANY for rules in found for rule in rules)

    found: list[list[Any]] = []
    for using in (apart(inputs), inputs):
        found = [
            _rules(each, [shapes[at] for _, shapes in runs], given, sizes)
            for at, (each, (_, *sizes)) in enumerate(zip(told(data, using), part.outputs, strict=True))
        ]
        if holds(found):
            break
    else:
        if steady(data) and (more := tried_alone(part, sample, inputs)):
            every = [*runs, *more]
            given = [shapes for shapes, _ in every]
            found = [
                [ANY if (rule := _rule(given, [shapes[at][axis] for _, shapes in every])) is None else rule
                 for axis in range(len(sizes))]
                for at, (_, *sizes) in enumerate(part.outputs)
            ]  # fmt: skip
    part.inputs = tuple(
        (dtype, *(ANY if size == (at, axis) else size for axis, size in enumerate(sizes)))
        for at, ((dtype, *_), sizes) in enumerate(zip(part.inputs, using, strict=True))
    )
    part.outputs = tuple((dtype, *rules) for (dtype, *_), rules in zip(part.outputs, found, strict=True))
    return holds(found)


def _rules(told_of: Told, found: Sequence[Shape], given: Sequence[Sequence[Shape]], sizes: Sequence[Any]) -> list[Any]:
    """By axis, how large one of its outputs is, as it is told and was so in all runs; -1 for what is not known."""
    if told_of is None or ANY in sizes or any(len(shape) != len(told_of) for shape in found):
        return [ANY] * len(found[0])
    rules: list[Any] = []
    for axis, size in enumerate(told_of):
        have = [shape[axis] for shape in found]
        if isinstance(size, tuple):
            rules.append((*size, 1, 0, 1) if have == [run[size[0]][size[1]] for run in given] else ANY)
        else:
            rules.append(size if size is not None and set(have) == {size} else ANY)
    return rules


def _is_last(module: fx.GraphModule, part: OnnxPart) -> bool:
    """Whether nothing reads what it gives but the outputs."""
    (node,) = [n for n in module.graph.nodes if n.op == "call_module" and module.get_submodule(n.target) is part]
    return all(reader.op == "output" for item in node.users for reader in item.users)


def _rule(given: Sequence[Sequence[Shape]], sizes: Sequence[int]) -> Any:
    if len(set(sizes)) == 1:
        return sizes[0]
    shapes = enumerate(given[0])
    places = [(at, axis, [run[at][axis] for run in given]) for at, shape in shapes for axis in range(len(shape))]
    for at, axis, have in places:
        if have == sizes:
            return (at, axis, 1, 0, 1)
    for at, axis, have in places:
        for times, over in itertools.product(_FACTORS, _FACTORS):
            plus = sizes[0] * over - times * have[0]
            for more in range(plus, plus + over):
                if all((times * one + more) // over == size for one, size in zip(have, sizes, strict=True)):
                    return (at, axis, times, more, over)
    for (at, axis, have), (other, beside, too) in itertools.combinations(places, 2):
        if [one * two for one, two in zip(have, too, strict=True)] == sizes:
            return (at, axis, other, beside)
    return None
