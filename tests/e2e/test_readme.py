"""README and documentation name what there is; that their commands work is for test_demo, which has what they work on."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Read in this order by who begins; their commands are run in it.
PAGES = ("README.md", "docs/tutorial.md", "docs/compress.md", "docs/fleet.md")
# The site's first page leads to what the site alone has: test_docs follows its links.
EVERY = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")} - {ROOT / "docs/index.md"})
# Checked by what they name, not run: these install, or are the tests themselves.
NOT_RUN = ("make ", "pip install ", "python3.11 -m venv ")


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[str]:
    text = "\n".join(block for page in PAGES for block in blocks("sh", page)).replace("\\\n", " ")
    return [line.partition("  #")[0].strip() for line in text.splitlines() if line.strip()]


def test_the_python_example_runs(tmp_path: Path) -> None:
    (code,) = blocks("python")
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "artifact" / "report.html").exists()


def test_the_make_targets_and_extras_are_there() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake (\w+)", README)) <= targets | {"sure"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for found in re.findall(r"\.\[([\w,]+)\]", README) for name in found.split(",")}
    assert extras == set(project["optional-dependencies"])


def test_the_readme_can_be_read_in_one_go() -> None:
    assert len(README.splitlines()) < 200


@pytest.mark.parametrize("page", EVERY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file, and to a heading in it."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.+)$", to.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, link


@pytest.mark.parametrize("page", [*PAGES, "docs/benchmarks.md", "CONTRIBUTING.md"])
def test_the_files_it_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"(?<![\w/.])(?:benchmarks|examples|docs|compress|serve)/[\w./-]*\.\w+", text)
    assert not [path for path in found if not (ROOT / path).exists()]
