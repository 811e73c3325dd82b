"""TensorRT plans: damaged ones, and those that another TensorRT built."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from compress.errors import RecipeError
from serve.lint.finding import Findings, error, warning
from serve.lint.model import Model

__all__ = ["Version", "plan_rules", "plan_version", "version_of"]

MARK = b"ftrt"
# The mark, the layout's number, four words of no meaning here, and major, minor, patch and build of the builder:
# what `trtexec --getPlanVersionOnly` reads (sampleEngines.cpp of NVIDIA/TensorRT), for layout 0.
HEADER = struct.Struct("<4sI16x4B")
KNOWN_LAYOUT = 0
PREFIX_BYTES = 1 << 20
Version = tuple[int, ...]


def version_of(text: str) -> Version:
    """Of `10`, `10.5` or `10.5.0`.

    Raises:
        RecipeError: it is no such version.
    """
    parts = text.split(".")
    if not 1 <= len(parts) <= 4 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise RecipeError(
            "can't take the version of TensorRT", why=f"it is {text!r}", mend="write it as 10.5 or 10.5.0"
        )
    return tuple(map(int, parts))


def plan_version(path: Path) -> Version | None:
    """The TensorRT that built a plan: major, minor, patch and build; None where the file does not tell.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    mark, layout, *version = HEADER.unpack(head)
    return tuple(version) if mark == MARK and layout == KNOWN_LAYOUT else None


def plan_rules(models: Iterable[Model], runtime: Version | None) -> Findings:
    """The plans of a repository: whole, built by the TensorRT that will load them, and all by the same.

    Args:
        models: those of the repository; one without plans is passed over.
        runtime: the server's TensorRT, as far as it is known (`(10,)`, `(10, 5)`, …); None when it is not.
    """
    first: tuple[str, Version] | None = None
    for model in models:
        for number in model.served if model.backend == "tensorrt" else ():
            path = model.file(number)
            if not path.is_file() or not path.stat().st_size:
                continue  # told already
            where = f"{number}/{path.name}"
            damage = list(_damage(model.name, where, path))
            yield from damage
            built = None if damage else plan_version(path)
            if built is None:
                continue
            if runtime is not None:
                yield from _mismatch(model.name, where, built, runtime)
            elif first is None:
                first = f"{model.name}/{where}", built
            else:
                yield from _unlike(model.name, where, built, *first)


def _damage(model: str, where: str, path: Path) -> Findings:
    with path.open("rb") as file:
        head = file.read(len(MARK))
        length = int.from_bytes(head, "little")
        wrapped = head != MARK and 0 < length < PREFIX_BYTES and file.read(length)[:1] == b"{" and file.read(4) == MARK
    name = path.name
    if wrapped:
        yield error(model, f"{where} has {length} bytes of JSON before the plan, as some exporters write",
                    f"cut them off: tail -c +{length + 5} {name}")  # fmt: skip
    elif head != MARK:
        yield error(model, f"{where} is no TensorRT plan", "build it with trtexec or TensorRT's API")
    elif path.stat().st_size < HEADER.size:
        yield error(model, f"{where} is cut short: {path.stat().st_size} bytes", "copy or build it again")


def _mismatch(model: str, where: str, built: Version, runtime: Version) -> Findings:
    """A plan loads in the TensorRT that built it; a version-compatible one in later ones of the same major, too."""
    known = built[: len(runtime)]
    if known == runtime:
        return
    what = f"{where} was built by TensorRT {_text(built)}, the server has {_text(runtime)}"
    if known[0] == runtime[0] and known < runtime:
        yield warning(model, f"{what}: it loads only if it was built version-compatible",
                      "build it in the container that will serve it, or with trtexec --versionCompatible")  # fmt: skip
    else:
        yield error(model, what, "build it in the container that will serve it")


def _unlike(model: str, where: str, built: Version, other: str, builder: Version) -> Findings:
    """Two plans for one server whose TensorRT is not known."""
    what = f"{where} was built by TensorRT {_text(built)}, {other} by {_text(builder)}"
    if built[0] != builder[0]:
        yield error(model, f"{what}: no Triton loads both", "build them with the same TensorRT")
    elif built[:3] != builder[:3]:
        yield warning(model, f"{what}: Triton loads both only if the older is version-compatible",
                      "build them with the same TensorRT, and lint with --tensorrt")  # fmt: skip


def _text(version: Version) -> str:
    return ".".join(map(str, version))
