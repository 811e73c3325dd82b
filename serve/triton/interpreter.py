"""The Python in whose packages and library Triton's stubs run."""

from __future__ import annotations

import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compress.errors import ServerError

__all__ = ["Interpreter", "environment", "library_folders"]


@dataclass(frozen=True)
class Interpreter:
    """A Python.

    Attributes:
        executable: of it.
        version: "3.11".
        folders: where its shared library may be.
    """

    executable: str
    version: str
    folders: tuple[str, ...]

    @classmethod
    def running(cls) -> Interpreter:
        """This one."""
        folders = sysconfig.get_config_var("LIBDIR"), str(Path(sys.base_prefix, "lib"))
        return cls(sys.executable, "{}.{}".format(*sys.version_info), tuple(filter(None, folders)))

    @classmethod
    def of(cls, executable: Path) -> Interpreter:
        """Another, which is asked.

        Raises:
            ServerError: it does not run.
        """
        code = "import sys, sysconfig as s; print(s.get_python_version(), s.get_config_var('LIBDIR'), sys.base_prefix)"
        try:
            done = subprocess.run([executable, "-I", "-c", code], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            raise ServerError(
                "can't run Triton's Python backend",
                why=f"{executable} does not run: its Python was moved or removed",
                mend=f"rm -r {executable.parents[2]}, then `serve triton install`",
            ) from None
        version, folder, base = done.stdout.split()
        return cls(str(executable), version, (folder, str(Path(base, "lib"))))


def library_folders(python: Interpreter, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where its libpython stands: () when the loader finds it by itself.

    The interpreter's own comes first. One that was built with a shared library (pyenv's, uv's) finds it by a path that
    stands in its executable; the stub has no such path, and Triton would wait for it in vain.

    Raises:
        ServerError: nowhere; every Python model would fail to load.
    """
    library = f"libpython{python.version}.so.1.0"
    for folder in python.folders:
        if (Path(folder) / library).is_file():
            return (Path(folder),)
    # In a process of its own: a second libpython in this one could do harm.
    probe = [python.executable, "-I", "-S", "-c", f"import ctypes; ctypes.CDLL({library!r})"]
    if subprocess.run(probe, env=dict(environ), capture_output=True, check=False).returncode == 0:
        return ()
    raise ServerError(
        "can't run Triton's Python backend",
        why=f"the shared library {library} is not installed",
        mend=f"apt-get install libpython{python.version}; or put its folder into LD_LIBRARY_PATH; or take a Python "
        "that was built with it (pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared; uv's own have it)",
    )


def environment(folder: Path, before: Path) -> Path:
    """An environment with the running Python's packages, and others in front; its folder of executables.

    A stub is deaf to PYTHONPATH, and takes the packages of the first python3 on PATH.

    Args:
        folder: is made.
        before: a folder of packages.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    names = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=names))
    own = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    lines = [str(before), *(f"import site; site.addsitedir({path!r})" for path in own)]
    (packages / "packages.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "bin"
