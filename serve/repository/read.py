"""Reading a model repository: which models stand in it, as far as can be known without Triton."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import RepositoryError
from serve.config.model_config import ModelConfig
from serve.config.pbtxt import from_pbtxt, parse, read_config
from serve.config.requirements import OF_HOOKS, REQUIREMENTS, requirements_in
from serve.config.shell_words import MEND, unsafe_words
from serve.repository.folders import folders_of
from serve.repository.versions import versions_of

__all__ = ["ModelInfo", "check_words", "instance_count", "read_model", "read_models"]


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


def instance_count(models: Iterable[ModelInfo]) -> int:
    """How many processes the models run in, where every backend is the Python backend."""
    plain = [model.config for model in models if model.config.platform != "ensemble"]
    return sum(sum(group.count for group in config.instance_group) or 1 for config in plain)


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
        message = parse(text)
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
    _check_message(folder, message)
    versions = versions_of(folder)
    if not versions:
        raise RepositoryError(f"{folder} has no version", why="it has no folder such as 1/", mend=again)
    return ModelInfo(folder.name, config, versions)


def check_words(folder: Path) -> None:
    """Refuse a model with a word that a shell or pip would read as more; one that Triton can't read has none.

    Raises:
        RepositoryError: its name or its configuration has one.
    """
    try:
        message = parse(read_config(folder / "config.pbtxt"))
    except (OSError, ValueError):
        return
    _check_message(folder, message)


def _check_message(folder: Path, message: Any) -> None:
    for what, word in unsafe_words(folder.name, message):
        why = f"{what} is {word!r}, and Triton writes it into a line for a shell"
        raise RepositoryError(f"can't serve {folder}", why=why, mend=MEND)
    if OF_HOOKS in message.parameters and REQUIREMENTS in message.parameters:
        try:
            requirements_in(message.parameters[REQUIREMENTS].string_value)
        except ValueError as err:
            why = f"what its hooks require can't be given to pip: {err}"
            mend = "pack it again, with REQUIREMENTS such as 'pillow>=11': no options, files or variables"
            raise RepositoryError(f"can't serve {folder}", why=why, mend=mend) from err
