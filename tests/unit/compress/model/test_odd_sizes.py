"""Sizes that show a branch on a size: of every remainder that strides have, and far from the usual one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compress.model.odd_sizes import Range, odd_sizes, ranges_of


@given(st.integers(1, 5000))
def test_odd_sizes_have_all_remainders_by_2_3_and_4_and_one_lies_far_beyond(size: int) -> None:
    found = odd_sizes(size)
    assert all(each > 0 and each != size for each in found)
    assert size == 1 or 1 in found
    assert len(set(found)) == len(found)
    for stride in (2, 3):
        assert {each % stride for each in (*found, size)} == set(range(stride))
    assert any(each % 4 == 2 for each in found)
    assert any(each & (each - 1) for each in found), "no power of two"
    assert max(found) >= size + size // 2 - 1
    assert max(found) <= max(1021, 2 * size + 16), "in bounded memory"


class LastFifty(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 50:
            x = x[:, -50:]
        return x.mean(1)


@pytest.mark.parametrize(
    ("size", "expected"), [(32, Range(None, 50)), (64, Range(51, None))], ids=["below the branch", "above it"]
)
def test_ranges_of_a_program_are_where_its_branch_was_taken_so(size: int, expected: Range) -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(LastFifty(), (torch.ones(2, size, 8),), dynamic_shapes=shapes)
    assert ranges_of(program, {("x", 0): "batch", ("x", 1): "T"}) == {"T": expected}


@pytest.mark.parametrize(
    ("span", "told", "beyond"),
    [
        (Range(None, 50), "up to 50", (51, 101)),
        (Range(51, None), "from 51 on", (50,)),
        (Range(8, 50), "from 8 to 50", (51, 101, 7)),
    ],
)
def test_a_range_is_told_and_known_from_outside(span: Range, told: str, beyond: tuple[int, ...]) -> None:
    assert str(span) == told
    groups = span.beyond()
    assert tuple(group[0] for group in groups) == beyond
    assert all(not span.holds(size) for group in groups for size in group)
    assert all(len(group) == 64 or 1 in group for group in groups)
    assert span.holds(span.most or span.least or 0)
