"""One step of a training: answers, loss, gradients, update."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from compress.errors import StageError
from compress.model.in_order import InOrder
from compress.model.inputs import call, run_on
from compress.training.batches.answers import Answers
from compress.training.batches.loader import Batch, tensors_of
from compress.training.frozen import keep_statistics
from compress.training.machine.compiling import Compiling
from compress.training.machine.launch import lost_another
from compress.training.machine.profile import Profile
from compress.training.machine.segments import in_segments
from compress.training.machine.sharded import is_sharded, local, share, shared_optimizer
from compress.training.objective import Features, Objective
from compress.training.task import Task
from compress.training.updates.average import Average
from compress.training.updates.optimizers import optimizer_for

__all__ = ["Stepper", "copied"]

SPREAD = 64  # samples by which the variance of the original's outputs is told


class Stepper:
    """Holds the model in training, the original, and the optimizer.

    Args:
        task: what is trained.
        fabric: launched.
        profile: is told of the parts of a step.
        rate: the peak.
        example: a small batch, by which layers are chosen whose features are taught.
        alone: not shared with the other processes, where there are some.
    """

    def __init__(
        self, task: Task, fabric: Any, profile: Profile, rate: float, example: Batch, *, alone: bool = False
    ) -> None:
        options = task.options
        self._fabric, self._profile, self._accumulate = fabric, profile, options.accumulate
        self._signature, images = task.signature, options.channels_last
        self._sharded = is_sharded(task.module)
        self.module = task.module if self._sharded else _laid_out(task.module.to(fabric.device), images)
        self.teacher: nn.Module | None = None
        if task.teacher is not None:
            own = task.teacher if self._sharded else copy.deepcopy(task.teacher).to(fabric.device)
            self.teacher = (own if self._sharded else _laid_out(own, images)).eval().requires_grad_(False)
        self.features: Features | None = None
        if options.feature_weight and self.teacher is not None:
            layers = self.teacher.original if isinstance(self.teacher, InOrder) else self.teacher
            self.features = Features(self.module, layers, lambda _: self._look(self.teacher, example))
        self.answers: Answers | None = None
        self.objective = Objective(options, task.forms, self._variances(task), self.features, at=task.labelled)
        if self.teacher is None and len(task.signature.outputs) > 1:
            self._leave_alone(example)
        body: Any = in_segments(self.module) if options.gradient_checkpointing else self.module
        shared = fabric.world_size > 1 and not alone
        self._world = fabric.world_size if shared else 1
        asked = "off" if self.features is not None or (shared and options.compile == "auto") else options.compile
        self._compiled = shared and asked == "on"
        if self._compiled:
            asked, body = "off", torch.compile(body)
        self.student: Any = body if alone else fabric.setup_module(body, move_to_device=not self._sharded)
        self.compiling = Compiling(asked, self.student, lambda: fabric.setup_module(torch.compile(body)))
        self.optimizer = optimizer_for(self.module, rate)
        self._wrapped = fabric.setup_optimizers(self.optimizer)
        self.average = Average(self.module, options.ema) if options.ema else None
        self._began = 0.0
        self.train_mode()

    def _variances(self, task: Task) -> list[float]:
        """Of the original's outputs, over samples from all of the data; 1 where there is no original, or no spread."""
        if self.teacher is None:
            return [1.0] * len(task.forms)
        places = task.data.places(SPREAD)
        inputs, _ = tensors_of(task.data, places, 0)
        answers = self.ask_teacher(Batch(inputs, None, torch.from_numpy(places)))
        found = [float(answer.float().var(0, correction=0).mean()) for answer in answers.values()]
        return [variance if variance > 0 else 1.0 for variance in found]

    def train_mode(self) -> None:
        """After a validation, too."""
        self.student.train()
        self.module.train()
        keep_statistics(self.module)

    def gradients(self, batch: Batch, total: int) -> torch.Tensor:
        """Forward and backward.

        Args:
            batch: this process's part.
            total: samples over all processes.

        Returns:
            The mean loss [] over all processes, detached.
        """
        self._began = time.perf_counter()
        try:
            return self._gradients(self.compiling.current, batch, total)
        except Exception as err:
            if not self.compiling.failed(err):
                raise
            self._wrapped.zero_grad()
            return self._gradients(self.compiling.current, batch, total)

    def _gradients(self, student: Any, batch: Batch, total: int) -> torch.Tensor:
        phase, fabric = self._profile.phase, self._fabric
        with phase("copy"):
            batch = batch.to(fabric.device)
        # As many in each process, whose shares may differ by a sample; one alone has two in each part to normalize by.
        parts = batch.parts(min(self._accumulate, max(1, total // max(2, self._world))))
        whole = torch.zeros((), device=fabric.device)
        world = self._world
        for number, part in enumerate(parts):
            taught = None
            if self.teacher is not None:
                with phase("teacher"):
                    taught = self._taught(part)
            with fabric.no_backward_sync(student, enabled=number + 1 < len(parts)) if world > 1 else nullcontext():
                with phase("forward"), fabric.autocast():
                    got = self._outputs(student, part)
                    loss = self.objective.loss(got, taught, part.labels)
                with phase("backward"):
                    fabric.backward(loss * (len(part.places) * world / total))
            whole += loss.detach() * (len(part.places) * world / total)
        if world > 1:
            whole = fabric.all_reduce(whole, reduce_op="mean")
        return whole

    def pulls_nowhere(self) -> bool:
        """Whether the gradient of every weight is exactly 0, or there is none."""
        gradients = local(weight.grad for weight in self.module.parameters() if weight.grad is not None)
        return not self._in_any(any(bool(gradient.any()) for gradient in gradients))

    def _in_any(self, here: bool) -> bool:
        """Whether it is so in any of the processes that have parts of the weights."""
        if not self._sharded:
            return here
        return bool(self._fabric.all_reduce(torch.tensor(float(here), device=self._fabric.device), reduce_op="sum") > 0)

    def _taught(self, batch: Batch) -> dict[str, torch.Tensor]:
        if self.answers is not None:
            return self.answers.of(batch.places, self._fabric.device)
        return self.ask_teacher(batch)

    def ask_teacher(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What the original gives, by output name."""
        with torch.no_grad(), self._fabric.autocast():
            return self._outputs(self.teacher, batch.to(self._fabric.device))

    def _outputs(self, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        try:
            given = run_on(batch.inputs, lambda: call(model, self._signature.inputs, batch.inputs))
            # By the signature's names: one of two models may give a dict, and the other a tuple.
            return {spec.name: value for spec, value in zip(self._signature.outputs, given.values(), strict=True)}
        except StageError as err:
            if err.__cause__ is not None and lost_another(err.__cause__):
                raise err.__cause__ from None  # statistics are shared in the forward pass, too
            raise

    def update(self, rate: float, momentum: float | None, step: int, left: int) -> None:
        """Move the weights.

        Args:
            rate: of this step.
            momentum: of it, where the schedule has one.
            step: counted from 1.
            left: steps ahead.
        """
        with self._profile.phase("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
                if momentum is not None:
                    group["betas"] = (momentum, group["betas"][1])
            self._wrapped.step()
            self._wrapped.zero_grad()
            if self.average is not None:
                self.average.follow(step)
        if not self.compiling.decided:
            if self._fabric.device.type == "cuda":
                torch.cuda.synchronize()
            self.compiling.took(time.perf_counter() - self._began, left)

    def forget_gradients(self) -> None:
        """Those of a step that is not to be taken."""
        self._wrapped.zero_grad()

    def sound(self) -> bool:
        """Whether all weights are numbers."""
        tensors = local(tensor for tensor in self.module.state_dict().values() if tensor.is_floating_point())
        return not self._in_any(any(not bool(torch.isfinite(tensor).all()) for tensor in tensors))

    def state(self) -> dict[str, Any]:
        """A copy of the weights and of what the optimizer keeps; for the kept state."""
        return {
            "module": copied(self.module.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scaler": dict(self._fabric.strategy.precision.state_dict()),
            "average": None if self.average is None else copied(self.average.state),
            "compiled": self.compiling.on if self.compiling.decided else None,
        }

    def parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A whole state, of any number of processes, as this one keeps it."""
        optimizer = shared_optimizer(state["optimizer"], self.optimizer)
        if not self._sharded:
            return {**state, "optimizer": optimizer}
        like = self.module.state_dict()
        average = None if state["average"] is None else share(state["average"], like)
        return {**state, "module": share(state["module"], like), "average": average, "optimizer": optimizer}

    def restore(self, state: Mapping[str, Any]) -> None:
        """From a state of `state`, or one of `parts`."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if state["scaler"]:  # not where another precision went before
            self._fabric.strategy.precision.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.state = copied(state["average"], self._fabric.device)
        if state["compiled"] is not None:
            self.compiling.decide(state["compiled"])

    def figures(self) -> dict[str, Any]:
        """JSON values for the report."""
        found: dict[str, Any] = {"compiled": self.compiling.on or self._compiled}
        if self.answers is not None:
            found["answers_seconds"] = self.answers.seconds
        if self.compiling.note is not None:
            found["compile_note"] = self.compiling.note
        if self.features is not None:
            found["features"] = self.features.names
        return found

    def _leave_alone(self, batch: Batch) -> None:
        """What no label teaches keeps its weights; several processes would wait for its gradients."""
        assert batch.labels is not None  # noqa: S101  checked before the training
        mode = self.module.training
        self.module.eval()
        batch = batch.to(self._fabric.device)
        loss = self.objective.loss(self._outputs(self.module, batch), None, batch.labels)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        torch.autograd.backward(loss)  # what is parted has its gradient at its parts alone
        for parameter in parameters:
            parameter.requires_grad_(parameter.grad is not None)
            parameter.grad = None
        self.module.train(mode)

    def _look(self, model: Any, batch: Batch) -> None:
        mode = model.training
        model.eval()
        with torch.no_grad(), self._fabric.autocast():
            self._outputs(model, batch.to(self._fabric.device))
        model.train(mode)


def copied(state: Mapping[str, torch.Tensor], device: torch.device | None = None) -> dict[str, torch.Tensor]:
    """The same tensors, their own memory; on a device, where one is named."""
    return {name: tensor.detach().clone().to(device or tensor.device) for name, tensor in state.items()}


def _laid_out(module: nn.Module, images: bool) -> nn.Module:
    """Channels-last where there are convolutions over images."""
    convolves = any(isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) for layer in module.modules())
    if images and convolves:
        return module.to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]
    return module
