"""What kind of model file a path holds, told from its bytes and without running any of it."""

from __future__ import annotations

import enum
from pathlib import Path

from compress.errors import CheckpointError, first_line
from compress.formats.hub.folder import is_hub_folder, named_on_a_hub, perhaps_on_a_hub
from compress.vetting.archive import Archive, ArchiveError
from compress.vetting.files import open_file
from compress.vetting.magic import ARRAYS, HEAD, looks_like

__all__ = ["FileKind", "file_kind"]

DATA_MEND = "name the model first, and give the data by a flag: --eval, --calibration or --finetune"


class FileKind(enum.Enum):
    """The containers that hold PyTorch models."""

    PICKLE = "torch.save file"
    LEGACY_PICKLE = "legacy torch.save file (before PyTorch 1.6)"
    TORCHSCRIPT = "TorchScript"
    EXPORTED_PROGRAM = "exported program"
    SAFETENSORS = "safetensors file"
    HUB_FOLDER = "Hugging Face folder"


def file_kind(path: Path) -> FileKind:
    """Look inside a file.

    Raises:
        CheckpointError: it is missing, empty, truncated, or nothing that PyTorch writes.
    """
    mend = "name a file that torch.save or compress.save wrote, or a Hugging Face folder"
    try:
        if path.is_dir() and is_hub_folder(path):
            return FileKind.HUB_FOLDER
        if named_on_a_hub(path):
            raise CheckpointError(
                f"can't read {path}",
                why="there is no such folder, and nothing is fetched from a hub",
                mend=f"hf download {path} --local-dir {path.name}, then name the folder {path.name}",
            )
        if not path.is_file():
            if perhaps_on_a_hub(path):
                mend += f"; for a model of a hub: hf download {path} --local-dir {path}, then this command again"
            why = "it is a folder without a config.json" if path.is_dir() else "there is no such file"
            raise CheckpointError(f"can't read {path}", why=why, mend=mend)
        with open_file(path) as file:
            head = file.read(HEAD)
    except OSError as err:  # a name that no file can have, or a file of someone else's
        raise CheckpointError(f"can't read {path}", why=err.strerror or str(err), mend=mend) from err
    if not head:
        raise CheckpointError(f"can't read {path}", why="it is empty", mend="save the model again")
    if head.startswith(b"PK"):
        return _kind_of_zip(path)
    if head[0] == 0x80:  # the opcode that opens every pickle of protocol 2 and later
        return FileKind.LEGACY_PICKLE
    if head[8:9] == b"{":
        return FileKind.SAFETENSORS
    if head.startswith(b"\x93NUMPY"):
        mend = DATA_MEND
    if head[0] == 0x08:
        mend = "`compress export`, `optimize`, `inspect` and `measure` take ONNX files; what trains starts from torch"
    raise CheckpointError(
        f"can't read {path} as a PyTorch model",
        why=f"it looks like {looks_like(head)}",
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
    if names and all(name.endswith(".npy") for name in names):
        raise CheckpointError(
            f"can't read {path} as a PyTorch model",
            why=f"it looks like {ARRAYS}",
            mend=DATA_MEND,
        )
    raise CheckpointError(
        f"can't read {path} as a PyTorch model",
        why="it is a zip archive without a data.pkl",
        mend="save the model with compress.save(module, path, inputs=…)",
    )
