"""A machine that has not enough: disk, memory, or a place that can't be written or read, told in three lines.

What runs out does so anywhere: in Python, in torch's writer, in ONNX Runtime's allocator, in a process beside this one.
So it is recognized in one place, around a whole run.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from pathlib import Path

from compress.errors import CheckpointError, ResourceError, ToolkitError, first_line

__all__ = ["cant_read", "cant_write", "lacks_memory", "raise_shortage", "reading", "shortages"]

# Of these there is no doubt; the others mean that only where they are about one of our places.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
PLACE = (
    errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY,
    errno.ENOENT, errno.EIO, errno.ELOOP, errno.EBUSY, errno.EINVAL, errno.EXDEV,
)  # fmt: skip
MENDS = {
    errno.ENOSPC: "free some space there, or name another place with -o, --work or TMPDIR",
    errno.EDQUOT: "free some of your quota there, or name another place with -o, --work or TMPDIR",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`), or name another place",
    errno.ENAMETOOLONG: "name a shorter path",
}
MEND = "name a place that can be written with -o"
# How libraries written in C++ tell it, whose exceptions carry no number.
WRITER_FAILED = re.compile(
    r"PytorchStreamWriter failed|No space left on device|Disk quota exceeded|File too large"
    r"|Failed to write external initializers|Protobuf serialization failed"  # of ONNX Runtime
)
NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|bad_alloc|Failed to allocate memory|Cannot allocate memory",
    re.IGNORECASE,
)


def cant_write(path: Path, error: OSError) -> ResourceError:
    """In three lines, what is wrong with a place."""
    number = error.errno or 0
    why = error.strerror or str(error)
    if number in (errno.ENOSPC, errno.EDQUOT):
        why += f" ({_free(path) / 1e6:,.1f} MB are free)"
    return ResourceError(f"can't write {path}", why=why, mend=MENDS.get(number, MEND))


def cant_read(path: Path, error: OSError) -> ResourceError:
    """In three lines, why a file or folder of the user's can't be read."""
    shut = next((str(each) for each in reversed(path.parents) if not _may(each, os.X_OK)), None)
    why = error.strerror or str(error)
    return ResourceError(
        f"can't read {path}",
        why=why if shut is None else f"{why}: this user may not enter {shut}",
        mend="let this user read it (chmod, chown), or name another",
    )


def lacks_memory(error: BaseException) -> bool:
    """Whether an error, of whatever library, says that memory has run out."""
    return isinstance(error, MemoryError) or NO_MEMORY.search(str(error)) is not None


def raise_shortage(error: Exception) -> None:
    """Raise an error that says that memory has run out, as it is: nothing that was tried is at fault for it."""
    if lacks_memory(error):
        raise error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within it, memory that runs out is told as that of a file that is read, where no setting of a run is to blame.

    Raises:
        ResourceError: memory has run out.
    """
    try:
        yield
    except Exception as err:
        cause = err.__cause__ if isinstance(err, CheckpointError) else None if isinstance(err, ToolkitError) else err
        if cause is None or not lacks_memory(cause):
            raise
        raise ResourceError(
            f"there is not enough memory to read {path}",
            why=first_line(cause),
            mend="take a machine with several times the memory of the file's size; if that is there, the file is "
            "damaged or was made to take it: get another from who made it",
        ) from err


@contextmanager
def shortages(*places: Path, need: int = 0) -> Iterator[None]:
    """Within it, what the machine lacks is a ResourceError; other errors stay what they are.

    Args:
        places: files and folders that are written within.
        need: bytes; where fewer are free in one of the places, that is why an error of unknown cause came about:
            libraries write half a file without a word, and fail when they read it.

    Raises:
        ResourceError: a place can't be written, or a file read, a disk is full, memory has run out, or a process was
            ended for it.
    """
    everywhere = [*places, _temporary()]
    try:
        yield
    except ResourceError:
        raise
    except ToolkitError as err:  # a stage that takes a full disk for a fault of the model
        found = _told(err.__cause__, list(places)) if err.__cause__ is not None else None
        if found is None and isinstance(err.__cause__, json.JSONDecodeError):  # half a file of ONNX Runtime's
            found = _nearly_full(err.__cause__, everywhere, need)
        if found is None:
            raise
        raise found from err
    except Exception as err:
        found = _told(err, everywhere) or _nearly_full(err, everywhere, need)
        if found is None:
            raise
        raise found from err


def _nearly_full(err: Exception, places: list[Path], need: int) -> ResourceError | None:
    place = min(places, key=_free)
    if _free(place) >= need:
        return None
    return ResourceError(
        f"can't write in {place}",
        why=f"{_free(place) / 1e6:,.1f} MB are free, and something failed: {type(err).__name__}: {first_line(err)}",
        mend=MENDS[errno.ENOSPC],
    )


def _told(err: BaseException, places: list[Path]) -> ResourceError | None:
    for each in _chain(err):
        if isinstance(each, PermissionError) and _unreadable(each, places):
            return cant_read(Path(os.fsdecode(each.filename)), each)
        if isinstance(each, OSError) and (each.errno in FULL or (each.errno in PLACE and _ours(each, places))):
            named = each.filename2 if isinstance(each.filename2, str | bytes) else each.filename
            path = Path(os.fsdecode(named)) if isinstance(named, str | bytes) else min(places, key=_free)
            return cant_write(path, each)
        if lacks_memory(each):
            return ResourceError(
                "there is not enough memory",
                why=first_line(each),
                mend="give smaller --batches or fewer --workers, less calibration data at a time, or a larger machine",
            )
        if WRITER_FAILED.search(str(each)):  # they say it of files in the folder for temporary ones, too
            place = min((*places, _temporary()), key=_free)
            return ResourceError(
                f"can't write in {place}", why=f"{first_line(each)} ({_free(place) / 1e6:,.1f} MB are free)",
                mend=MENDS[errno.ENOSPC],
            )  # fmt: skip
        if isinstance(each, BrokenExecutor):
            return ResourceError(
                "a process of this run was ended by the system",
                why="usually for want of memory",
                mend="give fewer --workers, or take a larger machine",
            )
    return None


def _chain(err: BaseException) -> Iterator[BaseException]:
    """An exception and what it came from."""
    seen: set[int] = set()
    following: BaseException | None = err
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or following.__context__


def _ours(err: OSError, places: list[Path]) -> bool:
    """Whether it is about one of the places, what is in them, beside them, or the folders above."""
    real = [Path(os.path.realpath(place)) for place in places]
    for name in (err.filename, err.filename2):
        if isinstance(name, str | bytes):
            path = Path(os.path.realpath(os.fsdecode(name)))
            for place in real:
                *above, beside = path.parts[: len(place.parts)] or ("",)
                named = beside.lstrip(".").startswith(place.name.lstrip("."))  # what is made beside it is hidden
                if path in place.parents or (tuple(above) == place.parts[:-1] and named):
                    return True
    return False


def _unreadable(err: PermissionError, places: list[Path]) -> bool:
    """Whether it is about something that this user may not read, and that no run writes.

    The folder for temporary files is none of a run's places here: users' own files may be in it, too.
    """
    if not isinstance(err.filename, str | bytes) or _ours(err, [each for each in places if each != _temporary()]):
        return False
    path = Path(os.fsdecode(err.filename))
    try:
        return not _may(path, os.R_OK | (os.X_OK if stat.S_ISDIR(path.stat().st_mode) else 0))
    except PermissionError:  # a folder above it can't be entered
        return True
    except OSError:  # it is not there: nobody has read it
        return False


def _may(path: Path, how: int) -> bool:
    return os.access(path, how, effective_ids=True)


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def _free(path: Path) -> float:
    """Bytes that a file can have where a path is or would be; without bounds where that can't be told."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = float("inf") if soft == resource.RLIM_INFINITY else float(soft)
    for place in (path, *path.absolute().parents):
        try:
            return min(most, float(shutil.disk_usage(place).free))
        except OSError:
            continue
    return most
