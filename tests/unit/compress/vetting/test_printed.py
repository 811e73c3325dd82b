"""Whatever bytes a file's name is of, it can be printed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict", "latin-1:strict"])
def test_a_name_that_is_no_utf8_goes_out_as_it_is(encoding: str) -> None:
    code = (
        "from compress.vetting.printed import print_any_name; import os; print_any_name();"
        "print(os.fsdecode(b'b\\xffd'), '\\ud800', '\\u4f60')"
    )
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"b\xffd \\ud800 ")
