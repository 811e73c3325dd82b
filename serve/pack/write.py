"""`pack`: an artifact, with its hooks, written into a model repository, all of it or nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from compress.artifact import Artifact, Signature
from compress.errors import MissingExtraError, RepositoryError
from serve.config.merge import Edits
from serve.config.model_config import ModelConfig, ModelInput, ModelOutput
from serve.config.names import PACKED_NAME
from serve.config.pbtxt import from_message
from serve.hooks.check import UnprovenError, check_hooks
from serve.hooks.load import Hooks
from serve.hooks.served_texts import EMBEDDINGS
from serve.pack.around import Around, around
from serve.pack.compared import batch_told
from serve.pack.models import Wanted, keep_edits, runs_on_openvino, wanted_models, write_model
from serve.pack.options import PackOptions
from serve.pack.source import load_source
from serve.repository.folders import recover, replaceable, replacing, staging
from serve.repository.lock import locked
from serve.repository.read import read_model
from serve.repository.strangers import refuse_losing
from serve.repository.versions import add_version, beyond, fits, newest

__all__ = ["PackOptions", "Packed", "pack"]

KEEP = 3
BATCH_DIFFERENCE = 0.01  # beyond rounding, and what dynamic INT8 has


@dataclass(frozen=True)
class Packed:
    """What `pack` wrote.

    Attributes:
        name: the model to ask.
        models: every model written, that one first.
        removed: models of an earlier pack that are no longer there.
        inputs, outputs: of the model to ask; dims leave the batch out when max_batch_size is positive.
        max_batch_size: the most items in one request; 0 when the network has no batch dimension.
        version: of what was packed; above 1 when it stands beside earlier ones.
        dropped: versions that made way.
        kept: fields that were edited by hand, as MODEL.FIELD, and stay as they are.
        warnings: what to know before it is served.
    """

    name: str
    models: tuple[str, ...]
    removed: tuple[str, ...]
    inputs: tuple[ModelInput, ...]
    outputs: tuple[ModelOutput, ...]
    max_batch_size: int
    version: int = 1
    dropped: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def pack(
    artifact: Path,
    *,
    repository: Path,
    name: str,
    hooks: Path | None = None,
    options: PackOptions = PackOptions(),  # noqa: B008 - frozen
    keep: int = KEEP,
    edits: Edits = "merge",
    signature: Signature | None = None,
    text: bool | None = None,
    text_pair: bool | None = None,
    image: bool = False,
) -> Packed:
    """Write an artifact, with its hooks, into a model repository that any Triton serves as it is.

    Without hooks one model is written, `name`; with hooks an ensemble `name` and the models that it is made of. Where
    an earlier pack wrote the same models with the same inputs and outputs, a further version is added beside the
    earlier ones; otherwise what it wrote is replaced as a whole. Other models are left alone, and when anything fails
    the repository is as it was.

    Args:
        artifact: the folder that `compress` wrote, or a file: ONNX (.onnx), a TensorRT plan (.plan, .engine),
            TorchScript (.pt) or an AOTInductor package (.pt2).
        repository: the model repository; it is made when it isn't there.
        name: the model to ask for.
        hooks: a Python file with preprocess and/or postprocess, see serve.hooks.load.
        options: how Triton runs it.
        keep: how many versions may stand beside each other; 1 replaces what was there.
        edits: what becomes of changes that were made by hand in config.pbtxt since the last pack: they are merged with
            what this one writes, preferred to it, or dropped.
        signature: of a TensorRT plan or a TorchScript file, which don't tell it.
        text: whether the served model takes texts, by the tokenizer that came with the artifact; None where it can, and
            no hooks are given.
        text_pair: whether two texts make one sample; None is what the artifact says.
        image: whether the served model takes image files, which its own image processor's settings prepare.

    Raises:
        ArtifactError: the artifact is missing or damaged.
        HookError: the hooks can't be used with it, or fail on their own example(); or texts or images can't be served.
        DatasetError: the tokenizer contradicts what stands beside it.
        MissingExtraError: texts are to be served, and tokenizers is not installed.
        RepositoryError: the name can't be used, an option makes no sense, the network refuses what preprocess makes of
            the hooks' own example(), an edit by hand contradicts this pack, what was not packed would be lost, or the
            disk refuses.
    """
    _check_name(name)
    if keep < 1:
        raise RepositoryError(f"can't keep {keep} versions", why="the new one is one of them", mend="give 1 or more")
    source = load_source(artifact, signature, options.runtime or "onnxruntime")
    if repository.exists() and not repository.is_dir():
        raise RepositoryError(f"can't write into {repository}", why="it is not a folder", mend="name a folder")
    with around(source, hooks, text=text, pair=text_pair, image=image) as found:
        return _write(name, repository, source, found, options, keep, edits)


def _of_stream(name: str, hooks: Hooks | None) -> tuple[str, ...]:
    if hooks is None or not hooks.streams:
        return ()
    return (f"its answers are a stream: ask it at /predict/{name}/stream, or in a stream over gRPC",)


def _check_dimensions(name: str, task: str, served: ModelConfig, sizes: tuple[int, ...]) -> None:
    """Raises RepositoryError where its embeddings can't be cut to these."""
    if not sizes:
        return
    widths = [each.dims[0] for each in served.output if each.data_type == "TYPE_FP32" and len(each.dims) == 1]
    told = ", ".join(map(str, sizes))
    if task != EMBEDDINGS or len(widths) != 1:
        raise RepositoryError(
            f"can't let embeddings of {name!r} be cut to {told}",
            why="it gives none of texts",
            mend="leave --dimensions out, or pack a sentence encoder that came with its tokenizer",
        )
    if not all(0 < size < widths[0] for size in sizes):
        why = f"they have {widths[0]} numbers"
        raise RepositoryError(
            f"can't let embeddings of {name!r} be cut to {told}", why=why, mend="name smaller lengths"
        )


def _write(
    name: str, repository: Path, source: Artifact, found: Around, options: PackOptions, keep: int, edits: Edits
) -> Packed:
    loaded = found.hooks
    served = replace(source, runtime="openvino" if runs_on_openvino(source, options) else "onnxruntime")
    untried = () if loaded is None else _try_out(loaded, served)
    wanted = wanted_models(name, source, loaded, options, found.task)
    new = tuple(wanted)
    with locked(repository):
        recover(repository)
        old = replaceable(repository, name, set(new))
        kept = keep_edits(repository, [model for model in old if model in wanted], wanted, edits)
        configs = tuple(from_message(each.message) for each in wanted.values())
        _check_dimensions(name, found.task, configs[0], options.dimensions)
        version, dropped = 1, []
        continues = keep > 1 and _continues(repository, old, configs)
        if continues:
            version = newest(repository, new) + 1
            refuse_losing([], [folder for each in new for folder in beyond(repository / each, keep)])
        else:
            refuse_losing([repository / each for each in old])
        with staging(repository) if continues else replacing(repository, old) as folder:
            for each in wanted.values():
                write_model(folder / each.name, version, each, source, loaded)
            if continues:
                dropped = add_version(repository, folder, new, version, keep)
                old = []
    removed = tuple(model for model in old if model not in new)
    front = configs[0]
    return Packed(
        name=name,
        models=new,
        removed=removed,
        inputs=front.input,
        outputs=front.output,
        max_batch_size=front.max_batch_size,
        version=version,
        dropped=tuple(dropped),
        kept=kept,
        warnings=(*_warnings(source, options, wanted), *_of_stream(name, loaded), *found.notes, *untried),
    )


def _try_out(hooks: Hooks, source: Artifact) -> tuple[str, ...]:
    """Take the hooks' own example through all steps; what is to be said where this machine can't.

    Raises:
        HookError, RepositoryError: it fails, as every request would.
    """
    if hooks.example is None or source.format != "onnx":
        return ()
    try:
        check_hooks(hooks, source, hooks.example)
    except (UnprovenError, MissingExtraError) as err:
        return (f"the hooks were not tried on the network: {err.what}: {err.why}",)
    return ()


def _warnings(source: Artifact, options: PackOptions, wanted: Mapping[str, Wanted]) -> tuple[str, ...]:
    """What the artifact's own measurements say against serving it like this."""
    (packed,) = (int(each.message.max_batch_size) for each in wanted.values() if each.role == "network")
    told = batch_told(source, options, packed) if runs_on_openvino(source, options) else ()
    share = source.stages[-1].measured.batch_difference if source.stages else None
    if share is None or share <= BATCH_DIFFERENCE or not source.signature.batched or options.max_batch_size == 1:
        return told
    text = (
        f"an answer depends on what else is in its batch, by up to {share:.1%} of the largest output, as `compress` "
        "measured: where that matters, give --max-batch-size 1, or quantize statically"
    )
    return (*told, text)


def _continues(repository: Path, old: list[str], configs: tuple[ModelConfig, ...]) -> bool:
    """Whether the models that are there could be earlier versions of these."""
    if {config.name for config in configs} != set(old):
        return False
    try:
        there = [read_model(repository / config.name) for config in configs]
    except RepositoryError:  # an edit by hand, which was to be dropped
        return False
    return all(fits(model.config, config) for model, config in zip(there, configs, strict=True))


def _check_name(name: str) -> None:
    if not re.fullmatch(PACKED_NAME, name):
        raise RepositoryError(
            f"can't name a model {name!r}",
            why="a name is at most 100 letters, digits, '_' and '-', does not begin with '-', and is not 'stats' "
            "(/v2/models/stats is every model's statistics)",
            mend="give it another name",
        )
