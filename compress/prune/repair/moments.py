"""What least squares needs of all rows: their second moments, summed in float64 a block at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["Moments", "Solved", "solved"]

BLOCK = 8_000_000  # numbers that a block of rows may have


class Moments:
    """Sums over rows of columns x [rows, groups, columns] and targets t [rows, groups, outputs].

    Products are of float32, about the means of the first rows, so that a large mean costs nothing; sums are float64.
    """

    def __init__(self) -> None:
        self.rows = 0

    def add(self, columns: torch.Tensor, targets: torch.Tensor) -> None:
        """More rows of both."""
        if not len(columns):
            return
        if not self.rows:
            self._begin(columns, targets)
        step = max(1, BLOCK // max(1, columns[0].numel()))
        for start in range(0, len(columns), step):
            x = (columns[start : start + step].float() - self.at_x).transpose(0, 1)
            t = (targets[start : start + step].float() - self.at_t).transpose(0, 1)
            self.rows += x.shape[1]
            self.x += x.sum(1, dtype=torch.float64)
            self.t += t.sum(1, dtype=torch.float64)
            self.xx += x.transpose(1, 2) @ x
            self.xt += x.transpose(1, 2) @ t
            self.tt += float(t.square().sum(dtype=torch.float64))

    def _begin(self, columns: torch.Tensor, targets: torch.Tensor) -> None:
        _, groups, width = columns.shape
        outputs = targets.shape[-1]
        self.at_x: torch.Tensor = columns.float().mean(0)
        self.at_t: torch.Tensor = targets.float().mean(0)
        self.x, self.t = torch.zeros(groups, width).double(), torch.zeros(groups, outputs).double()
        self.xx = torch.zeros(groups, width, width).double()
        self.xt = torch.zeros(groups, width, outputs).double()
        self.tt = 0.0

    def centred(self, *, intercept: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """x'x and x't, [groups, columns, columns] and [groups, columns, outputs]: about the means, or about zero."""
        mean_x, mean_t = self.x / self.rows, self.t / self.rows
        xx = self.xx - self.rows * mean_x[:, :, None] * mean_x[:, None]
        xt = self.xt - self.rows * mean_x[:, :, None] * mean_t[:, None]
        if not intercept:
            whole_x, whole_t = mean_x + self.at_x, mean_t + self.at_t
            xx += self.rows * whole_x[:, :, None] * whole_x[:, None]
            xt += self.rows * whole_x[:, :, None] * whole_t[:, None]
        return xx, xt

    def means(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of columns [groups, columns] and of targets [groups, outputs]."""
        return self.x / self.rows + self.at_x, self.t / self.rows + self.at_t

    @property
    def finite(self) -> bool:
        """Whether neither a value nor a product of two was NaN, infinite or beyond single precision."""
        return not self.rows or (math.isfinite(self.tt) and all(bool(t.isfinite().all()) for t in (self.xx, self.xt)))

    def spread(self) -> float:
        """Squares of the targets about their means, summed."""
        return float(self.tt - (self.t.square() / self.rows).sum())

    def error(self, weights: torch.Tensor, bias: torch.Tensor) -> float:
        """Squared differences of weights · x + bias to the targets, summed over rows."""
        near = bias - self.at_t + (weights @ self.at_x.double()[:, :, None])[:, :, 0]
        fitted = weights @ self.xx
        total = self.tt - 2 * (weights.transpose(1, 2) * self.xt).sum() - 2 * (near * self.t).sum()
        total = total + (fitted * weights).sum() + 2 * (near * (weights @ self.x[:, :, None])[:, :, 0]).sum()
        return float(total + self.rows * near.square().sum())


@dataclass(frozen=True)
class Solved:
    """Weights [groups, outputs, columns] and what is added to their products [groups, outputs]."""

    weights: torch.Tensor
    bias: torch.Tensor


def solved(moments: Moments, before: torch.Tensor, ridge: float, *, intercept: bool) -> Solved | None:
    """Weights of least squares, held by a ridge to those that there were; None where that is too little to solve it.

    Args:
        moments: of all rows.
        before: weights as they were.
        ridge: share of the mean of the diagonal, of each group; 0 or less is none.
        intercept: whether a number is added to each output.
    """
    xx, xt = moments.centred(intercept=intercept)
    size = xx.diagonal(dim1=1, dim2=2).mean(1)
    alive = size > 0
    size = torch.where(alive, size, torch.ones_like(size))
    held = xx + (ridge * size)[:, None, None] * torch.eye(xx.shape[1]).double()
    factor, failed = torch.linalg.cholesky_ex(held)
    if bool(failed.any()):
        return None
    change = torch.cholesky_solve(xt - xx @ before.transpose(1, 2), factor).transpose(1, 2)
    weights = before + change * alive[:, None, None]
    mean_x, mean_t = moments.means()
    bias = mean_t - (weights @ mean_x[:, :, None])[:, :, 0] if intercept else torch.zeros_like(mean_t)
    return Solved(weights, bias)
