"""What an ONNX file fixes of the sizes inside it, and the padding that hangs on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx
from onnx import ModelProto, helper, shape_inference

from compress.formats.onnx_layers.values import NotTakenBackError

__all__ = ["VARIES", "Shape", "bare", "same_pads", "static_shapes"]

SMALL = 1024  # bytes of a weight that shapes may be computed from
VARIES = -1
Shape = Sequence[int | None] | None


def static_shapes(model: ModelProto) -> Mapping[str, Shape]:
    """The sizes of each tensor, as far as they are the same whatever comes in.

    None where they may vary, `VARIES` where they do.

    Args:
        model: with the shapes of its inputs. Where no operator of it hangs on such sizes, nothing is told.
    """
    if not any(
        node.op_type in ("Resize", "Split") or any(a.name in ("auto_pad", "ceil_mode") for a in node.attribute)
        for node in model.graph.node
    ):
        return {}
    made = bare(model)
    graph = made.graph
    for each in graph.output:
        each.type.tensor_type.ClearField("shape")
    try:
        found = shape_inference.infer_shapes(made).graph
    except Exception:  # of nodes that contradict each other, which the sample says better
        return {}
    names = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim} - {""}
    return {
        value.name: [_size(dim, names) for dim in value.type.tensor_type.shape.dim]
        for value in (*found.input, *found.value_info, *found.output)
        if value.type.tensor_type.HasField("shape")
    }


def bare(model: ModelProto) -> ModelProto:
    """The model without the values of large weights, which may take gigabytes: these are inputs in it."""
    made = ModelProto()
    made.ir_version = model.ir_version
    made.opset_import.extend(model.opset_import)
    graph = made.graph
    graph.name = "bare"
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(onnx.ValueInfoProto(name=each.name, type=each.type) for each in model.graph.output)
    for tensor in model.graph.initializer:
        if tensor.ByteSize() <= SMALL:
            graph.initializer.append(tensor)
        else:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return made


def _size(dim: onnx.TensorShapeProto.Dimension, names: Collection[str]) -> int | None:
    """Of a dimension; names are those that inputs have: inference makes up others for what it can't tell."""
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return VARIES if dim.dim_param in names else None


def same_pads(
    auto: bytes, shape: Shape, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Padding such that there are ceil(size / stride) places, as ONNX gives it: before each axis, then behind each.

    Args:
        auto: SAME_UPPER or SAME_LOWER.
        shape: of what is padded, with batch and channels.

    Raises:
        NotTakenBackError: it hangs on a size that varies.
    """
    before, behind = [], []
    sizes = list(shape[2:]) if shape else [None] * len(kernel)
    for size, wide, step, apart in zip(sizes, kernel, stride, dilation, strict=True):
        if step == 1:
            whole = apart * (wide - 1)
        elif size in (None, VARIES):
            raise NotTakenBackError("its padding is automatic, and hangs on the size of what it gets, which varies")
        else:
            whole = max(0, (-(-size // step) - 1) * step + apart * (wide - 1) + 1 - size)
        less, more = whole // 2, whole - whole // 2
        before.append(less if auto == b"SAME_UPPER" else more)
        behind.append(more if auto == b"SAME_UPPER" else less)
    return [*before, *behind]
