"""INT8: static with calibration data, dynamic, or of the weights alone; types as the target's kernels want them.

Static: Q/DQ nodes around each operator, weights per channel; Jacob et al., Quantization and Training of Neural
Networks for Efficient Integer-Arithmetic-Only Inference, CVPR 2018, section 2. The ranges are `calibrate`'s; the graph
is ONNX Runtime's quantizer's for the CPU, and `place_qdq`'s for TensorRT.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from onnx import ModelProto, TensorProto

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.data.reach import far_beyond
from compress.errors import RecipeError, StageError
from compress.formats.onnx.outline import outline
from compress.model import Model, OnnxModel
from compress.quantize.calibrate import calibrate, trained_ranges
from compress.quantize.half.index_arithmetic import kept_from_int8
from compress.quantize.histogram import Method
from compress.quantize.int8_onnx import Ranges, dynamic, finish, plain, static_for_cpu
from compress.quantize.outputs_lost import outputs_lost
from compress.quantize.place_qdq import place
from compress.quantize.precision import operators, precisions
from compress.quantize.swamped import swamped
from compress.quantize.tied_tables import ties
from compress.quantize.weights_onnx import RECURRENT, quantize_weights
from compress.stage import Given, Progress

__all__ = ["QuantizeOnnx", "Ranges", "Target", "quantize", "quantized"]

Target = Literal["cpu", "tensorrt", "cuda"]
FEW = 8  # samples, whose ranges say little of others


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

    @property
    def seen(self) -> tuple[str, ...]:
        """Warnings where lone samples decide what 8 bits are for."""
        return () if self.mode != "static" or self.calibration is None else far_beyond(self.calibration)

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
            wide = _doubles(path)
            of_kind = "none is of a kind that it takes"
            of_kind += ", or large enough to gain" if self.mode == "weights" else ""
            if layers.floats.keys() <= {*self.exclude, *exclude}:
                of_kind = "all are to stay in float (--keep-float)"
            raise StageError(
                "nothing was quantized",
                why="its weights are float64, and INT8 is made of float32"
                if wide
                else f"of its {counted(len(layers.floats), 'layers')} with weights, {of_kind}",
                mend="save the model in float32 (`model.float()`), or leave --int8 out"
                if wide
                else "leave --int8 out for this model",
            )
        progress(1, 1, f"{counted(layers.int8, 'layers')} in INT8")
        made = OnnxModel(path, model.signature)
        gone = None
        if self.mode == "static" and self.calibration is not None:
            gone = outputs_lost(model, made, self.calibration)
        samples = 0 if self.calibration is None else len(self.calibration)
        trained = self.mode == "static" and trained_ranges(model) is not None
        lost = "the exported graph is not the one that was trained: its ranges are calibrated anew"
        few = (
            f"the ranges are those of {counted(samples, 'samples')}, and what goes beyond them is cut: give "
            "--calibration 100 or more"
        )
        how = {
            "static": "per channel; the ranges of the training"
            if trained
            else f"per channel; {self.calibrator} ranges of {counted(samples, 'samples')}",
            "dynamic": "per channel; ranges at run time",
            "weights": "weights alone, per channel",
        }[self.mode]
        if layers.weights_only:
            how += f"; of {counted(len(layers.weights_only), 'recurrent layers')} the weights alone"
        return Given(
            made,
            did=f"{layers.int8} of {counted(layers.int8 + len(layers.floats), 'layers')} in INT8, {how}, "
            f"for {self.target}",
            details={
                "layers": {"int8": layers.int8, "float": len(layers.floats)},
                "layers_float": layers.floats,
                "layers_weights_only": list(layers.weights_only),
                "calibration_sha256": self.options["calibration"],
                "operators": operators(path),
                **({} if gone is None else {"outputs_lost": gone.to_dict()}),
            },
            warnings=(
                *([gone.warning] if gone is not None and gone.warning else ()),
                *([lost] if self.mode == "static" and model.ranges and not trained else ()),
                *([few] if self.mode == "static" and not trained and samples < FEW else ()),
            ),
        )


def _doubles(path: Path) -> bool:
    """Whether a file's weights are float64, and none float32."""
    kinds = {tensor.data_type for tensor in outline(path).graph.initializer if len(tensor.dims) > 1}
    return TensorProto.DOUBLE in kinds and TensorProto.FLOAT not in kinds


def quantize(options: QuantizeOnnx, source: Path, target: Path, ranges: Ranges | None) -> None:
    """Write the quantized file.

    Args:
        options: what to do.
        source: float32, folded, its shapes inferred.
        target: is written, its documentation and unused imports stripped.
        ranges: (lowest, highest) of each activation, for a static model.
    """
    original = plain(source)
    tied = ties(original)
    finish(quantized(options, original, ranges, own=True), target, tied, integers=options.target != "tensorrt")


def quantized(options: QuantizeOnnx, original: ModelProto, ranges: Ranges | None, *, own: bool = False) -> ModelProto:
    """The quantized graph; its nodes keep the names that they have in the original.

    Args:
        options: what to do.
        original: see `plain`. It is left as it is.
        ranges: (lowest, highest) of each activation, for a static model.
        own: whether nobody needs the original afterwards: it may be changed, where that saves a copy.

    Raises:
        RecipeError: what is to stay in float is no node of the graph.
    """
    missing = sorted(set(options.exclude) - {node.name for node in original.graph.node})
    if missing:
        raise RecipeError(
            f"can't keep {', '.join(missing)} in float",
            why="the exported graph has no node of that name",
            mend="take the names that `compress explain` tells of the model exported alike",
        )
    kept = {*options.exclude, *kept_from_int8(original)}
    if options.mode == "static" and options.target == "cpu":
        assert ranges is not None  # noqa: S101  a static model has them
        kept |= swamped(original.graph, ranges)
        return static_for_cpu(original, ranges, kept, reduce_range=options.reduce_range)
    exclude = sorted(kept)
    if options.mode == "dynamic":
        return dynamic(original, exclude, reduce_range=options.reduce_range)
    model = original
    if not own:
        model = ModelProto()
        model.CopyFrom(original)
    if options.mode == "weights":
        quantize_weights(model, exclude)
    else:
        assert ranges is not None  # noqa: S101  a static model has them
        place(model, ranges, exclude)
        if options.target != "tensorrt":
            quantize_weights(model, exclude, RECURRENT)
    return model
