"""/v1/embeddings in front of a real Triton, asked by OpenAI's own client, which must not know the difference."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.pack.write import PackOptions, pack
from serve.triton.launch import TritonServer
from tests.gateway_models import fetch
from tests.hub_models import bert_folder, hub_artifact, sentence_folder
from tests.integration.test_triton import FREE
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
WIDTH, LARGEST = 32, 8


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("embeddings")
    encoder = hub_artifact(sentence_folder(folder / "encoder"), folder / "encoder-artifact")
    judge = hub_artifact(bert_folder(folder / "classifier"), folder / "classifier-artifact")
    options = PackOptions(instances=1, max_batch_size=LARGEST, dimensions=(4, 16))
    pack(encoder, repository=folder / "models", name="encoder", options=options)
    pack(encoder, repository=folder / "models", name="bare", text=False)
    pack(judge, repository=folder / "models", name="judge")
    with TritonServer(folder / "models", ports=FREE, log=folder / "triton.log") as server:
        yield f"http://{server.http_address}"


@pytest.fixture(scope="module")
def url(triton: str) -> Iterator[str]:
    with gateway_thread(Settings(upstream=(triton,), port=0)) as url:
        yield url


@contextlib.contextmanager
def client_of(url: str, key: str = "unused", retries: int = 0) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


def predicted(url: str, texts: list[str]) -> Any:
    """The same by the gateway's own route."""
    status, answer = fetch(
        f"{url}/predict/encoder", json.dumps({"text": texts}).encode(), content_type="application/json"
    )
    assert status == 200, answer
    return answer["outputs"]


def test_texts_become_embeddings(client: openai.OpenAI, url: str) -> None:
    texts = ["word1 word2", "word3"]
    answer = client.embeddings.create(model="encoder", input=texts)  # base64, unless it is asked for numbers
    outputs = predicted(url, texts)
    np.testing.assert_allclose([each.embedding for each in answer.data], outputs["embeddings"], rtol=1e-6)
    assert [each.index for each in answer.data] == [0, 1]
    assert (answer.object, answer.data[0].object, answer.model) == ("list", "embedding", "encoder")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(outputs["tokens"]) == 7


@pytest.mark.parametrize("form", ["float", "base64"])
def test_one_text_needs_no_list(url: str, form: str) -> None:
    body = json.dumps({"model": "encoder", "input": "word5", "encoding_format": form, "dimensions": WIDTH, "user": "u"})
    status, answer = fetch(f"{url}/v1/embeddings", body.encode(), content_type="application/json")
    assert status == 200, answer
    found = answer["data"][0]["embedding"]
    numbers = np.frombuffer(base64.b64decode(found), "<f4") if form == "base64" else np.array(found, np.float32)
    np.testing.assert_allclose(numbers, predicted(url, ["word5"] * 2)["embeddings"][0], atol=1e-6)


def test_more_texts_than_the_model_takes_at_once_are_one_answer_in_order(client: openai.OpenAI) -> None:
    texts = [f"word{number % 56} word{number % 7}" for number in range(10 * LARGEST + 3)]
    answer = client.embeddings.create(model="encoder", input=texts)
    assert [each.index for each in answer.data] == list(range(len(texts)))
    assert answer.usage.total_tokens == 4 * len(texts)
    for at in (0, LARGEST - 1, LARGEST, len(texts) - 1):
        alone = client.embeddings.create(model="encoder", input=texts[at])
        np.testing.assert_allclose(answer.data[at].embedding, alone.data[0].embedding, atol=1e-5)


def test_texts_of_all_lengths_are_answered_as_each_alone(client: openai.OpenAI) -> None:
    texts = [" ".join(f"word{(number + at) % 56}" for at in range(1 + 37 * number % 400)) for number in range(40)]
    answer = client.embeddings.create(model="encoder", input=texts)
    alone = [client.embeddings.create(model="encoder", input=text) for text in texts]
    np.testing.assert_allclose(
        [each.embedding for each in answer.data], [each.data[0].embedding for each in alone], atol=1e-5
    )
    assert answer.usage.total_tokens == sum(each.usage.total_tokens for each in alone)


def test_a_short_text_is_answered_before_the_later_parts_of_a_long_list(url: str) -> None:
    body = json.dumps({"model": "encoder", "input": ["word1 " * 500] * 2000}).encode()
    with ThreadPoolExecutor(1) as pool:
        listing = pool.submit(fetch, f"{url}/v1/embeddings", body, content_type="application/json")
        while not (parts := in_flight(url)):
            assert not listing.done()
        short = fetch(
            f"{url}/v1/embeddings", b'{"model": "encoder", "input": "word2"}', content_type="application/json"
        )
        done = listing.done()
        assert listing.result()[0] == short[0] == 200
    assert parts
    assert not done


def in_flight(url: str) -> float:
    """Requests, and parts of such, that the model has."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        found = re.search(r'^gateway_model_in_flight\{model="encoder"\} (\S+)', page.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_the_clients_other_forms_work(url: str) -> None:
    async def ask() -> int:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
            many = [client.embeddings.create(model="encoder", input=f"word{number}") for number in range(16)]
            return len({tuple(answer.data[0].embedding) for answer in await asyncio.gather(*many)})

    assert asyncio.run(ask()) == 16


@pytest.mark.parametrize("size", [4, 16])
def test_embeddings_are_cut_to_lengths_that_the_model_allows_and_stay_of_length_one(
    client: openai.OpenAI, size: int
) -> None:
    answers = (
        client.embeddings.create(model="encoder", input=["word5"]),
        client.embeddings.create(model="encoder", input=["word5"], dimensions=size),
    )
    whole, cut = (np.array(each.data[0].embedding) for each in answers)
    np.testing.assert_allclose(cut, whole[:size] / np.linalg.norm(whole[:size]), atol=1e-6)


def test_models_that_give_embeddings_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["encoder"]
    assert client.models.retrieve("encoder").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nowhere")
    assert caught.value.code == "model_not_found"


WRONG: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"model": "nowhere"}, 404, "model", "the model 'nowhere' does not exist"),
    ({"model": "../encoder"}, 404, "model", "does not exist"),
    ({"model": "judge"}, 400, "model", "gives no embeddings of texts"),
    ({"model": "bare"}, 400, "model", "gives no embeddings of texts"),
    ({"model": "encoder_network"}, 400, "model", "gives no embeddings of texts"),
    ({"model": 7}, 400, "model", "no model is named"),
    ({"input": ""}, 400, "input", "input 0 is empty"),
    ({"input": ["word1", " "]}, 400, "input", "input 1 is empty"),
    ({"input": []}, 400, "input", "input is empty"),
    ({"input": [1, 2, 3]}, 400, "input", "holds token ids"),
    ({"input": [[1, 2], [3]]}, 400, "input", "holds token ids"),
    ({"input": ["word1", None]}, 400, "input", "input 1 is no text"),
    ({"input": {"text": "word1"}}, 400, "input", "input 0 is no text"),
    ({"input": ["word1"] * 2049}, 400, "input", "2048 are allowed"),
    ({"input": ["word1"] * 20 + ["word1 " * 40_000]}, 400, "input", "240,000 characters"),
    ({"input": ["word1 " * 20_000, ""]}, 400, "input", "input 1 is empty"),  # read in another process
    ({"dimensions": 8}, 400, "dimensions", "its own have 32, and may be cut to 4, 16"),
    ({"dimensions": True}, 400, "dimensions", "no number above 0"),
    ({"encoding_format": "hex"}, 400, "encoding_format", "neither 'float' nor 'base64'"),
    ({"user": 5}, 400, "user", "user is no text"),
    ({"input_type": "query"}, 400, "input_type", "not known here"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "param", "told"), WRONG)
def test_what_is_wrong_is_told_in_openais_words(
    url: str, change: dict[str, Any], status: int, param: str | None, told: str
) -> None:
    body = {"model": "encoder", "input": "word1"} | change
    got, answer = fetch(f"{url}/v1/embeddings", json.dumps(body).encode(), content_type="application/json")
    assert got == status, answer
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    assert told in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


BODIES = [
    (b"{", "application/json", 400), (b"[1]", "application/json", 400), (b'{"model": "\\ud800"}', "application/json", 400),
    (b'{"model": "encoder", "input": "\xff"}', "application/json", 400), (b"", "text/plain", 415), (b"", "application/json", 400),
]  # fmt: skip


@pytest.mark.parametrize(("body", "media", "status"), BODIES)
def test_a_body_that_cannot_be_read_is_told_in_openais_words(url: str, body: bytes, media: str, status: int) -> None:
    got, answer = fetch(f"{url}/v1/embeddings", body, content_type=media)
    assert got == status, answer
    assert answer["error"].keys() == {"message", "type", "param", "code"}


def test_a_body_over_the_bound_and_a_route_that_is_not_there_are_told_so_too(triton: str) -> None:
    with gateway_thread(Settings(upstream=(triton,), port=0, max_body_bytes=1000)) as url, client_of(url) as client:
        with pytest.raises(openai.APIStatusError, match="too large") as caught:
            client.embeddings.create(model="encoder", input="word1 " * 1000)
        assert caught.value.status_code == 413
        with pytest.raises(openai.NotFoundError, match="there is no POST /v1/chat/completions here"):
            client.chat.completions.create(model="encoder", messages=[])


def test_a_text_that_is_refused_is_counted_from_the_first_of_the_request(client: openai.OpenAI) -> None:
    texts = ["word1"] * (2 * LARGEST)
    texts[LARGEST + 3] = "word1 " * 40_000
    with pytest.raises(openai.BadRequestError, match=rf"input {LARGEST + 3} has 240,000 characters"):
        client.embeddings.create(model="encoder", input=texts)


def test_keys_are_asked_for_and_each_part_is_charged(triton: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    good = add_key(keys, "good", models=("encoder",), rate=1e-6, burst=5)[0]
    other = add_key(keys, "other", models=("judge",))[0]
    with gateway_thread(Settings(upstream=(triton,), port=0, keys=keys)) as url:
        with client_of(url, "sk-guess") as client, pytest.raises(openai.AuthenticationError) as unknown:
            client.embeddings.create(model="encoder", input="word1")
        assert unknown.value.code == "invalid_api_key"
        with client_of(url, other) as client:
            assert list(client.models.list()) == []
            with pytest.raises(openai.PermissionDeniedError, match="may not ask the model 'encoder'"):
                client.embeddings.create(model="encoder", input="word1")
        with client_of(url, good) as client:
            assert [model.id for model in client.models.list()] == ["encoder"]
            client.embeddings.create(model="encoder", input=["word1"] * (2 * LARGEST + 1))
            client.embeddings.create(model="encoder", input="word1")
            with pytest.raises(openai.RateLimitError) as caught:
                client.embeddings.create(model="encoder", input=["word1"] * (LARGEST + 1))
            with pytest.raises(openai.RateLimitError):
                client.embeddings.create(model="encoder", input="word1")
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) > 0


def test_what_a_key_could_never_send_at_once_is_told_not_put_off(triton: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    slow = add_key(keys, "slow", models=("encoder",), rate=100, burst=2)[0]
    with (
        gateway_thread(Settings(upstream=(triton,), port=0, keys=keys)) as url,
        client_of(url, slow) as client,
        pytest.raises(openai.BadRequestError, match="3 requests of 8 texts, and the key may send 2 at once"),
    ):
        client.embeddings.create(model="encoder", input=["word1"] * (2 * LARGEST + 1))


def test_requests_are_counted_by_their_model(client: openai.OpenAI, url: str) -> None:
    client.embeddings.create(model="encoder", input="word1")
    with urllib.request.urlopen(f"{url}/metrics") as page:
        text = page.read().decode()
    assert 'gateway_requests_total{code="200",model="encoder",route="/v1/embeddings"}' in text
    assert 'gateway_request_duration_seconds_count{model="encoder"}' in text


def test_the_schema_of_the_api_has_the_route(url: str) -> None:
    status, schema = fetch(f"{url}/openapi.json")
    assert status == 200
    operation = schema["paths"]["/v1/embeddings"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["required"] == ["model", "input"]
    assert "/v1/models" in schema["paths"]
