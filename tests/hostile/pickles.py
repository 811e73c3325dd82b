"""Pickles, compress.save's own format and TorchScript."""

from __future__ import annotations

import collections
import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.hostile.build import attack


class Runs:
    """A pickle that writes a file when it is read."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (source(self.canary),)


def source(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w').close()"


def expression(canary: Path) -> str:
    return f"__import__('pathlib').Path({str(canary)!r}).touch()"


@attack(".pt", "model")
def a_pickle(path: Path, canary: Path) -> None:
    torch.save(Runs(canary), path)


@attack(".pt", "model")
def a_pickle_among_weights(path: Path, canary: Path) -> None:
    torch.save({"0.weight": torch.ones(3, 4), "state": Runs(canary)}, path)


@attack(".pt", "model")
def a_legacy_pickle(path: Path, canary: Path) -> None:
    torch.save(Runs(canary), path, _use_new_zipfile_serialization=False)


@attack(".pt", "model")
def a_bare_pickle(path: Path, canary: Path) -> None:
    path.write_bytes(pickle.dumps(Runs(canary), 2))


@attack(".pt", "model")
def a_pickle_by_import_only(path: Path, canary: Path) -> None:
    """The name alone, without a call: what it is called with comes from `BUILD`."""
    del canary
    path.write_bytes(b"\x80\x02cantigravity\nx\n.")


@attack(".pt", "model")
def a_second_data_pkl(path: Path, canary: Path) -> None:
    """The first one is harmless; a reader may take the last."""
    torch.save({"w": torch.ones(2)}, path)
    bad = io.BytesIO()
    torch.save(Runs(canary), bad)
    with zipfile.ZipFile(bad) as other:
        name = next(name for name in other.namelist() if name.endswith("data.pkl"))
        content = other.read(name)
    with zipfile.ZipFile(path) as mine:
        root = mine.namelist()[0].partition("/")[0]
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr(f"{root}/data.pkl", content)


@attack(".pt", "model")
def a_tensor_larger_than_its_bytes(path: Path, canary: Path) -> None:
    del canary
    out = io.BytesIO()
    torch.save({"w": torch.ones(4)}, out)
    with zipfile.ZipFile(out) as archive, zipfile.ZipFile(path, "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("data.pkl"):
                content = content.replace(b"K\x04", b"J\xff\xff\xff\x7f")
            changed.writestr(name, content)


def native(path: Path, change: Callable[[dict[str, Any]], None], module: nn.Module | None = None) -> None:
    """A file in the form of compress.save, version 1: Linear, then what a change makes of it."""
    content: dict[str, Any] = {
        "format": "compress.model", "version": 1,
        "signature": {"inputs": ["x:float32[batch,4]"], "outputs": ["output:float32[batch,4]"]},
        "graph": {
            "nodes": [
                node("x", "placeholder", "x"),
                node("y", "call_module", "0", {"node": "x"}),
                node("output", "output", "output", {"node": "y"}),
            ],
            "modules": {"0": module or nn.Linear(4, 4)}, "parameters": {}, "buffers": {},
        },
    }  # fmt: skip
    change(content["graph"])
    torch.save(content, path)


def node(name: str, op: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {
        "name": name, "op": op, "target": target, "args": {"tuple": list(args)},
        "kwargs": {"dict": [list(item) for item in kwargs.items()]},
    }  # fmt: skip


def calling(*args: Any, **kwargs: Any) -> Callable[[dict[str, Any]], None]:
    """An addition with further arguments, behind the layer."""

    def change(graph: dict[str, Any]) -> None:
        graph["nodes"].insert(2, node("z", "call_function", "_operator.add", {"node": "y"}, *args, **kwargs))
        graph["nodes"][3]["args"] = {"tuple": [{"node": "z"}]}

    return change


@attack(".pt", "model")
def native_argument_whose_repr_is_code(path: Path, canary: Path) -> None:
    """torch.fx writes `repr(argument)` into source; a Sequential's repr holds its children's names."""
    children = nn.Sequential()
    children._modules["a)) if 0 else (" + expression(canary) + " or y #"] = nn.ReLU()
    native(path, calling(children))


@attack(".pt", "model")
def native_ordered_dict_as_argument(path: Path, canary: Path) -> None:
    native(path, calling(collections.OrderedDict({"node": expression(canary)})))


@attack(".pt", "model", harmless=True)  # nodes are numbered anew
def native_name_that_is_code(path: Path, canary: Path) -> None:
    def change(graph: dict[str, Any]) -> None:
        graph["nodes"][1]["name"] = f"y = {expression(canary)} or x"
        graph["nodes"][2]["args"] = {"tuple": [{"node": graph["nodes"][1]["name"]}]}

    native(path, change)


@attack(".pt", "model")
def native_placeholder_with_a_default(path: Path, canary: Path) -> None:
    native(path, lambda graph: graph["nodes"][0].update(args={"tuple": [{"torch": expression(canary)}]}))


@attack(".pt", "model", harmless=True)
def native_leaf_whose_children_are_code(path: Path, canary: Path) -> None:
    leaf = nn.Sequential()
    leaf._modules["0'); " + expression(canary) + "; ('"] = nn.Linear(4, 4)
    native(path, lambda _graph: None, leaf)


@attack(".pt", "model")
def native_leaf_with_a_forward_of_its_own(path: Path, canary: Path) -> None:
    del canary
    leaf = nn.Linear(4, 4)
    leaf.__dict__["forward"] = nn.Sequential()
    native(path, lambda _graph: None, leaf)


@attack(".pt", "model")
def native_leaf_with_hooks(path: Path, canary: Path) -> None:
    del canary
    leaf = nn.Linear(4, 4)
    leaf._forward_hooks[0] = nn.Flatten()
    leaf._forward_pre_hooks[0] = nn.Identity()
    native(path, lambda _graph: None, leaf)


@attack(".pt", "model")
def native_leaf_that_loses_its_batch(path: Path, canary: Path) -> None:
    """A callable among a layer's attributes is called by its forward."""
    del canary
    leaf = nn.TransformerEncoderLayer(4, 1, 8)
    leaf.activation = nn.Sequential()
    leaf.__dict__["_sa_block"] = nn.Identity()
    native(path, lambda _graph: None, leaf)


@attack(".pt", "model")
def native_callable_attribute(path: Path, canary: Path) -> None:
    """`get_attr` fetches a leaf, which is then an argument, to be called or written out."""
    del canary

    def change(graph: dict[str, Any]) -> None:
        graph["modules"]["f"] = nn.ReLU()
        graph["nodes"].insert(1, node("f", "get_attr", "f"))
        calling({"node": "f"})(graph)

    native(path, change)


@attack(".pt", "model")
def native_function_that_is_none_of_tensors(path: Path, canary: Path) -> None:
    def change(graph: dict[str, Any]) -> None:
        calling()(graph)
        graph["nodes"][2].update(target="posix.system", args={"tuple": [f"touch {canary}"]})

    native(path, change)


@attack(".pt", "model")
def native_method_that_writes(path: Path, canary: Path) -> None:
    def change(graph: dict[str, Any]) -> None:
        calling()(graph)
        graph["nodes"][2].update(op="call_method", target="tofile", args={"tuple": [{"node": "y"}, str(canary)]})

    native(path, change)


@attack(".pt", "model")
def native_sparse_tensor_that_lies(path: Path, canary: Path) -> None:
    """Its places are changed after they were checked: kernels write there."""
    del canary

    def change(graph: dict[str, Any]) -> None:
        graph["nodes"][2:2] = [
            node("s", "call_method", "to_sparse", {"node": "y"}),
            node("i", "call_method", "indices", {"node": "s"}),
            node("f", "call_method", "fill_", {"node": "i"}, 10**12),
            node("d", "call_method", "to_dense", {"node": "s"}),
        ]
        graph["nodes"][-1]["args"] = {"tuple": [{"node": "d"}]}

    native(path, change)


@attack(".pt", "model")
def native_number_that_squares_itself(path: Path, canary: Path) -> None:
    """An integer of 2^40 digits, which no signal interrupts."""
    del canary

    def change(graph: dict[str, Any]) -> None:
        graph["nodes"][2:2] = [node("n", "call_function", "_operator.add", 3, 4)] + [
            node("n", "call_function", "_operator.mul", {"node": "n"}, {"node": "n"}) for _ in range(40)
        ]

    native(path, change)


def ending_with(*nodes: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Further nodes behind the layer, whose last one is named r and given out."""

    def change(graph: dict[str, Any]) -> None:
        graph["nodes"][2:2] = nodes
        graph["nodes"][-1]["args"] = {"tuple": [{"node": "r"}]}

    return change


def _kernel(name: str, *nodes: dict[str, Any]) -> None:
    """An attack on a kernel of torch that believes its arguments."""

    def written(path: Path, canary: Path) -> None:
        del canary
        native(path, ending_with(*nodes))

    written.__name__ = name
    attack(".pt", "model")(written)


_kernel(
    "native_repeats_that_overflow",
    node("l", "call_method", "long", {"node": "y"}),
    node("f", "call_method", "fill_", {"node": "l"}, 1 << 62),
    node("e", "call_method", "expand", {"node": "f"}, 2, 4),
    node("g", "call_method", "flatten", {"node": "e"}),
    node("r", "call_function", "torch.repeat_interleave", {"node": "g"}),
)
_kernel(
    "native_repeats_that_overflow_by_a_method",
    node("l", "call_method", "new_ones", {"node": "y"}, {"tuple": [4]}, dtype={"torch": "int64"}),
    node("f", "call_method", "fill_", {"node": "l"}, 1 << 62),
    node("r", "call_method", "repeat_interleave", {"node": "y"}, {"node": "f"}, 1),
)
_kernel(
    "native_attention_beyond_its_values",
    node("q", "call_method", "new_ones", {"node": "y"}, {"tuple": [8, 16, 64, 32]}),
    node("v", "call_method", "new_ones", {"node": "y"}, {"tuple": [8, 16, 3, 32]}),
    node(
        "r", "call_function", "torch.nn.functional.scaled_dot_product_attention",
        {"node": "q"}, {"node": "q"}, {"node": "v"},
    ),
)  # fmt: skip
_kernel(
    "native_norm_without_statistics",
    node("n", "call_function", "torch.native_batch_norm", {"node": "y"}, *[None] * 4, False, 0.1, 1e-5),
    node("r", "call_function", "_operator.getitem", {"node": "n"}, 0),
)
_kernel("native_sparse_tensor_by_its_type", node("r", "call_method", "type", {"node": "y"}, "torch.sparse.FloatTensor"))


@attack(".pt", "model")
def native_inputs_of_many_gigabytes(path: Path, canary: Path) -> None:
    """Each is as large as one may be."""
    del canary
    nodes = [node(f"x{at}", "placeholder", f"x{at}") for at in range(60)]
    nodes.append(node("output", "output", "output", {"node": "x0"}))
    signature = {"inputs": [f"x{at}:float32[batch,16384,16384]" for at in range(60)], "outputs": ["y:float32[batch,4]"]}
    graph = {"nodes": nodes, "modules": {}, "parameters": {}, "buffers": {}}
    torch.save({"format": "compress.model", "version": 1, "signature": signature, "graph": graph}, path)


@attack(".pt", "model")
def a_zip_of_two_million_entries(path: Path, canary: Path) -> None:
    """Fifty bytes of the file each, and seven hundred of memory."""
    del canary
    count, entry = 2_000_000, struct.pack("<4s6H3L5H2L", b"PK\1\2", *[0] * 9, 1, *[0] * 6) + b"a"
    tail = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0, 0, 0, 0, count, count, count * len(entry), 4)
    tail += struct.pack("<4sLQL", b"PK\6\7", 0, 4 + count * len(entry), 1)
    tail += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0)
    path.write_bytes(b"PK\3\4" + entry * count + tail)


@attack(".pt", "model")
def native_nested_without_end(path: Path, canary: Path) -> None:
    del canary
    deep: Any = 1
    for _ in range(200):
        deep = {"tuple": [deep]}
    native(path, calling(deep))


class Saves(nn.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, self.path)
        return x


class Maps(Saves):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_file(self.path, shared=True, size=4).sum()


def scripted(path: Path, module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(module), path)


@attack(".pt", "model")
def torchscript_that_saves(path: Path, canary: Path) -> None:
    """TorchScript runs operators of the file's choice; this one writes a file while the signature is inferred."""
    scripted(path, Saves(canary))


@attack(".pt", "model")
def torchscript_that_maps_a_file(path: Path, canary: Path) -> None:
    scripted(path, Maps(canary))


@attack(".pt", "model")
def a_parametrization(path: Path, canary: Path) -> None:
    """Its class is made when it is loaded, and computes a weight by a module of the file's choice."""
    del canary
    leaf = nn.Linear(4, 4)
    parametrize.register_parametrization(leaf, "weight", nn.Identity())
    state = leaf.__dict__
    plain = nn.Linear(4, 4)
    plain.__dict__.update(state)
    native(path, lambda _graph: None, plain)
