"""An ONNX file of someone else's as a model: its signature from the file, its outputs' shapes from running it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnxruntime as ort

from compress.artifact import Signature
from compress.errors import SignatureError, StageError
from compress.formats.onnx.outline import outline
from compress.formats.onnx.read import signature_of_onnx
from compress.formats.onnx.scope import opset_of
from compress.model import OnnxModel
from compress.model.infer import infer_signature, proven
from compress.signature import TensorSpec
from compress.storage.shortages import raise_shortage
from compress.storage.steady import seen
from compress.vetting.onnx_wire import vet_onnx

__all__ = ["beside", "fingerprint_of_file", "is_onnx", "load_onnx"]

OLDEST = 7
FIRST_BYTE = b"\x08"  # the field of the IR version, which every exporter writes first


def is_onnx(path: Path) -> bool:
    """Whether a path is taken for an ONNX file: by its ending, or by how it begins."""
    if path.suffix == ".onnx":
        return not path.is_dir()
    try:
        with path.open("rb") as file:
            return file.read(1) == FIRST_BYTE
    except OSError:
        return False


def load_onnx(path: Path, sizes: Mapping[str, int] | None = None) -> OnnxModel:
    """Look through a file, and run it at a few sizes for the shapes of its outputs.

    Dimensions that must be alike, though each input has a name of its own for them, get the first input's.

    Args:
        path: of the file; weights may lie in its folder.
        sizes: what is usual for dimensions that vary.

    Raises:
        StageError: it is no ONNX file, reaches beyond itself, or has inputs or outputs that are no tensors of numbers.
        SignatureError: it does not run on inputs of its signature.
    """
    if not path.is_file():
        why = "there is no such file"
        raise StageError(f"can't read {path}", why=why, mend="name an .onnx file as its exporter wrote it")
    declared = signature_of_onnx(path)
    if (opset := opset_of(outline(path))) < OLDEST:
        raise StageError(
            f"can't use {path}",
            why=f"it is in opset {opset}; ONNX Runtime runs {OLDEST} and up as they were meant",
            mend="export the model again with a newer opset",
        )
    names = [spec.name for spec in declared.outputs]
    wanted = dict(sizes or {})
    first: SignatureError | None = None
    for inputs in _readings(declared.inputs):
        module = OnnxModel(path, Signature(inputs, ())).module
        try:
            found = infer_signature(module, inputs, names, wanted).sized(wanted)
            return OnnxModel(path, proven(module, found))
        except SignatureError as err:
            first = first or err
    assert first is not None  # noqa: S101  there is one reading at least
    raise SignatureError(
        f"can't run {path}",
        why=f"{first.what}: {first.why}",
        mend="give dimensions that vary a --size that it takes, as in --size seq=128; dimensions of one size need one "
        "name in the file"
        if _opens(path)
        else "ONNX Runtime does not load it, whatever the sizes: export the model again",
    ) from first


def _opens(path: Path) -> bool:
    """Whether ONNX Runtime loads a file, which has been looked through."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as err:  # of its own classes, without a common base
        raise_shortage(err)
        return False
    return True


def _readings(inputs: tuple[TensorSpec, ...]) -> Iterator[tuple[TensorSpec, ...]]:
    """The inputs as they are declared, then with one name for what stands at the same place of inputs alike."""
    yield inputs
    leading = [str(spec.shape[0]) for spec in inputs if spec.batched]
    one = dict.fromkeys(leading, leading[0]) if leading else {}
    if len(one) > 1:
        yield _renamed(inputs, one)
    known = len(one)
    for spec in inputs:
        like = next(other for other in inputs if len(other.shape) == len(spec.shape))
        for mine, first in zip(spec.shape, like.shape, strict=True):
            if isinstance(mine, str) and isinstance(first, str):
                one.setdefault(mine, first)
    if any(name != other for name, other in list(one.items())[known:]):
        yield _renamed(inputs, one)


def _renamed(inputs: tuple[TensorSpec, ...], names: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    return tuple(
        dataclasses.replace(
            spec, shape=tuple(names.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape)
        )
        for spec in inputs
    )


def beside(path: Path) -> list[Path]:
    """Files with weights of an ONNX file, in its folder: all that its vetting has found, wherever in it they are named.

    Raises:
        OnnxFileError: it is damaged, or one of them is missing.
    """
    return sorted({path.parent / place for place in vet_onnx(path, runs=False).outside})


def fingerprint_of_file(path: Path) -> str:
    """Hex SHA-256 of a file and of the weights beside it."""
    told = [seen(path), *([str(each.relative_to(path.parent)), seen(each)] for each in beside(path))]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
