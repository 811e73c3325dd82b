"""What tasks leave on a node that were killed: folders among those for temporary files, named for this project."""

from __future__ import annotations

from compress.vetting.scratch import sweep

__all__ = ["RAY", "tidy"]

ALL = "compress-"  # what is made of data is named so, too
RAY = f"{ALL}ray-"


def tidy() -> None:
    """On a node, remove those whose owner is gone; who is at work holds the lock of its own."""
    sweep(ALL)
