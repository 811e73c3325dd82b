"""Operators of torch that read beyond a tensor, end the process or never end, by what they are called with.

Their public forms check them, a file need not call these; or nothing does. What a graph of a file calls is, in place
of such an operator, a function that looks at the sizes first. While a graph is traced (tensors without memory, proxies)
nothing is looked at: what is traced was run before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

__all__ = ["AS_FUNCTIONS", "guard_module", "guarded"]

AS_FUNCTIONS = frozenset(
    (
        "chunk", "dsplit", "hsplit", "matrix_power", "repeat_interleave", "split", "split_with_sizes", "tensor_split",
        "unbind", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "vsplit",
    )
)  # fmt: skip
"""Methods of tensors that are looked at as the functions of torch that they are."""
_MOST = 1 << 40
_PARTS = 1 << 16
_GIVEN = Mapping[str, Any]


def _attention(given: _GIVEN) -> bool:
    """Queries [..., L, E], keys [..., S, E] and values [..., S, V]."""
    query, key, value = given["query"], given["key"], given["value"]
    return bool(min(query.dim(), key.dim(), value.dim()) >= 2 and key.shape[-2] == value.shape[-2])


def _flash(given: _GIVEN) -> bool:
    """The kernel itself broadcasts nothing, and divides by sizes."""
    tensors = [given[name] for name in ("query", "key", "value")]
    same = len({(x.shape[:2], x.shape[-1], x.dtype) for x in tensors}) == 1
    return all(x.dim() == 4 and x.numel() for x in tensors) and same and tensors[1].shape == tensors[2].shape


def _batch_norm(given: _GIVEN) -> bool:
    x = given["input"]
    sizes = {given[name].shape for name in ("weight", "bias", "running_mean", "running_var") if _real(given.get(name))}
    return x.dim() >= 2 and sizes <= {x.shape[1:2]} and (given.get("training", False) or _real(given["running_mean"]))


def _statistics(given: _GIVEN) -> bool:
    """Without running ones, only those of the batch are left."""
    return bool(given["training"]) and _batch_norm({**given, "running_mean": None})


def _weight_norm(given: _GIVEN) -> bool:
    v, g, dim = given["v"], given["g"], given.get("dim", 0)
    norms = 1 if dim == -1 else v.shape[dim] if 0 <= dim < v.dim() else -1  # -1: one for all of it
    return bool(v.numel() and g.numel() == norms and g.dtype == v.dtype)


def _bag(given: _GIVEN) -> bool:
    return bool(given["weight"].dim() == 2 and given["indices"].dim() == given["offsets"].dim() == 1)


def _repeats(given: _GIVEN) -> bool:
    repeats: Any = given.get("repeats")
    return (
        not _real(repeats) or not repeats.numel() or (int(repeats.min()) >= 0 and float(repeats.double().sum()) < _MOST)
    )


def _power(given: _GIVEN) -> bool:
    """The smallest integer has no opposite: its inverse's powers are multiplied without end."""
    n = given["n"]
    return isinstance(n, int) and abs(n) < _MOST


def _parts(given: _GIVEN) -> bool:
    """As many tensors as are asked for, empty ones where the dimension has fewer."""
    names = ("indices_or_sections", "sections", "indices", "tensor_indices_or_sections")
    asked: Any = next(given[name] for name in names if name in given)
    if isinstance(asked, list | tuple):
        return len(asked) < _PARTS
    if isinstance(asked, torch.Tensor):
        return asked.numel() < _PARTS and (asked.dim() > 0 or int(asked) <= _PARTS)
    return isinstance(asked, int) and asked <= _PARTS


def _pieces(given: _GIVEN) -> bool:
    """A tensor for each place of a dimension, or for each few of them, is an object for each."""
    x = next(given[name] for name in ("self", "input", "tensor") if name in given)
    places = x.shape[given.get("dim", 0)] if x.dim() else 1
    by_size: Any = next((given[name] for name in ("split_size", "split_size_or_sections") if name in given), None)
    if isinstance(by_size, int):
        return (by_size > 0 and places <= by_size * _PARTS) or places == by_size == 0
    names = ("chunks", "sections", "indices", "indices_or_sections", "split_sizes")
    asked: Any = by_size or next((given[name] for name in names if name in given), places)
    return len(asked) <= _PARTS if isinstance(asked, list | tuple) else isinstance(asked, int) and asked <= _PARTS


def _walked(given: _GIVEN) -> bool:
    """Python's own functions walk over a tensor, and make one for each place."""
    x: Any = given.get("over")
    return not _real(x) or not x.dim() or x.shape[0] <= _PARTS


def _rounded_division(given: _GIVEN) -> bool:
    """The processor stops where the smallest integer is divided by -1, and is not asked whether it may."""
    one, other = given.get("self", given.get("input")), given["other"]
    dtype = torch.result_type(one, other)
    if given["rounding_mode"] != "trunc" or dtype not in (torch.int32, torch.int64):
        return True
    one, other = (torch.as_tensor(value).to(dtype) for value in (one, other))
    return one.is_meta or other.is_meta or not bool((one == torch.iinfo(dtype).min).any() and (other == -1).any())


def _prims_division(given: _GIVEN) -> bool:
    return _rounded_division({**given, "rounding_mode": "trunc"})


def _recurrent(gates: int) -> Callable[[_GIVEN], bool]:
    """Inputs [time, samples, I] or [samples, time, I]; of each layer and direction W [gates·H, I], W [gates·H, R]."""

    def fits(given: _GIVEN) -> bool:
        x, params, layers = given["input"], given["params"], given["num_layers"]
        states = given["hx"] if isinstance(given["hx"], list | tuple) else [given["hx"]]
        both, biases = 1 + given["bidirectional"], given["has_biases"]
        if len(states) != (2 if gates == 4 else 1) or {x.dim(), *(state.dim() for state in states)} != {3}:
            return False
        recurrent, hidden = states[0].shape[2], states[-1].shape[2]
        samples = x.shape[0 if given["batch_first"] else 1]
        if not 0 < layers < _MOST or any(state.shape[:2] != (layers * both, samples) for state in states):
            return False
        rest = [(gates * hidden,)] * (2 if biases else 0) + [(recurrent, hidden)] * (recurrent != hidden)
        wanted = []
        for layer in range(len(params) and layers):
            inner = x.shape[2] if layer == 0 else recurrent * both
            wanted += [[(gates * hidden, inner), (gates * hidden, recurrent), *rest]] * both
            if len(wanted) > len(params):
                return False
        return bool(x.numel() and hidden and recurrent) and [tuple(part.shape) for part in params] == [
            shape for part in wanted for shape in part
        ]

    return fits


_CHECKS: dict[str, Callable[[_GIVEN], bool]] = {
    "scaled_dot_product_attention": _attention,
    "_scaled_dot_product_attention_math": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _flash,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit.no_stats": _statistics,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_weight_norm": _weight_norm,
    "_weight_norm_interface": _weight_norm,
    "embedding_bag": _bag,
    "_embedding_bag": _bag,
    "repeat_interleave": _repeats,
    "matrix_power": _power,
    "linalg_matrix_power": _power,
    "tensor_split": _parts,
    **dict.fromkeys(
        (
            "unbind",
            "unbind_copy",
            "chunk",
            "unsafe_chunk",
            "split",
            "split_copy",
            "unsafe_split",
            "split_with_sizes",
            "split_with_sizes_copy",
            "unsafe_split_with_sizes",
            "hsplit",
            "vsplit",
            "dsplit",
        ),
        _pieces,
    ),
    "lstm.input": _recurrent(4),
    "gru.input": _recurrent(3),
    "rnn_tanh.input": _recurrent(1),
    "rnn_relu.input": _recurrent(1),
    "prims::div.default": _prims_division,
}
_CHECKS |= {
    f"{name}.{overload}": _rounded_division
    for name in ("div", "div_", "divide", "divide_")
    for overload in ("Tensor_mode", "Scalar_mode", "out_mode", "Scalar_mode_out")
}


def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch by its full name, or what looks at its arguments first."""
    return _FUNCTIONS.get(name, function)


def guard_module(module: nn.Module) -> None:
    """Put what looks at its arguments in place of each such operator, in a program's graphs."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                node.target = _of_operator(node.target)
        part.recompile()


@functools.cache
def _of_operator(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    packet = operator._schema.name.removeprefix("aten::")
    check = _CHECKS.get(f"{packet}.{operator._overloadname}", _CHECKS.get(packet))
    if check is None:
        return operator
    arguments = operator._schema.arguments
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}

    def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _GIVEN:
        return {**defaults, **{each.name: value for each, value in zip(arguments, args, strict=False)}, **kwargs}

    return _checked(operator, f"torch.ops.{operator.namespace}.{packet.rpartition(':')[2]}", check, given)


def _checked(
    function: Callable[..., Any],
    name: str,
    check: Callable[[_GIVEN], bool],
    given: Callable[[tuple[Any, ...], dict[str, Any]], _GIVEN],
) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        values = given(args, kwargs)
        tensors = [value for value in values.values() if isinstance(value, torch.Tensor | fx.Proxy)]
        if all(map(_real, tensors)) and not torch.compiler.is_compiling() and not torch._C._is_tracing():
            try:
                fits = check(values)
            except (AttributeError, KeyError, TypeError, IndexError):  # what is to be a tensor is none
                fits = False
            if not fits:
                raise ValueError(f"{name} is called with tensors whose sizes or values do not fit")
        return function(*args, **kwargs)

    # torch.fx writes the name of what says that it is torch's own into the source, and would find that.
    run.__name__, run.__module__ = name.rpartition(".")[2], __name__
    return run


def _real(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter)


def _named(*names: str) -> Callable[[tuple[Any, ...], dict[str, Any]], _GIVEN]:
    """Arguments of a function by their names."""
    return lambda args, kwargs: {**dict(zip(names, args, strict=False)), **kwargs}


def _given_repeats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _GIVEN:
    """One argument alone is the repeats."""
    names = ("input", "repeats") if len(args) > 1 or {"input", "self"} & kwargs.keys() else ("repeats",)
    if len(args) == 1 and "repeats" in kwargs:
        names = ("input",)
    return _named(*names)(args, kwargs)


# Under the names that they say they have: processes that train together find them by these.
scaled_dot_product_attention = _checked(
    torch.nn.functional.scaled_dot_product_attention,
    "torch.nn.functional.scaled_dot_product_attention",
    _attention,
    _named("query", "key", "value"),
)
repeat_interleave = _checked(torch.repeat_interleave, "torch.repeat_interleave", _repeats, _given_repeats)
divide = _checked(
    torch.divide,
    "torch.divide",
    lambda given: given.get("rounding_mode") is None or _rounded_division(given),
    _named("input", "other"),
)
matrix_power = _checked(
    torch.matrix_power,
    "torch.matrix_power",
    _power,
    _named("input", "n"),
)
linalg_matrix_power = _checked(
    torch.linalg.matrix_power,
    "torch.linalg.linalg_matrix_power",
    _power,
    _named("A", "n"),
)
tensor_split = _checked(
    torch.tensor_split,
    "torch.tensor_split",
    _parts,
    _named("input", "indices_or_sections"),
)
unbind = _checked(torch.unbind, "torch.unbind", _pieces, _named("input", "dim"))
chunk = _checked(torch.chunk, "torch.chunk", _pieces, _named("input", "chunks", "dim"))
split = _checked(torch.split, "torch.split", _pieces, _named("tensor", "split_size_or_sections", "dim"))
split_with_sizes = _checked(
    torch.split_with_sizes, "torch.split_with_sizes", _pieces, _named("input", "split_sizes", "dim")
)
hsplit = _checked(torch.hsplit, "torch.hsplit", _pieces, _named("input", "indices_or_sections"))
vsplit = _checked(torch.vsplit, "torch.vsplit", _pieces, _named("input", "indices_or_sections"))
dsplit = _checked(torch.dsplit, "torch.dsplit", _pieces, _named("input", "indices_or_sections"))
unsafe_chunk = _checked(torch.unsafe_chunk, "torch.unsafe_chunk", _pieces, _named("input", "chunks", "dim"))
unsafe_split = _checked(torch.unsafe_split, "torch.unsafe_split", _pieces, _named("input", "split_size", "dim"))
unsafe_split_with_sizes = _checked(
    torch.unsafe_split_with_sizes, "torch.unsafe_split_with_sizes", _pieces, _named("input", "split_sizes", "dim")
)
unbind_copy = _checked(torch.unbind_copy, "torch.unbind_copy", _pieces, _named("input", "dim"))
split_copy = _checked(torch.split_copy, "torch.split_copy", _pieces, _named("input", "split_size", "dim"))
split_with_sizes_copy = _checked(
    torch.split_with_sizes_copy, "torch.split_with_sizes_copy", _pieces, _named("input", "split_sizes", "dim")
)
sum_over = _checked(sum, "builtins.sum_over", _walked, _named("over", "start"))
max_over = _checked(max, "builtins.max_over", _walked, _named("over"))
min_over = _checked(min, "builtins.min_over", _walked, _named("over"))
_FUNCTIONS = {
    **{
        f"torch.{each.__name__}": each
        for each in (
            unbind,
            chunk,
            split,
            split_with_sizes,
            hsplit,
            vsplit,
            dsplit,
            unsafe_chunk,
            unsafe_split,
            unsafe_split_with_sizes,
            unbind_copy,
            split_copy,
            split_with_sizes_copy,
        )
    },
    "torch.functional.split": split,
    "builtins.sum": sum_over,
    "builtins.max": max_over,
    "builtins.min": min_over,
    "torch.divide": divide,
    "torch.nn.functional.scaled_dot_product_attention": scaled_dot_product_attention,
    "torch.repeat_interleave": repeat_interleave,
    "torch.matrix_power": matrix_power,
    "torch.linalg.matrix_power": linalg_matrix_power,
    "torch.tensor_split": tensor_split,
}
