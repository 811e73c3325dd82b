"""A folder's configuration as transformers takes it: plain values, and nothing that would fetch or run anything."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError, MissingExtraError, first_line
from compress.formats.hub.bounds import DEEPEST, refuse_vast
from compress.formats.hub.folder import SPECIAL, WHOLE, HubFolder
from compress.formats.hub.timm import KIND as TIMM
from compress.formats.hub.timm import refuse_code, refuse_timm_within

__all__ = ["architecture_of", "config_of", "labels_of", "offline"]

# Keys by which a configuration chooses code, other files, or kernels to fetch; those with "_" in front, too.
_LEFT_OUT = {
    "auto_map", "attn_implementation", "experts_implementation", "dtype", "torch_dtype", "transformers_weights",
    "kernel_config", "fusion_config", "use_kernels", "distributed_config", "tp_plan", "device_map", "custom_pipelines",
    "name_or_path", "base_model_name_or_path", "output_attentions", "output_hidden_states", "return_dict", "use_cache",
    "torchscript",
}  # fmt: skip
_INSTEAD = "write the model as a torch module, and save it with compress.save(module, path, inputs=…)"
_LARGEST = 1 << 31
_UNBOUNDED = {"Infinity": math.inf, "-Infinity": -math.inf}


@contextlib.contextmanager
def offline() -> Iterator[Any]:
    """transformers, which fetches nothing while this lasts.

    Raises:
        MissingExtraError: it is not installed.
        CheckpointError: a part that is asked for meanwhile can't be imported.
    """
    known = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY")}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        try:
            import huggingface_hub.constants as hub

            transformers: Any = importlib.import_module("transformers")
        except ImportError as err:
            raise MissingExtraError("read a Hugging Face folder", module="transformers", extra="hf") from err
        was, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
        level, bar = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            yield transformers
        except (ImportError, RuntimeError) as err:
            if (broken := _broken(err)) is not None:
                raise broken from err
            raise
        finally:
            hub.HF_HUB_OFFLINE = was
            transformers.logging.set_verbosity(level)
            if bar:
                transformers.logging.enable_progress_bar()
    finally:
        for name, value in known.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _broken(err: BaseException) -> CheckpointError | None:
    """What to say where transformers can't import a part of its own; None where something else has failed.

    It imports a class when that is asked for, and with it what stands installed beside, such as torchvision.
    """
    words = re.match(r"Could not import module|Failed to import", str(err))
    frames = [
        frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(err.__traceback__)
    ]
    ours = next((at for at in reversed(range(len(frames))) if frames[at] == "compress"), 0)
    if not (words or isinstance(err, ImportError)) or "transformers" not in frames[ours:]:
        return None
    causes: list[BaseException] = [err]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    at_fault = next((name for each in causes for name in ("torchvision", "torchaudio") if name in _told(each)), "")
    mend = "pip install -c constraints.txt -e '.[hf]', in an environment of its own"
    if at_fault:
        mend = f"install the {at_fault} that was built for this torch, or take it away: pip uninstall {at_fault}"
    return CheckpointError(
        "can't import a part of transformers",
        why=": ".join(dict.fromkeys(first_line(each).partition(". ")[0][:200] for each in (err, causes[-1]))),
        mend=mend,
    )


def _told(err: BaseException) -> str:
    """An error's words, and the files that it went through."""
    return f"{err} {' '.join(frame.filename for frame in traceback.extract_tb(err.__traceback__))}"


def config_of(transformers: Any, folder: HubFolder, state: Mapping[str, torch.Tensor]) -> Any:
    """The configuration, an object of one of transformers' own classes.

    Args:
        transformers: the library.
        folder: whose it is.
        state: the weights, which its numbers are held against.

    Raises:
        CheckpointError: it is of no kind that is built in, of quantized weights, malformed, or asks for far more than
            the weights explain.
    """
    kind = folder.config.get("model_type")
    if type(kind) is not str or kind not in transformers.CONFIG_MAPPING:
        foreign = "auto_map" in folder.config
        raise CheckpointError(
            f"won't load {folder.path}: it needs code that comes with it" if foreign else f"can't load {folder.path}",
            why=f"transformers {transformers.__version__} has no model_type {str(kind)[:60]!a}"
            + (", and code that a folder names is never run" if foreign else ""),
            mend=_INSTEAD,
        )
    if folder.config.get("quantization_config"):
        raise CheckpointError(
            f"can't load {folder.path}",
            why="its weights are quantized already (quantization_config)",
            mend="take the folder of the model in float32, float16 or bfloat16",
        )
    if "auto_map" in folder.config:
        told = f"{folder.path} names code of its own (auto_map), which is not run: transformers' own {kind} is taken"
        warnings.warn(told, AssumedWarning, stacklevel=3)
    refuse_timm_within(folder)
    if kind == TIMM:
        refuse_code(folder)
    refuse_vast(folder, state)
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(_plain(folder.config))
    except Exception as err:  # a configuration is anybody's, and each class checks its own in its own way
        raise CheckpointError(
            f"can't read {folder.path / 'config.json'}",
            why=f"it is no configuration of {kind}: {first_line(err)[:200]}",
            mend=WHOLE,
        ) from err
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def architecture_of(folder: HubFolder) -> str:
    """The class that the weights are of; "" where the configuration does not say."""
    named = folder.config.get("architectures")
    found = named[0] if isinstance(named, list) and named else ""
    return found if isinstance(found, str) and re.fullmatch(r"[A-Za-z0-9]{1,100}", found) else ""


def labels_of(config: Any) -> tuple[str, ...]:
    """Names of the classes by number, where the configuration has one for each."""
    names = getattr(config, "id2label", None)
    if not isinstance(names, Mapping):
        return ()
    found = {int(key): str(value)[:1000] for key, value in names.items() if str(key).isdecimal()}
    return tuple(found[number] for number in range(len(found))) if found.keys() == set(range(len(found))) else ()


def _plain(value: Any, depth: int = 0) -> Any:
    """Without what chooses code or files; the timm backbones and other networks that it names are not fetched."""
    if depth > DEEPEST:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict) and value.keys() == {SPECIAL}:
        return _UNBOUNDED.get(str(value[SPECIAL]), value)
    if isinstance(value, dict):
        kept = {
            key: _plain(each, depth + 1)
            for key, each in value.items()
            if key not in _LEFT_OUT and (not key.startswith("_") or key == "_num_labels")
        }
        if kept.get("use_pretrained_backbone"):
            kept["use_pretrained_backbone"] = False
        return kept
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in value]
    if type(value) is int and abs(value) >= _LARGEST:
        raise ValueError(f"it holds the number {str(value)[:30]}")
    return value
