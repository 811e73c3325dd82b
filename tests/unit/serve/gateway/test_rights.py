"""Who may do what: every route, every kind of key, every spelling, held against one table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest

from serve.gateway.access import identity
from serve.gateway.access.keys import add_key, revoke_key
from serve.gateway.app import create_app
from serve.gateway.settings import Settings
from serve.http.client import Address
from tests.serve_http import Scripted, gateway, in_loop, scripted_server
from tests.unit.serve.gateway.test_paths import flat, spelled
from tests.unit.serve.gateway.test_upstream import echo

# What a key may: nothing at all (its requests get 401), what is for everybody with a key, one model, metrics, or all.
KEYS = {
    "none": set(),
    "unknown": set(),
    "expired": set(),
    "revoked": set(),
    "other": {"known"},
    "reader": {"known", "metrics"},
    "plain": {"known", "model"},
    "critic": {"known", "feedback"},
    "admin": {"known", "model", "metrics", "feedback", "admin"},
}
FREE = "free"
# The one table: who may do it, by method and path. A route that is not in it fails the test.
TABLE = {
    "GET /": FREE, "GET /ui/page.js": FREE, "GET /ui/plot.js": FREE, "GET /ui/docs.js": FREE, "GET /ui/page.css": FREE,
    "GET /docs": FREE, "GET /docs/swagger-ui-bundle.js": FREE, "GET /docs/swagger-ui.css": FREE,
    "GET /docs/favicon.png": FREE, "GET /openapi.json": FREE, "GET /healthz": FREE, "GET /readyz": FREE,
    "GET /v2/health/live": FREE, "GET /v2/health/ready": FREE,
    "GET /v2": "known", "GET /ui/models": "known", "GET /ui/memory": "known", "GET /ui/history": "known", "GET /rollouts": "known",
    "POST /rollouts/m/abort": "admin", "POST /feedback": "feedback", "GET /metrics": "metrics", "GET /v2/models/stats": "admin",
    **{
        f"GET /v2/models/m{version}{part}": "model"
        for version in ("", "/versions/1") for part in ("", "/ready", "/config", "/stats", "/example")
    },
    "POST /v2/models/m/infer": "model", "POST /v2/models/m/versions/1/infer": "model", "POST /predict/m": "model",
    "POST /predict/m/stream": "model", "POST /v2/models/m/generate_stream": "model",
    "POST /v2/models/m/versions/1/generate_stream": "model",
    "POST /v1/embeddings": "known", "POST /v1/rerank": "known", "GET /v1/models": "known", "GET /v1/models/m": "model",
    "POST /v2/repository/index": "admin", "POST /v2/repository/models/m/load": "admin",
    "POST /v2/repository/models/m/unload": "admin", "GET /v2/logging": "admin", "POST /v2/logging": "admin",
    "GET /v2/trace/setting": "admin", "POST /v2/trace/setting": "admin",
    "GET /v2/systemsharedmemory/status": "admin", "GET /v2/systemsharedmemory/region/r/status": "admin",
    "POST /v2/systemsharedmemory/region/r/register": "admin", "POST /v2/systemsharedmemory/unregister": "admin",
    "GET /v2/cudasharedmemory/status": "admin", "POST /v2/cudasharedmemory/region/r/register": "admin",
    "POST /v2/cudasharedmemory/unregister": "admin",
}  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "MODELS")
REFUSED = (400, 401, 403, 404, 405, 408, 501)


@dataclass
class Answer:
    """What came back: the status (0 for a connection that ended), and the bytes."""

    status: int
    body: bytes = b""


@dataclass
class Tried:
    """A gateway, the Triton behind it, and the keys by their kind."""

    address: Address
    triton: Scripted
    secrets: dict[str, str]
    asked: list[str] = field(default_factory=list)

    async def raw(self, request: bytes) -> Answer:
        """Send bytes, and read until the gateway closes, or an answer is there."""
        self.triton.requests.clear()
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port)
        try:
            writer.write(request)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            length = re.search(rb"content-length: (\d+)", head)
            body = b""
            if length and not request.startswith(b"HEAD "):
                body = await asyncio.wait_for(reader.readexactly(int(length[1])), 30)
            return Answer(int(head.split(b" ", 2)[1]), body)
        except (asyncio.IncompleteReadError, ConnectionError):
            return Answer(0)
        finally:
            writer.close()

    async def ask(
        self, method: str, target: str, kind: str, *lines: str, version: str = "1.1", body: str = ""
    ) -> Answer:
        """One request with a key of this kind."""
        key = [f"authorization: Bearer {self.secrets[kind]}"] if self.secrets[kind] else []
        if body == "" and method != "TRACE" and not any("transfer-encoding" in line.lower() for line in lines):
            body = "{}" if method == "POST" else ""
            lines = (*lines, f"content-length: {len(body)}")
        host = [] if any(line.lower().startswith("host:") for line in lines) else ["host: x"]
        head = "\r\n".join([f"{method} {target} HTTP/{version}", *host, *key, *lines])
        return await self.raw(f"{head}\r\n\r\n{body}".encode())

    def reached(self) -> list[str]:
        """What Triton was asked, but for what the gateway asks by itself."""
        return [f"{request.method} {request.target}" for request in self.triton.requests]


@asynccontextmanager
async def tried(folder: Path) -> AsyncIterator[Tried]:
    keys = folder / "keys.json"
    secrets = {
        "none": "",
        "unknown": "sk-00000000-guessed",
        "expired": add_key(keys, "expired", admin=True, expires="2020-01-01T00:00:00+00:00")[0],
        "revoked": add_key(keys, "revoked", admin=True)[0],
        "other": add_key(keys, "other", models=("other",))[0],
        "reader": add_key(keys, "reader", models=("other",), metrics=True)[0],
        "plain": add_key(keys, "plain", models=("m",))[0],
        "critic": add_key(keys, "critic", models=("other",), feedback=True)[0],
        "admin": add_key(keys, "admin", admin=True)[0],
    }
    revoke_key(keys, "revoked")
    async with (
        scripted_server(echo) as triton,
        gateway(Settings(upstream=(triton.url,), port=0, keys=keys)) as address,
    ):
        yield Tried(address, triton, secrets)


@pytest.fixture(autouse=True)
def _no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "QUESTIONS_AT_ONCE", 10**9)


def may(needs: str, kind: str) -> bool:
    return needs == FREE or needs in KEYS[kind]


def expected(needs: str, kind: str) -> set[int]:
    """The statuses of a request that is refused."""
    return {403} if KEYS[kind] else {401}


def test_the_table_has_every_route() -> None:
    app = create_app(Settings(upstream=("http://127.0.0.1:1",)))
    found = set()
    for route in flat(app.routes):
        path = str(getattr(route, "path", ""))
        for name, value in {"{model}": "m", "{version}": "1"}.items():
            path = path.replace(name, value)
        found |= {f"{method} {path}" for method in getattr(route, "methods", None) or () if method != "HEAD"}
    catch_all = {"GET /v2/{path:path}", "POST /v2/{path:path}"}
    assert catch_all <= found
    assert found - catch_all <= TABLE.keys()


@in_loop
async def test_each_key_may_do_what_the_table_says_and_nothing_else(tmp_path: Path) -> None:
    async with tried(tmp_path) as gate:
        for (line, needs), kind in product(TABLE.items(), KEYS):
            method, path = line.split(" ")
            got = await gate.ask(method, path, kind)
            if may(needs, kind):
                assert got.status not in (0, 401, 403, 404, 405), (line, kind, got)
            else:
                assert got.status in expected(needs, kind), (line, kind, got)
                assert not gate.reached(), (line, kind)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", '{"model": "m", "input": "a text"}'),
        ("/v1/rerank", '{"model": "m", "query": "a text", "documents": ["another"]}'),
    ],
)
@in_loop
async def test_a_model_that_a_body_names_is_asked_by_those_who_may(tmp_path: Path, path: str, body: str) -> None:
    async with tried(tmp_path) as gate:
        for kind in KEYS:
            got = await gate.ask(
                "POST",
                path,
                kind,
                "content-type: application/json",
                f"content-length: {len(body)}",
                body=body,
            )
            if may("model", kind):
                assert gate.reached(), (kind, got)
            else:
                assert got.status in expected("model", kind), (kind, got)
                assert b'"message":' in got.body
                assert not gate.reached(), kind


@in_loop
async def test_no_other_method_opens_a_route(tmp_path: Path) -> None:
    async with tried(tmp_path) as gate:
        paths = sorted({line.split(" ")[1] for line in TABLE})
        for method, path, kind in product(METHODS, paths, ("none", "other", "plain")):
            if f"{method} {path}" in TABLE:
                continue
            got = await gate.ask(method, path, kind)
            needs = TABLE.get(f"GET {path}") or TABLE[f"POST {path}"]
            allowed = method == "HEAD" and f"GET {path}" in TABLE and may(needs, kind)
            assert got.status in (0, *REFUSED) or allowed, (method, path, kind, got)
            assert not gate.reached() or allowed, (method, path, kind)


@in_loop
async def test_no_spelling_of_a_request_opens_a_route(tmp_path: Path) -> None:
    """What is sent beside the path: whose word for the path, the key or the length is taken?"""
    async with tried(tmp_path) as gate:
        own = gate.secrets["other"]
        admin_guess = "authorization: Bearer sk-guess"
        for line, needs in TABLE.items():
            if may(needs, "other"):
                continue
            method, path = line.split(" ")
            requests = [
                (method, f"http://x{path}", ()),
                (method, f"http://admin:admin@x{path}", ()),
                (method, f"https://x:1/v2{path}", ()),
                (method, f"{path}?x=1", ()),
                (method, f"{path}?/v2/models/other", ()),
                (method, f"/v2/models/other?{path}", ("x-original-url: " + path,)),
                (method, path, ("x-original-url: /v2/models/other", "x-rewrite-url: /v2/models/other")),
                (method, path, ("x-forwarded-for: 127.0.0.1", "x-real-ip: 127.0.0.1", "forwarded: for=127.0.0.1")),
                (method, path, ("host: 127.0.0.1", "x-forwarded-host: localhost")),
                (method, path, ("x-http-method-override: GET", "x-method-override: GET")),
                (method, path, ("connection: authorization",)),
                (method, path, ("connection: x-api-key, close", "x-api-key: " + own)),
                (method, path, (admin_guess,)),
                (method, path, ("AUTHORIZATION: Bearer " + own,)),
                (method, path, ("X-API-Key: " + own, "x-api-KEY: sk-guess")),
                (method, path, ("authorization : Bearer " + own,)),
                (method, path, (" folded: x", "x-api-key: " + own)),
                (method, path, ("expect: 100-continue",)),
                (method, path, ("upgrade: h2c", "connection: upgrade, http2-settings", "http2-settings: AAMAAABk")),
                (method, path, ("upgrade: websocket", "connection: upgrade")),
            ]
            for verb, target, lines in requests:
                got = await gate.ask(verb, target, "other", *lines)
                seen = [each for each in gate.reached() if "/models/other" not in each]
                harmless = target.startswith("/v2/models/other?") and got.status == 200
                assert got.status in (0, *REFUSED) or harmless, (target, lines, got)
                assert not seen, (target, lines, seen)
            for version in ("1.0", "0.9", "2.0", "1.1 "):
                got = await gate.ask(method, path, "other", version=version)
                assert got.status in (0, *REFUSED), (line, version, got)
                assert not gate.reached(), (line, version)
            chunked = "2\r\n{}\r\n0\r\nauthorization: Bearer " + gate.secrets["admin"] + "\r\n\r\n"
            for coding in ("transfer-encoding: chunked", "Transfer-Encoding: CHUNKED"):
                got = await gate.ask(method, path, "other", coding, "trailer: authorization", body=chunked)
                assert got.status in (0, *REFUSED), (line, coding, got)
                assert not gate.reached(), "a trailer is no header"


@in_loop
async def test_no_second_request_rides_on_the_first_ones_key(tmp_path: Path) -> None:
    async with tried(tmp_path) as gate:
        admin = f"authorization: Bearer {gate.secrets['admin']}"
        second = "GET /v2/models/stats HTTP/1.1\r\nhost: x\r\n"
        for first in (
            f"GET /v2 HTTP/1.1\r\nhost: x\r\n{admin}\r\n\r\n",
            f"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\n{admin}\r\ncontent-length: 2\r\n\r\n{{}}",
            f"GET /v2 HTTP/1.0\r\nhost: x\r\nconnection: keep-alive\r\n{admin}\r\n\r\n",
        ):
            gate.triton.requests.clear()
            reader, writer = await asyncio.open_connection(gate.address.host, gate.address.port)
            writer.write((first + second + "connection: close\r\n\r\n").encode())
            answers = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            assert answers.count(b"HTTP/1.1 401") == 1 or answers.count(b"HTTP/1.1") == 1, answers
            assert not [line for line in gate.reached() if "stats" in line]


@in_loop
async def test_no_spelling_of_a_path_opens_it_to_any_key(tmp_path: Path) -> None:
    """test_gateway_paths has each route; here each kind of key, for a route of each kind."""
    async with tried(tmp_path) as gate:
        for path in ("/metrics", "/v2/models/stats", "/v2/models/m/config", "/v2/logging"):
            for kind, other in product(("none", "expired", "revoked", "other"), spelled(path)):
                got = await gate.ask("GET", other, kind)
                assert got.status in (0, *REFUSED), (kind, other, got)
                assert not gate.reached(), (kind, other)


@in_loop
async def test_everything_that_a_key_asks_is_counted_against_it(tmp_path: Path) -> None:
    """Inference against its own rate, the rest against what each key has for that; what is refused, too."""
    keys = tmp_path / "keys.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "QUESTIONS", 1e-9)
        patch.setattr(identity, "QUESTIONS_AT_ONCE", 20)
        lines = [line for line, needs in TABLE.items() if needs != FREE] + [
            "GET /nowhere",
            "DELETE /v2",
            "GET /openapi.json",
        ]
        secrets = {}
        for number, line in enumerate(lines):
            for kind, given in (("admin", {"admin": True}), ("other", {"models": ("other",)})):
                secrets[kind, line] = add_key(keys, f"{kind}{number}", rate=1e-6, burst=3, **given)[0]
        async with (
            scripted_server(echo) as triton,
            gateway(Settings(upstream=(triton.url,), port=0, keys=keys)) as address,
        ):
            for (kind, line), secret in secrets.items():
                gate = Tried(address, triton, {"x": secret})
                got = [(await gate.ask(*line.split(" "), "x")).status for _ in range(21)]
                assert got[-1] == 429, (kind, line, got)
                assert set(got[got.index(429) :]) == {429}
                if any(word in line for word in ("infer", "predict", "generate", "embeddings", "rerank")):
                    assert got.index(429) == 3, (kind, line, got)
                    assert (await gate.ask("GET", "/rollouts", "x")).status == 200, "its questions are counted apart"
