"""ONNX Runtime's basic optimizations and shapes for every tensor, with the weights of a file in memory once.

What `onnxruntime.quantization.quant_pre_process` does (shapes by symbols, constant folding and fusion, ONNX's own
shapes), in this order, but on the outline of the file: weights lie beside it, and ONNX Runtime alone maps them.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

from compress.console.quiet import errors_only
from compress.errors import StageError, first_line
from compress.formats.onnx.outline import LARGE, set_apart, take_in
from compress.runtime.memory import give_back

__all__ = ["folded"]

# Of tensors that INT8 and half precision are made of, or that are beside them.
_KINDS = {
    "tensor(float)": TensorProto.FLOAT, "tensor(double)": TensorProto.DOUBLE, "tensor(float16)": TensorProto.FLOAT16,
    "tensor(int64)": TensorProto.INT64, "tensor(int32)": TensorProto.INT32, "tensor(bool)": TensorProto.BOOL,
}  # fmt: skip
SOURCE, OPTIMIZED, WEIGHTS = "float.onnx", "optimized.onnx", "optimized.weights"


def folded(source: Path) -> ModelProto:
    """The model of a file, its weights inside, after constant folding, fusion and shape inference.

    Raises:
        StageError: ONNX Runtime can't optimize it, or wrote what onnx does not take.
    """
    source = source.resolve()
    # Where it can't tell every shape, symbolic inference leaves the model in the folder that it runs in. What it logs
    # speaks of its own flags.
    with tempfile.TemporaryDirectory() as aside, contextlib.chdir(aside), errors_only():
        folder = Path(aside).resolve()
        _save_with_shapes(set_apart(source, folder / "float.weights"), folder / SOURCE)
        _optimize(folder / SOURCE, folder / OPTIMIZED)
        give_back()
        try:
            model = _typed(onnx.load(folder / OPTIMIZED, load_external_data=False), folder)
            take_in(model, folder)
        except Exception as err:  # of protobuf, of onnx's C++ and of its checker, without a common base
            raise _failed("can't read what ONNX Runtime made of this model", err) from err
    return model


def _typed(model: ModelProto, folder: Path) -> ModelProto:
    """With types and shapes: behind an operator of another domain, which onnx does not know, those by ONNX Runtime."""
    model = onnx.shape_inference.infer_shapes(model)
    graph = model.graph
    known = {value.name for value in (*graph.value_info, *graph.input, *graph.output)}
    unknown = [name for node in graph.node for name in node.output if name and name not in known]
    if not unknown:
        return model
    asked = ModelProto()
    asked.CopyFrom(model)
    asked.graph.output.extend(onnx.ValueInfoProto(name=name) for name in unknown)
    onnx.save(asked, folder / "asked.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    running = ort.InferenceSession(str(folder / "asked.onnx"), options, providers=["CPUExecutionProvider"])
    for value in running.get_outputs():
        kind = _KINDS.get(value.type)
        if value.name in unknown and kind is not None:  # no dimensions are those of a number, or of what is not known
            graph.value_info.append(helper.make_tensor_value_info(value.name, kind, value.shape or None))
    return onnx.shape_inference.infer_shapes(model)


def _save_with_shapes(model: ModelProto, target: Path) -> None:
    try:
        shaped = SymbolicShapeInference.infer_shapes(model)
    except Exception:  # it fails in many ways; plain ONNX inference is enough for the quantizer
        shaped = None
    onnx.save(shaped or model, target)


def _optimize(source: Path, target: Path) -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", str(LARGE))
    options.add_session_config_entry("session.disable_prepacking", "1")  # nothing is run: no second form of the weights
    try:
        ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    except Exception as err:  # ONNX Runtime's own exception classes have no common base but this
        raise _failed("ONNX Runtime can't optimize this model", err) from err


def _failed(what: str, err: Exception) -> StageError:
    return StageError(
        what, why=first_line(err), mend="update onnxruntime; if that does not help, report it with the model"
    )
