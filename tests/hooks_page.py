"""The examples of docs/hooks.md: whole modules, each with what a request with its example() is answered."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["EXAMPLES", "PAGE", "HookExample", "written"]

PAGE = (Path(__file__).resolve().parents[1] / "docs/hooks.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class HookExample:
    """One of them; the answers of one that streams are a list."""

    code: str
    answer: Any


def _examples() -> list[HookExample]:
    blocks = BLOCK.findall(PAGE)
    kinds = [kind for kind, _ in blocks]
    if kinds != ["python", "json"] * (len(blocks) // 2):
        raise ValueError(f"a module on the page has no answer below it: {kinds}")
    return [
        HookExample(code, json.loads(answer)) for (_, code), (_, answer) in zip(blocks[::2], blocks[1::2], strict=True)
    ]


EXAMPLES = _examples()


def written(example: HookExample, folder: Path) -> Path:
    """The module as a file, with the labels that one of them reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "labels.txt").write_text("cat\nbird\nfish\n", encoding="utf-8")
    path = folder / "hooks.py"
    path.write_text(example.code, encoding="utf-8")
    return path
