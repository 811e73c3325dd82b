"""Numbers agree with their nouns, in every message of the package."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

import compress
from compress.console.wording import Note, counted


@pytest.mark.parametrize(
    ("number", "things", "text"),
    [
        (1, "epochs", "1 epoch"),
        (0, "epochs", "0 epochs"),
        (2000, "samples", "2,000 samples"),
        (1, "interleaved rounds", "1 interleaved round"),
        (1, "models loaded alone", "1 model loaded alone"),
        (1, "candidates evaluated", "1 candidate evaluated"),
        (1, "processes", "1 process"),
        (1, "batches", "1 batch"),
        (1, "axes", "1 axis"),
        (1, "entries", "1 entry"),
        (1, "layers in INT8", "1 layer in INT8"),
        (1, "MACs", "1 MAC"),
        (1, "status lines", "1 status line"),
        (1.0, "points", "1 point"),
        (0.5, "points", "0.5 points"),
    ],
)
def test_a_number_agrees_with_its_noun(number: float, things: str, text: str) -> None:
    assert counted(number, things) == text


def test_a_note_is_its_words() -> None:
    assert Note("Mind.") == "Mind."


# What is formatted as it stands, and the plural behind it, with a word between.
PLURAL = re.compile(r" (?:[a-z]+ )?([A-Za-z]{3,}s)\b")
VERBS = {"gives", "has", "is", "was", "holds", "takes", "bytes", "points"}  # and what is never one
NUMBERS = re.compile(
    r"len\(|(^|\.)(count|total|epochs|rounds|samples|steps|rows|nodes|layers|halves|processes|threads)$"
)


def test_no_message_puts_a_plural_behind_a_number_that_may_be_1() -> None:
    root = Path(compress.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        if path.name == "run_script.py":  # travels alone
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for value, text in pairwise(parts):
                if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                    if ast.unparse(value.value).startswith("counted("):
                        continue
                    after = PLURAL.match(str(text.value))
                    as_given = value.format_spec is not None and ast.unparse(value.format_spec) in (
                        "f'g'",
                        "f''g''",
                        'f"g"',
                    )
                    counts = (
                        as_given if after and after.group(1) == "points" else NUMBERS.search(ast.unparse(value.value))
                    )
                    if after and counts and after.group(1) not in VERBS - {"points"}:
                        found.append(f"{path.name}:{value.lineno}: {ast.unparse(value.value)}{after.group()}")
    assert found == []
