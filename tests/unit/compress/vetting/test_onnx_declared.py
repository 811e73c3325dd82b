"""What an ONNX file declares is read from its bytes as onnx reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from compress.formats.onnx.load import load_onnx
from compress.onnx_export.from_file import plain
from compress.vetting.onnx_declared import MOST
from compress.vetting.onnx_wire import Calls, vet_onnx, vet_onnx_bytes

NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
TYPES = {
    TensorProto.FLOAT: "float32", TensorProto.INT64: "int64", TensorProto.STRING: "string", TensorProto.BOOL: "bool",
    TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16", TensorProto.COMPLEX64: "",
}  # fmt: skip
SHAPES = st.none() | st.lists(st.integers(1, 1 << 40) | NAMES | st.none(), max_size=5)


def read(inputs: list[Any], outputs: list[Any], held: tuple[Any, ...] = (), nodes: tuple[Any, ...] = ()) -> Calls:
    graph = helper.make_graph(list(nodes), "g", inputs, outputs, held)
    return vet_onnx_bytes(helper.make_model(graph).SerializeToString(), Path())


@given(st.lists(st.tuples(NAMES, st.sampled_from(list(TYPES)), SHAPES), max_size=4))
def test_tensors_have_the_name_type_and_shape_that_the_file_gives_them(
    tensors: list[tuple[str, int, list[int | str | None] | None]],
) -> None:
    infos = [helper.make_tensor_value_info(*each) for each in tensors]
    expected = [
        (name, TYPES[kind], None if shape is None else tuple(size if isinstance(size, int) else -1 for size in shape))
        for name, kind, shape in tensors
    ]
    found = read(infos, infos[::-1])
    assert [(each.name, each.dtype, each.shape) for each in found.inputs] == expected
    assert [(each.name, each.dtype, each.shape) for each in found.outputs] == expected[::-1]


def test_weights_that_are_inputs_too_need_not_be_given() -> None:
    weight = numpy_helper.from_array(np.zeros(3, np.float32), "w")
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("x", "w")]
    assert [str(each) for each in read(infos, [], (weight,)).inputs] == ["x:float32[3]"]


def test_sparse_weights_that_are_inputs_too_need_not_be_given(tmp_path: Path) -> None:
    """As ONNX Runtime has it: what compress takes, its signature tells and its stages fix."""
    values = numpy_helper.from_array(np.full(1, 2, np.float32), "w")
    places = numpy_helper.from_array(np.zeros(1, np.int64), "w_places")
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("x", "w", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", infos[:2], infos[2:])
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [3]))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    assert [str(each) for each in vet_onnx(path).inputs] == ["x:float32[3]"]
    given = load_onnx(path)
    assert [spec.name for spec in given.signature.inputs] == ["x"]
    plain(made, given.signature, path)
    assert [each.name for each in made.graph.input] == ["x"]


def test_weights_that_stand_before_an_input_take_no_place_of_it() -> None:
    """As files of IR version 3 have it, where each weight is an input."""
    names = [f"w{at}" for at in range(MOST + 9)]
    weights = tuple(numpy_helper.from_array(np.zeros(1, np.float32), name) for name in names)
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in (*names, "x")]
    found = read(infos, infos, weights)
    assert [each.name for each in found.inputs] == ["x"]
    assert len(found.outputs) == MOST


def test_what_a_body_takes_is_no_input_and_a_sequence_is_no_tensor() -> None:
    inner = helper.make_tensor_value_info("inner", TensorProto.FLOAT, [])
    body = helper.make_graph([helper.make_node("Identity", ["c"], ["inner"])], "then", [], [inner])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    taken = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    given = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    found = read([taken], [given], nodes=(branch,))
    assert [str(each) for each in found.inputs] == ["c:bool[]"]
    assert [str(each) for each in found.outputs] == ["y:no tensor[any]"]


@pytest.mark.parametrize("count", [MOST, MOST + 9])
def test_no_more_are_kept_than_a_description_may_name(count: int) -> None:
    infos = [helper.make_tensor_value_info(f"x{at}", TensorProto.FLOAT, [1]) for at in range(count)]
    assert len(read(infos, []).inputs) == MOST


def test_onnxs_own_types_are_those_that_are_known() -> None:
    from compress.vetting.onnx_fields import DTYPES

    for number, name in DTYPES.items():
        if name not in ("string", "bfloat16"):
            assert onnx.helper.tensor_dtype_to_np_dtype(number).name == name
