"""What a Triton is started with, where it can be told before there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.errors import ServerError
from serve.triton.launch import TritonServer
from serve.triton.memory import limits


def test_a_log_that_is_no_file_is_left_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to("/dev/null")

    for log in (pipe, tmp_path / "link", tmp_path):
        with pytest.raises(ServerError, match="can't log to"):
            TritonServer(tmp_path, log=log).start()

    assert pipe.is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_too_few_files_are_told_before_it_starts(tmp_path: Path) -> None:
    command = f"ulimit -n 64; exec {sys.executable} -m serve up model_repository --log {tmp_path}/triton.log"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "it may have 64 files open, and needs 96 at least" in done.stderr
    assert not (tmp_path / "triton.log").exists()


def test_what_bounds_a_server_is_told(tmp_path: Path) -> None:
    group = tmp_path / "cgroups/pod"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/pod\n")
    (group / "pids.max").write_text("max\n")
    assert "pids.max" not in limits(cgroups=tmp_path / "cgroups", proc=tmp_path)

    (group / "pids.max").write_text("1024\n")
    assert "leaves 1024 threads, of which each model" in limits(cgroups=tmp_path / "cgroups", proc=tmp_path)
