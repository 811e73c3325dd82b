"""Labels in tables are numbers of classes, or names, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.data.text_labels import _array, _number
from compress.data.texts import _no_text
from compress.errors import DatasetError
from compress.processor import Processor

NAMED = Processor("text", "sequence-classification", {}, ("no", "yes"), 8, Path())


@pytest.mark.parametrize(
    "label",
    [
        10**309, -(10**309), 10**400, "1" * 310, "-" + "9" * 400, "1" * 5000, 1 << 63, -(1 << 63), float("nan"),
        float("inf"), "nan", "-inf", "1e999", "1_0", "٣", "", [], {},
    ],
    ids=lambda label: repr(label)[:12],
)  # fmt: skip
def test_a_label_that_is_no_number_of_a_class_is_named_with_its_row(label: object) -> None:
    with pytest.raises(DatasetError, match=r"row 2 of .* has the label"):
        _number(label, 2, Path("data.jsonl"), NAMED)


def array_of(labels: list[object], name: str) -> np.ndarray[Any, Any]:
    return _array([_number(label, at, Path(name), NAMED) for at, label in enumerate(labels, 1)])


def test_numbers_and_names_are_labels() -> None:
    assert array_of([0, "1", "yes", "no"], "data.csv").tolist() == [0, 1, 1, 0]
    assert array_of([0.5, "2e3", (1 << 53)], "data.csv").dtype == np.float32
    assert array_of([2.0, 16777217], "data.jsonl").tolist() == [2, 16777217]


@pytest.mark.parametrize(
    ("row", "mend"),
    [
        ({"Text": "a", "Label": 1}, "--text-column Text"),
        ({" text": "a"}, "--text-column ' text'"),
        ({"body": "a"}, "name the column of texts with --text-column"),
    ],
)
def test_a_column_of_texts_in_other_case_is_named(row: dict[str, Any], mend: str) -> None:
    assert mend in _no_text(Path("d.csv"), 1, row, "text", "--text-column").mend
