"""Names that a file gives, told without looking for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.vetting.paths import stands_inside


@pytest.mark.parametrize("name", ["a", "a/b.bin", "é" * 127, "a" * 255, "..a", "/".join(["a" * 200] * 5)])
def test_a_name_that_a_file_can_have(name: str, tmp_path: Path) -> None:
    assert stands_inside(name)
    assert not (tmp_path / name).is_file()


@pytest.mark.parametrize(
    "name", ["/a", "//a", "..", "a/../b", "a" * 256, "é" * 128, "a\0b", "\ud800", "/".join(["a"] * 600)], ids=ascii
)
def test_one_that_none_can_have_or_that_leads_out(name: str) -> None:
    assert not stands_inside(name)
