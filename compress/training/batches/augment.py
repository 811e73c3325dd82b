"""Random changes of a batch of images, so that few images go further."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from compress.artifact import TensorSpec
from compress.data.seeds import seeded
from compress.errors import RecipeError, StageError
from compress.options.user_code import user_code
from compress.storage.hashing import digest_of_code

__all__ = ["Augmentation", "augmentation", "code_of", "refuse_augmentation"]

Tensors = dict[str, torch.Tensor]
Augmentation = Callable[[Tensors, torch.Generator], Tensors]
COLORS = (1, 3, 4)


def augmentation(names: Sequence[str]) -> Augmentation | None:
    """What the names stand for, one after the other; None where there are none.

    Args:
        names: "flip" (each image mirrored or not), "shift:2" (each moved by up to so many pixels, the border zero), or
            `package.module:function`, which is given the tensors by input name and a generator, and gives tensors of
            the same shapes.

    Raises:
        RecipeError: none of these.
    """
    steps = [_step(name) for name in names]
    if not steps:
        return None

    def apply(tensors: Tensors, generator: torch.Generator) -> Tensors:
        for step in steps:
            tensors = step(tensors, generator)
        return tensors

    return apply


def code_of(names: Sequence[str]) -> dict[str, str]:
    """Hashes of the user's functions among the names."""
    return {name: digest_of_code(name) for name in names if _is_users(name)}


def refuse_augmentation(names: Sequence[str], inputs: Sequence[TensorSpec], labels: Any | None) -> None:
    """Look at what is to be changed before the training: flip and shift are for images [n, channels, height, width].

    Args:
        names: see `augmentation`.
        inputs: of the model.
        labels: [n, …], or None.

    Raises:
        RecipeError: there is no image, its channels are last, or the labels belong to places that would move.
    """
    ours = [name for name in names if name.partition(":")[0] in ("flip", "shift")]
    if not ours:
        return
    images = [spec for spec in inputs if len(spec.shape) == 4 and spec.dtype.startswith("float")]
    last = [spec.name for spec in images if spec.shape[3] in COLORS and spec.shape[1] not in COLORS]
    for broken, why in (
        (not images, f"no input is an image: {', '.join(map(str, inputs))}"),
        (bool(last), f"the channels of {', '.join(last)} are last, so that pixels would not move, but colors"),
        (
            labels is not None and labels.ndim >= 3,
            "each sample's labels are a map, and would stay where they are",
        ),
    ):
        if broken:
            raise RecipeError(
                f"can't change the samples by {ours[0]}",
                why=why,
                mend="leave it out of --augment, or give package.module:function that knows the data",
            )


def _step(name: str) -> Augmentation:
    kind, _, argument = name.partition(":")
    if name == "flip":
        return _of_images(_flip)
    if kind == "shift" and argument.isdigit() and int(argument) > 0:
        most = int(argument)
        return _of_images(lambda images, generator: _shift(images, most, generator))
    if _is_users(name):
        return _users(name)
    raise RecipeError(
        f"there is no augmentation {name!r}",
        why="known are flip, shift:PIXELS and package.module:function",
        mend="name one of these, such as --augment flip shift:2",
    )


def _is_users(name: str) -> bool:
    kind, _, argument = name.partition(":")
    return "." in kind or (bool(argument) and not argument.isdigit())


def _of_images(change: Callable[[torch.Tensor, torch.Generator], torch.Tensor]) -> Augmentation:
    def apply(tensors: Tensors, generator: torch.Generator) -> Tensors:
        return {
            name: change(tensor, generator) if tensor.ndim == 4 and tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }

    return apply


def _flip(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(mirrored, images.flip(3), images)


def _shift(images: torch.Tensor, most: int, generator: torch.Generator) -> torch.Tensor:
    count, channels, height, width = images.shape
    down, right = torch.randint(0, 2 * most + 1, (2, count, 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    padded = F.pad(images, (most,) * 4)
    sample, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[None, :, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _users(source: str) -> Augmentation:
    try:
        with user_code(source) as function:
            pass
    except Exception as err:  # the user's module: anything may come out of it
        mend = "name a function (tensors by input name, generator); run from the folder that holds its module"
        why = f"{type(err).__name__}: {err}"
        raise RecipeError(f"can't find the augmentation {source}", why=why, mend=mend) from err

    def apply(tensors: Tensors, generator: torch.Generator) -> Tensors:
        shapes = {key: tensor.shape for key, tensor in tensors.items()}
        try:
            with seeded(generator.initial_seed()):  # it may draw from the global generators
                given = function(tensors, generator)
        except Exception as err:  # the user's function: anything may come out of it
            raise StageError(
                f"the augmentation {source} failed", why=f"{type(err).__name__}: {err}", mend="mend the function"
            ) from err
        if not isinstance(given, dict) or {key: getattr(each, "shape", None) for key, each in given.items()} != shapes:
            raise StageError(
                f"can't use what the augmentation {source} gives",
                why="it is not a dict of tensors of the shapes that it was given",
                mend="give each input back under its name",
            )
        return given

    return apply
