"""Hooks that `serve pack` wrote, changed since: Triton loads them, and then every request fails."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from serve.hooks.labelled import MEND, label_lists, length_of, mislabelled
from serve.lint.finding import Findings, error
from serve.lint.hook_stages import STAGES, stages_of, tensors_of_hooks, usable
from serve.lint.model import Model
from serve.lint.python_class import gives_nothing
from serve.lint.python_text import parsed_python

__all__ = ["hook_rules"]

WRITERS = {"exec", "globals", "setattr", "vars"}
"""What can bind a name that is not written."""


def hook_rules(model: Model) -> Findings:
    """The functions of hooks.py against the arguments that config.pbtxt says they get, read without being run."""
    stages = stages_of(model)
    if stages is None:
        return
    if not isinstance(stages, dict) or not all(map(usable, stages.values())):
        yield error(model.name, "its parameter stages can't be read", "pack it again")
        return
    stages = {name: stages[name] for name in STAGES if name in stages}  # no other is looked at
    yield from tensors_of_hooks(model, stages)
    streams = any(spec.get("streams") for spec in stages.values())
    if streams != model.config.model_transaction_policy.decoupled:
        told = "any number of answers, and it is not decoupled" if streams else "one answer, and it is decoupled"
        mend = f"set model_transaction_policy {{ decoupled: {str(streams).lower()} }}, or pack it again"
        yield error(model.name, f"its hooks give {told}: no request is answered", mend)
    for version in model.served:
        path = model.folder / str(version) / "hooks.py"
        if not path.is_file():
            yield error(model.name, f"there is no {version}/hooks.py", "pack it again")
            continue
        try:
            tree = parsed_python(path)
        except (OSError, SyntaxError, ValueError):
            continue  # told of by the rules for Python
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.level:
                what = f"{version}/hooks.py, line {node.lineno}: a relative import, and it is part of no package"
                yield error(model.name, what, "import the module by its name")
        yield from _labels(model, version, tree, stages.get("postprocess", {}))
        bound = dict(_bound(tree.body))
        anything = any(map(_binds_anything, ast.walk(tree)))
        for stage, spec in stages.items():
            if stage not in bound:
                if not anything:
                    what = f"{version}/hooks.py defines no {stage}"
                    yield error(model.name, what, f"call the function {stage} again, or pack it again")
            elif why := _unfit(bound[stage], list(spec["arguments"]), yields=bool(spec.get("streams"))):
                what = f"{stage} in {version}/hooks.py {why}: no request is answered"
                yield error(model.name, what, "write it as it was packed, or pack it again")


def _labels(model: Model, version: int, tree: ast.Module, stage: Mapping[str, Any]) -> Findings:
    """Labels that are fewer or more than the classes, where the scores are an input of this model."""
    if len(arguments := list(stage.get("arguments", {}))) != 1:
        return
    tensor = stage.get("tensors", {}).get(arguments[0], arguments[0])
    dims = next((list(each.dims) for each in model.config.input if each.name in (tensor, arguments[0])), [])
    if not dims or dims[-1] < 1 or any(dim not in (1, -1) for dim in dims[:-1]):
        return
    for name, line in label_lists(tree).items():
        length = length_of(tree, name)
        if length is not None and (why := mislabelled(name, length, arguments[0], dims[-1])):
            yield error(model.name, f"{version}/hooks.py, line {line}: {why}", f"{MEND}, and pack it again")


def _binds_anything(node: ast.AST) -> bool:
    """Whether a module may have names that no line of it binds."""
    if isinstance(node, ast.ImportFrom):
        return node.names[0].name == "*"
    return (isinstance(node, ast.Name) and node.id in WRITERS) or getattr(node, "name", "") == "__getattr__"


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST | None]]:
    """The names that a module binds and what to, the last one last; None where only running it would tell."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, None if node.decorator_list else node
        elif isinstance(node, ast.ClassDef):
            yield node.name, None
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        yield name.id, node.value if isinstance(node.value, ast.Lambda | ast.Constant) else None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).partition(".")[0], None
        else:  # blocks: what they bind may be bound or not; := binds in any expression
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.MatchAs):
                    yield inner.name or "", None
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id, None
                elif isinstance(inner, ast.alias):
                    yield inner.asname or inner.name, None


def _unfit(node: ast.AST | None, given: list[str], *, yields: bool) -> str:
    """Why it can't be called with these arguments by name; "" where it can, or nobody knows.

    Args:
        yields: whether it may.
    """
    if node is None:
        return ""
    if isinstance(node, ast.AsyncFunctionDef):
        return "is async"
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return "is no function"
    if isinstance(node, ast.FunctionDef) and (why := gives_nothing(node, yields=yields)):
        return why
    arguments = node.args
    by_name = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
    positional = [*arguments.posonlyargs, *arguments.args]
    optional = {each.arg for each in positional[len(positional) - len(arguments.defaults) :]}
    optional |= {
        each.arg for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is not None
    }
    if unknown := [name for name in given if name not in by_name] if arguments.kwarg is None else []:
        return f"takes no {unknown[0]!r}"
    needed = [each.arg for each in (*positional, *arguments.kwonlyargs) if each.arg not in optional]
    if left := [name for name in needed if name not in given or name not in by_name]:
        return f"wants {left[0]!r}, which nobody gives it"
    return ""
