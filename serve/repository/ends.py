"""Whether a model's code has something to do at its end."""

from __future__ import annotations

from pathlib import Path

from compress.vetting.texts import read_text
from serve.repository.folders import files_of

__all__ = ["finishes"]

ENDS = "finalize", "atexit", "__del__"


def finishes(folder: Path, backend: str) -> bool:
    """Whether any code in a model's folder names what Python or Triton calls at an end; what can't be read may.

    Args:
        folder: of the model.
        backend: of its configuration; code is run for "python" alone.
    """
    try:
        code = [path for path in files_of(folder) if path.suffix == ".py"] if backend == "python" else []
        return any(name in text for text in map(read_text, code) for name in ENDS)
    except (OSError, ValueError):
        return True
