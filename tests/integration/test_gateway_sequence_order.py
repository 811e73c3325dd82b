"""What goes on or ends a sequence never waits behind what begins one, before a real Triton."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.keys import add_key
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_sequences import ID, WAYS, message, over_http, served
from tests.sequence_models import CONFIG, MODEL, NUMBER, all_free, remembering

pytestmark = pytest.mark.integration
START, END = {"sequence_start": True}, {"sequence_end": True}
NAMES = ("alice", "bob", "carol", "dave", "erin")
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return path, {name: add_key(path, name)[0] for name in NAMES}


@pytest.fixture(scope="module")
def remembers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with remembering(tmp_path_factory.mktemp("order") / "models") as server:
        yield server


@pytest.fixture
def triton(remembers: TritonServer) -> Iterator[TritonServer]:
    """One of which nobody else has slots: four of each model. It is started anew where a test has left some taken."""
    yield remembers
    if not all_free(remembers, "counts"):
        remembers.restart()


def pass_through(addresses: tuple[str, str], key: str, sequence: int, ask: Callable[..., Any]) -> None:
    """Begin one, whatever comes of it, and end it for the next."""
    with suppress(AssertionError, grpc.RpcError, OSError):
        ask(addresses, key, "counts", 1, sequence_id=sequence, **START)
    with suppress(AssertionError, grpc.RpcError, OSError):
        ask(addresses, key, "counts", 1, sequence_id=sequence, **END)


@pytest.mark.parametrize("way", WAYS)
def test_an_end_waits_for_none_of_the_sequences_that_found_slots_free_which_another_gateway_has(
    triton: TritonServer, keys: tuple[Path, dict[str, str]], way: str
) -> None:
    """There is one place, and each of three keys wants it for what waits for that end."""
    path, key = keys
    ask = WAYS[way]
    with (
        served(triton, path, wait_s=1000.0) as other,
        served(triton, path, wait_s=1000.0, places=1) as addresses,
        ThreadPoolExecutor(3) as pool,
    ):
        for sequence in (1, 2, 3):
            assert WAYS["json"](other, key["bob"], "counts", 1, sequence_id=sequence, **START).total == 1
        assert ask(addresses, key["alice"], "counts", 1, sequence_id=1, **START).total == 1
        for _ in range(30):  # how long an answer takes is known
            assert over_http(addresses, key["alice"], "counts", 1, raw=False, sequence_id=1).total
            time.sleep(0.01)
        waiting = [pool.submit(pass_through, addresses, key[who], 10, ask) for who in ("carol", "dave", "erin")]
        time.sleep(0.5)
        began = time.monotonic()
        assert ask(addresses, key["alice"], "counts", 1, sequence_id=1, **END).total == 32
        took = time.monotonic() - began
        for each in waiting:
            each.result()
        for sequence in (1, 2, 3):
            WAYS["json"](other, key["bob"], "counts", 1, sequence_id=sequence, **END)
    assert took < 4, f"{took:.1f} s"


@pytest.mark.parametrize("way", WAYS)
def test_an_end_waits_for_no_begin_where_none_are_ended_for_another(
    triton: TritonServer, keys: tuple[Path, dict[str, str]], way: str
) -> None:
    path, key = keys
    ask = WAYS[way]
    with served(triton, path, wait_s=0.0, places=4) as addresses, ThreadPoolExecutor(8) as pool:
        for sequence in range(1, 5):
            assert ask(addresses, key["alice"], "counts", 1, sequence_id=sequence, **START).total == 1
        waiting = [
            pool.submit(pass_through, addresses, key[NAMES[1 + sequence % 4]], sequence, ask) for sequence in range(8)
        ]
        time.sleep(1.0)
        began = time.monotonic()
        for sequence in range(1, 5):
            assert ask(addresses, key["alice"], "counts", 1, sequence_id=sequence, **END).total == 2
        took = time.monotonic() - began
        for each in waiting:
            each.result()
    assert took < 4, f"{took:.1f} s"


def test_an_end_finds_a_connection_beside_all_that_wait_for_it(
    triton: TritonServer, keys: tuple[Path, dict[str, str]]
) -> None:
    """Of 32, a model has half: fewer than three keys may have waiting where none is kept to its share of slots."""
    path, key = keys
    with served(triton, path, wait_s=0.0, connections=32) as addresses, ThreadPoolExecutor(24) as pool:
        for sequence in range(1, 5):
            assert WAYS["raw"](addresses, key["alice"], "counts", 1, sequence_id=sequence, **START).total == 1
        waiting = [
            pool.submit(pass_through, addresses, key[who], sequence, WAYS["raw"])
            for who in ("bob", "carol", "dave") for sequence in range(8)
        ]  # fmt: skip
        time.sleep(1.0)
        began = time.monotonic()
        for sequence in range(1, 5):
            assert WAYS["raw"](addresses, key["alice"], "counts", 1, sequence_id=sequence, **END).total == 2
        took = time.monotonic() - began
        for each in waiting:
            each.result()
    assert took < 4, f"{took:.1f} s"


def test_an_end_waits_for_no_begin_of_its_key_whose_answer_may_be_long(
    tmp_path: Path, keys: tuple[Path, dict[str, str]]
) -> None:
    """Of unknown answers, four fill what a key may have Triton hold: what waits for a slot has none."""
    path, key = keys
    version = tmp_path / "models" / "counts" / "1"
    version.mkdir(parents=True)
    config = CONFIG.replace("NAME", "counts").replace("PLACE", NUMBER.replace("NAME", "counts"))
    config = config.replace('"sum" data_type: TYPE_INT64 dims: [ 1 ]', '"sum" data_type: TYPE_INT64 dims: [ -1 ]')
    (version.parent / "config.pbtxt").write_text(config)
    (version / "model.py").write_text(MODEL)
    stream = WAYS["stream"]
    with TritonServer(tmp_path / "models", ports=Ports(0, 0, 0)) as triton:  # noqa: SIM117
        with served(triton, path, wait_s=1000.0) as addresses, ThreadPoolExecutor(8) as pool:
            for sequence in range(1, 5):
                assert WAYS["raw"](addresses, key["alice"], "counts", 1, sequence_id=sequence, **START).total == 1
            waiting = [
                pool.submit(pass_through, addresses, key["alice"], sequence, stream) for sequence in range(10, 18)
            ]
            time.sleep(1.0)
            began = time.monotonic()
            for sequence in range(1, 5):
                assert stream(addresses, key["alice"], "counts", 1, sequence_id=sequence, **END).total == 2
            took = time.monotonic() - began
            for each in waiting:
                each.result()
    assert took < 4, f"{took:.1f} s"


def test_a_stream_s_sequence_that_gets_no_slot_is_told_so_as_soon_as_over_http(
    triton: TritonServer, keys: tuple[Path, dict[str, str]]
) -> None:
    path, key = keys
    with served(triton, path) as other, served(triton, path, wait_s=0.5) as addresses:
        for sequence in (1, 2, 3, 4):
            assert WAYS["json"](other, key["alice"], "counts", 1, sequence_id=sequence, **START).total == 1
        over = threading.Event()

        def messages() -> Iterator[Any]:
            yield message("counts", 1, sequence_id=1, **START)
            over.wait(TIMEOUT_S)

        began = time.monotonic()
        with grpc.insecure_channel(addresses[1]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            asked = stub.ModelStreamInfer(messages(), timeout=TIMEOUT_S, metadata=[("x-api-key", key["bob"])])
            with pytest.raises(grpc.RpcError, match="could not begin") as told:
                next(asked)
            assert told.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(told.value.trailing_metadata())["retry-after"] == "2"
            over.set()
        inputs = {"x": [1], "parameters": {ID: 2, "sequence_start": True}}
        with closing(http.client.HTTPConnection(addresses[0], timeout=TIMEOUT_S)) as connection:
            url = "/v2/models/counts/generate_stream"
            connection.request("POST", url, json.dumps(inputs), {"x-api-key": key["bob"]})
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("retry-after")) == (503, "2")
            assert b"could not begin" in answer.read()
        assert time.monotonic() - began < 15, "half of the time that an answer may take"
        for sequence in (1, 2, 3, 4):
            assert WAYS["json"](other, key["alice"], "counts", 1, sequence_id=sequence, **END).total == 2
        for sequence in (11, 12, 13, 14):  # what was given up holds none of them
            while WAYS["json"](addresses, key["bob"], "counts", 1, sequence_id=sequence, **START).total is None:
                assert time.monotonic() - began < TIMEOUT_S
                time.sleep(0.1)
        for sequence in (11, 12, 13, 14):
            WAYS["json"](addresses, key["bob"], "counts", 1, sequence_id=sequence, **END)
    assert triton.running


@pytest.mark.parametrize("way", WAYS)
def test_a_key_has_its_share_of_the_slots_at_each_gateway_and_leaves_the_others(
    triton: TritonServer, keys: tuple[Path, dict[str, str]], way: str
) -> None:
    path, key = keys
    ask = WAYS[way]
    with served(triton, path, share=0.34) as one, served(triton, path, share=0.34) as two:
        for gateway in (one, two):
            assert ask(gateway, key["alice"], "counts", 1, sequence_id=1 + (gateway is two), **START).total == 1
            refused = ask(gateway, key["alice"], "counts", 1, sequence_id=9, **START).refused
            assert "one key has 1 of its 4 slots at most" in refused
        began = time.monotonic()
        for gateway in (one, two):
            assert ask(gateway, key["bob"], "counts", 1, sequence_id=1 + (gateway is two), **START).total == 1
        assert time.monotonic() - began < 4
        for who in ("alice", "bob"):
            for gateway in (one, two):
                told = ask(gateway, key[who], "counts", 1, sequence_id=1 + (gateway is two), **END)
                assert told.total == 2
