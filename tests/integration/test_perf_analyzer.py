"""Several processes may install Triton's load generator into one folder at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.integration
SCRIPT = ROOT / "benchmarks/perf_analyzer.py"
(VERSION,) = re.findall(r'^VERSION = "(.+)"$', SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)


def test_processes_that_install_at_once_do_not_take_it_from_each_other(tmp_path: Path) -> None:
    wheel = tmp_path / f"tritonclient-{VERSION}-py3-none-any.whl"
    about = f"tritonclient-{VERSION}"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            f"{about}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: tritonclient\nVersion: {VERSION}\n"
        )
        archive.writestr(f"{about}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}.data/data/bin/perf_analyzer", "#!/bin/sh\necho I ran\n")
    environ = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    environ["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(SCRIPT)]
    started = [
        subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in started:
        out, err = process.communicate(timeout=250)
        assert (process.returncode, out) == (0, "I ran\n"), err
    assert sorted(path.name for path in (tmp_path / "build/perf_analyzer").iterdir()) == [
        "libb64.so.0d", "libcudart.so.12", "perf_analyzer"
    ]  # fmt: skip
