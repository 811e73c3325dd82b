"""4-bit weights: a matrix shrinks to a sixth; what it multiplies stays float, but for 8 bits inside the operator.

With calibration data by GPTQ (see `gptq`), from Gram matrices of what each layer reads; without, each weight becomes
the nearest of its block's levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from onnx import ModelProto, TensorProto

from compress.console.wording import Note, counted
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.formats.onnx.outline import outline
from compress.model import Model, OnnxModel
from compress.quantize.blocks import SIZE, Array, Blocks, fitted, rounded
from compress.quantize.gptq import Chosen, chosen
from compress.quantize.grams import grams, portions
from compress.quantize.int4_onnx import Matrix, matrices, put, weights_of
from compress.quantize.int8_onnx import finish, plain
from compress.quantize.precision import operators, precisions
from compress.stage import Given, Progress

__all__ = ["QuantizeInt4"]

# Of a table that a layer multiplies by, too: what its own entries lose counts as much as what the layer's products do.
SHARED = 1.0


@dataclass(frozen=True)
class QuantizeInt4:
    """Matrices of layers and embedding tables in 4 bits; weights of other layers in 8.

    Attributes:
        calibration: typical inputs, for GPTQ.
        exclude: names of nodes that stay in float.
    """

    calibration: Dataset | None = None
    exclude: tuple[str, ...] = ()

    name: ClassVar[str] = "quantize_int4"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        data = None if self.calibration is None else self.calibration.sha256
        options: dict[str, Any] = {"mode": "weights", "bits": 4, "block": SIZE, "calibration": data, "target": "cpu"}
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
        made, gain = self._made(model.path, original, found, progress)
        written = ModelProto()
        written.CopyFrom(original)
        put(written, made, self.exclude)
        finish(written, path, original)
        return self._given(model, path, gain, progress)

    def _made(
        self, source: Path, original: ModelProto, found: list[Matrix], progress: Progress
    ) -> tuple[dict[Matrix, Blocks], float | None]:
        """Each matrix in 4 bits; and what the layers' products lose on the data, as a share of what rounding loses."""
        weights = weights_of(original.graph)
        if self.calibration is None:
            rough = {}
            for done, matrix in enumerate(found, 1):
                rough[matrix] = _nearest(matrix, weights)
                progress(done, len(found), "rounding the weights")
            return rough, None
        results: dict[Matrix, Chosen] = {}
        made = {matrix: _nearest(matrix, weights) for matrix in found if not matrix.inputs}
        layers = [matrix for matrix in found if matrix.inputs]
        widths = {name: matrix.columns for matrix in layers for name in matrix.inputs}
        waiting = portions(widths)
        sums: dict[str, Array] = {}
        samples = len(self.calibration)
        for number, names in enumerate(waiting):

            def tell(done: int, number: int = number) -> None:
                progress((number * samples + done) // len(waiting), samples, "calibrating")

            sums |= grams(source, {name: widths[name] for name in names}, self.calibration, tell)
            for matrix in [each for each in layers if each not in results and set(each.inputs) <= set(sums)]:
                results[matrix] = _chosen(matrix, matrix.values(weights), sums)
                progress(len(results), len(layers), "choosing 4-bit weights")
            left = {name for each in layers if each not in results for name in each.inputs}
            sums = {name: gram for name, gram in sums.items() if name in left}
        made |= {matrix: result.blocks for matrix, result in results.items()}
        kept = [each.lost / each.lost_rounded for each in results.values() if each.lost_rounded > 0]
        return made, sum(kept) / len(kept) if kept else None

    def _given(self, model: OnnxModel, path: Path, gain: float | None, progress: Progress) -> Given:
        layers = precisions(path, weights_only=True, excluded=self.exclude)
        whole = layers.int4 + layers.int8 + len(layers.floats)
        did = f"{layers.int4} of {counted(whole, 'layers')} in INT4"
        did += f", {layers.int8} in INT8" if layers.int8 else ""
        did += f", weights alone, a scale and a zero-point for each {SIZE}; "
        warnings: tuple[str, ...] = ()
        if self.calibration is None:
            did += "rounded to nearest"
            warnings = (
                Note(
                    "4-bit weights were rounded to nearest: with --calibration (some hundred typical inputs) GPTQ "
                    "chooses them by what the layers read, and answers stay nearer to the original's."
                ),
            )
        elif gain is None:
            did += "rounded to nearest: no layer's products tell more"
        else:
            did += f"GPTQ by {counted(len(self.calibration), 'samples')}, {gain:.0%} of the error of plain rounding"
        progress(1, 1, f"{counted(layers.int4, 'layers')} in INT4")
        return Given(
            OnnxModel(path, model.signature),
            did=did,
            details={
                "layers": {"int4": layers.int4, "int8": layers.int8, "float": len(layers.floats)},
                "layers_float": layers.floats,
                "block": SIZE,
                "error_of_rounding": gain,
                "calibration_sha256": self.options["calibration"],
                "operators": operators(path),
            },
            warnings=warnings,
        )


def _nearest(matrix: Matrix, weights: Mapping[str, TensorProto]) -> Blocks:
    values = matrix.values(weights)
    return rounded(values, fitted(values, symmetric=matrix.symmetric))


def _chosen(matrix: Matrix, values: Array, sums: Mapping[str, Array]) -> Chosen:
    gram = sum(sums[name] for name in matrix.inputs)
    assert not isinstance(gram, int)  # noqa: S101  a layer reads something
    if matrix.tables:
        gram = gram.copy()
        gram.flat[:: len(gram) + 1] += SHARED * gram.diagonal().mean()
    return chosen(values, gram, symmetric=matrix.symmetric)


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
