"""What is told where Triton's model control is asked for in vain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compress.errors import ServerError
from serve.gateway.settings import Settings
from serve.triton.control import _refused, list_models
from tests.load_servers import at_once, served
from tests.serve_http import gateway_thread


def test_who_asks_a_gateway_is_told_to_ask_triton_itself() -> None:
    with (
        served(at_once) as triton,
        gateway_thread(Settings(upstream=(triton.url,), port=0)) as url,
        pytest.raises(ServerError) as caught,
    ):
        list_models(url)
    assert "through a gateway" in caught.value.what
    assert "needs a key with admin" in caught.value.why
    assert caught.value.mend == "give --url of Triton itself, not of the gateway"


@pytest.mark.parametrize(
    ("said", "mend"),
    [
        ({"error": "this is not in explicit mode"}, "start it with `serve up --model-control`"),
        ({"error": "failed to load 'm'"}, "see `serve lint` of its repository"),
    ],
)
def test_what_triton_itself_refuses_is_told_as_before(said: dict[str, Any], mend: str) -> None:
    found = _refused("/v2/repository/models/m/load", 400, json.dumps(said))
    assert (found.why, found.mend) == (said["error"], mend)
