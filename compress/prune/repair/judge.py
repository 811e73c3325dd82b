"""How far a network's outputs are from the original's: over all samples, and for the worst of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from compress.model import TorchModel, call
from compress.model.apart import fills_of
from compress.model.inputs import run_on
from compress.prune.layer_kinds import BATCH_NORM
from compress.prune.repair.samples import Samples

__all__ = ["Apart", "Judge", "statistics_again"]

# A spread of less than this share of an output's size, both squared, is single precision's rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Apart:
    """Squared differences of outputs, by the original's spread over samples: 0 is the same, 1 as bad as its mean.

    A mask's fills are no part of that spread.
    """

    mean: float
    worst: float

    def below(self, other: Apart) -> bool:
        """Whether neither is higher, and the mean is lower."""
        return self.mean < other.mean and self.worst <= other.worst


class Judge:
    """Holds networks against the original.

    Args:
        original: its answers are kept.
        samples: of which those that are held out judge. An output that never varies on these has no spread that a
            distance could be a share of: the others are judged.

    Attributes:
        untold: why nothing can be judged; empty where something can.
    """

    def __init__(self, original: TorchModel, samples: Samples) -> None:
        self._samples, self._signature = samples, original.signature
        self._wanted = self._answers(original.module)
        self._spread: list[float] = []
        self.untold = "" if self._wanted[0] else "the outputs are no numbers, by which a repair could be judged"
        for place in range(len(self._wanted[0])):
            answers = torch.cat([rows[place] for rows in self._wanted])
            if not bool(answers.isfinite().all()):
                self.untold = (
                    "what the original gives for the calibration data is not finite: NaN, infinite or too large"
                )
                return
            told = answers.masked_fill(torch.from_numpy(fills_of(answers.numpy())), 0)
            spread, size = (float(t.square().sum(1).mean()) for t in (told - told.mean(0), told))
            self._spread.append(spread if spread > ROUNDING * size else 0.0)
        if self._wanted[0] and not any(self._spread):
            self.untold = "the outputs never vary on the calibration samples that judge"

    def apart(self, module: nn.Module) -> Apart:
        """A network's distance."""
        each = []
        for batch, have, want in zip(self._samples.judging, self._answers(module), self._wanted, strict=True):
            samples = len(self._samples.batches[batch])
            judged = [each for each in zip(have, want, self._spread, strict=True) if each[2]]
            errors = [(h - w).square().sum(1) / spread for h, w, spread in judged]
            by_sample = [error if len(error) == samples else error.mean().expand(samples) for error in errors]
            each.append(torch.stack(by_sample).mean(0))
        errors_of = torch.nan_to_num(torch.cat(each), nan=torch.inf)
        return Apart(float(errors_of.mean()), float(errors_of.max()))

    @torch.no_grad()
    def _answers(self, module: nn.Module) -> list[list[torch.Tensor]]:
        """By batch and output, float64 [samples, numbers], or other rows where it has none for each; 0 at padding."""
        found, specs = [], self._signature.inputs
        for batch in self._samples.judging:
            given = dict(zip((spec.name for spec in specs), self._samples.tensors(batch), strict=True))
            outputs = run_on(given, partial(call, module, specs, given))
            rows = []
            for place, (name, output) in enumerate(outputs.items()):
                if output.is_floating_point():
                    kept = self._samples.kept_of(batch, name, output)
                    seen = output if kept is None else output.where(kept[(..., *[None] * (output.ndim - kept.ndim))], 0)
                    seen = seen.double().movedim(self._signature.samples_axis(place), 0) if seen.ndim else seen[None]
                    rows.append(seen.flatten(1) if seen.ndim > 1 else seen[:, None])
            found.append(rows)
        return found


@torch.no_grad()
def statistics_again(module: nn.Module, samples: Samples) -> nn.Module | None:
    """A copy whose batch normalizations have all samples' statistics; None where it has none, or one overflows."""
    own = copy.deepcopy(module)
    norms = [layer for layer in own.modules() if isinstance(layer, BATCH_NORM) and layer.track_running_stats]
    if not norms:
        return None
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over batches
        norm.train()
    try:
        for batch in _fitting(samples):
            own(*samples.tensors(batch))
    except ValueError:  # one value for each channel has no spread
        return None
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
        norm.eval()
    return (
        own if all(norm.running_var is not None and bool(norm.running_var.isfinite().all()) for norm in norms) else None
    )


def _fitting(samples: Samples) -> Sequence[int]:
    return [at for at, held in enumerate(samples.held) if not held]
