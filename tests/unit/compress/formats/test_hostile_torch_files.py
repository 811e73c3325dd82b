"""Files that torch.save did not write as they are: none runs code, costs more than its bytes, or ends in a traceback."""

from __future__ import annotations

import contextlib
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from compress.cli import main
from compress.errors import CheckpointError, ToolkitError
from compress.formats.checkpoint import load, save
from compress.formats.native.graph import GraphError, from_data
from compress.formats.native.layers import LayerError, layer_of, record_of
from compress.formats.pickles import machine as pickle_machine
from tests.models import mlp

X = "x:float32[batch,4]"


# --- pickles, written by hand ------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def name(full: str) -> bytes:
    module, _, attribute = full.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def items(*parts: bytes) -> bytes:
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


def called(full: str, *args: bytes) -> bytes:
    return name(full) + items(*args) + pickle.REDUCE


def instance(full: str, *args: bytes, state: bytes = b"") -> bytes:
    return name(full) + items(*args) + pickle.NEWOBJ + (state + pickle.BUILD if state else b"")


def mapping(*pairs: tuple[bytes, bytes]) -> bytes:
    return pickle.EMPTY_DICT + pickle.MARK + b"".join(key + value for key, value in pairs) + pickle.SETITEMS


def storage(key: str = "0", numel: int = 4, kind: str = "torch.FloatStorage") -> bytes:
    return items(text("storage"), name(kind), text(key), text("cpu"), number(numel)) + pickle.BINPERSID


def tensor(size: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), offset: int = 0, memory: bytes = b"") -> bytes:
    sizes, strides = items(*map(number, size)), items(*map(number, stride))
    hooks = called("collections.OrderedDict")
    return called(
        "torch._utils._rebuild_tensor_v2",
        memory or storage(),
        number(offset),
        sizes,
        strides,
        pickle.NEWFALSE,
        hooks,
    )


def state_dict(value: bytes) -> bytes:
    return mapping((text("weight"), value))


def archive(path: Path, body: bytes, **storages: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.PROTO + b"\x02" + body + pickle.STOP)
        file.writestr("archive/byteorder", "little")
        for key, data in ({"0": bytes(16)} | storages).items():
            file.writestr(f"archive/data/{key}", data)
    return path


def touch(owned: Path) -> bytes:
    return called("posix.system", text(f"touch {owned}"))


PICKLES: dict[str, Callable[[Path], bytes]] = {
    "a call": touch,
    "a call among weights": lambda owned: state_dict(tensor()) + pickle.POP + touch(owned),
    "a call by an older opcode": lambda owned: b"(Vtouch x\nios\nsystem\n",
    "a call by an object's opcode": lambda owned: pickle.MARK + name("posix.system") + text("touch x") + pickle.OBJ,
    "a call by an extension's number": lambda owned: pickle.EXT1 + b"\x01",
    "a name on the stack": lambda owned: text("posix") + text("system") + pickle.STACK_GLOBAL + items(text("touch x")) + pickle.REDUCE,
    "eval in a container": lambda owned: called("builtins.set", pickle.EMPTY_LIST + called("builtins.eval", text("1")) + pickle.APPEND),
    "a function of torch.nn.functional": lambda owned: called("torch.nn.functional.handle_torch_function", name("posix.system"), pickle.EMPTY_TUPLE),
    "a harmless function of torch.nn.functional": lambda owned: state_dict(called("torch.nn.functional.relu", tensor())),
    "torch.load by its name": lambda owned: called("torch.load", text("/etc/passwd")),
    "a class of torch.nn with arguments": lambda owned: called("torch.nn.modules.linear.Linear", number(1 << 20), number(1 << 20)),
    "a class of torch.nn made with arguments": lambda owned: instance("torch.nn.modules.linear.Linear", number(4), number(4)),
    "state given to a class": lambda owned: name("torch.nn.modules.linear.Linear") + mapping((text("forward"), pickle.NONE)) + pickle.BUILD,
    "state given to a function": lambda owned: name("torch._utils._rebuild_tensor_v2") + mapping((text("__defaults__"), pickle.NONE)) + pickle.BUILD,
    "state given to a tensor": lambda owned: state_dict(tensor() + mapping((text("detach"), name("collections.OrderedDict"))) + pickle.BUILD),
    "items set in a tensor": lambda owned: state_dict(tensor() + number(0) + number(1) + pickle.SETITEM),
    "items appended to a class": lambda owned: name("collections.OrderedDict") + number(1) + pickle.APPEND,
    "a tensor of a class of the file": lambda owned: state_dict(called("torch._tensor._rebuild_from_type_v2", name("torch._utils._rebuild_tensor_v2"), name("posix.system"), items(), pickle.NONE)),
    "a rebuild that calls a stranger": lambda owned: state_dict(called("torch._tensor._rebuild_from_type_v2", name("posix.system"), name("torch.Tensor"), items(text("touch x")), pickle.NONE)),
    "a storage that is a stranger's": lambda owned: state_dict(tensor(memory=items(text("storage"), name("posix.system"), text("0"), text("cpu"), number(4)) + pickle.BINPERSID)),
    "a persistent id that is none": lambda owned: text("storage") + pickle.BINPERSID,
    "numpy's reconstruct on a class": lambda owned: called("numpy.core.multiarray._reconstruct", name("posix.system"), items(number(0)), pickle.NONE),
    "strides beyond the storage": lambda owned: state_dict(tensor((4,), (1 << 40,))),
    "an offset beyond the storage": lambda owned: state_dict(tensor((4,), (1,), 1)),
    "a negative stride": lambda owned: state_dict(tensor((4,), (-1,), 3)),
    "a negative size": lambda owned: state_dict(tensor((-4,), (1,))),
    "a size that is no number": lambda owned: state_dict(called("torch._utils._rebuild_tensor_v2", storage(), number(0), items(text("4")), items(number(1)), pickle.NEWFALSE, pickle.NONE)),
    "sizes that overflow": lambda owned: state_dict(tensor((1 << 40, 1 << 40), (0, 0))),
    "a petabyte shown through one number": lambda owned: state_dict(tensor((1 << 48,), (0,))),
    "a storage larger than its bytes": lambda owned: state_dict(tensor(memory=storage(numel=1 << 40))),
    "a storage that is not there": lambda owned: state_dict(tensor(memory=storage("../../../etc/passwd"))),
    "a storage of so many numbers": lambda owned: state_dict(tensor(memory=storage(numel=10**5000))),
    "a negative storage": lambda owned: state_dict(tensor(memory=storage(numel=-4))),
    "a sparse tensor": lambda owned: state_dict(called("torch._utils._rebuild_sparse_tensor", pickle.NONE, items())),
    "a quantized tensor": lambda owned: state_dict(called("torch._utils._rebuild_qtensor", storage(kind="torch.QInt8Storage"), number(0))),
    "a tensor as a key": lambda owned: mapping((tensor(), number(1))),
    "a list as a key": lambda owned: mapping((pickle.EMPTY_LIST, number(1))),
    "a million dimensions": lambda owned: state_dict(tensor((1,) * 100_000, (1,) * 100_000)),
    "numbers that hash alike as keys": lambda owned: mapping(*((number(index * ((1 << 61) - 1)), pickle.NONE) for index in range(2, 9))),
    "millions of containers": lambda owned: pickle.EMPTY_SET * 100_001,
    "a long text encoded again and again": lambda owned: (
        text("x" * 1_000_000) + pickle.BINPUT + b"\x00"
        + (name("_codecs.encode") + pickle.BINGET + b"\x00" + text("latin1") + pickle.TUPLE2 + pickle.REDUCE) * 100
    ),
    "a layer whose name moves the cursor": lambda owned: instance("torch.nn.modules.\x1b[2J.Linear", state=pickle.EMPTY_DICT),
    "a key nested deep": lambda owned: mapping((pickle.EMPTY_TUPLE + pickle.TUPLE1 * 50_000, number(1))),
    "lists nested deep": lambda owned: pickle.EMPTY_LIST * 50_000 + pickle.APPEND * 49_999,
    "a long list copied for each byte": lambda owned: (
        pickle.EMPTY_LIST + pickle.BINPUT + b"\x00" + pickle.MARK + pickle.NONE * 20_000 + pickle.APPENDS
        + (name("builtins.set") + pickle.BINGET + b"\x00" + pickle.TUPLE1 + pickle.REDUCE) * 101
    ),
    "a list in itself": lambda owned: pickle.EMPTY_LIST + pickle.BINPUT + b"\x00" + pickle.BINGET + b"\x00" + pickle.APPEND,
    "a dict in itself": lambda owned: pickle.EMPTY_DICT + pickle.BINPUT + b"\x00" + text("model") + pickle.BINGET + b"\x00" + pickle.SETITEM,
    "a text longer than the file": lambda owned: pickle.BINUNICODE + b"\xff\xff\xff\xff" + b"x",
    "bytes longer than the file": lambda owned: pickle.BINBYTES8 + b"\xff" * 8 + b"x",
    "a number of a million digits": lambda owned: mapping((text("format"), text("compress.model")), (text("version"), pickle.LONG4 + struct.pack("<i", 500_000) + b"\x7f" * 500_000)),
    "a mark that is not there": lambda owned: pickle.TUPLE,
    "an empty stack": lambda owned: b"",
    "a memo that is not there": lambda owned: pickle.BINGET + b"\x07",
    "a name that breaks lines": lambda owned: name("posix.sys\ttem") + pickle.EMPTY_TUPLE + pickle.REDUCE,
    "a format of a kind of its own": lambda owned: mapping((text("format"), instance("argparse.Namespace")), (text("version"), number(1))),
    "a version that is an object": lambda owned: mapping((text("format"), text("compress.model")), (text("version"), instance("argparse.Namespace"))),
    "no version": lambda owned: mapping((text("format"), text("compress.model"))),
    "a graph that is an object": lambda owned: mapping((text("format"), text("compress.model")), (text("version"), number(1)), (text("graph"), instance("argparse.Namespace"))),
}  # fmt: skip


@pytest.mark.parametrize("attack", PICKLES)
def test_a_pickle_that_does_more_than_hold_tensors_is_refused_in_three_lines(
    tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owned = tmp_path / "owned"
    monkeypatch.chdir(tmp_path)
    if "millions" in attack or "copied" in attack:  # the same bounds, sooner
        monkeypatch.setattr(pickle_machine, "_OPCODES", 100_000)
        monkeypatch.setattr(pickle_machine, "_COPIES", 1_000_000)
    path = archive(tmp_path / "model.pt", PICKLES[attack](owned))
    with pytest.raises(SystemExit) as left:
        main(["inspect", str(path), "--input", X, "--model", "torch.nn:Identity"])
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert [line.split(":")[0].strip() for line in told.splitlines()] == ["error", "why", "mend"]
    assert all(char.isprintable() or char == "\n" for char in told)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.pt"]


@pytest.mark.parametrize(
    "attack", ["a call", "strides beyond the storage", "a quantized tensor", "a text longer than the file"]
)
def test_legacy_files_are_read_by_the_same_machine(tmp_path: Path, attack: str) -> None:
    header = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}]
    body = pickle.PROTO + b"\x02" + PICKLES[attack](tmp_path / "owned") + pickle.STOP
    path = tmp_path / "model.pt"
    path.write_bytes(b"".join(pickle.dumps(part, 2) for part in header) + body + pickle.dumps(["0"], 2) + bytes(24))
    with pytest.raises(CheckpointError):
        load(path, inputs=[X], model="tests.models:mlp")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("change", ["numel", "keys", "short", "big"])
def test_legacy_storages_are_no_larger_than_the_file(tmp_path: Path, change: str) -> None:
    header = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}]
    numel = 1 << 40 if change == "big" else 4
    memory = items(text("storage"), name("torch.FloatStorage"), text("0"), text("cpu"), number(numel), pickle.NONE)
    body = pickle.PROTO + b"\x02" + state_dict(tensor(memory=memory + pickle.BINPERSID)) + pickle.STOP
    keys = pickle.dumps(["1" if change == "keys" else "0"], 2)
    data = struct.pack("<q", 1 << 50 if change == "numel" else 4) + bytes(8 if change == "short" else 16)
    path = tmp_path / "model.pt"
    path.write_bytes(b"".join(pickle.dumps(part, 2) for part in header) + body + keys + data)
    with pytest.raises(CheckpointError):
        load(path, inputs=[X], model="tests.models:mlp")


# --- archives ----------------------------------------------------------------------------------------------------


def _changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _deflated(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(
            "archive/data.pkl", pickle.PROTO + b"\x02" + state_dict(tensor(memory=storage(numel=1 << 22))) + b"."
        )
        file.writestr("archive/data/0", bytes(1 << 24))


def _twice(path: Path) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("archive/data.pkl", pickle.PROTO + b"\x02" + called("posix.system", text("id")) + b".")


def _lying(path: Path) -> None:
    """The directory says that the last storage is 2 GiB, and has it stored."""
    with zipfile.ZipFile(path) as file:
        size = file.getinfo("archive/data/0").file_size
    data = path.read_bytes()
    at = data.index(b"PK\x01\x02", data.rindex(b"archive/data/0") - 100)
    path.write_bytes(
        data[: at + 20]
        + data[at + 20 :].replace(struct.pack("<II", size, size), struct.pack("<II", 1 << 31, 1 << 31), 1)
    )


def _overlapping(path: Path) -> None:
    """Every entry of the directory shows the same bytes, so that few of them become many."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        first = file.getinfo("archive/data.pkl").header_offset
    at = 0
    while (at := data.find(b"PK\x01\x02", at)) >= 0:
        data[at + 42 : at + 46] = struct.pack("<I", first)
        at += 4
    path.write_bytes(bytes(data))


ARCHIVES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bytes were changed": (lambda path: _changed(path, lambda data: data.replace(b"weight", b"weighs", 1)), "checksum"),
    "an entry is compressed": (_deflated, "compressed"),
    "an entry is there twice": (_twice, "two entries"),
    "an entry is larger than the file": (_lying, "contradicts"),
    "entries overlap": (_overlapping, ""),
    "the numbers are big-endian": (lambda path: _big(path), "big-endian"),
}


def _big(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.PROTO + b"\x02" + state_dict(tensor()) + b".")
        file.writestr("archive/data/0", bytes(16))
        file.writestr("archive/byteorder", "big")


@pytest.mark.parametrize("damage", ARCHIVES)
def test_an_archive_that_is_not_as_torch_writes_it_is_refused_before_it_is_read(tmp_path: Path, damage: str) -> None:
    path = archive(tmp_path / "model.pt", state_dict(tensor()))
    change, why = ARCHIVES[damage]
    change(path)
    with pytest.raises(CheckpointError) as caught:
        load(path, inputs=[X], model="tests.models:mlp")
    assert why in caught.value.why


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_pickle_loads_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.pt"
    save(mlp(), path, inputs=X)
    with zipfile.ZipFile(path) as file:
        entries = {entry: file.read(entry) for entry in file.namelist()}
    inner = next(entry for entry in entries if entry.endswith("data.pkl"))
    body = bytearray(entries[inner])
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(2, len(body) - 1))
        if data.draw(st.booleans()):
            body[at] = data.draw(st.integers(0, 255))
        else:
            body[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    with zipfile.ZipFile(path, "w") as file:
        for entry, content in entries.items():
            file.writestr(entry, bytes(body) if entry == inner else content)
    with contextlib.suppress(ToolkitError):
        load(path, inputs=[X])


# --- graphs ------------------------------------------------------------------------------------------------------


class Text(str):
    """Whose repr is code."""

    __slots__ = ()

    def __repr__(self) -> str:
        raise AssertionError("its repr was run")

    __str__ = __format__ = __hash__ = __repr__  # type: ignore[assignment]


class Whole(int):
    def __repr__(self) -> str:
        raise AssertionError("its repr was run")


def node(**changes: Any) -> dict[str, Any]:
    return {
        "name": "n",
        "op": "call_function",
        "target": "torch.relu",
        "args": {"tuple": [{"node": "x"}]},
        "kwargs": {"dict": []},
    } | changes


def graph(*nodes: Any, **tables: Any) -> dict[str, Any]:
    start = node(name="x", op="placeholder", target="x", args={"tuple": []})
    return {"nodes": [start, *nodes], "modules": {}, "parameters": {}, "buffers": {}} | tables


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"list": [value]}
    return value


def doubled(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"list": [value, value]}
    return value


LAYER = record_of(nn.Linear(4, 4), {})
CODE = "x'); __import__('os').system('touch owned'); ('"
GRAPHS: dict[str, Callable[[], Any]] = {
    "an argument with a repr of its own": lambda: graph(node(args={"tuple": [object()]})),
    "a text of a subclass": lambda: graph(node(args={"tuple": [{"node": "x"}, Text(CODE)]})),
    "a number of a subclass": lambda: graph(node(args={"tuple": [{"node": "x"}, Whole(3)]})),
    "a tensor as an argument": lambda: graph(node(args={"tuple": [{"node": "x"}, torch.ones(2)]})),
    "a complex number": lambda: graph(node(args={"tuple": [1j]})),
    "bytes": lambda: graph(node(args={"tuple": [b"x"]})),
    "a number of a million digits": lambda: graph(node(args={"tuple": [1 << 3_000_000]})),
    "arguments nested deep": lambda: graph(node(args={"tuple": [nested(5000)]})),
    "arguments that double": lambda: graph(node(args={"tuple": [doubled(15)]}), *(node(name=f"n{i}", args={"tuple": [doubled(15)]}) for i in range(40))),
    "a text that breaks lines": lambda: graph(node(args={"tuple": ["a\nimport os"]})),
    "a key that is code": lambda: graph(node(kwargs={"dict": [[CODE, 1]]})),
    "a key that is a keyword": lambda: graph(node(kwargs={"dict": [["lambda", 1]]})),
    "a key of a subclass": lambda: graph(node(kwargs={"dict": [[Text("a"), 1]]})),
    "a key of a dict that is a list": lambda: graph(node(args={"tuple": [{"dict": [[[1], 1]]}]})),
    "arguments that are no tuple": lambda: graph(node(args={"list": []})),
    "an operation of no kind": lambda: graph(node(op="root")),
    "an operation of a subclass": lambda: graph(node(op=Text("call_function"))),
    "a target that is a function": lambda: graph(node(target=torch.relu)),
    "a target of a subclass": lambda: graph(node(target=Text("torch.relu"))),
    "a method of a number": lambda: graph(node(op="call_method", target="item", args={"tuple": [5]})),
    "a method that is private": lambda: graph(node(op="call_method", target="__reduce_ex__")),
    "a method that gives memory": lambda: graph(node(op="call_method", target="set_")),
    "a method of storages": lambda: graph(node(op="call_method", target="untyped_storage")),
    "a kernel that trusts its arguments": lambda: graph(node(target="torch.fbgemm_linear_int8_weight")),
    "a function that is private": lambda: graph(node(target="torch._make_dual")),
    "a file of numbers": lambda: graph(node(target="torch.from_file", args={"tuple": ["/etc/passwd"]})),
    "a layer that is not there": lambda: graph(node(op="call_module", target="layer")),
    "a layer named forward": lambda: graph(node(op="call_module", target="forward"), modules={"forward": LAYER}),
    "a layer named like a part of graphs": lambda: graph(node(op="call_module", target="graph"), modules={"graph": LAYER}),
    "a layer in a name that is private": lambda: graph(node(op="call_module", target="__class__.a"), modules={"__class__.a": LAYER}),
    "a layer whose name is code": lambda: graph(node(op="call_module", target=CODE), modules={CODE: LAYER}),
    "a layer whose name breaks lines": lambda: graph(modules={"a\n": LAYER}),
    "a layer whose path is endless": lambda: graph(modules={"a." * 100_000 + "a": LAYER}),
    "a layer in a layer": lambda: graph(modules={"a": LAYER, "a.weight": LAYER}),
    "an attribute that is a layer": lambda: graph(node(op="get_attr", target="layer", args={"tuple": []}), modules={"layer": LAYER}),
    "an attribute that is forward": lambda: graph(node(op="get_attr", target="forward", args={"tuple": []})),
    "an attribute of a layer that is a method": lambda: graph(node(op="get_attr", target="a.extra_repr", args={"tuple": []}), modules={"a": LAYER}),
    "a tensor in a layer that has none such": lambda: graph(modules={"a": LAYER}, parameters={"a.forward": torch.ones(1)}),
    "a tensor of another size in a layer": lambda: graph(modules={"a": LAYER}, parameters={"a.weight": torch.ones(1)}),
    "a parameter that is none": lambda: graph(parameters={"a": "text"}),
    "a parameter named training": lambda: graph(parameters={"training": torch.ones(1)}),
    "a placeholder whose default is a node": lambda: graph(node(op="placeholder", target="y")),
    "a layer named by a keyword": lambda: graph(node(op="call_module", target="class"), modules={"class": LAYER}),
    "a target as long as a book": lambda: graph(node(target="a" * 1_000_000)),
    "a placeholder that holds code": lambda: graph(node(op="placeholder", target="y", args={"tuple": [object()]})),
    "an unknown device": lambda: graph(node(args={"tuple": [{"device": "cpu\n"}]})),
    "a torch constant that is a function": lambda: graph(node(args={"tuple": [{"torch": "load"}]})),
    "a kind of argument that is none": lambda: graph(node(args={"tuple": [{"code": "1"}]})),
    "two kinds in one": lambda: graph(node(args={"tuple": [{"list": [], "tuple": []}]})),
    "nodes that are a tuple": lambda: {**graph(), "nodes": ()},
    "so many nodes": lambda: {**graph(), "nodes": [node()] * 1_000_000},
    "a node that uses a later one": lambda: graph(node(args={"tuple": [{"node": "later"}]})),
    "a node after the output": lambda: graph(node(name="o", op="output", args={"tuple": [{"node": "x"}]}), node()),
    "no tables": lambda: {"nodes": []},
    "no mapping": lambda: ["nodes"],
}  # fmt: skip


@pytest.mark.parametrize("attack", [case for case in GRAPHS if case != "a node after the output"])
def test_a_graph_says_plain_words_or_is_refused(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GraphError) as caught:
        from_data(GRAPHS[attack]())
    assert len(str(caught.value)) < 500
    assert not list(tmp_path.iterdir())


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers(-(1 << 63) + 1, (1 << 63) - 1) | st.floats() | st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20), lambda inner: st.lists(inner, max_size=3).map(lambda items: {"tuple": items}), max_leaves=8))  # fmt: skip
def test_what_is_compiled_is_a_literal_of_the_value(value: Any) -> None:
    data = graph(node(name="o", op="output", target="o", args={"tuple": [{"tuple": [{"node": "x"}, value]}]}))
    answer = from_data(data)(torch.ones(1))[1]

    def plain(item: Any) -> Any:
        return tuple(plain(part) for part in item["tuple"]) if isinstance(item, dict) else item

    assert repr(answer) == repr(plain(value))


# --- layers ------------------------------------------------------------------------------------------------------


def old(module: nn.Module, path: Path) -> Path:
    """As release 1 wrote it: its leaves are pickled modules."""
    nodes = [
        node(name="x", op="placeholder", target="x", args={"tuple": []}),
        node(name="layer", op="call_module", target="layer"),
        node(name="output", op="output", target="output", args={"tuple": [{"node": "layer"}]}),
    ]
    tables = {"nodes": nodes, "modules": {"layer": module}, "parameters": {}, "buffers": {}}
    signature = {"inputs": [X], "outputs": ["output:float32[batch,3]"]}
    torch.save({"format": "compress.model", "version": 1, "signature": signature, "graph": tables}, path)
    return path


def with_attributes(**attributes: Any) -> nn.Linear:
    layer = nn.Linear(4, 3)
    vars(layer).update(attributes)
    return layer


class Stranger(nn.Linear):
    pass


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "a forward of its own": lambda: with_attributes(forward=nn.functional.relu),
    "a repr of its own": lambda: with_attributes(extra_repr=nn.functional.relu),
    "a hook": lambda: with_attributes(_forward_hooks=OrderedDict({0: nn.functional.relu})),
    "a hook before": lambda: with_attributes(_forward_pre_hooks={0: nn.functional.relu}),
    "a hook of the gradient": lambda: with_attributes(_backward_hooks=OrderedDict({0: nn.functional.relu})),
    "hooks that are no mapping": lambda: with_attributes(_forward_hooks=[1]),
    "a compiled call": lambda: with_attributes(_compiled_call_impl=nn.functional.relu),
    "another width": lambda: with_attributes(in_features=5),
    "a width that is a text": lambda: with_attributes(in_features="4"),
    "a tensor of its own": lambda: with_attributes(helper=torch.ones(3)),
    "a layer of its own": lambda: with_attributes(_modules={"inner": nn.ReLU()}),
    "a parameter of its own": lambda: with_attributes(_parameters={"weight": nn.Parameter(torch.ones(3, 4)), "forward": nn.Parameter(torch.ones(1))}),
    "a weight of another size": lambda: with_attributes(_parameters={"weight": nn.Parameter(torch.ones(3, 5)), "bias": None}),
    "parameters that are no mapping": lambda: with_attributes(_parameters=[]),
    "an activation that is no function of its": lambda: nn.TransformerEncoderLayer(4, 1, 4, activation=nn.functional.relu6),
    "a container whose part is named by code": lambda: _containing(CODE),
    "a container whose part is named forward": lambda: _containing("forward"),
    "a container with a hook": lambda: _containing("0", _forward_hooks={0: nn.functional.relu}),
    "a loss": lambda: nn.CrossEntropyLoss(),
}  # fmt: skip


def _containing(name: str, **attributes: Any) -> nn.Module:
    container = nn.Sequential()
    container._modules[name] = nn.Linear(4, 3)
    vars(container).update(attributes)
    return container


@pytest.mark.parametrize("wrap", ["release 1", "a pickled module"])
@pytest.mark.parametrize("attack", LAYERS)
def test_a_layer_that_is_more_than_its_class_makes_is_refused(tmp_path: Path, attack: str, wrap: str) -> None:
    path = tmp_path / "model.pt"
    if wrap == "release 1":
        old(LAYERS[attack](), path)
    else:
        torch.save(nn.Sequential(LAYERS[attack]()), path)
    if attack == "a compiled call":  # torch leaves it out of a pickle
        assert type(load(path, inputs=[X]).module) is not None
        return
    with pytest.raises(CheckpointError) as caught:
        load(path, inputs=[X])
    assert all((caught.value.what, caught.value.why, caught.value.mend))


@pytest.mark.parametrize(
    "record",
    [
        {"class": "Linear", "arguments": {"in_features": 1 << 30, "out_features": 1 << 39, "bias": True}},
        {"class": "Linear", "arguments": {"in_features": Whole(3), "out_features": 3}},
        {"class": "Linear", "arguments": {"in_features": 3, "out_features": 3, "device": "cuda"}},
        {"class": "LSTM", "arguments": {"input_size": 1, "hidden_size": 1, "num_layers": 1 << 39}},
        {"class": "TransformerEncoder", "arguments": {"num_layers": 1 << 39}},
        {"class": "Module", "arguments": {}},
        {"class": "__class__", "arguments": {}},
        {"class": Text("Linear"), "arguments": {}},
        {"class": ["Linear"], "arguments": {}},
        {"class": "Conv2d", "arguments": {"in_channels": 3, "out_channels": 3, "kernel_size": [[[[[1]]]]]}},
        {"class": "Sequential", "children": {"append": {"class": "ReLU", "arguments": {"inplace": False}}}},
        {"class": "Sequential", "parameters": {"weight": torch.ones(1)}},
        {"class": "MultiheadAttention", "arguments": {"embed_dim": 4, "num_heads": 0}},
        {"class": "Upsample", "arguments": {"scale_factor": "a" * 1000}},
        None,
    ],
)
def test_a_description_that_makes_no_layer_is_refused(record: Any) -> None:
    with pytest.raises(LayerError):
        layer_of(record)


def test_layers_in_circles_and_layers_that_double_are_refused_or_shared() -> None:
    circle: dict[str, Any] = {"class": "Sequential", "children": {}}
    circle["children"] |= {"a": circle, "b": circle}
    with pytest.raises(LayerError):
        layer_of(circle)
    record: dict[str, Any] = {"class": "ReLU", "arguments": {"inplace": False}}
    for _ in range(15):  # which torch goes through as 65,536
        record = {"class": "Sequential", "children": {"0": record, "1": record}}
    layer = layer_of(record)
    assert layer.get_submodule("0") is layer.get_submodule("1")


def test_a_subclass_of_a_layer_is_no_layer_of_torch() -> None:
    with pytest.raises(LayerError, match=r"no torch\.nn layer"):
        record_of(Stranger(4, 3), {})


# --- TorchScript -------------------------------------------------------------------------------------------------


class Writes(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, self.path)
        return x


class WritesWhenLoaded(Writes):
    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        torch.save(torch.zeros(1), self.path)


@pytest.mark.parametrize("module", [Writes, WritesWhenLoaded])
def test_torchscript_runs_operators_of_its_own_choice_and_needs_trust(tmp_path: Path, module: type[Writes]) -> None:
    path, owned = tmp_path / "model.pt", tmp_path / "owned"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module(str(owned))), path)
    owned.unlink(missing_ok=True)
    with pytest.raises(CheckpointError) as caught:
        load(path, inputs=[X])
    assert "--trust" in caught.value.mend
    assert not owned.exists()


# --- what a graph gives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ([node(args={"tuple": [{"node": "x"}, 1, 2, 3]})], ["output:float32[batch,4]"]),
        ([node(target="builtins.getattr", args={"tuple": [{"node": "x"}, "__class__"]})], ["output:float32[batch,4]"]),
        ([node(target="builtins.getattr", args={"tuple": [{"node": "x"}, "shape"]})], ["output:float32[batch,4]"]),
        ([node()], ["output:float32[batch,5]"]),
        ([node()], ["output:int64[batch,4]"]),
        ([node()], ["a:float32[batch,4]", "b:float32[batch,4]"]),
        ([node()], []),
        ([node()], ["output:float32[4611686018427387904]"]),
        ([node()], [4]),
        ([node()], ["output:object[batch,4]"]),
        ([node()], ["out\nput:float32[batch,4]"]),
        ([node()], [" " * 10_000 + ":float32[batch,4]"]),
    ],
)
def test_a_graph_that_does_not_give_what_it_says_is_refused(
    tmp_path: Path, nodes: list[Any], outputs: list[Any]
) -> None:
    data = graph(*nodes, node(name="o", op="output", args={"tuple": [{"node": "n"}]}))
    content = {
        "format": "compress.model",
        "version": 2,
        "signature": {"inputs": [X], "outputs": outputs},
        "graph": data,
    }
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="can't read"):
        load(tmp_path / "model.pt")


def test_a_dict_that_holds_itself_a_thousand_times_is_searched_once(tmp_path: Path) -> None:
    pairs = pickle.MARK + b"".join(text(f"k{i}") + pickle.BINGET + b"\x00" for i in range(1000)) + pickle.SETITEMS
    path = archive(tmp_path / "model.pt", pickle.EMPTY_DICT + pickle.BINPUT + b"\x00" + pairs)
    with pytest.raises(CheckpointError, match="found no model"):
        load(path)
