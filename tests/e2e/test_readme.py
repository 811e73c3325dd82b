"""README and documentation name what there is; that their commands work is for test_demo, which has what they work on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from serve.doctor.before import plan
from tests.e2e.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Read in this order by who begins; their commands are run in it.
PAGES = ("README.md", "docs/tutorial.md", "docs/compress.md", "docs/fleet.md")
EVERY = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md")})
# Checked by what they name, not run: these install, or are the tests themselves.
NOT_RUN = ("serve triton install", "make ", "pip ", "python3.11 -m venv ", ". .venv/bin/activate")


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[str]:
    text = "\n".join(block for page in PAGES for block in blocks("sh", page)).replace("\\\n", " ")
    return [line.partition("  #")[0].strip() for line in text.splitlines() if line.strip()]


def test_the_python_example_runs(tmp_path: Path) -> None:
    (code,) = (block for block in blocks("python") if "compress.save" in block)
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "artifact" / "report.html").exists()


def test_the_python_clients_are_answered(shipped: str) -> None:
    (code,) = (block for block in blocks("python") if "import requests" in block)
    code = code.replace("127.0.0.1:8080", shipped.removeprefix("http://"))
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "'label': '7'" in result.stdout, "by requests"
    assert "[[b'7']]" in result.stdout, "by Triton's client"


def test_the_make_targets_and_extras_are_there() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake (\w+)", README)) <= targets | {"sure"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for found in re.findall(r"\.\[([\w,]+)\]", README) for name in found.split(",")}
    assert extras == set(project["optional-dependencies"])


def test_the_way_by_hand_is_part_of_the_tutorial_whose_commands_are_run() -> None:
    (block,) = (
        text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE) if not kind
    )
    lines = [line.split() for line in block.replace("\\\n", " ").splitlines() if not line.startswith(("#", ". "))]
    tutorial = [line.split() for line in commands()]
    places = [tutorial.index(line) for line in lines]
    assert len(places) > 5
    assert places == sorted(places)


def test_the_table_of_peers_is_what_the_benchmarks_printed() -> None:
    script = [sys.executable, str(ROOT / "docs/figures/peers.py")]
    table = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert table in README
    assert all((ROOT / script).is_file() for script in re.findall(r"\((benchmarks/\w+\.py)\)", table))


def test_the_sizes_that_are_told_are_those_that_make_tells() -> None:
    text = " ".join(README.split())
    for torch in ("cpu", "cuda"):
        _, words = plan(torch, "")
        assert words.partition(";")[0].partition(": ")[2] in text


@pytest.mark.timeout(600)
def test_the_lines_that_install_work_as_typed(tmp_path: Path) -> None:
    """In a fresh shell, one after the other; what the project needs is left out, since test_install has that."""
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("compress", "serve"):
        shutil.copytree(ROOT / name, tree / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, tree)
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith(("pip ", "python3.11 "))]
    source, wheel = (line for line in lines if line.startswith("pip install"))
    (build,) = (line for line in lines if line.startswith("pip wheel"))
    (make,) = (line for line in lines if line.startswith("python3.11"))
    found = "python -c 'import compress, serve; print(compress.__file__)'"
    typed = [
        make.replace("python3.11", f"'{sys.executable}'"),
        source,
        build,
        "pip uninstall -qy compress-serve",
        wheel,
    ]
    script = "\n".join(["set -e", *typed, "cd /", found])
    environ = {**os.environ, "PIP_NO_DEPS": "1", "PIP_QUIET": "1"}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tree, capture_output=True, text=True, check=False, env=environ  # noqa: S607
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "site-packages" in done.stdout.splitlines()[-1]


def test_the_readme_can_be_read_in_one_go() -> None:
    assert len(README.splitlines()) < 200


@pytest.mark.parametrize("page", EVERY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file, and to a heading in it."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        path, _, heading = link.partition("#")
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), link
        if heading and "\n::: " not in (written := to.read_text(encoding="utf-8")):  # else the site's build has more
            titles = re.findall(r"^#+ (.+)$", written, re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, link


def test_pictures_are_small_and_each_is_shown() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in EVERY)
    pictures = [path for kind in ("png", "svg", "webp") for path in (ROOT / "docs/figures").glob(f"*.{kind}")]
    assert len(pictures) > 5
    assert [path.name for path in pictures if path.stat().st_size > 150_000] == []
    assert [path.name for path in pictures if path.name not in shown] == []


@pytest.mark.parametrize("page", [*PAGES, "docs/benchmarks.md", "CONTRIBUTING.md"])
def test_the_files_it_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"(?<![\w/.])(?:benchmarks|examples|docs|compress|serve)/[\w./-]*\.\w+", text)
    assert not [path for path in found if not (ROOT / path).exists()]
