"""/predict in front of a real Triton: files and plain values in, plain values or a clear refusal out."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from compress.errors import ServerError
from serve.gateway.settings import Settings
from serve.http.ask import infer_file
from tests.gateway_models import fetch, triton_with_models
from tests.serve_http import gateway_thread
from tests.serve_models import WEIGHT


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with triton_with_models(tmp_path_factory.mktemp("gateway")) as address:
        yield address


@pytest.fixture(scope="module")
def gateway(triton: str) -> Iterator[str]:
    """host:port of a gateway to it."""
    with gateway_thread(Settings(upstream=(f"http://{triton}",), port=0, max_body_bytes=4_000_000)) as url:
        yield url.removeprefix("http://")


def test_predict_values(gateway: str) -> None:
    url = f"http://{gateway}/predict/tiny"
    x = [1.0, 2.0, 3.0, 4.0]
    want = (np.array(x, np.float32) @ WEIGHT).tolist()
    for value, logits in ((x, want), ([x, x], [want, want])):
        status, answer = fetch(url, json.dumps({"x": value}).encode(), content_type="application/json")
        assert (status, answer) == (200, {"model": "tiny", "version": "1", "outputs": {"logits": logits}})


def test_predict_text(gateway: str) -> None:
    for text in (["0,2,1,0"], "0,2,1,0"):
        body = json.dumps({"text": text}).encode()
        status, answer = fetch(f"http://{gateway}/predict/hooked", body, content_type="application/json; charset=utf-8")
        assert (status, answer["outputs"]) == (200, {"label": "b", "score": 2.0})


def test_predict_a_file(gateway: str, tmp_path: Path) -> None:
    url = f"http://{gateway}/predict/files"
    form = (
        b'--edge\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n'
        b'--edge\r\nContent-Disposition: form-data; name="any"; filename="a.png"\r\n\r\n\x89PNG\r\n\0\r\n--edge--\r\n'
    )
    for body, media in (
        (b"\x89PNG\r\n\0", "image/png"),
        (b"\x89PNG\r\n\0", "application/octet-stream"),
        (form, "multipart/form-data; boundary=edge"),
    ):
        status, answer = fetch(url, body, content_type=media)
        assert (status, answer["outputs"]) == (200, {"head": {"base64": "iVBORw=="}, "bytes": 7})

    big = tmp_path / "big.jpg"
    big.write_bytes(b"text" * 500_000)
    assert infer_file(f"http://{gateway}", "files", big)["outputs"] == {"head": "text", "bytes": 2_000_000}
    big.write_bytes(b"text" * 1_100_000)
    with pytest.raises(ServerError, match="too large"):
        infer_file(f"http://{gateway}", "files", big)
    small = tmp_path / "small.png"
    small.write_bytes(b"x")
    with pytest.raises(ServerError, match="takes no file"):
        infer_file(f"http://{gateway}", "tiny", small)


def test_triton_s_own_port_is_told_from_a_gateway(triton: str, tmp_path: Path) -> None:
    file = tmp_path / "small.png"
    file.write_bytes(b"x")
    with pytest.raises(ServerError) as caught:
        infer_file(f"http://{triton.removeprefix('http://')}", "files", file)
    assert caught.value.why == "that is Triton's own port, where no files are taken"
    assert "--url" in caught.value.mend


@pytest.mark.parametrize(
    ("model", "media", "body", "status", "says"),
    [
        ("other", "image/png", b"", 404, "Request for unknown model: 'other' is not found"),
        ("..", "image/png", b"", 404, None),
        ("tiny", "text/csv", b"1,2", 415, "text/csv came"),
        ("tiny", "image/png", b"1,2", 415, "this one takes x:FP32[-1,4]"),
        ("tiny", "application/json", b"{", 400, None),
        ("tiny", "application/json", b"[1]", 400, "an object was expected, list came"),
        ("tiny", "application/json", b'{"y": 1}', 422, "'x' is missing, 'y' is none of them"),
        ("tiny", "application/json", b'{"x": [1, 2]}', 422, "this has [2]"),
        ("files", "multipart/form-data; boundary=edge", b"--edge--\r\n", 400, None),
        ("files", "multipart/form-data", b"x", 400, None),
        ("files", "image/png", b"fail", 500, "this file is not to be read"),
    ],
)
def test_predict_tells_what_is_wrong(
    gateway: str, model: str, media: str, body: bytes, status: int, says: str | None
) -> None:
    got, answer = fetch(f"http://{gateway}/predict/{model}", body, content_type=media)
    assert got == status
    assert answer["error"]
    assert says is None or says in answer["why"]


def test_a_batch_over_the_bound_is_tritons_refusal(gateway: str) -> None:
    body = json.dumps({"file": [["a"]] * 5}).encode()
    status, answer = fetch(f"http://{gateway}/predict/files", body, content_type="application/json")
    assert status == 400
    assert "batch-size must be <= 4" in answer["why"]


def test_a_client_that_leaves_is_counted_and_frees_its_place(triton: str) -> None:
    with gateway_thread(Settings(upstream=(f"http://{triton}",), port=0, max_connections=1)) as url:
        host = url.removeprefix("http://")
        leaver = http.client.HTTPConnection(host)
        leaver.request("POST", "/predict/files", b"sleep", {"Content-Type": "image/png"})
        time.sleep(0.5)
        leaver.close()
        assert fetch(f"{url}/predict/files", b"next", content_type="image/png")[0] == 200
        with urllib.request.urlopen(f"{url}/metrics") as page:
            text = page.read().decode()
        assert 'gateway_requests_total{code="499",model="unknown",route="/predict/{model}"} 1.0' in text
