"""Read pickles without running their code: on a machine of our own (`compress.formats.pickles.machine`), unless
trusted."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import torch

from compress.errors import CheckpointError, first_line
from compress.formats.pickles.archive import DamagedError, LegacyStorages, OtherTensorError, ZipStorages
from compress.formats.pickles.machine import Machine

__all__ = ["unpickle"]

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001


def unpickle(path: Path, *, trust: bool) -> Any:
    """What torch.save put into a file.

    Args:
        path: a zip or legacy torch.save file.
        trust: run whatever code the pickle names.

    Returns:
        Without trust: plain containers and values (exact types), tensors and parameters, and descriptions of anything
        else (`Global`, `Instance`). They may hold each other in circles.

    Raises:
        CheckpointError: it is damaged, or would run code.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"
        if trust:
            return _trusted(path, zipped)
        return _read(path, zipped)
    except CheckpointError:
        raise
    except OtherTensorError as err:
        mend = "save it from plain tensors; or, if you trust whoever made it, add --trust"
        raise CheckpointError(f"can't load {path}", why=str(err), mend=mend) from err
    except DamagedError as err:
        mend = "copy or download it again; or, if it is whole and you trust whoever made it, add --trust"
        raise CheckpointError(f"can't load {path}", why=str(err), mend=mend) from err
    except (ImportError, AttributeError) as err:
        raise CheckpointError(
            f"can't load the pickle {path}",
            why=f"it needs Python code that is not here: {err}",
            mend="run the command from the folder that holds the model's module, or set PYTHONPATH to it",
        ) from err
    except Exception as err:  # of the file's own code, which may raise anything, or of the disk
        raise CheckpointError(f"can't load {path}", why=first_line(err), mend="save it again") from err


def _trusted(path: Path, zipped: bool) -> Any:
    sys.path.insert(0, "")  # the classes of a pickle usually stand in the folder of the training script
    try:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=zipped)
    finally:
        sys.path.remove("")


def _read(path: Path, zipped: bool) -> Any:
    storages = ZipStorages(path) if zipped else LegacyStorages(path.stat().st_size)
    machine = Machine(storages)
    content = None
    try:
        if isinstance(storages, ZipStorages):
            content = machine.run(io.BytesIO(storages.pickle))
        else:
            content = _legacy(machine, storages, path)
    except DamagedError:
        if not machine.foreign:
            raise
    if not machine.foreign:
        return content
    names = [name if len(name) <= 80 else f"{name[:80]}…" for name in sorted(machine.foreign)]
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:8])
    raise CheckpointError(
        f"won't load {path}: it would run code",
        why=f"it is a pickle that calls {shown}",
        mend="save it again with compress.save(module, path, inputs=…) or as a state_dict; "
        "or, if you trust whoever made it, add --trust",
    )


def _legacy(machine: Machine, storages: LegacyStorages, path: Path) -> Any:
    """From before PyTorch 1.6: five pickles, the fourth of them the object, then the storages."""
    with path.open("rb") as file:
        magic = machine.run(file)
        if type(magic) is not int or magic != _LEGACY_MAGIC:
            raise DamagedError("it is a pickle that torch.save did not write")
        protocol, system = machine.run(file), machine.run(file)
        if protocol != _LEGACY_PROTOCOL or type(system) is not dict or system.get("little_endian") is not True:
            raise DamagedError("it is of another protocol than torch.save's, or big-endian")
        content = machine.run(file)
        storages.fill(machine.run(file), file)
    return content
