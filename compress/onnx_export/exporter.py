"""torch.onnx's exporter, put right around one export: quiet, with no loops left of another, and its table kept."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["around"]

_TABLES: dict[int, Any] = {}
"""By opset, how each operator of torch is written."""


@contextlib.contextmanager
def around() -> Iterator[None]:
    """Around one call of ``torch.onnx.export``."""
    with _quiet(), _dispatched_anew(), _table_kept():
        yield


@contextlib.contextmanager
def _dispatched_anew() -> Iterator[None]:
    """The exporter puts loops in place of recurrent layers for as long as it runs, which torch 2.13 remembers wrongly:
    a second network in a process would be unrolled, to one length."""
    recurrent = (torch.ops.aten.lstm.input, torch.ops.aten.gru.input)

    def forget() -> None:
        for operator in recurrent:
            operator._dispatch_cache.clear()

    forget()
    try:
        yield
    finally:
        forget()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints and warns about itself, not about the user's model."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _table_kept() -> Iterator[None]:
    """torch 2.13 makes its table of operators anew for each export, out of the source text of 500 functions: a third of
    the time that a small network takes. Another torch, whose insides are other ones, goes on as it is."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry as Registry
    except ImportError:
        yield
        return
    made = vars(Registry).get("from_torchlib")
    if not isinstance(made, classmethod) or not hasattr(Registry(), "functions"):
        yield
        return
    make = Registry.from_torchlib

    def kept(cls: type[Any], opset_version: int = Registry().opset_version) -> Any:
        if opset_version not in _TABLES:
            _TABLES[opset_version] = make(opset_version)
        table = cls()
        table._opset_version = opset_version
        table.functions = {name: list(ways) for name, ways in _TABLES[opset_version].functions.items()}
        return table

    Registry.from_torchlib = classmethod(kept)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Registry.from_torchlib = made  # type: ignore[method-assign, assignment]
