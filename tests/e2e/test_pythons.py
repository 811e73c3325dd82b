"""Under each Python, and with NumPy 2 in the environment, a model with hooks is served by the Triton that was fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_install import install
from tests.serve_models import HOOKS, tiny_artifact

HOOK = HOOKS.replace("import numpy as np", "import sys\n\nimport numpy as np").replace(
    'Answer("abc"[best]', 'Answer(f"python {sys.version_info[1]} numpy {np.__version__}"'
)
SERVE = """
import json, sys
from pathlib import Path

import numpy
from serve.http.once import ask_once
from serve.http.message import Address
from serve.triton.launch import Ports, TritonServer

assert numpy.__version__.startswith("2."), numpy.__version__
with TritonServer(Path(sys.argv[1]), ports=Ports(0, 0, 0)) as server:
    asked = {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": ["0,2,1,0"]}]}
    port = int(server.http_address.rpartition(":")[2])
    status, said = ask_once(
        Address("127.0.0.1", port), "POST", "/v2/models/tiny/infer", json.dumps(asked).encode(), timeout_s=60
    )[:2]
    print(status, said.decode())
"""


def interpreter(version: str) -> str | None:
    """One of PATH that runs, or a version manager's."""
    managed = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *map(str, reversed(managed))):
        if found and not subprocess.run([found, "-c", "import venv"], check=False, capture_output=True).returncode:
            return found
    return None


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("version", "runs"), [("3.11", "3.11"), ("3.12", "3.12"), ("3.13", "3.11")])
def test_a_model_is_served_under(version: str, runs: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    venv = install(tmp_path / "venv", "triton", python)
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": f"{venv.parent}:{os.environ['PATH']}"}
    asked = () if version == runs else ("--python", sys.executable)
    fetch = [str(venv), "-m", "serve", "triton", "install", *asked]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(venv), "install", "-q", "pip"], check=True)
    subprocess.run(fetch, check=True, capture_output=True, env=environ, cwd=tmp_path)
    (tmp_path / "hooks.py").write_text(HOOK)
    words = [str(tiny_artifact(tmp_path / "artifact")), "--repository", str(tmp_path / "models"), "--name", "tiny"]
    pack = [str(venv), "-m", "serve", "pack", *words, "--hooks", str(tmp_path / "hooks.py")]
    subprocess.run(pack, check=True, capture_output=True, env=environ, cwd=tmp_path)
    command = [str(venv), "-c", SERVE, str(tmp_path / "models")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"python {runs.partition('.')[2]} numpy 1.26.4" in done.stdout, done.stdout
    assert done.stdout.startswith("200 ")
