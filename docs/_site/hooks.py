"""What mkdocs calls while it builds: pages that the code writes, and Markdown as it is read on a code host.

Nothing here is committed as a page: the reference is what the code says at the time of the build.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
for folder in (HERE, ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from fields import PARTS  # noqa: E402  # beside this file, which is no package

OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "deploy/README.md": "deploy.md"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
ITEM = re.compile(r"([-*]|1\.) ")
PART = re.compile(r"^<!-- from the code: (.+) -->$", re.MULTILINE)
FENCE = re.compile(r"\s*(```|~~~)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put each decision into the navigation."""
    nav: list[Any] = config.nav or []
    (explanation,) = (part["Explanation"] for part in nav if isinstance(part, dict) and "Explanation" in part)
    explanation += [f"decisions/{path.name}" for path in _decisions()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the code writes, and the pages that stand elsewhere in the repository."""
    pages = {"decisions/index.md": _index()}
    pages |= {name: (ROOT / path).read_text(encoding="utf-8") for path, name in OUTSIDE.items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for name in sorted(_linked()):
        files.append(File.generated(config, f"source/{name}.txt", content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put in what the code says, and let links and lists mean what they mean on a code host."""
    name = page.file.src_uri
    markdown = PART.sub(lambda part: PARTS[part[1]](), markdown)
    return with_lists(LINK.sub(lambda link: _moved(link, name), markdown))


def with_lists(markdown: str) -> str:
    """A list may follow a paragraph's line at once; Python's Markdown wants an empty line between."""
    lines: list[str] = []
    fenced = listed = False
    for line in markdown.split("\n"):
        if FENCE.match(line):
            fenced = not fenced
        item = ITEM.match(line) is not None
        if item and not fenced and not listed and lines and lines[-1].strip():
            lines.append("")
        listed = (item or listed) and bool(line.strip())
        lines.append(line)
    return "\n".join(lines)


def _where(name: str) -> str:
    """A page's file, from the root of the repository."""
    return next((path for path, page in OUTSIDE.items() if page == name), f"docs/{name}")


def _target(link: str, name: str) -> str:
    """What a link in a page means, from the root of the repository."""
    return os.path.normpath(os.path.join(os.path.dirname(_where(name)), link))  # noqa: PTH118, PTH120


def _moved(link: re.Match[str], name: str) -> str:
    path, anchor = _target(link[1], name), link[2] or ""
    if path == "docs/decisions":
        page = "decisions/index.md"  # of which a folder on disk has none
    elif path.startswith("docs/"):
        page = path.removeprefix("docs/")
    elif path == "README.md":
        page, anchor = "index.md", ""
    elif path in OUTSIDE:
        page = OUTSIDE[path]
    elif (ROOT / path).is_file():
        page = f"source/{path}.txt"
    else:
        return str(link[0])  # for mkdocs to refuse
    return os.path.relpath(page, os.path.dirname(name) or ".") + anchor  # noqa: PTH120


def _linked() -> set[str]:
    """Files of the code that pages link to: they go along, so that the links hold in a folder."""
    names = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    found = {
        _target(link[1], name)
        for name in [*names, *OUTSIDE.values()]
        for link in LINK.finditer((ROOT / _where(name)).read_text(encoding="utf-8"))
    }
    return {
        path
        for path in found
        if (ROOT / path).is_file() and not path.startswith("docs/") and path not in {*OUTSIDE, "README.md"}
    }


def _decisions() -> list[Path]:
    return sorted(path for path in (ROOT / "docs/decisions").glob("[0-9]*.md"))


def _index() -> str:
    lines = [
        f"- [{path.read_text(encoding='utf-8').partition(chr(10))[0].lstrip('# ')}]({path.name})"
        for path in _decisions()
    ]
    return (
        "# Decisions\n\nWhy things are as they are: what was tried, what was measured, what was chosen.\n\n"
        + "\n".join(lines)
        + "\n"
    )
