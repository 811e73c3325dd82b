"""/v1/rerank in front of a real Triton, with a cross-encoder that `serve pack` made of a Hugging Face folder."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.formats.hub.config import offline
from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.pack.write import PackOptions, pack
from serve.triton.launch import TritonServer
from tests.gateway_models import fetch
from tests.hub_models import bert_folder, hub_artifact, sentence_folder
from tests.integration.test_texts import tokens
from tests.integration.test_triton import FREE
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
LARGEST = 4
QUERY = "word1 word2 word3"
DOCUMENTS = ["word4", "word2 word3 word9", "word7 " * 60, "word1 word2 word3", *(f"word{at} word5" for at in range(20))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rerank")


@pytest.fixture(scope="module")
def triton(folder: Path) -> Iterator[str]:
    encoder = hub_artifact(bert_folder(folder / "cross", labels=("relevance",)), folder / "artifact")
    options = PackOptions(instances=1, max_batch_size=LARGEST)
    pack(encoder, repository=folder / "models", name="cross", options=options, text_pair=True)
    pack(encoder, repository=folder / "models", name="single", options=options)
    sentences = hub_artifact(sentence_folder(folder / "encoder"), folder / "encoder-artifact")
    pack(sentences, repository=folder / "models", name="encoder", options=options)
    with TritonServer(folder / "models", ports=FREE, log=folder / "triton.log") as server:
        yield f"http://{server.http_address}"


@pytest.fixture(scope="module")
def url(triton: str) -> Iterator[str]:
    with gateway_thread(Settings(upstream=(triton,), port=0)) as url:
        yield url


def rerank(url: str, documents: list[Any], key: str = "", **more: Any) -> tuple[int, Any]:
    body = {"model": "cross", "query": QUERY, "documents": documents} | more
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return fetch(f"{url}/v1/rerank", json.dumps(body).encode(), content_type="application/json", **headers)


def judged(folder: Path, documents: list[str]) -> np.ndarray[Any, Any]:
    """As the recipe of sentence-transformers' cross-encoders has it: the sigmoid of one number for each pair."""
    with offline() as transformers, torch.no_grad():
        network = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        logits = network(**tokens(folder, [(QUERY, each) for each in documents], 32)).logits
        return np.asarray(torch.sigmoid(logits[:, 0]))


def test_documents_are_ranked_as_torch_ranks_them(url: str, folder: Path) -> None:
    wanted = judged(folder / "cross", DOCUMENTS)
    status, told = rerank(url, DOCUMENTS)
    assert status == 200, told
    scores = {each["index"]: each["relevance_score"] for each in told["results"]}
    np.testing.assert_allclose([scores[at] for at in range(len(DOCUMENTS))], wanted, atol=1e-5)
    ranked = [each["relevance_score"] for each in told["results"]]
    assert ranked == sorted(ranked, reverse=True)
    assert told["usage"]["total_tokens"] == sum(min(32, 6 + len(each.split())) for each in DOCUMENTS)
    assert told["model"] == "cross"


def test_the_answer_may_be_short_and_hold_the_documents(url: str) -> None:
    status, told = rerank(url, [{"text": each} for each in DOCUMENTS], top_n=3, return_documents=True)
    assert status == 200, told
    assert len(told["results"]) == 3
    assert all(each["document"]["text"] == DOCUMENTS[each["index"]] for each in told["results"])


@pytest.mark.parametrize(
    ("change", "status", "param", "told"),
    [
        ({"model": "nowhere"}, 404, "model", "does not exist"),
        ({"model": "encoder"}, 400, "model", "does not rank texts"),
        ({"model": "single"}, 400, "model", "does not rank texts"),
        ({"model": "cross_network"}, 400, "model", "does not rank texts"),
        ({"documents": ["word1", ""]}, 400, "documents", "documents 1 is empty"),
        ({"documents": ["word1"] * 7 + ["word1 " * 40_000]}, 400, "documents", "documents 7 has 240,000 characters"),
        ({"query": None}, 400, "query", "query is no text"),
        ({"top_n": -1}, 400, "top_n", "above 0"),
        ({"rank_fields": ["a"]}, 400, "rank_fields", "not known here"),
    ],
)
def test_what_is_wrong_is_told(url: str, change: dict[str, Any], status: int, param: str, told: str) -> None:
    got, answer = rerank(url, ["word1"], **change) if "documents" not in change else rerank(url, **change)
    assert got == status, answer
    assert answer["error"]["param"] == param
    assert told in answer["error"]["message"]


def test_keys_and_rates_hold_and_a_list_counts_as_its_batches(triton: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    good = add_key(keys, "good", models=("cross",), rate=1e-6, burst=3)[0]
    other = add_key(keys, "other", models=("encoder",))[0]
    with gateway_thread(Settings(upstream=(triton,), port=0, keys=keys)) as url:
        assert rerank(url, ["word1"])[0] == 401
        assert rerank(url, ["word1"], other)[0] == 403
        assert rerank(url, ["word1"] * (2 * LARGEST + 1), good)[0] == 200
        assert rerank(url, ["word1"], good)[0] == 429


def test_requests_are_counted_by_their_model_and_models_are_listed(url: str) -> None:
    assert rerank(url, ["word1"])[0] == 200
    with urllib.request.urlopen(f"{url}/metrics") as page:
        text = page.read().decode()
    assert 'gateway_requests_total{code="200",model="cross",route="/v1/rerank"}' in text
    assert 'gateway_request_duration_seconds_count{model="cross"}' in text
    status, told = fetch(f"{url}/v1/models")
    assert (status, sorted(each["id"] for each in told["data"])) == (200, ["cross", "encoder"])
