"""A file is read without its large weights: everything else is there, and what is no ONNX file is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from compress.formats.onnx.outline import outline
from compress.runtime.measure import onnx_layer_bytes, onnx_params

VALUES = ("float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data")
KINDS = (np.float32, np.float64, np.float16, np.int8, np.uint8, np.int64)


def model(*weights: onnx.TensorProto) -> onnx.ModelProto:
    nodes = [helper.make_node("Identity", [w.name], [f"{w.name}_out"], name=w.name) for w in weights]
    out = [helper.make_tensor_value_info(f"{w.name}_out", w.data_type, list(w.dims)) for w in weights]
    graph = helper.make_graph(nodes, "g", [], out, list(weights), doc_string="told")
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, producer_name="a test")
    onnx.helper.set_model_props(made, {"key": "value"})
    return made


def without_large(whole: onnx.ModelProto, largest: int = 1024) -> onnx.ModelProto:
    """As an outline is meant to be, by way of protobuf itself."""
    kept = onnx.ModelProto.FromString(whole.SerializeToString())
    for tensor in kept.graph.initializer:
        if int(np.prod(tensor.dims)) > largest:
            for name in VALUES:
                tensor.ClearField(name)
    return kept


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 30), max_size=2), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_small_weights_are_kept_whole_and_large_ones_by_type_and_dimensions(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[type, list[int], bool]]
) -> None:
    weights = []
    for at, (kind, shape, large) in enumerate(drawn):
        dims = [300, 300] if large else shape
        weights.append(numpy_helper.from_array(np.full(dims, at, kind), f"w{at}"))
    whole = model(*weights)
    path = tmp_path_factory.mktemp("outline") / "model.onnx"
    onnx.save(whole, path)
    assert outline(path) == without_large(whole)


def test_weights_that_are_not_written_raw_are_left_out_too(tmp_path: Path) -> None:
    whole = model(
        helper.make_tensor("floats", TensorProto.FLOAT, [200, 200], [0.5] * 40_000),
        helper.make_tensor("wholes", TensorProto.INT64, [40_000], [2**40] * 40_000),
    )
    onnx.save(whole, tmp_path / "model.onnx")
    found = outline(tmp_path / "model.onnx")
    assert found == without_large(whole)
    assert len(found.SerializeToString()) < 1000


def test_external_data_is_not_read(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((300, 300), np.float32), "w")
    onnx.save(model(weight), tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin")
    (tmp_path / "weights.bin").unlink()
    assert list(outline(tmp_path / "model.onnx").graph.initializer[0].dims) == [300, 300]


@pytest.mark.parametrize("left", [0, 1, 30, 0.5, 0.9, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, left: float) -> None:
    whole = model(numpy_helper.from_array(np.ones((300, 300), np.float32), "w")).SerializeToString()
    cut = whole[: int(left * len(whole)) if isinstance(left, float) else left]
    (tmp_path / "model.onnx").write_bytes(cut)
    with pytest.raises(DecodeError):
        outline(tmp_path / "model.onnx")


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "model.onnx"
    path.write_bytes(data)
    try:
        outline(path)
    except DecodeError:
        return


@pytest.mark.parametrize(
    ("kind", "bits"), [("FLOAT", 32), ("FLOAT16", 16), ("BFLOAT16", 16), ("INT8", 8), ("DOUBLE", 64), ("INT4", 4)]
)
def test_bytes_and_counts_follow_from_types_and_dimensions(tmp_path: Path, kind: str, bits: int) -> None:
    weight = TensorProto(name="w", data_type=getattr(TensorProto, kind), dims=[512, 512])
    weight.raw_data = bytes(512 * 512 * bits // 8)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 512]) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="m")], "g", *([v] for v in values), [weight]
    )
    (tmp_path / "model.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    assert onnx_layer_bytes(tmp_path / "model.onnx") == {"m": len(weight.raw_data)}
    assert onnx_params(tmp_path / "model.onnx") == 512 * 512
