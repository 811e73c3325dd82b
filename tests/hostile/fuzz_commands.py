"""Run commands over changed files: `python -m tests.hostile.fuzz_commands KIND[,KIND…] START COUNT FOLDER`.

A line of JSON for each command, with what was bad about it; each case follows from its kind and its number.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["main"]

LIMIT = 6 << 30
"""Of address space, above what libraries have reserved at the start."""
SLOW = {"stage": 4}
"""Kinds of which one case takes as long as so many of another."""
UNWRITTEN = (ValueError, TypeError, RuntimeError, RecursionError, AttributeError, LookupError, ArithmeticError)
"""What a library says of a change that it can't write."""


def main() -> None:
    """Cases of each kind, from a number on."""
    kinds, start, count, folder = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    os.environ["COMPRESS_LOOP_SECONDS"] = "2"
    import onnxruntime  # noqa: F401
    import torch

    import compress.jobs.examine
    import compress.jobs.export
    import compress.jobs.measure  # noqa: F401
    from tests.hostile.watch import Watch

    torch.set_num_threads(1)
    watch = Watch(folder)
    for kind in kinds:  # once without a limit: what is imported and made when it is first needed counts for no file
        _case(kind, start, folder / "case", watch)
    gc.collect()
    gc.freeze()  # each command would look through it for garbage
    most = LIMIT + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for kind in kinds:
        for number in range(start, start + max(1, count // SLOW.get(kind, 1))):
            for line in _case(kind, number, folder / "case", watch):
                told = {"kind": kind, "case": number, **line}
                print(json.dumps(told), file=sys.__stdout__, flush=True)


def _case(kind: str, number: int, case: Path, watch: Any) -> list[dict[str, Any]]:
    from tests.hostile.command_cases import made
    from tests.hostile.programs import PROGRAMS

    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    try:
        lines = made(kind, Random(f"{kind} {number}"), case, watch.outside)
    except UNWRITTEN as err:
        return [{"unwritten": f"{type(err).__name__}: {err}"[:100]}]
    size = sum(path.stat().st_size for path in case.rglob("*") if path.is_file())
    found = []
    for program, arguments in lines:
        line = watch.run(PROGRAMS[program], arguments, size)
        line["told"] = line["told"] if line["bad"] else ""
        found.append({"program": program, "command": arguments[0], **line})
    return found


if __name__ == "__main__":
    main()
