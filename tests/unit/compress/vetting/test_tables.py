"""A table of anybody's takes no more memory than a line of it may have."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compress.errors import DatasetError
from compress.vetting import tables
from compress.vetting.tables import rows_of

MANY = 1000
# A file that is one line or one row, of letters or more than `MANY`, by its kind.
LONG: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "a line of a .txt": ("1.txt", lambda: iter(["x" * 2 * MANY])),
    "a line of a .jsonl": ("1.jsonl", lambda: iter([json.dumps({"text": "x" * 2 * MANY})])),
    "the first line of a .csv": ("1.csv", lambda: iter(["x" * 2 * MANY])),
    "a first line of many columns": ("1.csv", lambda: (f"c{at}," for at in range(MANY))),
    "a cell of a .csv": ("1.csv", lambda: iter(["text\n", "x" * 2 * MANY])),
    "many cells of a .tsv": ("1.tsv", lambda: iter(["text\n", "x\t" * MANY])),
    "a cell of many lines": ("1.csv", lambda: iter(["text\n", '"', "x\n" * MANY, '"\n'])),
    "many cells of two lines": ("1.csv", lambda: iter(["text\n", '"x\n",' * MANY, "\n"])),
}


@pytest.mark.parametrize("case", LONG)
def test_no_line_and_no_row_is_longer_than_a_line_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(tables, "LONGEST_LINE", MANY)
    name, parts = LONG[case]
    (tmp_path / name).write_text("".join(parts()))
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        list(rows_of(tmp_path / name))
    assert f"over {MANY:,} letters" in caught.value.why


def test_a_file_is_not_bounded_and_cells_may_have_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LONGEST_LINE", MANY)
    wanted = [{"text": f"{at}\nof two lines, 'quoted' \"so\"", "label": str(at)} for at in range(MANY)]
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["text", "label"])
    writer.writeheader()
    writer.writerows(wanted)
    (tmp_path / "1.csv").write_bytes(file.getvalue().encode())
    assert list(rows_of(tmp_path / "1.csv")) == wanted


def test_a_first_line_of_very_many_columns_is_read_in_no_time(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text(",".join(f"c{at}" for at in range(100_000)) + "\n")
    begun = time.perf_counter()
    assert list(rows_of(tmp_path / "1.csv")) == []
    assert time.perf_counter() - begun < 20, "a name is looked up, not counted anew for each: that took minutes"


PEAK = """
import resource, sys
from pathlib import Path
from compress.data.texts import _chunks
from compress.vetting.tables import rows_of
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(len(rows) for _, rows in _chunks(rows_of(Path(sys.argv[1]), ["text", "label"])))
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
NESTED = "[" + "[]," * 100_000 + "0]"


@pytest.mark.parametrize(
    "row",
    [
        f'{{"text": "a", "other": {NESTED}}}',
        f'{{"text": "a", "label": {NESTED}}}',
        '{"text": "a", "NUMBER": {' + ", ".join(f'"{at}": NUMBER' for at in range(60_000)) + "}}",
        '{"text": "a", ' + ", ".join(f'"NUMBER {at}": 0' for at in range(40_000)) + "}",
    ],
    ids=["a list that nobody asked for", "a list as a label", "a table", "columns of other names in each row"],
)
def test_what_nobody_asked_for_takes_no_memory(tmp_path: Path, row: str) -> None:
    """A row of a third of a megabyte is 8 MB in Python, and a thousand rows are held at a time."""
    (tmp_path / "a.jsonl").write_text("".join(row.replace("NUMBER", str(at)) + "\n" for at in range(60)))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "a.jsonl")], capture_output=True, text=True, check=True
    )
    count, grown = map(int, done.stdout.split())
    assert count == 60
    assert grown < 100_000, "kilobytes; 500,000 and more before"


def test_others_are_known_by_the_first_of_their_names(tmp_path: Path) -> None:
    columns = {"text": "a", "label": [1], "when": "b" * 1000} | {f"c{at}": at for at in range(1000)}
    (tmp_path / "a.jsonl").write_text(json.dumps(columns) + "\n")
    (tmp_path / "a.csv").write_text(",".join(columns) + "\n" + ",".join(["x"] * len(columns)) + "\n")
    (row,) = rows_of(tmp_path / "a.jsonl", ["text", "label"])
    assert (row["text"], row["label"], row["when"], row["c0"]) == ("a", [], None, None)
    assert len(row) == 66
    (row,) = rows_of(tmp_path / "a.csv", ["text", "label"])
    assert (row["text"], row["label"], row["when"], len(row)) == ("x", "x", None, 66)
    assert next(iter(rows_of(tmp_path / "a.jsonl"))) == columns
