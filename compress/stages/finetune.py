"""A short training that recovers what pruning lost, taught by the original model.

Distillation: Hinton et al., Distilling the Knowledge in a Neural Network, 2015, section 2.
Schedule: linear warm-up, then cosine (Loshchilov & Hutter, SGDR, 2017, section 3).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from compress.artifact import Signature
from compress.dataset import Dataset
from compress.errors import MissingExtraError, RecipeError, StageError
from compress.machine import fast_bfloat16
from compress.measure import cores
from compress.model import Model, TorchModel, call
from compress.stages import Given, Progress

__all__ = ["Finetune"]


@dataclass(frozen=True)
class Finetune:
    """Train the model for some epochs on the answers of a teacher, and on labels where there are some.

    Attributes:
        data: inputs, and labels [n] if it has them.
        teacher: the original model.
        epochs: passes over the data.
        learning_rate: the peak, after the warm-up.
        batch_size: samples a step.
        distillation: weight of the teacher's answers in the loss, 0 to 1; the rest is the labels'.
        temperature: softens the teacher's answers.
        seed: of the order of samples.
    """

    data: Dataset
    teacher: TorchModel
    epochs: int = 20
    learning_rate: float = 2e-3
    batch_size: int = 64
    distillation: float = 0.9
    temperature: float = 4.0
    seed: int = 0

    name: ClassVar[str] = "finetune"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {
            "data": self.data.sha256,
            "epochs": self.epochs,
            "learning_rate": self.learning_rate,
            "batch_size": self.batch_size,
            "distillation": self.distillation,
            "temperature": self.temperature,
            "seed": self.seed,
        }

    def check(self, model: Model) -> None:
        if self.epochs < 1 or self.batch_size < 2 or not self.learning_rate > 0 or not 0 <= self.distillation <= 1:
            raise RecipeError(
                "can't finetune with these options",
                why=f"epochs={self.epochs}, batch size={self.batch_size}, learning rate={self.learning_rate}, "
                f"distillation={self.distillation}",
                mend="epochs are at least 1, a batch at least 2, the rate above 0, distillation between 0 and 1",
            )
        if isinstance(model, TorchModel) and not model.layered:
            why = "TorchScript and exported programs have no layers any more"
            raise RecipeError("can't finetune this file", why=why, mend="give the model from before, or leave it out")
        _fabric()

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:  # noqa: ARG002
        module = copy.deepcopy(model.module)
        first, last, steps = self.fit(module, model.signature, progress)
        return Given(
            TorchModel(module, model.signature),
            did=f"trained {self.epochs} epochs on {len(self.data)} samples, loss {first:.4f} to {last:.4f}",
            details={"loss_first_epoch": first, "loss_last_epoch": last, "steps": steps, "samples": len(self.data)},
        )

    def fit(
        self,
        module: nn.Module,
        signature: Signature,
        progress: Progress,
        *,
        freeze_statistics: bool = False,
        exact: bool = False,
    ) -> tuple[float, float, int]:
        """Train a module in place, and leave it in eval mode without gradients.

        Convolutions run channels-last, and, on a CPU that multiplies bfloat16 in hardware, in mixed precision.

        Args:
            module: is trained.
            signature: of it.
            progress: is told of steps.
            freeze_statistics: batch normalization keeps what it has seen before.
            exact: all in float32.

        Returns:
            Mean loss of the first epoch, of the last one, and the number of steps.

        Raises:
            StageError: the loss became infinite or NaN.
        """
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        torch.set_num_threads(cores())
        precision = "bf16-mixed" if fast_bfloat16() and not exact else "32-true"
        fabric = _fabric()(accelerator="cpu", devices=1, precision=precision)
        teacher = fabric.setup_module(_laid_out(copy.deepcopy(self.teacher.module)))
        optimizer: Any = torch.optim.AdamW(module.parameters(), lr=self.learning_rate, weight_decay=0.01)
        student, optimizer = fabric.setup(_laid_out(module), optimizer)
        steps = self.epochs * math.ceil(len(self.data) / self.batch_size)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warmup_cosine(step, steps))
        order = np.random.default_rng(self.seed)
        first, last, done = math.nan, math.nan, 0
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            student.train()
            if freeze_statistics:
                for layer in module.modules():
                    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                        layer.eval()
            for epoch in range(self.epochs):
                losses = []
                for index in np.array_split(order.permutation(len(self.data)), steps // self.epochs):
                    if len(index) < 2:  # batch normalization needs two
                        continue
                    loss = self._loss(student, teacher, signature, index)
                    if not torch.isfinite(loss):
                        raise StageError(
                            "the training has diverged",
                            why=f"the loss became {loss.item()} in epoch {epoch + 1} of {self.epochs}",
                            mend=f"try a lower rate: --learning-rate {self.learning_rate / 10:g}",
                        )
                    optimizer.zero_grad()
                    fabric.backward(loss)
                    optimizer.step()
                    schedule.step()
                    losses.append(loss.item())
                    done += 1
                    progress(done, steps, f"epoch {epoch + 1}/{self.epochs}, loss {losses[-1]:.4f}")
                last = float(np.mean(losses))
                first = last if epoch == 0 else first
        module.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
        for parameter in module.parameters():
            parameter.grad = None
        return first, last, steps

    def _loss(self, student: Any, teacher: Any, signature: Signature, index: np.ndarray[Any, Any]) -> torch.Tensor:
        arrays, labels = self.data.take(index)
        inputs = {name: _channels_last(torch.from_numpy(array)) for name, array in arrays.items()}
        got = call(student, signature.inputs, inputs)
        with torch.no_grad():
            taught = call(teacher, signature.inputs, inputs)
        logits, target = next(iter(got.values())).float(), next(iter(taught.values())).float()
        if logits.ndim != 2 or logits.shape[1] < 2:
            floats = [name for name, tensor in got.items() if tensor.is_floating_point()]
            return torch.stack([F.mse_loss(got[name].float(), taught[name].float()) for name in floats]).mean()
        t = self.temperature
        loss = F.kl_div(
            F.log_softmax(logits / t, 1), F.log_softmax(target / t, 1), reduction="batchmean", log_target=True
        )
        loss = loss * t * t
        if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu":
            return loss
        hard = F.cross_entropy(logits, torch.from_numpy(labels).long())
        return self.distillation * loss + (1 - self.distillation) * hard


def _laid_out(module: nn.Module) -> nn.Module:
    """Channels-last where there are convolutions over images: twice as fast on a CPU."""
    if any(isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) for layer in module.modules()):
        return module.to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]
    return module


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _warmup_cosine(step: int, steps: int) -> float:
    """Factor on the peak rate: linear over the first tenth, then half a cosine down to 0."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _fabric() -> Any:
    try:
        from lightning_fabric import Fabric
    except ImportError as err:
        raise MissingExtraError("can't finetune", module="lightning-fabric", extra="finetune") from err
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it tells of its precision
    return Fabric
