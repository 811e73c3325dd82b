"""What `serve hooks new` writes is served as it is: the example is answered, and bad input is the client's fault."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from compress.artifact import Artifact
from serve.gateway.settings import Settings
from serve.hooks.new import new_hooks
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonServer
from tests.chosen import chosen
from tests.gateway_models import fetch
from tests.serve_http import gateway_thread
from tests.starting_models import KINDS, tokenizer_file

pytestmark = pytest.mark.integration
ONE = PackOptions(instances=1)


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("starting")
    words = tokenizer_file(folder)
    for number in chosen(request, "number"):
        task, make, arguments, _ = KINDS[number]
        artifact = make(folder / f"artifact{number}", *arguments)
        source = Artifact.load(artifact)
        ids_of = any(spec.name == "input_ids" for spec in source.signature.inputs)
        hooks = folder / f"hooks{number}" / "hooks.py"
        new_hooks(task, source, hooks, words if ids_of else None)
        pack(artifact, repository=folder / "models", name=f"m{number}", hooks=hooks, options=ONE)
    with TritonServer(folder / "models", ports=Ports(0, 0, 0), log=folder / "triton.log") as triton:
        settings = Settings(upstream=(f"http://{triton.http_address}",), port=0)
        with gateway_thread(settings) as address:
            yield address


def asked(url: str, model: str, inputs: dict[str, Any]) -> tuple[int, Any]:
    """The answer to values by name, or to the one file that they hold."""
    (first, *_) = inputs.values()
    body, kind = (first, "image/png") if isinstance(first, bytes) else (json.dumps(inputs).encode(), "application/json")
    return fetch(f"{url}/predict/{model}", body, content_type=kind)


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_the_example_is_answered(url: str, number: int) -> None:
    status, example = fetch(f"{url}/v2/models/m{number}/example")
    assert status == 200
    inputs = {
        item["name"]: base64.b64decode(item["base64"]) if "base64" in item else item["data"]
        for item in example["inputs"]
    }
    status, answer = asked(url, f"m{number}", inputs)
    assert status == 200, answer
    if KINDS[number][3]:
        assert set(answer["outputs"]) == set(KINDS[number][3])


BAD: dict[str, dict[str, Any]] = {"image-classification": {"image": b"no image"}, "text": {"text": " "}}


@pytest.mark.parametrize("number", [n for n, kind in enumerate(KINDS) if kind[0] in BAD])
def test_bad_input_is_told_to_its_client(url: str, number: int) -> None:
    status, answer = asked(url, f"m{number}", BAD[KINDS[number][0]])
    assert status == 400
    assert "hooks.py preprocess: ValueError" in json.dumps(answer)
