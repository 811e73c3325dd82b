"""A body that its client calls a form, as `curl -d` calls any: Triton 24.10 would read it on its stack, and die."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway_models import fetch
from tests.integration.test_up import FREE, Up, up

ROOT = Path(__file__).parents[2]
FORM = "application/x-www-form-urlencoded"
LARGE = bytes(12 << 20)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("forms"), str(ROOT / "model_repository"), *FREE) as found:
        yield found


@pytest.mark.parametrize("binary", [True, False])
def test_a_large_body_that_is_called_a_form_harms_nobody(running: Up, binary: bool) -> None:
    tensor = {"name": "image", "shape": [1, 1], "datatype": "BYTES"}
    if binary:
        data = len(LARGE).to_bytes(4, "little") + LARGE
        head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": len(data)}}]}).encode()
        body, length = head + data, {"inference-header-content-length": str(len(head))}
    else:
        body, length = json.dumps({"inputs": [tensor | {"data": [base64.b64encode(LARGE).decode()]}]}).encode(), {}
    code, said = fetch(f"{running.url()}/v2/models/digits/infer", body, content_type=FORM, **length)[:2]
    assert code == 400
    assert "neither a PNG nor a JPEG" in str(said)
    assert "has died" not in running.said
