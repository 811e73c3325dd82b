"""Triton where threads and memory are bounded: it dies without a word, so who starts it says what it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serve.pack.write import PackOptions, pack
from tests.serve_models import tiny_artifact

STARTS = """
import resource, sys
from pathlib import Path
from compress.errors import ServerError
from serve.triton.launch import Ports, TritonOptions, TritonServer

soft, hard = (int(word) for word in sys.argv[2:])
resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
try:
    options = TritonOptions(start_timeout_s=30 if hard > 0 else 120)
    with TritonServer(Path(sys.argv[1]), ports=Ports(0, 0, 0), options=options):
        print("it serves")
except ServerError as err:
    print(err.why)
"""
LITTLE = 1 << 30  # enough for whoever starts it


def started(repository: Path, soft: int, hard: int) -> str:
    command = [sys.executable, "-c", STARTS, str(repository), str(soft), str(hard)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bounded")
    artifact = tiny_artifact(folder / "tiny")
    for number in range(4):
        pack(artifact, repository=folder / "models", name=f"m{number}", options=PackOptions(instances=1))
    return folder / "models"


def test_what_a_process_bounds_itself_to_is_not_its_tritons(repository: Path) -> None:
    assert started(repository, LITTLE, -1) == "it serves\n"


def test_a_bound_that_triton_can_not_be_without_is_told(repository: Path) -> None:
    """It hangs in one model's load, or ends by SIGSEGV, and its log says nothing."""
    told = started(repository, LITTLE, LITTLE)
    assert "ulimit -d leaves 1.0 GiB" in told
