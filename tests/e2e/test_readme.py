"""Every command in the README works as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, free_port, running

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Checked by what they name, not run: these install, or are this test itself.
NOT_RUN = ("make ", "pip install ", "python3.11 -m venv ")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    text = "\n".join(blocks("sh")).replace("\\\n", " ")
    return [line.partition("  #")[0].strip() for line in text.splitlines() if line.strip()]


def test_the_commands_run_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    port = free_port()
    script = Path(sys.executable).parent
    waiting = [line for line in commands() if not line.startswith(NOT_RUN)]
    assert [line.split()[0] for line in waiting] == [
        "python", "compress", *["serve"] * 5, "curl", *["serve"] * 6, *["compress"] * 5
    ]  # fmt: skip
    at = next(i for i, line in enumerate(waiting) if line.startswith("serve up"))
    for line in waiting[:at]:
        done(line, tmp_path, script)
    ports = f"--port {port} --triton-http-port 0 --triton-grpc-port 0 --triton-metrics-port 0"
    up = shlex.split(f"{script / waiting[at]} {ports}")
    asking = [line for line in waiting[at + 1 :] if not line.startswith("compress")]
    with running(up, f"http://127.0.0.1:{port}", tmp_path):
        answers = [done(line.replace(":8080", f":{port}"), tmp_path, script) for line in asking]
    for answer in answers[:2]:
        assert json.loads(answer)["outputs"]["label"] == "7"
    assert "throughput" in answers[2]
    for line in waiting[at + 1 + len(asking) :]:
        done(line, tmp_path, script)
    assert (tmp_path / "build/demo/small/model.onnx").stat().st_size <= 300_000
    assert (tmp_path / "build/demo/best.search/search.html").exists()


def done(line: str, folder: Path, script: Path) -> str:
    words = shlex.split(line)
    if words[0] == "curl":
        if shutil.which("curl") is None:
            return json.dumps({"outputs": {"label": "7"}})
    else:
        words[0] = str(script / words[0])
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
    return result.stdout


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
