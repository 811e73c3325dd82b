"""Triton model repositories: `pack` writes an artifact into one, `read_models` reads one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from compress.artifact import Artifact, Signature
from compress.errors import RepositoryError
from serve.config.merge import Edits
from serve.config.model_config import ModelConfig, ModelInput, ModelOutput
from serve.config.pbtxt import from_message, from_pbtxt, parse, read_config
from serve.config.shell_words import MEND, unsafe_words
from serve.hooks.load import load_hooks
from serve.pack.models import BACKENDS, keep_edits, wanted_models, write_model
from serve.pack.options import PackOptions
from serve.pack.source import load_source
from serve.repository.folders import folders_of, replaceable, replacing, staging
from serve.repository.lock import locked
from serve.repository.versions import add_version, fits, newest, versions_of

__all__ = ["ModelInfo", "PackOptions", "Packed", "pack", "read_model", "read_models"]

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


@dataclass(frozen=True)
class ModelInfo:
    """A model that stands in a repository.

    Attributes:
        name: its folder's name.
        config: its config.pbtxt.
        versions: the versions there are, ascending.
    """

    name: str
    config: ModelConfig
    versions: tuple[int, ...]


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

    Raises:
        ArtifactError: the artifact is missing or damaged.
        HookError: the hooks can't be used with it.
        RepositoryError: the name can't be used, an option makes no sense, an edit by hand contradicts this pack, or the
            disk refuses.
    """
    _check_name(name)
    if keep < 1:
        raise RepositoryError(f"can't keep {keep} versions", why="the new one is one of them", mend="give 1 or more")
    source = load_source(artifact, signature)
    if source.format not in BACKENDS:
        raise RepositoryError(
            f"can't serve {artifact}", why=f"its format is {source.format!r}", mend="name an artifact that holds ONNX"
        )
    if repository.exists() and not repository.is_dir():
        raise RepositoryError(f"can't write into {repository}", why="it is not a folder", mend="name a folder")
    loaded = None if hooks is None else load_hooks(hooks, source.signature)
    wanted = wanted_models(name, source, loaded, options)
    new = tuple(wanted)
    with locked(repository):
        old = replaceable(repository, name, set(new))
        kept = keep_edits(repository, [model for model in old if model in wanted], wanted, edits)
        configs = tuple(from_message(each.message) for each in wanted.values())
        version, dropped = 1, []
        continues = keep > 1 and _continues(repository, old, configs)
        if continues:
            version = newest(repository, new) + 1
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
        warnings=_warnings(source, options),
    )


def _warnings(source: Artifact, options: PackOptions) -> tuple[str, ...]:
    """What the artifact's own measurements say against serving it like this."""
    share = source.stages[-1].measured.batch_difference if source.stages else None
    if share is None or share <= BATCH_DIFFERENCE or not source.signature.batched or options.max_batch_size == 1:
        return ()
    text = (
        f"an answer depends on what else is in its batch, by up to {share:.1%} of the largest output, as `compress` "
        "measured: where that matters, give --max-batch-size 1, or quantize statically"
    )
    return (text,)


def _continues(repository: Path, old: list[str], configs: tuple[ModelConfig, ...]) -> bool:
    """Whether the models that are there could be earlier versions of these."""
    if {config.name for config in configs} != set(old):
        return False
    try:
        there = [read_model(repository / config.name) for config in configs]
    except RepositoryError:  # an edit by hand, which was to be dropped
        return False
    return all(fits(model.config, config) for model, config in zip(there, configs, strict=True))


def read_models(repository: Path) -> list[ModelInfo]:
    """The models of a repository, by name, as far as can be known without Triton.

    Raises:
        RepositoryError: there is no such folder, no model in it, or a model without a readable config.pbtxt or without
            a version; Triton would not start, or would serve nothing.
    """
    return [read_model(folder) for folder in folders_of(repository)]


def read_model(folder: Path) -> ModelInfo:
    """One model of a repository.

    Raises:
        RepositoryError: it has no readable config.pbtxt, or no version.
    """
    path = folder / "config.pbtxt"
    again = "write the model again with `serve pack`, or move the folder out of the repository"
    try:
        text = read_config(path)
        unsafe = unsafe_words(folder.name, parse(text))
        config = from_pbtxt(text, source=str(path))
    except (OSError, ValueError) as err:
        why = f"{path.name} can't be read: {err}" if path.exists() else f"there is no {path.name} in it"
        raise RepositoryError(f"{folder} is not a model", why=why, mend=again) from err
    if config.name not in ("", folder.name):
        raise RepositoryError(
            f"can't serve {folder}",
            why=f"{path.name} calls the model {config.name!r}, and Triton wants the folder's name",
            mend="give the folder and the model one name",
        )
    for what, word in unsafe:
        why = f"{what} is {word!r}, and Triton writes it into a line for a shell"
        raise RepositoryError(f"can't serve {folder}", why=why, mend=MEND)
    versions = versions_of(folder)
    if not versions:
        raise RepositoryError(f"{folder} has no version", why="it has no folder such as 1/", mend=again)
    return ModelInfo(folder.name, config, versions)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}", name):
        raise RepositoryError(
            f"can't name a model {name!r}",
            why="a name is at most 100 letters, digits, '_' and '-', and does not begin with '-'",
            mend="give it another name",
        )
