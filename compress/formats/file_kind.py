"""What kind of model file a path holds, told from its bytes and without running any of it."""

from __future__ import annotations

import enum
from pathlib import Path

from compress.errors import CheckpointError, first_line
from compress.vetting.archive import Archive, ArchiveError

__all__ = ["FileKind", "file_kind"]


class FileKind(enum.Enum):
    """The containers that hold PyTorch models."""

    PICKLE = "torch.save file"
    LEGACY_PICKLE = "legacy torch.save file (before PyTorch 1.6)"
    TORCHSCRIPT = "TorchScript"
    EXPORTED_PROGRAM = "exported program"


def file_kind(path: Path) -> FileKind:
    """Look inside a file.

    Raises:
        CheckpointError: it is missing, empty, truncated, or nothing that PyTorch writes.
    """
    mend = "name a file that torch.save or compress.save wrote"
    try:
        if not path.is_file():
            why = "it is a folder" if path.is_dir() else "there is no such file"
            raise CheckpointError(f"can't read {path}", why=why, mend=mend)
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as err:  # a name that no file can have, or a file of someone else's
        raise CheckpointError(f"can't read {path}", why=err.strerror or str(err), mend=mend) from err
    if not head:
        raise CheckpointError(f"can't read {path}", why="it is empty", mend="save the model again")
    if head.startswith(b"PK"):
        return _kind_of_zip(path)
    if head[0] == 0x80:  # the opcode that opens every pickle of protocol 2 and later
        return FileKind.LEGACY_PICKLE
    what = {b"\x08": "an ONNX file", b"{": "JSON", b"\x89": "an HDF5 file"}.get(
        head[:1], "nothing that torch.save writes"
    )
    if head[8:9] == b"{":
        what = "a safetensors file"
    mend = "save the model with compress.save(module, path, inputs=…), or torch.save(model.state_dict(), path)"
    if head[0] == 0x08:
        mend = "`compress export`, `optimize`, `inspect` and `measure` take ONNX files; what trains starts from torch"
    raise CheckpointError(
        f"can't read {path} as a PyTorch model",
        why=f"it looks like {what}",
        mend=mend,
    )


def _kind_of_zip(path: Path) -> FileKind:
    try:
        with path.open("rb") as file:
            names = {name.partition("/")[2] or name for name in Archive(file).entries}
    except (ArchiveError, OSError) as err:
        raise CheckpointError(
            f"can't read {path}",
            why=first_line(err),
            mend="copy or download the file again and compare its size with the original's",
        ) from err
    if "archive_format" in names or any(
        name.endswith(("serialized_exported_program.json", "models/model.json")) for name in names
    ):
        return FileKind.EXPORTED_PROGRAM
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        return FileKind.TORCHSCRIPT
    if "data.pkl" in names:
        return FileKind.PICKLE
    raise CheckpointError(
        f"can't read {path} as a PyTorch model",
        why="it is a zip archive without a data.pkl",
        mend="save the model with compress.save(module, path, inputs=…)",
    )
