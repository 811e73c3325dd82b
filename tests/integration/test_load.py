"""The load tester against a real Triton, directly and through the gateway."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.gateway.settings import Settings
from serve.load.options import LoadOptions
from serve.load.result import LoadResult
from serve.load.run import run_load
from serve.repository import pack
from serve.triton.launch import Ports, TritonServer
from tests.serve_http import gateway_thread
from tests.serve_models import hook_file, tiny_artifact


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("load")
    artifact = tiny_artifact(folder / "artifact")
    pack(artifact, repository=folder / "repository", name="tiny")
    pack(artifact, repository=folder / "repository", name="hooked", hooks=hook_file(folder))
    with TritonServer(folder / "repository", ports=Ports(0, 0, 0)) as server:
        yield f"http://{server.http_address}"


@pytest.fixture(scope="module")
def gateway(triton: str) -> Iterator[str]:
    with gateway_thread(Settings(upstream=(triton,), port=0)) as url:
        yield url


def successes(triton: str, model: str) -> int:
    """Triton's own count, once it stands still: it counts an ensemble's answer a moment after sending it."""
    counts = [-1, counted(triton, model)]
    while counts[-1] != counts[-2]:
        time.sleep(0.3)
        counts.append(counted(triton, model))
    return counts[-1]


def counted(triton: str, model: str) -> int:
    with urllib.request.urlopen(f"{triton}/v2/models/{model}/stats") as answer:
        stats = json.load(answer)["model_stats"][0]["inference_stats"]
    return int(stats["success"]["count"])


@pytest.mark.parametrize("way", ["triton", "gateway"])
@pytest.mark.parametrize("model", ["tiny", "hooked"])
def test_counts_are_tritons(triton: str, way: str, model: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url: str = request.getfixturevalue(way)
    output = tmp_path / "load.json"
    before = successes(triton, model)
    result = run_load(LoadOptions(model, url, concurrency=4, duration=0.5, warmup=0.2, output=output))
    assert result.errors == {}
    assert result.warmup_count + result.count == successes(triton, model) - before
    assert result.count > 0
    assert result.p50_ms is not None
    assert LoadResult.from_dict(json.loads(output.read_text())) == result
