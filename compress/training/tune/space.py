"""What a search over a training's settings may try, around what was asked for; and what it can't search at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from compress.console.wording import counted
from compress.options.training import TrainingOptions

__all__ = ["LEAST_HELD", "Range", "Settings", "Space", "broken", "flags_of", "mean_share", "space_of"]

WIDE = 10.0  # a rate, or a weight of features, may be so many times larger or smaller
SHORTEST = 4  # epochs may be so many times fewer
SOFTEST = 10.0  # temperature, if no higher one was asked for
LEAST_HELD = 32  # samples: with fewer, one is more than three points
DIGITS = 3

Settings = Mapping[str, float]
"""By the name of an option of the training."""


@dataclass(frozen=True)
class Range:
    """From one number to another, both among them.

    Attributes:
        low, high: the ends.
        whole: of whole numbers, each as likely as another; else equal factors are equally likely.
    """

    low: float
    high: float
    whole: bool = False

    def told(self, value: float) -> float:
        """A number of it, in as many digits as a flag is given with."""
        return int(value) if self.whole else float(f"{value:.{DIGITS}g}")


Space = Mapping[str, Range | tuple[int, ...]]
"""A range, or a choice of numbers, by the name of an option."""


def space_of(options: TrainingOptions, samples: int, *, softens: bool) -> Space:
    """What to try; what was asked for is in it.

    Args:
        options: as asked for.
        samples: to train on.
        softens: whether the temperature counts.
    """
    rate, epochs, size = options.learning_rate, options.epochs, options.batch_size
    space: dict[str, Range | tuple[int, ...]] = {"learning_rate": Range(rate / WIDE, rate * WIDE)}
    if epochs > 1:
        space["epochs"] = Range(math.ceil(epochs / SHORTEST), epochs, whole=True)
    if softens:
        space["temperature"] = Range(min(1.0, options.temperature), max(SOFTEST, options.temperature))
    if options.feature_weight:  # where nobody asked for them, they would cost each step the original's forward
        space["feature_weight"] = Range(options.feature_weight / WIDE, options.feature_weight * WIDE)
    if size != "auto":
        sizes = {size, *(each for each in (max(2, size // 2), 2 * size) if each <= samples)}
        if len(sizes) > 1:
            space["batch_size"] = tuple(sorted(sizes))
    return space


def mean_share(epochs: int) -> float:
    """Epochs of a trial but the first, as a share of those that were asked for; on average, if none is ended early."""
    return (math.ceil(epochs / SHORTEST) + epochs) / (2 * epochs)


def flags_of(settings: Settings) -> str:
    """What asks for these."""
    return " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in settings.items())


def broken(options: TrainingOptions, samples: int, held: int | None, *, alone: bool) -> Iterator[tuple[str, str]]:
    """Why there can be no search, and how to mend it; nothing where none was asked for.

    Args:
        options: of the training.
        samples: there are, those that are held out among them.
        held: samples that judge; None for none.
        alone: whether one process trains.
    """
    if options.tune_training is None:
        return
    if options.tune_training < 1:
        yield f"--tune-training is {options.tune_training}", "give the number of trainings, such as 12"
    if held is None:
        yield "nothing judges them", "add --hold-out 0.1, or --validation data; --eval is for the result"
    elif held < LEAST_HELD:
        few = f"{counted(held, 'samples')} judge them, and {LEAST_HELD} are the least"
        share = math.ceil(100 * LEAST_HELD / samples) / 100
        enough = share < 0.5 and options.hold_out > 0
        yield few, f"hold more out: --hold-out {share:g}" if enough else "give more data, or --validation"
    if not alone:
        yield (
            "several processes share each training",
            "search with one (--devices 1), and give the settings that it finds to several",
        )
