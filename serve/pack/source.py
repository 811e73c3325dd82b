"""What is to be packed: an artifact, or a model file from elsewhere."""

from __future__ import annotations

from pathlib import Path

from compress.artifact import Artifact, Runtime, Signature, sha256_of
from compress.errors import RepositoryError
from compress.vetting.archive import Archive, ArchiveError
from compress.vetting.magic import EXPORTED, kind_in_words
from compress.vetting.onnx_wire import OnnxFileError, vet_onnx
from serve.pack.onnx_model import artifact_of_onnx
from serve.pack.same_signature import refuse_other_signature

__all__ = ["load_source"]

PLANS = (".plan", ".engine")
TORCH = (".pt", ".pt2")
MEND = "give --input and --output for each tensor, as in x:float32[batch,3,224,224]"


def load_source(path: Path, signature: Signature | None = None, runtime: Runtime = "onnxruntime") -> Artifact:
    """An artifact's folder, or a model file as one; nothing of the file is run.

    Args:
        path: of the folder or file.
        signature: of a file that does not tell it.
        runtime: that is to serve an ONNX file.

    Raises:
        ArtifactError: no artifact, or a damaged one.
        RepositoryError: the file is none that Triton serves, or its signature is missing, or not the file's.
        MissingExtraError: there is no such runtime to read an ONNX file with.
    """
    if path.suffix in (*PLANS, *TORCH):
        return _given(path, signature)
    if signature is not None:
        raise RepositoryError(
            f"can't give {path} a signature", why="it tells its own", mend="leave --input and --output out"
        )
    if path.suffix == ".onnx":
        return artifact_of_onnx(path, runtime)
    if path.is_file():
        raise _no_artifact(path)
    artifact = Artifact.load(path)
    if artifact.format == "onnx":
        try:
            found = vet_onnx(artifact.model_path)
        except OnnxFileError as err:
            mend = "export it again with compress, from a model that you know"
            raise RepositoryError(f"won't serve {artifact.model_path}", why=str(err), mend=mend) from err
        refuse_other_signature(artifact, found)
    return artifact


def _no_artifact(path: Path) -> RepositoryError:
    """For a file that is none to be served: what it is, and what makes an artifact of it."""
    kind = kind_in_words(path)
    mend = "name an artifact's folder, or an .onnx, .plan, .engine, .pt or .pt2 file"
    if kind in EXPORTED:
        mend = f"make an artifact of it: compress export {path} --output FOLDER, then serve pack FOLDER"
    why = f"it is {kind}" if kind else "it is a file"
    return RepositoryError(f"can't serve {path}", why=f"{why}, and an artifact is a folder", mend=mend)


def _given(path: Path, signature: Signature | None) -> Artifact:
    if not path.is_file():
        raise RepositoryError(f"can't serve {path}", why="there is no such file", mend="name a model file")
    kind = "plan" if path.suffix in PLANS else _torch_format(path)
    if signature is None or not signature.inputs or not signature.outputs:
        raise RepositoryError(f"can't serve {path}", why="the file does not tell its inputs and outputs", mend=MEND)
    return Artifact(path.parent, path.name, kind, sha256_of(path), signature)


def _torch_format(path: Path) -> str:
    """What a file of PyTorch is, told by the names in its archive."""
    export = "compress export it to ONNX, trace it into TorchScript, or compile it with AOTInductor"
    try:
        with path.open("rb") as file:
            names = tuple(Archive(file).entries)
    except (OSError, ArchiveError) as err:
        raise RepositoryError(f"can't serve {path}", why=f"it is no archive of PyTorch: {err}", mend=export) from err
    if any("/aotinductor/" in name for name in names):
        return "aoti"
    if any(name.partition("/")[2].startswith("code/") for name in names):
        return "torchscript"
    exported = any(name.endswith(("models/model.json", "serialized_exported_program.json")) for name in names)
    why = "an exported program, which no backend of Triton runs" if exported else "a checkpoint, which is no program"
    raise RepositoryError(f"can't serve {path}", why=f"it is {why}", mend=export)
