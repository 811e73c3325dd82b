"""Whether a model has attention in it, before it is exported."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compress.formats.onnx.outline import outline
from compress.model import OnnxModel, TorchModel, example_inputs
from compress.quantize.int8_onnx import attention

__all__ = ["attends"]

CALLED = ("softmax", "attention", "transformer_encoder")  # in the names of torch's operators


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operator that runs."""

    found: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or any(word in str(func) for word in CALLED)
        return func(*args, **(kwargs or {}))


def attends(model: TorchModel | OnnxModel) -> bool:
    """Whether a Softmax or an attention runs in it, on one made-up sample.

    A Softmax at the end is one, too: the exported graph tells for certain (see `attention`).
    """
    if isinstance(model, OnnxModel):
        return attention(outline(model.path))[0] is not None
    arrays = example_inputs(model.signature.inputs, model.signature.at(1))
    given = [torch.from_numpy(arrays[spec.name]) for spec in model.signature.inputs]
    watch = _Watch()  # type: ignore[no-untyped-call]
    with contextlib.suppress(Exception), watch, torch.no_grad():  # a forward that fails here fails in the export, too
        model.module(*given)
    return watch.found
