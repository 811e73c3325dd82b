"""Which label an answer of the server names: texts as they are, scores by their place."""

from __future__ import annotations

from typing import Any

import pytest

from compress.errors import ServerError
from serve.verify.labels import label_of


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ("cat", "cat"),
        (["cat"], "cat"),
        ([["cat"]], "cat"),
        (["cat", "dog", "cow"], "cat"),  # best first
        ([["cat", "dog"]], "cat"),
        ([0.1, 0.7, 0.2], "1"),
        ([[0.1, 0.7, 0.2]], "1"),
        ([1, 3, 2], "1"),
        (7, "7"),
        ([7], "7"),
        (["7"], "7"),
        ([True, False], "0"),
    ],
)
def test_a_label_is_read(value: Any, label: str) -> None:
    assert label_of({"outputs": {"a": value, "b": "other"}}, None) == label
    assert label_of({"outputs": {"b": "other", "a": value}}, "a") == label


@pytest.mark.parametrize(
    "value", [["cat", 0.3], [{"label": "cat"}, {"label": "dog"}], [], [[0.1], [0.2, 0.3]], [None, 1]]
)
def test_what_names_none_says_so(value: Any) -> None:
    with pytest.raises(ServerError, match="names no label"):
        label_of({"outputs": {"a": value}}, None)
