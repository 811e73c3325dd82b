"""torch's encoder layers as calls of the layers inside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["unfused"]


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """An encoder layer's one operator for all of it does not call the layers inside: not until the block's end."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
