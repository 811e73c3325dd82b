"""What torch.export refuses, told by input and dimension, with what mends each kind."""

from __future__ import annotations

import re
import traceback

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from compress.artifact import Signature
from compress.errors import StageError

__all__ = ["refused"]

_STATIC = re.compile(r"inferred a static shape of (\d+) for dimension inputs\['([^']+)'\]\.shape\[(\d+)\]")
_UNTRANSLATED = re.compile(r"Error when translating node .*?target=(?:torch\.ops\.)?(?:\w+\.)?(\w+)")
_LONGEST = 300
PACKING = pack_padded_sequence.__code__.co_filename
RECURRENT = nn.RNNBase.__init__.__code__.co_filename
_OTHERS = {
    "scaled_dot_product_attention": "give it queries, keys and values as [batch, heads, length, size], with the same "
    "batches and, of fewer keys than queries, these repeated",
}


def refused(err: Exception, module: nn.Module, signature: Signature) -> StageError:
    """The error for an export that failed.

    Args:
        err: of torch.onnx, which wraps anything that the user's forward may do.
        module, signature: that were exported.
    """
    cause = err.__cause__ or err
    untranslated = _UNTRANSLATED.search(str(cause))
    while type(cause).__module__.startswith("torch.onnx.") and cause.__cause__ is not None:  # which wraps the reason
        cause = cause.__cause__
        untranslated = untranslated or _UNTRANSLATED.search(str(cause))
    lines = [line.strip(" -") for line in str(cause).splitlines() if line.strip(" -")]
    fixed = list(dict.fromkeys(match for line in lines for match in _STATIC.findall(line)))
    if fixed:
        return _of_fixed(fixed, module, signature)
    told = " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines or [""])[0]
    mend = "make the forward free of branches on tensor values, or export a part of it"
    if "control flow" in told:
        mend = (
            "make the forward free of branches on tensor values, and on sizes divided by `/` (write `//`); or export a "
            "part of it"
        )
    elif "structure" in told:
        mend = "give its forward a parameter for each input, each a tensor, such as forward(self, x, mask)"
    elif "conflicts" in told or "Constraints violated" in told:
        mend = (
            "look in the forward for what a size decides; or write a number in place of a dimension of which one size "
            "alone is used (`--input`, `inputs=` in compress.save)"
        )
    if _packs(cause):
        told = f"of sequences that are packed by their lengths: {told}"
        mend = (
            "give the layer the padded sequences in place of packed ones, and mask what it gives behind their lengths; "
            "or export a part of it"
        )
    elif untranslated is not None:
        operator = untranslated[1]
        told = f"at {operator}: {told}"
        other = _OTHERS.get(operator, f"write what {operator} does by other operators in the forward")
        mend = f"{other}; or export a part of it"
    if any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
        mend = (
            "save the module that this TorchScript was made of: by compress.save(module, path, inputs=…), or "
            "torch.export.save; what was traced under torch.no_grad has some layers as one operator each"
        )
    return StageError("torch.onnx can't export this model", why=f"{type(cause).__name__}: {told}"[:_LONGEST], mend=mend)


def _packs(err: BaseException) -> bool:
    """Whether it was raised where sequences are packed, or by a layer of torch that was given packed ones."""
    return any(
        ("pack" in frame.f_code.co_qualname.lower() if frame.f_code.co_filename == PACKING else False)
        or (
            frame.f_code.co_filename == RECURRENT
            and any(isinstance(each, PackedSequence) for each in frame.f_locals.values())
        )
        for frame, _ in traceback.walk_tb(err.__traceback__)
    )


def _of_fixed(fixed: list[tuple[str, str, str]], module: nn.Module, signature: Signature) -> StageError:
    """Of dimensions that became the size that they were traced at."""
    shapes = {spec.name: spec.shape for spec in signature.inputs}
    alone = signature.inputs[0].name if len(signature.inputs) == 1 else ""
    told, dims = [], []
    for size, given, axis in fixed:
        name = given if given in shapes else alone
        shape = shapes.get(name, ())
        dim = shape[int(axis)] if int(axis) < len(shape) else None
        dims.append(dim if isinstance(dim, str) else f"axis {axis}")
        told.append(f"{dims[-1]} of {name or given!r} became {size}")
    named = ", ".join(dict.fromkeys(dims))
    recurrent = any(type(layer) is nn.RNN for layer in module.modules())
    return StageError(
        "torch.onnx can't export this model with a free " + named,
        why=f"torch.export writes it for one size alone: {', '.join(dict.fromkeys(told))}"[:_LONGEST],
        mend=f"write the size that is used in place of {named} (`--input`, `inputs=` in compress.save)"
        + ("; or take nn.GRU or nn.LSTM, whose length may be free, in place of nn.RNN" if recurrent else ""),
    )
