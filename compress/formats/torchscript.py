"""Load TorchScript: a program, with operators that write and read files, and methods that run while it is loaded.

What it would run can't be told before it is loaded: its types bring methods and classes of C++ that are restored by
running them. So it has to be trusted.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn

from compress.errors import CheckpointError, first_line

__all__ = ["load_torchscript"]


def load_torchscript(path: Path, *, trust: bool) -> nn.Module:
    """Load a file that torch.jit.save wrote; it has no layers, so it can be exported and quantized but not pruned.

    Args:
        path: the file.
        trust: load it; else it is refused.

    Raises:
        CheckpointError: it is not trusted, or damaged.
    """
    if not trust:
        raise CheckpointError(
            f"won't load {path}: it would run code",
            why="TorchScript runs operators of the file's choice, while it is loaded, too; some write and read files",
            mend="save the module itself by compress.save(module, path, inputs=…); or, if you trust whoever made it, "
            "add --trust",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module: nn.Module = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
            return module
    except RuntimeError as err:
        why = first_line(err)
        raise CheckpointError(f"can't load the TorchScript file {path}", why=why, mend="save it again") from err
