"""Plots are drawn by the toolkit's settings alone, whatever a `matplotlibrc` of the current folder or of the user says."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest

from serve.load.report.page import page
from tests.unit.serve.load.test_report import rich_report

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "text.usetex": "True", "text.latex.preamble": r"\input{/etc/passwd}", "savefig.dpi": "20000",
    "axes.grid": "True", "lines.linewidth": "40", "path.sketch": "1, 100, 2",
}  # fmt: skip
HELPERS = {"axes_of", "figure_of", "_figure", "Figure"}  # that begin a plot
HALVES = {"compress": "compress.report.plot_settings", "serve": "serve.load.report.plot_style"}


def drawing() -> list[Path]:
    files = [each for half in HALVES for each in sorted((ROOT / half).rglob("*.py"))]
    return [each for each in files if "svg_of" in each.read_text()]


@pytest.mark.parametrize("file", drawing(), ids=lambda file: str(file.relative_to(ROOT)))
def test_whatever_draws_for_others_does_it_by_the_own_settings(file: Path) -> None:
    tree = ast.parse(file.read_text())
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    calls = {
        name: {c.func.id for c in ast.walk(body) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}
        for name, body in functions.items()
    }
    own = {name for name, body in functions.items() if any("own_settings" in ast.dump(d) for d in body.decorator_list)}
    bare = {name for name in functions if name in HELPERS or "svg_of" in calls[name]} - own
    while more := {name for name in functions if calls[name] & (bare - HELPERS)} - own - bare:
        bare |= more
    called = set().union(*calls.values())
    assert {name for name in bare if name not in called} <= HELPERS | {"svg_of"}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("place", ["the current folder", "the user's"])
def test_no_tex_is_started_for_a_file_of_settings(half: str, place: str, tmp_path: Path) -> None:
    folder, programs = tmp_path / "work", tmp_path / "bin"
    users = tmp_path / "config" / "matplotlib"
    for each in (folder, programs, users):
        each.mkdir(parents=True)
    program = programs / "latex"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    program.chmod(0o755)
    code = (
        f"from {HALVES[half]} import own_settings\n"
        f"from {'compress.report.plots' if half == 'compress' else HALVES[half]} import svg_of\n"
        "from matplotlib.figure import Figure\n"
        "with own_settings():\n"
        "    axes = Figure(figsize=(2, 2)).subplots()\n"
        "    axes.plot([0, 1], [0, 1], label='line')\n"
        "    axes.legend()\n"
        "    axes.set_title('title')\n"
        "print(svg_of(axes.figure))"
    )
    environ = os.environ | {
        "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    drawn = []
    for settings in ("", "".join(f"{name}: {value}\n" for name, value in SETTINGS.items())):
        (folder if place == "the current folder" else users).joinpath("matplotlibrc").write_text(settings)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environ, capture_output=True, text=True, check=True
        )
        drawn.append(done.stdout)
    assert drawn[0] == drawn[1]
    assert not (tmp_path / "started").exists()


def test_a_load_report_is_the_same_whatever_is_set_and_leaves_that_as_it_was() -> None:
    report = rich_report()
    expected = page(report)
    with mpl.rc_context({"lines.linewidth": 40, "axes.grid": True, "text.usetex": True}):
        assert page(report) == expected
        assert mpl.rcParams["lines.linewidth"] == 40
        assert mpl.rcParams["text.usetex"]
