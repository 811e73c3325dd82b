"""Turn the float32 of an ONNX graph into half precision, node by node, with casts where the two meet."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper

__all__ = ["ELEMENT", "convert", "lacking", "takes"]

ELEMENT = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
_NAMES = {TensorProto.FLOAT16: "tensor(float16)", TensorProto.BFLOAT16: "tensor(bfloat16)"}


def convert(model: onnx.ModelProto, element: int, keep: Collection[str]) -> None:
    """Convert in place; inputs and outputs of the graph stay float32.

    A node is converted when the operator's own schema takes the type; of such a node, an input that the schema wants
    in float32 (the scales of a Resize) stays. A DequantizeLinear gives the type of its scale.

    Args:
        model: its shapes can be inferred; node names are unique.
        element: TensorProto.FLOAT16 or BFLOAT16.
        keep: names of nodes that stay in float32.
    """
    graph = model.graph
    opset = _opset(model)
    floats = _float_tensors(model)
    half: set[str] = set()  # tensors that are half now
    nodes: list[onnx.NodeProto] = []
    casts: dict[tuple[str, int], str] = {}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    made: dict[str, onnx.TensorProto] = {}

    def as_type(name: str, wanted: int) -> str:
        """The tensor in that type: itself, a converted weight, or a cast."""
        if name in weights:
            if wanted == TensorProto.FLOAT:
                return name
            converted = f"{name}_half"
            if converted not in made:
                made[converted] = _half(weights[name], converted, element)
            return converted
        if (name in half) == (wanted == element):
            return name
        if (name, wanted) not in casts:
            casts[name, wanted] = f"{name}_cast{wanted}"
            nodes.append(helper.make_node("Cast", [name], [casts[name, wanted]], name=casts[name, wanted], to=wanted))
        return casts[name, wanted]

    outputs = {output.name for output in graph.output}
    for node in list(graph.node):
        schema = _schema(node, opset)
        convertible = schema is not None and node.name not in keep and _takes(schema, element)
        for index, name in enumerate(node.input):
            if name in floats:
                fits = convertible and schema is not None and _input_takes(schema, index, element)
                node.input[index] = as_type(name, element if fits else TensorProto.FLOAT)
        if convertible:
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                    attribute.i = element
                if attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT:
                    attribute.t.CopyFrom(_half(attribute.t, attribute.t.name, element))
        nodes.append(node)
        for index, name in enumerate(node.output):
            if not convertible or name not in floats:
                continue
            if name in outputs:  # the graph's own outputs stay float32: others read the half one
                node.output[index] = f"{name}_half"
                nodes.append(
                    helper.make_node("Cast", [node.output[index]], [name], name=f"{name}_out", to=TensorProto.FLOAT)
                )
                casts[name, element] = node.output[index]
            else:
                half.add(name)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(made.values())
    used = {name for node in graph.node for name in node.input} | outputs
    left = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(left)
    del graph.value_info[:]  # of the types before
    onnx.checker.check_model(model)


def takes(model: onnx.ModelProto, node: onnx.NodeProto, element: int) -> bool:
    """Whether the model's opset defines the node's operator in the type."""
    schema = _schema(node, _opset(model))
    return schema is not None and _takes(schema, element)


def lacking(model: onnx.ModelProto, element: int) -> list[str]:
    """Operators with weights that the model's opset does not define in the type (a Conv in BF16 needs opset 22)."""
    opset = _opset(model)
    weights = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    found = {
        node.op_type
        for node in model.graph.node
        if weights & set(node.input) and (schema := _schema(node, opset)) is not None and not _takes(schema, element)
    }
    return sorted(found - {"QuantizeLinear", "DequantizeLinear"})


def _opset(model: onnx.ModelProto) -> int:
    version: int = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    return version


def _half(tensor: onnx.TensorProto, name: str, element: int) -> onnx.TensorProto:
    values = numpy_helper.to_array(tensor)
    if element == TensorProto.FLOAT16:
        return numpy_helper.from_array(np.clip(values, -65504, 65504).astype(np.float16), name)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # to the nearest, ties to even
    return onnx.TensorProto(name=name, data_type=element, dims=tensor.dims, raw_data=rounded.tobytes())


def _float_tensors(model: onnx.ModelProto) -> set[str]:
    """Names of all tensors of float32."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    found = {value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT}
    return found | {tensor.name for tensor in inferred.initializer if tensor.data_type == TensorProto.FLOAT}


def _schema(node: onnx.NodeProto, opset: int) -> defs.OpSchema | None:
    if node.domain not in ("", "ai.onnx"):
        return None
    try:
        return defs.get_schema(node.op_type, opset)
    except defs.SchemaError:
        return None


def _allowed(schema: defs.OpSchema, type_text: str) -> set[str]:
    for constraint in schema.type_constraints:
        if constraint.type_param_str == type_text:
            return set(constraint.allowed_type_strs)
    return {type_text}


def _takes(schema: defs.OpSchema, element: int) -> bool:
    """Whether its outputs can be of the type; of a QuantizeLinear, what it takes."""
    if schema.name == "QuantizeLinear":
        return _input_takes(schema, 0, element)
    return any(_NAMES[element] in _allowed(schema, output.type_str) for output in schema.outputs)


def _input_takes(schema: defs.OpSchema, index: int, element: int) -> bool:
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]
    return _NAMES[element] in _allowed(schema, formal.type_str)
