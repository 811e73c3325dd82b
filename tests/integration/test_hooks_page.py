"""The examples of docs/hooks.md on a real Triton: each answers a request with its example() as the page says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serve.pack.write import PackOptions, pack
from serve.triton.launch import TritonServer
from tests.gateway_models import fetch
from tests.hooks_page import EXAMPLES, written
from tests.integration.test_gateway_events import events, stream
from tests.integration.test_gateway_memory import Gateway, gateway
from tests.integration.test_triton import FREE
from tests.serve_models import tiny_artifact

pytestmark = pytest.mark.integration
NAMES = [f"page{number}" for number in range(len(EXAMPLES))]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("page")
    artifact = tiny_artifact(folder / "tiny")
    for name, example in zip(NAMES, EXAMPLES, strict=True):
        pack(artifact, repository=folder / "models", name=name, hooks=written(example, folder / name),
             options=PackOptions(instances=1, pipeline="bls"))  # fmt: skip
    with TritonServer(folder / "models", ports=FREE, log=folder / "triton.log") as triton, gateway(triton) as found:
        yield found


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_is_answered_as_the_page_says(served: Gateway, number: int) -> None:
    values: dict[str, Any] = {}
    module = EXAMPLES[number].code.partition("def example")[2]
    exec(f"def example{module}", values)  # noqa: S102 - the page's own
    wanted, body = EXAMPLES[number].answer, json.dumps(values["example"]()).encode()
    if isinstance(wanted, list):
        answer = stream(served, values["example"](), f"/predict/{NAMES[number]}/stream")
        assert [(kind, told["outputs"]) for kind, told in events(answer)] == [("message", each) for each in wanted]
        return
    status, told = fetch(f"{served.url}/predict/{NAMES[number]}", body, content_type="application/json")
    assert (status, told["outputs"]) == (200, wanted)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [(NAMES[0], "1,2", "four numbers are wanted, and 2 came"), (NAMES[4], "1" * 1001, "are over 1,000 letters")],
)
def test_a_value_error_is_told_to_the_client(served: Gateway, name: str, text: str, told: str) -> None:
    status, answer = fetch(f"{served.url}/predict/{name}", json.dumps({"text": text}).encode(),
                           content_type="application/json")  # fmt: skip
    assert status == 400
    assert told in json.dumps(answer)
