"""What forwards of many kinds call can be written down and read again; what only harms can't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compress.formats.checkpoint import load, save
from compress.formats.native.graph import GraphError, from_data, to_data
from compress.formats.native.words import function_of, methods
from compress.model import call, sample_inputs

Forward = Callable[[Any], Any]


class Calls(nn.Module):
    """A layer, and then what is asked for."""

    def __init__(self, then: Forward, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.then = inside, then

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self.inside(x))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y += 1
    y *= x
    y.clamp_(0, 1).mul_(2).unsqueeze_(1)
    return torch.relu_(y)


def windows(x: torch.Tensor) -> torch.Tensor:
    b, c, h, w = x.shape
    return x.view(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)


def heads(x: torch.Tensor) -> torch.Tensor:
    b, c = x.shape[0], x.size(1)
    q = x.flatten(2).transpose(1, 2).reshape(b, -1, 2, c // 2).swapaxes(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).contiguous().view(b, -1, c)


FORWARDS: dict[str, Forward] = {
    "Tensor.unflatten": lambda x: x.unflatten(1, (2, -1)),
    "torch.unflatten": lambda x: torch.unflatten(x, 1, (2, -1)),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
    "interpolate to another's size": lambda x: F.interpolate(F.avg_pool2d(x, 2), size=x.shape[-2:], mode="nearest"),
    "attention": heads,
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "where with a number": lambda x: torch.where(x > 0, x, 0.5),
    "masked_fill": lambda x: x.masked_fill(x < 0, float("-inf")).softmax(1),
    "chunk": lambda x: (lambda parts: parts[0] + parts[1])(x.chunk(2, 1)),
    "gated": lambda x: (lambda parts: parts[0] * parts[1].sigmoid())(x.chunk(2, dim=1)),
    "split": lambda x: torch.cat(x.split([1, 3, 4], 1)[::-1], 1),
    "unbind": lambda x: torch.stack(x.unbind(1)[:2], -1),
    "in place": in_place,
    "windows": windows,
    "symbolic slices": lambda x: x[:, :, : x.shape[2] // 2, x.size(3) - 4 :],
    "slices of all kinds": lambda x: x[..., ::2, None][:, [0, 2]],
    "names of what max gives": lambda x: x.max(1).values + torch.max(x, 1)[0],
    "names of what topk gives": lambda x: x.flatten(1).topk(3).indices,
    "names of what a decomposition gives": lambda x: torch.linalg.svd(x.mean(1)).S,
    "linalg": lambda x: torch.linalg.norm(x, dim=1) + torch.linalg.vector_norm(x, dim=1),
    "fft": lambda x: torch.fft.irfft2(torch.fft.rfft2(x, norm="ortho"), s=(8, 8), norm="ortho"),
    "complex numbers": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 4, 2)) * 1.0).flatten(1),
    "parts of complex numbers": lambda x: (lambda c: torch.cat([c.real, c.imag, c.abs(), c.angle()], 1))(
        torch.fft.rfft(x)[:, ::2, 1:3]
    ),
    "special": lambda x: torch.special.expit(x) + torch.special.erf(x),
    "logsigmoid": F.logsigmoid,
    "activations": lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.threshold(x, 0.1, 0.0) + F.mish(x) + F.relu6(x),
    "activations in place": lambda x: F.leaky_relu_(F.elu_(x.clone())),
    "new_zeros": lambda x: torch.cat([x, x.new_zeros(x.size(0), 1, 8, 8), x.new_full((x.size(0), 1, 8, 8), 3.0)], 1),
    "new_ones": lambda x: x + x.new_ones(1) + x.new_tensor(2.0),
    "full_like": lambda x: x + torch.full_like(x, 0.5) + torch.ones_like(x),
    "positions": lambda x: x + torch.arange(x.shape[-1], device=x.device, dtype=x.dtype),
    "a causal mask": lambda x: (x @ x.mT).masked_fill(torch.ones(8, 8).tril().logical_not(), 0.0),
    "roll": lambda x: torch.roll(x, shifts=(-2, -2), dims=(2, 3)),
    "pad": lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "normalize": lambda x: F.normalize(x, dim=1) + F.layer_norm(x, x.shape[-1:]),
    "unfold": lambda x: F.fold(F.unfold(x, 2, stride=2), (8, 8), 2, stride=2),
    "Tensor.unfold": lambda x: x.unfold(2, 4, 2),
    "grid_sample": lambda x: F.grid_sample(
        x, F.affine_grid(x.mean((2, 3))[:, :6].view(-1, 2, 3), [x.shape[0], 8, 8, 8], False), align_corners=False
    ),
    "gather": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), 1.0),
    "cumsum": lambda x: x.cumsum(-1) / x.abs().cumsum(-1).clamp(min=1e-3),
    "statistics": lambda x: (x - x.mean((2, 3), keepdim=True)) * torch.rsqrt(x.var((2, 3), keepdim=True) + 1e-5),
    "std_mean": lambda x: torch.std_mean(x, dim=1)[0],
    "dtypes": lambda x: x.half().float().to(torch.float64).type_as(x) + (x > 0).to(x.dtype) + x.long().float(),
    "type": lambda x: x.type(torch.float32).type_as(x),
    "powers": lambda x: 2**x + x.abs() ** 0.5 - 1 / (x.square() + 1),
    "bits": lambda x: ((x > 0) & ~(x > 1) | (x < -1)).int(),
    "repeat": lambda x: x.repeat(1, 2, 1, 1).repeat_interleave(2, 1),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1).movedim(1, -1),
    "tensordot": lambda x: torch.tensordot(x, torch.ones(8, 2), dims=([3], [0])),
    "baddbmm": lambda x: torch.baddbmm(x[:, 0], x[:, 1], x[:, 2]),
    "meshgrid": lambda x: x + torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")[0],
    "one_hot": lambda x: F.one_hot(x.argmax(1), 8).float(),
    "glu": lambda x: F.glu(x, 1),
    "pools": lambda x: F.max_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 4) + F.adaptive_max_pool2d(x, (4, 4)),
    "a pool's places": lambda x: F.max_pool2d(x, 2, return_indices=True)[1],
    "functional convolution": lambda x: F.conv2d(x, torch.ones(2, 8, 3, 3), padding="same"),
    "dropout": lambda x: F.dropout(x, 0.5, False) + F.dropout2d(x, 0.5, False),
    "sort": lambda x: torch.sort(x, dim=1, descending=True).values,
    "several outputs": lambda x: {"a": x.mean((2, 3)), "b": x.amax((2, 3))},
    "numbers of sizes": lambda x: x.sum() / (x.numel() // x.size(0)) * x.shape[1] ** -0.5,
    "stride": lambda x: x.as_strided((x.shape[0], 4), (x.stride(0), 1), x.storage_offset()),
    "functional attention": lambda x: F.multi_head_attention_forward(
        x.flatten(2).permute(2, 0, 1), x.flatten(2).permute(2, 0, 1), x.flatten(2).permute(2, 0, 1), 8, 2, torch.ones(24, 8) / 8, torch.zeros(24), None, None, False, 0.0,
        torch.eye(8), torch.zeros(8), training=False,
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARDS)
def test_what_a_forward_calls_is_saved_and_loads(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    module = Calls(FORWARDS[name], nn.Conv2d(3, 8, 3, padding=1)).eval()
    again = load(save(module, tmp_path / "model.pt", inputs="x:float32[batch,3,8,8]"))
    given = sample_inputs(again.signature, 2)
    with torch.no_grad():
        want, got = (call(which, again.signature.inputs, given) for which in (module, again.module))
    assert want.keys() == got.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], equal_nan=True)


@pytest.mark.parametrize(
    "name",
    [
        "torch.load", "torch.save", "torch.from_file", "torch.sparse_coo_tensor", "torch.quantize_per_tensor",
        "torch.lu_solve", "torch.autocast", "torch.compile", "torch.set_num_threads", "torch.manual_seed", "torch.vmap",
        "torch.functional.boolean_dispatch", "torch.nn.functional.handle_torch_function", "torch.Tensor",
        "torch.indices_copy", "torch.linalg.ldl_solve", "math.factorial", "math.comb", "_operator.call",
        "_operator.attrgetter", "_operator.concat", "builtins.eval", "builtins.getattr ", "os.system",
    ],
)  # fmt: skip
def test_a_function_that_is_not_listed_has_no_name(name: str) -> None:
    with pytest.raises(Exception, match="is not a function on tensors"):
        function_of(name)


def test_no_method_makes_or_opens_a_tensor_whose_memory_is_not_plain() -> None:
    assert not methods() & {
        "to_sparse", "to_sparse_csr", "indices", "values", "coalesce", "sparse_mask", "to_mkldnn", "dequantize", "set_",
        "resize_", "as_strided_", "numpy", "data_ptr", "apply_", "register_hook", "share_memory_", "as_subclass",
        "record_stream", "new", "lu_solve", "__reduce__", "__class__",
    }  # fmt: skip


N = {"node": "n"}
DOUBLING: dict[str, tuple[str, list[Any], list[Any]]] = {
    "squares": ("_operator.mul", [7, 9], [N, N]),
    "powers": ("_operator.pow", [7, 9], [N, 60]),
    "powers of powers": ("_operator.pow", [7, 9], [2, N]),
    "shifts": ("_operator.lshift", [7, 9], [N, 60]),
    "products": ("math.prod", [7, 9], [{"list": [N, N]}]),
    "lists": ("_operator.add", [{"list": [7]}, {"list": [9]}], [N, N]),
    "repeated lists": ("_operator.mul", [{"list": [7]}, 9], [N, 1000]),
    "one list, repeated": ("_operator.mul", [{"list": [7]}, 9], [N, 1 << 40]),
    "texts": ("_operator.mul", ["x", 9], [N, 9]),
    "a text as long as it says": ("_operator.mod", ["%0999999999d", 9], [N, 9]),
}


@pytest.mark.parametrize("name", DOUBLING)
def test_numbers_lists_and_texts_that_grow_are_refused_before_anything_runs(name: str) -> None:
    def node(number: int, op: str, target: str, *args: Any) -> dict[str, Any]:
        named = "n" if op == "call_function" else f"m{number}"
        return {"name": named, "op": op, "target": target, "args": {"tuple": list(args)}, "kwargs": {"dict": []}}

    target, first, then = DOUBLING[name]
    start = node(1, "call_function", "_operator.add" if target != "math.prod" else target, *first)
    start = start | {"target": "builtins.max"} if name in ("texts", "a text as long as it says") else start
    if target == "math.prod":
        start["args"] = {"tuple": [{"list": first}]}
    if name == "one list, repeated" or name == "repeated lists":
        start = node(1, "call_function", "_operator.mul", *first)
    nodes = [node(0, "placeholder", "x"), start]
    nodes += [node(2 + at, "call_function", target, *then) for at in range(40)]
    nodes += [node(99, "output", "output", {"node": "m0"})]
    with pytest.raises(GraphError, match="no network needs"):
        from_data({"nodes": nodes, "modules": {}, "parameters": {}, "buffers": {}})


def test_arithmetic_on_sizes_does_not_count_as_growth() -> None:
    class Deep(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                size = x.shape[-1] // 2 * 2 + 1
                x = x * x.shape[1] + size
                x = x.reshape(x.shape[:2] + (x.shape[2], -1)).flatten(2)  # noqa: RUF005  what fx sees
            return x**2

    from_data(to_data(Deep(), inputs=1))
