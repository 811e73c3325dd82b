"""What a model, a version and a file in a folder may be called: one rule for packing, linting, releasing and asking."""

from __future__ import annotations

from pathlib import PurePosixPath

__all__ = ["LONGEST", "MODEL_NAME", "PACKED_NAME", "VERSION", "leads_out"]

# Triton does not decode its paths, so no other name can be served over HTTP. "." and ".." stay out, and so does
# "stats": /v2/models/stats gives every model's statistics.
_ASKABLE = r"(?!(?:\.{1,2}|stats)(?:/|$))"
LONGEST = 256  # letters of a model's name
MODEL_NAME = _ASKABLE + rf"[A-Za-z0-9_.+:@=~-]{{1,{LONGEST}}}"
# What is packed is a folder, too, after which its parts, metrics and manifests are called.
PACKED_NAME = _ASKABLE + r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}"
VERSION = r"[0-9]{1,18}"


def leads_out(name: str) -> bool:
    """Whether a name that is to stand in a folder leads out of it."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts
