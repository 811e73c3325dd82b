"""From a trained PyTorch model to a pruned, INT8, measured ONNX file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.artifact import Artifact
    from compress.formats.checkpoint import load, save
    from compress.jobs.export import export, optimize
    from compress.options import ExportOptions, OptimizeOptions

__version__ = "0.1.0"
__all__ = ["Artifact", "ExportOptions", "OptimizeOptions", "export", "load", "optimize", "save"]

# ONNX Runtime's wheels keep an identifier in the home folder and send events about the machine to their makers: before
# it is imported, and in every process that is started from here, unless the user says 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def _keep_torch_apart() -> None:
    """torch makes a folder in /tmp, by a name that anybody can take before: it goes into this user's own cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.environ.get("HOME") or "/nowhere") / ".cache"
    there = next(each for each in (base, *base.parents) if os.path.lexists(each))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):  # else torch could make none there
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(base / "compress-serve" / "torch"))


_keep_torch_apart()

_HOMES = {
    "Artifact": "compress.artifact",
    "ExportOptions": "compress.options",
    "OptimizeOptions": "compress.options",
    "export": "compress.jobs.export",
    "load": "compress.formats.checkpoint",
    "optimize": "compress.jobs.export",
    "save": "compress.formats.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is used: `compress.artifact` is read where there is none."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found
