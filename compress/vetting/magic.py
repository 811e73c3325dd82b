"""What a file is that was taken for a model, for a message: told from its first bytes, none of it is run."""

from __future__ import annotations

from pathlib import Path

from compress.vetting.archive import Archive, ArchiveError

__all__ = ["ARRAYS", "EXPORTED", "HEAD", "kind_in_words", "looks_like"]

MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x89PNG\r\n\x1a\n", "a picture (PNG)"),
    (b"\xff\xd8\xff", "a picture (JPEG)"),
    (b"GIF87a", "a picture (GIF)"),
    (b"GIF89a", "a picture (GIF)"),
    (b"II*\0", "a picture (TIFF)"),
    (b"MM\0*", "a picture (TIFF)"),
    (b"\x93NUMPY", "an array (.npy), which is data and no model"),
    (b"GGUF", "a GGUF file"),
    (b"%PDF-", "a PDF"),
    (b"\x1f\x8b", "a gzip archive"),
)
"""Whole magic numbers: a first byte alone is shared by kinds that have nothing in common."""
TAR, TAR_AT = b"ustar", 257
HEAD = TAR_AT + len(TAR)
ONNX, TORCH, SAFETENSORS = "an ONNX file", "a file of PyTorch", "a safetensors file"
ARRAYS = "arrays (.npz), which are data and no model"
NOTHING = "nothing that torch.save writes"
EXPORTED = (ONNX, TORCH, SAFETENSORS)
"""What `compress export` makes an artifact of."""


def looks_like(head: bytes) -> str:
    """In words, by the first HEAD bytes of a file that is no PyTorch model."""
    for magic, what in MAGIC:
        if head.startswith(magic):
            return what
    if head[TAR_AT:].startswith(TAR):
        return "a tar archive"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "a picture (WebP)"
    return {b"\x08": ONNX, b"{": "JSON"}.get(head[:1], NOTHING)


def kind_in_words(path: Path) -> str:
    """The same of any file; "" where it can't be told."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
            names = [name.rpartition("/")[2] for name in Archive(file).entries] if head.startswith(b"PK") else []
    except (ArchiveError, OSError):
        return ""
    if names:
        arrays = all(name.endswith(".npy") for name in names)
        return ARRAYS if arrays else TORCH if "data.pkl" in names else ""
    if head[:1] == b"\x80":  # the opcode that opens every pickle of protocol 2 and later
        return TORCH
    if head[8:9] == b"{":
        return SAFETENSORS
    told = looks_like(head)
    return "" if told == NOTHING else told
