"""What an installation needs and this machine lacks, in one list, before anything is downloaded.

    python3 serve/doctor/before.py --torch cpu

It runs by itself under any Python 3, with nothing installed: no import of this project, no syntax newer than 3.6.
"""

import argparse
import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

__all__ = ["Lack", "lacks", "own_sources", "plan"]

OLDEST = (3, 11)
TRITONS = ("3.12", "3.11")  # under which its Python models run: NumPy 1, which it needs, has wheels for no later one
GLIBC = (2, 35)
# Megabytes, of Linux x86-64 wheels of `.[all]` and Triton's: downloaded (for CPUs: torch 192, others 252, Triton 75),
# and on disk (1,890 in the environment with its bytecode, Triton 220, 520 in pip's cache).
SIZES = {"cpu": (520, 2600), "cuda": (3600, 9300)}
MACHINE = (platform.system(), platform.machine())
BUILT = (("Linux", "x86_64"), ("Linux", "aarch64"))  # for which there is a wheel of Triton
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


class Lack(NamedTuple):
    """What is missing, and how to mend it."""

    what: str
    mend: str


def lacks(
    torch: str,
    folder: str,
    version: "tuple[int, ...]" = sys.version_info[:2],
    machine: "tuple[str, str]" = MACHINE,
) -> "list[Lack]":
    """What is missing for an installation with its demo: a list of `Lack`, empty where all is there.

    Args:
        torch: "cpu" or "cuda".
        folder: where the environment is to stand.
        version, machine: those of the running Python, for tests.
    """
    found = []
    said = ".".join(map(str, version))
    if tuple(version) < OLDEST:
        found.append(
            Lack(
                "Python {}.{} or later: this one is {} ({})".format(OLDEST[0], OLDEST[1], said, sys.executable),
                "make PYTHON=python3.11 …, once it is there: apt-get install python3.11 python3.11-venv libpython3.11; "
                "or: uv python install 3.11; or: pyenv install 3.11",
            )
        )
        said = "3.11"
    elif said not in TRITONS and not any(map(shutil.which, ("uv", *("python" + other for other in TRITONS)))):
        found.append(
            Lack(
                "Python 3.11 or 3.12 besides, for Triton's Python models, or uv, which fetches one",
                "apt-get install python3.11-venv libpython3.11; or: pip install uv",
            )
        )
    elif said in TRITONS and not _library(said):
        found.append(
            Lack(
                "the shared library libpython{}.so.1.0: Triton's Python models run in it".format(said),
                "apt-get install libpython{}".format(said),
            )
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        found.append(Lack("the module venv", "apt-get install python{}-venv".format(said)))
    if machine not in BUILT:
        found.append(
            Lack(
                "Linux on x86-64 or ARM64: this is {} on {}; the embedded Triton is built for no other".format(
                    *machine
                ),
                "pip install -e '.[compress,serve]' compresses, and serves a Triton elsewhere: serve up --triton URL",
            )
        )
    elif _glibc() < GLIBC:
        found.append(
            Lack(
                "glibc {}.{}, which the embedded Triton needs: this is {}.{}".format(*(GLIBC + _glibc())),
                "a newer system (Debian 12, Ubuntu 22.04), or a container of one",
            )
        )
    asked = there = Path(folder).absolute()
    while not there.is_dir():
        there = there.parent
    free = shutil.disk_usage(str(there)).free // 1000000
    if free < SIZES[torch][1]:
        found.append(
            Lack(
                "{} MB of disk for {}: {} MB are free".format(SIZES[torch][1], asked, free),
                "make room there, or clone to a larger disk",
            )
        )
    return found


def own_sources(config: str) -> bool:
    """Whether pip was told where to look, by its configuration: then torch comes from there, too.

    Args:
        config: what `pip config list` prints.
    """
    names = ("index-url", "extra-index-url", "find-links", "no-index")
    keys = [line.split("=", 1)[0].strip().rsplit(".", 1)[-1].lower().strip(":") for line in config.splitlines()]
    return any(key in names for key in keys)


def plan(torch: str, config: str) -> "tuple[str, str]":
    """What pip is told besides, and what is said of it: (flags, words).

    Args:
        torch: "cpu" or "cuda".
        config: what `pip config list` prints.
    """
    down, there = SIZES[torch]
    words = "torch for {}: about {:.1f} GB to download, {:.1f} GB on disk".format(
        "CPUs" if torch == "cpu" else "NVIDIA GPUs", down / 1000, there / 1000
    )
    if torch == "cuda":
        return "", words
    if own_sources(config):
        return "", words + ", from where pip's configuration says (a build for GPUs there takes several GB)"
    return "--extra-index-url " + CPU_WHEELS, words + "; `make TORCH=cuda …` for GPUs"


def _glibc() -> "tuple[int, ...]":
    """Of this system; the newest there may be where it has another C library, which no wheel fits: pip says so."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        name, version = "", ""
    return tuple(int(part) for part in version.split(".")[:2]) if name == "glibc" else (99, 0)


def _library(version: str) -> bool:
    """Whether Triton's stub can have libpython of this version."""
    name = "libpython{}.so.1.0".format(version)
    folders = (sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix, "lib")))
    if any(folder and Path(folder, name).is_file() for folder in folders):
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--folder", default=".venv", help="where the environment is to stand")
    parser.add_argument("--pip-flags", action="store_true", help="print what pip is to be told, and no more")
    arguments = parser.parse_args()
    asked = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True).stdout
    flags, words = plan(arguments.torch, told)
    if arguments.pip_flags:
        print(flags)
        return 0
    found = lacks(arguments.torch, arguments.folder)
    if found:
        print("This machine lacks:", file=sys.stderr)
        for lack in found:
            print("- {}\n    {}".format(lack.what, lack.mend), file=sys.stderr)
        return 2
    print(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
