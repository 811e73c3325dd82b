"""Python models and hooks, read without being run."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from compress.vetting.texts import parse_json, read_bytes
from serve.hooks.packed.values import missing_requirements
from serve.lint.finding import Finding, Findings, error, warning
from serve.lint.model import Model
from serve.lint.python_class import class_rules
from serve.lint.python_text import parsed_python

__all__ = ["python_rules"]

CLASS = "TritonPythonModel"
GIVEN = "triton_python_backend_utils"  # Triton brings it


def python_rules(model: Model) -> Findings:
    """Syntax, the class that Triton looks for, imports, requirements of hooks."""
    if model.backend != "python":
        return
    elsewhere = "EXECUTION_ENV_PATH" in model.config.parameters  # another Python, with packages of its own
    for version in model.served:
        path = model.file(version)
        if not path.is_file():
            continue
        tree = _parsed(model, path)
        if isinstance(tree, Finding):
            yield tree
            continue
        found = _class(tree)
        where = f"{version}/{path.name}"
        if found is None:
            yield error(model.name, f"{where} defines no {CLASS}", f"name its class {CLASS}")
        elif isinstance(found, ast.ClassDef) and not found.bases and not found.keywords and not found.decorator_list:
            yield from class_rules(model, where, found)
        files = [(path, tree)]
        hooks = path.with_name("hooks.py")
        if hooks.is_file():
            hook_tree = _parsed(model, hooks)
            if isinstance(hook_tree, Finding):
                yield hook_tree
            else:
                files.append((hooks, hook_tree))
        for file, parsed in files if not elsewhere else []:
            for name in _missing(parsed, file):
                yield error(
                    model.name, f"{version}/{file.name} imports {name!r}, which isn't installed", f"install {name}"
                )
    if not elsewhere:
        yield from _requirements(model)


def _parsed(model: Model, path: Path) -> ast.Module | Finding:
    try:
        return parsed_python(path)
    except (OSError, SyntaxError, ValueError) as err:
        line = f", line {err.lineno}" if isinstance(err, SyntaxError) else ""
        reason = err.msg if isinstance(err, SyntaxError) else err
        return error(model.name, f"{path.parent.name}/{path.name}{line}: {reason}", "mend that line")


def _class(tree: ast.Module) -> ast.stmt | None:
    """What binds the class's name at the top of the module, or in a block there."""
    for node in _statements(tree.body):
        names: list[str] = []
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if CLASS in names or "*" in names:
            return node
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that the module itself runs: also in if, try and with, not in functions and classes."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _missing(tree: ast.Module, path: Path) -> list[str]:
    """Packages that the module imports, come what may, and that aren't there."""
    wanted: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            wanted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            wanted.add(node.module)
    folders = (path.parent, path.parent.parent)
    beside = {entry.stem for folder in folders for entry in folder.iterdir() if entry.is_dir() or entry.suffix == ".py"}
    beside.add(GIVEN)
    return sorted(name for name in wanted if name.partition(".")[0] not in beside and not _installed(name))


def _installed(name: str) -> bool:
    """Whether a module is there, without importing what it is in; a package that makes modules itself has them all."""
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # `__main__` and its like, which no file stands for
        return first in sys.modules
    for count, part in enumerate(rest, 1):
        if spec is None or spec.origin is None or spec.submodule_search_locations is None:
            break
        try:
            source = read_bytes(Path(spec.origin))
        except (OSError, ValueError):  # frozen, or of another make: nobody knows what it brings
            return True
        if any(mark in source for mark in (b"sys.modules", part.encode())):
            return True
        finder = importlib.machinery.PathFinder
        spec = finder.find_spec(".".join([first, *rest[:count]]), spec.submodule_search_locations)
    return spec is not None


def _requirements(model: Model) -> Findings:
    """Of hooks that `serve pack` wrote: their REQUIREMENTS are kept in the configuration."""
    if "requirements" not in model.config.parameters:
        if "stages" in model.config.parameters:
            yield error(model.name, "there is no parameter requirements, which its hooks read", "pack it again")
        return
    try:
        missing = missing_requirements(parse_json(model.config.parameters["requirements"].string_value.encode()))
    except (ValueError, TypeError, AttributeError, RecursionError, importlib.metadata.PackageNotFoundError):
        of_hooks = "stages" in model.config.parameters  # they read it, too
        yield (error if of_hooks else warning)(model.name, "its parameter requirements can't be read", "pack it again")
        return
    for requirement in missing:
        yield error(model.name, f"its hooks need {requirement}, which isn't installed", f"pip install '{requirement}'")
