"""Run a command line on many files in one process with bounded memory, and write a line of JSON for each.

`python -m tests.hostile.run compress|serve BYTES CANARIES` reads lines of [name, [argument, …]] from stdin.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

SECONDS = 200  # for a command without an end; a slow machine takes its time


class TooLong(BaseException):
    """A command took longer than anything here may."""


def main() -> None:
    which, limit, canaries = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if which == "compress":
        import torch

        from compress.cli import main as run

        torch.set_num_threads(1)
        _warm()
    else:
        from serve.cli.main import main as run
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, _alarm)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        canary = canaries / name
        started, before = time.monotonic(), _peak()
        code, told = _run(run, arguments)
        found = {
            "name": name, "command": arguments[0], "code": code, "told": told[-4000:], "canary": canary.exists(),
            "seconds": round(time.monotonic() - started, 2), "grown": _peak() - before,
        }  # fmt: skip
        canary.unlink(missing_ok=True)
        sys.__stdout__.write(json.dumps(found) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


def _warm() -> None:
    """What is imported when it is first needed counts for no file; nor does each command look through it for garbage."""
    import onnxruntime  # noqa: F401

    import compress.jobs.examine
    import compress.jobs.export
    import compress.jobs.measure  # noqa: F401

    gc.collect()
    gc.freeze()


def _run(run: Callable[[list[str]], None], arguments: list[str]) -> tuple[int, str]:
    told = io.StringIO()
    code = 0
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            run(arguments)
    except SystemExit as err:
        code = err.code if isinstance(err.code, int) else 1
    except TooLong:
        code, told = -1, io.StringIO(f"took longer than {SECONDS} seconds")
    except BaseException:
        code = -2
        told.write(traceback.format_exc())
    finally:
        signal.alarm(0)
    return code, told.getvalue()


def _alarm(*_: object) -> None:
    raise TooLong


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
