"""Export a torch module to one ONNX file whose batch is really dynamic, proven against torch."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import torch

from compress.artifact import Signature
from compress.backends import OnnxBackend, TorchBackend
from compress.compare import cosine_similarity, max_abs_error
from compress.errors import StageError
from compress.model import Model, OnnxModel, TorchModel, example_inputs, symbols_of
from compress.stages import Given, Progress

__all__ = ["OnnxFromTorch", "exported"]

# What ONNX Runtime 1.23 and later, the one in Triton's containers, and TensorRT 10 and 11 all read.
OPSET = 20
IR_VERSION = 10
BATCHES = (1, 2, 5)
TOLERANCE = 1e-3


@dataclass(frozen=True)
class OnnxFromTorch:
    """Opset 20, weights inside the file; compared with torch at batches 1, 2 and 5."""

    name: ClassVar[str] = "onnx_from_torch"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {"opset": OPSET, "ir_version": IR_VERSION}

    def check(self, model: Model) -> None:
        """Anything that loads can be tried."""

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
        path = folder / "model.onnx"
        progress(0, 3, "tracing")
        _export(model, path)
        progress(1, 3, "checking the file")
        _check_file(path, model.signature)
        given = OnnxModel(path, model.signature, model.ranges)
        parity = {}
        for batch in BATCHES:
            parity[str(batch)] = _parity(model, given, batch)
            progress(2, 3, f"batch {batch}: off by {parity[str(batch)]['max_abs_error']:.2g}")
        progress(3, 3, "equal to torch")
        worst = max(figures["max_abs_error"] for figures in parity.values())
        return Given(
            given,
            did=f"opset {OPSET}; equal to torch at batches {', '.join(parity)} (largest difference {worst:.1e})",
            details={"opset": OPSET, "ir_version": IR_VERSION, "parity": parity},
        )


def exported(model: TorchModel, path: Path) -> torch.export.ExportedProgram:
    """Write the file as the stage does, unproven, and give the program that it was made from."""
    program = _export(model, path)
    _check_file(path, model.signature)
    if program is None or program.exported_program is None:
        raise StageError(
            "can't follow the export",
            why="torch.onnx tells nothing of the program that it wrote",
            mend="ask for --int8 static",
        )
    return program.exported_program


def _export(model: TorchModel, path: Path) -> torch.onnx.ONNXProgram | None:
    signature = model.signature
    # A sample batch of 1 would be taken for a constant.
    sizes = {symbol: 2 + index for index, symbol in enumerate(symbols_of(signature.inputs))}
    arrays = example_inputs(signature.inputs, sizes)
    args = tuple(torch.from_numpy(arrays[spec.name]) for spec in signature.inputs)
    shapes = tuple(
        {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in signature.inputs
    )
    # Names of one's own: the exporter does not see that an output's name is that of a tensor inside.
    names: dict[str, Any] = {
        "input_names": [f"signature_input_{index}" for index in range(len(signature.inputs))],
        "output_names": [f"signature_output_{index}" for index in range(len(signature.outputs))],
    }
    script = isinstance(model.module, torch.jit.ScriptModule)
    try:
        with _quiet(), torch.no_grad():
            if script:
                axes = dict(zip(names["input_names"], shapes, strict=True))
                axes |= {
                    name: {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}
                    for name, spec in zip(names["output_names"], signature.outputs, strict=True)
                }
                torch.onnx.export(
                    model.module, args, path, dynamo=False, opset_version=OPSET, dynamic_axes=axes, **names
                )
                return None
            return torch.onnx.export(
                model.module, args, path, dynamo=True, opset_version=OPSET, external_data=False,
                dynamic_shapes=shapes, verbose=False, **names,
            )  # fmt: skip
    except Exception as err:  # the exporter wraps anything that the user's forward may do
        lines = [line.strip() for line in str(err.__cause__ or err).splitlines() if line.strip()]
        raise StageError(
            "torch.onnx can't export this model",
            why=f"{type(err.__cause__ or err).__name__}: {lines[0] if lines else ''}"[:300],
            mend="make the forward free of branches on tensor values, or export a part of it",
        ) from err


def _name(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Give the graph's inputs and outputs their names, in place; a tensor inside that has one of these makes room."""
    inside = {name for node in model.graph.node for name in node.output} | {t.name for t in model.graph.initializer}
    new = {name: f"{name}_inside" for name in names.values() if name in inside} | dict(names)

    def rename(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = new.get(value.name, value.name)
        for node in graph.node:
            node.input[:] = [new.get(name, name) for name in node.input]
            node.output[:] = [new.get(name, name) for name in node.output]
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    rename(attribute.g)

    rename(model.graph)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints and warns about itself, not about the user's model."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _check_file(path: Path, signature: Signature) -> None:
    model = onnx.load(path)
    model.ir_version = IR_VERSION
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset != OPSET:
        why = f"asked for opset {OPSET}, it wrote {opset}"
        raise StageError("torch.onnx wrote another opset", why=why, mend="install the torch that constraints.txt names")
    given = zip((value.name for value in model.graph.input), signature.inputs, strict=True)
    made = zip((value.name for value in model.graph.output), signature.outputs, strict=True)
    _name(model, {name: spec.name for name, spec in (*given, *made)})
    for spec, value in zip(signature.inputs, model.graph.input, strict=True):
        dims = value.type.tensor_type.shape.dim
        for want, have in zip(spec.shape, dims, strict=True):
            if isinstance(want, str) and not have.dim_param:
                raise StageError(
                    "the exported model takes one size only",
                    why=f"the dimension {want!r} of {spec.name!r} became the constant {have.dim_value}",
                    mend="look in the forward for Python numbers made from shapes, such as int(x.shape[0])",
                )
            if isinstance(want, str):
                have.dim_param = want
    onnx.save(model, path)


def _parity(model: TorchModel, exported: OnnxModel, batch: int) -> dict[str, float]:
    sizes = {symbol: batch if symbol == "batch" else batch + 2 for symbol in symbols_of(model.signature.inputs)}
    inputs = example_inputs(model.signature.inputs, sizes, seed=batch)
    expected = TorchBackend(model, torch.get_num_threads()).infer(inputs)
    try:
        got = OnnxBackend(exported, threads=1).infer(inputs)
    except Exception as err:  # ONNX Runtime's own exception classes have no common base but this
        raise StageError(
            f"the exported model fails at batch {batch}",
            why=str(err).strip().splitlines()[-1][:300],
            mend="look in the forward for sizes written as numbers, such as reshape(2, -1)",
        ) from err
    error = max_abs_error(expected, got)
    scale = max(1.0, *(float(np.abs(value).max(initial=0)) for value in expected.values()))
    cosine = min(float(cosine_similarity(expected[name], got[name]).min()) for name in expected)
    if error > TOLERANCE * scale:
        raise StageError(
            f"the exported model gives other answers at batch {batch}",
            why=f"its outputs are off by {error:.3g} (allowed: {TOLERANCE * scale:.3g})",
            mend="look in the forward for branches on shapes, such as `if x.shape[0] == 1`",
        )
    return {"max_abs_error": error, "cosine_similarity": cosine}
