"""FP16 or BF16 for GPU targets: what is not INT8 becomes half precision, but for the layers that would overflow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from compress.backends import OnnxBackend
from compress.dataset import Dataset
from compress.errors import StageError
from compress.metrics import cosine_similarity
from compress.model import Model, OnnxModel, sample_inputs
from compress.stages import Given, Progress
from compress.stages.calibrate import calibrate
from compress.stages.half_graph import ELEMENT, convert, lacking, takes
from compress.stages.quantize_onnx import Target

__all__ = ["HalfOnnx", "float32_islands", "float32_nodes"]

Ranges = Mapping[str, tuple[float, float]]

LARGEST = 65504.0  # of FP16
ROOM = 0.5  # inputs may be larger than any that was calibrated on
SMALLEST = 2.0**-24  # of FP16; below, a weight becomes 0
LOST_WEIGHTS = 0.01
LEAST_SCALE = 2.0**-20  # of 8-bit numbers in FP16; below, it has too few bits left
# Operators that square or exponentiate on their way: what goes in must be far smaller than what comes out may be.
DELICATE = ("Exp", "LayerNormalization", "LpNormalization", "Pow", "ReduceL2", "ReduceSumSquare", "Softplus")
DELICATE_INPUT = 128.0
SAMPLES = 16


@dataclass(frozen=True)
class HalfOnnx:
    """Half precision inside, float32 at the inputs and outputs.

    Attributes:
        precision: "fp16" (11 bits, up to 65,504) or "bf16" (8 bits, the range of float32).
        calibration: typical inputs, to see what overflows; without, random ones are taken, and a warning says so.
        target: what the file is for.
    """

    precision: Literal["fp16", "bf16"] = "fp16"
    calibration: Dataset | None = None
    target: Target = "cuda"

    name: ClassVar[str] = "half_onnx"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        data = None if self.calibration is None else self.calibration.sha256
        return {"precision": self.precision, "calibration": data, "target": self.target}

    def check(self, model: Model) -> None:
        """Any float32 file can be tried."""

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        data = self.calibration or _random(model)
        ranges = calibrate(model.path, data, "minmax", progress)
        graph = onnx.load(model.path)
        fp16 = self.precision == "fp16"
        if self.target == "tensorrt":
            kept = float32_islands(graph, ranges if fp16 else {}, self.precision)
        else:
            kept = float32_nodes(graph, ranges if fp16 else {})
        without = lacking(graph, ELEMENT[self.precision])
        convert(graph, ELEMENT[self.precision], set(kept))
        path = folder / "model.onnx"
        onnx.save(graph, path)
        given = OnnxModel(path, model.signature)
        warnings = []
        if self.calibration is None and self.precision == "fp16":
            warnings.append(
                "What overflows in FP16 was looked for with random inputs: --calibration shows the real ones."
            )
        if without:
            warnings.append(
                f"ONNX defines no {self.precision.upper()} for {', '.join(without)} in this opset: their weights stay "
                "in FP32." + (" --precision fp16 halves them." if self.precision == "bf16" else "")
            )
        parity = self._parity(model, given, data)
        if self.precision == "bf16":
            warnings.append(
                "BF16 was emulated in FP32, as ONNX Runtime has no kernels for it on the CPU: what is said of its "
                "accuracy holds, its speed was not measured."
            )
        halves, floats = _precision(path)
        progress(1, 1, f"{halves} nodes in {self.precision.upper()}, {floats} in FP32")
        return Given(
            given,
            did=f"{halves} nodes in {self.precision.upper()}, {floats} in FP32"
            + (f" ({len(kept)} kept there)" if kept else "")
            + f"; cosine similarity {parity:.6f} to before",
            details={"precision": {self.precision: halves, "fp32": floats}, "kept_float32": kept, "cosine": parity},
            warnings=tuple(warnings),
        )

    def _parity(self, before: OnnxModel, after: OnnxModel, data: Dataset) -> float:
        """The least cosine similarity over samples and outputs."""
        inputs, _ = data.take(slice(0, SAMPLES))
        bf16 = self.precision == "bf16"
        got = OnnxBackend(after, threads=1).infer(inputs)
        expected = OnnxBackend(before, threads=1).infer(inputs)
        for name, values in got.items():
            if not np.isfinite(values.astype(np.float64)).all():
                raise StageError(
                    "half precision gives values that are no numbers",
                    why=f"the output {name!r} is NaN or infinite for a calibration sample",
                    mend="leave it at fp32" if bf16 else "take --precision bf16, or leave it at fp32",
                )
        return min(float(cosine_similarity(expected[name], got[name]).min()) for name in expected)


def _random(model: OnnxModel) -> Dataset:
    return Dataset("random inputs", sample_inputs(model.signature, SAMPLES), None, "")


def float32_nodes(model: onnx.ModelProto, ranges: Ranges) -> dict[str, str]:
    """Nodes that stay in FP32, with the reason.

    Args:
        model: float32, perhaps with Q/DQ nodes.
        ranges: (lowest, highest) of each tensor, against which FP16 is checked; empty for BF16.
    """
    graph = model.graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if ranges}
    dequantized = {output for node in graph.node if node.op_type == "DequantizeLinear" for output in node.output}
    quantized = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
    found: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            found[node.name] = "converts to or from INT8"
        elif set(node.input) & dequantized or set(node.output) & quantized:
            found[node.name] = "runs in INT8"
        elif reason := _overflow(node, ranges, weights):
            found[node.name] = reason
    return found


def float32_islands(
    model: onnx.ModelProto, ranges: Ranges, precision: Literal["fp16", "bf16"] = "fp16"
) -> dict[str, str]:
    """The same for TensorRT, which fuses Q/DQ nodes with the layers beside them only where their types are the same.

    A DequantizeLinear is of the type of the layer that takes it, a QuantizeLinear of what it is given by.
    """
    graph = model.graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if ranges}
    scales = {node.output[0]: weights.get(node.input[1]) for node in graph.node if node.op_type == "DequantizeLinear"}
    found: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        small = [
            values for name in node.input if (values := scales.get(name)) is not None and values.min() < LEAST_SCALE
        ]
        if reason := _overflow(node, ranges, weights):
            found[node.name] = reason
        elif set(node.input) & set(scales) and not takes(model, node, ELEMENT[precision]):
            found[node.name] = f"ONNX defines no {precision.upper()} for {node.op_type} in this opset"
        elif small:
            found[node.name] = f"a scale of {min(values.min() for values in small):.3g} is below what FP16 holds"
    makers = {name: node.name for node in graph.node for name in node.output}
    takers = {name: node.name for node in graph.node for name in node.input}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and takers.get(node.output[0]) in found:
            found[node.name] = "its layer stays in FP32"
        elif node.op_type == "QuantizeLinear" and makers.get(node.input[0], "") in ("", *found):
            found[node.name] = "what it takes stays in FP32"
    return found


def _overflow(node: onnx.NodeProto, ranges: Ranges, weights: Mapping[str, np.ndarray[Any, Any]]) -> str | None:
    for name in (*node.input, *node.output):
        largest = max(map(abs, ranges.get(name, (0.0, 0.0))))
        if largest > LARGEST * ROOM:
            return f"{name} reaches {largest:.3g}"
        if node.op_type in DELICATE and name == node.input[0] and largest > DELICATE_INPUT:
            return f"{node.op_type} of values up to {largest:.3g}"
        values = weights.get(name)
        if values is None or values.dtype != np.float32 or not values.size:
            continue
        size = np.abs(values[values != 0])
        if size.size and float(size.max()) > LARGEST:
            return f"its weight {name} reaches {size.max():.3g}"
        if size.size and float((size < SMALLEST).mean()) > LOST_WEIGHTS:
            return f"{(size < SMALLEST).mean():.0%} of its weight {name} would become 0"
    return None


def _precision(path: Path) -> tuple[int, int]:
    """Nodes that give half precision, and float32, but for the casts between them."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.output)}
    found = Counter(kinds.get(node.output[0]) for node in model.graph.node if node.op_type != "Cast")
    return found[TensorProto.FLOAT16] + found[TensorProto.BFLOAT16], found[TensorProto.FLOAT]
