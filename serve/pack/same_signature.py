"""Whether an artifact's signature is what its file declares: Triton takes the file's word, and loads no other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compress.artifact import Artifact, TensorSpec
from compress.errors import RepositoryError
from compress.vetting.onnx_declared import Declared
from compress.vetting.onnx_wire import Calls

__all__ = ["refuse_other_signature"]


def refuse_other_signature(artifact: Artifact, file: Calls) -> None:
    """Hold the signature of an ONNX artifact against what its file declares.

    Args:
        artifact: as its artifact.json tells it.
        file: what `vet_onnx` found in its file.

    Raises:
        RepositoryError: a tensor is missing in one of them, or of another type, or of a size that the other has not.
    """
    sides = (("input", artifact.signature.inputs, file.inputs), ("output", artifact.signature.outputs, file.outputs))
    for kind, told, there in sides:
        if why := _other(kind, told, there):
            raise RepositoryError(
                f"won't serve {artifact.folder}",
                why=f"artifact.json says {why}",
                mend="it is of another model, or was changed: export it again, or give the .onnx file itself",
            )


def _other(kind: str, told: Sequence[TensorSpec], there: Sequence[Declared]) -> str:
    """The first thing that is told otherwise, in words, or ""."""
    specs, tensors = {spec.name: spec for spec in told}, {tensor.name: tensor for tensor in there}
    if specs.keys() != tensors.keys():
        return f"that the {kind}s are {_names(specs)}; in the file they are {_names(tensors)}"
    for name, spec in specs.items():
        tensor = tensors[name]
        if spec.dtype != tensor.dtype or not _alike(spec.shape, tensor.shape):
            return f"that the {kind} is {spec}; in the file it is {tensor}"
    return ""


def _alike(told: Sequence[int | str], there: Sequence[int] | None) -> bool:
    """Whether shapes say nothing against each other: what one leaves open, the other may tell."""
    if there is None:
        return True
    sizes = [size if isinstance(size, int) else -1 for size in told]
    return len(sizes) == len(there) and all(-1 in pair or len({*pair}) == 1 for pair in zip(sizes, there, strict=True))


def _names(of: Iterable[str]) -> str:
    return ", ".join(sorted(repr(each)[:80] for each in of))[:300] or "none"
