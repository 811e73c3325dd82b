"""/openapi.json follows what is loaded: each model's own values, and an example that works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import settings as of_properties

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.pack.write import pack
from serve.triton.control import load_model, unload_model
from serve.triton.launch import TritonOptions, TritonServer
from tests.gateway_models import fetch
from tests.integration.test_triton import FREE
from tests.serve_http import gateway_thread
from tests.serve_models import hook_file, sum_artifact, text_artifact, tiny_artifact, unbatched_artifact

pytestmark = pytest.mark.integration
MODELS = ["hooked", "sum", "text", "tiny", "unbatched"]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("openapi")
    makers = {"tiny": tiny_artifact, "sum": sum_artifact, "text": text_artifact, "unbatched": unbatched_artifact}
    for name, make in makers.items():
        pack(make(folder / name), repository=folder / "models", name=name)
    pack(folder / "tiny", repository=folder / "models", name="hooked", hooks=hook_file(folder))
    with TritonServer(folder / "models", ports=FREE, options=TritonOptions(explicit=True)) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(triton: TritonServer) -> Iterator[str]:
    upstream = (f"http://{triton.http_address}",)
    with gateway_thread(Settings(upstream=upstream, grpc_upstream=(triton.grpc_address,), port=0)) as url:
        yield url


def schema_of(url: str, **headers: str) -> dict[str, Any]:
    status, schema = fetch(f"{url}/openapi.json", None, **headers)
    assert status == 200
    found: dict[str, Any] = schema
    return found


def models_in(schema: dict[str, Any]) -> list[str]:
    paths = [path.removeprefix("/predict/") for path in schema["paths"] if path.startswith("/predict/")]
    return sorted(path for path in paths if "{" not in path)


def test_each_model_has_a_path_of_its_own_but_no_part_of_one(gateway: str) -> None:
    assert models_in(schema_of(gateway)) == MODELS


@pytest.mark.parametrize("model", MODELS)
def test_the_example_fits_the_schema_and_is_answered_as_the_schema_says(gateway: str, model: str) -> None:
    operation = schema_of(gateway)["paths"][f"/predict/{model}"]["post"]
    body = operation["requestBody"]["content"]["application/json"]
    jsonschema.validate(body["example"], body["schema"])
    status, answer = fetch(
        f"{gateway}/predict/{model}", json.dumps(body["example"]).encode(), content_type="application/json"
    )
    assert status == 200, answer
    jsonschema.validate(answer, operation["responses"]["200"]["content"]["application/json"]["schema"])


@pytest.mark.parametrize("model", MODELS)
def test_so_does_that_of_the_protocols_own_route(gateway: str, model: str) -> None:
    paths = schema_of(gateway)["paths"]
    assert {"/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"} <= paths.keys()
    operation = paths[f"/v2/models/{model}/infer"]["post"]
    body = operation["requestBody"]["content"]["application/json"]
    jsonschema.validate(body["example"], body["schema"])
    body_bytes = json.dumps(body["example"]).encode()
    status, answer = fetch(f"{gateway}/v2/models/{model}/infer", body_bytes, content_type="application/json")
    assert status == 200, answer
    jsonschema.validate(answer, operation["responses"]["200"]["content"]["application/json"]["schema"])


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("tiny", {}),
        ("tiny", {"x": [1, 2, 3]}),
        ("tiny", {"x": [1, 2, 3, "4"]}),
        ("tiny", {"x": [1, 2, 3, 4], "y": 1}),
        ("text", {"words": ["a", "b", "c"]}),
        ("text", {"words": ["a", 1]}),
        ("unbatched", {"x": [[1, 2]]}),
    ],
)
def test_what_the_schema_refuses_the_gateway_refuses(gateway: str, model: str, values: dict[str, Any]) -> None:
    operation = schema_of(gateway)["paths"][f"/predict/{model}"]["post"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, operation["requestBody"]["content"]["application/json"]["schema"])
    status, answer = fetch(f"{gateway}/predict/{model}", json.dumps(values).encode(), content_type="application/json")
    assert status == 422
    assert answer["why"]


@pytest.mark.parametrize(("model", "values"), [("tiny", {"x": [[1, 2, 3, 4]] * 3}), ("sum", {"a": [1], "b": [2]})])
def test_a_batch_and_an_item_both_fit(gateway: str, model: str, values: dict[str, Any]) -> None:
    operation = schema_of(gateway)["paths"][f"/predict/{model}"]["post"]
    jsonschema.validate(values, operation["requestBody"]["content"]["application/json"]["schema"])
    status, answer = fetch(f"{gateway}/predict/{model}", json.dumps(values).encode(), content_type="application/json")
    assert status == 200
    jsonschema.validate(answer, operation["responses"]["200"]["content"]["application/json"]["schema"])


def test_it_follows_what_is_loaded(triton: TritonServer, gateway: str) -> None:
    url = f"http://{triton.http_address}"
    unload_model(url, "sum")
    try:
        assert models_in(schema_of(gateway)) == [name for name in MODELS if name != "sum"]
    finally:
        load_model(url, "sum")
    assert models_in(schema_of(gateway)) == MODELS


def test_with_keys_each_sees_its_own_models(triton: TritonServer, tmp_path: Path) -> None:
    secret, _ = add_key(tmp_path / "keys.json", "k", models=("t*",))
    settings = Settings(upstream=(f"http://{triton.http_address}",), port=0, keys=tmp_path / "keys.json")
    with gateway_thread(settings) as url:
        nobody = schema_of(url)
        assert models_in(nobody) == []
        assert nobody["security"] == [{"key": []}]
        assert models_in(schema_of(url, x_api_key=secret)) == ["text", "tiny"]


def test_requests_made_from_the_schema_are_answered_as_it_says(gateway: str, tmp_path: Path) -> None:
    checks = [
        "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
        "unsupported_method",
    ]  # fmt: skip
    examples = str(of_properties().max_examples // 4)  # fewer in `make test`
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{gateway}/openapi.json", "--checks", ",".join(checks),
        "--phases", "examples,coverage,fuzzing", "--max-examples", examples, "--seed", "1", "--continue-on-failure",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=200, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stdout[-8000:]
