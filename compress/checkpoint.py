"""Model files: `save` one from which everything else follows, `load` any kind that PyTorch writes.

A checkpoint is untrusted: no code in one is run unless the user says so (`compress.pickles`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import inspect
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.errors import CheckpointError, SignatureError, first_line
from compress.exported_program import load_exported_program
from compress.file_kind import FileKind, file_kind
from compress.graph_file import GraphError, from_data, to_data
from compress.infer import infer_signature, proven
from compress.model import TorchModel
from compress.pickles import unpickle
from compress.signature import parse_sizes
from compress.user_code import user_code

__all__ = ["fingerprint", "load", "save", "write"]

FORMAT = "compress.model"
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
        outputs: names for the outputs, in order; otherwise a dict's keys, or `output`.
        sizes: what is usual for dimensions other than the batch that vary: {"seq": 128}. The model is measured, counted
            and tried at these.

    Returns:
        The path.

    Raises:
        SignatureError: the inputs don't fit the forward.
        CheckpointError: the forward can't be traced.

    Example:
        >>> save(torch.nn.Linear(4, 3), "linear.pt", inputs="x:float32[batch,4]").name
        'linear.pt'
    """
    path = Path(path)
    was_training = module.training
    module.eval()
    try:
        specs = _specs(inputs)
        kept = _with_float32(module)
        signature = infer_signature(kept, specs, outputs, sizes)
        model = TorchModel(kept, signature.sized(sizes or {}, "from the model file"))
        write(model, path)
    finally:
        module.train(was_training)
    return path


def write(model: TorchModel, path: Path) -> None:
    """Write a layered model; raises CheckpointError when its forward has no plain form."""
    try:
        graph = to_data(model.module, inputs=len(model.signature.inputs))
    except GraphError as err:
        raise CheckpointError(
            f"can't write {path} so that it loads without your code",
            why=str(err),
            mend="save model.state_dict() with torch.save instead, and export it with --model package.module:factory",
        ) from err
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    data = {"format": FORMAT, "version": 1, "signature": model.signature.to_dict(), "graph": graph}
    try:
        torch.save(data, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load(
    path: str | Path,
    *,
    inputs: Sequence[str] = (),
    model: str | None = None,
    trust_pickle: bool = False,
    sizes: Mapping[str, int] | Sequence[str] = (),
) -> TorchModel:
    """Load a model file of any kind, in eval mode and on the CPU.

    Args:
        path: what compress.save, torch.save, torch.jit.save or torch.export.save wrote.
        inputs: 'name:dtype[batch,…]' for each input, where the file does not say.
        model: 'package.module:factory', a callable that gives the module for a state_dict.
        trust_pickle: run the pickle's code. Only for files from a source that may run code on this machine.
        sizes: what is usual for dimensions that vary, {"seq": 128} or 'seq=128' each, in place of what the file says.

    Raises:
        CheckpointError: the file can't be read, or needs one of the arguments above.
        SignatureError: the inputs don't fit, or the model does not run at these sizes.

    Example:
        >>> model = load("model.pt")
        >>> print(model.signature.inputs[0], model.signature.outputs[0])
        x:float32[batch,4] output:float32[batch,3]
    """
    path = Path(path)
    kind = file_kind(path)
    given = dict(sizes) if isinstance(sizes, Mapping) else parse_sizes(sizes)
    if kind is FileKind.EXPORTED_PROGRAM:
        loaded = load_exported_program(path, trust=trust_pickle, sizes=given)
    elif kind is FileKind.TORCHSCRIPT:
        loaded = _with_signature(_torchscript(path), path, inputs, given, layered=False)
    else:
        content = unpickle(path, trust=trust_pickle)
        if isinstance(content, Mapping) and content.get("format") == FORMAT:
            loaded = _read(content, path)
            loaded = dataclasses.replace(loaded, signature=proven(loaded.module, loaded.signature.sized(given)))
        else:
            loaded = _with_signature(_module_of(content, path, model), path, inputs, given, layered=True)
    _refuse_nan(loaded.module, path)
    if kind is not FileKind.EXPORTED_PROGRAM:  # whose mode was fixed when it was exported
        loaded.module.eval()
    return loaded


def fingerprint(model: TorchModel) -> str:
    """Hex SHA-256 of what decides a model's answers: graph (or what is known of its code), weights, signature."""
    module = model.module
    try:
        code = json.dumps(to_data(module, inputs=len(model.signature.inputs))["nodes"])
    except GraphError:
        code = str(getattr(module, "code", ""))
        with contextlib.suppress(OSError, TypeError):  # no source: built in, or made in a shell
            code += inspect.getsource(type(module))
    digest = hashlib.sha256(f"{code}\n{module!r}\n{model.signature.to_dict()}".encode())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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
    return TorchModel(module, infer_signature(module, _specs(list(inputs)), sizes=sizes), layered)


def _torchscript(path: Path) -> nn.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module: nn.Module = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
            return module
    except RuntimeError as err:
        why = first_line(err)
        raise CheckpointError(f"can't load the TorchScript file {path}", why=why, mend="save it again") from err


def _read(content: Mapping[str, Any], path: Path) -> TorchModel:
    if content["version"] > 1:
        why = f"its format is version {content['version']}, this release reads version 1"
        raise CheckpointError(f"can't read {path}", why=why, mend="install the release that wrote it, or a newer one")
    try:
        return TorchModel(from_data(content["graph"]), Signature.from_dict(content["signature"]))
    except (GraphError, KeyError, TypeError, ValueError, AttributeError) as err:
        again = "write it again with compress.save"
        raise CheckpointError(f"can't read {path}", why=f"it is malformed: {err}", mend=again) from err


def _module_of(content: Any, path: Path, factory: str | None) -> nn.Module:
    if isinstance(content, nn.Module):
        return content
    state = _state_dict(content)
    if state is None:
        held = (
            f"a dict of {', '.join(map(repr, list(content)[:5]))}"
            if isinstance(content, Mapping)
            else type(content).__name__
        )
        raise CheckpointError(
            f"found no model in {path}",
            why=f"it holds {held}",
            mend="save the model with compress.save(module, path, inputs=…), or torch.save(model.state_dict(), path)",
        )
    if factory is None:
        raise CheckpointError(
            f"{path} holds weights but no architecture",
            why=f"it is a state_dict of {len(state)} tensors",
            mend="add --model package.module:factory (a function or class that gives the module) and --input",
        )
    module = _build(factory)
    try:
        module.load_state_dict(state)
    except RuntimeError as err:
        lines = [line.strip() for line in str(err).splitlines()[1:3]] or [str(err)]
        why = " ".join(lines)[:300]
        raise CheckpointError(
            f"the weights of {path} don't fit {factory}", why=why, mend="name the factory that made them"
        ) from err
    return module


def _state_dict(content: Any) -> dict[str, torch.Tensor] | None:
    """The state_dict in a checkpoint: the dict itself, or under one of the names that trainers use."""
    if not isinstance(content, Mapping):
        return None
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        prefixes: Iterable[str] = ("module.", "_orig_mod.")  # left by DataParallel and by torch.compile
        state = dict(content)
        for prefix in prefixes:
            if all(key.startswith(prefix) for key in state):
                state = {key.removeprefix(prefix): value for key, value in state.items()}
        return state
    for key in ("state_dict", "model_state_dict", "model", "module", "net", "weights"):
        if (inner := _state_dict(content.get(key))) is not None:
            return inner
    return None


def _build(factory: str) -> nn.Module:
    mend = "write --model package.module:factory, and run from the folder that holds the package, or set PYTHONPATH"
    try:
        with user_code(factory) as make:
            made = make()
    except Exception as err:  # the user's module: anything may come out of it
        raise CheckpointError(
            f"can't build the model by {factory}", why=f"{type(err).__name__}: {err}", mend=mend
        ) from err
    if not isinstance(made, nn.Module):
        raise CheckpointError(f"{factory} is no model factory", why=f"it gave a {type(made).__name__}", mend=mend)
    return made


def _refuse_nan(module: nn.Module, path: Path) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"the weights in {path} are damaged",
                why=f"{name} holds {bad} NaN or infinite values of {tensor.numel()}",
                mend="take an earlier checkpoint: training has diverged before this one was saved",
            )
