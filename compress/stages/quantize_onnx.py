"""INT8 by ONNX Runtime's quantizer: static with calibration data, or dynamic.

Static: Q/DQ nodes around each operator, weights per channel; Jacob et al., Quantization and Training of Neural
Networks for Efficient Integer-Arithmetic-Only Inference, CVPR 2018, section 2.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
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
from compress.stages.calibrate import calibrate
from compress.stages.fold_onnx import strip
from compress.stages.histogram import Method

__all__ = ["QuantizeOnnx"]


@dataclass(frozen=True)
class QuantizeOnnx:
    """8-bit weights (signed, per channel) and activations (unsigned).

    Attributes:
        mode: "static" (ranges of activations from calibration data) or "dynamic" (from each input, at run time).
        calibration: what a static model's ranges come from.
        calibrator: how a range follows from the data: "minmax", "percentile", "entropy" or "mse".
        reduce_range: 7-bit weights, for x86 CPUs whose 8-bit products saturate at 16 bits (those without VNNI).
    """

    mode: Literal["static", "dynamic"] = "static"
    calibration: Dataset | None = None
    calibrator: Method = "minmax"
    reduce_range: bool = False

    name: ClassVar[str] = "quantize_onnx"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        data = None if self.calibration is None else self.calibration.sha256
        options = {"mode": self.mode, "calibration": data, "reduce_range": self.reduce_range}
        return options | ({"calibrator": self.calibrator} if self.mode == "static" else {})

    def check(self, model: Model) -> None:  # noqa: ARG002
        if self.mode == "static" and self.calibration is None:
            raise RecipeError(
                "can't quantize statically",
                why="the ranges of the activations come from calibration data, and there is none",
                mend="add --calibration calibration.npz (100 typical inputs), or ask for --int8 dynamic",
            )

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        path = folder / "model.onnx"
        logger = logging.getLogger()
        level = logger.level
        logger.setLevel(logging.ERROR)  # it asks for a pre-processing that fold_onnx has done
        try:
            if self.calibration is None or self.mode == "dynamic":
                progress(0, 1, "quantizing the weights")
                quantize_dynamic(
                    str(model.path),
                    str(path),
                    per_channel=True,
                    weight_type=QuantType.QInt8,
                    reduce_range=self.reduce_range,
                )
            else:
                ranges = calibrate(model.path, self.calibration, self.calibrator, progress)
                cache = folder / "ranges.json"
                values = {name: (np.float32(low), np.float32(high)) for name, (low, high) in ranges.items()}
                save_tensors_data(TensorsData(CalibrationMethod.MinMax, values), cache)
                quantize_static(
                    str(model.path),
                    str(path),
                    calibration_cache_path=cache,
                    quant_format=QuantFormat.QDQ,
                    per_channel=True,
                    reduce_range=self.reduce_range,
                    activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QInt8,
                    calibrate_method=CalibrationMethod.MinMax,
                )
        finally:
            logger.setLevel(level)
        strip(path)
        layers = _layers(path)
        if not layers["int8"]:
            raise StageError(
                "nothing was quantized",
                why=f"the model's {layers['float']} layers with weights are of kinds that the quantizer leaves alone",
                mend="leave --int8 out for this model",
            )
        progress(1, 1, f"{layers['int8']} layers in INT8")
        samples = 0 if self.calibration is None else len(self.calibration)
        how = f"{self.calibrator} ranges of {samples} samples" if self.mode == "static" else "ranges at run time"
        return Given(
            OnnxModel(path, model.signature),
            did=f"{layers['int8']} of {layers['int8'] + layers['float']} layers in INT8, per channel; {how}",
            details={
                "layers": layers,
                "calibration_sha256": self.options["calibration"],
                "operators": _operators(path),
            },
        )


def _layers(path: Path) -> dict[str, int]:
    """How many layers with weights run in INT8, and how many don't, read off the file."""
    graph = onnx.load(path).graph
    dequantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    weights = {tensor.name for tensor in graph.initializer} | dequantized
    found = Counter(int8=0, float=0)
    for node in graph.node:
        if node.op_type in ("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"):
            found["int8"] += 1
        elif node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul") and node.input[1] in weights:
            found["int8" if {node.input[0], node.input[1]} <= dequantized else "float"] += 1
    return dict(found)


def _operators(path: Path) -> dict[str, int]:
    return dict(Counter(node.op_type for node in onnx.load(path).graph.node).most_common())
