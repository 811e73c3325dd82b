"""Hooks that `serve pack` wrote, changed since: Triton loads them, and then every request fails."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from compress.vetting.texts import parse_json
from serve.lint.finding import Findings, error
from serve.lint.model import Model
from serve.lint.python_text import parsed_python

__all__ = ["hook_rules"]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def hook_rules(model: Model) -> Findings:
    """The functions of hooks.py against the arguments that config.pbtxt says they get, read without being run."""
    stages = _stages(model)
    if stages is None:
        return
    if not isinstance(stages, dict) or not all(map(_usable, stages.values())):
        yield error(model.name, "its parameter stages can't be read", "pack it again")
        return
    for version in model.served:
        path = model.folder / str(version) / "hooks.py"
        if not path.is_file():
            yield error(model.name, f"there is no {version}/hooks.py", "pack it again")
            continue
        try:
            tree = parsed_python(path)
        except (OSError, SyntaxError, ValueError):
            continue  # told of by the rules for Python
        bound = dict(_bound(tree.body))
        anything = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body)
        for stage, spec in stages.items():
            if stage not in bound:
                if not anything:
                    what = f"{version}/hooks.py defines no {stage}"
                    yield error(model.name, what, f"call the function {stage} again, or pack it again")
            elif why := _unfit(bound[stage], list(spec["arguments"])):
                what = f"{stage} in {version}/hooks.py {why}: no request is answered"
                yield error(model.name, what, "write it as it was packed, or pack it again")


def _stages(model: Model) -> Any:
    """What the model's parameter says; None where it has none, "" where it can't be read."""
    if model.backend != "python" or "stages" not in model.config.parameters:
        return None
    try:
        return parse_json(model.config.parameters["stages"].string_value.encode())
    except ValueError:
        return ""


def _usable(spec: Any) -> bool:
    """Whether a stage says what serve.hooks.packed.values.Hook is made of."""
    return (
        isinstance(spec, Mapping)
        and isinstance(spec.get("arguments"), dict)
        and isinstance(spec.get("results"), dict)
        and all(isinstance(each, list) and len(each) == 3 for each in spec["results"].values())
        and spec.get("returns") in ("value", "mapping", "tuple")
    )


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
        elif not isinstance(node, ast.Expr):  # blocks: what they bind may be bound or not
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield inner.name, None
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id, None
                elif isinstance(inner, ast.alias):
                    yield inner.asname or inner.name, None


def _unfit(node: ast.AST | None, given: list[str]) -> str:
    """Why it can't be called with these arguments by name; "" where it can, or nobody knows."""
    if node is None:
        return ""
    if isinstance(node, ast.AsyncFunctionDef):
        return "is async"
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return "is no function"
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
