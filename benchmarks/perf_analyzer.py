"""Triton's own load generator, run with the arguments given: python benchmarks/perf_analyzer.py -m MODEL …

The wheel of tritonclient 2.51.0 carries its binary, and nvidia-pytriton's the two libraries that it wants, under other
names. It is fetched once into build/perf_analyzer; later wheels no longer carry it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "2.51.0"
FOLDER = Path("build/perf_analyzer")
LIBRARIES = {"libb64.so.0d": "libb64-*", "libcudart.so.12": "libcudart-*"}


def install(folder: Path = FOLDER) -> tuple[Path, dict[str, str]]:
    """The binary, fetched when it isn't there, and the environment to run it in."""
    binary = folder.absolute() / "perf_analyzer"
    if not binary.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder)]
        subprocess.run([*command, f"tritonclient=={VERSION}"], check=True)
        (wheel,) = folder.glob("tritonclient-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            part = binary.with_suffix(".part")
            part.write_bytes(archive.read(f"tritonclient-{VERSION}.data/data/bin/perf_analyzer"))
        wheel.unlink()
        part.chmod(0o755)
        part.rename(binary)
    package = importlib.util.find_spec("pytriton")
    if package is None or not package.submodule_search_locations:
        sys.exit("nvidia-pytriton is not installed: pip install 'compress-serve[triton]'")
    libraries = Path(next(iter(package.submodule_search_locations))).parent / "nvidia_pytriton.libs"
    for name, pattern in LIBRARIES.items():
        link = binary.with_name(name)
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(next(libraries.glob(pattern)))
    folders = [str(binary.parent), str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]
    return binary, os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}


def main() -> None:
    binary, environ = install()
    os.execve(binary, [str(binary), *sys.argv[1:]], environ)  # noqa: S606 - becoming that program is the point


if __name__ == "__main__":
    main()
