"""ONNX files, and artifacts whose model.onnx is one."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from tests.hostile.build import attack

Change = Callable[[ModelProto, Path], None]


def model(nodes: list[NodeProto] | None = None, **fields: Any) -> ModelProto:
    """y = x · w, unless it is told otherwise."""
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = helper.make_graph(
        nodes or [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, **fields)


def _attack(name: str, change: Change) -> None:
    """The same file alone, and as an artifact's."""

    def alone(path: Path, canary: Path) -> None:
        made = model()
        change(made, path.parent if path.suffix else path)
        path.write_bytes(made.SerializeToString())

    def within(path: Path, canary: Path) -> None:
        path.mkdir()
        made = model()
        change(made, path)
        artifact(path, made.SerializeToString())

    alone.__name__, within.__name__ = name, f"artifact_of_{name}"
    attack(".onnx", "onnx")(alone)
    attack("", "artifact")(within)


def artifact(folder: Path, content: bytes, **fields: Any) -> None:
    (folder / "model.onnx").write_bytes(content)
    data = {
        "schema_version": 1, "toolkit_version": "0.1.0", "model_file": "model.onnx", "format": "onnx",
        "sha256": hashlib.sha256(content).hexdigest(), "stages": [],
        "signature": {"inputs": ["x:float32[batch,4]"], "outputs": ["y:float32[batch,4]"]},
    }  # fmt: skip
    (folder / "artifact.json").write_text(json.dumps(data | fields))


def outside(location: str, **more: str) -> Change:
    def change(made: ModelProto, _folder: Path) -> None:
        tensor = made.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **more}.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value

    return change


def through_a_link(made: ModelProto, folder: Path) -> None:
    (folder / "linked").unlink(missing_ok=True)
    (folder / "linked").symlink_to("/etc")
    outside("linked/passwd")(made, folder)


def small_beside(made: ModelProto, folder: Path, **more: str) -> None:
    (folder / "small.bin").write_bytes(bytes(16))
    outside("small.bin", **more)(made, folder)


def at_an_address(marker: str) -> Change:
    """ONNX Runtime marks tensors in its memory so; a file of that name and size stands there, so that it is found."""

    def change(made: ModelProto, folder: Path) -> None:
        place = folder / marker
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as file:
            file.truncate(1 << 30)
        outside(marker, offset="4096", length="64")(made, folder)

    return change


def dims(*sizes: int) -> Change:
    def change(made: ModelProto, _folder: Path) -> None:
        made.graph.initializer[0].dims[:] = sizes

    return change


def without_bytes(made: ModelProto, _folder: Path) -> None:
    made.graph.initializer[0].dims[:] = [2**25, 2**25]
    made.graph.initializer[0].ClearField("raw_data")


def custom_operator(made: ModelProto, _folder: Path) -> None:
    made.graph.node[0].domain = "ai.onnx.contrib"
    made.graph.node[0].op_type = "PyOp"
    made.opset_import.append(helper.make_opsetid("ai.onnx.contrib", 1))


def compiled_context(made: ModelProto, _folder: Path) -> None:
    made.graph.node[0].CopyFrom(
        helper.make_node(
            "EPContext", ["x"], ["y"], domain="com.microsoft", embed_mode=0, ep_cache_context="/etc/passwd"
        )
    )
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def nested(depth: int) -> Change:
    def change(made: ModelProto, _folder: Path) -> None:
        inner = helper.make_graph([helper.make_node("Identity", ["x"], ["z"])], "g", [], [])
        for _ in range(depth):
            outer = GraphProto(name="g")
            node = outer.node.add(op_type="If", name="n")
            node.input.append("c")
            node.attribute.add(name="then_branch", type=AttributeProto.GRAPH).g.CopyFrom(inner)
            inner = outer
        made.graph.node.append(inner.node[0])

    return change


def function(name: str, calls: list[str]) -> FunctionProto:
    nodes = [helper.make_node(call, ["x"], [f"y{at}"], domain="mine") for at, call in enumerate(calls)]
    return helper.make_function("mine", name, ["x"], ["y0"], nodes, [helper.make_opsetid("mine", 1)])


def functions(*made_of: FunctionProto) -> Change:
    def change(made: ModelProto, _folder: Path) -> None:
        made.functions.extend(made_of)
        made.opset_import.append(helper.make_opsetid("mine", 1))
        made.graph.node[0].CopyFrom(helper.make_node("f0", ["x"], ["y"], domain="mine"))

    return change


def input_of_a_petabyte(made: ModelProto, _folder: Path) -> None:
    made.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2**25, 2**25]))


def negative_input(made: ModelProto, _folder: Path) -> None:
    made.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [-4, 4]))


def unknown_type(made: ModelProto, _folder: Path) -> None:
    made.graph.initializer[0].data_type = 77


def sparse(made: ModelProto, _folder: Path) -> None:
    values = onnx.numpy_helper.from_array(np.ones(1, np.float32), "s")
    indices = onnx.numpy_helper.from_array(np.zeros(1, np.int64), "i")
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2**25, 2**25]))


def growing(made: ModelProto, folder: Path) -> None:
    """A tensor of 64 KiB, and a million calls of what holds it: 64 GiB."""
    inside = helper.make_node("Constant", [], ["y0"], value=onnx.numpy_helper.from_array(np.ones(1 << 14, np.float32)))
    leaf = helper.make_function("mine", "f2", ["x"], ["y0"], [inside], [helper.make_opsetid("", 20)])
    functions(leaf, function("f1", ["f2"] * 600), function("f0", ["f1"] * 600))(made, folder)


def doubling(made: ModelProto, folder: Path) -> None:
    """A graph that is given to a function stands in it twice, and holds another such call."""
    branch = helper.make_node("If", ["c"], ["y0"])
    for name in ("then_branch", "else_branch"):
        branch.attribute.append(AttributeProto(name=name, ref_attr_name="b", type=AttributeProto.GRAPH))
    taking = helper.make_function("mine", "f0", ["x"], ["y0"], [branch], made.opset_import, ["b"])
    functions(taking)(made, folder)
    inner = helper.make_node("Neg", ["x"], ["t"])
    for at in range(14):
        graph = helper.make_graph([inner], "b", [], [helper.make_tensor_value_info(inner.output[0], 1, None)])
        inner = helper.make_node("f0", ["x"], [f"t{at}"], domain="mine", b=graph)
    inner.output[0] = "y"
    made.graph.node[0].CopyFrom(inner)


for _name, _change in {
    "onnx_with_weights_by_an_absolute_path": outside("/etc/passwd"),
    "onnx_with_weights_above": outside("../../../../etc/passwd"),
    "onnx_with_weights_above_in_the_middle": outside("a/../../../../etc/passwd"),
    "onnx_with_weights_through_a_link": through_a_link,
    "onnx_with_weights_on_a_share": outside("\\\\host\\share"),
    "onnx_with_weights_in_a_device": outside("../../../../dev/zero"),
    "onnx_with_weights_at_an_address": at_an_address("*/_ORT_MEM_ADDR_/*"),
    "onnx_with_weights_at_an_address_of_any_order": at_an_address("*/_ORT_NATIVE_ENDIAN_MEM_ADDR_/*"),
    "onnx_with_weights_nowhere": outside("nothing.bin"),
    "onnx_with_more_weights_than_are_there": small_beside,
    "onnx_with_a_negative_offset": lambda made, folder: small_beside(made, folder, offset="-8"),
    "onnx_with_an_offset_of_64_bits": lambda made, folder: small_beside(made, folder, offset=str(2**64 + 1)),
    "onnx_with_a_length_of_a_petabyte": lambda made, folder: small_beside(made, folder, length=str(2**50)),
    "onnx_of_a_petabyte": dims(2**25, 2**25),
    "onnx_with_dimensions_that_overflow": dims(2**32, 2**32, 2),
    "onnx_with_negative_dimensions": dims(-4, -4),
    "onnx_with_many_dimensions": dims(*[1] * 100_000),
    "onnx_of_a_petabyte_without_bytes": without_bytes,
    "onnx_with_an_operator_of_a_library": custom_operator,
    "onnx_with_a_compiled_context": compiled_context,
    "onnx_nested": nested(30),
    "onnx_whose_function_calls_itself": functions(function("f0", ["f0"])),
    "onnx_whose_functions_explode": functions(
        *(function(f"f{at}", [f"f{at + 1}"] * 10) for at in range(12)), function("f12", [])
    ),
    "onnx_whose_functions_are_three_thousand_deep": functions(
        *(function(f"f{at}", [f"f{at + 1}"] if at < 3000 else []) for at in reversed(range(3001)))
    ),
    "onnx_whose_functions_grow": growing,
    "onnx_whose_functions_double_graphs": doubling,
    "onnx_with_an_unknown_type": unknown_type,
    "onnx_with_a_sparse_petabyte": sparse,
}.items():
    _attack(_name, _change)


@attack(".onnx", "onnx")
def onnx_with_an_input_of_a_petabyte(path: Path, canary: Path) -> None:
    del canary
    made = model()
    input_of_a_petabyte(made, path)
    path.write_bytes(made.SerializeToString())


@attack(".onnx", "onnx")
def onnx_with_a_negative_input(path: Path, canary: Path) -> None:
    del canary
    made = model()
    negative_input(made, path)
    path.write_bytes(made.SerializeToString())


def varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


@attack(".onnx", "onnx")
def onnx_nested_a_thousand_times(path: Path, canary: Path) -> None:
    """Deeper than protobuf's own writer goes: node, attribute, graph, again and again."""
    del canary
    inner = b""
    for _ in range(1000):
        for key in (b"\x32", b"\x2a", b"\x0a"):
            inner = key + varint(len(inner)) + inner
    path.write_bytes(model().SerializeToString() + b"\x3a" + varint(len(inner)) + inner)


@attack(".onnx", "onnx")
def onnx_of_two_million_nodes(path: Path, canary: Path) -> None:
    """Two bytes each in the file, a hundred in memory."""
    del canary
    nodes = b"\x0a\x00" * 2_050_000
    path.write_bytes(b"\x08\x0a\x3a" + varint(len(nodes)) + nodes)


@attack(".onnx", "onnx")
def onnx_whose_names_command_a_terminal(path: Path, canary: Path) -> None:
    del canary
    made = model()
    made.graph.node[0].name = "\x1b]0;owned\x07\x1b[2J"
    path.write_bytes(made.SerializeToString())


@attack(".onnx", "onnx")
def onnx_whose_names_are_read_backwards(path: Path, canary: Path) -> None:
    """What a terminal or a page shows of such a name is another one."""
    del canary
    made = model()
    made.graph.node[0].name = "\u202exnno.\u2066"
    path.write_bytes(made.SerializeToString())


@attack(".onnx", "onnx", harmless=True)
def onnx_whose_names_are_markup(path: Path, canary: Path) -> None:
    """Its report is printed by rich, which has tags of its own."""
    del canary
    nodes = [helper.make_node("MatMul", ["x", "w"], ["[/z]"], name="[/n]")]
    made = model([*nodes, helper.make_node("Re[/lu]", ["[/z]"], ["y"], name="[link=x]n")])
    path.write_bytes(made.SerializeToString())


@attack(".onnx", "onnx")
def onnx_that_is_two_formats(path: Path, canary: Path) -> None:
    """A name that makes it ONNX Runtime's own format, too."""
    del canary
    path.write_bytes(b"\x12\x06__ORTM" + model().SerializeToString())


@attack(".onnx", "onnx")
def onnx_with_two_graphs(path: Path, canary: Path) -> None:
    """Parsers merge them."""
    del canary
    path.write_bytes(model().SerializeToString() * 2)


@attack(".onnx", "onnx")
def onnx_with_a_length_beyond_its_end(path: Path, canary: Path) -> None:
    del canary
    path.write_bytes(b"\x08\x0a\x3a" + varint(2**62))


@attack(".onnx", "onnx")
def onnx_that_is_text(path: Path, canary: Path) -> None:
    del canary
    path.write_text("no model")


@attack(".onnx", "onnx")
def onnx_that_is_empty(path: Path, canary: Path) -> None:
    del canary
    path.write_bytes(b"")


@attack(".onnx", "onnx")
def onnx_that_is_cut(path: Path, canary: Path) -> None:
    del canary
    path.write_bytes(model().SerializeToString()[:-40])


@attack(".onnx", "onnx")
def onnx_with_a_varint_without_end(path: Path, canary: Path) -> None:
    del canary
    path.write_bytes(b"\xff" * 10_000 + struct.pack("<Q", 0))


@attack("", "artifact")
def artifact_that_names_a_file_elsewhere(path: Path, canary: Path) -> None:
    del canary
    path.mkdir()
    artifact(path, model().SerializeToString(), model_file="../../../../etc/passwd")


@attack("", "artifact")
def artifact_nested_without_end(path: Path, canary: Path) -> None:
    del canary
    path.mkdir()
    artifact(path, b"")
    (path / "artifact.json").write_text("[" * 200_000)


@attack("", "artifact")
def artifact_whose_file_is_a_link_to_itself(path: Path, canary: Path) -> None:
    del canary
    path.mkdir()
    artifact(path, b"")
    (path / "model.onnx").unlink()
    (path / "model.onnx").symlink_to("model.onnx")


@attack("", "artifact")
def artifact_whose_words_are_tables(path: Path, canary: Path) -> None:
    del canary
    path.mkdir()
    artifact(path, model().SerializeToString(), format={"a": 1})


@attack("", "artifact")
def artifact_whose_metadata_is_a_pipe(path: Path, canary: Path) -> None:
    """To open it waits for somebody who writes."""
    del canary
    path.mkdir()
    artifact(path, model().SerializeToString())
    (path / "artifact.json").unlink()
    os.mkfifo(path / "artifact.json")
