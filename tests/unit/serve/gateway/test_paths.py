"""Every spelling of every route: what a key may not see by its plain path, it may not see by any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.errors import ServerError
from serve.gateway.access.keys import add_key
from serve.gateway.access.path import take_path
from serve.gateway.app import create_app
from serve.gateway.errors import UnknownModelError
from serve.gateway.settings import Settings
from serve.http.client import Address, ExchangeError
from tests.serve_http import gateway, in_loop, scripted_server
from tests.unit.serve.gateway.test_upstream import ask, echo

SPELLINGS = (
    "{}%0a", "{}%0A", "{}%0d", "{}%00", "{}%20", "{}%09", "{}%7f", "{}%ff", "{}%c2%a0", "{}%e2%80%a8", "{}%85", "{}%",
    "{}%2", "{}%zz", "{}%2f", "{}%2F", "{}%252f", "{}%5c", "{}//", "/{}", "{}/.", "{}/..", "{}/../shop", "{}/%2e",
    "{}/%2e%2e/shop", "/x/..{}", "{};a=b", "{}%3bx", "{}%23", "{}%3f", "{}%26",
)  # fmt: skip
INSIDE = ("%2e%2e/", "../", "./", "/", "%2f", "%0a", "%00")


def flat(routes: Iterable[Any]) -> Iterator[Any]:
    """The routes, those of included routers, too."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        yield from (route,) if inner is None else flat(inner.routes)


def routes() -> list[str]:
    """Every path that the application has, for a model that the plain key may not ask."""
    app = create_app(Settings(upstream=("http://127.0.0.1:1",)))
    found = {str(getattr(route, "path", "")) for route in flat(app.routes)}
    assert "/v2/models/{model}/config" in found
    extra = {"/v2/repository/index", "/v2/logging", "/v2/models/other/infer", "/v2/systemsharedmemory/status"}
    values = {"{model}": "other", "{version}": "1", "{path:path}": "trace/setting", "{name}": "other"}
    for name, value in values.items():
        found = {path.replace(name, value) for path in found}
    return sorted(path for path in found | extra if path and "{" not in path)


def spelled(path: str) -> list[str]:
    ends = [spelling.format(path) for spelling in SPELLINGS]
    slashes = [at for at, letter in enumerate(path) if letter == "/" and at]
    return ends + [path[: at + 1] + odd + path[at + 1 :] for at in slashes for odd in INSIDE]


@in_loop
async def test_no_spelling_of_a_route_opens_it(tmp_path: Path) -> None:
    keys = {
        "nobody": b"",
        "shop": add_key(tmp_path / "keys.json", "shop", models=("shop",))[0].encode(),
        "metrics": add_key(tmp_path / "keys.json", "metrics", models=("shop",), metrics=True)[0].encode(),
    }
    async with (
        scripted_server(echo) as triton,
        gateway(Settings(upstream=(triton.url,), port=0, keys=tmp_path / "keys.json")) as address,
    ):
        for name, key in keys.items():
            headers = ((b"authorization", b"Bearer " + key),) if key else ()
            for path in routes():
                plain = await status(address, path, headers)
                triton.requests.clear()
                for other in spelled(path):
                    got = await status(address, other, headers)
                    assert got in (400, 401, 403, 404) or (got == plain == 200 and not triton.requests), (
                        name, other, plain, got,
                    )  # fmt: skip
                    assert not [r for r in triton.requests if "other" in r.target], (name, other)


async def status(address: Address, path: str, headers: tuple[tuple[bytes, bytes], ...]) -> int:
    """0 where the gateway closes the connection, or the path can't even be sent."""
    for body in (None, b"{}") if path.endswith("infer") else (None,):
        try:
            answer = await ask(address, path.encode(), body, *headers)
        except (ExchangeError, ServerError, ValueError):
            return 404
    return answer.status


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b"/", "/"),
        (b"/v2", "/v2"),
        (b"/v2/", "/v2"),
        (b"/v2/models/a%2Db/config", "/v2/models/a-b/config"),
        (b"/v2/models/a%3Ab%40c%2Bd%3De~/ready", "/v2/models/a:b@c+d=e~/ready"),
        (b"/v2/models/...", "/v2/models/..."),
    ],
)
def test_a_path_is_taken_in_one_spelling(raw: bytes, path: str) -> None:
    scope = {"raw_path": raw, "path": "another"}
    assert take_path(scope) == path
    assert (scope["path"], scope["raw_path"]) == (path, path.encode())


@pytest.mark.parametrize("raw", [b"", b"*", b"v2", b"/v2\n", b"//", b"/v2//x", b"/\xff", b"/v2/" + b"a" * 257, b"/a b"])
def test_other_paths_are_refused(raw: bytes) -> None:
    with pytest.raises(UnknownModelError, match="not one that is served"):
        take_path({"raw_path": raw})
