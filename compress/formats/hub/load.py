"""A Hugging Face folder becomes a model: built, exported by torch.export, and its layers found again."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from compress.artifact import TensorSpec
from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError, ToolkitError, first_line
from compress.formats.exported.layers import NoLayersError, layered
from compress.formats.hub.config import config_of, labels_of, offline
from compress.formats.hub.fit import refuse_made_up
from compress.formats.hub.folder import ADAPTER, WHOLE, HubFolder, open_hub_folder
from compress.formats.hub.inputs import BOXES, OWN_MODULE, warn_of_left_out
from compress.formats.hub.network import Built, build
from compress.formats.hub.processor import processor_of
from compress.formats.hub.tensors import state_of
from compress.formats.hub.timm import is_timm, without_settings, wrapped
from compress.formats.native.graph import GraphError, from_data, to_data
from compress.model import Arrays, TorchModel, call
from compress.model.apart import share_of_own_size
from compress.model.infer import infer_signature
from compress.processor import Processor
from compress.storage.shortages import raise_shortage
from compress.tokenizer.open import TOKENIZER, tokenizer_of
from compress.tokenizer.vocabulary import MEND, ids_of, too_many

__all__ = ["load_hub_folder"]

BATCH, LENGTH = 2, 24  # that the network is traced at
OTHER_BATCH, OTHER_LENGTH = 3, 17  # that its graph is tried at
APART = 1e-4


def load_hub_folder(
    path: Path,
    *,
    trust: bool,
    part: str | None = None,
    pooling: str | None = None,
    pairs: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> TorchModel:
    """Load a folder that `save_pretrained` wrote, of transformers or of sentence-transformers, or one of timm's.

    The network is the one that the weights are of (`architectures` of config.json); a sentence encoder's has pooling
    and normalization behind it. Nothing is fetched, and no code of the folder's is run.

    Args:
        path: of the folder.
        trust: load pickled weights, too.
        part, pooling, pairs: see `build`.
        sizes: representative ones.

    Raises:
        CheckpointError: it is not whole, of no kind that is known, or its forward can't be exported.
        MissingExtraError: transformers is not installed, or timm for its folder.
    """
    folder = open_hub_folder(path)
    _warn_of_adapter(folder)
    with offline() as transformers:
        state = state_of(folder, trust=trust)
        timm = is_timm(folder)
        if timm:
            folder, state = wrapped(folder, state)
        config = config_of(transformers, folder, state)
        if timm:
            without_settings(folder, config)
        built = build(transformers, folder, config, state, part, pooling, pairs)
        program = _exported(built, folder)
        warn_of_left_out(built.left_out, type(built.module.model).__name__, folder)
        refuse_made_up(program, built.module, built.missing, folder)
        module, has_layers = _layered(program, built, folder)
    signature = infer_signature(module, built.inputs, sizes=sizes)
    labels = labels_of(built.config) if built.task.endswith("classification") else ()
    pad = getattr(built.config, "pad_token_id", None)
    processor = processor_of(folder, built.kind, built.task, labels, built.longest, pad)
    if processor is not None and built.kind == "text":
        several = getattr(built.config, "problem_type", None) == "multi_label_classification"
        processor = replace(processor, multi_label=several, type_ids=built.type_ids)
        _warn_of_ids(processor, built)
    if processor is not None and built.unpooled and signature.outputs[0].name in ("last_hidden_state", "logits"):
        told = (
            f"{path} says no pooling: it gives {signature.outputs[0]}, something for each token, and no embeddings of "
            "texts; --pooling mean, cls or max puts one behind it, as the model was trained"
        )
        warnings.warn(told, AssumedWarning, stacklevel=3)
    elif left := sorted(built.module.left):
        told = (
            f"{path}: of what a {type(built.module.model).__name__} gives, {', '.join(left)} left out; for these, "
            "write a torch module around it that gives plain tensors, and save it with compress.save"
        )
        warnings.warn(told, AssumedWarning, stacklevel=3)
    return TorchModel(module, signature, has_layers, processor=processor)


def _warn_of_adapter(folder: HubFolder) -> None:
    """transformers applies what peft left beside whole weights, where peft is installed."""
    if any(os.path.lexists(each / ADAPTER) for each in {folder.path, folder.root}):
        told = (
            f"{folder.path}: the adapter that {ADAPTER} tells of is not applied: the network is that of the whole "
            "weights beside it. Where the adapter is meant, too, load both with peft, and write "
            "model.merge_and_unload().save_pretrained(folder)"
        )
        warnings.warn(told, AssumedWarning, stacklevel=4)


def _warn_of_ids(processor: Processor, built: Built) -> None:
    """Where its tokenizer makes ids that the network's table of tokens lacks: a text with one fails everywhere."""
    if TOKENIZER not in processor.files:
        return
    try:
        table = built.module.model.get_input_embeddings()  # type: ignore[operator]
        rows, ids = table.num_embeddings, ids_of(tokenizer_of(processor.folder / TOKENIZER))
    except (AttributeError, NotImplementedError, OSError, ValueError, RecursionError):
        return  # a network without such a table; a file that can't be read is told where texts become tokens
    if ids > rows:
        warnings.warn(f"{too_many(ids, rows)}: {MEND}", AssumedWarning, stacklevel=4)


def _inputs(specs: tuple[TensorSpec, ...], batch: int, length: int, config: Any) -> tuple[torch.Tensor, ...]:
    """Tokens that every vocabulary has, half of them a second text's, the last sample padded by half; boxes whose first
    corner is first; normal numbers for images.
    """
    generator = torch.Generator().manual_seed(0)
    made = []
    for spec in specs:
        shape = spec.at({"batch": batch, "seq": length})
        if spec.name == BOXES:
            tensor = torch.rand(shape, generator=generator).sort(-1).values
            if spec.dtype == "int64":
                most = min(1000, int(getattr(config, "max_2d_position_embeddings", 1001)) - 1)
                tensor = (tensor * most).round().to(torch.int64)
        elif spec.dtype != "int64":
            tensor = torch.randn(shape, generator=generator)
        elif spec.name == "attention_mask":
            tensor = torch.ones(shape, dtype=torch.int64)
            tensor[-1, length // 2 :] = 0
        elif spec.name == "token_type_ids":
            tensor = torch.zeros(shape, dtype=torch.int64)
            tensor[:, length // 2 :] = 1
        else:
            tensor = torch.randint(2, max(3, min(getattr(config, "vocab_size", 100), 1000)), shape, generator=generator)
        made.append(tensor)
    return tuple(made)


def _exported(built: Built, folder: HubFolder) -> ExportedProgram:
    length = min(LENGTH, built.longest or LENGTH)
    args = _inputs(built.inputs, BATCH, length, built.config)
    shapes = tuple(
        {axis: Dim.DYNAMIC for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in built.inputs
    )
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(built.module, args, dynamic_shapes=(shapes,), strict=False)
    except ToolkitError:
        raise
    except Exception as err:  # the forward is transformers', on a configuration of anybody's
        failed = f"{type(err).__name__}: {first_line(err)[:250]}"
        if built.left_out:
            kind, names = type(built.module.model).__name__, ", ".join(built.left_out[:4])
            raise CheckpointError(
                f"can't take the network of {folder.path}",
                why=f"a {kind} takes {names}, too, which it is not given here, and without them it fails: {failed}",
                mend=OWN_MODULE,
            ) from err
        raise CheckpointError(
            f"can't export the network of {folder.path}",
            why=f"torch.export fails on it: {failed}",
            mend="write the model as a torch module whose sizes vary freely, and save it with compress.save",
        ) from err


def _layered(program: ExportedProgram, built: Built, folder: HubFolder) -> tuple[nn.Module, bool]:
    """The program as a module: of layers, where it has that form, and gives the same answers."""
    length = min(OTHER_LENGTH, built.longest or OTHER_LENGTH)
    args = _inputs(built.inputs, OTHER_BATCH, length, built.config)
    arrays = {spec.name: tensor.numpy() for spec, tensor in zip(built.inputs, args, strict=True)}
    with torch.no_grad():
        wanted = _first(built, arrays, folder)
        if nan := [name for name, want in wanted.items() if bool(want.isnan().any())]:
            raise CheckpointError(
                f"won't load {folder.path}",
                why=f"its network gives NaN as {nan[0]!r}, though no weight is NaN: a number of config.json is wrong",
                mend=WHOLE,
            )
        try:
            module: nn.Module = layered(program, prefix="model.")
            from_data(to_data(module, inputs=len(built.inputs)))  # what can't be written can't be pruned by a run
            has_layers = True
        except (NoLayersError, GraphError) as err:
            told = f"{folder.path}: its layers can't be told apart ({first_line(err)[:150]}): none can be pruned"
            warnings.warn(told, AssumedWarning, stacklevel=3)
            module, has_layers = program.module(check_guards=False), False
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # where torch.fx prints what fails
                given = call(module, built.inputs, arrays)
        except Exception as err:  # the graph is of whatever the forward did
            raise _fixed(folder, f"at batch {OTHER_BATCH} it fails: {first_line(err)[:200]}") from err
    for name, want in wanted.items():
        apart = share_of_own_size(want.double().numpy(), given[name].double().numpy())
        if want.shape != given[name].shape or apart > APART:
            raise _fixed(folder, f"its output {name!r} is another at batch {OTHER_BATCH}")
    return module, has_layers


def _first(built: Built, arrays: Arrays, folder: HubFolder) -> dict[str, torch.Tensor]:
    """What the network gives on real values: torch.export has run it on shapes alone."""
    try:
        return call(built.module, built.inputs, arrays)
    except ToolkitError:
        raise
    except Exception as err:  # the forward is transformers', on a configuration of anybody's
        raise_shortage(err)
        at = ", ".join(f"{name} {list(values.shape)}" for name, values in arrays.items())
        raise CheckpointError(
            f"the network of {folder.path} does not run",
            why=f"on {at} its forward fails: {type(err).__name__}: {first_line(err)[:250]}",
            mend=f"look for a wrong number in its config.json, or {WHOLE}",
        ) from err


def _fixed(folder: HubFolder, why: str) -> CheckpointError:
    return CheckpointError(
        f"the exported network of {folder.path} does not answer as the original",
        why=why,
        mend="write the model as a torch module whose sizes vary freely, and save it with compress.save",
    )
