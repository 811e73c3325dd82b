"""Model files: `save` one from which everything else follows, `load` any kind that PyTorch writes.

A checkpoint is untrusted: no code in one is run unless the user says so. What each format may do: docs/security.md.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from compress.artifact import TensorSpec
from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError, SignatureError
from compress.formats.exported.read import load_exported_program
from compress.formats.file_kind import FileKind, file_kind
from compress.formats.hub.load import load_hub_folder
from compress.formats.hub.tensors import read_safetensors
from compress.formats.identity import fingerprint_of_module
from compress.formats.native.file import is_native, read, write
from compress.formats.native.folded_norms import fold_norms, folded
from compress.formats.pickles.read import unpickle
from compress.formats.torchscript import load_torchscript
from compress.formats.weights import module_of
from compress.model import OnnxModel, TorchModel, sample_inputs
from compress.model.ends import is_plain, keywords_to_places, left_out, plain_outputs
from compress.model.infer import infer_signature, proven
from compress.signature import Signature, parse_sizes, refuse_shared_names
from compress.storage.shortages import reading

__all__ = ["fingerprint", "fingerprint_of_module", "load", "save", "signed", "write"]

_INPUT_HINT = (
    "add --input 'name:dtype[batch,…]' for each input of its forward, such as --input 'x:float32[batch,3,224,224]'"
)


def save(
    module: nn.Module,
    path: str | Path,
    *,
    inputs: Mapping[str, torch.Tensor] | Sequence[str | TensorSpec] | str,
    outputs: Sequence[str] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """Write a model with its signature to a file that loads without the model's Python code.

    Weights in bfloat16 are written as float32: no array could be fed to them.

    Args:
        module: a trained module whose forward torch.fx can trace (no branches on tensor values).
        path: the file, usually `model.pt`; replaced whole.
        inputs: what the forward takes, in order: 'x:float32[batch,1,8,8]', a list of these, or example tensors by name
            (their first dimension is the batch).
        outputs: names for the outputs, in order; otherwise keys of a dict, fields of a dataclass, or `output`.
        sizes: what is usual for dimensions other than the batch that vary: {"seq": 128}. The model is measured, counted
            and tried at these.

    Returns:
        The path.

    Raises:
        SignatureError: the inputs don't fit the forward.
        CheckpointError: the forward can't be traced.

    Examples:
        >>> save(torch.nn.Linear(4, 3), "linear.pt", inputs="x:float32[batch,4]").name
        'linear.pt'
    """
    path = Path(path)
    was_training = module.training
    module.eval()
    kind = type(module)
    try:
        specs = _specs(inputs)
        kept = _with_float32(module)
        signature = _plain(kept, specs, outputs, sizes).sized(sizes or {}, "from the model file")
        refuse_shared_names(signature)
        write(TorchModel(folded(kept), signature), path, TorchModel(kept, signature))
    finally:
        module.__class__ = kind
        module.train(was_training)
    return path


def load(
    path: str | Path,
    *,
    inputs: Sequence[str] = (),
    model: str | None = None,
    trust: bool = False,
    trust_pickle: bool | None = None,
    sizes: Mapping[str, int] | Sequence[str] = (),
    part: str | None = None,
    pooling: str | None = None,
    pairs: bool = False,
) -> TorchModel:
    """Load a model file of any kind, in eval mode and on the CPU.

    Args:
        path: what compress.save, torch.save, torch.jit.save, torch.export.save or safetensors wrote; or a Hugging Face
            folder.
        inputs: 'name:dtype[batch,…]' for each input, where the file does not say.
        model: 'package.module:factory', a callable that gives the module for a state_dict.
        trust: run what the file brings: a pickle's code, TorchScript. Only for files from a source that may run code on
            this machine.
        trust_pickle: the former name of `trust`.
        sizes: what is usual for dimensions that vary, {"seq": 128} or 'seq=128' each, in place of what the file says.
        part: "text" or "image", of a folder that holds two networks.
        pooling: "mean", "cls" or "max", of a folder that says none itself: embeddings in place of its own outputs.
        pairs: whether a folder's network is to be given two texts at a time: it takes token_type_ids then, if it knows
            more kinds of texts than one.

    Raises:
        CheckpointError: the file can't be read, or needs one of the arguments above.
        SignatureError: the inputs don't fit, or the model does not run at these sizes.

    Examples:
        >>> model = load("model.pt")
        >>> print(model.signature.inputs[0], model.signature.outputs[0])
        x:float32[batch,4] output:float32[batch,3]
    """
    path = Path(path)
    if trust_pickle is not None:
        warnings.warn("trust_pickle is now named trust", FutureWarning, stacklevel=2)
        trust = trust or trust_pickle
    with reading(path):
        kind = file_kind(path)
        given = dict(sizes) if isinstance(sizes, Mapping) else parse_sizes(sizes)
        if pooling is not None and kind is not FileKind.HUB_FOLDER:
            raise CheckpointError(
                f"can't put a pooling behind {path}",
                why="it is no Hugging Face folder, and what its outputs are is not known",
                mend="leave --pooling out, and pool in the module's own forward",
            )
        says = kind in (FileKind.HUB_FOLDER, FileKind.EXPORTED_PROGRAM)
        if kind is FileKind.HUB_FOLDER:
            loaded = load_hub_folder(path, trust=trust, part=part, pooling=pooling, pairs=pairs, sizes=given)
        elif kind is FileKind.EXPORTED_PROGRAM:
            loaded = load_exported_program(path, trust=trust, sizes=given)
        elif kind is FileKind.TORCHSCRIPT:
            loaded = _with_signature(load_torchscript(path, trust=trust), path, inputs, given, layered=False)
        else:
            content = read_safetensors(path) if kind is FileKind.SAFETENSORS else unpickle(path, trust=trust)
            if says := is_native(content):
                loaded = read(content, path)
                loaded = dataclasses.replace(loaded, signature=proven(loaded.module, loaded.signature.sized(given)))
            else:
                module, assumed = module_of(content, path, model)
                loaded = _with_signature(module, path, inputs, given, layered=True)
                loaded = dataclasses.replace(loaded, assumed=assumed, factory=model or "")
        own = [str(spec) for spec in loaded.signature.inputs]
        if inputs and says and [*inputs] != own:
            told = f"--input has no use: {path} says itself that it takes {', '.join(own)}"
            warnings.warn(told, AssumedWarning, stacklevel=2)
        refuse_shared_names(loaded.signature)
        _refuse_nan(loaded.module, path)
        if kind not in (FileKind.EXPORTED_PROGRAM, FileKind.HUB_FOLDER):  # whose mode was fixed when it was exported
            loaded.module.eval()
        return loaded


def fingerprint(model: TorchModel) -> str:
    """Hex SHA-256 of what decides a model's answers: `fingerprint_of_module`, signature and sizes."""
    return signed(fingerprint_of_module(model), model)


def signed(module: str, model: TorchModel | OnnxModel) -> str:
    """The fingerprint of a module together with names, shapes and sizes of inputs and outputs."""
    return hashlib.sha256(f"{module}\n{model.signature.identity}".encode()).hexdigest()


def _specs(inputs: Mapping[str, torch.Tensor] | Sequence[str | TensorSpec] | str) -> tuple[TensorSpec, ...]:
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, Mapping):
        return tuple(TensorSpec(name, _dtype(tensor), ("batch", *tensor.shape[1:])) for name, tensor in inputs.items())
    specs = tuple(spec if isinstance(spec, TensorSpec) else TensorSpec.parse(spec) for spec in inputs)
    if len({spec.name for spec in specs}) != len(specs):
        raise SignatureError("two inputs share a name", why=", ".join(map(str, specs)), mend="name each input once")
    return specs


def _dtype(tensor: torch.Tensor) -> str:
    """Numpy's name of it; what is bfloat16, which numpy lacks, is taken as float32."""
    return "float32" if tensor.dtype == torch.bfloat16 else str(tensor.dtype).removeprefix("torch.")


def _with_float32(module: nn.Module) -> nn.Module:
    """A float32 copy of a module with bfloat16 weights, whose inputs no array could be; any other as it is."""
    if any(tensor.dtype == torch.bfloat16 for tensor in (*module.parameters(), *module.buffers())):
        return copy.deepcopy(module).float()
    return module


def _with_signature(
    module: nn.Module, path: Path, inputs: Sequence[str], sizes: Mapping[str, int], *, layered: bool
) -> TorchModel:
    if not inputs:
        raise CheckpointError(f"can't tell the inputs of {path}", why="the file does not name them", mend=_INPUT_HINT)
    module = _with_float32(module)
    module.eval()
    specs = _specs(list(inputs))
    signature = _plain(module, specs, None, sizes) if layered else infer_signature(module, specs, sizes=sizes)
    if layered:
        fold_norms(module)
    return TorchModel(module, signature, layered)


def _plain(
    module: nn.Module, specs: tuple[TensorSpec, ...], names: Sequence[str] | None, sizes: Mapping[str, int] | None
) -> Signature:
    """A module's signature; it takes its inputs by position from now on, and gives tensors in a plain form."""
    keywords_to_places(module, specs)
    signature = infer_signature(module, specs, names, sizes)
    arrays = sample_inputs(signature, 2)
    with torch.no_grad():
        given = module(*(torch.as_tensor(arrays[spec.name]) for spec in specs))
    if not is_plain(given):
        plain_outputs(module, specs)
    if told := list(left_out(given)):
        warnings.warn(f"left out of the outputs, being no tensors: {', '.join(told)}", AssumedWarning, stacklevel=4)
    return signature


def _refuse_nan(module: nn.Module, path: Path) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"the weights in {path} are damaged",
                why=f"{name} holds {bad} NaN or infinite values of {tensor.numel()}",
                mend="take an earlier checkpoint: training has diverged before this one was saved",
            )
