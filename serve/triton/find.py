"""Which tritonserver this machine has, and whether it can run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compress.errors import MissingExtraError, ServerError

__all__ = ["Triton", "build_backends", "find_triton"]

OWN_BACKENDS = Path(__file__).with_name("backends")


@dataclass(frozen=True)
class Triton:
    """A tritonserver that can be started.

    Attributes:
        binary: its executable.
        library_folders: what has to stand in LD_LIBRARY_PATH for it.
        backends: its own folder of backends; None when it has none that is whole, and `build_backends` makes one.
        stub: the Python backend's stub for the running Python, when `backends` is None.
        python_backend: the folder of libtriton_python.so, when `backends` is None.
        caches: its folder of response caches.
    """

    binary: Path
    library_folders: tuple[Path, ...] = ()
    backends: Path | None = None
    stub: Path | None = None
    python_backend: Path | None = None
    caches: Path | None = None


def find_triton(environ: Mapping[str, str] = os.environ) -> Triton:
    """The tritonserver of the variable TRITONSERVER, else of PATH, else of the installed nvidia-pytriton.

    Raises:
        MissingExtraError: there is none.
        ServerError: there is one, and something that it needs is missing.
    """
    named = environ.get("TRITONSERVER")
    if named:
        found = shutil.which(named)
        if found is None:
            raise ServerError(
                f"can't run the tritonserver {named}",
                why="TRITONSERVER names it, and it is not an executable file",
                mend="let TRITONSERVER name the executable, or unset it",
            )
        return _installed(Path(found))
    on_path = shutil.which("tritonserver", path=environ.get("PATH", os.defpath))
    if on_path is not None:
        return _installed(Path(on_path))
    return _wheel(environ)


def build_backends(triton: Triton, folder: Path) -> Path:
    """The folder for --backend-directory; made in `folder` when the server has none of its own.

    It holds `python` (the wheel's, with the stub of the running Python) and `onnxruntime` and `pytorch` (ours).
    """
    if triton.backends is not None or triton.stub is None or triton.python_backend is None:
        return triton.backends or folder
    python = folder / "python"
    python.mkdir(parents=True, exist_ok=True)
    links = {python / path.name: path for path in triton.python_backend.iterdir() if path.is_file()}
    links[python / "triton_python_backend_stub"] = triton.stub
    for own in sorted(OWN_BACKENDS.iterdir()):
        if (own / "model.py").is_file():
            (folder / own.name).mkdir(exist_ok=True)
            links[folder / own.name / "model.py"] = own / "model.py"
    for link, target in links.items():
        link.unlink(missing_ok=True)
        try:  # no symbolic link: Triton refuses a library that stands outside of the backend's folder
            link.hardlink_to(target)
        except OSError:  # another file system, or not our file
            shutil.copy2(target, link)
    return folder


def _installed(binary: Path) -> Triton:
    """A whole installation, such as /opt/tritonserver of the NGC container: its backends stand beside its bin."""
    backends = binary.resolve().parent.parent / "backends"
    if not backends.is_dir():
        raise ServerError(
            f"can't use the tritonserver {binary}",
            why=f"it has no backends: there is no folder {backends}",
            mend="name the tritonserver of a whole installation, or take it out of TRITONSERVER and PATH",
        )
    return Triton(binary, backends=backends, caches=backends.parent / "caches")


def _wheel(environ: Mapping[str, str]) -> Triton:
    what = "can't start Triton"
    package = importlib.util.find_spec("pytriton")  # found, not imported: that takes a second and starts loggers
    if package is None or not package.submodule_search_locations:
        raise MissingExtraError(what, module="nvidia-pytriton", extra="triton")
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingExtraError(what, module="onnxruntime", extra="triton")
    root = Path(next(iter(package.submodule_search_locations)))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
    check_stub(stub, version)
    check_numpy(importlib.metadata.version("numpy"))
    libraries = (root.parent / "nvidia_pytriton.libs", *_python_library_folder(version, environ))
    server = root / "tritonserver"
    binary, python = server / "bin" / "tritonserver", server / "backends" / "python"
    return Triton(binary, libraries, stub=stub, python_backend=python, caches=server / "caches")


def check_stub(stub: Path, version: str) -> None:
    """Raise ServerError unless the Python backend has a stub for this Python version ("3.11")."""
    if not stub.is_file():
        others = ", ".join(sorted(path.name for path in stub.parent.parent.glob("3.*")))
        raise ServerError(
            f"can't run Triton's Python backend under Python {version}",
            why=f"nvidia-pytriton has stubs for {others or 'no Python at all'}",
            mend="make the environment with one of those Python versions, or install nvidia-pytriton again",
        )


def check_numpy(version: str) -> None:
    """Raise ServerError for NumPy 2, whose tensors this Triton's Python backend mis-sizes."""
    if int(version.split(".")[0]) >= 2:
        raise ServerError(
            f"can't run Triton's Python backend with NumPy {version}",
            why="it was built for NumPy 1, and with NumPy 2 tensors come back with the wrong size",
            mend="pip install 'numpy<2'",
        )


def _python_library_folder(version: str, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where libpython of this version stands: () when the loader finds it by itself.

    Raises:
        ServerError: nowhere; every Python model would fail to load.
    """
    library = f"libpython{version}.so.1.0"
    # In a process of its own: a second libpython in this one could do harm.
    probe = [sys.executable, "-I", "-S", "-c", f"import ctypes; ctypes.CDLL({library!r})"]
    if subprocess.run(probe, env=dict(environ), capture_output=True, check=False).returncode == 0:
        return ()
    folder = Path(sysconfig.get_config_var("LIBDIR") or "/nonexistent")
    if (folder / library).is_file():
        return (folder,)
    raise ServerError(
        "can't run Triton's Python backend",
        why=f"the shared library {library} is not installed",
        mend=f"apt-get install libpython{version}, or put its folder into LD_LIBRARY_PATH",
    )
