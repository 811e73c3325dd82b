"""What a folder's network is given: tokens and the boxes they stand in, images or a spectrogram; all else is told."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from compress.artifact import TensorSpec
from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError
from compress.formats.hub.folder import HubFolder
from compress.formats.hub.type_ids import gives_a_text_types
from compress.tokenizer.type_ids import NAME

__all__ = ["BOXES", "OWN_MODULE", "inputs_of", "left_out", "main_input", "warn_of_left_out"]

OWN_MODULE = "write it as a torch module that takes and gives plain tensors, and save it with compress.save"
BOXES = "bbox"
_MAIN = ("input_ids", "pixel_values", "input_features")
# What takes the place of another input, is for training or generation alone, or says where something is looked at.
_IMMATERIAL = re.compile(
    r"token_type_ids|inputs?_embeds|inputs|labels?|\w+_labels?|label\w*|ans|(start|end)_positions|past_\w+|\w*cache\w*|mems|"
    r"use_\w+|output_\w+|return_\w+|(encoder|decoder|cross)_\w+|logits_to_keep|\w*head_mask|(\w+_)?position_ids|"
    r"state|per_layer_inputs|lengths|input_mask|perm_mask|target_mapping|bool_masked_pos|mask_time_indices|"
    r"\w*loss_mask|bbox_first_token_mask|"
    r"(global_|visual_)?attention_mask|deprecated_arguments"
)
_TEST_TIME = ("flip_pairs",)
_STANDS = {"pixel_mask": "ones", "task_type_ids": "zeros"}  # for what is left out, where the forward makes something up
# What some configurations turn off: by the input, the setting and what it is then.
_UNUSED = {"task_type_ids": ("use_task_id", False), "langs": ("n_langs", 1), "pixel_values": ("visual_embed", False)}
_THOUSANDTHS = ("layoutlm", "layoutlmv2", "layoutlmv3", "lilt")  # whose boxes are looked up in tables


def main_input(forward: Any) -> str:
    """The one of a forward's inputs that the others go with; "" where it takes none that is known."""
    taken = inspect.signature(forward).parameters
    return next((name for name in _MAIN if name in taken), "")


def inputs_of(
    model: Any, config: Any, folder: HubFolder, *, types: bool | None, pairs: bool
) -> tuple[tuple[TensorSpec, ...], str]:
    """What the network is given, and of what kind that is: "text", "image" or "audio".

    Boxes are [batch, seq, 4], of left, upper, right and lower: int64, in thousandths of the page, of networks that look
    them up in tables; of others float32, in shares of it.

    Args:
        model, config, folder: of the network.
        types: whether its tokenizer passes token_type_ids.
        pairs: whether it may be given two texts at a time.

    Raises:
        CheckpointError: it takes none of these.
    """
    taken = inspect.signature(model.forward).parameters
    main = main_input(model.forward)
    if main == "input_ids":
        names = ["input_ids", "attention_mask"]
        kinds = getattr(config, "type_vocab_size", None)
        # Of a single text they are all 0, but for some (Funnel's), which a network with a table of kinds assumes where
        # they are not given. One without such a table (GPT-2, XLNet) does something else with zeros than with none.
        if isinstance(kinds, int):
            used = kinds > 1 and (pairs or (types is not False and gives_a_text_types(folder)))
        else:
            used = types is True
        if used and NAME in taken:
            names.append(NAME)
        specs = [TensorSpec(name, "int64", ("batch", "seq")) for name in names]
        if BOXES in taken:
            whole = getattr(config, "model_type", "") in _THOUSANDTHS
            specs.append(TensorSpec(BOXES, "int64" if whole else "float32", ("batch", "seq", 4)))
        return tuple(specs), "text"
    if main == "pixel_values":
        from compress.formats.hub.processor import image_size

        height, width = image_size(folder, config)
        channels = getattr(config, "num_channels", 3)
        return (TensorSpec(main, "float32", ("batch", channels, height, width)),), "image"
    bins, places = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if main == "input_features" and isinstance(bins, int) and isinstance(places, int):
        strides = math.prod(layer.stride[0] for layer in model.modules() if isinstance(layer, nn.Conv1d))
        return (TensorSpec(main, "float32", ("batch", bins, places * strides)),), "audio"
    raise CheckpointError(
        f"can't take {folder.path}",
        why=f"a {type(model).__name__} takes neither tokens nor images nor a spectrogram: {', '.join(list(taken)[:6])}",
        mend=OWN_MODULE,
    )


def left_out(model: Any, config: Any, given: Iterable[str]) -> tuple[str, ...]:
    """Tensors that a network's forward takes and is not given, though they would change what it answers.

    Args:
        model, config: of the network.
        given: names of what it is given.
    """
    kept = {*given, *_TEST_TIME}
    kept |= {name for name, (setting, value) in _UNUSED.items() if getattr(config, setting, None) == value}
    return tuple(
        name
        for name, each in inspect.signature(model.forward).parameters.items()
        if name not in kept and "Tensor" in str(each.annotation) and not _IMMATERIAL.fullmatch(name)
    )


def warn_of_left_out(names: tuple[str, ...], kind: str, folder: HubFolder) -> None:
    """Tell of inputs that a network would use, and is not given.

    Args:
        names: of `left_out`.
        kind: the network's class.
        folder: that it is from.
    """
    if names:
        shown = ", ".join(f"{name} (for which {_STANDS[name]} stand)" if name in _STANDS else name for name in names)
        told = (
            f"{folder.path}: what a {kind} may be given besides is left out: {shown}. It answers as it does without; "
            f"for these, {OWN_MODULE}"
        )
        warnings.warn(told, AssumedWarning, stacklevel=4)
