"""From a transformer's tokens to one vector for each text, as a sentence encoder's modules.json says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from compress.errors import CheckpointError
from compress.formats.hub.fit import refuse_no_numbers, refuse_types
from compress.formats.hub.folder import SINGLE, WHOLE, HubFolder, has, inside, json_of
from compress.formats.hub.tensors import read_safetensors

__all__ = ["POOLINGS", "Tail", "refuse_pooling", "tail_by", "tail_of", "unpoolable"]

# In the order in which sentence-transformers' Pooling puts the vectors of several side by side.
MODES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
POOLINGS = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
"""What a user may ask for where a folder says nothing, as sentence-transformers' Pooling calls it."""
_ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    f"torch.nn.modules.{path}": kind
    for path, kind in {
        "activation.Tanh": nn.Tanh, "activation.ReLU": nn.ReLU, "activation.GELU": nn.GELU,
        "linear.Identity": nn.Identity,
    }.items()
}  # fmt: skip


class Tail(nn.Module):
    """Tokens float32 [batch, seq, width] and mask int64 [batch, seq] → embeddings float32 [batch, …].

    Args:
        modes: of `MODES`; the vectors of several stand side by side.
        dense: linear layers that follow, each with its activation.
        normalized: whether each vector has length 1 at the end.
    """

    def __init__(self, modes: tuple[str, ...], dense: nn.Module, normalized: bool) -> None:
        super().__init__()
        self.modes, self.normalized = modes, normalized
        self.dense = dense

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = mask.to(tokens.dtype).unsqueeze(-1)
        vectors = torch.cat([_pooled(mode, tokens, mask, kept) for mode in self.modes], 1)
        vectors = self.dense(vectors)
        return F.normalize(vectors, dim=1) if self.normalized else vectors


def _pooled(mode: str, tokens: torch.Tensor, mask: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    match mode:
        case "cls_token":
            return tokens[:, 0]
        case "max_tokens":
            return tokens.masked_fill(kept == 0, -1e9).amax(1)
        case "lasttoken":
            places = torch.arange(mask.shape[1], device=mask.device)
            last = ((places + 1) * mask).argmax(1)
            return tokens.gather(1, last[:, None, None].expand(-1, 1, tokens.shape[2])).squeeze(1)
        case "weightedmean_tokens":
            kept = kept * (torch.arange(mask.shape[1], device=mask.device, dtype=tokens.dtype) + 1)[None, :, None]
    count = kept.sum(1).clamp(min=1e-9)
    return (tokens * kept).sum(1) / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


def tail_by(pooling: str | None) -> Tail | None:
    """A pooling alone, as sentence-transformers puts it behind a folder without modules; None for none.

    Args:
        pooling: of `POOLINGS`.

    Raises:
        CheckpointError: it is another.
    """
    if pooling is None:
        return None
    if pooling not in POOLINGS:
        raise CheckpointError(
            f"can't pool tokens by {pooling!r}", why="there is no such pooling", mend=f"take {', '.join(POOLINGS)}"
        )
    return Tail((POOLINGS[pooling],), nn.Sequential(), normalized=False)


def refuse_pooling(pooling: str | None, name: str, part: str | None, folder: HubFolder) -> None:
    """Refuse a pooling that would stand behind another, or behind one vector for each text.

    Args:
        pooling: that is asked for; None where none is.
        name: of the folder's class.
        part: of a network of two towers.
        folder: of the network.

    Raises:
        CheckpointError: it would.
    """
    if pooling is None:
        return
    if folder.modules:
        raise unpoolable(folder, "its modules.json says how its tokens are pooled")
    if part is not None or name.endswith("WithProjection"):
        raise unpoolable(folder, f"a {name} gives one vector for each text by itself")


def unpoolable(folder: HubFolder, why: str) -> CheckpointError:
    """What is raised where a pooling has no place."""
    return CheckpointError(f"can't put a pooling behind {folder.path}", why=why, mend="leave --pooling out")


def tail_of(folder: HubFolder) -> Tail:
    """What follows the transformer.

    Raises:
        CheckpointError: a module of another kind, or one that is damaged.
    """
    modes: tuple[str, ...] = ()
    dense: list[nn.Module] = []
    normalized = False
    for kind, path in folder.modules:
        if kind == "Pooling" and not modes:
            modes = _modes(json_of(folder.root / path, "config.json", folder.root), folder)
        elif kind == "Dense" and modes and not normalized:
            dense += _dense(folder, path)
        elif kind == "Normalize" and modes:
            normalized = True
        elif kind != "Transformer":
            raise CheckpointError(
                f"can't read {folder.root}",
                why=f"its modules.json has a {kind[:60]!a}, and only Transformer, Pooling, Dense and Normalize "
                "are known here, in this order",
                mend="write the encoder as a torch module, and save it with compress.save(module, path, inputs=…)",
            )
    if not modes:
        raise CheckpointError(f"can't read {folder.root}", why="its modules.json has no pooling", mend=WHOLE)
    return Tail(modes, nn.Sequential(*dense), normalized)


def _modes(config: Any, folder: HubFolder) -> tuple[str, ...]:
    config = config if isinstance(config, dict) else {}
    short = {"cls": "cls_token", **{mode.removesuffix("_tokens"): mode for mode in MODES[1:]}}
    named = config.get("pooling_mode")
    if isinstance(named, str):
        named = [named]
    if isinstance(named, list):  # the newer form, whose own order counts
        found = tuple(short.get(str(mode), str(mode)) for mode in named)
    else:
        asked = {
            key.removeprefix("pooling_mode_")
            for key, value in config.items()
            if str(key).startswith("pooling_mode_") and value is True
        }
        found = (*(mode for mode in MODES if mode in asked), *sorted(asked - set(MODES)))
    unknown = [mode for mode in found if mode not in MODES]
    if unknown or not found:
        why = f"it pools by {unknown[0][:60]!a}" if unknown else "it does not say how tokens are pooled"
        raise CheckpointError(
            f"can't read {folder.root}", why=why, mend=f"one of these is known here: {', '.join(MODES)}"
        )
    return found


def _dense(folder: HubFolder, path: str) -> list[nn.Module]:
    place = folder.root / path
    config = json_of(place, "config.json", folder.root)
    activation = _ACTIVATIONS.get(str(config.get("activation_function")) if isinstance(config, dict) else "")
    weights = inside(place, SINGLE, folder.root)
    if activation is None or not has(place, SINGLE):
        raise CheckpointError(
            f"can't read {place}",
            why="its activation is none that is known here" if activation is None else f"there is no {SINGLE} in it",
            mend="download it with its weights, or save the encoder with compress.save(module, path, inputs=…)",
        )
    state = read_safetensors(weights)
    refuse_types(state, (), folder)
    weight, bias = state.get("linear.weight"), state.get("linear.bias")
    if weight is None or weight.ndim != 2:
        raise CheckpointError(f"can't read {weights}", why="it holds no linear.weight", mend=WHOLE)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.load_state_dict({"weight": weight, **({} if bias is None else {"bias": bias})})
    refuse_no_numbers(layer, folder)
    return [layer, activation()]
