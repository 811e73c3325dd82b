"""Python models and hooks, read without being run."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from pathlib import Path

from serve.hook_values import missing_requirements
from serve.lint.finding import Finding, Findings, error, warning
from serve.lint.model import Model

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
        if found is None:
            yield error(model.name, f"{version}/{path.name} defines no {CLASS}", f"name its class {CLASS}")
        elif isinstance(found, ast.ClassDef) and not found.bases and "execute" not in _methods(found):
            yield warning(
                model.name, f"{CLASS} in {version}/{path.name} has no execute: no request is answered", "add it"
            )
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
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as err:
        line = f", line {err.lineno}" if isinstance(err, SyntaxError) else ""
        reason = err.msg if isinstance(err, SyntaxError) else err
        return error(model.name, f"{path.parent.name}/{path.name}{line}: {reason}", "mend that line")


def _class(tree: ast.Module) -> ast.stmt | None:
    """What binds the class's name at the top of the module."""
    for node in tree.body:
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


def _methods(node: ast.ClassDef) -> set[str]:
    return {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}


def _missing(tree: ast.Module, path: Path) -> list[str]:
    """Packages that the module imports, come what may, and that aren't there."""
    wanted: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            wanted |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            wanted.add(node.module.partition(".")[0])
    folders = (path.parent, path.parent.parent)
    beside = {entry.stem for folder in folders for entry in folder.iterdir() if entry.is_dir() or entry.suffix == ".py"}
    return sorted(name for name in wanted - beside - {GIVEN} if importlib.util.find_spec(name) is None)


def _requirements(model: Model) -> Findings:
    """Of hooks that `serve pack` wrote: their REQUIREMENTS are kept in the configuration."""
    if "requirements" not in model.config.parameters:
        return
    try:
        missing = missing_requirements(json.loads(model.config.parameters["requirements"].string_value))
    except (ValueError, TypeError, importlib.metadata.PackageNotFoundError):
        yield warning(model.name, "its parameter requirements can't be read", "pack it again")
        return
    for requirement in missing:
        yield error(model.name, f"its hooks need {requirement}, which isn't installed", f"pip install '{requirement}'")
