"""Read pickles without running their code.

torch's restricted unpickler builds tensors and plain containers; `torch.nn` module classes and a few harmless ones
are allowed by name. Anything else in a file is refused unless the user says that the file is trusted.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from compress.errors import CheckpointError, first_line

__all__ = ["unpickle"]


def unpickle(path: Path, *, trust: bool) -> Any:
    """What torch.save put into a file.

    Args:
        path: a zip or legacy torch.save file.
        trust: run whatever code the pickle names.

    Raises:
        CheckpointError: it is damaged, or would run code.
    """
    try:
        if trust:
            sys.path.insert(0, "")  # the classes of a pickle usually stand in the folder of the training script
            try:
                return torch.load(path, map_location="cpu", weights_only=False)
            finally:
                sys.path.remove("")
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path) if path.read_bytes()[:2] == b"PK" else []
        safe: list[Any] = []
        foreign: list[str] = []
        for name in unsafe:
            if (found := _harmless(name)) is None:
                foreign.append(name)
            else:
                safe.append(found)
        if foreign:
            raise CheckpointError(
                f"won't load {path}: it would run code",
                why=f"it is a pickle that calls {', '.join(foreign)}",
                mend="save it again with compress.save(module, path, inputs=…) or as a state_dict; "
                "or, if you trust whoever made it, add --trust-pickle",
            )
        if np.dtype in safe:
            safe += [getattr(np.dtypes, name) for name in np.dtypes.__all__ if name != "ObjectDType"]
        with torch.serialization.safe_globals(safe):
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except (ImportError, AttributeError) as err:
        raise CheckpointError(
            f"can't load the pickle {path}",
            why=f"it needs Python code that is not here: {err}",
            mend="run the command from the folder that holds the model's module, or set PYTHONPATH to it",
        ) from err
    except Exception as err:  # torch gives anything from EOFError to RuntimeError for damaged bytes
        why = first_line(err)
        if "WeightsUnpickler error" in why or "Weights only load failed" in why:
            why = "it is a pickle that holds more than tensors"
        raise CheckpointError(
            f"can't load {path}",
            why=why,
            mend="save it again, or, if it is whole and you trust whoever made it, add --trust-pickle",
        ) from err


def _harmless(name: str) -> Callable[..., Any] | type | None:
    """The global of that name if it is a torch.nn module class or a plain container, else None."""
    module_name, _, attribute = name.rpartition(".")
    known: dict[str, Any] = {
        "argparse.Namespace": argparse.Namespace,
        "numpy.dtype": np.dtype,
        "numpy.ndarray": np.ndarray,
    }
    if name in known:
        return known[name]  # type: ignore[no-any-return]
    if module_name in ("numpy.core.multiarray", "numpy._core.multiarray") and attribute in ("scalar", "_reconstruct"):
        return getattr(importlib.import_module("numpy.core.multiarray"), attribute)  # type: ignore[no-any-return]
    if module_name.startswith("torch.nn.") and module_name in sys.modules:
        found = getattr(sys.modules[module_name], attribute, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
        if module_name == "torch.nn.functional" and inspect.isfunction(found):
            return found
    return None
