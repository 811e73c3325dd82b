"""timm's folders (config.json with `architecture`): transformers' class for these makes the network, by timm itself."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError, MissingExtraError, first_line
from compress.formats.hub.folder import WHOLE, HubFolder, has
from compress.processor import IMAGE_SETTINGS

__all__ = ["KIND", "is_timm", "refuse_code", "refuse_timm_within", "without_settings", "wrapped"]

KIND, PREFIX = "timm_wrapper", "timm_model."
# A scheme in front of a name ("hf-hub:", "local-dir:") has timm fetch a model, or read another folder.
_NAME = re.compile(r"[A-Za-z0-9_]{1,100}(\.[A-Za-z0-9_]{1,100})?")
_WORD = re.compile(r"[A-Za-z0-9_]{0,40}")
# What would read other files, or have the network give something else.
_NOT_ARGUMENTS = {
    "model_name", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir",
    "scriptable", "exportable", "no_jit", "features_only", "out_indices", "num_classes",
}  # fmt: skip
_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}  # Pillow's numbers


def is_timm(folder: HubFolder) -> bool:
    """Whether timm wrote it."""
    return "model_type" not in folder.config and type(folder.config.get("architecture")) is str


def wrapped(folder: HubFolder, state: Mapping[str, Any]) -> tuple[HubFolder, dict[str, Any]]:
    """The folder and its weights as transformers' class for timm's networks names them.

    Args:
        folder: of timm's.
        state: of `state_of`.

    Raises:
        CheckpointError: two weights would have one name.
    """
    twice = next((key for key in state if not key.startswith(PREFIX) and f"{PREFIX}{key}" in state), None)
    if twice is not None:
        raise CheckpointError(
            f"can't read the weights of {folder.path}",
            why=f"they hold {twice[:80]!a} and {(PREFIX + twice)[:90]!a}, which are one",
            mend=WHOLE,
        )
    config, told = dict(folder.config), _settings(folder)
    classes = config.setdefault("num_classes", told.get("num_classes", 0))
    size = told.get("input_size")
    if isinstance(size, list) and len(size) == 3 and all(type(side) is int and side > 0 for side in size):
        config |= {"num_channels": size[0], "image_size": size[1:]}
        if told.get("fixed_input_size") is True:  # as timm itself makes it, of positions for this size
            args = config.get("model_args") or {}
            config["model_args"] = {"img_size": size[1:], **args} if isinstance(args, dict) else args
    name = "TimmWrapperForImageClassification" if classes else "TimmWrapperModel"
    config |= {"model_type": KIND, "architectures": [name]}
    return replace(folder, config=config), {
        f"{PREFIX}{key.removeprefix(PREFIX)}": value for key, value in state.items()
    }


def refuse_code(folder: HubFolder) -> None:
    """Refuse what would have timm read or fetch something beside the folder, before it is asked for a network.

    Args:
        folder: whose configuration is of the kind `KIND`.

    Raises:
        MissingExtraError: timm is not installed.
        CheckpointError: no network of timm's is named, or arguments that are no plain settings.
    """
    name, given = folder.config.get("architecture"), folder.config.get("model_args")
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as err:
        if getattr(err, "name", None) not in (None, "timm", "torchvision"):
            raise
        missing = str(err.name or "timm")
        raise MissingExtraError(f"read {folder.path}, a folder of timm's", module=missing, extra="timm") from err
    except Exception as err:  # torchvision beside a torch that it was not built for fails in its own ways
        raise CheckpointError(
            f"can't read {folder.path}, a folder of timm's",
            why=f"timm can't be imported: {first_line(err)[:200]}",
            mend="pip install -c constraints.txt -e '.[timm]', with the torchvision that was built for this torch",
        ) from err
    if type(name) is not str or not _NAME.fullmatch(name) or not timm.is_model(name):
        raise CheckpointError(
            f"can't load {folder.path}",
            why=f"timm {timm.__version__} has no architecture {str(name)[:60]!a}",
            mend="install the release of timm that has it; or write a function in mine.py that gives it, and name "
            f"{folder.weights[0]} with --model mine:network and --input",
        )
    if given is not None and (type(given) is not dict or any(not _plain(key, each) for key, each in given.items())):
        raise CheckpointError(
            f"won't load {folder.path}", why="its model_args are more than numbers and words of a network", mend=WHOLE
        )


def refuse_timm_within(folder: HubFolder) -> None:
    """Refuse what would have transformers ask timm, or another folder, for a part of a network.

    `refuse_code` looks at what the whole is made from alone; a backbone's name and arguments go to timm as they are.

    Args:
        folder: of any kind.

    Raises:
        CheckpointError: it names such a part, or a class of timm's for a network of another kind.
    """
    config = folder.config
    named = config.get("architectures")
    is_whole = config.get("model_type") == KIND
    strange = not is_whole and any(str(name).startswith("Timm") for name in (named if isinstance(named, list) else ()))
    if strange or _asks_timm(config, whole=is_whole):
        raise CheckpointError(
            f"won't load {folder.path}",
            why="a part of its network is made by timm or read from elsewhere (a backbone)",
            mend="write a function in mine.py that gives the network, and name the weights with --model mine:network "
            "and --input",
        )


def _asks_timm(config: dict[str, Any], *, whole: bool) -> bool:
    waiting: list[Any] = [config]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(value)
        if not isinstance(value, dict):
            continue
        waiting.extend(value.values())
        kind, backbone = value.get("model_type"), value.get("backbone")
        if type(kind) is str and kind.startswith("timm") and not (whole and value is config):
            return True
        if value.get("use_timm_backbone") or value.get("backbone_kwargs"):
            return True
        if type(backbone) is str and not _NAME.fullmatch(backbone):
            return True
    return False


def without_settings(folder: HubFolder, config: Any) -> None:
    """Say how a folder of timm's gets an image processor, which it has in other words.

    Args:
        folder: of timm's.
        config: of `config_of`.
    """
    told, size = _settings(folder), getattr(config, "image_size", None)
    mean, std, share = told.get("mean"), told.get("std"), told.get("crop_pct", 0.875)
    if has(folder.path, IMAGE_SETTINGS) or told.get("crop_mode", "center") != "center":
        return
    if not (type(share) is float and 0.1 < share <= 1 and _numbers(size, 2) and _numbers(mean, 3) and _numbers(std, 3)):
        return
    settings = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True,
        "size": {"shortest_edge": int(max(size) / share)}, "resample": _FILTERS.get(str(told.get("interpolation")), 2),
        "do_center_crop": True, "crop_size": {"height": size[0], "width": size[1]}, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": list(mean), "image_std": list(std),
    }  # fmt: skip
    told_of = (
        f"{folder.path} is timm's, and says nothing that reads image files; write this into {IMAGE_SETTINGS} in it, "
        f"and --eval images/ and serve pack --image make them as in the training: {json.dumps(settings)}"
    )
    warnings.warn(told_of, AssumedWarning, stacklevel=3)


def _numbers(value: Any, count: int) -> TypeGuard[list[float]]:
    return isinstance(value, list) and len(value) == count and all(type(each) in (int, float) for each in value)


def _settings(folder: HubFolder) -> dict[str, Any]:
    found = folder.config.get("pretrained_cfg")
    return found if isinstance(found, dict) else {}


def _plain(key: Any, value: Any) -> bool:
    if type(key) is not str or key in _NOT_ARGUMENTS:
        return False
    if isinstance(value, list):
        return all(_plain("", each) for each in value)
    return value is None or type(value) in (bool, int, float) or (type(value) is str and bool(_WORD.fullmatch(value)))
