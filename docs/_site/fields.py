"""What the code says of itself, as tables in Markdown: fields of dataclasses, metrics, errors, the Python API."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import pkgutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["PARTS"]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; a bar or a line's end in a cell would end it."""
    lines = [list(head)]
    lines.append(["---"] * len(lines[0]))
    lines += [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def settings() -> str:
    """Every field of the gateway's settings file."""
    from serve.gateway.settings import Settings

    return _options(Settings)


def model_settings() -> str:
    """Every field of a table [models.NAME], which stands in place of the setting of the same name."""
    from serve.gateway.settings import ModelSettings, Settings

    told = docs_of(Settings)
    rows = ((f"`{name}`", kind, told[name]) for name, kind, *_ in _fields(ModelSettings, told))
    return table(("key", "type", "what"), rows)


def recipe(command: str) -> str:
    """Every key of a recipe of `export` or `optimize`."""
    from compress.options import ExportOptions, OptimizeOptions

    options = {"export": ExportOptions, "optimize": OptimizeOptions}[command]
    return _options(options)


def metrics() -> str:
    """Every metric of the gateway, as a gateway that has answered nothing yet would give it."""
    from serve.gateway.app import create_app
    from serve.gateway.settings import Settings

    app = create_app(Settings(state=Path("no-such-folder/rollouts.db")))
    registry = app.state.parts.telemetry.registry
    # The client's own counters keep their labels to themselves; the collectors' families carry theirs.
    labels = {
        str(names[0]): collector._labelnames
        for collector, names in registry._collector_to_names.items()
        if names and hasattr(collector, "_labelnames")
    }
    rows = []
    for family in sorted(registry.collect(), key=lambda family: str(family.name)):
        own = getattr(family, "_labelnames", None) or labels.get(family.name, ())
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append((f"`{name}`", family.type, ", ".join(f"`{label}`" for label in own), family.documentation))
    return table(("metric", "type", "labels", "what"), rows)


def errors() -> str:
    """Every error class of the toolkit, by exit code."""
    from compress.errors import ToolkitError

    rows = ((f"`{kind.__name__}`", str(kind.exit_code), _first(kind)) for kind in _tree(ToolkitError))
    return table(("class", "exit code", "when"), rows)


def gateway_errors() -> str:
    """Every error class of the gateway, by HTTP status."""
    import serve.gateway
    from serve.gateway.errors import GatewayError

    for module in pkgutil.walk_packages(serve.gateway.__path__, "serve.gateway."):
        importlib.import_module(module.name)
    rows = sorted((str(kind.status), f"`{kind.__name__}`", _first(kind)) for kind in _tree(GatewayError))
    return table(("status", "class", "when"), rows)


def api() -> str:
    """The names that `compress` offers; mkdocstrings writes what they are."""
    import compress

    parts = []
    for name in sorted(compress.__all__, key=str.lower):
        parts.append(f"::: {compress._HOMES[name]}.{name}\n")
        if name.endswith("Options"):  # which inherit most of what they have
            there = f"recipes.md#{name.removesuffix('Options').lower()}"
            parts.append(f"    options: {{ members: false }}\n\nIts fields are the [keys of a recipe]({there}).\n")
        parts.append("\n")
    return "".join(parts)


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "model settings": model_settings,
    "recipe export": lambda: recipe("export"),
    "recipe optimize": lambda: recipe("optimize"),
    "metrics": metrics,
    "errors": errors,
    "gateway errors": gateway_errors,
    "api": api,
}
"""What a page asks for by a line `<!-- from the code: NAME -->`."""


def docs_of(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass and of those that it inherits from.

    Raises:
        ValueError: a field has none.
    """
    told: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = typing.cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        for line, after in itertools.pairwise(body):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(after, ast.Expr):
                told[line.target.id] = str(ast.literal_eval(after.value))
    missing = [field.name for field in dataclasses.fields(kind) if field.name not in told]
    if missing:
        raise ValueError(f"{kind.__name__} says nothing of {', '.join(missing)}")
    return told


def _options(kind: type) -> str:
    return table(("key", "type", "default", "what"), ((f"`{name}`", *rest) for name, *rest in _fields(kind)))


def _fields(kind: type, told: Mapping[str, str] | None = None) -> Iterable[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each."""
    told = docs_of(kind) if told is None else told
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        default = "**required**"
        if field.default is not dataclasses.MISSING:
            default = _value(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = "none"
        yield field.name, _type(hints[field.name]), default, told[field.name]


def _type(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "table of tables"
    if origin is tuple:
        return f"list of {_type(parts[0])}"
    if parts:
        return " or ".join(_type(part) for part in parts if part is not type(None))
    return {str: "text", Path: "path", bool: "true or false", int: "whole number", float: "number"}[hint]


def _value(value: object) -> str:
    if value is None or value in ((), ""):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return " ".join(f"`{part}`" for part in value) if isinstance(value, tuple) else f"`{value}`"


def _tree(kind: type[Any]) -> Iterable[type[Any]]:
    if not kind.__name__.startswith("_"):
        yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


def _first(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n\n")[0]
