"""reproduce.sh: the very command of a run, after its inputs have been found unchanged."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

__all__ = ["script"]


def script(command: str, folder: Path, inputs: Mapping[Path, str], versions: Mapping[str, str]) -> str:
    """A shell script that checks the inputs' SHA-256 and runs the command in the folder it was run in.

    Args:
        command: as a shell would take it.
        folder: where it was run; another can be named as the script's argument.
        inputs: files that went in, with their hashes.
        versions: releases of the packages that decide the result, as a comment.
    """
    sums = "\n".join(f"{digest}  {path}" for path, digest in inputs.items())
    packages = " ".join(f"{name}=={version}" for name, version in versions.items())
    return f"""#!/bin/sh
# Runs again what wrote this folder. Usage: reproduce.sh [FOLDER], by default where it was run.
# With {packages}
set -eu
folder={shlex.quote(str(folder))}
cd "${{1:-$folder}}"
sha256sum --check --quiet <<'END'
{sums}
END
{command}
"""
