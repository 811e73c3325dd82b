"""What a configuration may ask for: no more layers, labels and elements than the weights beside it explain.

A few bytes of config.json are enough to have a class build lists for minutes. So its numbers are held against the
tensors' shapes before a class sees them, and what the class then builds is counted as it is made.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from compress.console.wording import counted
from compress.errors import CheckpointError
from compress.formats.hub.folder import WHOLE, HubFolder

__all__ = ["DEEPEST", "TooMuchError", "counted_building", "refuse_vast"]

DEEPEST = 8  # that a configuration is nested
LARGEST_COUNT = 10_000  # a number that no tensor explains
# Positions, lengths and bases of rotary embeddings have no tensor; a class makes nothing of their size, or a table,
# which is counted when it is built.
_NO_TENSOR = re.compile(
    r"position|length|_len$|theta|base|window|context|seq|rate$|freq|_ids?$|_index$|tokens|_flos|^max_|pixels"
)
# What has at least a tensor for each.
_LAYERS = re.compile(r"(^|_)(layers?|depths?|blocks)$")
MODULES_A_TENSOR, SPARE_MODULES = 4, 1024
TIMES_HELD = 8  # a tied table is made anew in each place (T5's in seven), before it is one
SPARE_WEIGHTS, SPARE_BUFFERS = 1 << 20, 1 << 25  # elements beyond those: heads without weights, masks of positions


class TooMuchError(Exception):
    """A class builds more than its weights explain."""


def refuse_vast(folder: HubFolder, state: Mapping[str, torch.Tensor]) -> None:
    """Refuse a configuration with a number, however deep in it, that the weights can't explain.

    Args:
        folder: whose configuration it is.
        state: of `state_of`.

    Raises:
        CheckpointError: there is such a number.
    """
    widest = max((side for tensor in state.values() for side in tensor.shape), default=0)
    for key, value in _numbers("", folder.config):
        deep = bool(_LAYERS.search(key))
        most = len(state) + 64 if deep else max(LARGEST_COUNT, 2 * widest)
        if abs(value) > most and (deep or not _NO_TENSOR.search(key)):
            raise CheckpointError(
                f"the weights of {folder.path} don't fit its configuration",
                why=f"{key[:60]!a} is {f'{value:,}'[:30]}, the files hold {counted(len(state), 'tensors')}, none of "
                f"them wider than {widest:,}",
                mend=WHOLE,
            )


def _numbers(key: str, value: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """All whole numbers, each with the key it stands under; what is nested deeper is refused where it is taken over."""
    if depth > DEEPEST:
        return
    if type(value) is int:
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _numbers(str(name), each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(key, each, depth + 1)


@contextlib.contextmanager
def counted_building(tensors: int, elements: int) -> Iterator[None]:
    """What is built in this thread while this lasts is counted, and stopped where it is too much.

    Args:
        tensors: that the files hold.
        elements: of all of them.

    Raises:
        TooMuchError: there are far more modules, parameters or elements of buffers.
    """
    here = threading.get_ident()
    most = {
        "modules": MODULES_A_TENSOR * tensors + SPARE_MODULES,
        "elements of weights": TIMES_HELD * elements + SPARE_WEIGHTS,
        "elements of buffers": TIMES_HELD * elements + SPARE_BUFFERS,
    }
    built = dict.fromkeys(most, 0)

    def count(what: str, _owner: nn.Module, _name: str, made: Any) -> None:
        if threading.get_ident() != here:
            return
        built[what] += made.numel() if isinstance(made, torch.Tensor) else 1
        if built[what] > most[what]:
            raise TooMuchError(f"it asks for {built[what]:,} {what}, or more")

    handles = [
        hooks.register_module_module_registration_hook(partial(count, "modules")),
        hooks.register_module_parameter_registration_hook(partial(count, "elements of weights")),
        hooks.register_module_buffer_registration_hook(partial(count, "elements of buffers")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
