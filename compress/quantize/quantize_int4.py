"""4-bit weights: a matrix shrinks to a sixth; what it multiplies stays float, or becomes 8-bit inside the operator.

With calibration data by GPTQ (see `gptq`), from Gram matrices of what each layer reads, where that is better than
rounding on samples that are held out; without, each weight becomes the nearest of its block's levels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto, TensorProto

from compress.console.wording import Note, counted
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.formats.onnx.oldest import in_oldest_form
from compress.formats.onnx.outline import outline
from compress.model import Model, OnnxModel
from compress.quantize.blocks import SIZE, Blocks, fitted, rounded
from compress.quantize.grams import FEWEST, Reading, held_out, portions, readings
from compress.quantize.held_out import Judged, judged
from compress.quantize.int4_onnx import Matrix, matrices, put, shared, weights_of
from compress.quantize.int8_onnx import finish, plain
from compress.quantize.precision import operators, precisions
from compress.quantize.tied_tables import ties
from compress.stage import Given, Progress

__all__ = ["QuantizeInt4"]

PRODUCER = "compress"


@dataclass(frozen=True)
class QuantizeInt4:
    """Matrices of layers and embedding tables in 4 bits; weights of other layers in 8.

    Attributes:
        calibration: typical inputs, for GPTQ.
        exclude: names of nodes that stay in float.
        openvino: whether OpenVINO is to read the file: a table that a layer shares is stored twice for it.
    """

    calibration: Dataset | None = None
    exclude: tuple[str, ...] = ()
    openvino: bool = False

    name: ClassVar[str] = "quantize_int4"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        data = None if self.calibration is None else self.calibration.sha256
        options: dict[str, Any] = {"mode": "weights", "bits": 4, "block": SIZE, "calibration": data, "target": "cpu"}
        options |= {"openvino": True} if self.openvino else {}
        return options | ({"exclude": list(self.exclude)} if self.exclude else {})

    def check(self, model: Model) -> None:
        """Any float32 file can be tried."""

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        path = folder / "model.onnx"
        original = plain(model.path)
        missing = sorted(set(self.exclude) - {node.name for node in original.graph.node})
        if missing:
            raise RecipeError(
                f"can't keep {', '.join(missing)} in float",
                why="the exported graph has no node of that name",
                mend="take the names that `compress explain` tells of the model exported alike",
            )
        found = matrices(original, self.exclude)
        if not found:
            raise _nothing(model.path)
        judgements = self._judged(model.path, original, found, progress)
        results = judgements or {}
        in_8_bits = set() if _floats(original) else {matrix for matrix, each in results.items() if each.in_8_bits}
        made = {matrix: each.blocks for matrix, each in results.items()}
        weights = weights_of(original.graph)
        for matrix in found:
            if matrix not in made:
                made[matrix] = _nearest(matrix, weights)
                progress(len(made), len(found), "rounding the weights")
        tied = ties(original)
        put(original, made, self.exclude, in_8_bits=in_8_bits, apart=self.openvino)
        in_oldest_form(original)
        original.producer_name = original.producer_name or PRODUCER
        finish(original, path, tied)
        progress(1, 1, f"{counted(len(made), 'matrices')} in INT4")
        twice = [matrix.weight for matrix in found if shared(matrix)] if self.openvino else []
        gain = None if judgements is None else _Gain.of(list(results.values()), len(in_8_bits))
        return self._given(model, path, gain, twice)

    def _judged(
        self, source: Path, original: ModelProto, found: list[Matrix], progress: Progress
    ) -> dict[Matrix, Judged] | None:
        """Each layer's matrix in 4 bits, by the calibration data; None where nothing can judge them."""
        held = None if self.calibration is None else held_out(source, self.calibration)
        if self.calibration is None or held is None:
            return None
        weights = weights_of(original.graph)
        results: dict[Matrix, Judged] = {}
        layers = [matrix for matrix in found if matrix.inputs]
        widths = {name: matrix.columns for matrix in layers for name in matrix.inputs}
        waiting = portions(widths)
        read: dict[str, Reading] = {}
        samples = len(self.calibration)
        for number, names in enumerate(waiting):

            def tell(done: int, number: int = number) -> None:
                progress((number * samples + done) // len(waiting), samples, "calibrating")

            read |= readings(source, {name: widths[name] for name in names}, self.calibration, held, tell)
            for matrix in [each for each in layers if each not in results and set(each.inputs) <= set(read)]:
                first, *others = (read[name] for name in matrix.inputs)
                results[matrix] = judged(
                    matrix.values(weights), sum(others, first), symmetric=matrix.symmetric, table=matrix.tables
                )
                progress(len(results), len(layers), "choosing 4-bit weights")
            left = {name for each in layers if each not in results for name in each.inputs}
            read = {name: each for name, each in read.items() if name in left}
        return results

    def _given(self, model: OnnxModel, path: Path, gain: _Gain | None, twice: list[str]) -> Given:
        layers = precisions(path, weights_only=True, excluded=self.exclude)
        whole = layers.int4 + layers.int8 + len(layers.floats)
        did = f"{layers.int4} of {counted(whole, 'layers')} in INT4"
        did += f", {layers.int8} in INT8" if layers.int8 else ""
        did += f", weights alone, a scale and a zero-point for each {SIZE}; "
        warnings: list[str] = []
        if gain is not None and self.calibration is not None:
            did += gain.told(len(self.calibration))
        else:
            did += "rounded to nearest"
            warnings.append(self._unjudged())
        if twice:
            warnings.append(
                Note(
                    f"The codes of {counted(len(twice), 'tables')} are stored twice, for the lookup and for the layer "
                    "tied to it: OpenVINO reads them no other way. --runtime onnxruntime stores them once."
                )
            )
        return Given(
            OnnxModel(path, model.signature),
            did=did,
            details={
                "layers": {"int4": layers.int4, "int8": layers.int8, "float": len(layers.floats)},
                "layers_float": layers.floats,
                "block": SIZE,
                "held_out": None if gain is None else dataclasses.asdict(gain),
                "calibration_sha256": self.options["calibration"],
                "operators": operators(path),
            },
            warnings=tuple(warnings),
        )

    def _unjudged(self) -> str:
        """Why weights were rounded."""
        if self.calibration is None:
            return Note(
                "4-bit weights were rounded to nearest: with --calibration (some hundred typical inputs) GPTQ "
                "chooses them by what the layers read, and answers stay nearer to the original's."
            )
        had = counted(len(self.calibration), "samples")
        few = f"a fifth of {had} is too few to say" if len(self.calibration) < FEWEST else f"{had} go in one call"
        return (
            f"4-bit weights were rounded to nearest: whether GPTQ does better is judged on samples that are held out, "
            f"and {few}. Give {FEWEST} or more, some hundred if there are, and leave the batch of the model open."
        )


@dataclass(frozen=True)
class _Gain:
    """What samples that were held out say.

    Attributes:
        error_of_rounding: what the layers' products lose, as a share of what rounding loses; the mean over layers.
        by_gptq: layers whose weights are GPTQ's.
        rounded: those that rounding serves better.
        in_8_bits: those that multiply activations in 8 bits.
    """

    error_of_rounding: float
    by_gptq: int
    rounded: int
    in_8_bits: int

    @classmethod
    def of(cls, results: list[Judged], in_8_bits: int) -> _Gain:
        """Of all layers; one that loses nothing tells nothing."""
        shares = [each.lost / each.lost_rounded for each in results if each.lost_rounded > 0]
        better = sum(each.lost < each.lost_rounded for each in results)
        return cls(float(np.mean(shares)) if shares else 1.0, better, len(results) - better, in_8_bits)

    def told(self, samples: int) -> str:
        """In the report's words."""
        held = f"by {counted(samples, 'samples')}, a fifth of them held out"
        if not self.by_gptq:
            return f"rounded to nearest: GPTQ {held} does no better there" if self.rounded else "rounded to nearest"
        did = f"GPTQ {held}: there {self.error_of_rounding:.0%} of the error of plain rounding"
        did += f" ({counted(self.rounded, 'layers')} rounded, which is better there)" if self.rounded else ""
        return f"{did}; {self.in_8_bits or 'none'} of them with activations in 8 bits"


def _floats(model: ModelProto) -> bool:
    """Whether a caller gives numbers that may be NaN, of which 8 bits would make others."""
    weights = {tensor.name for tensor in model.graph.initializer}
    kinds = {value.type.tensor_type.elem_type for value in model.graph.input if value.name not in weights}
    return bool(kinds & {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})


def _nearest(matrix: Matrix, weights: Mapping[str, TensorProto]) -> Blocks:
    values = matrix.values(weights)
    return rounded(values, fitted(values, symmetric=matrix.symmetric))


def _nothing(path: Path) -> StageError:
    kinds = {tensor.data_type for tensor in outline(path).graph.initializer if len(tensor.dims) > 1}
    wide = TensorProto.DOUBLE in kinds and TensorProto.FLOAT not in kinds
    return StageError(
        "nothing was quantized",
        why="its weights are float64, and INT4 is made of float32"
        if wide
        else "it has no matrix of a layer, nor an embedding table, that is large enough to gain: convolutions and "
        "recurrent layers have no 4-bit form",
        mend="save the model in float32 (`model.float()`), or leave --int4 out"
        if wide
        else "ask for --int8 weights, which takes those, too; or leave --int4 out for this model",
    )
