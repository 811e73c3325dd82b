"""What `make test` leaves to `make test-all`: cases of tests that are there, by a list that can be read."""

from __future__ import annotations

import re

import pytest

from tests.conftest import FIRST
from tests.e2e.conftest import ROOT
from tests.long import LISTED, left_out, listed


def test_of_a_listed_test_some_cases_are_tried_spread_over_all_and_of_others_all() -> None:
    tests = [*(f"a.py::one[{case}]" for case in range(7)), "a.py::two", "b.py::one[1]", "b.py::one[2]"]
    few = left_out(tests, {"a.py::one": 3, "a.py::two": 0, "b.py::one": 5})
    assert [test for test in tests if test not in few] == [
        "a.py::one[0]", "a.py::one[1]", "a.py::one[4]", "b.py::one[1]", "b.py::one[2]",
    ]  # fmt: skip
    assert left_out(tests, {}) == set()


@pytest.mark.parametrize(("slow", "fast"), [(8, 2), (4, 3), (5, 5), (2, 8)])
def test_of_crossed_parameters_each_value_is_tried(slow: int, fast: int) -> None:
    tests = [f"a.py::one[{first}-{second}]" for first in range(slow) for second in range(fast)]
    tried = sorted({*tests} - left_out(tests, {"a.py::one": len(tests) // 2}))
    assert len({test.split("-")[1] for test in tried}) > fast / 2
    assert len({test.split("-")[0] for test in tried}) >= slow - 1


def test_words_behind_a_hash_are_for_those_who_read() -> None:
    assert listed("# tests\n\na.py::one 2  # 30 s each\n") == {"a.py::one": 2}


@pytest.mark.parametrize("text", ["a.py::one", "a.py::one few", "a.py::one 1 2", "a.py::one 1\na.py::one 2"])
def test_a_line_that_says_no_number_or_something_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"twice|unpack|invalid literal"):
        listed(text)


@pytest.mark.parametrize("test", listed(LISTED.read_text(encoding="utf-8")))
def test_what_is_listed_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", FIRST)
def test_what_comes_first_is_there(name: str) -> None:
    assert (ROOT / "tests" / f"{name}.py").is_file()
