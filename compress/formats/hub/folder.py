"""What is in a folder: its configuration, its weights, the files beside them. Nothing outside of it is read."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.console.wording import counted
from compress.errors import CheckpointError, first_line
from compress.vetting.files import is_there
from compress.vetting.paths import stands_inside
from compress.vetting.texts import read_json

__all__ = [
    "HubFolder",
    "has",
    "inside",
    "is_hub_folder",
    "json_of",
    "named_on_a_hub",
    "open_hub_folder",
    "perhaps_on_a_hub",
    "weights_elsewhere",
]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # of peft
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_SHARDS = 1000
SPECIAL = "__float__"  # {"__float__": "Infinity"} is how transformers writes what JSON has no number for
WHOLE = "copy or download the folder again, with all of its files"
_SHARD = re.compile(r"(?P<stem>[\w.-]{1,96})-\d{5}-of-(?P<count>\d{5})\.safetensors", re.ASCII)
_OLD_NAME = re.compile(r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*")
_HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)


@dataclass(frozen=True)
class HubFolder:
    """A folder that has been looked at.

    Attributes:
        path: where configuration and weights lie; of a sentence encoder it may be a folder inside `root`.
        root: what the user named.
        config: of config.json, whole.
        modules: of a sentence encoder's modules.json, with each module's type and folder; empty where there is none.
        weights: files of them.
        pickled: whether they are pickles.
    """

    path: Path
    root: Path
    config: dict[str, Any]
    modules: tuple[tuple[str, str], ...]
    weights: tuple[Path, ...]
    pickled: bool


def is_hub_folder(path: Path) -> bool:
    """Whether it is such a folder, and no artifact of this project."""
    return not (path / "artifact.json").exists() and any(
        os.path.lexists(path / name) for name in ("config.json", "modules.json")
    )


def named_on_a_hub(path: Path) -> bool:
    """Whether it reads as a model's name on a hub, `owner/name`, and nothing of this machine is meant."""
    return bool(_HUB_NAME.fullmatch(str(path))) and not path.suffix and not path.parent.exists()


def perhaps_on_a_hub(path: Path) -> bool:
    """Whether it may be the name of a model of a hub without an owner, as the oldest have: `bert-base-uncased`."""
    return bool(_OLD_NAME.fullmatch(str(path))) and not os.path.lexists(path)


def open_hub_folder(root: Path) -> HubFolder:
    """Look at a folder.

    Raises:
        CheckpointError: its configuration is missing or damaged, it has no weights, or a part of them is missing.
    """
    modules = _modules(root)
    first = next((folder for kind, folder in modules if kind == "Transformer"), "")
    if modules and not any(kind == "Transformer" for kind, _ in modules):
        raise CheckpointError(
            f"can't read {root}",
            why=f"its modules.json begins with {modules[0][0][:60]!r}, not with a transformer",
            mend="name a folder of a sentence encoder made of a transformer, a pooling and what follows them",
        )
    path = root / first if first else root
    config = json_of(path, "config.json", root)
    if type(config) is not dict:
        raise CheckpointError(f"can't read {path / 'config.json'}", why="it is no JSON object", mend=WHOLE)
    weights, pickled = _weights(path, root)
    return HubFolder(path, root, config, modules, weights, pickled)


def has(folder: Path, name: str) -> bool:
    """Whether a folder has a file that it may lack.

    Raises:
        CheckpointError: something of that name is there, and is no file: a pipe, a folder, a link to nothing.
    """
    try:
        return is_there(folder / name)
    except OSError as err:
        why = f"{name[:80]} is a link that leads to no file" if isinstance(err, FileNotFoundError) else first_line(err)
        raise CheckpointError(
            f"can't read {folder}", why=why[:300], mend=f"put the file in its place, or {WHOLE}"
        ) from err


def inside(folder: Path, name: str, root: Path | None = None) -> Path:
    """The path of a file that a folder's files name.

    A link is followed where it ends in the folder; a snapshot in Hugging Face's cache has its files in `blobs` beside.

    Args:
        folder: that the name is of.
        name: of the file.
        root: what nothing may lead out of; by default the folder.

    Raises:
        CheckpointError: the name, or a link, leads out.
    """
    root = folder if root is None else root
    if not name or not stands_inside(name):
        raise CheckpointError(
            f"won't read {folder}", why=f"it names the file {name[:80]!a}, which is outside of it", mend=WHOLE
        )
    path = folder / name
    home = root.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as err:  # links in a circle
        raise CheckpointError(f"can't read {path}", why=str(err)[:200], mend=WHOLE) from err
    if not any(real.is_relative_to(each) for each in homes):
        raise CheckpointError(
            f"won't read {path}",
            why="it is a link that leads out of the folder",
            mend="put the file itself in its place, if it is yours",
        )
    return path


def json_of(folder: Path, name: str, root: Path) -> Any:
    """The value of a JSON file of a folder.

    Python's parser takes NaN and Infinity, which are no JSON. Configurations have the latter for what has no bound
    (Mamba 2's `time_step_limit`), and nowhere else; the former is no setting of anything.

    Raises:
        CheckpointError: it is missing, no file, leads out, is no JSON, or holds NaN, or in config.json Infinity.
    """
    if not has(folder, name):
        raise CheckpointError(f"can't read {folder}", why=f"it has no {name}", mend=WHOLE)
    path = inside(folder, name, root)
    try:
        data = read_json(path)
    except (OSError, ValueError) as err:
        raise CheckpointError(f"can't read {path}", why=str(err)[:300], mend=WHOLE) from err
    found = _no_number_in(data, infinite=name == "config.json")
    if found is not None:
        key, value = found
        raise CheckpointError(
            f"can't read {path}",
            why=f"{ascii(key[:60]) if key else 'it'} is {value}, which is no number",
            mend="write the number of the training in its place, or " + WHOLE,
        )
    return data


def _no_number_in(data: Any, *, infinite: bool) -> tuple[str, str] | None:
    """The key that a NaN stands under, however deep, "" where it stands under none, and its name; None for no NaN.

    Args:
        data: of a JSON file.
        infinite: look for infinite numbers, too, but for those that are limits.
    """
    left: list[tuple[str, Any]] = [("", data)]
    while left:
        key, value = left.pop()
        told = str(value.get(SPECIAL)) if isinstance(value, dict) and value.keys() == {SPECIAL} else ""
        number = value if isinstance(value, float) else 0.0
        if told == "NaN" or math.isnan(number):
            return key, "NaN"
        if infinite and (told in ("Infinity", "-Infinity") or math.isinf(number)) and not key.endswith("limit"):
            return key, "Infinity"
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(key, each) for each in value]
    return None


def _modules(root: Path) -> tuple[tuple[str, str], ...]:
    if not has(root, "modules.json"):
        return ()
    data = json_of(root, "modules.json", root)
    try:
        found = tuple((str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in data)
    except (TypeError, KeyError) as err:
        raise CheckpointError(
            f"can't read {root / 'modules.json'}", why="it is no list of modules, each with type and path", mend=WHOLE
        ) from err
    for _, folder in found:
        if folder:
            inside(root, folder)
    return found


def _weights(path: Path, root: Path) -> tuple[tuple[Path, ...], bool]:
    for single, index, pickled in ((SINGLE, INDEX, False), (PICKLED, PICKLED_INDEX, True)):
        if (path / single).exists() or (path / single).is_symlink():
            return (_there(path, single, root),), pickled
        if has(path, index):
            return _shards(path, index, root), pickled
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if parts := {name: found for name in others if (found := _SHARD.fullmatch(name))}:  # whose index is missing
        return tuple(_there(path, name, root) for name in _numbered(path, parts)), False
    if len(others) == 1:
        return (_there(path, others[0], root),), False
    if elsewhere := weights_elsewhere(path):
        raise CheckpointError(f"{path} holds no weights that are read from it", why=elsewhere[0], mend=elsewhere[1])
    other = next((name for name in ("tf_model.h5", "flax_model.msgpack") if (path / name).exists()), None)
    raise CheckpointError(
        f"{path} holds no weights",
        why=f"there is no {SINGLE} in it, and no {INDEX}" + (f"; {other} is of another framework" if other else ""),
        mend="download the folder with its weights, or save it again: model.save_pretrained(folder)",
    )


def weights_elsewhere(path: Path) -> tuple[str, str] | None:
    """Why a folder without safetensors is no model by itself, and how to mend it, where it has ONNX or GGUF files."""
    found = sorted(path.glob("*.onnx")) + sorted(path.glob("onnx/*.onnx"))
    if found:
        plain = next((each for each in found if each.name == "model.onnx"), found[0])
        name = str(plain.relative_to(path))[:160]
        told = f"its weights are in ONNX: {name!a}" + (f", and {len(found) - 1} more" if len(found) > 1 else "")
        return told, f"name that file, {path / name}; or the folder with its {SINGLE}"
    gguf = sorted(path.glob("*.gguf"))
    if gguf:
        told = f"its weights are in GGUF ({gguf[0].name[:80]!a}), the form of llama.cpp, which is not read here"
        return told, f"take the folder of the model that it was made of, with its {SINGLE}"
    return None


def _numbered(path: Path, parts: dict[str, re.Match[str]]) -> list[str]:
    """The names of all shards, of which some are there."""
    (name, first), *_ = parts.items()
    stem, count = first["stem"], int(first["count"])
    other = next((each for each, found in parts.items() if (found["stem"], int(found["count"])) != (stem, count)), None)
    if other is not None:
        raise CheckpointError(
            f"can't tell which weights of {path} are the model's",
            why=f"{name[:80]!a} and {other[:80]!a} are of two sets, and no {INDEX} says which",
            mend="take away the one that is not the model's, or " + WHOLE,
        )
    names = [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, min(count, MOST_SHARDS) + 1)]
    beyond = next((each for each in parts if each not in names), "")
    if count > MOST_SHARDS or beyond:
        why = f"by its name, {name[:80]!a} is one of over {MOST_SHARDS} files"
        if count <= MOST_SHARDS:
            why = f"{beyond[:80]!a} is none of {counted(count, 'files')} that it says there are"
        raise CheckpointError(f"can't read the weights of {path}", why=why, mend=WHOLE)
    return names


def _shards(path: Path, index: str, root: Path) -> tuple[Path, ...]:
    data = json_of(path, index, root)
    names = data.get("weight_map") if type(data) is dict else None
    if type(names) is not dict or not names or not all(type(name) is str for name in names.values()):
        raise CheckpointError(f"can't read {path / index}", why="it has no weight_map of files", mend=WHOLE)
    shards = sorted(set(names.values()))
    if len(shards) > MOST_SHARDS:
        raise CheckpointError(f"can't read {path / index}", why=f"it names over {MOST_SHARDS} files", mend=WHOLE)
    return tuple(_there(path, name, root) for name in shards)


def _there(path: Path, name: str, root: Path) -> Path:
    found = inside(path, name, root)
    if not has(path, name):
        raise CheckpointError(f"{path} is not whole", why=f"{name[:80]!a} is missing", mend=WHOLE)
    return found
