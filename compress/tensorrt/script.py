"""The script that builds an engine where TensorRT is: in the Triton container that will serve it, most of all.

An engine runs on the TensorRT release and the kind of GPU that built it, so the machine that serves is the one to build
on. The script is one file, takes the artifact's folder, and needs Python's standard library and TensorRT, or trtexec.
"""

from __future__ import annotations

import dataclasses
import pprint
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from compress import __version__
from compress.artifact import Artifact
from compress.errors import ArtifactError, RecipeError
from compress.options import EngineOptions
from compress.storage.files import write_files
from compress.tensorrt.profiles import build_options

__all__ = ["write_script"]


def write_script(artifact: Path, options: EngineOptions, output: Path) -> None:
    """Write the script for an artifact.

    Args:
        artifact: a folder that `compress export` wrote.
        options: how to build.
        output: the script; replaced if it is there.

    Raises:
        ArtifactError: no artifact, or not one of ONNX.
        RecipeError: the options don't fit its signature.

    Examples:
        >>> write_script(Path("artifact"), EngineOptions(max_batch_size=8), Path("build_engine.py"))
        >>> "max_batch_size" in Path("build_engine.py").read_text()
        False
    """
    found = Artifact.load(artifact)
    if found.format != "onnx":
        raise ArtifactError(
            f"can't build an engine of {artifact}",
            why=f"its model is a {found.format}, not an ONNX file",
            mend="name an artifact of `compress export … --target tensorrt`",
        )
    if options.timing_cache is not None and options.timing_cache.is_absolute():
        raise RecipeError(
            f"can't keep the timing cache at {options.timing_cache}",
            why="the script may run on another machine",
            mend="give a relative path: it is then beside what the script writes",
        )
    settings = dataclasses.asdict(build_options(found.signature, options))
    settings["timing_cache"] = None if options.timing_cache is None else str(options.timing_cache)
    write_files({output: _text(settings, found.sha256)}, programs=True)


def _text(settings: Mapping[str, Any], sha256: str) -> str:
    """Head, the builder as it is here, settings, and the part that runs them."""
    engine = files("compress.tensorrt")
    build = (engine / "build.py").read_text(encoding="utf-8").partition("from __future__ import annotations\n")[2]
    run = (engine / "run_script.py").read_text(encoding="utf-8").partition("# --- below, the script\n")[2]
    head = f'''#!/usr/bin/env python3
"""Build a TensorRT engine from an artifact. Written by compress {__version__}; needs TensorRT 10 or 11, or trtexec.

    python3 build_engine.py ARTIFACT OUTPUT

ARTIFACT is the folder that `compress export` wrote, OUTPUT a new one, for `serve pack`. In the container that will
serve it:

    docker run --rm --gpus all -v "$PWD:/work" -w /work nvcr.io/nvidia/tritonserver:RELEASE-py3 \\\\
        python3 build_engine.py ARTIFACT OUTPUT
"""

from __future__ import annotations
'''
    values = pprint.pformat(dict(settings), width=110, sort_dicts=False)
    return f"{head}{build}\n\nMODEL_SHA256 = {sha256!r}\nSETTINGS: dict[str, Any] = {values}\n{run}"
