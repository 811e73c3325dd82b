"""Any ONNX file as something to pack: its signature is what ONNX Runtime says of it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from compress.artifact import RUNTIME_EXTRAS, RUNTIME_NAMES, Artifact, Runtime, Signature, TensorSpec, sha256_of
from compress.errors import MissingExtraError, RepositoryError
from serve.pack.onnx_reader import OnnxTensor, read_onnx

__all__ = ["DTYPES", "artifact_of_onnx"]

DTYPES = {
    "bool": "bool", "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64", "int8": "int8",
    "int16": "int16", "int32": "int32", "int64": "int64", "float16": "float16", "float": "float32",
    "double": "float64", "string": "string",
}  # fmt: skip
"""numpy's name for each type that ONNX Runtime writes as tensor(…)."""


def artifact_of_onnx(path: Path, runtime: Runtime = "onnxruntime") -> Artifact:
    """An artifact that stands for an ONNX file from elsewhere; nothing is written.

    Where the first dimension of every tensor is symbolic, it is taken for the batch.

    Args:
        path: of the file, with its weights inside.
        runtime: that is to serve it.

    Raises:
        RepositoryError: the runtime refuses it, or it has a tensor that Triton can't take.
        MissingExtraError: there is no such runtime to read it with.
    """
    if not path.is_file():
        raise RepositoryError(f"can't serve {path}", why="there is no such file", mend="name an ONNX file")
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "model.onnx"  # away from weights that stand beside it, which would not be packed
        shutil.copyfile(path, alone)
        found = read_onnx([alone], runtime)
    if found is None:
        raise MissingExtraError(f"can't read {path}", module=runtime, extra=RUNTIME_EXTRAS[runtime])
    held = found[alone]
    if held.error:
        mend = "export it again; with its weights inside, if they stand in a file of their own"
        raise RepositoryError(
            f"can't serve {path}", why=f"{RUNTIME_NAMES[runtime]} refuses it: {held.error}", mend=mend
        )
    free = all(tensor.shape[:1] == (-1,) for tensor in (*held.inputs, *held.outputs))
    inputs, outputs = (
        tuple(_spec(path, tensor, batched=free) for tensor in side) for side in (held.inputs, held.outputs)
    )
    return Artifact(path.parent, path.name, "onnx", sha256_of(path), Signature(inputs, outputs))


def _spec(path: Path, tensor: OnnxTensor, *, batched: bool) -> TensorSpec:
    kind = tensor.type.removeprefix("tensor(").removesuffix(")")
    if kind not in DTYPES:
        raise RepositoryError(
            f"can't serve {path}",
            why=f"{tensor.name!r} is {tensor.type}, which Triton's tensors can't be",
            mend="export it with plain tensors as inputs and outputs",
        )
    names = [f"dim{number}" for number in range(len(tensor.shape))]
    if batched:
        names[0] = "batch"
    shape = tuple(name if dim == -1 else dim for name, dim in zip(names, tensor.shape, strict=True))
    return TensorSpec(tensor.name, DTYPES[kind], shape)
