"""Whether a folder's weights and its network are one another's: what is made up, left over, of another size, no number.

transformers loads what fits and passes over the rest; each of these would be another network than the one that was
trained.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from compress.console.wording import AssumedWarning, counted
from compress.errors import CheckpointError
from compress.formats.hub.folder import WHOLE, HubFolder

__all__ = ["refuse_lack", "refuse_leftovers", "refuse_made_up", "refuse_misfits", "refuse_no_numbers", "refuse_types"]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FULL = "take the folder of the model in float32, float16 or bfloat16"
_MERGE = "merge the adapter into the model, and save it with save_pretrained"
_AS_MADE = 'add what timm made the network with to config.json, such as "model_args": {"img_size": 64}, or ' + WHOLE
_TRAINED = "name the folder of the trained model; one for another task has to be trained first"
# What libraries of adapters and of quantized weights write beside, or in place of, a layer's own weights.
_ADAPTERS = re.compile(r"(^|[._])(lora_|adapters?[._]|adapter_|ia3_|hada_|lokr_|oft_|base_layer\.)")
_QUANTIZED = re.compile(
    r"(^|\.)(weight_(scale|zero_point|packed|shape|g_idx)\w*|input_scale\w*|output_scale|qweight|qzeros|scales|zeros|"
    r"zero_points?|g_idx|SCB|weight\.(absmax|quant_map|quant_state|nested)\w*[\w.]*)$"
)
# Whole numbers that networks compute, and older releases stored.
_COUNTS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|num_batches_tracked|relative_position_index|version)$|"
    r"\.(attn|attention)\.(masked_)?bias$"
)
# Heads inside of what is kept, and buffers of older releases, that many trained folders hold beyond their class.
_KNOWN = re.compile(
    r"(^|\.)(pooler|seq_relationship)\.|(^|\.)(mask_token|masked_bias|version|num_batches_tracked|position_ids|inv_freq)$"
)


def refuse_types(state: Mapping[str, torch.Tensor], whole: Collection[str], folder: HubFolder) -> None:
    """Refuse weights in numbers that stand for others: INT8, FP8 and the like, which need scales to be read.

    Args:
        state: of `state_of`.
        whole: names of the network's own tensors of whole numbers.
        folder: that they are from.

    Raises:
        CheckpointError: there are such.
    """
    for name, tensor in state.items():
        if tensor.dtype in FLOATS:
            continue
        if not tensor.dtype.is_floating_point and (_COUNTS.search(name) or any(_same(name, each) for each in whole)):
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"can't load {folder.path}", why=f"its weight {name[:120]!a} is {dtype}: quantized already", mend=_FULL
        )


def _same(name: str, other: str) -> bool:
    return name == other or name.endswith(f".{other}") or other.endswith(f".{name}")


def refuse_misfits(told: Mapping[str, Any], folder: HubFolder) -> None:
    """Refuse weights of other shapes than the network's.

    Raises:
        CheckpointError: there are such; it names the first.
    """
    if misfits := sorted(told["mismatched_keys"], key=lambda each: str(each[0])):
        shown = [f"{name} is {list(held)}, not {list(asked)}" for name, held, asked in misfits[:3]]
        more = f" and {len(misfits) - 3} more" if len(misfits) > 3 else ""
        raise CheckpointError(
            f"the weights of {folder.path} don't fit its configuration",
            why="; ".join(shown) + more,
            mend=_AS_MADE if "architecture" in folder.config else WHOLE,
        )


def refuse_leftovers(model: Any, told: Mapping[str, Any], folder: HubFolder, *, on_purpose: bool) -> None:
    """Refuse weights of the network's own modules that it has no place for; tell of others that are left out.

    Args:
        model: of transformers, with its weights.
        told: its loading info.
        folder: that they are from.
        on_purpose: whether heads, or a second tower, are left out because that is what was asked for.

    Raises:
        CheckpointError: layers beyond the configuration's, an adapter's weights, scales of quantized ones, or others
            inside of a module that the network has.
    """
    left = sorted(told["unexpected_keys"])
    modules = {name for name, _ in model.named_modules()}
    buffers = [name for name, _ in model.named_buffers()]
    base = str(getattr(model, "base_model_prefix", "") or "")
    own = [name for name in left if not _KNOWN.search(name) and not any(_same(name, each) for each in buffers)]
    for why, mend, found in (
        ("an adapter's weights, which are not merged", _MERGE, [name for name in own if _ADAPTERS.search(name)]),
        ("scales of quantized weights", _FULL, [name for name in own if _QUANTIZED.search(name)]),
        ("what config.json has no place for", WHOLE, [name for name in own if _is_inside(name, modules, base)]),
    ):
        if found:
            raise CheckpointError(
                f"won't take a part of the weights of {folder.path}",
                why=f"it holds {why}: {counted(len(found), 'tensors')}, {_shown(found)}",
                mend=mend,
            )
    if left and not on_purpose:
        told_of = (
            f"{folder.path}: {counted(len(left), 'tensors')} left out, which a {type(model).__name__} has no use for"
        )
        warnings.warn(f"{told_of}: {_shown(left)}", AssumedWarning, stacklevel=4)


def _is_inside(name: str, modules: set[str], base: str) -> bool:
    """Whether a weight stands in a module that the network has; names may have its base's name in front, or not."""
    first = name.partition(".")[0]
    return first in (modules | {base}) or f"{base}.{first}" in modules


def refuse_no_numbers(model: nn.Module, folder: HubFolder) -> None:
    """Refuse weights that are NaN or infinite, and buffers that are NaN.

    Raises:
        CheckpointError: there are such; it names the first.
    """
    tensors: Iterable[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            continue
        weight = isinstance(tensor, nn.Parameter)
        if bool(tensor.isnan().any()) or (weight and not bool(tensor.isfinite().all())):
            what = "NaN" if bool(tensor.isnan().any()) else "infinite"
            raise CheckpointError(
                f"won't load {folder.path}",
                why=f"its weight {name} is {what}: the training diverged, or the file is damaged",
                mend="name the folder of an earlier checkpoint, or download it again",
            )


def refuse_made_up(program: ExportedProgram, network: nn.Module, missing: frozenset[str], folder: HubFolder) -> None:
    """Refuse random numbers in place of what the folder lacks, where the outputs need it.

    A buffer of whole numbers is computed by its class; one of floats, as BatchNorm's statistics, was learned.

    Args:
        program: exported of the network.
        network: with the names of `missing`.
        missing: names of parameters and buffers that the folder lacks.
        folder: that they are lacking in.

    Raises:
        CheckpointError: it is needed.
    """
    signature = program.graph_signature
    names = signature.inputs_to_parameters | signature.inputs_to_buffers
    needed, left = set(), [program.graph.output_node()]
    while left:  # a pooler whose answer nobody takes is in the graph, and not behind its outputs
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    used = {names[node.name] for node in needed if node.op == "placeholder" and node.name in names}
    counts = {name for name, buffer in network.named_buffers() if not buffer.is_floating_point()}
    refuse_lack(used & missing - counts, network.get_submodule("model"), folder)


def refuse_lack(missing: Collection[str], model: nn.Module, folder: HubFolder) -> None:
    """Refuse where something is missing.

    Raises:
        CheckpointError: it is.
    """
    if lacking := sorted(name.removeprefix("model.") for name in missing):
        raise CheckpointError(
            f"the weights of {folder.path} are not those of a whole {type(model).__name__}",
            why=f"they lack {counted(len(lacking), 'tensors')}: {', '.join(lacking[:5])}",
            mend=_TRAINED,
        )


def _shown(names: list[str]) -> str:
    return ", ".join(ascii(name)[1:-1][:100] for name in names[:3]) + (", …" if len(names) > 3 else "")
