"""Files that are written: who may run a script is who may read it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from compress.storage.files import let_run, write_files


@pytest.fixture(params=[0o022, 0o077, 0o027, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_script_has_the_mode_that_the_umask_gives_to_programs(umask: int, tmp_path: Path) -> None:
    write_files({tmp_path / "build.py": "#!/usr/bin/env python3\n"}, programs=True)
    (tmp_path / "reproduce.sh").write_text("#!/bin/sh\n")
    let_run(tmp_path / "reproduce.sh")
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~umask


def test_other_files_can_t_be_run(umask: int, tmp_path: Path) -> None:
    write_files({tmp_path / "search.json": "{}"})
    assert stat.S_IMODE((tmp_path / "search.json").stat().st_mode) == 0o666 & ~umask
