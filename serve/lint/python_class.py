"""The class of a model in Python: whether Triton can call what it calls, read without being run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from serve.lint.finding import Findings, error
from serve.lint.model import Model

__all__ = ["class_rules", "gives_nothing"]

CALLED = {"initialize": "args", "execute": "requests"}
"""The methods that the Python backend calls, each with the argument that it gives, by place."""


def class_rules(model: Model, where: str, found: ast.ClassDef) -> Findings:
    """Its methods: that execute is there and answers, and that each takes what it is given.

    Args:
        model: whose it is.
        where: the file, for messages.
        found: the class, without bases, so that all is there to be read.
    """
    methods = {item.name: item for item in found.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    bound = {name.id for item in found.body for name in ast.walk(item) if isinstance(name, ast.Name)}
    if "execute" not in methods and "execute" not in bound:
        yield error(model.name, f"{found.name} in {where} has no execute: no request is answered", "add it")
    for name, argument in CALLED.items():
        method = methods.get(name)
        if method is not None and not _takes(method):
            what = f"{name} in {where} can't be called as Triton calls it"
            yield error(model.name, what, f"write def {name}(self, {argument})")
    execute = methods.get("execute")
    if execute is not None and not model.config.model_transaction_policy.decoupled and not _answers(execute):
        yield error(model.name, f"execute in {where} returns nothing: no request is answered", "return the responses")


def _takes(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it can be called on an object with one argument by place."""
    kinds = {each.id for each in method.decorator_list if isinstance(each, ast.Name)}
    if len(kinds) < len(method.decorator_list) or kinds - {"staticmethod", "classmethod"}:
        return True  # a decorator may make anything of it
    count = 1 + ("staticmethod" not in kinds)
    arguments = method.args
    places = len(arguments.posonlyargs) + len(arguments.args)
    needed = places - len(arguments.defaults)
    by_name = any(value is None for value in arguments.kw_defaults)
    return needed <= count and (count <= places or arguments.vararg is not None) and not by_name


def _answers(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it could give an answer: it returns a value, or raises, or is made of more than can be read."""
    if method.decorator_list or isinstance(method, ast.AsyncFunctionDef):
        return True
    return any(
        (isinstance(node, ast.Return) and node.value is not None)
        or isinstance(node, ast.Raise | ast.Yield | ast.YieldFrom)
        for node in _own(method.body)
    )


def gives_nothing(function: ast.FunctionDef, *, yields: bool = False) -> str:
    """Why a function never gives a value; "" where it may.

    Args:
        yields: whether it may give values that way.
    """
    if not yields and any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own(function.body)):
        return "yields, and gives no value"
    return "" if _answers(function) else "returns nothing"


def _own(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes but those of functions inside."""
    left: list[ast.AST] = list(body)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            left += ast.iter_child_nodes(node)
