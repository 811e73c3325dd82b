"""Requests that are joined get the answers that they would have got alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.access.keys import add_key
from serve.gateway.access.memory import MemoryFullError
from serve.gateway.oip.protocol import BINARY_HEADER, Message, build_request, parse_request, parse_response
from serve.gateway.oip.tensors import DATATYPES, Tensor, object_array, to_raw
from serve.gateway.settings import ModelSettings, Settings
from serve.gateway.upstream.coalesce import Coalescer
from serve.gateway.upstream.joined import Form, split
from serve.http.client import ExchangeError, Pool, Response
from tests.serve_http import Received, answer, gateway, in_loop, scripted_server

pytestmark = pytest.mark.clock

INFER = b"/v2/models/m/infer"


def tensor(name: str, datatype: str, batch: int, inner: tuple[int, ...], seed: int) -> Tensor:
    draw = np.random.default_rng(seed)
    shape = (batch, *inner)
    if datatype == "BYTES":
        texts = [bytes(draw.integers(97, 123, draw.integers(0, 9), dtype=np.uint8)) for _ in range(int(np.prod(shape)))]
        return Tensor(name, datatype, object_array(texts, name, shape))
    return Tensor(name, datatype, draw.integers(0, 2, shape).astype(DATATYPES[datatype]))


def reply(outputs: list[Tensor]) -> Response:
    """An answer in the binary form, as Triton writes one."""
    raw = [to_raw(each) for each in outputs]
    head = orjson.dumps({"model_name": "m", "model_version": "1", "outputs": [
        {"name": each.name, "datatype": each.datatype, "shape": each.shape, "parameters": {"binary_data_size": len(part)}}
        for each, part in zip(outputs, raw, strict=True)
    ]})  # fmt: skip
    body = b"".join((head, *raw))
    return Response(200, [(BINARY_HEADER, b"%d" % len(head))], body, len(body))


KINDS = st.sampled_from(["FP32", "INT64", "BOOL", "UINT8", "FP16", "BF16"])
SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)


@given(st.lists(st.tuples(KINDS, SHAPES), min_size=1, max_size=3), st.integers(1, 3), st.integers(2, 5))
def test_what_is_joined_can_be_told_apart_again(
    kinds: list[tuple[str, tuple[int, ...]]], batch: int, count: int
) -> None:
    several = [
        [tensor(f"t{i}", kind, batch, inner, seed=10 * number + i) for i, (kind, inner) in enumerate(kinds)]
        for number in range(count)
    ]
    together = [
        Tensor(parts[0].name, parts[0].datatype, np.concatenate([each.data for each in parts]))
        for parts in zip(*several, strict=True)
    ]
    parts = split(reply(together), count, batch)
    assert parts is not None
    for outputs, part in zip(several, parts, strict=True):
        found = parse_response(part.body, int(part.header(BINARY_HEADER) or b"0"))
        for mine, theirs in zip(outputs, found.outputs, strict=True):
            assert (mine.name, mine.datatype) == (theirs.name, theirs.datatype)
            assert np.array_equal(mine.data, theirs.data)

    requests = [build_request(each) for each in several]
    if len({each.body[: each.header_length] for each in requests}) > 1:
        return  # BYTES of other lengths: they would not meet
    form = Form.read(requests[0].body[: requests[0].header_length])
    assert form is not None
    body, length = form.joined(count, [each.body[each.header_length or 0 :] for each in requests])
    inputs = parse_request(body, length)
    for mine, theirs in zip(together, inputs, strict=True):
        if mine.datatype != "BYTES":
            assert np.array_equal(mine.data, theirs.data)


INPUT: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
BINARY = {"binary_data_output": True}


@pytest.mark.parametrize(
    ("request_", "joins"),
    [
        ({"inputs": [INPUT], "parameters": BINARY}, True),
        ({"inputs": [INPUT], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}, True),
        ({"inputs": [INPUT], "id": "", "parameters": BINARY}, True),
        ({"inputs": [INPUT], "id": "7", "parameters": BINARY}, False),
        ({"inputs": [INPUT]}, False),
        ({"inputs": [INPUT], "parameters": {**BINARY, "timeout": 7}}, False),
        ({"inputs": [INPUT], "parameters": {**BINARY, "sequence_id": 7}}, False),
        ({"inputs": [INPUT], "outputs": [{"name": "y"}]}, False),
        ({"inputs": [INPUT], "outputs": [{"name": "y", "parameters": {"binary_data": True, "classification": 3}}]}, False),
        ({"inputs": [{**INPUT, "data": [1, 2, 3, 4]}], "parameters": BINARY}, False),
        ({"inputs": [{**INPUT, "parameters": {}}], "parameters": BINARY}, False),
        ({"inputs": [{**INPUT, "parameters": {"shared_memory_region": "r"}}], "parameters": BINARY}, False),
        ({"inputs": [INPUT, {**INPUT, "name": "z", "shape": [2, 4]}], "parameters": BINARY}, False),
        ({"inputs": [{**INPUT, "shape": []}], "parameters": BINARY}, False),
        ({"inputs": [{**INPUT, "shape": [True]}], "parameters": BINARY}, False),
        ({"inputs": "x", "parameters": BINARY}, False),
        ([1], False),
    ],
)  # fmt: skip
def test_only_plain_binary_requests_are_joined(request_: Any, joins: bool) -> None:
    assert (Form.read(orjson.dumps(request_)) is not None) is joins


@given(st.binary(max_size=40))
def test_rubbish_is_left_to_triton(head: bytes) -> None:
    assert Form.read(head) is None


def doubling(taken: list[int], slow_s: float = 0.0) -> Any:
    """A Triton that doubles x, and fails where a value is 13."""

    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            tensors = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1]}], "outputs": []}
            known = {"max_batch_size": 8} if request.target.endswith("/config") else {"name": "m", **tensors}
            writer.write(answer(orjson.dumps(known)))
            return
        length = int(request.headers["inference-header-content-length"])
        (x,) = parse_request(request.body, length)
        taken.append(len(x.data))
        await asyncio.sleep(slow_s)
        if (x.data == 13).any():
            writer.write(answer(b'{"error": "13"}', "500 Internal Server Error"))
            return
        response = reply([Tensor("y", "FP32", x.data * 2)])
        own = f"inference-header-content-length: {int(response.header(BINARY_HEADER) or 0)}"
        writer.write(answer(response.body, "200 OK", own))

    return respond


def message(value: float) -> Message:
    return build_request([Tensor("x", "FP32", np.array([[value]], np.float32))])


@in_loop
async def test_requests_of_one_form_become_few_and_each_gets_its_own_rows(tmp_path: Path) -> None:
    taken: list[int] = []
    async with scripted_server(doubling(taken, 0.02)) as server:
        settings = Settings(upstream=(server.url,), port=0, coalesce_s=0.01, state=tmp_path / "none.db")
        async with gateway(settings) as address:
            pool = Pool(address)

            async def ask(value: float) -> Response:
                sent = message(value)
                return await pool.request(b"POST", INFER, sent.headers, sent.body)

            answers = await asyncio.gather(*map(ask, map(float, range(30))))
            assert [each.status for each in answers] == [500 if value == 13 else 200 for value in range(30)]
            for value, each in enumerate(answers):
                if each.status == 200:
                    (y,) = parse_response(each.body, int(each.header(BINARY_HEADER) or 0)).outputs
                    assert y.data.tolist() == [[2.0 * value]]
            assert max(taken) > 1
            assert max(taken) <= 8
            assert len(taken) < 26
            page = (await pool.request(b"GET", b"/metrics")).body.decode()
            counts = dict(line.split() for line in page.splitlines() if line.startswith("gateway_coalesced"))
            together = float(counts["gateway_coalesced_requests_total"])
            assert together >= 2 * float(counts["gateway_coalesced_batches_total"]) > 0
            await pool.close()


@in_loop
async def test_a_client_that_leaves_takes_nobody_with_it(tmp_path: Path) -> None:
    taken: list[int] = []
    async with scripted_server(doubling(taken, 0.2)) as server:
        settings = Settings(
            upstream=(server.url,), port=0, models={"m": ModelSettings(coalesce_s=0.01)}, state=tmp_path / "none.db"
        )
        async with gateway(settings) as address:
            pool = Pool(address)
            sent = message(1.0)
            asked = [asyncio.create_task(pool.request(b"POST", INFER, sent.headers, sent.body)) for _ in range(6)]
            await asyncio.sleep(0.1)
            asked[0].cancel()
            asked[3].cancel()
            found = await asyncio.gather(*asked, return_exceptions=True)
            statuses = [each.status for each in found if isinstance(each, Response)]
            assert statuses == [200] * 4
            await pool.close()


@in_loop
async def test_without_triton_each_is_told(tmp_path: Path) -> None:
    async def refuse(*_: Any, who: bytes | None) -> Response:
        raise ConnectionResetError("gone")

    coalescer = Coalescer(refuse)
    sent = message(1.0)
    ask = [coalescer.infer(INFER, sent.headers, sent.body, 5.0, most=8, wait_s=0.001, who=b"") for _ in range(3)]
    found = await asyncio.gather(*ask, return_exceptions=True)
    assert ["gone" in str(each) for each in found] == [True] * 3
    await coalescer.close()


class Asked:
    """A Triton that takes only so many items at once, or has room for no answer.

    Attributes:
        who: the keys of requests, and their items.
    """

    def __init__(self, most: int, err: Exception) -> None:
        self.who: list[tuple[bytes | None, int]] = []
        self._most, self._err = most, err

    async def __call__(
        self, _path: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes, _timeout_s: float, /, *,
        who: bytes | None,
    ) -> Response:  # fmt: skip
        (x,) = parse_request(body, int(dict(headers)[BINARY_HEADER]))
        self.who.append((who, len(x.data)))
        if len(x.data) > self._most:
            raise self._err
        return reply([Tensor("y", "FP32", x.data * 2)])


async def together(coalescer: Coalescer, keys: list[bytes]) -> list[Response | BaseException]:
    messages = [message(float(number)) for number in range(len(keys))]
    asked = [
        coalescer.infer(INFER, sent.headers, sent.body, 5.0, most=8, wait_s=0.001, who=key)
        for sent, key in zip(messages, keys, strict=True)
    ]
    found = await asyncio.gather(*asked, return_exceptions=True)
    await coalescer.close()
    return found


@in_loop
async def test_who_has_little_time_left_cuts_nobody_else_s() -> None:
    given: list[float] = []

    async def slow(_path: bytes, _headers: Any, _body: bytes, timeout_s: float, /, *, who: bytes | None) -> Response:
        given.append(timeout_s)
        await asyncio.sleep(0.2)
        return reply([Tensor("y", "FP32", np.zeros((3, 1), np.float32))])

    coalescer = Coalescer(slow, across_keys=True)
    sent = message(1.0)
    asked = [
        coalescer.infer(INFER, sent.headers, sent.body, seconds, most=8, wait_s=0.001, who=key)
        for seconds, key in ((0.05, b"hurried"), (30.0, b"b"), (30.0, b"c"))
    ]
    hurried, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(hurried, ExchangeError)
    assert hurried.kind == "timeout"
    assert [each.status for each in others if isinstance(each, Response)] == [200, 200]
    assert given == [pytest.approx(30.0, abs=1.0)]
    await coalescer.close()


@pytest.mark.parametrize("err", [MemoryFullError(1), ExchangeError("too_large", "too long")])
@in_loop
async def test_an_answer_that_has_no_room_is_asked_for_one_by_one(err: Exception) -> None:
    triton = Asked(1, err)
    found = await together(Coalescer(triton), [b"k"] * 4)
    assert [each.status for each in found if isinstance(each, Response)] == [200] * 4
    assert triton.who == [(b"k", 4), *[(b"k", 1)] * 4]


@in_loop
async def test_what_is_too_long_together_is_not_asked_together_again() -> None:
    triton = Asked(1, ExchangeError("too_large", "too long"))
    coalescer = Coalescer(triton)
    for _ in range(3):
        await together(coalescer, [b"k"] * 4)
    assert [items for _, items in triton.who if items > 1] == [4, 2]


@pytest.mark.parametrize("across", [False, True])
@in_loop
async def test_each_key_has_its_own_answers_counted(across: bool) -> None:
    triton = Asked(1, MemoryFullError(1))
    await together(Coalescer(triton, across_keys=across), [b"a", b"b", b"a", b"b"])
    joined = [(None, 4)] if across else [(b"a", 2), (b"b", 2)]
    assert sorted(triton.who, key=str) == sorted([*joined, *[(b"a", 1), (b"b", 1)] * 2], key=str)


@pytest.mark.parametrize("err", [MemoryFullError(1), ValueError("of the gateway's own")])
@in_loop
async def test_what_is_no_failure_of_the_exchange_is_handed_on_as_it_is(err: Exception) -> None:
    assert await together(Coalescer(Asked(0, err)), [b"k"] * 3) == [err] * 3


@in_loop
async def test_joined_answers_beyond_a_key_s_room_are_503_and_not_502(tmp_path: Path) -> None:
    bound, own = 4 << 20, 400_000  # of which a key, and an answer, has half: four answers and a bit

    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            tensors = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1]}], "outputs": []}
            known = {"max_batch_size": 8} if request.target.endswith("/config") else {"name": "m", **tensors}
            writer.write(answer(orjson.dumps(known)))
            return
        (x,) = parse_request(request.body, int(request.headers["inference-header-content-length"]))
        await asyncio.sleep(0.02)
        response = reply([Tensor("y", "FP32", np.zeros((len(x.data), own // 4), np.float32))])
        head = f"inference-header-content-length: {int(response.header(BINARY_HEADER) or 0)}"
        writer.write(answer(response.body, "200 OK", head))

    path = tmp_path / "keys.json"
    secret = add_key(path, "one")[0]
    async with scripted_server(respond) as server:
        settings = Settings(
            upstream=(server.url,), port=0, coalesce_s=0.02, keys=path, memory_bytes=bound, state=tmp_path / "none.db"
        )
        async with gateway(settings) as address:
            pool = Pool(address)
            sent = message(1.0)
            headers = [*sent.headers, (b"x-api-key", secret.encode())]
            found = await asyncio.gather(*(pool.request(b"POST", INFER, headers, sent.body) for _ in range(16)))
            assert {each.status for each in found} <= {200, 503}, [each.body[:200] for each in found]
            assert sum(each.status == 200 for each in found) >= 4
            assert all(each.header(b"retry-after") for each in found if each.status == 503)
            await pool.close()


def test_an_answer_whose_bytes_are_not_its_shape_s_is_not_split() -> None:
    whole = reply([Tensor("y", "FP32", np.zeros((4, 2), np.float32))])
    assert split(whole, 2, 2) is not None
    length = int(whole.header(BINARY_HEADER) or b"0")
    told = orjson.loads(whole.body[:length])
    for changes, tail in (
        ({"shape": [4, 3]}, whole.body[length:]),
        ({"parameters": {"binary_data_size": 24}}, whole.body[length:-8]),
        ({"datatype": "BYTES"}, whole.body[length:]),
    ):
        head = orjson.dumps({**told, "outputs": [{**told["outputs"][0], **changes}]})
        body = head + tail
        assert split(Response(200, [(BINARY_HEADER, b"%d" % len(head))], body, len(body)), 2, 2) is None


class Texts:
    """A Triton whose model gives each text back, a batch of them at a time."""

    def __init__(self, datatype: str) -> None:
        self.datatype = datatype
        self.most = 0

    async def __call__(self, request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "GET":
            shape = {"datatype": self.datatype, "shape": [-1, 1]}
            metadata = {"name": "m", "inputs": [{"name": "x", **shape}], "outputs": [{"name": "y", **shape}]}
            known = {"max_batch_size": 64} if request.target.endswith("/config") else metadata
            writer.write(answer(orjson.dumps(known)))
            return
        length = int(request.headers["inference-header-content-length"])
        try:
            (x,) = parse_request(request.body, length)
        except ValueError as err:
            writer.write(answer(orjson.dumps({"error": str(err)}), "400 Bad Request"))
            return
        self.most = max(self.most, len(x.data))
        await asyncio.sleep(0.01)
        response = reply([Tensor("y", x.datatype, x.data)])
        own = f"inference-header-content-length: {int(response.header(BINARY_HEADER) or 0)}"
        writer.write(answer(response.body, "200 OK", own))


@in_loop
async def test_one_client_s_broken_texts_do_not_move_the_others(tmp_path: Path) -> None:
    """Two texts whose lengths lie: together they are as long as they should be, and shift all that follow."""
    triton = Texts("BYTES")
    async with scripted_server(triton) as server:
        settings = Settings(upstream=(server.url,), port=0, coalesce_s=0.01, state=tmp_path / "none.db")
        async with gateway(settings) as address:
            pool = Pool(address)

            async def good(number: int) -> bool:
                text = b"%08d" % number
                sent = build_request([Tensor("x", "BYTES", object_array([text], "x", (1, 1)))])
                got = await pool.request(b"POST", INFER, sent.headers, sent.body)
                (y,) = parse_response(got.body, int(got.header(BINARY_HEADER) or 0)).outputs
                return bool(got.status == 200 and y.data.tolist() == [[text]])

            async def evil(raw: bytes) -> None:
                sent = build_request([Tensor("x", "BYTES", object_array([b"x" * 8], "x", (1, 1)))])
                await pool.request(b"POST", INFER, sent.headers, sent.body[:-12] + raw)

            swallows = (20).to_bytes(4, "little") + b"x" * 8  # the text behind it
            two = bytes(4) + (4).to_bytes(4, "little") + b"x" * 4

            right = []
            for turn in range(10):
                found = await asyncio.gather(
                    *(good(100 * turn + i) if i % 2 else evil(two if i % 4 else swallows) for i in range(40))
                )
                right += [each for each in found if each is not None]
            assert right == [True] * 200
            await pool.close()


@pytest.mark.parametrize("together", [False, True])
@in_loop
async def test_requests_of_two_keys_go_together_only_where_that_is_set(tmp_path: Path, together: bool) -> None:
    path = tmp_path / "keys.json"
    secrets = [add_key(path, name)[0] for name in ("one", "two", "three", "four")]
    triton = Texts("FP32")
    async with scripted_server(triton) as server:
        settings = Settings(
            upstream=(server.url,), port=0, coalesce_s=0.02, coalesce_keys=together, keys=path,
            state=tmp_path / "none.db",
        )  # fmt: skip
        async with gateway(settings) as address:
            pool = Pool(address)

            async def ask(value: int) -> bool:
                sent = message(float(value))
                key = (b"x-api-key", secrets[value % 4].encode())
                got = await pool.request(b"POST", INFER, [*sent.headers, key], sent.body)
                (y,) = parse_response(got.body, int(got.header(BINARY_HEADER) or 0)).outputs
                return bool(y.data.tolist() == [[float(value)]])

            for _ in range(10):  # no more than ten of a key are ever there at once
                assert all(await asyncio.gather(*map(ask, range(40))))
            assert (triton.most > 10) is together
            await pool.close()
