"""INT8: static with calibration data, dynamic, or of the weights alone; types as the target's kernels want them.

Static: Q/DQ nodes around each operator, weights per channel; Jacob et al., Quantization and Training of Neural
Networks for Efficient Integer-Arithmetic-Only Inference, CVPR 2018, section 2. The ranges are `calibrate`'s; the graph
is ONNX Runtime's quantizer's for the CPU, and `place_qdq`'s for TensorRT.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import onnx
from onnxruntime.quantization import (
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
    save_tensors_data,
)
from onnxruntime.quantization.calibrate import TensorsData

from compress.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.model import Model, OnnxModel
from compress.stages import Given, Progress
from compress.stages.calibrate import calibrate, trained_ranges
from compress.stages.fold_onnx import strip
from compress.stages.histogram import Method
from compress.stages.place_qdq import place
from compress.stages.precision import operators, precisions
from compress.stages.weights_onnx import quantize_weights

__all__ = ["QuantizeOnnx", "Ranges", "Target", "quantize"]

Ranges = Mapping[str, tuple[float, float]]
Target = Literal["cpu", "tensorrt", "cuda"]

DYNAMIC = ("MatMul", "Gemm", "Gather", "Conv")
# In a graph with attention, static INT8 is for layers with weights alone: a mask of -10,000 that is added to the scores
# would leave them one step of 8 bits.
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True)
class QuantizeOnnx:
    """8-bit weights, signed and per channel; activations as the mode and the target have it.

    Attributes:
        mode: "static" (ranges of activations from calibration data), "dynamic" (from each input, at run time) or
            "weights" (activations stay float).
        calibration: what a static model's ranges come from.
        calibrator: how a range follows from the data: "minmax", "percentile", "entropy" or "mse".
        reduce_range: 7-bit weights, for x86 CPUs whose 8-bit products saturate at 16 bits (those without VNNI).
        target: "cpu" takes unsigned activations with a zero-point, which x86 multiplies fastest; "tensorrt" and "cuda"
            take signed ones, all zero-points 0, bias in float, and Q/DQ nodes where TensorRT fuses them.
        exclude: names of nodes that stay in float.
    """

    mode: Literal["static", "dynamic", "weights"] = "static"
    calibration: Dataset | None = None
    calibrator: Method = "minmax"
    reduce_range: bool = False
    target: Target = "cpu"
    exclude: tuple[str, ...] = ()

    name: ClassVar[str] = "quantize_onnx"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        data = None if self.calibration is None else self.calibration.sha256
        options: dict[str, Any] = {
            "mode": self.mode,
            "calibration": data,
            "reduce_range": self.reduce_range,
            "target": self.target,
        }
        options |= {"exclude": list(self.exclude)} if self.exclude else {}
        return options | ({"calibrator": self.calibrator} if self.mode == "static" else {})

    def check(self, model: Model) -> None:  # noqa: ARG002
        if self.mode == "static" and self.calibration is None:
            raise RecipeError(
                "can't quantize statically",
                why="the ranges of the activations come from calibration data, and there is none",
                mend="add --calibration calibration.npz (100 typical inputs), or ask for --int8 dynamic",
            )
        if self.mode == "dynamic" and self.target != "cpu":
            raise RecipeError(
                f"can't quantize dynamically for {self.target}",
                why="only ONNX Runtime on the CPU runs dynamic INT8",
                mend="ask for --int8 static with --calibration, or leave --target out",
            )

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        path = folder / "model.onnx"
        ranges = None
        if self.mode == "static" and self.calibration is not None:
            trained = trained_ranges(model)
            ranges = trained or calibrate(model.path, self.calibration, self.calibrator, progress)
        else:
            progress(0, 1, "quantizing the weights")
        quantize(self, model.path, path, ranges)
        return self.given(model, path, progress)

    def given(self, model: OnnxModel, path: Path, progress: Progress, exclude: Collection[str] = ()) -> Given:
        """Read the finished file back, and say what is in it."""
        layers = precisions(path, weights_only=self.mode == "weights", excluded={*self.exclude, *exclude})
        if not layers.int8:
            raise StageError(
                "nothing was quantized",
                why=f"its {len(layers.floats)} layers with weights are of kinds that the quantizer leaves alone",
                mend="leave --int8 out for this model",
            )
        progress(1, 1, f"{layers.int8} layers in INT8")
        samples = 0 if self.calibration is None else len(self.calibration)
        trained = self.mode == "static" and trained_ranges(model) is not None
        lost = "the exported graph is not the one that was trained: its ranges are calibrated anew"
        how = {
            "static": "per channel; the ranges of the training"
            if trained
            else f"per channel; {self.calibrator} ranges of {samples} samples",
            "dynamic": "per channel; ranges at run time",
            "weights": "weights alone, per channel",
        }[self.mode]
        return Given(
            OnnxModel(path, model.signature),
            did=f"{layers.int8} of {layers.int8 + len(layers.floats)} layers in INT8, {how}, for {self.target}",
            details={
                "layers": {"int8": layers.int8, "float": len(layers.floats)},
                "layers_float": layers.floats,
                "calibration_sha256": self.options["calibration"],
                "operators": operators(path),
            },
            warnings=(lost,) if self.mode == "static" and model.ranges and not trained else (),
        )


def quantize(
    options: QuantizeOnnx, source: Path, target: Path, ranges: Ranges | None, exclude: Collection[str] = ()
) -> None:
    """Write the quantized file.

    Args:
        options: what to do.
        source: float32, folded, its shapes inferred.
        target: is written, its documentation and unused imports stripped.
        ranges: (lowest, highest) of each activation, for a static model.
        exclude: further nodes that stay in float.
    """
    left = [*options.exclude, *exclude]
    with _quiet():
        if options.mode == "weights":
            quantize_weights(source, target, left)
        elif ranges is None:
            quantize_dynamic(
                str(source), str(target), per_channel=True, weight_type=QuantType.QInt8, op_types_to_quantize=DYNAMIC,
                reduce_range=options.reduce_range, nodes_to_exclude=left,
            )  # fmt: skip
        elif options.target == "cpu":
            cache = target.with_name("ranges.json")
            values = {name: (np.float32(low), np.float32(high)) for name, (low, high) in ranges.items()}
            save_tensors_data(TensorsData(CalibrationMethod.MinMax, values), cache)
            kinds, weightless = attention(source)
            quantize_static(
                str(source),
                str(target),
                calibration_cache_path=cache,
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                reduce_range=options.reduce_range,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
                op_types_to_quantize=kinds,
                nodes_to_exclude=[*left, *weightless],
            )
        else:
            model = onnx.load(source)
            place(model, ranges, left)
            onnx.save(model, target)
    strip(target)


def attention(path: Path) -> tuple[Sequence[str] | None, list[str]]:
    """For a graph with a Softmax inside: what kinds of nodes to quantize, and the products of two activations in it."""
    graph = onnx.load(path).graph
    outputs = {output.name for output in graph.output}
    if not any(node.op_type == "Softmax" and node.output[0] not in outputs for node in graph.node):
        return None, []
    weights = {tensor.name for tensor in graph.initializer}
    return WEIGHTED, [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] not in weights]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ONNX Runtime's quantizer asks for a pre-processing that fold_onnx has done."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
