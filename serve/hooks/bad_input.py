"""What a model's preprocess does with input that is not what it expects: refuse it, fail, or take it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.artifact import Artifact
from compress.errors import MissingExtraError, RepositoryError, first_line
from serve.hooks.check import nans, run_network
from serve.hooks.load import Hooks
from serve.hooks.packed.values import NUMPY_TYPES, Array, Hook
from serve.hooks.types import HookTensor

__all__ = ["Tried", "try_bad_input"]

TEXTS: tuple[tuple[str, bytes], ...] = (
    ("nothing", b""), ("one NUL", b"\0"), ("a word", b"unexpected"), ("10,000 letters", b"x" * 10_000),
)  # fmt: skip


@dataclass(frozen=True)
class Tried:
    """One bad input and what came of it.

    Attributes:
        argument: which input of the served model was bad.
        given: what it was given, in words.
        status: what a client gets: 400 where preprocess refuses it, 500 where that or the network fails, None where
            both take it.
        message: what the client is told; where it is taken, what the network makes of it if that is NaN, else "".
    """

    argument: str
    given: str
    status: int | None
    message: str


def try_bad_input(hooks: Hooks, source: Artifact, item: Mapping[str, Array]) -> list[Tried]:
    """Give preprocess one bad value after the other, the other inputs being as in a good sample.

    Args:
        hooks: that were checked against the network.
        source: what they are for.
        item: a good sample, see `sample_of`.

    Returns:
        What came of each; [] without a preprocess.
    """
    if hooks.preprocess is None:
        return []
    hook = hooks.hook("preprocess")
    return [
        _tried(hook, source, tensor.name, what, {**item, tensor.name: value})
        for tensor in hooks.preprocess.arguments
        for what, value in _bad(tensor, item[tensor.name])
    ]


def _tried(hook: Hook, source: Artifact, argument: str, given: str, item: Mapping[str, Array]) -> Tried:
    try:
        made = hook.sample(item)
    except (Exception, SystemExit) as err:  # the user's code: anything may come out of it
        message = first_line(RuntimeError(hook.message(err)))
        return Tried(argument, given, 400 if hook.at_fault(err) else 500, message)
    return _through(source, argument, given, made)


def _through(source: Artifact, argument: str, given: str, made: Mapping[str, Array]) -> Tried:
    """What the network makes of it: it may fail over numbers that preprocess takes, or answer with none."""
    try:
        wrong = nans(run_network(source, made))
    except MissingExtraError:
        return Tried(argument, given, None, "")
    except RepositoryError as err:
        return Tried(argument, given, 500, f"the network fails: {err.why}")
    told = f"the network answers NaN ({', '.join(wrong)}): bound the numbers in preprocess" if wrong else ""
    return Tried(argument, given, None, told)


def _bad(tensor: HookTensor, good: Array) -> Iterator[tuple[str, Array]]:
    """Values of the right dtype, and of the good sample's shape, that hardly any network was trained with."""
    dtype: np.dtype[Any] = np.dtype(NUMPY_TYPES[tensor.data_type])
    if dtype == np.object_:
        for given, text in TEXTS:
            yield given, np.array([text] * good.size, object).reshape(good.shape)
        if tensor.kind != "str":
            halves = [one[: len(one) // 2] for one in good.ravel()]
            yield "half of the sample", np.array(halves, object).reshape(good.shape)
        else:
            yield "bytes that are no UTF-8", np.array([b"\xff\xfe"] * good.size, object).reshape(good.shape)
    elif dtype.kind == "f":
        for given, number in (("NaN", np.nan), ("infinity", np.inf), ("the lowest number", np.finfo(dtype).min)):
            yield given, np.full(good.shape, number, dtype)
    elif dtype.kind in "iu":
        for given, whole in (("the lowest number", np.iinfo(dtype).min), ("the highest", np.iinfo(dtype).max)):
            yield given, np.full(good.shape, whole, dtype)
    if -1 in tensor.dims and good.ndim:
        yield "no element at all", np.empty([0 if dim == -1 else dim for dim in tensor.dims], dtype)
