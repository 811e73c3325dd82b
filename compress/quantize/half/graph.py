"""Turn the float32 of an ONNX graph into half precision, node by node, with casts where the two meet."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper

from compress.formats.onnx.domains import STANDARD
from compress.formats.onnx.scope import bodies, captured, drop_unused, fresh, names_in, opset_of
from compress.quantize.half.mask_chain import mask_chain

__all__ = ["ELEMENT", "LARGEST", "convert", "halved", "lacking", "takes"]

ELEMENT = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
LARGEST = {TensorProto.FLOAT16: 65504.0, TensorProto.BFLOAT16: float.fromhex("0x1.fep127")}
_NAMES = {TensorProto.FLOAT16: "tensor(float16)", TensorProto.BFLOAT16: "tensor(bfloat16)"}


def convert(model: onnx.ModelProto, element: int, keep: Collection[str], saturate: Collection[str] = ()) -> None:
    """Convert in place; inputs and outputs of the graph, and what bodies of If and Loop read, stay float32.

    A node is converted when the operator's own schema takes the type; of such a node, an input that the schema wants
    in float32 (the scales of a Resize) stays. A DequantizeLinear gives the type of its scale.

    Args:
        model: its shapes can be inferred; node names are unique.
        element: TensorProto.FLOAT16 or BFLOAT16.
        keep: names of nodes that stay in float32.
        saturate: names of tensors that are cut to the type's range before they are cast to it; a mask's infinities
            stay what they are.
    """
    graph = model.graph
    opset = opset_of(model)
    floats = _float_tensors(model)
    half: set[str] = set()  # tensors that are half now
    nodes: list[onnx.NodeProto] = []
    casts: dict[tuple[str, int], str] = {}
    fed = {value.name for value in graph.input}  # an input's default may be replaced by the caller: no weight
    weights = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in fed}
    made: dict[str, onnx.TensorProto] = {}
    taken = names_in(graph)
    endless = mask_chain(graph).infinite if saturate else frozenset[str]()

    def new(wish: str) -> str:
        name = fresh(wish, taken)
        taken.add(name)
        return name

    def cast(name: str, wanted: int) -> str:
        given = name
        if name in saturate and wanted == element:
            given = new(f"{name}_cut")
            bounds = [new(f"{name}_{end}") for end in ("least", "most")]
            for bound, value in zip(bounds, (-LARGEST[element], LARGEST[element]), strict=True):
                made[bound] = numpy_helper.from_array(np.float32(value), bound)
            nodes.append(helper.make_node("Clip", [name, *bounds], [given], name=given))
            if name in endless:
                finite, given, infinite = given, new(f"{name}_kept"), new(f"{name}_infinite")
                nodes.append(helper.make_node("IsInf", [name], [infinite], name=infinite))
                nodes.append(helper.make_node("Where", [infinite, name, finite], [given], name=given))
        output = new(f"{name}_cast{wanted}")
        nodes.append(helper.make_node("Cast", [given], [output], name=output, to=wanted))
        return output

    def as_type(name: str, wanted: int) -> str:
        """The tensor in that type: itself, a converted weight, or a cast."""
        if (name in half) == (wanted == element):
            return name
        if (name, wanted) not in casts:
            if name in weights:
                casts[name, wanted] = new(f"{name}_half")
                made[name] = halved(weights[name], casts[name, wanted], element)
            else:
                casts[name, wanted] = cast(name, wanted)
        return casts[name, wanted]

    # Others read these by name: the half one gets a name of its own.
    shown = {output.name for output in graph.output} | {name for node in graph.node for name in captured(node)}
    for node in list(graph.node):
        schema = _schema(node, opset)
        convertible = node.name not in keep and _convertible(node, schema, element, floats)
        for index, name in enumerate(node.input):
            if name in floats:
                fits = convertible and schema is not None and _input_takes(schema, index, element)
                node.input[index] = as_type(name, element if fits else TensorProto.FLOAT)
        if convertible:
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                    attribute.i = element
                if attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT:
                    attribute.t.CopyFrom(halved(attribute.t, attribute.t.name, element))
        nodes.append(node)
        for index, name in enumerate(node.output):
            if not convertible or name not in floats:
                continue
            if name in shown:
                node.output[index] = casts[name, element] = new(f"{name}_half")
                nodes.append(
                    helper.make_node("Cast", [node.output[index]], [name], name=f"{name}_out", to=TensorProto.FLOAT)
                )
            else:
                half.add(name)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(made.values())
    drop_unused(graph)
    del graph.value_info[:]  # of the types before
    onnx.checker.check_model(model)


def takes(model: onnx.ModelProto, node: onnx.NodeProto, element: int) -> bool:
    """Whether the model's opset defines the node's operator in the type."""
    schema = _schema(node, opset_of(model))
    return schema is not None and _takes(schema, element)


def lacking(model: onnx.ModelProto, element: int) -> list[str]:
    """Operators with weights that the model's opset does not define in the type (a Conv in BF16 needs opset 22)."""
    opset = opset_of(model)
    weights = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    found = {
        node.op_type
        for node in model.graph.node
        if weights & set(node.input) and (schema := _schema(node, opset)) is not None and not _takes(schema, element)
    }
    return sorted(found - {"QuantizeLinear", "DequantizeLinear"})


def halved(tensor: onnx.TensorProto, name: str, element: int) -> onnx.TensorProto:
    """A float32 tensor in the type, to the nearest; beyond the type's range, its largest; infinities stay."""
    stored = numpy_helper.to_array(tensor)
    values = np.where(np.isinf(stored), stored, np.clip(stored, -LARGEST[element], LARGEST[element]))
    if element == TensorProto.FLOAT16:
        return numpy_helper.from_array(values.astype(np.float16), name)
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
    if node.domain not in STANDARD:
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


def _convertible(node: onnx.NodeProto, schema: defs.OpSchema | None, element: int, floats: Collection[str]) -> bool:
    """Whether a node gives the type once its inputs, or the attribute that says it, are of the type."""
    if schema is None or bodies(node) or not _takes(schema, element):
        return False
    if node.op_type == "Cast":
        return any(a.name == "to" and a.i == TensorProto.FLOAT for a in node.attribute) or node.input[0] in floats
    if node.op_type in ("Constant", "ConstantOfShape"):
        return any(a.name == "value" and a.t.data_type == TensorProto.FLOAT for a in node.attribute)
    kinds = {_formal(schema.inputs, at).type_str for at, name in enumerate(node.input) if name in floats}
    given = [_formal(schema.outputs, at).type_str for at, name in enumerate(node.output) if name in floats]
    return set(given) <= kinds


def _formal(parameters: Sequence[defs.OpSchema.FormalParameter], index: int) -> defs.OpSchema.FormalParameter:
    return parameters[min(index, len(parameters) - 1)]


def _input_takes(schema: defs.OpSchema, index: int, element: int) -> bool:
    return _NAMES[element] in _allowed(schema, _formal(schema.inputs, index).type_str)
