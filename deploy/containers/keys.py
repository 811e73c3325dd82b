"""Keys of a client and of Prometheus, made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["make_keys"]


def make_keys(folder: Path) -> None:
    """Write keys.json, which the gateway reads, client-key and metrics-key, where there are none."""
    keys = folder / "keys.json"
    if keys.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, file, flags in (
        ("client", "client-key", []), ("prometheus", "metrics-key", ["--metrics", "--model", "none"]),
    ):  # fmt: skip
        words = [sys.executable, "-m", "serve", "keys", "add", name, "--file", str(keys), *flags]
        made = subprocess.run(words, check=True, capture_output=True, text=True)
        path = folder / file
        path.touch(mode=0o600)
        path.write_text(made.stdout)
