"""Hooks that yield, packed both ways and served by a real Triton: what they yield goes to the client as it comes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import requests
from tritonclient import grpc as triton_grpc

from serve.lint.run import lint
from serve.pack.write import PackOptions, pack
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.integration.test_gateway_events import events
from tests.integration.test_gateway_memory import Gateway, gateway
from tests.serve_models import HOOKS, hook_file, tiny_artifact

pytestmark = pytest.mark.integration
YIELDING = HOOKS.replace(
    """def postprocess(logits: np.ndarray) -> Answer:
    best = int(logits.argmax())
    return Answer("abc"[best], float(logits[best]))
""",
    """def postprocess(logits: np.ndarray) -> Iterator[Answer]:
    for place in np.argsort(-logits):
        if logits[place] < 0:
            raise RuntimeError("a score below zero")
        yield Answer("abc"[place], float(logits[place]))
""",
).replace("from typing import NamedTuple", "from collections.abc import Iterator\nfrom typing import NamedTuple")
ENDLESS = """\
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def postprocess(logits: np.ndarray) -> Iterator[int]:
    place = 0
    while True:
        with Path("LOG").open("a") as log:
            log.write(".")
        yield (place := place + 1)
"""
MODELS: dict[str, Literal["ensemble", "bls"]] = {"steps": "ensemble", "pipeline": "bls"}


@pytest.fixture(scope="module")
def dots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that "endless" writes to."""
    return tmp_path_factory.mktemp("dots") / "dots.txt"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, dots: Path) -> Iterator[TritonServer]:
    """The same hooks as "steps", asked for as an ensemble, and as "pipeline"; both are one model that asks the network.
    "endless" yields for ever, and writes a dot each time.
    """
    folder = tmp_path_factory.mktemp("yields")
    hooks, artifact = hook_file(folder, YIELDING), tiny_artifact(folder / "tiny")
    for name, kind in MODELS.items():
        options = PackOptions(instances=1, pipeline=kind, max_batch_size=4)
        pack(artifact, repository=folder / "repository", name=name, hooks=hooks, options=options)
    text = ENDLESS.replace("LOG", str(dots))
    endless = PackOptions(instances=1, max_batch_size=4)
    pack(artifact, repository=folder / "repository", name="endless", hooks=hook_file(folder, text), options=endless)
    assert sorted(path.name for path in (folder / "repository").iterdir() if path.is_dir()) == [
        name for model in ("endless", "pipeline", "steps") for name in (model, f"{model}_network")
    ]
    assert not [found for found in lint(folder / "repository") if found.severity == "error"]
    with served_models(folder) as server:
        yield server


@pytest.fixture(scope="module")
def served(triton: TritonServer) -> Iterator[Gateway]:
    with gateway(triton, timeout_s=3) as found:
        yield found


def stream(served: Gateway, model: str, values: Any) -> requests.Response:
    return requests.post(f"{served.url}/predict/{model}/stream", json=values, timeout=60)


@pytest.mark.parametrize("model", MODELS)
def test_what_a_hook_yields_are_events(served: Gateway, model: str) -> None:
    found = events(stream(served, model, {"text": "0,2,1,0"}))
    assert found == [
        ("message", {"model": model, "version": "1", "outputs": {"label": label, "score": score}})
        for label, score in (("b", 2.0), ("c", 1.0), ("a", 0.0))
    ]


@pytest.mark.parametrize("model", MODELS)
def test_a_hook_that_fails_after_some_answers_ends_the_stream_with_its_message(served: Gateway, model: str) -> None:
    (first, second, third) = events(stream(served, model, {"text": "1,2,-1,0"}))
    assert [first[1]["outputs"]["label"], second[1]["outputs"]["label"]] == ["b", "a"]
    assert third[0] == "error"
    assert "hooks.py postprocess: RuntimeError: a score below zero (line" in third[1]["why"]


@pytest.mark.parametrize("model", MODELS)
def test_bad_input_and_more_than_one_sample_are_refused(served: Gateway, model: str) -> None:
    bad = stream(served, model, {"text": "no numbers"})
    assert bad.status_code == 400
    assert bad.json()["why"].startswith("hooks.py preprocess: ValueError")
    many = stream(served, model, {"text": [["0,1,2,3"], ["3,2,1,0"]]})
    assert many.status_code == 400
    assert "2 samples" in many.json()["why"]
    assert len(events(stream(served, model, {"text": "0,2,1,0"}))) == 3


@pytest.mark.parametrize("model", MODELS)
def test_the_route_for_one_answer_names_the_one_for_a_stream(served: Gateway, model: str) -> None:
    answer = requests.post(f"{served.url}/predict/{model}", json={"text": "0,2,1,0"}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["mend"] == f"ask POST /predict/{model}/stream"


@pytest.mark.parametrize("model", MODELS)
def test_tritons_own_client_reads_the_stream_over_grpc(served: Gateway, model: str) -> None:
    found: list[Any] = []
    text = triton_grpc.InferInput("text", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[b"0,2,1,0"]], object))
    with triton_grpc.InferenceServerClient(served.grpc_address) as client:
        client.start_stream(lambda result, error: found.append(error or result.as_numpy("label")[0, 0]))
        client.async_stream_infer(model, [text])
        client.stop_stream()
    assert found == [b"b", b"c", b"a"]


def test_a_hook_that_yields_for_ever_ends_some_time_after_its_client_has_left(
    served: Gateway, triton: TritonServer, dots: Path
) -> None:
    body = {"x": [0.0, 2.0, 1.0, 0.0]}
    with requests.post(f"{served.url}/predict/endless/stream", json=body, stream=True, timeout=60) as found:
        assert next(found.iter_lines()).startswith(b"data: ")
    deadline, before = time.monotonic() + 60, -1
    while before != (before := dots.stat().st_size):  # no dot in two seconds
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(2)
    assert len(events(stream(served, "steps", {"text": "0,2,1,0"}))) == 3
    assert triton.running


def test_a_load_test_asks_no_stream_for_one_answer(served: Gateway) -> None:
    command = [sys.executable, "-m", "serve", "load", served.url, "--model", "steps", "--duration", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "any number of answers" in done.stderr
