"""Which tritonserver this machine has, and whether it can run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compress.errors import MissingExtraError, ServerError
from serve.triton import kin
from serve.triton.interpreter import Interpreter, library_folders
from serve.triton.wheel import DOWNLOAD_MB, Wheel, check_built, private

__all__ = ["Triton", "build_backends", "find_triton"]

STUB = "triton_python_backend_stub"
# What a model's process begins has its id, too, whatever becomes of that process.
MARKS = f'#!/bin/sh\n{kin.STUB}=$$\nexport {kin.STUB}\nexec "${{0%/*}}/stub/{STUB}" "$@"\n'
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
        interpreter: whose packages its stubs import; None for the running Python's.
        before: a folder of packages that go before the running Python's.
    """

    binary: Path
    library_folders: tuple[Path, ...] = ()
    backends: Path | None = None
    stub: Path | None = None
    python_backend: Path | None = None
    caches: Path | None = None
    interpreter: Path | None = None
    before: Path | None = None


def find_triton(environ: Mapping[str, str] = os.environ) -> Triton:
    """The tritonserver of the variable TRITONSERVER, else of PATH, else of its Python wheel: the
    one that `serve triton install` fetched, or the environment's.

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

    It holds `python` (the wheel's, with the stub of the running Python) and our `onnxruntime`, `openvino`, `pytorch`.
    """
    if triton.backends is not None or triton.stub is None or triton.python_backend is None:
        return triton.backends or folder
    python = folder / "python"
    python.mkdir(parents=True, exist_ok=True)
    links = {python / path.name: path for path in triton.python_backend.iterdir() if path.is_file()}
    links[python / "stub" / STUB] = triton.stub
    (python / "stub").mkdir(exist_ok=True)
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
    (python / STUB).unlink(missing_ok=True)  # it may be a link to what others use
    (python / STUB).write_text(MARKS)
    (python / STUB).chmod(0o700)
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
    check_built(what)
    if importlib.util.find_spec("onnxruntime") is None:
        raise MissingExtraError(what, module="onnxruntime", extra="triton")
    wheel = private(environ) or _of_environment()
    if wheel is None:
        raise ServerError(
            what,
            why="this machine has no tritonserver",
            mend=f"`serve triton install` fetches one ({DOWNLOAD_MB} MB), or name yours in TRITONSERVER",
        )
    python = Interpreter.running() if wheel.python is None else Interpreter.of(wheel.python)
    stub = wheel.server / "python_backend_stubs" / python.version / "triton_python_backend_stub"
    check_stub(stub, python.version)
    if wheel.python is None and wheel.numpy is None:
        check_numpy(importlib.metadata.version("numpy"))
    return Triton(
        wheel.server / "bin" / "tritonserver",
        (wheel.libraries, *library_folders(python, environ)),
        stub=stub,
        python_backend=wheel.server / "backends" / "python",
        caches=wheel.server / "caches",
        interpreter=wheel.python,
        before=wheel.numpy,
    )


def _of_environment() -> Wheel | None:
    package = importlib.util.find_spec("pytriton")  # found, not imported: that takes a second and starts loggers
    if package is None or not package.submodule_search_locations:
        return None
    return Wheel(Path(next(iter(package.submodule_search_locations))).parent)


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
            mend="`serve triton install` brings NumPy 1 for it, beside the environment's own",
        )
