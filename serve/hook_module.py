"""Reading and importing a user's hook file, with errors that name its line."""

from __future__ import annotations

import ast
import itertools
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

from compress.errors import HookError
from serve.hook_model import missing_requirements

__all__ = ["Guarded", "Source", "import_module", "read_source"]

_count = itertools.count()


@dataclass(frozen=True)
class Source:
    """A hook file that is Python, not yet imported.

    Attributes:
        path: the file.
        tree: its syntax tree.
        code: the same, compiled.
        requirements: its REQUIREMENTS.
    """

    path: Path
    tree: ast.Module
    code: types.CodeType
    requirements: tuple[str, ...]

    def line(self, name: str | None, argument: str | None = None) -> int | None:
        """Where a function or class of the module is defined, or an argument of it."""
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                if isinstance(node, ast.FunctionDef) and argument is not None:
                    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                    return next((item.lineno for item in arguments if item.arg == argument), node.lineno)
                return node.lineno
        return None

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
        tree = ast.parse(path.read_bytes(), filename=str(path))
        code = compile(tree, str(path), "exec", dont_inherit=True)
    except SyntaxError as err:
        raise _error(path, err.lineno, f"it is not valid Python: {err.msg}", "mend that line") from err
    except (OSError, ValueError) as err:
        raise _error(path, None, f"it can't be read: {err}", "save it as UTF-8 text, readable by you") from err
    requirements: tuple[str, ...] = ()
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "REQUIREMENTS" for target in targets):
            requirements = _requirements(path, node.lineno, node.value)
    return Source(path, tree, code, requirements)


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
        with Guarded(source, None, "it fails when it is imported"):
            # Not by importlib: it would leave a __pycache__ beside the user's file, and could take a stale one.
            exec(source.code, vars(module))  # noqa: S102 - running the user's module is what this is for
    except HookError:
        del sys.modules[name]
        raise
    return module


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
        if isinstance(err, ModuleNotFoundError):
            mend = f"install the package that brings {err.name!r}, and name it in the module's REQUIREMENTS"
        why = f"{self.failed}: {type(err).__name__}: {err}"
        line = lines[-1] if lines else source.line(self.name)
        raise source.error_at(line, why if self.name is None else f"{self.name}: {why}", mend) from err


def _requirements(path: Path, line: int, node: ast.expr | None) -> tuple[str, ...]:
    try:
        value = ast.literal_eval(node) if node is not None else ()
    except ValueError:
        value = None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise _error(path, line, "REQUIREMENTS is not a plain list of strings", "write it out, as in ['pillow>=11']")
    return tuple(value)


def _error(path: Path, line: int | None, why: str, mend: str) -> HookError:
    where = f"{path}:{line}" if line else str(path)
    return HookError(f"can't use the hooks {where}", why=why, mend=mend)
