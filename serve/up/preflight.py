"""What `serve up` looks at before it starts anything: is it served already, and would Triton refuse it?"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.errors import RepositoryError, ServerError
from serve.lint.run import lint

__all__ = ["check_models", "claimed"]

SHOWN = 3
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7)


def check_models(repository: Path, *, container: bool = False, trust_changes: bool = False) -> None:
    """Refuse in a second what Triton would refuse after its start-up time, or load and never answer.

    Args:
        repository: a model repository.
        container: Triton is another's, not the embedded one.
        trust_changes: files may be others than were packed.

    Raises:
        RepositoryError: `serve lint` finds an error in it.
    """
    errors = [
        each for each in lint(repository, container=container, packed=not trust_changes) if each.severity == "error"
    ]
    if not errors:
        return
    told = "; ".join(f"{each.model}: {each.what}" for each in errors[:SHOWN])
    more = f"; and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
    raise RepositoryError(
        f"can't serve {repository}",
        why=f"Triton would refuse it: {told}{more}",
        mend=f"{errors[0].mend}; `serve lint {repository}` says all",
    )


@contextmanager
def claimed(repository: Path) -> Iterator[None]:
    """Be the one that serves this repository; it ends with the process, and leaves no file.

    The lock is a socket with an abstract name (unix(7)), made of the folder's device and inode: a repository may be on
    a disk that nobody may write to, and whoever holds the name can be asked for.

    Raises:
        ServerError: another process serves it.
    """
    try:
        folder = repository.stat()
    except OSError:  # whoever reads it says so
        yield
        return
    name = f"\0serve-up-{folder.st_dev:x}-{folder.st_ino:x}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        try:
            held.bind(name)
            held.listen()
        except OSError as err:
            raise ServerError(
                f"can't serve {repository} twice",
                why=f"{_holder(name)} serves it already",
                mend="stop that one first, or serve a copy of the folder",
            ) from err
        yield


def _holder(name: str) -> str:
    """Who holds the name."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(1.0)
            asking.connect(name)
            pid, _, _ = _CREDENTIALS.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    except OSError:
        return "another process"
    return f"the process {pid}" if pid else "a process of another container"
