"""Whether an artifact's signature is what its file says: Triton takes the file's word, and loads no other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compress.artifact import Artifact, TensorSpec
from compress.errors import RepositoryError
from serve.pack.onnx_model import DTYPES
from serve.pack.onnx_reader import OnnxTensor, read_onnx

__all__ = ["refuse_other_signature"]


def refuse_other_signature(artifact: Artifact) -> None:
    """Hold the signature of an ONNX artifact against its file, where the runtime that serves it is there to be asked.

    What the runtime refuses is left to whoever lints.

    Raises:
        RepositoryError: a tensor is missing in one of them, or of another type, or of a size that the other has not.
    """
    found = read_onnx([artifact.model_path], artifact.runtime) if artifact.format == "onnx" else None
    held = None if found is None else found[artifact.model_path]
    if held is None or held.error:
        return
    sides = (("input", artifact.signature.inputs, held.inputs), ("output", artifact.signature.outputs, held.outputs))
    for kind, told, there in sides:
        if why := _other(kind, told, there):
            raise RepositoryError(
                f"won't pack {artifact.model_path.parent}",
                why=f"artifact.json says {why}",
                mend="it is of another model, or was changed: export it again, or pack the .onnx file itself",
            )


def _other(kind: str, told: Sequence[TensorSpec], there: Sequence[OnnxTensor]) -> str:
    """The first thing that is told otherwise, in words, or ""."""
    specs, tensors = {spec.name: spec for spec in told}, {tensor.name: tensor for tensor in there}
    if specs.keys() != tensors.keys():
        return f"that the {kind}s are {_names(specs)}; in the file they are {_names(tensors)}"
    for name, spec in specs.items():
        tensor = tensors[name]
        dtype = DTYPES.get(tensor.type.removeprefix("tensor(").removesuffix(")"), tensor.type)
        sizes = [size if isinstance(size, int) else -1 for size in spec.shape]
        alike = len(sizes) == len(tensor.shape) and all(
            -1 in pair or pair[0] == pair[1] for pair in zip(sizes, tensor.shape, strict=True)
        )
        if spec.dtype != dtype or not (alike or not tensor.shape):  # OpenVINO tells no shape of a rank that varies
            given = ", ".join("any" if size == -1 else str(size) for size in tensor.shape)
            return f"that the {kind} is {spec}; in the file it is {name}:{dtype}[{given}]"
    return ""


def _names(of: Iterable[str]) -> str:
    return ", ".join(sorted(repr(each)[:80] for each in of))[:300] or "none"
