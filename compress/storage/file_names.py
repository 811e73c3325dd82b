"""Names of files that are made of names of tensors, which may hold anything."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

__all__ = ["file_name"]

LONGEST = 150  # of 255 bytes that file systems allow, the rest being for what stands around it


def file_name(name: str) -> str:
    """A part of a file's name: no two names have the same, and those of letters, digits and _.-~ stay as they are."""
    made = quote(name, safe="")
    return made if len(made) <= LONGEST else hashlib.sha256(name.encode()).hexdigest()
