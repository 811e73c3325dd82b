"""4-bit weights in an ONNX graph, by two of ONNX Runtime's operators: MatMulNBits and GatherBlockQuantized.

Both take a matrix as rows of blocks: of a layer a row is an output, of a table an entry. So a table and the layer that
multiplies by its transpose read the same numbers, stored once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from compress.formats.onnx.domains import STANDARD
from compress.formats.onnx.scope import drop_unused, fresh, names_in
from compress.onnx_export.tied import digest
from compress.quantize.blocks import SIZE, Blocks, packed
from compress.quantize.weights_onnx import quantize_weights, worth

__all__ = ["DOMAIN", "IN_8_BITS", "LAYER", "TABLE", "Matrix", "Place", "matrices", "put", "shared", "weights_of"]

Array = np.ndarray[Any, Any]
DOMAIN = "com.microsoft"
LAYER, TABLE = "MatMulNBits", "GatherBlockQuantized"
RANGE = ("first", "end", "step")
# How the operator multiplies: in float, or by activations that it rounds to 8 bits, each row's block of SIZE by itself.
# That is a quarter faster, and no answer depends on what else is in its batch; but of what stands beside a far larger
# number little is left, and a NaN becomes a number.
IN_FLOAT, IN_8_BITS = 0, 4
SCALE = 4  # bytes of one


@dataclass(frozen=True)
class Place:
    """Where a matrix is read.

    Attributes:
        node: its name.
        kind: a layer that multiplies by it, or a lookup of its rows.
        reads: of a layer, the tensor that it multiplies.
    """

    node: str
    kind: Literal["layer", "table"]
    reads: str = ""


@dataclass(frozen=True)
class Matrix:
    """A weight that becomes 4-bit, whatever it is called and however it is turned at each of its places.

    Attributes:
        weight: the first initializer that holds it.
        turned: whether that holds columns and rows the other way round.
        columns: of it.
        places: that read it.
    """

    weight: str
    turned: bool
    columns: int
    places: tuple[Place, ...] = ()

    @property
    def tables(self) -> bool:
        """Whether rows of it are looked up."""
        return any(place.kind == "table" for place in self.places)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors that are multiplied by it, each once."""
        return tuple(dict.fromkeys(place.reads for place in self.places if place.kind == "layer"))

    def values(self, weights: Mapping[str, TensorProto]) -> Array:
        """Its numbers, float32 [rows, columns]."""
        array = numpy_helper.to_array(weights[self.weight])
        return np.ascontiguousarray(array.T if self.turned else array)

    @property
    def symmetric(self) -> bool:
        """Whether it goes without zero-points.

        Of two zero-points to a byte, ONNX Runtime up to 1.23 reads a table's as if no row ended in half of one.
        """
        return self.tables and self.columns // SIZE % 2 == 1


def matrices(model: ModelProto, exclude: Collection[str] = ()) -> list[Matrix]:
    """What can become 4-bit: matrices of layers that are smaller for it than in 8 bits, and tables of whole blocks.

    Args:
        model: float32, its nodes named, each layer with weights of its own (see `plain`).
        exclude: names of nodes that stay in float.
    """
    weights = weights_of(model.graph)
    found: dict[str, Matrix] = {}
    in_8_bits: set[str] = set()  # tables without whole blocks: a layer that is tied to one reads its 8-bit rows
    for node in model.graph.node:
        told = None if node.name in exclude else _read(node, weights)
        if told is None:
            continue
        name, turned, place = told
        matrix = Matrix(name, turned, weights[name].dims[0 if turned else 1])
        if _row_bytes(matrix.columns) >= matrix.columns + SCALE:  # of few columns, or few beyond whole blocks
            continue
        key = digest(numpy_helper.from_array(matrix.values(weights)))
        if place.kind == "table" and matrix.columns % SIZE:
            in_8_bits.add(key)
        before = found.get(key, matrix)
        found[key] = replace(before, places=(*before.places, place))
    return [matrix for key, matrix in found.items() if key not in in_8_bits]


def _row_bytes(columns: int) -> int:
    """Of a row in 4 bits: whole blocks of codes, and of each a scale and half a byte of zero-point."""
    blocks = math.ceil(columns / SIZE)
    return blocks * (SIZE // 2 + SCALE) + math.ceil(blocks / 2)


def weights_of(graph: GraphProto) -> dict[str, TensorProto]:
    """Initializers that no caller may replace, by name."""
    fed = {value.name for value in graph.input}
    return {tensor.name: tensor for tensor in graph.initializer if tensor.name not in fed}


def _read(node: NodeProto, weights: Mapping[str, TensorProto]) -> tuple[str, bool, Place] | None:
    """The matrix that a node reads, whether it is stored turned, and the place; None where it is none."""
    at = 0 if node.op_type == "Gather" else 1
    tensor = weights.get(node.input[at]) if node.domain in STANDARD and len(node.input) > at else None
    if tensor is None or len(tensor.dims) != 2 or not worth(tensor):
        return None
    told = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "MatMul":
        return tensor.name, True, Place(node.name, "layer", node.input[0])
    if node.op_type == "Gemm" and not told.get("transA") and told.get("alpha", 1.0) == told.get("beta", 1.0) == 1.0:
        return tensor.name, not told.get("transB"), Place(node.name, "layer", node.input[0])
    if node.op_type == "Gather" and told.get("axis", 0) == 0:
        return tensor.name, False, Place(node.name, "table")
    return None


def put(
    model: ModelProto,
    made: Mapping[Matrix, Blocks],
    exclude: Collection[str] = (),
    *,
    in_8_bits: Collection[Matrix] = (),
    apart: bool = False,
) -> None:
    """Let each place read its 4-bit matrix, in place; other weights (convolutions, recurrent layers) become 8-bit.

    Args:
        model: see `matrices`.
        made: of each, its 4-bit numbers.
        exclude: names of nodes that stay in float.
        in_8_bits: which of them multiply activations in 8 bits.
        apart: whether a table that layers share has codes of its own (see `shared`).
    """
    graph = model.graph
    taken = names_in(graph)
    new: dict[str, list[NodeProto]] = {}
    nodes = {node.name: node for node in graph.node}
    for matrix, blocks in made.items():
        stored = _stored(graph, matrix, blocks, taken)
        rows = stored[0]
        if shared(matrix) and apart:
            rows = _added(graph, packed(blocks)[0].reshape(len(blocks.codes), -1), f"{stored[0]}_rows", taken)
        for place in matrix.places:
            node = nodes[place.node]
            if place.kind == "layer":
                level = IN_8_BITS if matrix in in_8_bits else IN_FLOAT
                new[place.node] = _layer(node, stored, matrix, len(blocks.codes), level, taken)
            else:
                new[place.node] = _lookup(node, [rows, *stored[1:]], matrix, blocks, graph, taken)
    rest = [each for node in graph.node for each in new.get(node.name, [node])]
    del graph.node[:]
    graph.node.extend(rest)
    drop_unused(graph)
    quantize_weights(model, exclude)
    if all(entry.domain != DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def shared(matrix: Matrix) -> bool:
    """Whether a table's codes are those of a layer, turned to rows by a Reshape.

    OpenVINO reads no table that a node gives.
    """
    return matrix.tables and bool(matrix.inputs)


def _stored(graph: GraphProto, matrix: Matrix, blocks: Blocks, taken: set[str]) -> list[str]:
    """Add codes, scales and zero-points as initializers; their names."""
    codes, *rest = packed(blocks)
    codes = codes if matrix.inputs else codes.reshape(len(codes), -1)
    parts = zip(("int4", "scale", "zero"), (codes, *rest), strict=True)
    return [_added(graph, array, f"{matrix.weight}_{part}", taken) for part, array in parts]


def _added(graph: GraphProto, array: Array, name: str, taken: set[str]) -> str:
    """Add an initializer; its name."""
    name = fresh(name, taken)
    taken.add(name)
    graph.initializer.append(numpy_helper.from_array(array, name))
    return name


def _layer(
    node: NodeProto, stored: list[str], matrix: Matrix, rows: int, level: int, taken: set[str]
) -> list[NodeProto]:
    bias = node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else ""
    product = fresh(f"{node.output[0]}_product", taken) if bias else node.output[0]
    taken.add(product)
    made = helper.make_node(
        LAYER, [node.input[0], *stored], [product], name=node.name, domain=DOMAIN, K=matrix.columns, N=rows, bits=4,
        block_size=SIZE, accuracy_level=level,
    )  # fmt: skip
    if not bias:
        return [made]
    # The operator takes a bias only since ONNX Runtime 1.19, which fuses this.
    return [made, helper.make_node("Add", [product, bias], list(node.output), name=f"{node.name}_bias")]


def _lookup(
    node: NodeProto, stored: list[str], matrix: Matrix, blocks: Blocks, graph: GraphProto, taken: set[str]
) -> list[NodeProto]:
    """A lookup of 4-bit rows, of ids that a lookup among all of them has let through.

    ONNX Runtime's operator answers an id that its table lacks with zeros, from 1.31 on; a Gather refuses it. What it
    looks up, all ids in order, a Range gives: no byte of the file, and ONNX Runtime makes it as it loads.
    """
    codes, scale, zero = stored
    made: list[NodeProto] = []
    every, known, flat = (fresh(f"{node.output[0]}_{part}", taken) for part in ("every", "known", "rows"))
    taken.update((every, known, flat))
    ends = [np.asarray(number, np.int64) for number in (0, len(blocks.codes), 1)]
    given = [_added(graph, end, f"{node.output[0]}_{part}", taken) for part, end in zip(RANGE, ends, strict=True)]
    made.append(helper.make_node("Range", given, [every], name=fresh(f"{node.name}_every", taken)))
    made.append(helper.make_node("Gather", [every, node.input[1]], [known], name=fresh(f"{node.name}_known", taken)))
    if shared(matrix) and len(_dims(graph, codes)) > 2:
        shape = _added(graph, np.asarray([0, -1], np.int64), f"{codes}_shape", taken)
        made.append(helper.make_node("Reshape", [codes, shape], [flat], name=fresh(f"{node.name}_rows", taken)))
        codes = flat
    given = [codes, known, scale, *([] if matrix.symmetric else [zero])]
    made.append(
        helper.make_node(
            TABLE, given, list(node.output), name=node.name, domain=DOMAIN, gather_axis=0, quantize_axis=1,
            block_size=SIZE,
        )
    )  # fmt: skip
    return made


def _dims(graph: GraphProto, name: str) -> list[int]:
    return next(list(tensor.dims) for tensor in graph.initializer if tensor.name == name)
