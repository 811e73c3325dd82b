"""The models of a pack before they are written: their configurations with all that is laid over, and their files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.artifact import Artifact
from compress.errors import RepositoryError
from serve.config.merge import Edits, merge
from serve.config.overlay import lay_over
from serve.config.pbtxt import parse, read_config, text_of, to_message
from serve.hooks.check import in_bfloat16
from serve.hooks.load import Hooks
from serve.pack.compared import COMPARED, largest_compared, within_compared
from serve.pack.configs import configs_for
from serve.pack.cores import fitted, instances_of, with_reason
from serve.pack.engine_file import for_plan
from serve.pack.network_config import LABELS
from serve.pack.options import PackOptions
from serve.repository.folders import PACKED_FILE
from serve.repository.provenance import write_provenance

__all__ = ["Wanted", "keep_edits", "runs_on_openvino", "wanted_models", "write_model"]

BACKENDS = {
    "onnx": ("onnxruntime", "", "model.onnx"),
    "plan": ("tensorrt", "", "model.plan"),
    "torchscript": ("pytorch", "", "model.pt"),
    "aoti": ("pytorch", "torch_aoti", "model.pt2"),
}
"""Triton's backend and platform for each format of an artifact, and the name that it wants for the file."""
HOOKS = Path(__file__).parents[1] / "hooks" / "packed"


@dataclass(frozen=True)
class Wanted:
    """A model to be written.

    Attributes:
        name: its folder's.
        role: what it does, see serve.pack.options.ROLES.
        message: the protobuf message of its config.pbtxt; edits by hand go into it.
        packed: the text without them.
        labels: a file for the names of its classes.
        chosen: who chose its instances and threads, in words for its config.pbtxt.
    """

    name: str
    role: str
    message: Any
    packed: str
    labels: Path | None
    chosen: str = ""


def wanted_models(
    name: str, source: Artifact, hooks: Hooks | None, options: PackOptions, task: str = ""
) -> dict[str, Wanted]:
    """The models that serve an artifact as `name`, that one first; `task` is what that one does, where somebody says.

    Raises:
        RepositoryError: Triton can't serve it, a table names no model of this pack, or a field that there is not.
    """
    options, chosen = fitted(options)
    options, engine = for_plan(source, options)
    backend, platform, _ = BACKENDS[source.format]
    if runs_on_openvino(source, options):
        backend, options = "openvino", within_compared(source, options)
    configs = configs_for(name, source.signature, source.sha256, hooks, options, backend, platform, engine, task)
    if backend == "openvino" and in_bfloat16(source):
        network = configs["network"]  # what was measured: without this it would be computed in FP32
        configs["network"] = replace(network, parameters={**network.parameters, "HINT_BF16": "YES"})
    if backend == "openvino" and (most := largest_compared(source)) is not None:
        network = configs["network"]
        configs["network"] = replace(network, parameters={**network.parameters, COMPARED: str(most)})
    unused = sorted(set(options.models) - set(configs))
    if unused:
        raise RepositoryError(
            f"can't configure [{unused[0]}]",
            why="this pack writes no such model",
            mend=f"it writes {', '.join(configs)}",
        )
    if options.labels is not None and not options.labels.is_file():
        raise RepositoryError(
            f"can't read the labels {options.labels}", why="there is no such file", mend="name a text file"
        )
    wanted = {}
    for role, config in configs.items():
        message = to_message(config)
        lay_over(message, options.models.get(role, {}), where=role)
        if message.name != config.name:
            raise RepositoryError(f"can't set {role}.name", why="a model is named as its folder is", mend="use --name")
        labels = options.labels if role == "network" else None
        wanted[config.name] = Wanted(config.name, role, message, text_of(message), labels, chosen)
    return wanted


def runs_on_openvino(source: Artifact, options: PackOptions) -> bool:
    """Whether Triton's OpenVINO backend serves an artifact: by what it says, unless the options say otherwise."""
    if source.format != "onnx" or options.device == "gpu":
        return False
    return (options.runtime or source.runtime) == "openvino"


def keep_edits(repository: Path, names: Sequence[str], wanted: Mapping[str, Wanted], edits: Edits) -> tuple[str, ...]:
    """Take over what was changed by hand since the last pack.

    Args:
        repository: holds the models.
        names: of those that are there, and packed anew.
        wanted: gets the edits.
        edits: what becomes of them.

    Returns:
        The fields that stay as they were edited, as MODEL.FIELD.

    Raises:
        RepositoryError: an edit contradicts what this pack would write, and `edits` does not say which one holds.
    """
    kept: list[str] = []
    for name in names if edits != "drop" else ():
        path = repository / name / PACKED_FILE
        if not path.is_file():
            continue
        try:
            base = parse(read_config(path))
            edited = parse(read_config(repository / name / "config.pbtxt"))
        except ValueError as err:
            raise RepositoryError(
                f"can't read what was edited by hand in {repository / name}",
                why=f"it is not a Triton model configuration: {err}",
                mend="mend that line, or drop the edits with --edits drop",
            ) from err
        fields, conflicts = merge(base, edited, wanted[name].message)
        if conflicts and edits == "merge":
            one = conflicts[0]
            raise RepositoryError(
                f"can't pack {name} over what was edited by hand",
                why=f"{one.field} was set to {one.edited}, and this pack sets it to {one.packed}",
                mend="say which holds, with --edits keep or --edits drop",
            )
        if conflicts:
            merge(parse(wanted[name].packed), edited, wanted[name].message)
            fields = [*fields, *(conflict.field for conflict in conflicts)]
        kept += [f"{name}.{field}" for field in fields]
    return tuple(kept)


def write_model(folder: Path, version: int, wanted: Wanted, source: Artifact, hooks: Hooks | None) -> None:
    """Write a model's folder, with one version.

    Raises:
        OSError: the disk refuses.
    """
    inside = folder / str(version)
    inside.mkdir(parents=True)
    (folder / PACKED_FILE).write_text(wanted.packed, encoding="utf-8")
    if wanted.labels is not None:
        shutil.copyfile(wanted.labels, folder / LABELS)
    edited = instances_of(wanted.message) != instances_of(parse(wanted.packed))
    chosen = "as it was edited by hand or tuned" if edited else wanted.chosen
    text = with_reason(wanted.message, chosen) if wanted.role == "network" else text_of(wanted.message)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    if wanted.role == "network":
        file = wanted.message.default_model_filename or BACKENDS[source.format][2]
        shutil.copyfile(source.model_path, inside / file)
    elif wanted.role == "ensemble" or hooks is None:
        (inside / ".gitkeep").touch()  # an ensemble has an empty version folder, which git would drop
    else:
        shutil.copyfile(HOOKS / "model.py", inside / "model.py")
        shutil.copyfile(HOOKS / "values.py", inside / "hook_values.py")
        shutil.copyfile(hooks.source.path, inside / "hooks.py")
        for name in hooks.source.files:
            shutil.copyfile(hooks.source.path.parent / name, inside / name)
    if wanted.role != "ensemble":
        write_provenance(inside, source if wanted.role == "network" else None)
