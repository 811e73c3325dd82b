"""An ONNX file of someone else's as the stages take one, proven against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from onnx import ModelProto, TensorProto, helper, version_converter

from compress.artifact import Signature
from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.errors import StageError, first_line
from compress.evaluate.parity import TOLERANCE
from compress.formats.onnx.dense import written_dense
from compress.formats.onnx.functions import written_out
from compress.formats.onnx.outline import outline, take_in
from compress.formats.onnx.read import read_onnx
from compress.formats.onnx.scope import fill_gaps, inner_bodies, inner_nodes, name_nodes, opset_of
from compress.model import Arrays, Model, OnnxModel
from compress.onnx_export.equal import BATCHES, Wording, changes, equal_throughout, sizes_assumed
from compress.onnx_export.file import declare, save
from compress.onnx_export.float32 import in_float32
from compress.onnx_export.from_torch import IR_VERSION
from compress.runtime.backends import OnnxBackend
from compress.runtime.measure import cores
from compress.runtime.memory import give_back
from compress.stage import Given, Progress

__all__ = ["HALF_TOLERANCE", "UNSIGNED", "OnnxFromFile", "plain", "refuse", "refuse_random", "whole"]

# Q/DQ nodes have a scale for each channel from here on.
LEAST_OPSET = 13
HALF_TOLERANCE = 2e-2  # of what was rounded to 11 bits after each node
QUANTIZED = (
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "QGemm",
    "QAttention", "QEmbedLayerNormalization", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat",
    "MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "GatherBlockQuantized", "QMoE", "QOrderedMatMul",
)  # fmt: skip
UNSIGNED = (
    "give the --size that is usual; or fix at it, in the file, the dimension that varies, as "
    "`python -m onnxruntime.tools.make_dynamic_shape_fixed` does"
)
RESIZED_OPSET = 11  # from here on a Resize says where it samples
RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")
FEW_BITS = ("BFLOAT16", "INT4", "UINT4", "INT2", "UINT2", "FLOAT4E2M1")


@dataclass(frozen=True)
class OnnxFromFile:
    """Weights inside the file, FP32, no functions, opset 13 at least; inputs and outputs stay as they are.

    Attributes:
        data: samples to compare on, besides random inputs.
    """

    data: Dataset | None = None

    name: ClassVar[str] = "onnx_from_file"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        data = None if self.data is None else self.data.sha256
        return {"opset": LEAST_OPSET, "ir_version": IR_VERSION, "data": data}

    def check(self, model: Model) -> None:
        assert isinstance(model, OnnxModel)  # noqa: S101  it is what a pipeline starts from
        refuse(model.path)

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        path = folder / "model.onnx"
        total = len(BATCHES) + (self.data is not None) + 1
        progress(0, total, "reading")
        signature = model.signature.settled
        made = whole(model.path)
        opset = opset_of(made)
        did, half = plain(made, signature, model.path)
        save(made, path)
        del made  # as large as the file, and sessions are opened next
        give_back()
        given = OnnxModel(path, signature)
        before, after = OnnxBackend(OnnxModel(model.path, signature), cores()), OnnxBackend(given, cores())
        mend = "report this model, and say what wrote it"
        words = Wording("the file as it was read", "in the original", mend, mend, unsigned=UNSIGNED)
        parity = equal_throughout(
            model.module, before, after, signature, self.data, progress, words,
            tolerance=HALF_TOLERANCE if half else TOLERANCE, steps=(0, 1),
            doubted=lambda inputs, err: refuse_random(model.path, before, inputs, err),
        )  # fmt: skip
        progress(total, total, "equal to the file")
        worst = max(figures["max_abs_error"] for figures in parity.values())
        at = f"at batches {', '.join(map(str, BATCHES))}" if signature.batches else "at the sizes that are fixed"
        data = f" and on {self.data.source}" if self.data is not None else ""
        sizes = f", {signature.sizes_text}" if signature.told else ""
        return Given(
            given,
            did=f"opset {opset}{''.join(f'; {each}' for each in did)}; equal to the file {at}{data}{sizes} "
            f"(largest difference {worst:.1e})",
            details={"opset": max(opset, LEAST_OPSET), "ir_version": IR_VERSION, "sizes": signature.sizes_told,
                     "parity": parity},
            warnings=sizes_assumed(signature),
        )  # fmt: skip


def refuse(path: Path) -> None:
    """Refuse a file that nothing here can make smaller, before any work.

    Raises:
        StageError: it is quantized already, or holds numbers of a kind that the stages don't compute with.
    """
    model = outline(path)
    graphs = (model.graph, *inner_bodies(model.graph))
    nodes = [*(node for graph in graphs for node in graph.node), *(node for f in model.functions for node in f.node)]
    found = Counter(n.op_type for n in nodes if n.op_type in QUANTIZED or n.op_type.startswith("QLinear"))
    mend = "start from the float model that it was made of; `compress measure` and `inspect` take it as it is"
    if found:
        some = ", ".join(f"{count} {kind}" for kind, count in found.most_common(3))
        raise StageError(f"won't compress {path}: it is quantized already", why=f"it has {some}", mend=mend)
    names = {number: name for name, number in TensorProto.DataType.items()}
    kinds = Counter(names[tensor.data_type] for graph in graphs for tensor in graph.initializer)
    odd = {kind: count for kind, count in kinds.items() if kind in FEW_BITS or kind.startswith("FLOAT8")}
    if odd:
        held = ", ".join(f"{count} in {kind}" for kind, count in odd.items())
        raise StageError(f"can't compress {path}", why=f"of its weights it has {held}", mend=mend)


def whole(path: Path) -> ModelProto:
    """The model with its weights inside.

    Raises:
        StageError: it can't be read, or two of its weights have one name, of which ONNX Runtime takes either.
    """
    model = read_onnx(path, runs=True)
    for graph in (model.graph, *inner_bodies(model.graph)):
        dense, sparse = (
            (each.name for each in graph.initializer),
            (each.values.name for each in graph.sparse_initializer),
        )
        weights = Counter([*dense, *sparse])
        twice = next((name for name, count in weights.items() if count > 1), None)
        if twice is not None:
            why = f"it holds {counted(weights[twice], 'initializers')} named {twice!r}, and does not say which is meant"
            raise StageError(f"can't compress {path}", why=why, mend="leave the one in the file that was trained")
    take_in(model, path.parent)
    return model


def plain(model: ModelProto, signature: Signature, path: Path) -> tuple[list[str], bool]:
    """Write a model as the stages take it, in place; tells what was done, and whether it was in FP16."""
    did: list[str] = []
    if functions := len(model.functions):
        did.append(f"{counted(functions, 'functions')} written out")
    model.CopyFrom(written_out(model))
    if sparse := written_dense(model):
        did.append(f"{counted(sparse, 'sparse tensors')} written out")
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    fixed = [value for value in graph.input if value.name in weights]
    if fixed:
        kept = [value for value in graph.input if value.name not in weights]
        del graph.input[:]
        graph.input.extend(kept)
        if model.ir_version >= 4:  # before, each weight had to be an input
            did.append(f"{counted(len(fixed), 'inputs')} with a value in the file fixed at it")
    model.ir_version = IR_VERSION
    half = bool(in_float32(model))
    if half:
        did.append("FP16 computed in FP32")
    opset = opset_of(model)
    if opset < LEAST_OPSET:
        _raise(model, path)
        did.append(f"raised to {LEAST_OPSET}")
    for spec, value in zip((*signature.inputs, *signature.outputs), (*graph.input, *graph.output), strict=True):
        declare(value, spec.shape)
    for field in ("training_info", "configuration"):
        if field in model.DESCRIPTOR.fields_by_name:
            model.ClearField(field)
    fill_gaps(model.graph)
    name_nodes(model)
    return did, half


def _raise(model: ModelProto, path: Path) -> None:
    """To the least opset, in place, by onnx's converter.

    Raises:
        StageError: it can't; it does not look into the bodies of If and Loop.
    """
    inside = sorted({node.op_type for node in inner_nodes(model.graph)})
    opset, mend = opset_of(model), f"export the model again with opset {LEAST_OPSET} or newer"
    if inside:
        raise StageError(
            f"can't raise {path} from opset {opset} to {LEAST_OPSET}",
            why=f"onnx's converter leaves bodies of If and Loop as they are, and these hold {', '.join(inside[:5])}",
            mend=mend,
        )
    try:
        model.CopyFrom(version_converter.convert_version(model, LEAST_OPSET))
    except Exception as err:  # of its C++, without a common base
        raise StageError(
            f"can't raise {path} from opset {opset} to {LEAST_OPSET}", why=first_line(err)[:300], mend=mend
        ) from err
    if opset < RESIZED_OPSET:
        _sampled_as_before(model)
    model.ir_version = IR_VERSION


def _sampled_as_before(model: ModelProto) -> None:
    """Let each Resize sample where Upsample and Resize did before opset 11, which the converter leaves unsaid."""
    for node in model.graph.node:
        if node.op_type == "Resize" and not any(
            each.name == "coordinate_transformation_mode" for each in node.attribute
        ):
            node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(helper.make_attribute("nearest_mode", "floor"))


def refuse_random(path: Path, backend: OnnxBackend, inputs: Arrays, err: StageError) -> None:
    """Raise StageError by the names of operators that draw random numbers, where the file's own answers differ."""
    if not changes(backend, inputs):
        return
    model = outline(path)
    graphs = (model.graph, *inner_bodies(model.graph))
    nodes = [*(node for g in graphs for node in g.node), *(node for f in model.functions for node in f.node)]
    found = Counter(node.op_type for node in nodes if node.op_type in RANDOM)
    training = sum(node.op_type == "Dropout" and len(node.input) > 2 and bool(node.input[2]) for node in nodes)
    told = [f"{count} {kind}" for kind, count in sorted(found.items())]
    told += [f"{training} Dropout with a training mode"] if training else []
    if told:
        raise StageError(
            f"can't compress {path}: it draws random numbers",
            why=f"it has {', '.join(told)}: its answers are others each time, and none can be held against them",
            mend="export the model in eval mode (`model.eval()`), or with the random numbers as an input",
        ) from err
