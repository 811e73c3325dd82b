"""Hooks on a real Triton: a batch at a time, files beside them, and as one Python model that asks the network."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.settings import Settings
from serve.pack.write import PackOptions, pack
from serve.triton.launch import TritonServer
from tests.gateway_models import fetch
from tests.integration.test_triton import FREE, get, infer, refusal
from tests.serve_http import gateway_thread
from tests.serve_models import HOOKS, hook_file, tiny_artifact

pytestmark = pytest.mark.integration
BATCHWISE = """\
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from letters import NAMES

FILES = ["letters.py", "offset.txt"]
OFFSET = float(Path(__file__).with_name("offset.txt").read_text())


class Answer(NamedTuple):
    label: str
    score: float
    size: int


def preprocess(text: list[str]) -> np.ndarray:
    return np.array([[float(part) for part in line.split(",")] for line in text], np.float32) + np.float32(OFFSET)


def postprocess(logits) -> list[Answer]:
    if (logits > 99).any():
        raise RuntimeError("too large")
    return [Answer(NAMES[int(row.argmax())], float(row.max()), len(logits)) for row in logits]
"""
POST_ONLY = """\
from typing import Annotated, NamedTuple
import numpy as np


class Best(NamedTuple):
    index: Annotated[np.ndarray, "int64[batch,1]"]
    sizes: list[int]


def postprocess(logits) -> Best:
    return Best(logits.argmax(1)[:, None], [len(logits)] * len(logits))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("hooks")
    repository, tiny = folder / "models", tiny_artifact(folder / "tiny")
    (folder / "batchwise").mkdir()
    (folder / "batchwise/letters.py").write_text('NAMES = "xyz"\n')
    (folder / "batchwise/offset.txt").write_text("0.5")
    batchwise = folder / "batchwise/my_hooks.py"
    batchwise.write_text(BATCHWISE)
    one = PackOptions(instances=1, max_queue_delay_microseconds=200_000)
    pack(tiny, repository=repository, name="batchwise", hooks=batchwise, options=one)
    pack(tiny, repository=repository, name="best", hooks=hook_file(folder / "post", POST_ONLY), options=one)
    bls = PackOptions(instances=1, max_queue_delay_microseconds=200_000, pipeline="bls")
    pack(tiny, repository=repository, name="bls", hooks=batchwise, options=bls)
    pack(tiny, repository=repository, name="bls-items", hooks=hook_file(folder / "items", HOOKS), options=bls)
    pack(tiny, repository=repository, name="bls-best", hooks=hook_file(folder / "post", POST_ONLY), options=bls)
    with TritonServer(repository, ports=FREE, log=folder / "triton.log") as server:
        yield server


def ask(server: TritonServer, model: str, *texts: str) -> dict[str, list[Any]]:
    return infer(server, model, text=("BYTES", [len(texts), 1], list(texts)))


@pytest.mark.parametrize("model", ["batchwise", "bls"])
def test_a_batch_of_several_requests_goes_through_a_hook_at_once(server: TritonServer, model: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: ask(server, model, f"{n},0,0,0"), range(1, 5)))
    assert [answer["score"] for answer in answers] == [[n + 1.0] for n in range(1, 5)]  # with the offset of the file
    assert {answer["label"][0] for answer in answers} == {"x"}
    assert max(answer["size"][0] for answer in answers) > 1


@pytest.mark.parametrize("model", ["batchwise", "bls"])
def test_a_failing_request_of_a_batch_fails_alone(server: TritonServer, model: str) -> None:
    def one(text: str) -> tuple[int, Any]:
        try:
            return 200, ask(server, model, text)["label"]
        except urllib.error.HTTPError as err:
            with err:
                return err.code, err.read().decode()

    texts = ["1,0,0,0", "0,1,0,0", "1,two,3,4", "200,0,0,0", "0,0,1,0"]
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(one, texts))
    assert [answers[index] for index in (0, 1, 4)] == [(200, ["x"]), (200, ["y"]), (200, ["z"])]
    assert answers[2][0] == 400
    assert "hooks.py preprocess: ValueError: could not convert string to float: 'two' (line 19)" in answers[2][1]
    assert answers[3][0] == 500
    assert "hooks.py postprocess: RuntimeError: too large (line 24)" in answers[3][1]


def test_what_a_postprocess_raises_is_not_laid_to_the_request(server: TritonServer) -> None:
    with gateway_thread(Settings(upstream=(f"http://{server.http_address}",), port=0)) as url:
        for text, code, mend in (
            ("200,0,0,0", 500, "the request is not at fault"),
            ("two", 400, "compare the request"),
        ):
            status, answer = fetch(
                f"{url}/predict/batchwise", json.dumps({"text": text}).encode(), content_type="application/json"
            )
            assert (status, answer["mend"].startswith(mend)) == (code, True), answer


def test_a_pipeline_answers_as_the_ensemble_does(server: TritonServer) -> None:
    assert ask(server, "bls-items", "0,2,1,0", "0,0,0.5,0") == {"label": ["b", "c"], "score": [2.0, 0.5]}
    code, told = refusal(lambda: ask(server, "bls-items", "1,2"))
    assert code == 500
    assert "gave float32[2], wanted float32[4]" in told


@pytest.mark.parametrize("model", ["bls", "bls-items", "bls-best"])
def test_what_triton_tells_of_a_pipeline_names_its_network(server: TritonServer, model: str) -> None:
    def told(path: str) -> bytes:
        with urllib.request.urlopen(f"http://{server.http_address}/v2/models/{path}") as answer:
            return bytes(answer.read())

    network = ModelMetadata.parse(told(model), told(f"{model}/config")).network
    assert ModelMetadata.parse(told(network), told(f"{network}/config")).part_of == model


@pytest.mark.parametrize("model", ["best", "bls-best"])
def test_a_named_tuple_of_batches_is_split_again(server: TritonServer, model: str) -> None:
    answer = infer(server, model, x=("FP32", [2, 4], [0, 3, 0, 0, 5, 0, 0, 0]))
    assert answer["index"] == [1, 0]
    assert answer["sizes"] == [2, 2]


def test_a_pipeline_keeps_the_example_and_its_network_is_a_model_of_its_own(server: TritonServer) -> None:
    config = get(server, "/v2/models/bls-items/config")
    assert config["backend"] == "python"
    assert "0,2,1,0" in config["parameters"]["example_inputs"]["string_value"]
    assert get(server, "/v2/models/bls-items_network/config")["backend"] == "onnxruntime"


def test_nothing_is_written_into_the_repository_but_pythons_cache_of_model_py(server: TritonServer) -> None:
    assert {path.name.partition(".")[0] for path in server.repository.rglob("*.pyc")} <= {"model"}


def test_the_hooks_folder_gets_no_cache_and_its_modules_stay_unknown(server: TritonServer) -> None:
    folder = server.repository.parent / "batchwise"
    assert sorted(path.name for path in folder.iterdir()) == ["letters.py", "my_hooks.py", "offset.txt"]
    other = Path(folder.parent / "other")
    other.mkdir()
    (other / "letters.py").write_text('NAMES = "uvw"\n')
    (other / "offset.txt").write_text("0")
    hooks = other / "my_hooks.py"
    hooks.write_text(BATCHWISE + "\nassert NAMES == 'uvw'\n")
    pack(folder.parent / "tiny", repository=other / "models", name="other", hooks=hooks)
