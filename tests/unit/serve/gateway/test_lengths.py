"""Lists of texts in parts of like length: nothing is lost, parts are bounded, and little of what is worked on is filling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.edge.lengths import ALIKE, LONGEST, Part, parts_of

SIZES = st.lists(st.one_of(st.integers(1, 80), st.integers(1, 6000)), min_size=1, max_size=200)


def seen(parts: list[list[int]], sizes: list[int]) -> int:
    """Bytes that a network works on: each text for as long as the longest of its part."""
    return sum(len(part) * max(min(sizes[at], LONGEST) for at in part) for part in parts)


def places(parts: list[Part]) -> list[list[int]]:
    return [list(part.places) for part in parts]


@given(SIZES, st.integers(1, 64), st.integers(1, 20_000))
def test_each_text_is_in_one_part_and_parts_are_bounded(sizes: list[int], most: int, budget: int) -> None:
    parts = parts_of(sizes, most, budget)
    assert sorted(at for part in places(parts) for at in part) == [*range(len(sizes))]
    for (part, cost), bare in zip(parts, places(parts), strict=True):
        assert len(part) <= most
        assert cost == seen([bare], sizes), "what is cut off takes the model no time"
        assert len(part) == 1 or cost <= budget


@given(SIZES, st.integers(1, 64), st.integers(1, 20_000))
def test_less_than_half_of_what_is_worked_on_is_filling_but_for_short_texts(
    sizes: list[int], most: int, budget: int
) -> None:
    for part in places(parts_of(sizes, most, budget)):
        sound = sum(min(sizes[at], LONGEST) for at in part)
        assert seen([part], sizes) <= max(2 * sound, sound + len(part) * ALIKE)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([5, 30, 8, 12], [[1, 3, 2, 0]]),  # hardly anything to win
        ([40, 1000, 30, 900, 50], [[1, 3], [4, 0, 2]]),
        ([1200] * 7, [[0, 1, 2], [3, 4, 5], [6]]),  # by the budget
        ([10] * 9, [[*range(8)], [8]]),  # by the model's largest batch
        ([9000, 5000, 4096, 10], [[0], [1], [2], [3]]),  # longer than any budget, each alone
    ],
)
def test_texts_of_like_length_go_together(sizes: list[int], parts: list[list[int]]) -> None:
    assert places(parts_of(sizes, 8, 4096)) == parts


def test_mixed_lists_are_worked_on_for_little_more_than_their_texts() -> None:
    """A quarter paragraphs, as they come: whole batches of them would be worked on for three times as long."""
    sizes = [1000 + 13 * number if number % 4 == 0 else 20 + number % 40 for number in range(64)]
    alone, as_they_come = sum(sizes), [[*range(at, at + 32)] for at in (0, 32)]
    assert seen(as_they_come, sizes) > 3 * alone
    assert seen(places(parts_of(sizes, 32, 4096)), sizes) < 1.25 * alone
