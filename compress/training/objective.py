"""What is minimized: the distance to the original's answers, to its features, and to the labels.

Answers and labels: see `losses`. Features have other channels in a
pruned network, so what is compared does not depend on them: where in an image the activations are (Zagoruyko &
Komodakis, Paying More Attention to Attention, ICLR 2017, section 3.1), and elsewhere which samples of a batch are like
each other (Tung & Mori, Similarity-Preserving Knowledge Distillation, ICCV 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from compress.errors import StageError
from compress.evaluate.output_kind import OutputForm
from compress.options.training import TrainingOptions
from compress.training.losses import distance, fits, labelled

__all__ = ["Features", "Objective"]

MOST_FEATURES = 4
Outputs = Mapping[str, torch.Tensor]


class Features:
    """Keeps what some layers of two models give, those that have the same names in both.

    Args:
        student: is trained.
        teacher: the original.
        trial: runs a model on a batch, to see what its layers give.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, trial: Callable[[nn.Module], object]) -> None:
        self.names = _chosen(student, teacher, trial)
        self._of_student: dict[str, torch.Tensor] = {}
        self._of_teacher: dict[str, torch.Tensor] = {}
        self._handles = [
            model.get_submodule(name).register_forward_hook(_keeper(kept, name))
            for model, kept in ((student, self._of_student), (teacher, self._of_teacher))
            for name in self.names
        ]

    def loss(self) -> torch.Tensor:
        """Mean over the layers."""
        pairs = [(self._of_student[name].float(), self._of_teacher[name].float()) for name in self.names]
        return torch.stack([_unlike(mine, taught) for mine, taught in pairs]).mean()

    def close(self) -> None:
        """Leave the models as they were."""
        for handle in self._handles:
            handle.remove()


def _keeper(kept: dict[str, torch.Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def keep(_module: nn.Module, _given: Any, result: Any) -> None:
        kept[name] = result

    return keep


def _chosen(student: nn.Module, teacher: nn.Module, trial: Callable[[nn.Module], object]) -> list[str]:
    """The last layer of each resolution; of networks without images, up to four layers spread over their depth."""
    there = {name for name, layer in student.named_modules() if not list(layer.children())}
    seen: dict[str, torch.Size] = {}
    handles = []
    for name, layer in teacher.named_modules():
        if name and name in there and not list(layer.children()):

            def look(_module: nn.Module, _given: Any, result: Any, name: str = name) -> None:
                if isinstance(result, torch.Tensor) and result.is_floating_point() and result.ndim >= 2:
                    seen[name] = result.shape

            handles.append(layer.register_forward_hook(look))
    try:
        trial(teacher)
    finally:
        for handle in handles:
            handle.remove()
    images = {shape[2:]: name for name, shape in seen.items() if len(shape) == 4 and shape[2] * shape[3] > 1}
    if images:
        return list(images.values())
    inner = list(seen)[:-1]  # the last is the answer itself
    if not inner:
        raise StageError(
            "can't teach features",
            why="no layer inside the model and the original has the same name in both",
            mend="leave --feature-weight out",
        )
    return [inner[round(at)] for at in torch.linspace(0, len(inner) - 1, min(MOST_FEATURES, len(inner))).tolist()]


def _unlike(mine: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    if mine.ndim == 4 and mine.shape[2:] == taught.shape[2:]:
        maps = (F.normalize(features.square().mean(1).flatten(1), dim=1) for features in (mine, taught))
        a, b = maps
        return (a - b).square().sum(1).mean()
    with torch.autocast(mine.device.type, enabled=False):  # sums of squares are too large for float16
        a, b = (features.flatten(1) @ features.flatten(1).T for features in (mine, taught))
    return (F.normalize(a, dim=1) - F.normalize(b, dim=1)).square().sum(1).mean()


class Objective:
    """The loss of a batch.

    Args:
        options: its weights.
        forms: of the outputs, by their order.
        variances: of the original's outputs, by their order; squares are measured by them.
        features: of both models, where they count.
        at: the place of the output that labels teach.
    """

    def __init__(
        self,
        options: TrainingOptions,
        forms: Sequence[OutputForm],
        variances: Sequence[float] = (),
        features: Features | None = None,
        *,
        at: int = 0,
    ) -> None:
        self._options = options
        self._at = at
        self._forms = forms
        self._variances = variances or [1.0] * len(forms)
        self._features = features

    def loss(self, got: Outputs, taught: Outputs | None, labels: torch.Tensor | None) -> torch.Tensor:
        """The mean loss [] over the samples of a batch.

        Args:
            got: by the model in training.
            taught: by the original; None without one.
            labels: [n, …], or None.
        """
        if taught is None:
            assert labels is not None  # noqa: S101  checked before the training
            return self._labelled(got, labels, 1.0)
        loss = self._distilled(got, taught)
        if labels is not None and fits(self._forms[self._at], list(got.values())[self._at], labels):
            weight = self._options.distillation
            loss = weight * loss + (1 - weight) * self._labelled(got, labels, self._variances[self._at])
        if self._features is not None:
            loss = loss + self._options.feature_weight * self._features.loss()
        return loss

    def _labelled(self, got: Outputs, labels: torch.Tensor, variance: float) -> torch.Tensor:
        taught = list(got.values())[self._at]
        return labelled(self._forms[self._at], taught, labels, self._options.label_smoothing, variance)

    def _distilled(self, got: Outputs, taught: Outputs) -> torch.Tensor:
        parts = [
            distance(form, got[name], taught[name], self._options.temperature, variance)
            for name, form, variance in zip(got, self._forms, self._variances, strict=True)
            if got[name].is_floating_point()
        ]
        return torch.stack(parts).sum()
