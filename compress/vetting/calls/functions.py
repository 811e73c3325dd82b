"""The functions and methods of tensors that a graph in a file may call, by name.

An operator of `compress.vetting.calls.operators` stands for every function and method of torch that has its name; what
is Python code of torch's own, and so no operator, is named here. All else is refused: a list of what may not be called
would leak with each release of torch. Sparse, quantized and nested tensors are none of it, as kernels believe what
these say of their own memory.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import types
from collections.abc import Callable

import torch
from torch.nn import functional as F

from compress.vetting.calls.guards import guarded
from compress.vetting.calls.operators import function_of_tensors

__all__ = ["functions", "methods"]

# Each with what its names begin with among the operators.
_SPACES: dict[types.ModuleType, str] = {
    torch: "",
    torch.functional: "",
    F: "",
    torch.linalg: "linalg_",
    torch.fft: "fft_",
    torch.special: "special_",
}
_IN_PYTHON = {
    torch: (
        "broadcast_shapes get_device is_same_size is_signed numel sym_float sym_int sym_ite sym_max sym_min sym_not "
        "sym_sum unique unravel_index"
    ),
    torch.functional: "broadcast_shapes unique unravel_index",
    F: (
        "adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices "
        "affine_grid cross_entropy dropout1d dropout2d dropout3d fold fractional_max_pool2d "
        "fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices grid_sample "
        "gumbel_softmax interpolate linear_cross_entropy local_response_norm logsigmoid lp_pool1d lp_pool2d lp_pool3d "
        "max_unpool1d max_unpool2d max_unpool3d multi_head_attention_forward normalize softmin softsign tanhshrink "
        "upsample upsample_bilinear upsample_nearest"
    ),
    torch.fft: "hfft2 hfftn ihfft2 ihfftn",
    torch.special: "gammainc gammaincc",
    operator: (
        "abs add and_ contains eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul index inv "
        "invert ior ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos pow "
        "rshift setitem sub truediv truth xor"
    ),
    builtins: "abs float int len max min round sum",
    math: (
        "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh degrees dist erf erfc exp exp2 expm1 fabs "
        "floor fmod frexp fsum gamma gcd hypot isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 log1p "
        "log2 modf nextafter pow prod radians remainder sin sinh sqrt tan tanh trunc ulp"
    ),
}
# What layers and torch.nn.functional call with arguments that they have checked.
_UNCHECKED = (
    "cudnn_batch_norm embedding_bag gru gru_cell lstm lstm_cell native_channel_shuffle native_dropout "
    "native_group_norm native_layer_norm native_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell"
)
_METHODS = (
    "bfloat16 bool byte cdouble cfloat char cpu cuda dim dim_order double element_size fill_diagonal_ float get_device "
    "half int is_contiguous is_same_size is_signed long ndimension nelement new_tensor numel put put_ requires_grad_ "
    "short size storage_offset stride type unique"
)


@functools.cache
def functions() -> dict[str, Callable[..., object]]:
    """By the name of the module and its own."""
    table: dict[str, Callable[..., object]] = {}
    for space in (*_SPACES, operator, builtins, math):
        named = _IN_PYTHON.get(space, "").split()
        if space in _SPACES:
            named += [name for name in dir(space) if _listed(space, name)]
        module = "_operator" if space is operator else space.__name__  # what torch.fx finds it under
        if space is torch:
            named = [name for name in named if name not in _UNCHECKED.split()]
        known = {f"{module}.{name}": getattr(space, name) for name in named if hasattr(space, name)}
        table |= {name: guarded(name, function) for name, function in known.items()}
    return table


@functools.cache
def methods() -> frozenset[str]:
    """Of tensors."""
    named = [name for name in dir(torch.Tensor) if name[0] != "_" and function_of_tensors(name)]
    return frozenset(name for name in (*named, *_METHODS.split()) if callable(getattr(torch.Tensor, name, None)))


def _listed(space: types.ModuleType, name: str) -> bool:
    known = function_of_tensors(_SPACES[space] + name) or (space is F and function_of_tensors(name))
    return name[0] != "_" and known and isinstance(getattr(space, name), types.FunctionType | types.BuiltinFunctionType)
