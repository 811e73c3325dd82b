"""What a Triton is started with, where it can be told before there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compress.errors import ServerError
from serve.triton.launch import TritonServer


def test_a_log_that_is_no_file_is_left_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to("/dev/null")

    for log in (pipe, tmp_path / "link", tmp_path):
        with pytest.raises(ServerError, match="can't log to"):
            TritonServer(tmp_path, log=log).start()

    assert pipe.is_fifo()
    assert (tmp_path / "link").is_symlink()
