"""A model's outputs are found by running it, at sizes that it takes; a name means that a size is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import compress
from compress.errors import SignatureError
from compress.model import call, example_inputs
from compress.model.infer import elsewhere, infer_signature, runs_at
from compress.signature import Signature, TensorSpec
from tests.families import Bert, Lstm, UNet


def inferred(module: nn.Module, *inputs: str, **sizes: int) -> Signature:
    return infer_signature(module.eval(), tuple(map(TensorSpec.parse, inputs)), sizes=sizes)


def outputs(signature: Signature) -> list[str]:
    return [str(spec).partition(":")[2] for spec in signature.outputs]


class Positions(nn.Module):
    """A table of positions, as long as the longest sequence."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.table = nn.Embedding(length, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.arange(x.shape[1]))  # type: ignore[no-any-return]


class Pyramid(nn.Module):
    """Strides up to 128, as detectors have: what is made so small differs only between sizes far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(*(nn.Conv2d(1, 1, 3, 2, 1) for _ in range(7)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quarter, least = self.down[:2](x), self.down(x)
        return quarter, quarter + 1, least, quarter.flatten(2), quarter.flatten(0, 1)


class Asserts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[2] % 64 == 0, "the height is no multiple of 64"
        return x


class Joins(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a, b], 1)


class Scores(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.transpose(1, 2)


class AtMost(nn.Module):
    """So many rows as there are, and no more than some."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : self.most]


IMAGE, TOKENS = "x:float32[batch,3,height,width]", ("t:int64[batch,seq]", "m:int64[batch,seq]")


@pytest.mark.parametrize(
    ("module", "inputs", "expected"),
    [
        (UNet(), (IMAGE,), ["float32[batch,2,height,width]"]),
        (Bert(), TOKENS, ["float32[batch,5]"]),
        (Lstm(), ("x:float32[n,time,8]",), ["float32[n,5]"]),
        (Positions(20), ("x:float32[batch,seq,4]",), ["float32[batch,seq,4]"]),
        (Positions(3), ("x:float32[batch,seq,4]",), ["float32[batch,seq,4]"]),
        (Asserts(), ("x:float32[batch,1,h,w]",), ["float32[batch,1,h,w]"]),
        (Scores(), ("x:float32[batch,seq,8]",), ["float32[batch,seq,seq]"]),
        (Joins(), ("a:float32[batch,s,4]", "b:float32[batch,t,4]"), ["float32[batch,s_t,4]"]),
        (Joins(), ("a:float32[batch,s,4]", "b:float32[batch,s,4]"), ["float32[batch,s_1,4]"]),
        (AtMost(20), ("x:float32[batch,seq,8]",), ["float32[batch,seq_1,8]"]),
        (AtMost(100), ("x:float32[batch,seq,8]",), ["float32[batch,seq_1,8]"]),
        (nn.Linear(4, 2), ("x:float32[1,4]",), ["float32[1,2]"]),
        (
            Pyramid(),
            ("x:float32[n,1,h,w]",),
            ["float32[n,1,h_1,w_1]"] * 2 + ["float32[n,1,h_2,w_2]", "float32[n,1,h_w]", "float32[n,h_1,w_1]"],
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_an_outputs_dimension_has_the_name_of_the_size_that_it_is_and_another_name_if_it_follows_one(
    module: nn.Module, inputs: tuple[str, ...], expected: list[str]
) -> None:
    assert outputs(inferred(module, *inputs)) == expected


class Mixed(nn.Module):
    """Its inputs as they are, one dimension of each halved, and two of them joined where they fit."""

    def forward(self, *given: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {f"same_{index}": x for index, x in enumerate(given)}
        found |= {f"half_{index}": x[..., ::2] for index, x in enumerate(given)}
        return found | {f"flat_{index}": x.reshape(-1) for index, x in enumerate(given)}


DIMENSION = st.sampled_from(["batch", "n", "s", "t", 1, 4])


@given(st.lists(st.lists(DIMENSION, min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_a_size_that_a_name_promises_is_that_size_whatever_the_inputs_are(
    shapes: list[list[Any]], data: st.DataObject
) -> None:
    specs = tuple(TensorSpec(f"x{index}", "float32", tuple(shape)) for index, shape in enumerate(shapes))
    module = Mixed()
    signature = infer_signature(module, specs)
    free = sorted(set(signature.told))
    if free:
        signature = signature.sized({free[0]: data.draw(st.integers(1, 9))})
    sizes = signature.at(data.draw(st.integers(1, 6)))
    assert sizes.keys() == {dim for shape in shapes for dim in shape if isinstance(dim, str)}
    sizes |= {dim: data.draw(st.integers(1, 40)) for dim in free}
    names: dict[str, int] = dict(sizes)
    for spec, tensor in zip(signature.outputs, call(module, specs, example_inputs(specs, sizes)).values(), strict=True):
        assert len(spec.shape) == tensor.ndim
        for dim, size in zip(spec.shape, tensor.shape, strict=True):
            assert size == (names.setdefault(dim, size) if isinstance(dim, str) else dim), "one name, one size"


@pytest.mark.parametrize(
    ("module", "inputs", "sizes", "told"),
    [
        (Positions(512), ("x:float32[batch,seq,4]",), {"seq": 300}, {"seq": (300, "as given")}),
        (Positions(512), ("x:float32[batch,seq,4]",), {}, {"seq": (32, "assumed")}),
        (Positions(20), ("x:float32[batch,seq,4]",), {}, {"seq": (16, "the first that runs")}),
        (UNet(), (IMAGE,), {"width": 64}, {"height": (224, "assumed"), "width": (64, "as given")}),
        (Asserts(), ("x:float32[batch,1,h,w]",), {}, {"h": (64, "the first that runs"), "w": (64, "the first that runs")}),
    ],
)  # fmt: skip
def test_where_nothing_is_said_a_size_is_taken_that_the_model_runs_at(
    module: nn.Module, inputs: tuple[str, ...], sizes: dict[str, int], told: dict[str, Any]
) -> None:
    assert inferred(module, *inputs, **sizes).told == told


@pytest.mark.parametrize(
    ("module", "inputs", "sizes", "why"),
    [
        (Positions(512), "x:float32[batch,seq,4]", {"seq": 600}, "out of range"),
        (UNet(), IMAGE, {"height": 33}, "Sizes of tensors must match"),
        (Positions(512), "x:float32[batch,seq,4]", {"length": 3}, "seq"),
        (Positions(512), "x:float32[batch,seq,4]", {"batch": 3}, "counts samples"),
        (Positions(512), "x:float32[batch,seq,4]", {"seq": 10**12}, "would take"),
        (nn.Linear(3, 2), "x:float32[batch,5]", {}, "cannot be multiplied"),
        (nn.Bilinear(4, 4, 1), "x:float32[batch,5]", {}, "missing 1 required"),
    ],
)
def test_what_does_not_run_is_told_in_words(
    module: nn.Module, inputs: str, sizes: dict[str, int], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SignatureError) as caught:
        inferred(module, inputs, **sizes)
    assert why in caught.value.why
    assert capfd.readouterr() == ("", "")


def test_outputs_that_change_in_kind_with_a_size_are_refused() -> None:
    class Squeezes(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x if x.shape[1] < 40 else (x, x)

    with pytest.raises(SignatureError) as caught:
        inferred(Squeezes(), "x:float32[batch,seq]")
    assert "their number" in caught.value.why


def test_other_sizes_are_ones_that_run_and_are_unlike_each_other() -> None:
    specs = (TensorSpec.parse(IMAGE),)
    runs = runs_at(UNet().eval(), specs)
    found = elsewhere(runs, {"batch": 2, "height": 64, "width": 64}, ["height", "width"])
    assert found == {"batch": 2, "height": 32, "width": 96}
    assert elsewhere(lambda _sizes: False, {"seq": 7}, ["seq"]) == {"seq": 7}


def test_a_program_keeps_which_dimensions_are_one_and_which_are_not(tmp_path: Path) -> None:
    """torch.export names no dimension; before, they were told apart by their place alone."""

    class Reads(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (q @ k.transpose(1, 2)) * mask[:, None]

    batch, asked, there = (torch.export.Dim(name) for name in ("batch", "asked", "there"))
    program = torch.export.export(
        Reads(),
        (torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.ones(2, 5)),
        dynamic_shapes=({0: batch, 1: asked}, {0: batch, 1: there}, {0: batch, 1: there}),
    )
    torch.export.save(program, tmp_path / "reads.pt2")
    signature = compress.load(tmp_path / "reads.pt2", sizes=["dim_1=12"]).signature
    assert list(map(str, signature.inputs)) == [
        "q:float32[batch,dim_1,4]", "k:float32[batch,dim_1_1,4]", "mask:float32[batch,dim_1_1]"
    ]  # fmt: skip
    assert outputs(signature) == ["float32[batch,dim_1,dim_1_1]"]
    assert signature.at(1) == {"batch": 1, "dim_1": 12, "dim_1_1": 32}
