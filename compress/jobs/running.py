"""How a command runs: what is shown, what is kept aside, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from cyclopts import CycloptsError
from rich.markup import escape

from compress.console.interrupts import interrupted, interruptible
from compress.console.plain import Console
from compress.errors import LostError, MissingExtraError, ResourceError, ServerError, ToolkitError
from compress.options import CompressOptions, FinetuneOptions, SourceOptions
from compress.storage.shortages import shortages
from compress.storage.work_folder import keep_log
from compress.vetting.memory import bound_memory
from compress.vetting.printed import print_any_name

if TYPE_CHECKING:
    from compress.report.progress import Terminal

__all__ = ["at_work", "run_to_end", "spread", "warn", "work_of"]

# What stands behind --input; several may follow one.
SPEC = re.compile(r"[^:\[\]]+:\s*\w+\s*\[[^\[\]]*\]\s*")
AGAIN = 75  # EX_TEMPFAIL of sysexits.h
OPTIONAL = ("torch", "onnx", "onnxruntime", "onnxscript", "torch_pruning", "matplotlib", "jinja2", "scipy")


@contextmanager
def at_work(options: SourceOptions, work: Path | None = None) -> Iterator[Terminal]:
    """A run is shown, and nothing else: what libraries print is kept aside, in the work folder where there is one."""
    from compress.console.quiet import quiet
    from compress.report.progress import Terminal

    keep = None if work is None else partial(keep_log, work)
    with (
        quiet(verbose=options.verbose, keep=keep) as streams,
        Terminal(Console(file=streams.err), verbose=options.verbose) as terminal,
    ):
        yield terminal


def work_of(options: CompressOptions | FinetuneOptions) -> Path:
    """The folder that keeps the stages of a run."""
    return options.work or options.output.parent / f"{options.output.name}.work"


def warn(options: SourceOptions, models: Sequence[Path] = ()) -> tuple[str, ...]:
    """Tell of flags that nothing will read; gives the warnings."""
    from compress.options.unused import unused

    found = unused(options, models)
    for warning in found:
        Console(stderr=True).print(f"[yellow]warning[/] {escape(warning)}", highlight=False, soft_wrap=True)
    return found


def spread(words: Sequence[str]) -> list[str]:
    """`--input a b` as `--input a --input b`: only what reads as an input is one, so that a file may follow."""
    found: list[str] = []
    inside = False
    for word in words:
        if inside and found[-1] != "--input":
            if SPEC.fullmatch(word):
                found.append("--input")
            else:
                inside = False
        found.append(word)
        inside = inside or word == "--input"
    return found


def run_to_end(command: Callable[[], Any], *, resumes: bool) -> None:
    """Run a command; a user's mistake ends with three lines and exit code 2, Ctrl-C with one line and 130.

    Args:
        command: parses and runs.
        resumes: whether it goes on where it was when it is given again.
    """
    print_any_name()
    try:
        with interruptible():
            _run(command)
    except BaseException:
        if not interrupted():
            raise
    if interrupted():
        kept = ": what is done is kept; give the same command again to go on"
        print("interrupted" + (kept if resumes else ""), file=sys.stderr)
        sys.exit(130)


def _code_of(err: ToolkitError) -> int:
    """Where torchrun starts the command again, what may be gone by then is told from a mistake, which ends all."""
    again = isinstance(err, ResourceError | ServerError | LostError) and "TORCHELASTIC_RUN_ID" in os.environ
    return AGAIN if again else err.exit_code


class _Watched:
    """A stream that remembers whether writing to it failed: of an error of a full disk nobody knows which disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failed: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as err:
            self.failed = err
            raise

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as err:
            self.failed = err
            raise


@contextmanager
def _shown() -> Iterator[None]:
    """What is shown is written at the end; where that fails, it is no place of the run that is full.

    Raises:
        ResourceError: it can't be written.
    """
    if (stream := sys.stdout) is None:  # it was closed
        yield
        return
    watched = _Watched(stream)
    sys.stdout = cast(TextIO, watched)
    try:
        try:
            yield
        finally:
            watched.flush()
    except OSError as err:
        if watched.failed is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or the interpreter tries again, at its end
        if isinstance(watched.failed, BrokenPipeError):  # whoever reads has seen enough
            sys.exit(128 + signal.SIGPIPE)
        why, mend = watched.failed.strerror or str(err), "send it to another place, or free space where it goes"
        raise ResourceError("can't write to stdout", why=why, mend=mend) from err
    finally:
        sys.stdout = stream


def _run(command: Callable[[], Any]) -> None:
    try:
        with shortages(), _shown():
            bound_memory()
            command()
    except CycloptsError:
        sys.exit(2)
    except ToolkitError as err:
        if interrupted():
            raise
        _end(err)
    except ModuleNotFoundError as err:
        if err.name not in OPTIONAL:
            raise
        _end(MissingExtraError("can't compress", module=err.name, extra="compress"))
    except UnicodeDecodeError as err:  # matplotlib reads its settings as it is imported, of the current folder first
        if not any(frame.f_code.co_name == "_rc_params_in_file" for frame, _ in traceback.walk_tb(err.__traceback__)):
            raise
        why = f"`matplotlibrc`, here or of your home, is no text in UTF-8: {err}"
        _end(ToolkitError("can't draw plots", why=why, mend="save it as UTF-8, or remove it"))


def _end(err: ToolkitError) -> NoReturn:
    print(f"error: {err}", file=sys.stderr)
    sys.exit(_code_of(err))
