"""API keys: their file, their command, and what the gateway does with a request's key."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import uvloop

from compress.errors import ServerError
from serve.cli.main import main
from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import KeyRing
from serve.gateway.access.keys import add_key, read_keys, revoke_key
from serve.gateway.errors import RateLimitedError, UnauthorizedError
from serve.gateway.settings import Settings
from serve.http.client import Address
from tests.serve_http import gateway, scripted_server
from tests.unit.serve.gateway.test_upstream import INFER, ask, echo, error

pytestmark = pytest.mark.clock


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_a_key_is_stored_as_its_digest_in_a_file_of_its_owner(tmp_path: Path) -> None:
    secret, key = add_key(tmp_path / "keys.json", "shop", models=("digits*",), rate=10.0, burst=20, priority=2)
    text = (tmp_path / "keys.json").read_text()
    assert secret not in text
    assert secret.removeprefix(key.id) not in text
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    assert read_keys(tmp_path / "keys.json") == [key]
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]


def test_keys_made_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_key(path, f"k{number}"), range(24)))
    assert {key.name for key in read_keys(path)} == {f"k{number}" for number in range(24)}
    assert len({key.digest for key in read_keys(path)}) == 24


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "a b"}, "letters, digits"),
        ({"name": ""}, "letters, digits"),
        ({"models": ()}, "may ask no model"),
        ({"models": ("",)}, "may ask no model"),
        ({"rate": 0.0}, "the rate of k is 0.0"),
        ({"rate": float("nan")}, "the rate of k is nan"),
        ({"burst": 5}, "without a rate"),
        ({"rate": 1.0, "burst": 0}, "the burst of k is 0"),
        ({"priority": 0}, "the priority of k is 0"),
        ({"priority": 10}, "the priority of k is 10"),
        ({"admin": "yes"}, "admin of k is 'yes'"),
    ],
)
def test_a_key_that_can_not_work_is_refused_and_the_file_stays(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "old")
    before = path.read_bytes()
    with pytest.raises(ServerError) as caught:
        add_key(path, **{"name": "k", **given})
    assert told in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "not JSON"),
        ("[]", "no file of keys"),
        ('{"format": 2, "keys": []}', "no file of keys"),
        ('{"format": 1, "keys": [{"id": "x"}]}', "unknown or missing fields"),
        ('{"format": 1, "keys": ' + "[" * 100_000, "not JSON"),
        ('{"format": 1, "keys": [{"id": [], "name": "k", "digest": "%s"}]}' % ("0" * 64), "no id"),
        ('{"format": 1, "keys": [{"id": {"a": 1}, "name": "k", "digest": "%s"}]}' % ("0" * 64), "the id of k"),
        ('{"format": 1, "keys": [{"id": "", "name": "k", "digest": "%s"}]}' % ("0" * 64), "no id"),
        ('{"format": 1, "keys": [{"id": "x", "name": "k", "digest": "00"}]}', "no SHA-256"),
        ('{"format": 1, "keys": [{"id": "x", "name": "k", "digest": "%s", "models": "*"}]}' % ("0" * 64), "no list"),
        ('{"format": 1, "keys": [{"id": "x", "name": "k", "digest": "%s", "root": 1}]}' % ("0" * 64), "root"),
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "keys.json").write_text(content)
    with pytest.raises(ServerError, match=told):
        read_keys(tmp_path / "keys.json")


def test_a_file_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "k")
    (tmp_path / "keys.json").chmod(0o666)
    with pytest.raises(ServerError, match="chmod go-w"):
        read_keys(tmp_path / "keys.json")


def test_the_command_shows_a_key_once_on_stdout_and_lists_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ["--file", str(tmp_path / "keys.json")]
    assert run("keys", "add", "shop", *file, "--model", "digits", "--model", "net*", "--rate", "5", "--admin") == 0
    made = capsys.readouterr()
    secret = made.out.strip()
    assert secret.startswith("sk-")
    assert secret not in made.err
    assert run("keys", "list", *file) == 0
    listed = capsys.readouterr().out
    assert "shop" in listed
    assert "digits net*" in listed
    assert secret not in listed
    assert run("keys", "list", *file, "--json") == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["models"], shown["rate"], shown["admin"]) == (["digits", "net*"], 5.0, True)
    assert "digest" not in shown
    assert run("keys", "add", "shop", *file) == 2
    assert "it has one" in capsys.readouterr().err
    assert run("keys", "revoke", "shop", *file) == 0
    assert read_keys(tmp_path / "keys.json") == []
    assert run("keys", "revoke", "shop", *file) == 2


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b""},
        {b"authorization": b"Bearer "},
        {b"authorization": b"Basic {key}"},
        {b"authorization": b"Bearer {key}x"},
        {b"authorization": b"{key}"},
        {b"x-api-key": b"sk-00000000-guess"},
        {b"x-api-key": b"{key}", b"authorization": b"Bearer other"},
    ],
)
def test_whoever_has_no_key_is_nobody(tmp_path: Path, headers: dict[bytes, bytes]) -> None:
    secret, _ = add_key(tmp_path / "keys.json", "k")
    ring = KeyRing(tmp_path / "keys.json")
    with pytest.raises(UnauthorizedError) as caught:
        ring.identify({name: value.replace(b"{key}", secret.encode()) for name, value in headers.items()})
    assert secret not in caught.value.body.decode()


def test_a_key_comes_in_either_header(tmp_path: Path) -> None:
    secret, _ = add_key(tmp_path / "keys.json", "k")
    ring = KeyRing(tmp_path / "keys.json")
    for headers in (
        {b"authorization": b"Bearer " + secret.encode()},
        {b"authorization": b"bearer  " + secret.encode()},
        {b"x-api-key": secret.encode()},
        {b"x-api-key": secret.encode(), b"authorization": b"Bearer " + secret.encode()},
    ):
        assert ring.identify(headers).name == "k"


def test_a_reload_keeps_what_was_used_of_a_limit_and_a_broken_file_keeps_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secret, _ = add_key(path, "k", rate=0.001, burst=1)
    ring = KeyRing(path)
    ring.identify_key(secret.encode()).take()
    add_key(path, "other")
    assert ring.changed()
    ring.reload()
    assert not ring.changed()
    assert ring.names() == ["k", "other"]
    identity = ring.identify_key(secret.encode())
    assert identity.bucket is not None
    assert identity.bucket.take(time.monotonic()) > 0
    whole = path.read_text()
    path.write_text("{")
    with pytest.raises(ServerError):
        ring.reload()
    assert ring.names() == ["k", "other"]
    assert ring.changed()
    path.write_text(whole)


def test_a_revocation_that_could_not_be_read_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a moment the process has no file left: who was revoked must not stay for good."""
    path = tmp_path / "keys.json"
    add_key(path, "bob")
    add_key(path, "alice")
    gate = Gate(Settings(keys=path))
    keys = gate.keys
    none_left = patch("serve.gateway.access.identity.read_keys", side_effect=ServerError("no", why="EMFILE", mend="-"))

    async def main() -> None:
        monkeypatch.setattr("serve.gateway.access.gate.LOOK_S", 0.01)
        watching = asyncio.create_task(gate.watch_keys())
        with none_left:
            revoke_key(path, "bob")
            await asyncio.sleep(0.2)
            assert keys.names() == ["alice", "bob"]
        for _ in range(1000):
            if keys.names() == ["alice"]:
                break
            await asyncio.sleep(0.01)
        assert keys.names() == ["alice"]
        watching.cancel()

    asyncio.run(main())
    assert len([each for each in caplog.records if "stay as they were" in each.getMessage()]) == 1


def test_a_key_is_worth_nothing_once_it_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("keys", "add", "k", "--file", str(tmp_path / "keys.json"), "--days", "2") == 0
    secret = add_key(tmp_path / "keys.json", "other", expires="2030-01-31T12:00:00+01:00")[0].encode()
    ring = KeyRing(tmp_path / "keys.json")
    (of_k,) = (key for key in read_keys(tmp_path / "keys.json") if key.name == "k")
    assert 1.9 * 86400 < (of_k.expires_at or 0) - time.time() <= 2 * 86400
    ended: list[str] = []
    at = 1896087600.0  # date -d 2030-01-31T11:00:00Z +%s
    monkeypatch.setattr(time, "time", lambda: at - 1)
    with ring.held(secret, lambda _: ended.append("held")), ring.held(None, lambda _: ended.append("none")):
        assert ring.identify_key(secret).name == "other"
        ring.look()
        assert ended == ["none"]
        monkeypatch.setattr(time, "time", lambda: at)
        ring.look()
        ring.look()
        assert ended == ["none", "held"]
    with pytest.raises(UnauthorizedError, match="expired"):
        ring.identify_key(secret)
    with ring.held(secret, lambda _: ended.append("again")):
        pass
    ring.look()
    assert ended == ["none", "held"]


@pytest.mark.parametrize("expires", ["tomorrow", "2030-01-31", "2030-01-31T12:00:00", 5])
def test_a_date_that_is_none_is_refused(tmp_path: Path, expires: Any) -> None:
    with pytest.raises(ServerError, match="time zone"):
        add_key(tmp_path / "keys.json", "k", expires=expires)


@pytest.mark.parametrize("days", ["0", "-1", "nan", "1e12"])
def test_a_key_holds_for_days_that_there_are(tmp_path: Path, days: str) -> None:
    assert run("keys", "add", "k", "--file", str(tmp_path / "keys.json"), f"--days={days}") == 2


def with_keys(tmp_path: Path, check: Callable[[Address, dict[str, bytes]], Any], **settings: Any) -> None:
    """Run `check` against a gateway that knows three keys."""
    path = tmp_path / "keys.json"
    keys = {
        "shop": add_key(path, "shop", models=("m*",), rate=0.001, burst=2)[0],
        "other": add_key(path, "other", models=("other",))[0],
        "admin": add_key(path, "admin", admin=True)[0],
        "prometheus": add_key(path, "prometheus", models=("none",), metrics=True)[0],
    }

    async def serve() -> None:
        async with (
            scripted_server(echo) as triton,
            gateway(Settings(upstream=(triton.url,), port=0, keys=path, **settings)) as address,
        ):
            await check(address, {name: f"Bearer {key}".encode() for name, key in keys.items()})

    uvloop.run(serve())


def test_what_a_key_may_do(tmp_path: Path) -> None:
    async def check(address: Address, keys: dict[str, bytes]) -> None:
        async def status(target: bytes, body: bytes | None, who: str | None) -> int:
            headers = () if who is None else ((b"authorization", keys[who]), (b"content-type", b"image/png"))
            return (await ask(address, target, body, *headers)).status

        for target, body in ((INFER, b"{}"), (b"/v2/models/m", None), (b"/predict/m", b"x"), (b"/v2", None)):
            refused = await ask(address, target, body)
            assert refused.status == 401
            assert refused.header(b"www-authenticate") == b"Bearer"
            error(refused)
        for target, body in ((INFER, b"{}"), (b"/v2/models/m/config", None), (b"/predict/m", b"x")):
            assert await status(target, body, "other") == 403
        assert await status(b"/v2/models/other/infer", b"{}", "other") == 200
        assert await status(INFER, b"{}", "admin") == 200
        for free in (b"/healthz", b"/v2/health/live", b"/docs", b"/openapi.json"):
            assert await status(free, None, None) == 200
        for target, body in ((b"/v2/repository/index", b"{}"), (b"/v2/logging", None)):
            assert await status(target, body, None) == 401
            assert await status(target, body, "shop") == 403
            assert await status(target, body, "admin") == 200
        assert [await status(b"/v2/models/stats", None, who) for who in ("shop", "admin")] == [403, 200]
        assert [await status(b"/metrics", None, who) for who in (None, "shop", "prometheus", "admin")] == [
            401, 403, 200, 200,
        ]  # fmt: skip
        # Names that the routes decode are checked decoded.
        assert await status(b"/v2/models/%6d/config", None, "other") == 403
        assert await status(b"/v2/models/%73tats", None, "shop") == 403

    with_keys(tmp_path, check)


def test_a_rate_is_kept_and_told(tmp_path: Path) -> None:
    async def check(address: Address, keys: dict[str, bytes]) -> None:
        shop = (b"authorization", keys["shop"])
        first = await ask(address, INFER, b"{}", shop)
        assert first.status == 200
        assert first.header(b"ratelimit-policy") == b'"key";q=2;w=2000'
        assert (first.header(b"ratelimit") or b"").startswith(b'"key";r=1;t=')
        assert (await ask(address, b"/v2/models/m", None, shop)).status == 200  # metadata is not counted
        assert (await ask(address, INFER, b"{}", shop)).status == 200
        for target in (INFER, b"/predict/m"):
            refused = await ask(address, target, b"{}", shop, (b"content-type", b"application/json"))
            assert refused.status == 429
            assert 900 < int(refused.header(b"retry-after") or 0) <= 1000
            assert (refused.header(b"ratelimit") or b"").startswith(b'"key";r=0;t=')
        assert (await ask(address, INFER, b"{}", (b"authorization", keys["admin"]))).status == 200
        page = (await ask(address, b"/metrics", None, (b"authorization", keys["admin"]))).body.decode()
        lines = [line for line in page.splitlines() if line.startswith("gateway_key_requests_total")]
        assert 'gateway_key_requests_total{code="429",key="shop"} 2.0' in lines, lines
        assert "sk-" not in page

    with_keys(tmp_path, check)


def test_keys_are_taken_and_lost_while_the_gateway_runs(tmp_path: Path) -> None:
    async def check(address: Address, keys: dict[str, bytes]) -> None:
        path = tmp_path / "keys.json"

        async def until(status: int, key: bytes) -> None:
            async with asyncio.timeout(5):
                while (await ask(address, INFER, b"{}", (b"authorization", key))).status != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        secret, _ = add_key(path, "new")
        await until(200, b"Bearer " + secret.encode())
        revoke_key(path, "new")
        await until(401, b"Bearer " + secret.encode())
        path.write_text("{")
        await asyncio.sleep(1.2)
        await until(200, keys["admin"])

    with_keys(tmp_path, check)


def test_no_other_machine_is_let_in_without_keys_unless_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="everybody who reaches"):
        Settings(host="192.0.2.1")
    add_key(tmp_path / "keys.json", "k")
    for fine in (
        {"host": "127.0.0.5"}, {"host": "::1"}, {"host": "localhost"}, {"host": "192.0.2.1", "anonymous": True},
        {"host": "192.0.2.1", "keys": tmp_path / "keys.json"},
    ):  # fmt: skip
        Settings(**fine)


def test_a_key_given_twice_with_other_values_is_refused(tmp_path: Path) -> None:
    async def check(address: Address, keys: dict[str, bytes]) -> None:
        twice = ((b"authorization", keys["admin"]), (b"authorization", keys["shop"]))
        for target, body in ((INFER, b"{}"), (b"/v2", None)):
            assert (await ask(address, target, body, *twice)).status == 400

    with_keys(tmp_path, check)


@pytest.mark.parametrize("already", [0, 1, 3, 5, 6])
def test_a_request_of_several_parts_that_waits_as_it_is_told_is_served(
    already: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    key = add_key(tmp_path / "keys.json", "slow", rate=1, burst=6)[0]
    identity = KeyRing(tmp_path / "keys.json").identify_key(key.encode())
    for _ in range(already):
        identity.take()
    served = waited = 0
    while not served and waited < 3:
        try:
            identity.take()
            identity.take_more(3)
            served = 1
        except RateLimitedError as err:
            now[0] += int(dict(err.headers)[b"retry-after"])
            waited += 1
    assert served
    assert waited == (0 if already <= 2 else 1 if already <= 5 else 2)  # of none, how many parts there are is not seen


def test_what_was_not_begun_is_given_back(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "slow", rate=1e-6, burst=6)[0]
    identity = KeyRing(tmp_path / "keys.json").identify_key(key.encode())
    identity.take_more(6)
    identity.give_back(2)
    identity.take_more(2)
    with pytest.raises(RateLimitedError):
        identity.take()
