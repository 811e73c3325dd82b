"""Rules of `--agree` that are functions of the operator's own file: run in a process of their own, within bounds.

The process has all that comparing takes: it is given both answers, reads them, and says how alike they are. What it
does not say within the bounds, or can't, counts as a disagreement, and is told: were it left out, a candidate whose
answers nobody can judge would be judged by the rest.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import json
import multiprocessing
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from compress.errors import ServerError
from serve.gateway.release.agreement import Agreement, FunctionError

__all__ = ["UsersRules"]

START_S = 60.0  # to import what the file imports
SECONDS = 5.0  # for all items of a request
MEMORY_BYTES = 2 * 1024**3
PR_SET_PDEATHSIG = 1
LONGEST = 300


class UsersRules:
    """The functions of a file; its process is started with the first use, and anew where it has ended.

    Args:
        path: the file.
        seconds: that two answers may be compared for.
        memory_bytes: that the process may hold.

    Raises:
        ServerError: the file can't be imported, or has no function.
    """

    def __init__(self, path: Path, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._path = path
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None
        mend = f"mend it: `python {path}` shows where it fails; a rule is a function (candidate, baseline) -> bool"
        try:
            self.names = frozenset(self._start())
        except FunctionError as err:
            raise ServerError(f"can't use --agree-module {path}", why=str(err), mend=mend) from err
        if not self.names:
            raise ServerError(f"can't use --agree-module {path}", why="it has no function of two arguments", mend=mend)

    def compare(self, *arguments: Any) -> Agreement | None:
        """What `compared` says of the arguments, with these functions at hand; blocks, one at a time.

        Raises:
            FunctionError: a function failed, or took too long or too much.
            ValueError: the answers can't be compared.
        """
        with self._lock:
            if self._process is None:
                self._start()
            told = self._asked(arguments, self._seconds)
        if "failed" in told:
            raise FunctionError(told["failed"])
        if "unread" in told:
            raise ValueError(told["unread"])
        return Agreement(**told["found"]) if told["found"] else None

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _start(self) -> list[str]:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, str(self._path), self._memory_bytes), name="agree-module", daemon=True
        )
        self._process.start()
        theirs.close()
        told = self._asked(None, START_S)
        if "failed" in told:
            self.close()
            raise FunctionError(told["failed"])
        return list(told["names"])

    def _asked(self, arguments: tuple[Any, ...] | None, seconds: float) -> dict[str, Any]:
        """What the process answers; what ends it is an answer, too."""
        pipe, process = self._pipe, self._process
        assert pipe is not None  # noqa: S101  it was started
        try:
            if arguments is not None:
                pipe.send(arguments)
            if not pipe.poll(seconds):
                self.close()
                return {"failed": f"it took more than {seconds:g} s"}
            answer: dict[str, Any] = json.loads(pipe.recv_bytes())
        except (EOFError, OSError, ValueError):
            process.join(1.0)
            code = process.exitcode
            self.close()
            return {"failed": f"its process ended ({'still there' if code is None else code})"}
        return answer


def _serve(pipe: Connection, path: str, memory_bytes: int) -> None:
    """The process: import the file, say what it has, then answer one question after the other."""
    from serve.gateway.release.released import compared  # after the start, which stays light

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:  # Linux's own
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        functions = _functions(path)
    except BaseException as err:  # the user's file: anything may come out of it
        pipe.send_bytes(json.dumps({"failed": _words(err, path)}).encode())
        return
    pipe.send_bytes(json.dumps({"names": sorted(functions)}).encode())
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(json.dumps(_answer(compared, arguments, functions, path)).encode())


def _answer(
    compare: Callable[..., Agreement | None],
    arguments: tuple[Any, ...],
    functions: Mapping[str, Callable[..., Any]],
    path: str,
) -> dict[str, Any]:
    try:
        found = compare(*arguments, functions=functions)
    except FunctionError as err:
        cause = err.__cause__
        return {"failed": str(err) if cause is None else f"{err}: {_words(cause, path)}"}
    except MemoryError:
        return {"failed": "there was not enough memory"}
    except Exception as err:  # answers that can't be read or unpacked
        return {"unread": f"{type(err).__name__}: {err}"[:LONGEST]}
    return {"found": None if found is None else asdict(found)}


def _functions(path: str) -> dict[str, Callable[..., Any]]:
    """Functions of the file's own, of two arguments."""
    spec = importlib.util.spec_from_file_location("agree_module", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {
        name: each
        for name, each in vars(module).items()
        if inspect.isfunction(each) and each.__module__ == spec.name and not name.startswith("_") and _takes_two(each)
    }


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def _words(err: BaseException, path: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(err.__traceback__) if frame.filename == path]
    told = "".join(char if char.isprintable() else " " for char in f"{type(err).__name__}: {err}"[:LONGEST])
    return f"{told} (line {lines[-1]})" if lines else told
