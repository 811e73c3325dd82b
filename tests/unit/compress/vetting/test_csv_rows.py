"""A quote too many makes no row of several: the line is told. Fields of several lines are read."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import DatasetError
from compress.vetting.tables import rows_of

MANY = "".join(f"film {at},{at % 2}\n" for at in range(20))
STRAY: dict[str, tuple[str, str]] = {
    "never closed": ('text,label\n"Great film,1\nBad film,0\n', "a quote on line 2 begins a field that never ends"),
    "never closed, in the last column": (
        'label,text\n1,"Great film\n0,Bad film\n', "a quote on line 2 begins a field that never ends",
    ),
    "closed by another row's": (
        f'text,label\n{MANY}"Great film,1\nBad film,0\nFine film",1\n{MANY}', "lines 22 to 24 are one row",
    ),
    "closed by another row's, the label first": (
        'label,text\n0,So so\n1,"Great film\n0,Bad film\n1,Fine film"\n', "lines 3 to 5 are one row",
    ),
    "closed by another row's, the labels words": (
        'text,label\na,good\nb,bad\nc,good\nd,bad\n"Great film,good\nBad film,bad\nFine film",good\n',
        "lines 6 to 8 are one row",
    ),
    "closed by another row's, with a blank line between": (
        f'text,label\n{MANY}"Great film,1\n\nFine film",1\n{MANY}', "lines 22 to 24 are one row",
    ),
    "closed by another row's, the numbers with exponents": (
        f'text,score\nbad,1e3\nso so,.5\n{MANY}"Great film,2.5E-1\nFine film",1\n{MANY}', "lines 24 to 25 are one row",
    ),
    "a short row behind blank lines": ('text,label\n\n  \na,1\n\nb\n', "line 6 has another number of columns"),
    "closed where another field begins": (
        'text,label\n"Great film,1\n"Bad film",0\n', "line 3 goes on behind the quote that ends a field that began on line 2",
    ),
    "inside of a field": ('text,label\nHe said "no",1\n', "line 2 has a quote inside of a field"),
    "behind a space": ('text,label\n "no",1\n', "line 2 has a quote inside of a field"),
    "text behind a field": ('text,label\n"He" said,1\n', "line 2 goes on behind the quote that ends a field"),
    "in the first line": ('text,la"bel\na,1\n', "line 1 has a quote inside of a field"),
    "a row that swallows a column": ('text,label\nb,0\n"a,1\n\nb"\n', "line 3 has another number of columns"),
}  # fmt: skip


@pytest.mark.parametrize("case", STRAY)
def test_a_quote_too_many_is_told_by_its_line(tmp_path: Path, case: str) -> None:
    text, why = STRAY[case]
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(tmp_path / "a.csv"))
    assert why in caught.value.why
    if "number of columns" not in why:
        assert "each of them twice" in caught.value.mend


HONEST: dict[str, tuple[str, list[list[str]]]] = {
    "a letter": ('text,label\n"Dear John,\nplease come",1\nx,0\n', [["Dear John,\nplease come", "1"], ["x", "0"]]),
    "a list": ('text,label\n"a, 1\nb, 2\nc",0\nx,1\n', [["a, 1\nb, 2\nc", "0"], ["x", "1"]]),
    "lines of spaces": ("text,label\na,1\n  \n\nb,0\n\t\n", [["a", "1"], ["b", "0"]]),
    "lines of spaces, one column": ('text\na\n  \n""\n\nb\n', [["a"], [""], ["b"]]),
    "one column": ('text\n"a\nb"\n"c ""d"""\n', [["a\nb"], ['c "d"']]),
    "empty lines": ('\n\ntext,label\r\n"a\r\n\r\nb",1\r\n\r\n,0\r\n', [["a\r\n\r\nb", "1"], ["", "0"]]),
    "no line end": ('a,b\n"x","y"', [["x", "y"]]),
}


@pytest.mark.parametrize("case", HONEST)
def test_fields_of_several_lines_are_read(tmp_path: Path, case: str) -> None:
    text, wanted = HONEST[case]
    (tmp_path / "a.csv").write_bytes(text.encode())
    assert [list(row.values()) for row in rows_of(tmp_path / "a.csv")] == wanted


def test_quotes_inside_of_a_tsv_are_letters_and_those_around_a_field_are_none(tmp_path: Path) -> None:
    """As corpora have them; one that begins a field and never ends is told there, too."""
    (tmp_path / "a.tsv").write_text('text\tlabel\nHe said "no"\t1\n"a\tb"\t0\n')
    assert [row["text"] for row in rows_of(tmp_path / "a.tsv")] == ['He said "no"', "a\tb"]
    (tmp_path / "a.tsv").write_text('text\tlabel\n"Great film\t1\nBad film\t0\n')
    with pytest.raises(DatasetError, match="a quote on line 2"):
        list(rows_of(tmp_path / "a.tsv"))


words = st.text(st.sampled_from("ab1 ,\"\n\r'\t"), max_size=8)


@given(st.lists(st.tuples(words, st.sampled_from(["yes", "no"]), words), min_size=1, max_size=6))
def test_what_python_writes_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]
) -> None:
    """But for rows that a quote could have made of several, which random ones may be."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerows([("a", "b", "c"), *rows])
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_bytes(file.getvalue().encode())
    try:
        assert [tuple(row.values()) for row in rows_of(path)] == rows
    except DatasetError as err:
        assert "are one row by a quote" in err.why  # noqa: PT017


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_field_may_be_as_long_as_a_row(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"long{suffix}"
    text = "good film " * 500_000
    path.write_text(f"text\n{text}\n")
    assert [row["text"] for row in rows_of(path)] == [text]
