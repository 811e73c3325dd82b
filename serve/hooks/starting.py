"""A starting file of hooks, and its test, of their two halves: what stands before the network, and what behind it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Part", "module", "test_module"]


@dataclass(frozen=True)
class Part:
    """Source of one half of the hooks.

    Attributes:
        says: of the module's first line.
        code: constants and functions.
        test: of them.
        imports: lines of imports, as the module needs them; `test_imports` those of the test.
        requirements: of REQUIREMENTS.
        files: of FILES.
        results: the names that the served model's outputs have by it.
    """

    says: str
    code: str
    test: str
    imports: tuple[str, ...] = ()
    test_imports: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


def module(front: Part, back: Part | None) -> str:
    """The hooks of these parts."""
    parts = [front, back] if back else [front]
    constants = [
        f"{name} = {json.dumps(values)}"
        for name, values in (("REQUIREMENTS", front.requirements), ("FILES", front.files))
        if values
    ]
    says = f"{front.says}, {back.says if back else 'what the network gives out'}."
    return _source(says, [line for part in parts for line in part.imports], constants, [part.code for part in parts])


def test_module(name: str, front: Part, back: Part | None) -> str:
    """The test of the hooks in the module of that name."""
    parts = [front, back] if back else [front]
    says = f"The hooks without a server: `pytest test_{name}.py`."
    imports = [line for part in parts for line in part.test_imports]
    return _source(says, imports, [f"import {name} as hooks"], [part.test for part in parts])


def _source(says: str, imports: Iterable[str], before: Iterable[str], bodies: Iterable[str]) -> str:
    """A module: what it says of itself, its imports, lines after an empty one each, and its bodies."""
    lines = [f'"""{says}"""', "", "from __future__ import annotations", "", *_imports(imports)]
    for line in before:
        lines += ["", line]
    text = "\n\n\n".join(body.strip("\n") for body in bodies)
    apart = "\n\n\n" if text.startswith(("def ", "class ", "@")) else "\n\n"
    return "\n".join(lines) + apart + text + "\n"


def _imports(lines: Iterable[str]) -> list[str]:
    """Sorted as linters want them: the standard library's, then the others."""
    found = sorted(set(lines), key=lambda line: (line.startswith("from "), line))
    both = [line for line in found if line.startswith("from typing")]
    found = [line for line in found if line not in both[:-1]]  # one for all its names
    if both:
        names = sorted({name for line in both for name in line.removeprefix("from typing import ").split(", ")})
        found[found.index(both[-1])] = f"from typing import {', '.join(names)}"
    others = [line for line in found if line.split()[1] in ("numpy", "PIL", "pytest", "tokenizers")]
    own = [line for line in found if line not in others]
    return [*own, *([""] if own and others else []), *others]
