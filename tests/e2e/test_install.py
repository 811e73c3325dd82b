"""The smallest installs hold what they promise and nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def install(folder: Path, extra: str, interpreter: str = sys.executable) -> Path:
    """A new environment with one extra of the project; its Python."""
    subprocess.run([interpreter, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    command = [*pip(python), "install", "--quiet", "--no-compile"]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), f"{ROOT}[{extra}]"], check=True, capture_output=True)
    return python


def pip(python: Path) -> list[str]:
    return [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]


def names(python: Path) -> set[str]:
    listed = subprocess.run([*pip(python), "list", "--format=json"], check=True, capture_output=True)
    return {package["name"].lower() for package in json.loads(listed.stdout)}


def say(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), "-m", *words], capture_output=True, text=True, check=False, cwd=python.parent)


@pytest.mark.timeout(600)
def test_what_the_gateways_image_installs_is_small_brings_no_torch_and_packs(tmp_path: Path) -> None:
    from tests.serve_models import tiny_artifact

    (words,) = [line for line in (ROOT / "deploy/docker/gateway.Dockerfile").read_text().splitlines() if '".[' in line]
    extras = words.partition('".[')[2].partition("]")[0]
    python = install(tmp_path / "venv", extras)
    assert not {"torch", "onnx", "onnxruntime", "matplotlib", "pyyaml", "simpy"} & names(python)
    packages = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    assert size < 250e6, f"{size / 1e6:.0f} MB"
    tiny_artifact(tmp_path / "artifact")
    packed = say(
        python, "serve", "pack", str(tmp_path / "artifact"), "--repository", str(tmp_path / "m"), "--name", "tiny"
    )
    assert packed.returncode == 0, packed.stderr
    checked = say(python, "serve", "check", str(tmp_path / "m"))
    assert checked.returncode == 0, checked.stderr
    started = say(python, "serve", "up", str(tmp_path / "m"), "--port", "0")
    assert started.returncode == 2
    assert ".[triton]" in started.stderr
    trained = say(python, "compress", "export", "model.pt", "-o", str(tmp_path / "a"))
    assert trained.returncode == 2
    assert ".[compress]" in trained.stderr


@pytest.mark.timeout(600)
def test_compress_alone_brings_no_triton_and_exports(tmp_path: Path) -> None:
    import compress
    from tests.models import mlp

    python = install(tmp_path / "venv", "compress")
    assert not {"tritonclient", "fastapi", "lightning-fabric"} & names(python)
    compress.save(mlp(), tmp_path / "model.pt", inputs="x:float32[batch,4]")
    done = say(python, "compress", "export", str(tmp_path / "model.pt"), "-o", str(tmp_path / "artifact"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "artifact" / "report.html").exists()
    served = say(python, "serve", "up", str(tmp_path / "artifact"))
    assert served.returncode == 2
    assert ".[serve]" in served.stderr
