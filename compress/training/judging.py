"""The metric on validation data while a model trains."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from compress.artifact import Signature
from compress.data.dataset import Dataset
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.metrics import METRICS, Metric
from compress.evaluate.output_kind import OutputForm, OutputKind
from compress.model import Arrays, call
from compress.model.inputs import run_on
from compress.training.batches.loader import tensors_of
from compress.training.losses import distance, fits, labelled
from compress.training.machine.sharded import is_sharded

__all__ = ["Judge"]

BATCH = 256


class Judge:
    """Judges a model on data, the work shared by the processes.

    Args:
        data: apart from what is trained on.
        signature: of the model.
        fabric: whose autocast and processes are used.
        form: what the output is that labels teach.
        taught: whether there is an original to agree with.
        at: the place of that output.
    """

    def __init__(
        self, data: Dataset, signature: Signature, fabric: Any, form: OutputForm, *, taught: bool, at: int = 0
    ) -> None:
        self._data = data
        self._signature = signature
        self._fabric = fabric
        self._name = signature.outputs[at].name
        # Class ids that fit several outputs are judged by the one that they teach.
        classes = form.kind is OutputKind.SOFTMAX and data.labels is not None and len(signature.outputs) > 1
        endings = {self._name: form.ending}
        found = find_metric(None, data, signature, output=self._name if classes else None, endings=endings)
        self.metric: Metric = found if taught or found.needs_labels else METRICS["mse"]
        if form.kind in (OutputKind.SIGMOID, OutputKind.EMBEDDING, OutputKind.DENSE):
            # The largest of several labels says nothing, nor do squares of logits.
            self.metric = _loss(form, self._name)

    def of(self, data: Dataset) -> Judge:
        """The same judge of other data."""
        other = copy.copy(self)
        other._data = data
        return other

    def better(self, value: float, than: float | None) -> bool:
        """Whether a value is a new best."""
        if than is None:
            return not np.isnan(value)
        return value > than if self.metric.higher_is_better else value < than

    @torch.no_grad()
    def __call__(self, model: Any, teacher: Any) -> float:
        """Mean score; the model is in eval mode after it."""
        model.eval()
        total = torch.zeros(2, dtype=torch.float64)
        assert self.metric.per_sample is not None  # noqa: S101  the built-in ones score samples
        starts = range(0, len(self._data), BATCH)
        mine = list(starts[self._fabric.global_rank :: self._fabric.world_size])
        counted = len(mine)
        if is_sharded(model) or (teacher is not None and is_sharded(teacher)):  # all call it as often as the first does
            mine += [0] * (-(-len(starts) // self._fabric.world_size) - counted)
        for number, start in enumerate(mine):
            inputs, labels = tensors_of(self._data, slice(start, start + BATCH), start)
            inputs = {name: tensor.to(self._fabric.device) for name, tensor in inputs.items()}
            got = self._outputs(model, inputs)
            wanted = got
            if not self.metric.needs_labels:
                wanted = self._outputs(teacher, inputs) if teacher is not None else {}
                if teacher is None and labels is not None and self.metric.name == "mse":
                    wanted = {self._name: labels.numpy().reshape(got[self._name].shape)}
            told = None if labels is None else labels.numpy()
            if number >= counted:
                continue
            scores = self.metric.per_sample(self._judged(got), self._judged(wanted), told)
            total += torch.tensor([float(np.sum(scores)), len(scores)], dtype=torch.float64)
        if self._fabric.world_size > 1:
            total = self._fabric.all_reduce(total, reduce_op="sum")
        return float(total[0] / total[1])

    def _judged(self, outputs: Arrays) -> Arrays:
        return self.metric.judged(outputs) if self.metric.output in outputs else outputs

    def _outputs(self, model: Any, inputs: dict[str, torch.Tensor]) -> Arrays:
        with self._fabric.autocast():
            given = run_on(inputs, lambda: call(model, self._signature.inputs, inputs))
        # By the names that a metric knows them by, which a forward that gives a tuple does not.
        outputs = {spec.name: value for spec, value in zip(self._signature.outputs, given.values(), strict=True)}
        return {name: tensor.float().cpu().numpy() for name, tensor in outputs.items() if tensor.is_floating_point()}


def _loss(form: OutputForm, name: str) -> Metric:
    """The mean loss of one output: against labels that fit, else against the original's."""

    def per_sample(got: Arrays, wanted: Arrays, labels: Any) -> np.ndarray[Any, Any]:
        first = torch.from_numpy(got[name])
        targets = None if labels is None else torch.from_numpy(np.asarray(labels))
        if targets is not None and fits(form, first, targets):
            loss = labelled(form, first, targets, 0.0)
        else:
            loss = distance(form, first, torch.from_numpy(wanted[name]), 1.0, 1.0)
        return np.full(len(first), float(loss))

    return Metric("loss", per_sample, higher_is_better=False, scale=1.0)
