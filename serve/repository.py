"""Triton model repositories: `pack` writes an artifact into one, `read_models` reads one."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from compress.artifact import Artifact
from compress.errors import RepositoryError
from serve.hooks import load_hooks
from serve.model_config import ModelConfig, ModelInput, ModelOutput
from serve.model_folders import replaceable, replacing
from serve.pack_configs import PackOptions, configs_for
from serve.pbtxt import from_pbtxt, to_pbtxt

__all__ = ["ModelInfo", "PackOptions", "Packed", "pack", "read_models"]

HOOK_MODEL = Path(__file__).with_name("hook_model.py")


@dataclass(frozen=True)
class Packed:
    """What `pack` wrote.

    Attributes:
        name: the model to ask.
        models: every model written, that one first.
        removed: models of an earlier pack that are no longer there.
        inputs, outputs: of the model to ask; dims leave the batch out when max_batch_size is positive.
        max_batch_size: the most items in one request; 0 when the network has no batch dimension.
    """

    name: str
    models: tuple[str, ...]
    removed: tuple[str, ...]
    inputs: tuple[ModelInput, ...]
    outputs: tuple[ModelOutput, ...]
    max_batch_size: int


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
) -> Packed:
    """Write an artifact, with its hooks, into a model repository that any Triton serves as it is.

    Without hooks one model is written, `name`; with hooks an ensemble `name` and the models that it is made of. What an
    earlier pack wrote under that name is replaced as a whole, other models are left alone, and when anything fails the
    repository is as it was.

    Args:
        artifact: the folder that `compress` wrote.
        repository: the model repository; it is made when it isn't there.
        name: the model to ask for.
        hooks: a Python file with preprocess and/or postprocess, see serve.hooks.
        options: how Triton runs it.

    Raises:
        ArtifactError: the artifact is missing or damaged.
        HookError: the hooks can't be used with it.
        RepositoryError: the name can't be used, or the disk refuses.
    """
    _check_name(name)
    source = Artifact.load(artifact)
    if source.format != "onnx":
        raise RepositoryError(
            f"can't serve {artifact}", why=f"its format is {source.format!r}", mend="name an artifact that holds ONNX"
        )
    if repository.exists() and not repository.is_dir():
        raise RepositoryError(f"can't write into {repository}", why="it is not a folder", mend="name a folder")
    loaded = None if hooks is None else load_hooks(hooks, source.signature)
    configs = configs_for(name, source.signature, source.sha256, loaded, options)
    new = tuple(config.name for config in configs)
    old = replaceable(repository, name, set(new))
    with replacing(repository, old) as folder:
        for config in configs:
            version = folder / config.name / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(to_pbtxt(config), encoding="utf-8")
            if config.backend == "onnxruntime":
                shutil.copyfile(source.model_path, version / "model.onnx")
            elif loaded is not None and config.backend == "python":
                shutil.copyfile(HOOK_MODEL, version / "model.py")
                shutil.copyfile(loaded.path, version / "hooks.py")
            else:
                (version / ".gitkeep").touch()  # an ensemble has an empty version folder, which git would drop
    front = configs[0]
    removed = tuple(model for model in old if model not in new)
    return Packed(name, new, removed, front.input, front.output, front.max_batch_size)


def read_models(repository: Path) -> list[ModelInfo]:
    """The models of a repository, by name, as far as can be known without Triton.

    Raises:
        RepositoryError: there is no such folder, no model in it, or a model without a readable config.pbtxt or without
            a version; Triton would not start, or would serve nothing.
    """
    if not repository.is_dir():
        why = "it is not a folder" if repository.exists() else "there is no such folder"
        raise RepositoryError(f"{repository} is not a model repository", why=why, mend="make one with `serve pack`")
    folders = sorted(path for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise RepositoryError(
            f"{repository} holds no model", why="it has no model folder", mend="write one into it with `serve pack`"
        )
    return [_read_model(folder) for folder in folders]


def _read_model(folder: Path) -> ModelInfo:
    path = folder / "config.pbtxt"
    again = "write the model again with `serve pack`, or move the folder out of the repository"
    try:
        config = from_pbtxt(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, ValueError) as err:
        why = f"{path.name} can't be read: {err}" if path.exists() else f"there is no {path.name} in it"
        raise RepositoryError(f"{folder} is not a model", why=why, mend=again) from err
    if config.name not in ("", folder.name):
        raise RepositoryError(
            f"can't serve {folder}",
            why=f"{path.name} calls the model {config.name!r}, and Triton wants the folder's name",
            mend="give the folder and the model one name",
        )
    numbers = (int(sub.name) for sub in folder.iterdir() if sub.is_dir() and sub.name.isdecimal())
    versions = tuple(sorted(number for number in numbers if number > 0))
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
