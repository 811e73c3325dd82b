"""Sequences before a real Triton: each key's ids are its own, and no id ends the server."""

from __future__ import annotations

import http.client
import json
import queue
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.rollout.plan import Plan, Target
from serve.rollout.store import Store
from serve.triton.launch import TritonServer
from tests.integration.test_gateway_grpc import free_port
from tests.sequence_models import all_free, remembering
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
TIMEOUT_S = 60
ID = "sequence_id"


@dataclass
class Told:
    """The sum that was answered, or why not; and the id of the sequence in the answer's parameters."""

    total: int | None = None
    refused: str = ""
    sequence: Any = None


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with remembering(tmp_path_factory.mktemp("sequences")) as server:
        yield server


@contextmanager
def served(
    triton: TritonServer,
    keys: Path | None = None,
    *,
    validate: bool = True,
    wait_s: float = 5.0,
    state: Path | None = None,
    places: int = 128,
    share: float = 1.0,
    connections: int = 768,
) -> Iterator[tuple[str, str]]:
    """host:port of a gateway over HTTP, and over gRPC."""
    port = free_port()
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        keys=keys, validate=validate, sequence_wait_s=wait_s, state=state or Path("no-rollouts.db"),
        max_in_flight=places, max_sequence_share=share, max_connections=connections,
    )  # fmt: skip
    with gateway_thread(settings) as url:
        yield url.removeprefix("http://"), f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Their file, and two of them."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return path, add_key(path, "alice")[0], add_key(path, "bob", metrics=True)[0]


@pytest.fixture(scope="module")
def addresses(triton: TritonServer, keys: tuple[Path, str, str]) -> Iterator[tuple[str, str]]:
    with served(triton, keys[0]) as found:
        yield found


def over_http(
    addresses: tuple[str, str], key: str, model: str, x: int, *, raw: bool, timeout_s: float = TIMEOUT_S,
    **parameters: Any,
) -> Told:  # fmt: skip
    item: dict[str, Any] = {"name": "x", "datatype": "INT64", "shape": [1, 1]}
    tail = struct.pack("<q", x) if raw else b""
    item |= {"parameters": {"binary_data_size": 8}} if raw else {"data": [x]}
    head = json.dumps({"inputs": [item], "parameters": parameters | {"binary_data_output": raw}}).encode()
    headers = {"x-api-key": key, "accept-encoding": "gzip"} if key else {}
    if raw:
        headers["inference-header-content-length"] = str(len(head))
    with closing(http.client.HTTPConnection(addresses[0], timeout=timeout_s)) as connection:
        connection.request("POST", f"/v2/models/{model}/infer", head + tail, headers)
        answer = connection.getresponse()
        body = answer.read()
    if answer.status != 200:
        assert answer.status in (400, 429), body
        told = json.loads(body)
        return Told(refused=told["error"] + told.get("why", ""))
    length = int(answer.getheader("inference-header-content-length") or len(body))
    told = json.loads(body[:length])
    total = struct.unpack("<q", body[length:])[0] if raw else told["outputs"][0]["data"][0]
    return Told(total, sequence=told.get("parameters", {}).get(ID))


def message(model: str, x: int, **parameters: Any) -> Any:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
    found = messages.ModelInferRequest(model_name=model, raw_input_contents=[struct.pack("<q", x)])
    found.inputs.add(name="x", datatype="INT64", shape=[1, 1])
    for name, value in parameters.items():
        setattr(found.parameters[name], kinds[type(value)], value)
    return found


def read(answer: Any) -> Told:
    sequence = None
    if ID in answer.parameters:
        sequence = getattr(answer.parameters[ID], answer.parameters[ID].WhichOneof("parameter_choice"))
    return Told(struct.unpack("<q", answer.raw_output_contents[0])[0], sequence=sequence)


def refusal(err: Any) -> Told:
    assert err.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), err
    return Told(refused=err.details())


def over_grpc(addresses: tuple[str, str], key: str, model: str, x: int, **parameters: Any) -> Told:
    with grpc.insecure_channel(addresses[1]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            asked = message(model, x, **parameters)
            return read(stub.ModelInfer(asked, timeout=TIMEOUT_S, metadata=[("x-api-key", key)] if key else None))
        except grpc.RpcError as err:
            return refusal(err)


def over_stream(addresses: tuple[str, str], key: str, model: str, x: int, **parameters: Any) -> Told:
    """As the first and only message of a stream."""
    with grpc.insecure_channel(addresses[1]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = [("x-api-key", key)] if key else None
        try:
            asked = iter([message(model, x, **parameters)])
            (answer,) = stub.ModelStreamInfer(asked, timeout=TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as err:
            return refusal(err)
        return Told(refused=answer.error_message) if answer.error_message else read(answer.infer_response)


Ask = Callable[..., Told]
WAYS: dict[str, Ask] = {
    "json": lambda *asked, **more: over_http(*asked, raw=False, **more),
    "raw": lambda *asked, **more: over_http(*asked, raw=True, **more),
    "grpc": over_grpc,
    "stream": over_stream,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("model", "sequence"), [("counts", 7), ("counts", 2**63 - 1), ("words", "7"), ("words", 'ü"\\ '), ("whole", 7)]
)
def test_two_keys_use_the_same_id_and_neither_meets_the_other(
    addresses: tuple[str, str], keys: tuple[Path, str, str], way: str, model: str, sequence: int | str
) -> None:
    _, alice, bob = keys
    ask = WAYS[way]
    assert ask(addresses, alice, model, 1, sequence_id=sequence, sequence_start=True).total == 1
    assert ask(addresses, bob, model, 100, sequence_id=sequence, sequence_start=True).total == 100
    for other in WAYS.values():  # a key's sequence is the same whichever way it is asked
        other(addresses, alice, model, 1, sequence_id=sequence)
    last = ask(addresses, alice, model, 1, sequence_id=sequence, sequence_end=True)
    assert last == Told(6, sequence=sequence if model == "whole" else None)
    assert ask(addresses, bob, model, 100, sequence_id=sequence).total == 200
    ended = ask(addresses, alice, model, 1, sequence_id=sequence)
    assert f"sequence {sequence} " in ended.refused, "an error names the id as its client says it"
    assert ask(addresses, bob, model, 100, sequence_id=sequence, sequence_end=True).total == 300


@pytest.mark.parametrize("way", WAYS)
def test_what_was_begun_in_vain_keeps_nobody_from_an_id(
    addresses: tuple[str, str], keys: tuple[Path, str, str], way: str
) -> None:
    _, alice, bob = keys
    for sequence in range(50, 60):
        assert "START" in WAYS[way](addresses, bob, "counts", 1, sequence_id=sequence).refused
        started = WAYS[way](addresses, alice, "counts", 1, sequence_id=sequence, sequence_start=True, sequence_end=True)
        assert started.total == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["counts", "whole"])
@pytest.mark.parametrize("who", ["a key", "nobody", "a key, without validation"])
def test_a_text_where_the_model_takes_numbers_is_refused_and_ends_nothing(
    triton: TritonServer, addresses: tuple[str, str], keys: tuple[Path, str, str], who: str, way: str, model: str
) -> None:
    def refused(addresses: tuple[str, str], key: str) -> None:
        before = triton.pid
        for sequence in ("abc", "z" * 128, "é" * 20):
            found = WAYS[way](addresses, key, model, 1, sequence_id=sequence, sequence_start=True)
            assert "takes a number" in found.refused, found
        alive = WAYS[way](addresses, key, model, 1, sequence_id=3, sequence_start=True, sequence_end=True)
        assert alive.total == 1
        assert triton.pid == before
        assert triton.running

    if who == "a key":
        refused(addresses, keys[1])
    else:
        with served(triton, None if who == "nobody" else keys[0], validate=who == "nobody") as found:
            refused(found, "" if who == "nobody" else keys[1])


def test_a_stream_carries_sequences_of_one_key_among_each_other(
    addresses: tuple[str, str], keys: tuple[Path, str, str]
) -> None:
    coming: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc.insecure_channel(addresses[1]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(iter(coming.get, None), timeout=TIMEOUT_S, metadata=[("x-api-key", keys[1])])

        def ask(x: int, sequence: int, **more: bool) -> Told:
            coming.put(message("whole", x, sequence_id=sequence, **more))
            answer = next(answers)
            return Told(refused=answer.error_message) if answer.error_message else read(answer.infer_response)

        assert ask(1, 21, sequence_start=True) == Told(1, sequence=21)
        assert ask(10, 22, sequence_start=True) == Told(10, sequence=22)
        assert ask(1, 21) == Told(2, sequence=21)
        assert "sequence 23 " in ask(1, 23).refused
        assert ask(10, 22, sequence_end=True) == Told(20, sequence=22)
        assert ask(1, 21, sequence_end=True) == Told(3, sequence=21)
        coming.put(None)
        assert list(answers) == []


def test_an_id_is_as_long_as_triton_takes_it(
    triton: TritonServer, addresses: tuple[str, str], keys: tuple[Path, str, str]
) -> None:
    for ask in WAYS.values():
        for sequence in ("é" * 65, "z" * 129):
            found = ask(addresses, keys[1], "words", 1, sequence_id=sequence, sequence_start=True)
            assert "of up to 128 bytes" in found.refused
        assert ask(addresses, keys[1], "words", 1, sequence_id="é" * 64, sequence_start=True, sequence_end=True).total
    assert triton.running


@pytest.fixture(scope="module")
def second_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with remembering(tmp_path_factory.mktemp("slots")) as server:
        yield server


@pytest.fixture
def free_triton(second_triton: TritonServer) -> Iterator[TritonServer]:
    """Nobody else holds its slots, of which each of its models has four; started anew where a test has left some taken."""
    yield second_triton
    if not all_free(second_triton, "counts", "words", "twice/versions/1", "twice/versions/2"):
        second_triton.restart()


@pytest.fixture
def shared(
    free_triton: TritonServer, keys: tuple[Path, str, str]
) -> Callable[[float], AbstractContextManager[tuple[str, str]]]:
    """Gateways before a Triton of which nobody else holds slots."""
    return lambda wait_s: served(free_triton, keys[0], wait_s=wait_s)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["counts", "words", "whole"])
def test_a_key_that_keeps_all_slots_busy_keeps_no_other_key_out(
    shared: Callable[[float], AbstractContextManager[tuple[str, str]]],
    keys: tuple[Path, str, str],
    way: str,
    model: str,
) -> None:
    _, alice, bob = keys
    ask = WAYS[way]
    with shared(0.5) as addresses:
        for sequence in (1, 2, 3, 4):
            assert ask(addresses, alice, model, 1, sequence_id=sequence, sequence_start=True).total == 1
        assert ask(addresses, bob, model, 100, sequence_id=1, sequence_start=True).total == 100
        assert [ask(addresses, alice, model, 1, sequence_id=sequence).total for sequence in (1, 2)] == [2, 2]
        for sequence in (3, 4):
            assert "the sequence was ended" in ask(addresses, alice, model, 1, sequence_id=sequence).refused
        assert ask(addresses, bob, model, 100, sequence_id=1).total == 200
        assert ask(addresses, bob, model, 100, sequence_id=2, sequence_start=True).total == 100
        for key, sequence in ((alice, 1), (alice, 2), (bob, 1), (bob, 2)):
            assert ask(addresses, key, model, 1, sequence_id=sequence, sequence_end=True).total is not None


@pytest.mark.parametrize("way", ["raw", "grpc"])
def test_what_waits_for_slots_that_another_gateway_has_is_told_when_to_come_again(
    triton: TritonServer, keys: tuple[Path, str, str], way: str
) -> None:
    path, alice, bob = keys
    with served(triton, path) as other, served(triton, path, wait_s=0.5) as addresses:
        for sequence in (1, 2, 3, 4):
            assert over_grpc(other, alice, "counts", 1, sequence_id=sequence, sequence_start=True).total == 1
        began = time.monotonic()
        if way == "grpc":
            with grpc.insecure_channel(addresses[1]) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                asked = message("counts", 1, sequence_id=1, sequence_start=True)
                with pytest.raises(grpc.RpcError, match="could not begin") as told:
                    stub.ModelInfer(asked, timeout=TIMEOUT_S, metadata=[("x-api-key", bob)])
            assert told.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(told.value.trailing_metadata())["retry-after"] == "2"
        else:
            item = {"name": "x", "datatype": "INT64", "shape": [1, 1], "data": [1]}
            body = json.dumps({"inputs": [item], "parameters": {ID: 1, "sequence_start": True}}).encode()
            with closing(http.client.HTTPConnection(addresses[0], timeout=TIMEOUT_S)) as connection:
                connection.request("POST", "/v2/models/counts/infer", body, {"x-api-key": bob})
                answer = connection.getresponse()
                assert (answer.status, answer.getheader("retry-after")) == (503, "2")
                assert b"could not begin" in answer.read()
        assert time.monotonic() - began < 15, "half of the time that an answer may take"
        for sequence in (1, 2, 3, 4):
            assert over_grpc(other, alice, "counts", 1, sequence_id=sequence, sequence_end=True).total == 2
        ended = time.monotonic() + 30
        for sequence in (11, 12, 13, 14):  # what was given up holds none of them
            while over_grpc(addresses, bob, "counts", 1, sequence_id=sequence, sequence_start=True).total is None:
                assert time.monotonic() < ended
                time.sleep(0.1)
        for sequence in (11, 12, 13, 14):
            over_grpc(addresses, bob, "counts", 1, sequence_id=sequence, sequence_end=True)


def test_without_a_bound_it_waits_as_long_as_it_may(
    shared: Callable[[float], AbstractContextManager[tuple[str, str]]], keys: tuple[Path, str, str]
) -> None:
    """What was seen before there was one: 504 for the other key."""
    _, alice, bob = keys
    with shared(0.0) as addresses:
        for sequence in (1, 2, 3, 4):
            over_grpc(addresses, alice, "counts", 1, sequence_id=sequence, sequence_start=True)
        with grpc.insecure_channel(addresses[1]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            asked = message("counts", 1, sequence_id=1, sequence_start=True)
            with pytest.raises(grpc.RpcError) as late:
                stub.ModelInfer(asked, timeout=3, metadata=[("x-api-key", bob)])
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for sequence in (1, 2, 3, 4):
            over_grpc(addresses, alice, "counts", 1, sequence_id=sequence, sequence_end=True)
        for sequence in (11, 12, 13, 14):  # Triton has begun the one that was given up, and it was ended
            assert over_grpc(addresses, bob, "counts", 1, sequence_id=sequence, sequence_start=True).total == 1
        for sequence in (11, 12, 13, 14):
            over_grpc(addresses, bob, "counts", 1, sequence_id=sequence, sequence_end=True)


@pytest.mark.parametrize("way", ["json", "grpc"])
def test_sequences_that_wait_for_slots_neither_keep_others_out_nor_make_a_model_look_slow(
    shared: Callable[[float], AbstractContextManager[tuple[str, str]]], keys: tuple[Path, str, str], way: str
) -> None:
    """Twelve connections of one key, that begin and end sequences, beside a sequence of another key that runs."""
    _, alice, bob = keys
    ask = WAYS[way]
    with shared(1000.0) as addresses, ThreadPoolExecutor(12) as pool:
        assert ask(addresses, bob, "counts", 1, sequence_id=1, sequence_start=True).total == 1

        def begin_and_end(connection: int) -> None:
            for number in range(6):
                sequence = 100 * (connection + 1) + number
                # Of a key, eight may wait: for the others it is refused, and they try again.
                while ask(addresses, alice, "counts", 1, sequence_id=sequence, sequence_start=True).total is None:
                    time.sleep(0.05)
                time.sleep(0.25)
                told = ask(addresses, alice, "counts", 1, sequence_id=sequence, sequence_end=True)
                assert told.total == 2, told

        attacks = [pool.submit(begin_and_end, connection) for connection in range(12)]
        total = 1
        while not all(attack.done() for attack in attacks):
            total += 1
            assert ask(addresses, bob, "counts", 1, sequence_id=1).total == total
            time.sleep(0.1)
        for attack in attacks:
            attack.result()
        with closing(http.client.HTTPConnection(addresses[0], timeout=TIMEOUT_S)) as connection:
            connection.request("GET", "/metrics", headers={"x-api-key": bob})
            metrics = connection.getresponse().read().decode()
        limit = next(line for line in metrics.splitlines() if line.startswith('gateway_model_limit{model="counts"}'))
        assert float(limit.split()[-1]) >= 16
        ask(addresses, bob, "counts", 1, sequence_id=1, sequence_end=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_goes_on_and_ends_while_another_waits_for_a_slot_that_looked_free(
    free_triton: TritonServer, keys: tuple[Path, str, str], way: str
) -> None:
    """Another gateway's sequences have the others; there is one place, and what waits for that end is in it."""
    _, alice, bob = keys
    ask = WAYS[way]
    with (
        served(free_triton, keys[0], wait_s=1000.0) as other,
        served(free_triton, keys[0], wait_s=1000.0, places=1) as addresses,
        ThreadPoolExecutor(1) as pool,
    ):
        for sequence in (1, 2, 3):
            assert over_http(other, bob, "counts", 1, raw=False, sequence_id=sequence, sequence_start=True).total == 1
        assert ask(addresses, alice, "counts", 1, sequence_id=1, sequence_start=True).total == 1
        waiting = pool.submit(ask, addresses, alice, "counts", 1, sequence_id=2, sequence_start=True)
        time.sleep(1.0)
        assert not waiting.done()
        assert ask(addresses, alice, "counts", 1, sequence_id=1).total == 2
        assert ask(addresses, alice, "counts", 1, sequence_id=1, sequence_end=True).total == 3
        assert waiting.result().total == 1
        assert ask(addresses, alice, "counts", 1, sequence_id=2, sequence_end=True).total == 2
        for sequence in (1, 2, 3):
            over_http(other, bob, "counts", 1, raw=False, sequence_id=sequence, sequence_end=True)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("model", ["counts", "whole"])
def test_sequences_whose_clients_left_before_they_began_hold_no_slot(
    shared: Callable[[float], AbstractContextManager[tuple[str, str]]],
    keys: tuple[Path, str, str],
    model: str,
    count: int,
) -> None:
    """Whichever message of theirs is the last to be left."""
    _, alice, bob = keys
    with shared(1000.0) as addresses:
        for sequence in (1, 2, 3, 4):
            over_http(addresses, alice, model, 1, raw=False, sequence_id=sequence, sequence_start=True)

        def left(sequence: int, number: int) -> None:
            time.sleep(0.3 * number)
            first = {"sequence_start": True} if number == 0 else {}
            with pytest.raises(TimeoutError):
                over_http(addresses, bob, model, 1, raw=False, timeout_s=0.5, sequence_id=sequence, **first)

        with ThreadPoolExecutor() as pool:
            for sequence in range(10, 16):  # these wait, and their client leaves
                list(pool.map(partial(left, sequence), range(count)))
        for sequence in (1, 2, 3, 4):
            over_http(addresses, alice, model, 1, raw=False, sequence_id=sequence, sequence_end=True)
        for sequence in (21, 22, 23, 24):  # all slots are free
            begun = over_http(addresses, alice, model, 1, raw=False, sequence_id=sequence, sequence_start=True)
            assert begun.total == 1
        for sequence in (21, 22, 23, 24):
            over_http(addresses, alice, model, 1, raw=False, sequence_id=sequence, sequence_end=True)


def until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("way", ["json", "raw", "grpc"])
def test_a_sequence_stays_with_its_version_when_another_comes_to_answer(
    triton: TritonServer, keys: tuple[Path, str, str], tmp_path: Path, way: str
) -> None:
    _, alice, bob = keys
    ask = WAYS[way]
    state = tmp_path / "rollouts.db"
    with served(triton, keys[0], state=state) as addresses:
        store = Store(state)
        store.start("twice", Target("twice", "2"), Plan(step_s=3600.0), Target("twice", "1"))
        until(lambda: store.all("twice")[0].state == "running")
        time.sleep(0.6)  # a gateway looks twice a second
        for key in (alice, bob):
            assert ask(addresses, key, "twice", 1, sequence_id=7, sequence_start=True).total == 1
        store.wish("twice", "promote")
        until(lambda: store.all("twice")[0].state == "promoted")
        assert ask(addresses, alice, "twice", 1, sequence_id=8, sequence_start=True).total == 1001
        for other in ("json", "raw", "grpc"):  # whichever way it is asked
            WAYS[other](addresses, alice, "twice", 1, sequence_id=7)
        store.clear("twice")
        time.sleep(0.6)
        assert ask(addresses, alice, "twice", 1, sequence_id=7, sequence_end=True).total == 5
        assert "START" in ask(addresses, alice, "twice", 1, sequence_id=7).refused, "it has ended"
        assert ask(addresses, bob, "twice", 1, sequence_id=7, sequence_start=True).total == 1001, "begun anew"
        for key, sequence in ((alice, 8), (bob, 7)):
            assert ask(addresses, key, "twice", 1, sequence_id=sequence, sequence_end=True).total == 1002


@contextmanager
def releasing(state: Path) -> Iterator[Callable[[], None]]:
    """A rollout from the first version of "twice" to its second, and what promotes it."""
    store = Store(state)
    store.start("twice", Target("twice", "2"), Plan(step_s=3600.0), Target("twice", "1"))
    until(lambda: store.all("twice")[0].state == "running")
    time.sleep(0.6)  # a gateway looks twice a second

    def promote() -> None:
        store.wish("twice", "promote")
        until(lambda: store.all("twice")[0].state == "promoted")
        time.sleep(0.6)

    yield promote
    store.clear("twice")


@pytest.mark.parametrize("way", WAYS)
def test_slots_are_those_of_the_version_that_is_asked(
    free_triton: TritonServer, keys: tuple[Path, str, str], tmp_path: Path, way: str
) -> None:
    """Streams go to the second version all the time, by themselves; the other ways once it is promoted."""
    _, alice, bob = keys
    ask, by_number = WAYS[way], partial(over_http, raw=False)
    state = tmp_path / "rollouts.db"
    with served(free_triton, keys[0], state=state, wait_s=0.5) as addresses, releasing(state) as promote:
        for sequence in (1, 2, 3, 4):
            assert by_number(addresses, alice, "twice", 1, sequence_id=sequence, sequence_start=True).total == 1
        promote()
        for sequence in (1, 2, 3, 4):  # begun anew, where all slots are free
            assert ask(addresses, alice, "twice", 1, sequence_id=sequence, sequence_start=True).total == 1001
        assert ask(addresses, bob, "twice", 1, sequence_id=1, sequence_start=True).total == 1001
        for sequence in (1, 2):
            assert ask(addresses, alice, "twice", 1, sequence_id=sequence).total == 1002
        for sequence in (3, 4):
            assert "the sequence was ended" in ask(addresses, alice, "twice", 1, sequence_id=sequence).refused
        end = {"sequence_end": True}  # or Triton waits for it as it stops
        for sequence in (1, 2, 3, 4):
            first = by_number(addresses, alice, "twice/versions/1", 1, sequence_id=sequence, **end)
            assert first.total == 2, "nobody waited for the first version's slots"
        for key, sequence in ((alice, 1), (alice, 2), (bob, 1)):
            assert ask(addresses, key, "twice", 1, sequence_id=sequence, **end).total is not None


def test_a_stream_goes_on_with_its_sequences_across_a_promotion(
    triton: TritonServer, keys: tuple[Path, str, str], tmp_path: Path
) -> None:
    state = tmp_path / "rollouts.db"
    coming: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with served(triton, keys[0], state=state) as addresses, releasing(state) as promote:  # noqa: SIM117
        with grpc.insecure_channel(addresses[1]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            metadata = [("x-api-key", keys[1])]
            answers = stub.ModelStreamInfer(iter(coming.get, None), timeout=TIMEOUT_S, metadata=metadata)

            def ask(**more: bool) -> Told:
                coming.put(message("twice", 1, sequence_id=31, **more))
                answer = next(answers)
                return Told(refused=answer.error_message) if answer.error_message else read(answer.infer_response)

            assert ask(sequence_start=True).total == 1001
            assert ask().total == 1002
            promote()
            assert ask().total == 1003
            for way in ("json", "raw", "grpc", "stream"):
                assert WAYS[way](addresses, keys[1], "twice", 1, sequence_id=31).total, way
            assert ask(sequence_end=True).total == 1008
            coming.put(None)
            assert list(answers) == []
