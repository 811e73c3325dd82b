"""A table of anybody's takes no more memory than a line of it may have."""

from __future__ import annotations

import csv
import io
import json
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
