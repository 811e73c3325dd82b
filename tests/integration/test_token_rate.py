"""A key's rate in tokens, asked by OpenAI's own client, in front of a real Triton whose model counts them."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.pack.write import PackOptions, pack
from serve.triton.launch import TritonServer
from tests.gateway_models import fetch
from tests.hub_models import bert_folder, hub_artifact, sentence_folder
from tests.integration.test_embeddings import client_of
from tests.integration.test_triton import FREE
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
A_MINUTE = 600
TEXT, TOKENS = "word1 word2", 4
DEAR, OF_DEAR = "a b c d e f", 8  # more than is estimated


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tokens")
    options = PackOptions(instances=1, max_batch_size=8)
    encoder = hub_artifact(sentence_folder(folder / "encoder"), folder / "encoder-artifact")
    pack(encoder, repository=folder / "models", name="encoder", options=options)
    cross = hub_artifact(bert_folder(folder / "cross", labels=("relevance",)), folder / "artifact")
    pack(cross, repository=folder / "models", name="cross", options=options, text_pair=True)
    with TritonServer(folder / "models", ports=FREE, log=folder / "triton.log") as server:
        yield f"http://{server.http_address}"


class Served:
    """A gateway with a key of so many tokens a minute, "alice", and one that may see metrics."""

    def __init__(self, url: str, key: str, metrics: str) -> None:
        self.url, self.key, self._metrics = url, key, metrics

    def counted(self, name: str) -> int:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"x-api-key": self._metrics})
        with urllib.request.urlopen(request) as answer:
            found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        return 0 if found is None else int(float(found[1]))


@pytest.fixture
def served(triton: str, tmp_path: Path) -> Iterator[Served]:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "alice", tokens_per_minute=A_MINUTE)[0]
    metrics = add_key(keys, "prometheus", metrics=True)[0]
    with gateway_thread(Settings(upstream=(triton,), port=0, keys=keys)) as url:
        yield Served(url, key, metrics)


def limits(headers: Any) -> tuple[int, int, str]:
    words = ("limit", "remaining", "reset")
    limit, remaining, reset = (headers[f"x-ratelimit-{word}-tokens"] for word in words)
    return int(limit), int(remaining), reset


def test_answers_tell_what_is_left_as_openais_do(served: Served) -> None:
    with client_of(served.url, served.key) as client:
        raw = client.embeddings.with_raw_response.create(model="encoder", input=[TEXT] * 25)
        answer = raw.parse()
        assert answer.usage.total_tokens == 25 * TOKENS
        limit, remaining, reset = limits(raw.headers)
        assert limit == A_MINUTE
        left = A_MINUTE - 25 * TOKENS
        assert left <= remaining <= left + 20
        assert re.fullmatch(r"(\d+m)?\d+(\.\d+)?s", reset)
    assert served.counted(r'gateway_key_tokens_total\{key="alice"\}') == 25 * TOKENS
    assert served.counted(r'gateway_model_tokens_total\{model="encoder"\}') == 25 * TOKENS


def test_whoever_is_over_it_is_refused_with_the_time_to_wait_which_openais_client_waits(served: Served) -> None:
    with client_of(served.url, served.key) as client:
        client.embeddings.create(model="encoder", input=[TEXT] * 100)
        with pytest.raises(openai.RateLimitError) as caught:
            client.embeddings.create(model="encoder", input=[TEXT] * 60)
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert "tokens" in caught.value.message
    headers = caught.value.response.headers
    assert limits(headers)[0] == A_MINUTE
    wait = int(headers["retry-after"])
    assert 1 <= wait <= 20
    with client_of(served.url, served.key, retries=2) as client:
        began = time.monotonic()
        answer = client.embeddings.create(model="encoder", input=[TEXT] * 60)
        assert answer.usage.total_tokens == 60 * TOKENS
        assert time.monotonic() - began > 1


def test_many_at_a_time_are_read_no_more_than_the_rate_allows(served: Served) -> None:
    """Of texts that come to more than is estimated at first, what goes in the first moment is read, and owed."""
    began = time.monotonic()

    def ask(_: int) -> int:
        read = 0
        with client_of(served.url, served.key) as client:
            while time.monotonic() - began < 5:
                try:
                    read += client.embeddings.create(model="encoder", input=[DEAR] * 8).usage.total_tokens
                except openai.RateLimitError:
                    time.sleep(0.05)
        return read

    with ThreadPoolExecutor(16) as pool:
        read = sum(pool.map(ask, range(16)))
    seconds = time.monotonic() - began
    owed = 8 * 16 * (OF_DEAR - 5)  # at most: one request of each client, before the first was answered
    assert 0.8 * A_MINUTE <= read <= A_MINUTE * (1 + seconds / 60) + owed
    assert read == served.counted(r'gateway_key_tokens_total\{key="alice"\}')


def test_a_request_that_can_never_go_is_told_so(served: Served) -> None:
    with client_of(served.url, served.key) as client, pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="encoder", input=[TEXT] * 200)
    assert caught.value.param == "input"
    assert "600 a minute" in caught.value.message


def test_what_is_refused_before_the_model_has_it_costs_nothing(served: Served) -> None:
    with client_of(served.url, served.key) as client:
        for _ in range(20):
            with pytest.raises(openai.BadRequestError):
                client.embeddings.create(model="encoder", input=[TEXT] * 100, dimensions=7)
        assert client.embeddings.create(model="encoder", input=[TEXT] * 100).usage.total_tokens == 100 * TOKENS


def test_rerank_counts_each_pair_of_the_same_rate(served: Served) -> None:
    body = json.dumps({"model": "cross", "query": TEXT, "documents": [TEXT] * 20}).encode()
    headers = {"authorization": f"Bearer {served.key}", "content_type": "application/json"}
    status, told = fetch(f"{served.url}/v1/rerank", body, **headers)
    assert (status, told["usage"]["total_tokens"]) == (200, 20 * 7)
    with client_of(served.url, served.key) as client:
        raw = client.embeddings.with_raw_response.create(model="encoder", input=TEXT)
        assert limits(raw.headers)[1] <= A_MINUTE - 20 * 7 - TOKENS + 20


def test_predict_counts_the_texts_of_such_a_model_too(served: Served) -> None:
    body, headers = (
        json.dumps({"text": [TEXT] * 8}).encode(),
        {"x-api-key": served.key, "content-type": "application/json"},
    )
    request = urllib.request.Request(f"{served.url}/predict/encoder", body, headers)
    for number in range(1, 3):
        with urllib.request.urlopen(request) as answer:
            assert sum(json.loads(answer.read())["outputs"]["tokens"]) == 8 * TOKENS
            assert A_MINUTE - 8 * number * TOKENS <= limits(answer.headers)[1] <= A_MINUTE - 8 * number * TOKENS + 40
    assert served.counted(r'gateway_key_tokens_total\{key="alice"\}') == 16 * TOKENS
    with client_of(served.url, served.key) as client:
        client.embeddings.create(model="encoder", input=[TEXT] * 110)
    for _ in range(20):
        headers = {"x_api_key": served.key, "content_type": "application/json"}
        status, told = fetch(f"{served.url}/predict/encoder", body, **headers)
        if status != 200:
            break
    assert status == 429, told
    assert "tokens" in told["error"]


def test_a_key_without_such_a_rate_is_told_none(triton: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "bob")[0]
    with gateway_thread(Settings(upstream=(triton,), port=0, keys=keys)) as url, client_of(url, key) as client:
        raw = client.embeddings.with_raw_response.create(model="encoder", input=TEXT)
    assert not [name for name in raw.headers if name.startswith("x-ratelimit")]
