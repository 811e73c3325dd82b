"""Quantization-aware training: the model is trained as the very file computes that it will be exported to.

Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, CVPR 2018,
section 3. Which tensors are rounded, and over which ranges, is read off the model exported and quantized before the
training (`int8_scheme`); the ranges that the training ends with go with the model to the quantizer.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError, first_line
from compress.model import Model, OnnxModel, Ranges, TorchModel, call
from compress.model.apart import without_fills
from compress.model.frozen import freeze
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import exported
from compress.quantize.calibrate import calibrate
from compress.quantize.precision import LAYERS, precisions
from compress.quantize.qat.scheme import FloatGraph, Scheme
from compress.quantize.qat.simulate import Simulation, simulate
from compress.quantize.quantize_onnx import QuantizeOnnx, Target, quantize
from compress.runtime.backends import OnnxBackend
from compress.stage import Given, Progress
from compress.training.finetune import Finetune, details_of, place_of, told
from compress.training.frozen import frozen_for, refuse_untaught
from compress.training.in_processes import in_processes
from compress.training.machine.setup import distributed, rank

__all__ = ["TrainQuantized"]

CALIBRATED, COMPARED = 256, 32  # samples of the training data
MOST_OFF = 1.0  # levels, root mean square: what several rounded layers may make of one another's last bits
SETTLED = 8  # rounds in which tensors that share a scale are found


@dataclass(frozen=True)
class TrainQuantized:
    """Train with 8-bit weights and activations; what goes on is the float weights, made for them, and the ranges.

    Attributes:
        training: data, teacher, epochs, rate; batch normalization keeps its statistics, and nothing is dropped out.
        target: what the file will be for; see `QuantizeOnnx`.
        quantize: how the export will be quantized; by default, with ranges from the training data.
        unfuse: see `FoldOnnx`.
    """

    training: Finetune
    target: Target = "cpu"
    quantize: QuantizeOnnx | None = None
    unfuse: bool = False

    name: ClassVar[str] = "train_quantized"
    resumes: ClassVar[bool] = True
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def devices(self) -> int:
        """How many processes share the training."""
        return self.training.devices

    @property
    def teacher(self) -> TorchModel | None:
        """The original, whose answers are taught."""
        return self.training.teacher

    @property
    def seen(self) -> tuple[str, ...]:
        """As of the training, and of the quantization."""
        return (*self.training.seen, *(() if self.quantize is None else self.quantize.seen))

    def described(self) -> dict[str, Any]:
        """All but the teacher, as JSON values from which another process makes the stage again (`of`).

        Raises:
            RecipeError: data that another process can't open.
        """
        asked: dict[str, Any] | None = None
        if self.quantize is not None:
            data = self.quantize.calibration
            asked = {field.name: getattr(self.quantize, field.name) for field in dataclasses.fields(self.quantize)}
            asked |= {"calibration": None if data is None else place_of(data), "exclude": list(self.quantize.exclude)}
        return {
            "training": self.training.described(),
            "target": self.target,
            "quantize": asked,
            "unfuse": self.unfuse,
        }

    @classmethod
    def of(cls, described: Mapping[str, Any], model: TorchModel, teacher: TorchModel | None) -> Self:
        """The stage that was described, its data opened for a model."""
        quantize = None
        if (asked := described["quantize"]) is not None:
            data = asked["calibration"]
            opened = {
                "calibration": None if data is None else Dataset.open(data, model.signature),
                "exclude": tuple(asked["exclude"]),
            }
            quantize = QuantizeOnnx(**{**asked, **opened})
        training = Finetune.of(described["training"], model, teacher)
        return cls(**{**described, "training": training, "quantize": quantize})

    @property
    def options(self) -> Mapping[str, Any]:
        asked = {} if self.quantize is None else {"quantize": dict(self.quantize.options)}
        return {**self.training.options, "target": self.target, **asked, **({"unfuse": True} if self.unfuse else {})}

    def check(self, model: Model) -> None:
        if self.training.training.strategy == "fsdp":
            raise RecipeError(
                "can't train in fake INT8 with --strategy fsdp",
                why="the simulation's graph is another than the network's, whose weights it shares",
                mend="leave --strategy out, or quantize after the training: --int8 static",
            )
        self.training.check(model)

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
        if self.training.training.devices > 1 and not distributed():
            return in_processes(self, model, folder, progress)
        refuse_untaught(model.module, "qat")
        network = copy.deepcopy(model.module)
        before = TorchModel(network, model.signature)
        with tempfile.TemporaryDirectory() as work:
            simulation, ranges, left = self._simulation(before, Path(work), progress)
        # The graph is another than the network's: its layers can't be hooked or run in segments.
        alike = {"gradient_checkpointing": False, "compile": "off", "feature_weight": 0.0, "freeze": ()}
        freeze(
            network, frozen_for(network, self.training.training.freeze)
        )  # the simulation's are these, by other names
        asked = dataclasses.replace(self.training.training, **alike)  # type: ignore[arg-type]
        training = dataclasses.replace(self.training, training=asked)
        trained = training.fit(simulation.module, model.signature, progress, folder=folder, exact=True, like=model)
        network.requires_grad_(False).eval()
        given = TorchModel(network, model.signature, ranges={**ranges, **simulation.ranges()})
        off: dict[str, Any] = {}
        if rank() == 0:
            with tempfile.TemporaryDirectory() as work:
                given, off = self._proven(given, simulation, Path(work), progress)
        return Given(
            given,
            did=f"trained in fake INT8 {told(trained, asked)}",
            warnings=(*trained.warnings, *self._notes(simulation, off)),
            details={
                **details_of(trained),
                "layers": simulation.layers,
                "tensors": len(simulation.activations),
                "left_float": left,
                "not_simulated": list(simulation.missing),
                "off_levels": off,
            },
        )

    @property
    def _quantize(self) -> QuantizeOnnx:
        if self.quantize is not None:
            return self.quantize
        data = self.training.data
        some = np.sort(np.random.default_rng(self.training.seed).permutation(len(data))[: data.whole(CALIBRATED)])
        return QuantizeOnnx("static", data.part(some), target=self.target)

    def _simulation(
        self, model: TorchModel, work: Path, progress: Progress
    ) -> tuple[Simulation, Ranges, dict[str, str]]:
        """The network to train, the calibrated ranges of all tensors, and layers that stay in float, with the reason.

        Raises:
            StageError: no layer would be in INT8, or the quantized file does not run.
        """
        asked = self._quantize
        assert asked.calibration is not None  # noqa: S101  a static quantization has data
        program, folded = self._folded(model, work, progress)
        ranges = calibrate(folded.path, asked.calibration, asked.calibrator, progress)
        target = work / "int8.onnx"
        quantize(asked, folded.path, target, ranges)
        floats = FloatGraph(folded.path)
        scheme = Scheme.read(floats, target)
        if not any(plan.operator in LAYERS for plan in scheme.weights):
            raise StageError(
                "nothing to train for INT8",
                why="the model has no convolution and no linear layer that the quantizer takes",
                mend="ask for --int8 static or dynamic",
            )
        two = asked.calibration.first(2)
        try:
            OnnxBackend(OnnxModel(target, model.signature), 1).infer(two)
        except Exception as err:  # ONNX Runtime's own exception classes have no common base but this
            raise StageError(
                "the model can't be quantized statically",
                why=f"ONNX Runtime does not run what its quantizer wrote: {first_line(err.__cause__ or err)[:200]}",
                mend="ask for --int8 dynamic or weights",
            ) from err
        names = tuple(call(model.module, model.signature.inputs, two))
        return simulate(program, model.module, names, floats, scheme), ranges, precisions(target).floats

    def _folded(
        self, model: TorchModel, work: Path, progress: Progress
    ) -> tuple[torch.export.ExportedProgram, OnnxModel]:
        program = exported(model, work / "float.onnx")
        (work / "folded").mkdir()
        fold = FoldOnnx(unfuse=self.unfuse)
        folded = fold.run(OnnxModel(work / "float.onnx", model.signature), work / "folded", progress).model
        assert isinstance(folded, OnnxModel)  # noqa: S101  the stage gives one
        return program, folded

    def _proven(
        self, model: TorchModel, simulation: Simulation, work: Path, progress: Progress
    ) -> tuple[TorchModel, dict[str, Any]]:
        """The model with ranges that give the scales it was trained with, and how far its file is from the simulation.

        A tensor that is not rounded itself may share the scale of one that is, and widen it: it takes its range.
        """
        asked = self._quantize
        _, folded = self._folded(model, work, progress)
        floats, ranges, target = FloatGraph(folded.path), dict(model.ranges), work / "int8.onnx"
        for _ in range(SETTLED):
            quantize(asked, folded.path, target, ranges)
            wide = {
                plan.scale: simulation.activations[plan.name].range()
                for plan in Scheme.read(floats, target).activations
                if plan.name in simulation.activations
                and plan.scale > float(simulation.activations[plan.name].scale().detach()) * (1 + 1e-5)
            }
            apart = [
                (name, range_)
                for name, (low, high) in ranges.items()
                if name not in simulation.activations
                for scale, range_ in wide.items()
                if np.isclose(max(-low, high), scale * 127, rtol=1e-5)
            ]
            if not apart:
                break
            ranges |= dict(apart)
        data = self.training.data
        inputs = data.first(COMPARED)
        got = OnnxBackend(OnnxModel(target, model.signature), 1).infer(inputs)
        with torch.no_grad():
            mine = simulation.module(*(torch.from_numpy(inputs[spec.name]) for spec in model.signature.inputs))
        off = {}
        for spec, tensor in zip(model.signature.outputs, mine.values(), strict=True):
            if not tensor.is_floating_point():
                continue
            want, have = without_fills(tensor.numpy(), got[spec.name])
            fake = simulation.activations.get(spec.name)
            level = float(np.abs(want).max(initial=1e-12)) / 127 if fake is None else float(fake.scale().detach())
            apart_by = np.abs(have - want) / level
            off[spec.name] = {"largest": float(apart_by.max()), "rms": float(np.sqrt(np.square(apart_by).mean()))}
        return dataclasses.replace(model, ranges=ranges), off

    def _notes(self, simulation: Simulation, off: Mapping[str, Mapping[str, float]]) -> list[str]:
        notes = []
        if self.training.training.feature_weight:
            notes.append("the original's features don't count in fake INT8: the graph has no layers to take them from")
        if simulation.missing:
            few = ", ".join(simulation.missing[:3]) + (" …" if len(simulation.missing) > 3 else "")
            notes.append(
                f"trained without the rounding of {counted(len(simulation.missing), 'tensors')} of the export: {few}"
            )
        for name, levels in off.items():
            if levels["rms"] > MOST_OFF:
                notes.append(f"{name}: what is exported is off by {levels['rms']:.1f} levels from what was trained")
        return notes


def shorter(recovery: Finetune, epochs: int, share: float, rate: float) -> Finetune:
    """The same training with a share of so many epochs (at least one), and of its learning rate."""
    training = recovery.training
    asked = dataclasses.replace(
        training, epochs=max(1, round(epochs * share)), learning_rate=training.learning_rate * rate, tune_training=None
    )
    return dataclasses.replace(recovery, training=asked)
