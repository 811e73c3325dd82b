"""What tasks leave on a node that were killed: folders among those for temporary files, named for this project."""

from __future__ import annotations

from compress.data.dataset import SCRATCH
from compress.vetting.scratch import sweep

__all__ = ["RAY", "tidy"]

RAY = f"{SCRATCH}ray-"


def tidy() -> None:
    """On a node, remove those whose owner is gone; who is at work holds the lock of its own."""
    sweep(SCRATCH)  # what is made of data among them
