"""Libraries that draw say nothing of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_matplotlib_says_nothing_of_a_cache_that_can_t_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    places = dict.fromkeys(("XDG_CACHE_HOME", "XDG_CONFIG_HOME"), str(tmp_path / "cache"))
    code = "import compress.report.plots, matplotlib; print(matplotlib.get_cachedir() != '')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | places, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
