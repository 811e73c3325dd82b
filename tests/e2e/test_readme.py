"""The README names what there is; that its commands work is for test_demo, which has what they work on."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Checked by what they name, not run: these install, or are the tests themselves.
NOT_RUN = ("make ", "pip install ", "python3.11 -m venv ")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    text = "\n".join(blocks("sh")).replace("\\\n", " ")
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


def test_the_tree_names_every_module() -> None:
    tree = README.partition("## What is where")[2]
    files = [path for package in ("compress", "serve") for path in (ROOT / package).glob("*.py")]
    missing = [path.name for path in files if not path.name.startswith("__") and path.stem not in tree]
    assert not missing


@pytest.mark.parametrize("path", re.findall(r"\b(?:benchmarks|examples|docs)/[\w./-]+\w", README))
def test_the_files_it_names_exist(path: str) -> None:
    assert (ROOT / path).exists()
