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

from compress.console.wording import Note, counted
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.evaluate.metrics import cosine_similarity
from compress.formats.onnx.scope import sort
from compress.model import Arrays, Model, OnnxModel, sample_inputs
from compress.onnx_export.file import save
from compress.onnx_export.tied import share
from compress.quantize.calibrate import calibrate
from compress.quantize.half.graph import ELEMENT, LARGEST, convert, halved, lacking, takes
from compress.quantize.half.index_arithmetic import index_arithmetic
from compress.quantize.half.mask_chain import hiding, mask_chain
from compress.quantize.half.parity import LEVELS, TOLERANCE, Parity, error_of, repaired
from compress.quantize.int8_onnx import plain
from compress.quantize.place_qdq import MOVING
from compress.quantize.quantize_onnx import Target
from compress.runtime.backends import OnnxBackend
from compress.stage import Given, Progress

__all__ = ["HalfOnnx", "float32_islands", "float32_nodes"]

Ranges = Mapping[str, tuple[float, float]]

ROOM = 0.5  # inputs may be larger than any that was calibrated on
SMALLEST = 2.0**-24  # of FP16; below, a weight becomes 0
LOST_WEIGHTS = 0.01
LEAST_SCALE = 2.0**-20  # of 8-bit numbers in FP16; below, it has too few bits left
# Operators that square or exponentiate on their way: what goes in must be far smaller than what comes out may be.
DELICATE = ("Exp", "LayerNormalization", "LpNormalization", "Pow", "ReduceL2", "ReduceSumSquare", "Softplus")
DELICATE_INPUT = 128.0
# ONNX Runtime 1.31 fuses these with Q/DQ nodes around them whatever the type of their scales, and then refuses all but
# float32. 8 bits go in and 8 bits come out: TensorRT computes in no float type between.
FLOAT32_SCALES = ("Concat",)
SAMPLES = 16
WHOLE = {"fp16": 2048, "bf16": 256}  # up to which each whole number is exact


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
        data = _random(model) if self.calibration is None else self.calibration
        ranges = calibrate(model.path, data, "minmax", progress, masks=True)
        graph = plain(model.path)
        if self.target == "tensorrt":
            _round_scales(graph, ELEMENT[self.precision])
        kept = self._kept(graph, ranges)
        path = folder / "model.onnx"
        given = OnnxModel(path, model.signature)
        without = lacking(graph, ELEMENT[self.precision])
        parity, cosine = self._convert(model, given, graph, kept, data)
        kept |= parity.kept
        warnings: list[str] = []
        if self.calibration is None and self.precision == "fp16":
            warnings.append(
                "What overflows in FP16 was looked for with random inputs: --calibration shows the real ones."
            )
        if without:
            warnings.append(
                f"ONNX defines no {self.precision.upper()} for {', '.join(without)} in this opset: their weights stay "
                "in FP32." + (" --precision fp16 halves them." if self.precision == "bf16" else "")
            )
        if parity.error > self._tolerance(graph):
            warnings.append(
                f"{self.precision.upper()} changes an output by {parity.error:.1%} of its scale, more than "
                f"{self._tolerance(graph):.0%}, and no single layer is the cause: look at the accuracy."
            )
        if self.precision == "bf16":
            warnings.append(
                Note(
                    "ONNX Runtime has no kernels for BF16 on a CPU, and can't open the file there: this stage compared "
                    "it with BF16 emulated in FP32, in which its accuracy holds."
                )
            )
        halves, floats = _precision(path)
        progress(1, 1, f"{counted(halves, 'nodes')} in {self.precision.upper()}, {floats} in FP32")
        return Given(
            given,
            did=f"{counted(halves, 'nodes')} in {self.precision.upper()}, {floats} in FP32"
            + (f" ({len(kept)} kept there)" if kept else "")
            + f"; cosine similarity {cosine:.6f} to before, off by at most {parity.error:.2g} of an output's scale",
            details={
                "precision": {self.precision: halves, "fp32": floats},
                "kept_float32": kept,
                "cosine": cosine,
                "error": parity.error,
            },
            warnings=tuple(warnings),
        )

    def _kept(self, graph: onnx.ModelProto, ranges: Ranges, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Nodes that stay in float32, with the reason."""
        fp16 = self.precision == "fp16"
        positions = index_arithmetic(graph, WHOLE[self.precision]).nodes
        reason = f"reckons with positions, which {self.precision.upper()} rounds beyond {WHOLE[self.precision]:,}"
        hides = f"tells what a mask hides by a number that {self.precision.upper()} has not"
        more = dict.fromkeys(sorted(positions), reason) | dict(more or {})
        more |= dict.fromkeys(sorted(hiding(graph.graph).nodes), hides)
        if self.target == "tensorrt":
            return float32_islands(graph, ranges if fp16 else {}, self.precision, more)
        return float32_nodes(graph, ranges if fp16 else {}, more)

    def _convert(
        self,
        before: OnnxModel,
        after: OnnxModel,
        graph: onnx.ModelProto,
        kept: Mapping[str, str],
        data: Dataset,
    ) -> tuple[Parity, float]:
        """Write the file; how far its outputs are from float32's, and their least cosine similarity."""
        inputs = data.first(SAMPLES)
        expected = OnnxBackend(before, threads=1).infer(inputs)
        # What a mask of -1e9 hides whole is a number still, as in float32.
        large = index_arithmetic(graph, WHOLE[self.precision]).large | mask_chain(graph.graph).holding
        large |= hiding(graph.graph).masks
        got: Arrays = {}

        def measure(more: Mapping[str, str]) -> float:
            model = onnx.ModelProto()
            model.CopyFrom(graph)
            convert(model, ELEMENT[self.precision], {*kept, *more, *self._also(graph, more)}, large)
            share(model, integers=self.target != "tensorrt")
            sort(model.graph)
            save(model, after.path)
            got.update(OnnxBackend(after, threads=1).infer(inputs))
            return error_of(expected, got)

        free = [node.name for node in graph.graph.node if node.name not in kept]
        parity = repaired(free, measure, self._tolerance(graph), self.precision.upper())
        if not np.isfinite(parity.error):
            bad = next(name for name in expected if not np.isfinite(error_of({name: expected[name]}, got)))
            raise StageError(
                "half precision gives values that are no numbers",
                why=f"the output {bad!r} is NaN or infinite for a calibration sample",
                mend="leave it at fp32" if self.precision == "bf16" else "take --precision bf16, or leave it at fp32",
            )
        return parity, min(float(cosine_similarity(expected[name], got[name]).min()) for name in expected)

    def _tolerance(self, graph: onnx.ModelProto) -> float:
        eight = any(node.op_type == "QuantizeLinear" for node in graph.graph.node)
        return max(TOLERANCE[self.precision], LEVELS if eight else 0.0)

    def _also(self, graph: onnx.ModelProto, more: Mapping[str, str]) -> Mapping[str, str]:
        """What goes with further nodes that stay in float32: for TensorRT, the Q/DQ nodes beside them."""
        return self._kept(graph, {}, more) if self.target == "tensorrt" and more else {}


def _round_scales(model: onnx.ModelProto, element: int) -> None:
    """Make the scales of 8-bit numbers ones that half precision holds, in place.

    One scale is then the same on both sides of 8 bits though one side is float32: TensorRT fuses only equal ones.
    """
    used = {node.input[1] for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")}
    for tensor in model.graph.initializer:
        if tensor.name in used and tensor.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(tensor)
            rounded = numpy_helper.to_array(halved(tensor, tensor.name, element)).astype(np.float32)
            kept = np.where(values < LEAST_SCALE, values, rounded).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(kept, tensor.name))


def _random(model: OnnxModel) -> Dataset:
    return Dataset("random inputs", sample_inputs(model.signature, SAMPLES), None, "")


def float32_nodes(model: onnx.ModelProto, ranges: Ranges, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Nodes that stay in FP32, with the reason.

    Args:
        model: float32, perhaps with Q/DQ nodes.
        ranges: (lowest, highest) of each tensor, against which FP16 is checked; empty for BF16.
        more: nodes that stay for another reason.
    """
    graph = model.graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if ranges}
    dequantized = {output for node in graph.node if node.op_type == "DequantizeLinear" for output in node.output}
    quantized = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
    found: dict[str, str] = dict(more or {})
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            found[node.name] = "converts to or from INT8"
        elif set(node.input) & dequantized or set(node.output) & quantized:
            found[node.name] = "runs in INT8"
        elif reason := _overflow(node, ranges, weights):
            found[node.name] = reason
    return found


def float32_islands(
    model: onnx.ModelProto,
    ranges: Ranges,
    precision: Literal["fp16", "bf16"] = "fp16",
    more: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The same for TensorRT, which fuses Q/DQ nodes with the layers beside them only where their types are the same.

    A DequantizeLinear is of the type of the layer that takes it, a QuantizeLinear of what it is given by.
    """
    graph = model.graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if ranges}
    scales = {node.output[0]: weights.get(node.input[1]) for node in graph.node if node.op_type == "DequantizeLinear"}
    restored = set(scales)  # as it is, or moved: ONNX Runtime takes DequantizeLinear past what only moves values
    for node in graph.node:
        if node.op_type in MOVING and node.input[0] in restored:
            restored |= set(node.output)
    found: dict[str, str] = dict(more or {})
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        if node.op_type in FLOAT32_SCALES and set(node.input) <= restored:
            found[node.name] = f"ONNX Runtime has no {node.op_type} of 8-bit numbers with scales in half precision"
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
        if largest > LARGEST[TensorProto.FLOAT16] * ROOM:
            return f"{name} reaches {largest:.3g}"
        if node.op_type in DELICATE and name == node.input[0] and largest > DELICATE_INPUT:
            return f"{node.op_type} of values up to {largest:.3g}"
        values = weights.get(name)
        if values is None or values.dtype != np.float32 or not values.size:
            continue
        size = np.abs(values[(values != 0) & np.isfinite(values)])  # half precision has infinities, too
        if size.size and float(size.max()) > LARGEST[TensorProto.FLOAT16]:
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
