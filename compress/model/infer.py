"""A model's outputs, found by running it: what changes with the size of an input's dimension is symbolic."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compress.errors import SignatureError, ToolkitError, first_line
from compress.model.inputs import call, example_inputs, symbols_of
from compress.signature import FIRST_THAT_RUNS, Signature, TensorSpec

__all__ = ["elsewhere", "infer_outputs", "infer_signature", "proven", "runs_at"]

BATCH, OTHER_BATCHES = 2, (5, 3, 4, 1)
# What varies is tried at multiples of a high power of two first: networks that go down and up again take nothing else,
# and what is made smaller on the way stays above 1. Small sizes come last, for tables of positions that are short.
LARGE, SMALL = (32, 64, 128), (16, 8, 4, 3, 2)
FEW = (5, 7, 8, 16)  # the first that runs tells what is smaller where its input is

Sizes = Mapping[str, int]


def infer_signature(
    module: nn.Module,
    inputs: tuple[TensorSpec, ...],
    names: Sequence[str] | None = None,
    sizes: Sizes | None = None,
) -> Signature:
    """Find a module's outputs, and prove that it runs at its representative sizes.

    The module runs at small sizes, then with one symbolic dimension after the other at another size. A dimension of
    an output has the name of the input's whose size it has; one that changes otherwise gets a name of its own:
    `height_1` for a quarter of `height` or for at most 20 of it, `height_width` for their product.

    Args:
        module: in eval mode.
        inputs: what its forward takes, by position.
        names: for the outputs, in order, instead of those that `call` gives.
        sizes: representative ones. Where a module does not run at what is assumed of the others, they are set to the
            first sizes that it runs at.

    Raises:
        SignatureError: the forward does not take these inputs, or not at these sizes, or the names don't fit.
    """
    known = Signature(inputs, (), dict(sizes or {}))
    base, first = _base(module, known)
    signature = known if known.at(BATCH) == base else proven(module, known)
    others = {dim: _other(module, signature, base, dim, first) for dim in symbols_of(inputs)}
    more = {dim: _more(module, signature, base, dim, first, size) for dim, (size, _) in others.items()}
    outputs = _specs(signature, base, first, others, more)
    if names is not None:
        if len(names) != len(outputs):
            raise SignatureError(
                f"can't name the outputs {', '.join(names)}",
                why=f"the model has {len(outputs)}, not {len(names)}",
                mend="give a name for each output, in order",
            )
        outputs = tuple(TensorSpec(name, o.dtype, o.shape) for name, o in zip(names, outputs, strict=True))
    return Signature(inputs, outputs, signature.sizes, signature.sources)


def infer_outputs(
    module: nn.Module, inputs: tuple[TensorSpec, ...], names: Sequence[str] | None = None
) -> tuple[TensorSpec, ...]:
    """The outputs alone; see `infer_signature`."""
    return infer_signature(module, inputs, names).outputs


def proven(module: nn.Module, signature: Signature) -> Signature:
    """A signature at whose representative sizes the module runs.

    Sizes that are assumed, and that it does not run at, become the first that it runs at.

    Raises:
        SignatureError: it does not run at the sizes that were given, or at none.
    """
    if not signature.told:
        return signature
    try:
        _run(module, signature.inputs, signature.at(BATCH))
    except ToolkitError:
        raise
    except Exception as err:  # the user's forward: anything may come out of it
        if not signature.assumed:
            said = {dim: size for dim, (size, _) in signature.told.items() if dim not in signature.unsaid}
            at = ", ".join(f"{dim} = {size}" for dim, size in (said or signature.unsaid).items())
            raise SignatureError(
                f"the model does not run at {at}",
                why=first_line(err),
                mend="give a --size (`sizes=` in compress.save) that it takes",
            ) from err
        base, _ = _base(module, signature)
        return proven(module, signature.sized({dim: base[dim] for dim in signature.assumed}, FIRST_THAT_RUNS))
    return signature


def runs_at(module: nn.Module, inputs: tuple[TensorSpec, ...]) -> Callable[[Sizes], bool]:
    """Whether a module takes inputs of such sizes."""

    def runs(sizes: Sizes) -> bool:
        try:
            _run(module, inputs, sizes)
        except ToolkitError:
            raise
        except Exception:  # the user's forward: anything may come out of it
            return False
        return True

    return runs


def elsewhere(runs: Callable[[Sizes], bool], sizes: Sizes, dims: Iterable[str]) -> dict[str, int]:
    """Sizes with each of some dimensions at another size, above 1 and unlike all others, as far as that still runs.

    Args:
        runs: whether the model takes such sizes.
        sizes: that it takes.
        dims: that are to have other sizes.
    """
    found = dict(sizes)
    for dim in dims:
        taken = {size for name, size in found.items() if name != dim} | {1}
        for size in _near(found[dim]):
            if size not in taken and runs(found | {dim: size}):
                found[dim] = size
                break
    return found


def _near(size: int) -> Iterator[int]:
    """Other sizes, those first that a network with strides or a short table of positions is likely to take."""
    steps = (size // 2, size + 32, 2 * size, size - 32, size + 16, size + 64, size + 8, size + 1, size - 1)
    yield from (step for step in dict.fromkeys(steps) if step >= 1 and step != size)


def _run(module: nn.Module, inputs: tuple[TensorSpec, ...], sizes: Sizes) -> dict[str, torch.Tensor]:
    with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # where torch.fx prints what fails
        return call(module, inputs, example_inputs(inputs, sizes))


def _base(module: nn.Module, known: Signature) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """The first sizes that the module takes, and what it gives there."""
    batch = dict.fromkeys(known.batches, BATCH)
    free = [dim for dim in symbols_of(known.inputs) if dim not in batch]
    representative = known.at(BATCH)
    tried: list[dict[str, int]] = [
        *(batch | dict.fromkeys(free, size) for size in LARGE),
        representative,
        *(batch | dict.fromkeys(free, size) | dict(known.sizes) for size in (*LARGE, *SMALL)),
        *(batch | dict.fromkeys(free, size) for size in SMALL),
    ]
    failed: Exception | None = None
    for sizes in [sizes for at, sizes in enumerate(tried) if sizes not in tried[:at]]:
        try:
            return sizes, _run(module, known.inputs, sizes)
        except ToolkitError:
            raise
        except Exception as err:  # the user's forward: anything may come out of it
            failed = err if failed is None or sizes == representative else failed
    assert failed is not None  # noqa: S101  there is at least one to try
    at = ", ".join(f"{dim} = {representative[dim]}" for dim in free)
    raise SignatureError(
        "the model does not run on inputs of its signature",
        why=f"{', '.join(map(str, known.inputs))}{' at ' + at if at else ''}: {first_line(failed)}",
        mend=_other_dtype(module, known.inputs)
        or "give each input of its forward with --input 'name:dtype[batch,…]' (`inputs=` in compress.save)"
        + (f", and a size that is usual with --size {free[0]}=…" if free else ""),
    ) from failed


def _other_dtype(module: nn.Module, inputs: tuple[TensorSpec, ...]) -> str:
    """Which inputs a module of another precision takes; "" where its weights and its inputs are of one."""
    held = {str(weight.dtype).removeprefix("torch.") for weight in module.parameters() if weight.is_floating_point()}
    wrong = next((spec for spec in inputs if spec.dtype.startswith("float") and spec.dtype not in held), None)
    if wrong is None or len(held) != 1:
        return ""
    kind, shape = min(held), ",".join(map(str, wrong.shape))
    return (
        f"its weights are {kind}: write --input '{wrong.name}:{kind}[{shape}]'; or save the module again, after "
        f"module.to(torch.{wrong.dtype})"
    )


def _other(
    module: nn.Module, signature: Signature, base: Sizes, dim: str, first: Mapping[str, torch.Tensor]
) -> tuple[int, dict[str, torch.Tensor]]:
    """Another size of a dimension, and what the module gives there, all else being as it was."""
    batch = dim in signature.batches
    near = OTHER_BATCHES if batch else (signature.at(BATCH)[dim], 2 * base[dim], *_near(base[dim]))
    failed: Exception | None = None
    for size in dict.fromkeys(size for size in near if size != base[dim]):
        try:
            given = _run(module, signature.inputs, dict(base) | {dim: size})
        except ToolkitError:
            raise
        except Exception as err:  # the user's forward: anything may come out of it
            failed = failed or err
            continue
        if [(name, tensor.ndim) for name, tensor in given.items()] != [(n, t.ndim) for n, t in first.items()]:
            raise SignatureError(
                "the model's outputs have no one shape",
                why=f"their number or their dimensions are others at {dim} = {size} than at {dim} = {base[dim]}",
                mend="make its forward give the same outputs for every size",
            )
        return size, given
    assert failed is not None  # noqa: S101  there is at least one to try
    raise SignatureError(
        "the model does not run on inputs of its signature",
        why=f"it runs at {dim} = {base[dim]}, and at no other size that was tried: {first_line(failed)}",
        mend=f"write {base[dim]} in place of {dim} where it is the only size (`--input`, `inputs=` in compress.save)",
    ) from failed


def _more(
    module: nn.Module, signature: Signature, base: Sizes, dim: str, first: Mapping[str, torch.Tensor], seen: int
) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """What the module gives at a smaller size of a dimension, and at a larger one, as far as it runs there.

    What is as large as its input up to some size, and not beyond, is seen on both sides of that size alone.
    """
    if dim in signature.batches:
        return []
    found = []
    for sizes in (FEW, (4 * base[dim] + 3, 4 * base[dim])):
        for size in sizes:
            given = None if size in (base[dim], seen) else _given(module, signature.inputs, dict(base) | {dim: size})
            if given is not None:
                if [(name, tensor.ndim) for name, tensor in given.items()] == [(n, t.ndim) for n, t in first.items()]:
                    found.append((size, given))
                break
    return found


def _given(module: nn.Module, inputs: tuple[TensorSpec, ...], sizes: Sizes) -> dict[str, torch.Tensor] | None:
    try:
        return _run(module, inputs, sizes)
    except Exception:  # the user's forward: anything may come out of it; or inputs too large to be made
        return None


def _specs(
    signature: Signature,
    base: Sizes,
    first: Mapping[str, torch.Tensor],
    others: Mapping[str, tuple[int, Mapping[str, torch.Tensor]]],
    more: Mapping[str, Sequence[tuple[int, Mapping[str, torch.Tensor]]]],
) -> tuple[TensorSpec, ...]:
    order = list(dict.fromkeys(dim for spec in signature.inputs for dim in spec.shape if isinstance(dim, str)))
    derived: dict[tuple[Any, ...], str] = {}

    def dimension(name: str, axis: int) -> int | str:
        here = first[name].shape[axis]
        there = {dim: others[dim][1][name].shape[axis] for dim in order}
        beyond = {dim: [(size, given[name].shape[axis]) for size, given in more[dim]] for dim in order}
        follows = [dim for dim in order if there[dim] != here or any(have != here for _, have in beyond[dim])]
        if not follows:
            return here
        tried = [(base[follows[0]], here), (others[follows[0]][0], there[follows[0]]), *beyond[follows[0]]]
        if len(follows) == 1 and all(size == have for size, have in tried):
            return follows[0]
        key = (("", here), *((dim, there[dim], *beyond[dim]) for dim in follows))
        if key not in derived:
            stem, taken = "_".join(follows), {*order, *derived.values()}
            numbered = (f"{stem}_{number}" for number in range(1, len(taken) + 2))
            derived[key] = next(
                name for name in ([stem, *numbered] if len(follows) > 1 else numbered) if name not in taken
            )
        return derived[key]

    return tuple(
        TensorSpec(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(dimension(name, axis) for axis in range(tensor.ndim)),
        )
        for name, tensor in first.items()
    )
