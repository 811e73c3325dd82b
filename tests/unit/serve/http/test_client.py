"""`serve infer`'s way to a gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from compress.errors import ServerError
from serve.http.ask import infer_file
from tests.serve_http import Received, answer, scripted_server


def ask(path: Path, *, response: bytes, model: str = "m") -> tuple[dict[str, Any] | ServerError, list[Received]]:
    async def respond(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(response)
        writer.close()

    async def main() -> tuple[dict[str, Any] | ServerError, list[Received]]:
        async with scripted_server(respond) as server:
            try:
                return await asyncio.to_thread(infer_file, server.url, model, path), server.requests
            except ServerError as err:
                return err, server.requests

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "media"),
    [
        ("a.png", "image/png"),
        ("a.jpg", "image/jpeg"),
        ("a.json", "application/json"),
        ("a.txt", "application/octet-stream"),
        ("a", "application/octet-stream"),
    ],
)
def test_a_files_name_gives_the_content_type(name: str, media: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"content")
    got, (request,) = ask(tmp_path / name, response=answer(b'{"outputs": {"y": 1}}'), model="a b")
    assert got == {"outputs": {"y": 1}}
    assert (request.target, request.headers["content-type"], request.body) == ("/predict/a%20b", media, b"content")


def test_errors_in_three_parts(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"")
    body = b'{"error": "the value does not fit", "why": "it is too long", "mend": "cut it"}'
    got, _ = ask(file, response=answer(body, "422 Unprocessable Content"))
    assert isinstance(got, ServerError)
    assert (got.what, got.why, got.mend) == ("the value does not fit", "it is too long", "cut it")
    for odd in (answer(b"<html>", "500 Oh"), answer(b"<html>"), answer(b"[]"), b"rubbish"):
        got, _ = ask(file, response=odd)
        assert isinstance(got, ServerError)
        assert got.what
        assert got.why
        assert got.mend
    with pytest.raises(ServerError, match="can't read"):
        infer_file("http://127.0.0.1:9", "m", tmp_path / "none")
    with pytest.raises(ServerError, match="http://"):
        infer_file("127.0.0.1:9", "m", file)
