"""Triton from its Python wheel, with the NumPy that it was built for, in a folder of their own.

The user's environment has neither. The wheel's Python backend takes tensors of NumPy 1 alone, and would hold a whole
environment back. Its stub finds NumPy 1 before the environment's own, whose other packages it imports: they are built
for both. Pythons for which there is no NumPy 1 get an environment of an earlier one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compress.errors import ServerError, first_line
from compress.host.cache_home import NO_HOME, cache_home
from compress.vetting.swap import put_back, staging

__all__ = ["DOWNLOAD_MB", "TRITON", "Wheel", "check_built", "folder_of", "install", "private"]

TRITON, NUMPY = "0.7.0", "1.26.4"
DOWNLOAD_MB = 75
BUILT = (("Linux", "x86_64"), ("Linux", "aarch64"))
PYTHONS = ((3, 11), (3, 12))  # for which that NumPy has wheels
WHAT = "can't fetch Triton"
RUNTIMES = ("onnxruntime", "openvino")  # of the backends, as far as they are here


@dataclass(frozen=True)
class Wheel:
    """A wheel of Triton that was installed.

    Attributes:
        packages: the folder that holds `pytriton` and the libraries beside it.
        numpy: the folder to stand first on its stubs' PYTHONPATH; None where the environment has NumPy 1.
        python: the interpreter whose packages its stubs import, if not the running one.
    """

    packages: Path
    numpy: Path | None = None
    python: Path | None = None

    @property
    def server(self) -> Path:
        """The folder of tritonserver itself."""
        return self.packages / "pytriton" / "tritonserver"

    @property
    def libraries(self) -> Path:
        """What has to stand on its LD_LIBRARY_PATH."""
        return self.packages / "nvidia_pytriton.libs"


def folder_of(environ: Mapping[str, str] = os.environ, version: tuple[int, ...] = sys.version_info[:2]) -> Path:
    """Where it is kept, for a version of Python.

    Raises:
        ServerError: the user has no home folder.
    """
    if (cache := cache_home(environ)) is None:
        raise ServerError(WHAT, why=f"there is no place to keep it in: {NO_HOME}", mend="name one in XDG_CACHE_HOME")
    return Path(cache, "compress-serve", f"triton-{TRITON}-numpy-{NUMPY}-python-{'.'.join(map(str, version))}")


def private(environ: Mapping[str, str] = os.environ) -> Wheel | None:
    """The one that `install` made for the running Python; None where it has not."""
    if cache_home(environ) is None or not (folder := folder_of(environ)).is_dir():
        return None
    python = folder / "python" / "bin" / "python3"
    if python.is_symlink() or python.exists():  # a link whose interpreter has gone is told where it is run
        return Wheel(folder / "packages", python=python)
    return Wheel(folder / "packages", folder / "numpy")


def check_built(what: str = WHAT) -> None:
    """Raise ServerError where no wheel of Triton is built for this machine."""
    if (told := (platform.system(), platform.machine())) not in BUILT:
        built = " and ".join(" on ".join(each) for each in BUILT)
        raise ServerError(
            what,
            why=f"Triton's wheels are for {built}, and this is {' on '.join(told)}",
            mend="put the gateway before a Triton elsewhere: serve up --triton URL; or run one in a container: "
            "serve up REPOSITORY --docker run",
        )


def install(environ: Mapping[str, str] = os.environ, python: str | None = None) -> Path:
    """Fetch it, by the pip or uv that is here; the folder appears whole or not at all.

    Args:
        environ: says where the cache is.
        python: an interpreter of 3.11 or 3.12 for its stubs, where the running one is another; by default one of PATH,
            else one that uv finds or fetches.

    Returns:
        The folder.

    Raises:
        ServerError: there is none for this machine, nothing can fetch it, or what fetches it fails.
    """
    check_built()
    folder = folder_of(environ)
    if folder.is_dir():
        return folder
    try:
        put_back(folder)  # half a GB, where an earlier one was killed
        with staging(folder) as beside:
            made = beside / "made"
            made.mkdir(mode=0o755)
            _fetch(made / "packages", f"nvidia-pytriton=={TRITON}")
            if sys.version_info[:2] in PYTHONS and python is None:
                _fetch(made / "numpy", f"numpy=={NUMPY}")
            else:
                _environment(made / "python", python)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
    except OSError as err:
        mend = f"look at {folder.parent}: make room there, or name another folder in XDG_CACHE_HOME"
        raise ServerError(WHAT, why=first_line(err), mend=mend) from err
    return folder


def _fetch(into: Path, *packages: str, alone: bool = True) -> None:
    """By the tool that the environment was made with, whose own words go to stderr.

    Args:
        into: a folder, or an environment where not `alone`.
        packages: their names and versions.
        alone: without what they ask for, which the environment has.
    """
    python = str(into / "bin" / "python3")
    where = ["--no-deps", "--target", str(into)] if alone else []
    if importlib.util.find_spec("pip") is not None:
        of = [] if alone else ["--python", python]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *of, "install"]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--python", sys.executable if alone else python]
    else:
        raise ServerError(
            WHAT,
            why="this environment has no pip, and there is no uv",
            mend=f"{sys.executable} -m ensurepip; or install uv",
        )
    _run([*command, "--only-binary", ":all:", *where, *packages], f"{' '.join(packages)} can't be had")


def _environment(folder: Path, python: str | None) -> None:
    """Another Python's, with what the backends import."""
    chosen = python or next(filter(_runs, (f"python{a}.{b}" for a, b in reversed(PYTHONS))), None)
    uv = shutil.which("uv")
    if uv is not None:
        _run([uv, "venv", "--quiet", "--python", chosen or "3.12", str(folder)], "uv makes no environment")
    elif chosen is not None:
        _run([chosen, "-m", "venv", "--without-pip", str(folder)], f"{chosen} makes no environment")
    else:
        raise ServerError(
            WHAT,
            why="its Python models run under Python 3.11 or 3.12, and neither is on PATH",
            mend="install one of them, or uv, which fetches one",
        )
    runtimes = [name for name in RUNTIMES if importlib.util.find_spec(name) is not None]
    versions = (f"{name}=={importlib.metadata.version(name)}" for name in runtimes)
    _fetch(folder, f"numpy=={NUMPY}", *versions, alone=False)


def _runs(python: str) -> bool:
    """A version manager has commands by this name for versions that it does not run."""
    found = shutil.which(python)
    return (
        found is not None
        and not subprocess.run([found, "-c", "import venv"], check=False, capture_output=True).returncode
    )


def _run(command: list[str], otherwise: str) -> None:
    done = subprocess.run(command, check=False, stdout=sys.stderr)
    if done.returncode:
        raise ServerError(WHAT, why=f"{otherwise} (exit code {done.returncode})", mend="its own words stand above")
