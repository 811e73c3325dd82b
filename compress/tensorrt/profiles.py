"""Optimization profiles: how far the shapes of an engine's inputs may vary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from compress.artifact import Signature, TensorSpec
from compress.errors import RecipeError
from compress.options import EngineOptions
from compress.tensorrt.build import BuildOptions, Shapes

__all__ = ["build_options", "profiles_for", "ranges_of"]

_RANGE = re.compile(r"(?P<name>\w+)=(?P<low>\d+):(?P<best>\d+):(?P<high>\d+)")


def build_options(signature: Signature, engine: EngineOptions) -> BuildOptions:
    """What the builder is asked for.

    Raises:
        RecipeError: shapes that can't be built for.
    """
    return BuildOptions(
        profiles=profiles_for(signature, engine.max_batch_size, engine.opt_batch_size, engine.dims),
        optimization_level=engine.optimization_level,
        workspace_bytes=None if engine.workspace_mb is None else engine.workspace_mb * 1_000_000,
        timing_cache=engine.timing_cache,
        version_compatible=engine.version_compatible,
        hardware_compatibility=engine.hardware_compatibility,
        refit=engine.refit,
        strip_weights=engine.strip_weights,
    )


def profiles_for(signature: Signature, largest: int, best: Sequence[int], dims: Sequence[str]) -> tuple[Shapes, ...]:
    """A profile for each batch size that is to be fastest, each from 1 to the largest.

    Args:
        signature: of the model.
        largest: batch size.
        best: batch sizes to tune for; the largest, where there are none.
        dims: of other dimensions that vary, "name=smallest:best:largest" each.

    Returns:
        Shapes by input, for the inputs that vary; nothing for a model whose shapes are fixed.

    Raises:
        RecipeError: a dimension's range is missing or makes no sense.
    """
    ranges = ranges_of(dims)
    batches = {str(spec.shape[0]) for spec in signature.inputs if spec.batched}
    symbols = {dim for spec in signature.inputs for dim in spec.shape if isinstance(dim, str)}
    if largest < 1 or any(not 1 <= size <= largest for size in best):
        raise RecipeError(
            f"can't tune an engine for batches of {', '.join(map(str, best)) or largest}",
            why=f"they go from 1 to --max-batch-size {largest}",
            mend="give sizes inside, or a larger --max-batch-size",
        )
    if unknown := sorted(set(ranges) - symbols):
        raise RecipeError(
            f"can't give {unknown[0]} a range",
            why=f"no input has such a dimension; there are {', '.join(sorted(map(str, symbols))) or 'none that vary'}",
            mend="name one of these, or leave --dims out",
        )
    if missing := sorted(symbols - batches - set(ranges)):
        raise RecipeError(
            "can't build an engine for every shape",
            why=f"{', '.join(missing)} varies, and an engine has bounds",
            mend=" ".join(f"--dims {name}=1:64:128" for name in missing) + " (smallest, best, largest)",
        )
    varying = [spec for spec in signature.inputs if any(isinstance(dim, str) for dim in spec.shape)]
    found = [
        {spec.name: _shapes(spec, dict.fromkeys(batches, (1, size, largest)) | ranges) for spec in varying}
        for size in dict.fromkeys(best or (largest,))
    ]
    return tuple(found) if varying else ()


def _shapes(
    spec: TensorSpec, bounds: Mapping[str, tuple[int, int, int]]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    low, best, high = (tuple(bounds[dim][at] if isinstance(dim, str) else dim for dim in spec.shape) for at in range(3))
    return low, best, high


def ranges_of(dims: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """Smallest, best and largest size by dimension, from "name=smallest:best:largest" each.

    Raises:
        RecipeError: one is not of that form.
    """
    return dict(map(_parse, dims))


def _parse(text: str) -> tuple[str, tuple[int, int, int]]:
    match = _RANGE.fullmatch(text)
    bounds = tuple(int(match[key]) for key in ("low", "best", "high")) if match else ()
    if match is None or not 1 <= bounds[0] <= bounds[1] <= bounds[2]:
        raise RecipeError(
            f"can't read the range {text!r}",
            why="it is a dimension's name, its smallest, best and largest size, in that order",
            mend="write it as in --dims sequence=1:64:128",
        )
    return match["name"], (bounds[0], bounds[1], bounds[2])
