"""What a training leaves as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import fx, nn

from compress.console.wording import counted
from compress.errors import RecipeError, StageError
from compress.formats.native.onnx_part import OnnxPart
from compress.formats.onnx_layers.parts import trained
from compress.model.frozen import frozen_names, matching

__all__ = ["ALL_TRAINED", "Use", "frozen_for", "keep_statistics", "note_of", "refuse_untaught"]

ALL_TRAINED = "none"
WHAT = "can't train with --freeze"
Use = Literal["train", "taylor", "qat"]
UNTAUGHT: dict[Use, tuple[str, str]] = {
    "train": ("can't train this model", "leave --finetune out: the repair needs no gradients"),
    "taylor": ("can't rank channels by taylor", "take --importance magnitude or obs"),
    "qat": ("can't train this model in fake INT8", "quantize after the training: --int8 static"),
}


def frozen_for(module: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """The names of the parameters that keep their values.

    Args:
        module: is trained.
        patterns: of names that are frozen besides those whose `requires_grad` is False; ("none",) trains all.

    Raises:
        RecipeError: a pattern that fits no name; nothing is left to train.
        StageError: no gradient reaches any.
    """
    refuse_untaught(module)
    if tuple(patterns) == (ALL_TRAINED,):
        return frozenset()
    names = [name for name, parameter in module.named_parameters() if parameter.is_floating_point()]
    found, lost = matching(names, patterns)
    if lost:
        shown = ", ".join(names[:3])
        raise RecipeError(
            WHAT,
            why=f"no parameter's name fits {', '.join(lost)}",
            mend=f"patterns are of whole names, such as 'backbone.*'; here they are {shown}, …; `none` trains all",
        )
    found |= frozen_names(module)
    if found and len(found) == len(names):
        raise RecipeError(
            WHAT, why=f"all of its {counted(len(names), 'parameters')} are frozen", mend="leave something to train"
        )
    return found


def refuse_untaught(module: nn.Module, use: Use = "train") -> None:
    """Refuse a network of which gradients reach too little, since what stays in ONNX has none.

    Args:
        module: of layers.
        use: a training needs some parameters to have a gradient, the importance of channels all of them, and fake INT8
            a graph that torch computes alone.

    Raises:
        StageError: they don't.
    """
    parts = [layer.told for layer in module.modules() if isinstance(layer, OnnxPart)]
    if not parts or not isinstance(module, fx.GraphModule):
        return
    reached, names = trained(module), {name for name, each in module.named_parameters() if each.is_floating_point()}
    if (use == "train" and reached) or (use == "taylor" and reached >= names):
        return
    what, mend = UNTAUGHT[use]
    lost = f"of its {counted(len(names), 'parameters')}, {len(names - reached)} get none"
    if use == "qat":
        lost = "nor does torch compute it"
    some = ", ".join(parts[:3])
    raise StageError(what, why=f"no gradient goes through what stays as it is in ONNX, {some}; {lost}", mend=mend)


def note_of(module: nn.Module, patterns: Sequence[str]) -> str | None:
    """A sentence where parameters are frozen that nobody named."""
    found = frozen_for(module, patterns) - matching(dict(module.named_parameters()), patterns)[0]
    if not found:
        return None
    return (
        f"{counted(len(found), 'parameters')} with requires_grad=False keep their values ({min(found)}, …): "
        f"--freeze {ALL_TRAINED} trains all"
    )


def keep_statistics(module: nn.Module) -> None:
    """Layers whose every parameter is frozen work as in evaluation: a normalization's statistics are weights, too."""
    for layer in module.modules():
        own = list(layer.parameters(recurse=False))
        if own and not any(parameter.requires_grad for parameter in own):
            layer.training = False
