"""An ONNX file is looked through before a library reads it: what exporters write passes, in one way to be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from onnx import TensorProto, helper, numpy_helper

from compress.errors import SignatureError, StageError
from compress.evaluate.metrics import cosine_similarity
from compress.formats.onnx.read import read_onnx, signature_of_onnx, vetted_onnx
from compress.vetting import onnx_wire
from compress.vetting.onnx_wire import OnnxFileError, vet_onnx, vet_onnx_bytes
from compress.vetting.wire import fields
from tests.hostile.onnx_files import at_an_address, dims, function, functions, model, outside

KINDS = [np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.int8, np.bool_, np.uint64, np.complex64]


def of_tensor(tensor: TensorProto) -> bytes:
    made = model()
    made.graph.initializer[0].CopyFrom(tensor)
    made.graph.initializer[0].name = "w"
    return made.SerializeToString()  # type: ignore[no-any-return]


@given(
    array=st.sampled_from(KINDS).flatmap(
        lambda kind: st_numpy.arrays(kind, st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    ),
    raw=st.booleans(),
)
def test_tensors_of_every_type_pass_and_with_one_more_element_declared_do_not(
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], raw: bool
) -> None:
    tensor = numpy_helper.from_array(array)
    if not raw:
        kind = tensor.data_type
        values = array.flatten().view(np.uint16) if kind == TensorProto.FLOAT16 else array.flatten()
        if kind != TensorProto.FLOAT16:
            tensor = helper.make_tensor("w", kind, array.shape, values.tolist())
    vet_onnx_bytes(of_tensor(tensor), Path())
    tensor.dims.append(array.size + 2)
    if array.size:
        with pytest.raises(OnnxFileError, match="declares"):
            vet_onnx_bytes(of_tensor(tensor), Path())


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1])
def test_halves_of_bytes_are_counted_as_such(kind: int) -> None:
    tensor = TensorProto(data_type=kind, dims=[3], raw_data=b"12")
    vet_onnx_bytes(of_tensor(tensor), Path())
    tensor.dims[0] = 5
    with pytest.raises(OnnxFileError, match="declares"):
        vet_onnx_bytes(of_tensor(tensor), Path())


def test_weights_beside_the_file_pass(tmp_path: Path) -> None:
    made = model()
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert (tmp_path / "m.data").exists()
    assert vetted_onnx(tmp_path / "m.onnx") == tmp_path / "m.onnx"
    (tmp_path / "in").mkdir()
    (tmp_path / "m.data").rename(tmp_path / "in/m.data")
    made = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    made.graph.initializer[0].external_data[0].value = "in/m.data"
    vet_onnx_bytes(made.SerializeToString(), tmp_path)


@pytest.mark.parametrize("again", ["location", "offset", "length"])
def test_a_tensor_that_says_twice_where_its_bytes_are_is_refused(tmp_path: Path, again: str) -> None:
    """Readers take the one or the other."""
    made = model()
    (tmp_path / "real").write_bytes(bytes(64))
    outside("real", offset="0", length="64")(made, tmp_path)
    vet_onnx_bytes(made.SerializeToString(), tmp_path)
    entries = made.graph.initializer[0].external_data
    entries.add().CopyFrom(next(entry for entry in entries if entry.key == again))
    with pytest.raises(OnnxFileError, match="says twice"):
        vet_onnx_bytes(made.SerializeToString(), tmp_path)


def test_a_link_inside_the_folder_passes_and_one_out_of_it_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "real").write_bytes(bytes(64))
    (tmp_path / "real").write_bytes(bytes(64))
    (folder / "inside").symlink_to("real")
    (folder / "outside").symlink_to(tmp_path / "real")
    for name in ("inside", "outside"):
        made = model()
        outside(name)(made, folder)
        (folder / f"{name}.onnx").write_bytes(made.SerializeToString())
    vet_onnx(folder / "inside.onnx")
    with pytest.raises(OnnxFileError, match="link out"):
        vet_onnx(folder / "outside.onnx")


def test_functions_that_end_pass() -> None:
    made = model()
    functions(function("f0", ["f1", "f1"]), function("f1", []))(made, Path())
    vet_onnx_bytes(made.SerializeToString(), Path())


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([["f0"]], "calls itself"),
        ([["f1"], ["f0"]], "calls itself"),
        ([[f"f{at + 1}"] * 10 for at in range(12)] + [[]], "make more than"),
    ],
)
def test_functions_that_do_not_end_are_refused(calls: list[list[str]], says: str) -> None:
    made = model()
    functions(*(function(f"f{at}", called) for at, called in enumerate(calls)))(made, Path())
    with pytest.raises(OnnxFileError, match=says):
        vet_onnx_bytes(made.SerializeToString(), Path())


def test_what_only_reads_a_graph_takes_operators_of_a_library() -> None:
    made = model([helper.make_node("EfficientNMS_TRT", ["x"], ["y"], domain="TRT")])
    vet_onnx_bytes(made.SerializeToString(), Path(), runs=False)
    with pytest.raises(OnnxFileError, match="library"):
        vet_onnx_bytes(made.SerializeToString(), Path())


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data * 2,
        lambda data: data + b"\xfa\x07\x01x",
        lambda data: data + b"\x0b",
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"\x80" * 11,
    ],
    ids=["merged", "an unknown field", "a group", "cut", "nothing", "a number without end"],
)
def test_what_parsers_could_read_differently_is_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(OnnxFileError):
        vet_onnx_bytes(change(model().SerializeToString()), Path())


@pytest.mark.parametrize("open_", [vetted_onnx, read_onnx, signature_of_onnx])
def test_every_way_to_open_one_says_why_not(tmp_path: Path, open_: Callable[[Path], object]) -> None:
    made = model()
    dims(2**25, 2**25)(made, tmp_path)
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(StageError, match="declares"):
        open_(tmp_path / "m.onnx")


@pytest.mark.parametrize("value", ["sequence", "optional", "none"])
def test_an_input_that_is_no_tensor_is_named(tmp_path: Path, value: str) -> None:
    made = model()
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, [4])
    types = {"sequence": helper.make_sequence_type_proto(kind), "optional": helper.make_optional_type_proto(kind)}
    made.graph.input[0].type.CopyFrom(types.get(value, onnx.TypeProto()))
    onnx.save(made, tmp_path / "m.onnx")
    with pytest.raises(StageError, match=r"'x' is .*no tensor"):
        signature_of_onnx(tmp_path / "m.onnx")


def test_sparse_tensors_are_bounded_together() -> None:
    made = model()
    for at in range(3):
        values = numpy_helper.from_array(np.ones(1, np.float32), f"s{at}")
        indices = numpy_helper.from_array(np.zeros(1, np.int64), "i")
        made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [1 << 12, 1 << 13]))
    with pytest.raises(OnnxFileError, match="sparse"):
        vet_onnx_bytes(made.SerializeToString(), Path())
    del made.graph.sparse_initializer[2:]
    vet_onnx_bytes(made.SerializeToString(), Path())


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_both_names_of_the_standard_domain_are_one(domain: str) -> None:
    made = model()
    inside = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    made.functions.append(helper.make_function(domain, "MatMul", ["x", "w"], ["y"], inside, made.opset_import))
    with pytest.raises(OnnxFileError, match="calls itself"):
        vet_onnx_bytes(made.SerializeToString(), Path())


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ([("x", ["batch", 4]), ("z", ["batch", 1 << 27]), ("v", [1 << 27])], "elements"),
        ([("x", None)], "declares no shape"),
        ([("x", ["batch", *[1] * 64])], "dimensions: 65"),
    ],
)
def test_inputs_that_no_array_can_be_made_for_are_refused(tmp_path: Path, inputs: list[Any], match: str) -> None:
    made = model()
    del made.graph.input[:]
    made.graph.input.extend(helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs)
    onnx.save(made, tmp_path / "m.onnx")
    with pytest.raises((StageError, SignatureError), match=match):
        signature_of_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize("shape", [(), (0, 4), (2, 0)])
def test_answers_without_a_batch_or_without_elements_are_compared(shape: tuple[int, ...]) -> None:
    values = np.ones(shape, np.float32)
    alike = cosine_similarity(values, values)
    assert len(alike) == (shape[0] if shape else 1)
    assert np.all(alike == 1)


def test_a_file_of_more_bytes_than_protobuf_holds_is_refused_unread(tmp_path: Path) -> None:
    """One with holes takes no room on a disk, and all of it in memory."""
    path = tmp_path / "model.onnx"
    path.write_bytes(model().SerializeToString())
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    for read in (read_onnx, vetted_onnx, signature_of_onnx):
        with pytest.raises(StageError, match="2 GiB"):
            read(path)


@pytest.mark.parametrize("marker", ["*/_ORT_MEM_ADDR_/*", "*/_ORT_NATIVE_ENDIAN_MEM_ADDR_/*"])
def test_weights_are_in_no_place_of_the_runtimes_memory(tmp_path: Path, marker: str) -> None:
    made = model()
    at_an_address(marker)(made, tmp_path)
    with pytest.raises(OnnxFileError, match="outside of the file's folder"):
        vet_onnx_bytes(made.SerializeToString(), tmp_path)


@pytest.mark.parametrize("letter", ["\u202e", "\u2066", "\u200f", "\u061c", "\u2028", "\x1b"])
def test_names_that_a_terminal_shows_as_others_are_refused(tmp_path: Path, letter: str) -> None:
    made = model()
    made.graph.node[0].name = f"n{letter}"
    with pytest.raises(OnnxFileError, match="control characters"):
        vet_onnx_bytes(made.SerializeToString(), tmp_path)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


COUNT = 30_000
NUMBERS: dict[str, bytes] = {  # of an attribute: ints are its field 8, floats 7
    "behind each other": b"\x40\x05" * COUNT,
    "long ones": (b"\x40" + b"\xff" * 9 + b"\x01") * COUNT,
    "keys in more bytes than they need": b"\xc0\x00\x05" * COUNT,
    "floats": b"\x3d\0\0\x80\x3f" * COUNT,
    "packed": _field(8, b"\x05" * COUNT),
    "packed, a few at a time": _field(8, b"\x05" * 1000) * (COUNT // 1000),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_are_counted_many_at_a_time(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 MB of them took a minute. A parser takes them for as many as are counted."""
    attribute = _field(1, b"a") + NUMBERS[case]
    read = onnx.AttributeProto.FromString(attribute)
    assert len(read.ints) + len(read.floats) == COUNT
    asked = 0
    one = onnx_wire._Scan._varint

    def counting(self: Any, at: int, end: int) -> tuple[int, int]:
        nonlocal asked
        asked += 1
        return one(self, at, end)

    monkeypatch.setattr(onnx_wire._Scan, "_varint", counting)
    scan = onnx_wire._Scan(memoryview(attribute), Path())
    found = scan.message("Attribute", 0, len(attribute), 0, 0)
    assert sum(found.get(8, [])) + sum(found.get(7, [])) == COUNT
    assert asked < 200
    assert sum(1 for _ in fields(memoryview(attribute), 0, len(attribute))) < 100


@pytest.mark.parametrize(
    "end", [b"\x40", b"\x40\x80", b"\x40" + b"\xff" * 10 + b"\x01", b"\x3d\0\0\0", _field(8, b"\x05\x80")]
)
def test_a_number_that_is_cut_is_damage(end: bytes) -> None:
    for begin in (b"", b"\x40\x05" * 5000):
        scan = onnx_wire._Scan(memoryview(begin + end), Path())
        with pytest.raises(OnnxFileError, match="damaged"):
            scan.message("Attribute", 0, len(scan.data), 0, 0)


def test_runs_of_numbers_count_as_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or two fields in turn would be as slow as before."""
    monkeypatch.setattr(onnx_wire, "MAX_PARTS", 1000)
    data = memoryview(b"\x40\x05\x3d\0\0\0\0" * 1000)
    with pytest.raises(OnnxFileError, match="more than 1,000 parts"):
        onnx_wire._Scan(data, Path()).message("Attribute", 0, len(data), 0, 0)
