"""The JSON of an exported program, read by an allow-list and written again from what was understood.

torch makes Python source from a program's names (nodes, arguments, attributes), finds operators by attribute names,
evaluates expressions and guards, and imports what tree structures name. So every field is of a kind that is checked
here, and what a run does not need (guards, metadata of nodes, the call graph of submodules) is left out.

Source: torch/_export/serde/schema.py, schema version 8.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable
from typing import Any

from compress.formats.exported.expressions import clean_expression
from compress.vetting.calls.operators import allowed
from compress.vetting.texts import parse_json

__all__ = ["clean_payloads", "clean_program"]

Check = Callable[[Any], Any]
_LARGEST = 2**63
_MAX_BITS = 1 << 16
# What the generated source refers to: a value of that name would stand in its way.
_TAKEN = {"torch", "self", "math", "operator", "device", "inf", "nan", "NoneType", "pytree", "fx_pytree"}
_TREES = {"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}
_DTYPES = (*range(1, 14), 28, 29, 30, 31, 32, 34, 35)


def clean_program(text: bytes) -> bytes:
    """`models/model.json`, written again.

    Raises:
        ValueError: it is no exported program, or holds what is not known to be harmless; says what.
    """
    return _written(text, _PROGRAM)


def clean_payloads(text: bytes) -> dict[str, Any]:
    """The declarations of weights or constants by name, as torch.export.save writes them.

    Raises:
        ValueError: as for a program; pickled tensors are refused.
    """
    found: dict[str, Any] = json.loads(_written(text, _PAYLOADS))["config"]
    return found


def _written(text: bytes, check: Check) -> bytes:
    try:
        return json.dumps(check(parse_json(text))).encode()
    except RecursionError as err:
        raise ValueError("is nested too deeply") from err


def _refuse(value: Any) -> ValueError:
    shown = repr(value)
    return ValueError(f"holds {shown if len(shown) < 200 else shown[:200] + '…'}, which is not known to be harmless")


def _int(value: Any) -> int:
    if type(value) is not int or not -_LARGEST <= value < _LARGEST:
        raise _refuse(value)
    return value


def _size(value: Any) -> int:
    if _int(value) < 0:
        raise _refuse(value)
    return int(value)


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _refuse(value)
    return value


def _float(value: Any) -> float | str:
    if type(value) is str and value in ("Infinity", "-Infinity", "NaN"):
        return value
    if type(value) not in (int, float) or not abs(value) <= 1.8e308:
        raise _refuse(value)
    return float(value)


def _str(value: Any) -> str:
    if type(value) is not str or len(value) > 10_000:
        raise _refuse(value)
    return value


def _matching(pattern: str, but: frozenset[str] = frozenset()) -> Check:
    found = re.compile(pattern, re.ASCII)

    def check(value: Any) -> str:
        if type(value) is not str or len(value) > 1000 or not found.fullmatch(value) or value in but:
            raise _refuse(value)
        return value

    return check


_name = _matching(r"[A-Za-z_]\w*", frozenset({*keyword.kwlist, *_TAKEN}))
_argument_name = _matching(r"([A-Za-z_]\w*)?")  # of an operator's schema, where `from` is one
_path = _matching(r"\w+(\.\w+)*")


def _attribute(value: Any) -> str:
    """The dotted path of a tensor: it is set as an attribute of modules."""
    path: str = _path(value)
    if any(part.startswith("__") for part in path.split(".")):
        raise _refuse(value)
    return path


def _one_of(*values: Any) -> Check:
    def check(value: Any) -> Any:
        if not any(type(value) is type(known) and value == known for known in values):
            raise _refuse(value)
        return value

    return check


def _target(value: Any) -> str:
    if type(value) is not str or not allowed(value):
        raise ValueError(f"calls {value!r}, which is none of torch's own functions of tensors")
    return value


def _expression(value: Any) -> str:
    return clean_expression(_str(value))


def _left_out(instead: Any) -> Check:
    """A field that nothing here needs, whatever it holds."""
    return lambda _value: instead


def _empty(value: Any) -> Any:
    """A list or a dict of what is refused wherever it stands."""
    if value not in ([], {}):
        raise ValueError("holds objects, which are pickles")
    return value


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _listed(check: Check) -> Check:
    def checked(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _refuse(value)
        return [check(item) for item in value]

    return checked


def _mapping(key: Check, check: Check) -> Check:
    def checked(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _refuse(value)
        return {key(name): check(item) for name, item in value.items()}

    return checked


def _record(*missing: str, **fields: Check) -> Check:
    """A dict of these fields; those named first may be missing."""

    def checked(value: Any) -> dict[str, Any]:
        if type(value) is not dict or not value.keys() <= fields.keys():
            raise _refuse(sorted(value.keys() - fields.keys()) if type(value) is dict else value)
        if lacking := fields.keys() - value.keys() - set(missing):
            raise ValueError(f"lacks {sorted(lacking)[0]!r}")
        return {name: fields[name](item) for name, item in value.items()}

    return checked


def _union(**kinds: Check) -> Check:
    """A dict of one key, which says what its value is."""

    def checked(value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) != 1 or not value.keys() <= kinds.keys():
            raise _refuse(value)
        return {kind: kinds[kind](item) for kind, item in value.items()}

    return checked


def _tree(value: Any) -> str:
    """The structure of inputs or outputs: JSON in a string, of tuples, lists and dicts alone."""
    version, tree = _inner(_str(value)) if type(value) is str and len(value) <= 10_000 else (None, None)
    if version != 1:
        raise _refuse(value)
    return json.dumps([1, _branch(tree)])


def _inner(text: str) -> Any:
    return parse_json(text.encode())


def _branch(value: Any) -> dict[str, Any]:
    if type(value) is not dict or value.keys() != {"type", "context", "children_spec"}:
        raise _refuse(value)
    kind, context, children = value["type"], value["context"], _listed(_branch)(value["children_spec"])
    if kind is None:
        if context is not None or children:
            raise _refuse(value)
        return {"type": None, "context": None, "children_spec": []}
    if kind not in _TREES:
        raise _refuse(value)
    keys = _inner(context) if type(context) is str and len(context) <= 10_000 else None
    if kind in ("builtins.tuple", "builtins.list"):
        if keys is not None:
            raise _refuse(value)
    else:
        keys = _listed(_name)(keys)
        if len(keys) != len(children):
            raise _refuse(value)
    return {"type": kind, "context": json.dumps(keys), "children_spec": children}


_ORIGIN = _record("index", type=_one_of("cpu", "cuda"), index=_optional(_one_of(*range(64))))
_HINT = _optional(_union(as_int=_int, as_bool=_bool, as_float=_float))
_SYMBOLIC = _record("hint", expr_str=_expression, hint=_HINT)
_SYM_INT = _union(as_expr=_SYMBOLIC, as_int=_int)
_TENSOR_META = _record(
    dtype=_one_of(*_DTYPES), sizes=_listed(_SYM_INT), requires_grad=_bool, device=_ORIGIN, strides=_listed(_SYM_INT),
    storage_offset=_SYM_INT, layout=_one_of(7),
)  # fmt: skip
_TENSOR = _record(name=_name)
_SIZE_OR_NAME = _union(as_name=_name, as_int=_int)
_FLOAT_OR_NAME = _union(as_name=_name, as_float=_float)
_BOOL_OR_NAME = _union(as_name=_name, as_bool=_bool)
_TENSOR_OR_NONE = _union(as_tensor=_TENSOR, as_none=_bool)


def _graph(value: Any) -> Any:
    graph = _GRAPH(value)
    digits: dict[str, int] = {}
    for node in graph["nodes"]:
        if node["target"] in ("_operator.mul", "_operator.pow"):
            made = _bits(node, digits)
            if made > _MAX_BITS:
                raise ValueError("multiplies sizes to a number that no memory holds")
            digits |= {name: made for output in node["outputs"] for name in _names_in(output)}
        elif not node["target"].startswith("torch.ops."):
            made = 1 + max((_bits_of(given["arg"], digits) for given in node["inputs"]), default=0)
            digits |= {name: made for output in node["outputs"] for name in _names_in(output)}
    return graph


def _bits(node: dict[str, Any], digits: dict[str, int]) -> int:
    """How long a product or a power of Python's integers can get, whose digits have no bound."""
    sides = [_bits_of(given["arg"], digits) for given in node["inputs"]]
    return sum(sides) if node["target"] == "_operator.mul" else 8 * max(sides, default=0)


def _bits_of(argument: dict[str, Any], digits: dict[str, int]) -> int:
    return max((digits.get(name, 64) for name in _names_in(argument)), default=64)


def _names_in(argument: dict[str, Any]) -> list[str]:
    (value,) = argument.values()
    return [value["as_name"]] if isinstance(value, dict) and "as_name" in value else []


# Not in it: objects (pickles), operators as values, dicts of arguments.
_ARGUMENT = _union(
    as_none=_bool, as_tensor=_TENSOR, as_tensors=_listed(_TENSOR), as_int=_int, as_ints=_listed(_int),
    as_float=_float, as_floats=_listed(_float), as_string=_str, as_strings=_listed(_str), as_sym_int=_SIZE_OR_NAME,
    as_sym_ints=_listed(_SIZE_OR_NAME), as_scalar_type=_one_of(*_DTYPES), as_memory_format=_one_of(*range(1, 5)),
    as_layout=_one_of(7), as_device=_ORIGIN, as_bool=_bool, as_bools=_listed(_bool), as_sym_bool=_BOOL_OR_NAME,
    as_sym_bools=_listed(_BOOL_OR_NAME), as_graph=_record(name=_name, graph=_graph),
    as_optional_tensors=_listed(_TENSOR_OR_NONE), as_sym_float=_FLOAT_OR_NAME, as_sym_floats=_listed(_FLOAT_OR_NAME),
    as_optional_tensor=_TENSOR_OR_NONE, as_complex=_record(real=_float, imag=_float),
    as_nested_tensors=_listed(_listed(_TENSOR)), as_int_lists=_listed(_listed(_int)),
    as_float_lists=_listed(_listed(_float)),
)  # fmt: skip
_OF_NUMBERS = {f"as_{kind}" for kind in ("int", "float", "bool", "sym_int", "sym_float", "sym_bool", "tensor")}
_NODE_FIELDS = _record(
    "is_hop_single_tensor_return", "name", "metadata", target=_target,
    inputs=_listed(_record("kind", name=_argument_name, arg=_ARGUMENT, kind=_optional(_one_of(0, 1, 2)))),
    outputs=_listed(_ARGUMENT), metadata=_left_out({}), is_hop_single_tensor_return=_optional(_bool),
    name=_optional(_name),
)  # fmt: skip


def _node(value: Any) -> dict[str, Any]:
    node: dict[str, Any] = _NODE_FIELDS(value)
    if node["target"].startswith("torch.ops.higher_order."):
        for given in node["inputs"]:
            if given["name"]:  # becomes a keyword in the generated source
                _name(given["name"])
    elif any("as_graph" in given["arg"] for given in node["inputs"]):
        raise ValueError(f"gives a graph to {node['target']!r}")
    if not node["target"].startswith("torch.ops."):
        for given in node["inputs"]:  # a string times a number can be larger than the memory
            if not given["arg"].keys() <= _OF_NUMBERS:
                raise ValueError(f"calls {node['target']!r} with what is no number")
    if node["target"] == "_operator.pow":  # Python's own numbers, which have no bounds
        exponent = node["inputs"][1]["arg"] if len(node["inputs"]) == 2 else {}
        plain = exponent.get("as_int", exponent.get("as_float", exponent.get("as_sym_int", {}).get("as_int")))
        if not isinstance(plain, int | float) or not abs(plain) <= 8:
            raise ValueError("calls '_operator.pow' with an exponent that is no small number")
    return {**node, "metadata": {}}


_GRAPH = _record(
    "is_single_tensor_return", "custom_obj_values", "sym_float_values",
    inputs=_listed(_ARGUMENT), outputs=_listed(_ARGUMENT), nodes=_listed(_node),
    tensor_values=_mapping(_name, _TENSOR_META), sym_int_values=_mapping(_name, _SYM_INT),
    sym_bool_values=_mapping(_name, _union(as_expr=_SYMBOLIC, as_bool=_bool)), is_single_tensor_return=_bool,
    custom_obj_values=_empty, sym_float_values=_mapping(_name, _union(as_expr=_SYMBOLIC, as_float=_float)),
)  # fmt: skip
_CONSTANT = _union(as_none=_bool, as_int=_int, as_float=_float, as_string=_str, as_bool=_bool)
_INPUT = _union(
    user_input=_record(arg=_ARGUMENT),
    parameter=_record(arg=_TENSOR, parameter_name=_attribute),
    buffer=_record(arg=_TENSOR, buffer_name=_attribute, persistent=_bool),
    tensor_constant=_record(arg=_TENSOR, tensor_constant_name=_attribute),
    constant_input=_record(name=_name, value=_CONSTANT),
)
# A model that changes its parameters, or has a loss among its outputs, is one in training.
_OUTPUT = _union(
    user_output=_record(arg=_ARGUMENT),
    buffer_mutation=_record(arg=_TENSOR, buffer_name=_attribute),
    user_input_mutation=_record(arg=_TENSOR, user_input_name=_name),
)
_CALL = _record(
    "forward_arg_names", inputs=_left_out([]), outputs=_left_out([]), in_spec=_tree, out_spec=_tree,
    forward_arg_names=_optional(_listed(_name)),
)  # fmt: skip


def _calls(value: Any) -> list[Any]:
    """How the program is called; how its submodules were is not needed."""
    if type(value) is not list or not all(type(entry) is dict for entry in value):
        raise _refuse(value)
    whole = [entry for entry in value if entry.get("fqn") == ""]
    if len(whole) != 1:
        raise ValueError("does not say, or says twice, how it is called")
    return [_record(fqn=_one_of(""), signature=_CALL)(whole[0])]


_MODULE = _record(
    "metadata", "treespec_namedtuple_fields", graph=_graph,
    signature=_record(input_specs=_listed(_INPUT), output_specs=_listed(_OUTPUT)), module_call_graph=_calls,
    metadata=_left_out({}), treespec_namedtuple_fields=_left_out({}),
)  # fmt: skip
_RANGES = _mapping(_expression, _record(min_val=_optional(_int), max_val=_optional(_int)))


def _ranges(value: Any) -> dict[str, Any]:
    """Of symbols; that of twice one (`2*Dim("half")`) follows, and torch looks up none but symbols."""
    return {symbol: found for symbol, found in _RANGES(value).items() if re.fullmatch(r"[a-z]+\d+", symbol)}


_PROGRAM = _record(
    "verifiers", "torch_version", "guards_code", graph_module=_MODULE, opset_version=_mapping(_name, _int),
    range_constraints=_ranges,
    schema_version=_record(major=_one_of(8), minor=_size), verifiers=_listed(_one_of("TRAINING", "ATEN")),
    torch_version=_matching(r"[\w.+<=-]{1,60}"), guards_code=_left_out([]),
)  # fmt: skip


def _not_pickled(value: Any) -> bool:
    if value is not False:
        raise ValueError("says that tensors are pickled")
    return False


_SIZE = _union(as_int=_size)
_PAYLOAD_META = _record(
    dtype=_one_of(*_DTYPES), sizes=_listed(_SIZE), requires_grad=_bool, device=_ORIGIN, strides=_listed(_SIZE),
    storage_offset=_SIZE, layout=_one_of(7),
)  # fmt: skip
_PAYLOADS = _record(
    config=_mapping(
        _attribute,
        _record(
            path_name=_matching(r"(weight|tensor)_\d{1,7}"), is_param=_bool, use_pickle=_not_pickled,
            tensor_meta=_PAYLOAD_META,
        ),
    )
)  # fmt: skip
