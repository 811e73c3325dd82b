"""Exported programs (.pt2)."""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.hostile.build import attack
from tests.hostile.pickles import Runs, expression

Content = dict[str, bytes]
MODEL, WEIGHTS, CONSTANTS = (
    "models/model.json",
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)


@functools.cache
def _plain() -> tuple[tuple[str, bytes], ...]:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (torch.ones(3, 4),), dynamic_shapes=({0: batch},))
    out = io.BytesIO()
    torch.export.save(program, out)
    with zipfile.ZipFile(out) as archive:
        return tuple((name.partition("/")[2], archive.read(name)) for name in archive.namelist())


def pickled(canary: Path) -> bytes:
    out = io.BytesIO()
    torch.save((Runs(canary), {}), out)
    return out.getvalue()


def write(path: Path, content: Mapping[str, bytes], *, kind: int = zipfile.ZIP_STORED, root: str = "model/") -> None:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in content.items():
            archive.writestr(root + name, data)


def program(path: Path, change: Callable[[Any], None], of: str = MODEL) -> None:
    """A program of which the JSON of one entry is changed."""
    content = dict(_plain())
    data = json.loads(content[of])
    change(data)
    content[of] = json.dumps(data).encode()
    write(path, content)


def with_entry(name: str) -> Callable[[Path, Path], None]:
    def written(path: Path, canary: Path) -> None:
        write(path, {**dict(_plain()), name: pickled(canary)})

    return written


def _named(name: str, function: Callable[[Path, Path], None], *, harmless: bool = False) -> None:
    function.__name__ = name
    attack(".pt2", "model", harmless=harmless)(function)


ENTRIES = {
    "legacy_weights": "data/weights/model.pt",
    "legacy_constants": "data/constants/model.pt",
    "model_without_json": "models/other",
    "another_model": "models/other.json",
    "weight_nobody_names": "data/weights/weight_99",
    "custom_object": "data/constants/custom_obj_0",
    "opaque_object": "data/constants/opaque_obj_0",
    "library": "data/aotinductor/model/model.so",
    "old_weights": "serialized_state_dict.pt",
    "executorch": "data/executorch/x",
    "torch_pickle": "data.pkl",
    "torchscript_code": "code/__torch__.py",
    "going_up": "../up",
}
for _name, _entry in ENTRIES.items():
    _named(f"program_with_{_name}", with_entry(_entry))
_named("program_with_a_pickle_as_sample_inputs", with_entry("data/sample_inputs/model.pt"), harmless=True)


@attack(".pt2", "model")
def program_of_the_old_format(path: Path, canary: Path) -> None:
    content = {
        "version": b"8.20", "serialized_exported_program.json": dict(_plain())[MODEL],
        "serialized_state_dict.pt": pickled(canary), "serialized_constants.pt": pickled(canary),
        "serialized_example_inputs.pt": pickled(canary),
    }  # fmt: skip
    write(path, content, root="")


@attack(".pt2", "model")
def program_with_two_roots(path: Path, canary: Path) -> None:
    write(path, dict(_plain()))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data/weights/model.pt", pickled(canary))


@attack(".pt2", "model")
def program_with_two_entries_of_a_name(path: Path, canary: Path) -> None:
    write(path, dict(_plain()))
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("model/data/sample_inputs/model.pt", pickled(canary))


@attack(".pt2", "model")
def program_behind_another_archive(path: Path, canary: Path) -> None:
    first = io.BytesIO()
    with zipfile.ZipFile(first, "w") as archive:
        archive.writestr("model/data/weights/model.pt", pickled(canary))
    write(path, dict(_plain()))
    path.write_bytes(first.getvalue() + path.read_bytes())


@attack(".pt2", "model")
def program_that_pickles_its_weights(path: Path, canary: Path) -> None:
    content = dict(_plain())
    content[WEIGHTS] = content[WEIGHTS].replace(b'"use_pickle": false', b'"use_pickle": true')
    write(path, {**content, "data/weights/weight_0": pickled(canary), "data/weights/weight_1": pickled(canary)})


def _first(data: Any) -> Any:
    return data["graph_module"]["graph"]["nodes"][0]


def _calls(target: str) -> Callable[[Any], None]:
    return lambda data: [_first(data).update(target=target)]  # type: ignore[return-value]


TARGETS = (
    "torch.hub.load", "torch.ops.load_library", "torch.load", "torch.ops.aten.from_file.default",
    "torch.ops.aten.save.default", "torch.ops.aten.set_.source_Storage", "torch.ops.aten.resize_.default",
    "torch.ops.prim.Print.default", "torch.ops.aten.__class__", "torch.ops.aten.linear.__init__", "math.__loader__",
    "_operator.attrgetter", "_operator.methodcaller", "_operator.call", "_operator.lshift", "#extension:op",
    "torch.ops.higher_order.while_loop", "torch.ops.higher_order.triton_kernel_wrapper_functional",
    "torch.ops.aten._sparse_coo_tensor_unsafe.default", "torch.ops.custom.op.default", "torch.utils._pytree.tree_map",
)  # fmt: skip


def _write_target(target: str) -> Callable[[Path, Path], None]:
    return lambda path, _canary: program(path, _calls(target))


for _target in TARGETS:
    _named("program_calling_" + re.sub(r"\W+", "_", _target), _write_target(_target))

EXPRESSIONS = {
    "code": expression,
    "attribute": lambda _canary: "Symbol('s1').__class__",
    "power": lambda _canary: "Pow(Integer(10), Integer(1000000000))",
    "powers": lambda _canary: "9**9**9**9",
    "shift": lambda _canary: "LShift(Integer(1), Integer(100000000000))",
    "lambda": lambda _canary: "(lambda: 1)()",
    "symbol": lambda canary: f'Symbol("{expression(canary)}")',
    "factorial": lambda _canary: "factorial(10**8)",
    "deep": lambda _canary: "-" * 9000 + "1",
    "list": lambda _canary: "[0]*10**10",
}


def _write_expression(make: Callable[[Path], str]) -> Callable[[Path, Path], None]:
    def written(path: Path, canary: Path) -> None:
        def change(data: Any) -> None:
            sizes = data["graph_module"]["graph"]["tensor_values"]["input"]["sizes"]
            sizes[0]["as_expr"]["expr_str"] = make(canary)

        program(path, change)

    return written


for _name, _make in EXPRESSIONS.items():
    _named(f"program_with_an_expression_of_{_name}", _write_expression(_make))


def _spec(text: str) -> Callable[[Path, Path], None]:
    def change(data: Any) -> None:
        data["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = text

    return lambda path, _canary: program(path, change)


_DEFAULTDICT = '[1, {"type": "collections.defaultdict", "children_spec": [], "context": {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}}]'
_ENUM = '[1, {"type": "builtins.tuple", "context": "{\\"__enum__\\": true, \\"fqn\\": \\"antigravity:x\\", \\"name\\": \\"y\\"}", "children_spec": []}]'
_named("program_whose_inputs_are_a_defaultdict", _spec(_DEFAULTDICT))
_named("program_whose_inputs_are_an_enum", _spec(_ENUM))
_named("program_whose_inputs_are_deep", _spec("[1, " * 2400 + "1" + "]" * 2400))


@attack(".pt2", "model")
def program_with_a_name_that_is_code(path: Path, canary: Path) -> None:
    text = dict(_plain())[MODEL].decode()
    name = "linear = " + expression(canary) + ";linear"
    write(path, {**dict(_plain()), MODEL: text.replace('"linear"', json.dumps(name)).encode()})


@attack(".pt2", "model")
def program_with_an_argument_that_is_code(path: Path, canary: Path) -> None:
    def change(data: Any) -> None:
        data["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"] = [f"x=({expression(canary)})"]

    program(path, change)


@attack(".pt2", "model")
def program_with_a_parameter_that_is_code(path: Path, canary: Path) -> None:
    name = '0.weight")); ' + expression(canary) + " #"
    content = {key: data.replace(b'"0.weight"', json.dumps(name).encode()) for key, data in _plain()}
    write(path, content)


@attack(".pt2", "model")
def program_with_a_dunder_parameter(path: Path, canary: Path) -> None:
    del canary
    write(path, {key: data.replace(b'"0.weight"', b'"__class__"') for key, data in _plain()})


@attack(".pt2", "model", harmless=True)
def program_with_a_guard_that_is_code(path: Path, canary: Path) -> None:
    program(path, lambda data: data.update(guards_code=[expression(canary)]))


@attack(".pt2", "model", harmless=True)
def program_with_metadata_that_is_code(path: Path, canary: Path) -> None:
    program(path, lambda data: _first(data)["metadata"].update(stack_trace=f'\n"""\n{expression(canary)}\n#'))


@attack(".pt2", "model")
def program_with_a_string_for_a_number(path: Path, canary: Path) -> None:
    program(path, lambda data: _first(data)["inputs"][0].update(arg={"as_int": expression(canary)}))


@attack(".pt2", "model")
def program_with_an_object_as_argument(path: Path, canary: Path) -> None:
    del canary
    program(path, lambda data: _first(data)["inputs"][0].update(arg={"as_custom_obj": {"name": "x", "class_fqn": "y"}}))


@attack(".pt2", "model")
def program_with_an_operator_as_argument(path: Path, canary: Path) -> None:
    del canary
    program(path, lambda data: _first(data)["inputs"][0].update(arg={"as_operator": "torch.load"}))


@attack(".pt2", "model")
def program_with_a_fifth_verifier(path: Path, canary: Path) -> None:
    del canary
    program(path, lambda data: data.update(verifiers=["__import__"]))


@attack(".pt2", "model")
def program_with_many_unbacked_symbols(path: Path, canary: Path) -> None:
    del canary
    program(path, lambda data: data["range_constraints"].update(u999999999999={"min_val": 0, "max_val": 1}))


def _sized(name: str) -> dict[str, Any]:
    return {"as_sym_int": {"as_name": name}}


def _arithmetic(target: str, *arguments: dict[str, Any], count: int = 1) -> Callable[[Any], None]:
    """Nodes before the first, each of which takes the result of the one before."""

    def change(data: Any) -> None:
        graph = data["graph_module"]["graph"]
        given = list(arguments)
        for at in range(count):
            inputs = [{"name": f"a{side}", "arg": each, "kind": 1} for side, each in enumerate(given)]
            made = {"target": target, "inputs": inputs, "outputs": [_sized(f"n{at}")], "metadata": {}, "name": f"n{at}"}
            graph["nodes"].insert(at, made)
            graph["sym_int_values"][f"n{at}"] = {"as_int": 4}
            given = [_sized(f"n{at}")] * 2

    return change


@attack(".pt2", "model")
def program_that_repeats_a_string(path: Path, canary: Path) -> None:
    del canary
    program(path, _arithmetic("_operator.mul", {"as_string": "x" * 1000}, {"as_int": 10**9}))


@attack(".pt2", "model")
def program_that_pads_a_string(path: Path, canary: Path) -> None:
    del canary
    program(path, _arithmetic("_operator.mod", {"as_string": "%10000000000d"}, {"as_int": 1}))


@attack(".pt2", "model")
def program_that_squares_and_squares(path: Path, canary: Path) -> None:
    del canary
    program(path, _arithmetic("_operator.mul", {"as_int": 2**62}, {"as_int": 2**62}, count=40))


@attack(".pt2", "model")
def program_with_a_power_of_a_power(path: Path, canary: Path) -> None:
    del canary
    program(path, _arithmetic("_operator.pow", {"as_int": 10}, {"as_int": 10**10}))


def _meta(data: Any) -> Any:
    return next(iter(data["config"].values()))["tensor_meta"]


@attack(".pt2", "model")
def program_of_a_petabyte(path: Path, canary: Path) -> None:
    del canary
    program(path, lambda data: _meta(data).update(sizes=[{"as_int": 2**25}, {"as_int": 2**25}]), WEIGHTS)


@attack(".pt2", "model")
def program_of_a_petabyte_that_is_one_number(path: Path, canary: Path) -> None:
    del canary
    wide = {"sizes": [{"as_int": 2**25}, {"as_int": 2**25}], "strides": [{"as_int": 0}, {"as_int": 0}]}
    program(path, lambda data: _meta(data).update(wide), WEIGHTS)


@attack(".pt2", "model")
def program_of_a_petabyte_without_bytes(path: Path, canary: Path) -> None:
    del canary
    content = dict(_plain())
    data = json.loads(content[WEIGHTS])
    _meta(data).update(sizes=[{"as_int": 2**25}, {"as_int": 2**25}])
    entry = next(iter(data["config"].values()))["path_name"]
    write(path, {**content, WEIGHTS: json.dumps(data).encode(), f"data/weights/{entry}": b""})


@attack(".pt2", "model")
def program_with_an_offset_before_its_bytes(path: Path, canary: Path) -> None:
    del canary
    program(path, lambda data: _meta(data).update(storage_offset={"as_int": -100}), WEIGHTS)


@attack(".pt2", "model")
def program_with_weights_elsewhere(path: Path, canary: Path) -> None:
    del canary
    program(path, lambda data: next(iter(data["config"].values())).update(path_name="../../../etc/passwd"), WEIGHTS)


@attack(".pt2", "model")
def program_that_is_a_bomb(path: Path, canary: Path) -> None:
    del canary
    content = {**dict(_plain()), "data/weights/weight_0": bytes(1 << 28)}
    write(path, content, kind=zipfile.ZIP_DEFLATED)


@attack(".pt2", "model")
def program_that_is_nested_without_end(path: Path, canary: Path) -> None:
    del canary
    write(path, {**dict(_plain()), MODEL: b'{"a":' * 100_000})


@attack(".pt2", "model")
def program_with_a_number_of_a_million_digits(path: Path, canary: Path) -> None:
    del canary
    write(path, {**dict(_plain()), MODEL: b'{"a":' + b"9" * 1_000_000 + b"}"})


@attack(".pt2", "model")
def program_that_is_cut(path: Path, canary: Path) -> None:
    del canary
    write(path, dict(_plain()))
    path.write_bytes(path.read_bytes()[:-500])


S = [f"Symbol('s{at}', positive=True, integer=True)" for at in range(24)]


def _power(base: str, times: int) -> str:
    return base if not times else f"Pow({_power(base, times - 1)}, Integer(8))"


PAIRS = list(itertools.pairwise(S))
SIZES = {
    "float_of_many_digits": "Mul(Float('1.5', precision=68719476736), Symbol('s77', positive=True, integer=True))",
    "power_of_a_fraction_of_a_fraction": "Pow(Integer(3), Rational(1, Rational(1, 3000000000)))",
    "power_of_powers": _power("Integer(9)", 14),
    "power_of_sums": f"Mod({_power('+'.join(S[:12]), 3)}, 7)",
    "divisor_of_products": f"FloorDiv({'*'.join(f'({a}+{b})' for a, b in PAIRS)}, {S[0]}+1)",
    "largest_of_many": f"Max({', '.join(f'{a}+{at}*{S[0]}*{b}' for at, (a, b) in enumerate(PAIRS))})",
}
for _name, _size in SIZES.items():

    def _of_size(path: Path, canary: Path, size: str = _size) -> None:
        """sympy evaluates it while the program is loaded."""
        del canary

        def change(data: Any) -> None:
            tensor = data["graph_module"]["graph"]["tensor_values"]["linear"]
            tensor["sizes"][0] = {"as_expr": {"expr_str": size, "hint": {"as_int": 3}}}

        program(path, change)

    _named(f"program_with_a_size_that_is_a_{_name}", _of_size)


@attack(".pt2", "model")
def program_of_twenty_million_lists(path: Path, canary: Path) -> None:
    """Sixty bytes of memory for three of the file."""
    del canary
    write(path, {**dict(_plain()), MODEL: b'{"graph_module":[' + b"[]," * (20 << 20) + b"[]]}"})
