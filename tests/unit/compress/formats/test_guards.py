"""Guards of an exported program are comparisons of sizes, read from a file of anybody's, and never run."""

from __future__ import annotations

import json
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError
from compress.formats.checkpoint import load
from compress.formats.exported.asked import asks_of_little
from compress.formats.exported.guards import LOOKED_AT, fails, guards_in, looked_at, read_guards

DYNAMIC = torch.export.Dim.DYNAMIC
SIZE = "L['x'].size()[1]"


@pytest.mark.parametrize(
    ("guard", "size", "holds"),
    [
        (f"{SIZE} <= 50", 50, True),
        (f"{SIZE} <= 50", 51, False),
        (f"({SIZE} % 3) != 0", 33, False),
        (f"2 + 2*(((-3) + {SIZE}) // 4) >= 2 + (((-3) + {SIZE}) // 2)", 15, True),
        (f"2 <= {SIZE} <= 9", 10, False),
        (f"max(1, {SIZE}) == {SIZE} and not {SIZE} == 7", 7, False),
        (f"({SIZE} / 2) <= 25.0", 50, True),
        (f"({SIZE} / 2) <= 25.0", 51, False),
        (f"math.trunc(0.5*torch.sym_float({SIZE})) != 25", 51, False),
        (f"math.ceil({SIZE} / 4) == math.floor({SIZE} / 4)", 51, False),
        (f"64 // ({SIZE} - 51) > 3", 51, True),  # which is not defined
        (f"math.log2({SIZE} // 52) > 3", 51, True),
        (f"math.sqrt({SIZE} - 52) > 3", 51, True),
        ("L['y'].size()[1] <= 50", 51, True),  # of another input
        ("__import__('os').system('false')", 51, True),
        (f"{SIZE}.__class__ == 0", 51, True),
        ("L[0]['x'].size()[1] <= 50", 51, True),
        ("(" * 5000, 51, True),
        ("9**9**9 < 0", 51, True),
        ("1 // 0 == 1", 51, True),
        (" * ".join(["99999999999"] * 60) + " == 0", 51, True),
    ],
)
def test_a_guard_holds_by_its_comparison_and_what_is_none_is_not_read(guard: str, size: int, holds: bool) -> None:
    assert (fails(read_guards([guard], [("x", 1)])[0], {("x", 1): size}) is None) is holds


@pytest.mark.parametrize(
    ("guard", "fails_from"),
    [
        (f"math.log2({SIZE} // 2) <= 8", 514), (f"math.log({SIZE} - 1) <= 5.0", 150),
        (f"torch._sym_sqrt({SIZE} - 2) <= 20", 403),
    ],
)  # fmt: skip
def test_where_a_function_is_undefined_at_one_size_the_others_are_looked_at(guard: str, fails_from: int) -> None:
    (read,), unread = read_guards([guard], [("x", 1)])
    assert not unread
    failing = LOOKED_AT[read.failing([("x", 1)], {}, LOOKED_AT)]
    assert failing[0] == fails_from


def test_a_guard_with_very_many_numbers_takes_little() -> None:
    numbers = ",".join(str(each) for each in range(1000, 19000))
    chains = ",".join(f"{SIZE}*{factor}" + "+1" * 60 for factor in range(2, 300))
    found, _ = read_guards([f"max({SIZE},{numbers}) > 0", f"max({chains}) > 0"], [("x", 1)])
    tracemalloc.start()
    try:
        for each in found:
            assert len(each.numbers) < 30_000
            each.failing([("x", 1)], {}, looked_at([each], []))
        assert tracemalloc.get_traced_memory()[1] < 500e6
    finally:
        tracemalloc.stop()


@given(st.integers(1, 5000), st.integers(1, 600))
def test_guards_are_evaluated_at_many_sizes_at_once_as_at_each(size: int, other: int) -> None:
    text = f"({SIZE} % {other}) != 0 or {SIZE} // {other} == max(2, {size})"
    (guard,), unread = read_guards([text], [("x", 1)])
    assert not unread
    failing = LOOKED_AT[guard.failing([("x", 1)], {}, LOOKED_AT)]
    assert (size in failing) == (fails([guard], {("x", 1): size}) is not None)


@pytest.mark.parametrize(
    ("guard", "fails_at"),
    [
        (f"{SIZE} <= 160000", 160_001),
        (f"{SIZE} // 160 <= 1000", 160_160),
        (f"{SIZE} != 123457", 123_457),
        (f"3*{SIZE} <= 480000", 163_840),  # near what no number of it tells
        (f"{SIZE}*{SIZE}*{SIZE}*{SIZE}*{SIZE} <= 3125", 6),  # where it gets too large, it is not known
    ],
)
def test_a_guard_is_looked_at_however_far_it_fails(guard: str, fails_at: int) -> None:
    read, _ = read_guards([guard], [("x", 1)])
    among = looked_at(read, [])
    found = among[read[0].failing([("x", 1)], {}, among)]
    assert found[0] == fails_at
    assert guard.count("*") > 1 or "!=" in guard or np.isin(range(found[0], found[0] + 40), found).all()


@pytest.mark.parametrize(
    ("guard", "own"),
    [
        (f"{SIZE} != 1", True),
        (f"{SIZE} >= 2", True),
        (f"2 <= {SIZE}", True),
        (f"{SIZE} > 1", True),
        (f"({SIZE} // 8) != 0", True),
        (f"((-1) + {SIZE}) != 1", True),
        (f"(({SIZE} // 8)*({SIZE} // 4)) != ({SIZE} // 8)", True),
        (f"{SIZE} != ({SIZE} // ({SIZE} // 2))", True),
        (f"{SIZE} != max(1, {SIZE} // ({SIZE} // 2))", True),
        (f"1 <= {SIZE} // 2 and 1 <= {SIZE} // 4", True),
        (f"{SIZE} > 2", False),
        (f"2 < {SIZE}", False),
        (f"{SIZE} != 2", False),
        (f"{SIZE} % 2 == 0", True),  # by its text a question of whether something is empty
        (f"{SIZE} <= 50", False),
        (f"{SIZE} <= 1 or {SIZE} > 900", False),
    ],
)
def test_whether_something_is_empty_or_has_one_row_is_torchs_own_question(guard: str, own: bool) -> None:
    assert asks_of_little(read_guards([guard], [("x", 1)])[0][0]) is own


def test_guards_that_cant_be_read_are_known_and_so_are_those_beyond_a_bound() -> None:
    texts = [f"{SIZE} <= 50", f"{SIZE}.bit_length() == 3", *[f"{SIZE} != 3"] * 2100]
    read, unread = read_guards(texts, [("x", 1)])
    assert unread[-1] == f"{SIZE}.bit_length() == 3"
    assert len(read) + len(unread) == len(texts)
    assert len(unread) == 1 + 2102 - 2048


def padded(layers: int, size: str = SIZE) -> str:
    """The size behind as many layers of stride 2 whose padding is what keeps it whole, as torch.export writes it."""
    for _ in range(layers):
        size = f"({size} + max(0, 1 - {size} + 2*math.ceil({size} / 2))) // 2"
    return size


def test_a_guard_whose_parts_are_the_same_again_and_again_is_read_however_long_it_is() -> None:
    text = f"{padded(6)} <= 3"
    assert len(text) > 15_000
    (guard,), unread = read_guards([text], [("x", 1)])
    assert not unread
    assert [fails([guard], {("x", 1): size}) is None for size in (100, 191, 192, 1000)] == [True, True, True, False]
    assert guard.named({("x", 1): "T"}).startswith("((((((T + max(0, 1 - T")


def test_guards_of_too_many_parts_are_not_read() -> None:
    texts = [" + ".join(f"{SIZE} * {first * 60 + at}" for at in range(30)) + " > 0" for first in range(2000)]
    read, unread = read_guards(texts, [("x", 1)])
    assert read
    assert unread


@given(st.text(max_size=200))
def test_no_text_is_more_than_read(text: str) -> None:
    assert fails(read_guards([text], [("x", 1)])[0], {("x", 1): 3}) in (None, text)


@pytest.mark.parametrize("told", [None, 3, {}, "x", [1, None, {}], []])
def test_what_is_no_list_of_texts_has_no_guards(told: object) -> None:
    assert guards_in(json.dumps({"guards_code": told}).encode()) == []


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 50:
            x = x[:, -50:]
        return self.layer(x).mean(1)  # type: ignore[no-any-return]


class Padded(Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % 3 == 0:
            x = nn.functional.pad(x, (0, 0, 0, 1))
        return self.layer(x).mean(1)  # type: ignore[no-any-return]


class Halved(Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(2 * x if x.shape[1] / 2 > 25 else x).mean(1)  # type: ignore[no-any-return]


class ByTheBatch(Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(2 * x if x.shape[0] % 4 == 0 else x).mean(1)  # type: ignore[no-any-return]


class FarPadded(Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(2 * x if x.shape[1] % 512 == 0 else x).mean(1)  # type: ignore[no-any-return]


class FarCut(Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, :160_000] if x.shape[1] > 160_000 else x).mean(1)  # type: ignore[no-any-return]


class OfTwo(Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(2 * x if x.shape[1] <= 2 else x).mean(1)  # type: ignore[no-any-return]


class InTwenties(Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(2 * x if x.shape[1] // 20 == 1 else x).mean(1)  # type: ignore[no-any-return]


class InWindows(Cut):
    """Takes multiples of 11 alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :-11] if x.shape[1] > 300 else x
        rows = self.layer(x).reshape(x.shape[0], x.shape[1] // 11, 11, 4)
        return rows.softmax(2).mean((1, 2))  # type: ignore[no-any-return]


class Groups(Cut):
    """What -1 stands for is undefined below four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(x.shape[0], x.shape[1] // 4, -1)).mean(1)  # type: ignore[no-any-return]


class Differences(Cut):
    """Of rows, of which there is one for two rows, and none for one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, 1:] - x[:, :-1]).sum(1)  # type: ignore[no-any-return]


class Pooled(Cut):
    """torch.export asks whether what a pool gives has one row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = nn.functional.max_pool2d(self.layer(x)[:, None], (8, 1))
        return nn.functional.max_pool2d(found, (2, 1)).mean((1, 2))


class Plain(Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    ("module", "dim", "told"),
    [
        (Cut(), DYNAMIC, "dim_1 up to 50"),
        (Padded(), DYNAMIC, "dim_1 = 33"),
        (Halved(), DYNAMIC, "dim_1 = 51"),
        (ByTheBatch(), DYNAMIC, "batch % 4 != 0. What is exported from it runs at batch = 4"),
        (FarPadded(), DYNAMIC, "dim_1 = 512"),
        (FarCut(), DYNAMIC, "dim_1 up to 160000. What is exported from it runs at dim_1 = 160001"),
        (OfTwo(), DYNAMIC, "dim_1 from 3 on. What is exported from it runs at dim_1 = 2"),
        (InTwenties(), DYNAMIC, "dim_1 // 20 != 1. What is exported from it runs at dim_1 = 39"),
        (InWindows(), DYNAMIC, "dim_1 = 308"),
        (Groups(), DYNAMIC, ""),
        (Differences(), DYNAMIC, ""),
        (Pooled(), DYNAMIC, ""),
        (Plain(), DYNAMIC, ""),
        (Plain(), torch.export.Dim("t", max=64), ""),  # declared, and decided by nothing
    ],
    ids=[
        "range",
        "guard",
        "fraction",
        "batch",
        "far guard",
        "far range",
        "of two",
        "in twenties",
        "windows of 11",
        "groups",
        "differences",
        "pool",
        "neither",
        "declared",
    ],
)
def test_a_program_that_decided_something_by_a_size_says_so_when_it_is_loaded(
    module: nn.Module, dim: Any, told: str, trust: bool, tmp_path: Path
) -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC, 1: dim},)
    size = 64 if isinstance(module, InTwenties) else 33 if isinstance(module, InWindows) else 32
    program = torch.export.export(module.eval(), (torch.ones(2, size, 8),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "m.pt2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(tmp_path / "m.pt2", trust=trust, sizes={"dim_1": size})
    said = [str(each.message) for each in caught if each.category is AssumedWarning]
    assert [told in each for each in said] == ([True] if told else [])


def test_a_guard_that_fails_at_the_usual_size_is_told_of_its_own_dimension(tmp_path: Path) -> None:
    program = torch.export.export(Padded().eval(), (torch.ones(2, 37, 8),), dynamic_shapes=({0: DYNAMIC, 1: DYNAMIC},))
    torch.export.save(program, tmp_path / "m.pt2")
    with pytest.warns(AssumedWarning, match="by the size of dim_1: .* and not at dim_1 = 33, .*--size dim_1=34"):
        load(tmp_path / "m.pt2", sizes={"dim_1": 33})


class InADict(Cut):
    def forward(self, x: Any) -> torch.Tensor:
        return self.layer(x["a"])  # type: ignore[no-any-return]


class ByKeyword(Cut):
    def forward(self, *, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(x)  # type: ignore[no-any-return]


class WithNone(Cut):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(x if mask is None else x * mask)  # type: ignore[no-any-return]


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    ("module", "given", "named", "told"),
    [
        (InADict(), ({"a": torch.ones(2, 8)},), {}, "in a dict or a tuple, or by keyword: x_a"),
        (ByKeyword(), (), {"x": torch.ones(2, 8)}, "by keyword: x"),
        (WithNone(), (torch.ones(2, 8), None), {}, "no tensor: mask"),
    ],
    ids=["dict", "keyword", "None"],
)
def test_a_program_whose_inputs_are_no_tensors_by_themselves_is_refused_by_their_names(
    module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], told: str, trust: bool, tmp_path: Path
) -> None:
    torch.export.save(torch.export.export(module.eval(), given, named), tmp_path / "m.pt2")
    with pytest.raises(CheckpointError, match=f"can't take the exported program(.|\n)*{told}"):
        load(tmp_path / "m.pt2", trust=trust)


class PaddedWindows(Cut):
    """Windows of 7, padded up to as Swin pads them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.pad(x, (0, 0, 0, (7 - x.shape[1] % 7) % 7, 0, (7 - x.shape[0] % 7) % 7))
        rows = rows.view(rows.shape[0] // 7, 7, rows.shape[1] // 7, 7, 8).transpose(1, 2).reshape(-1, 49, 8)
        return self.layer(rows).mean(1)  # type: ignore[no-any-return]


def test_expressions_of_padded_sizes_are_refused_as_too_long_and_not_as_code(tmp_path: Path) -> None:
    shapes = ({0: DYNAMIC, 1: DYNAMIC},)
    program = torch.export.export(PaddedWindows().eval(), (torch.ones(15, 32, 8),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "m.pt2")
    with pytest.raises(CheckpointError, match="can't vet the exported program") as caught:
        load(tmp_path / "m.pt2")
    assert "compress.save" in caught.value.mend
    assert "sizes padded up to multiples" in caught.value.why
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load(tmp_path / "m.pt2", trust=True).signature.inputs
