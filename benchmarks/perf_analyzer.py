"""Triton's own load generator, run with the arguments given: python benchmarks/perf_analyzer.py -m MODEL …

The wheel of tritonclient 2.51.0 carries its binary, and nvidia-pytriton's the two libraries that it wants, under other
names. It is fetched once into build/perf_analyzer; later wheels no longer carry it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from serve.triton.wheel import private

VERSION = "2.51.0"
FOLDER = Path("build/perf_analyzer")
LIBRARIES = {"libb64.so.0d": "libb64-*", "libcudart.so.12": "libcudart-*"}


def install(folder: Path = FOLDER) -> tuple[Path, dict[str, str]]:
    """The binary, fetched when it isn't there, and the environment to run it in."""
    folder.mkdir(parents=True, exist_ok=True)
    binary = folder.absolute() / "perf_analyzer"
    # Several processes may want it at once: each fetches into a folder of its own, and the last one to be ready stays.
    if not binary.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as name:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", name]
            subprocess.run([*command, f"tritonclient=={VERSION}"], check=True)
            (wheel,) = Path(name).glob("tritonclient-*.whl")
            part = Path(name) / "perf_analyzer"
            with zipfile.ZipFile(wheel) as archive:
                part.write_bytes(archive.read(f"tritonclient-{VERSION}.data/data/bin/perf_analyzer"))
            part.chmod(0o755)
            part.replace(binary)
    triton = private()
    if triton is None:
        sys.exit("Triton's wheel is not installed: serve triton install")
    libraries = triton.libraries
    for name, pattern in LIBRARIES.items():
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            link = Path(beside) / name
            link.symlink_to(next(libraries.glob(pattern)))
            link.replace(binary.with_name(name))
    folders = [str(binary.parent), str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    return binary, os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}


def main() -> None:
    binary, environ = install()
    os.execve(binary, [str(binary), *sys.argv[1:]], environ)  # noqa: S606 - becoming that program is the point


if __name__ == "__main__":
    main()
