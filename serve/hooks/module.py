"""Reading and importing a user's hook file, with errors that name its line."""

from __future__ import annotations

import ast
import itertools
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compress.errors import HookError
from compress.vetting.texts import read_bytes
from serve.config.requirements import is_requirement
from serve.hooks.packed.values import missing_requirements

__all__ = ["Guarded", "Source", "import_module", "read_source"]

_count = itertools.count()
TAKEN = ("model.py", "hooks.py", "hook_values.py", "config.pbtxt")


@dataclass(frozen=True)
class Source:
    """A hook file that is Python, not yet imported.

    Attributes:
        path: the file.
        tree: its syntax tree.
        code: the same, compiled.
        requirements: its REQUIREMENTS.
        files: its FILES.
    """

    path: Path
    tree: ast.Module
    code: types.CodeType
    requirements: tuple[str, ...]
    files: tuple[str, ...] = ()

    def line(self, name: str | None, argument: str | None = None) -> int | None:
        """Where a function or class of the module is defined, or an argument of it."""
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                if isinstance(node, ast.FunctionDef) and argument is not None:
                    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                    return next((item.lineno for item in arguments if item.arg == argument), node.lineno)
                return node.lineno
        return None

    def constant_line(self, name: str) -> int | None:
        """Where a constant of the module is bound."""
        return next((node.lineno for node, _ in _bindings(self.tree, name)), None)

    def error(self, name: str | None, why: str, mend: str, *, argument: str | None = None) -> HookError:
        """The error about a function or class (or the whole module, None), at its line."""
        return self.error_at(self.line(name, argument), why if name is None else f"{name}: {why}", mend)

    def error_at(self, line: int | None, why: str, mend: str) -> HookError:
        return _error(self.path, line, why, mend)


def read_source(path: Path) -> Source:
    """Read a hook file and its REQUIREMENTS, without running it.

    Raises:
        HookError: it can't be read, or is not Python.
    """
    if not path.is_file() or path.suffix != ".py":
        why = "it is not a Python file" if path.is_file() else "there is no such file"
        raise HookError(f"can't read the hooks {path}", why=why, mend="name the .py file that defines the hooks")
    try:
        tree = ast.parse(read_bytes(path), filename=str(path))
        code = compile(tree, str(path), "exec", dont_inherit=True)
    except SyntaxError as err:
        raise _error(path, err.lineno, f"it is not valid Python: {err.msg}", "mend that line") from err
    except (RecursionError, MemoryError) as err:
        raise _error(path, None, "it is nested too deeply", "write it in smaller parts") from err
    except (OSError, ValueError) as err:
        raise _error(path, None, f"it can't be read: {err}", "save it as UTF-8 text, readable by you") from err
    source = Source(path, tree, code, _strings(path, tree, "REQUIREMENTS"), _strings(path, tree, "FILES"))
    for name in source.files:
        _check_file(source, name)
    for text in source.requirements:
        if not is_requirement(text):
            why = f"REQUIREMENTS has {text!r}, which is no requirement of a package"
            mend = "write each as in 'pillow>=11': options of pip, files and variables are not taken"
            raise source.error_at(source.constant_line("REQUIREMENTS"), why, mend)
    return source


def _check_file(source: Source, name: str) -> None:
    line = source.constant_line("FILES")
    beside = source.path.parent / name
    if name != beside.name or name in TAKEN:
        why = f"FILES names {name!r}, which " + ("the model itself uses" if name in TAKEN else "stands elsewhere")
        raise source.error_at(line, why, "name files that stand beside it, without folders, under names of their own")
    if not beside.is_file():
        raise source.error_at(line, f"FILES names {name!r}, and there is no such file beside it", "mend its name")


def import_module(source: Source) -> types.ModuleType:
    """Import the module under a name of its own, so that it clashes with no other.

    Raises:
        HookError: it needs what isn't installed, or fails while it is imported.
    """
    try:
        missing = missing_requirements(source.requirements)
    except ValueError as err:
        raise source.error_at(
            None, f"REQUIREMENTS can't be read: {err}", "write them as pip takes them, as in 'pillow>=11'"
        ) from err
    if missing:
        raise source.error_at(
            None, f"it needs {', '.join(missing)}", f"pip install {' '.join(map(repr, source.requirements))}"
        )
    name = f"serve_user_hooks_{next(_count)}"
    # Dataclasses and pickles look a class's module up by name, so it stays: under a name that nobody else takes.
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = str(source.path)
    try:
        with Guarded(source, None, "it fails when it is imported"), _beside(source.path.parent):
            # Not by importlib: it would leave a __pycache__ beside the user's file, and could take a stale one.
            exec(source.code, vars(module))  # noqa: S102 - running the user's module is what this is for
    except HookError:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Modules of that folder can be imported, as in Triton; none stays known, because the next folder has its own."""
    known, writes = set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, str(folder.resolve()))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))
        sys.dont_write_bytecode = writes
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).parent == folder.resolve():
                del sys.modules[name]


class Guarded:
    """Turns whatever the user's code raises inside, SystemExit too, into a HookError at the line that raised it."""

    def __init__(self, source: Source, name: str | None, failed: str) -> None:
        """Guard a piece of the user's code.

        Args:
            source: the user's module.
            name: the function or class at work, whose line is named when the traceback has no line of the file.
            failed: what to say of it, such as "it failed".
        """
        self.source, self.name, self.failed = source, name, failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: object) -> None:
        if not isinstance(err, Exception | SystemExit) or isinstance(err, HookError):
            return
        source = self.source
        lines = [
            frame.lineno for frame in traceback.extract_tb(err.__traceback__) if frame.filename == str(source.path)
        ]
        mend = "mend that line; the hooks must run where they are packed, too"
        if isinstance(err, TypeError) and " for a batch of " in str(err):
            mend = "a list has one for each item; several of one item are Annotated[np.ndarray, 'string[3]'], say"
        if isinstance(err, ModuleNotFoundError):
            mend = f"install the package that brings {err.name!r}, and name it in the module's REQUIREMENTS"
        why = f"{self.failed}: {type(err).__name__}: {err}"
        line = lines[-1] if lines else source.line(self.name)
        raise source.error_at(line, why if self.name is None else f"{self.name}: {why}", mend) from err


def _bindings(tree: ast.Module, name: str) -> Iterator[tuple[ast.stmt, ast.expr | None]]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield node, node.value


def _strings(path: Path, tree: ast.Module, name: str) -> tuple[str, ...]:
    """A constant of the module that is a list of strings; () when there is none."""
    strings: tuple[str, ...] = ()
    for node, expression in _bindings(tree, name):
        try:
            value = ast.literal_eval(expression) if expression is not None else ()
        except ValueError:
            value = None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            shown = "['pillow>=11']" if name == "REQUIREMENTS" else "['labels.txt']"
            raise _error(path, node.lineno, f"{name} is not a plain list of strings", f"write it out, as in {shown}")
        strings = tuple(value)
    return strings


def _error(path: Path, line: int | None, why: str, mend: str) -> HookError:
    where = f"{path}:{line}" if line else str(path)
    return HookError(f"can't use the hooks {where}", why=why, mend=mend)
