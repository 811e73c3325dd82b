"""What is looked at element by element leaves the event loop free: elsewhere, one at a time, and in pieces."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.grpc.request import check_message, walked_bytes
from serve.gateway.oip.checks import LONG_BYTES, Checks
from serve.gateway.oip.contract import PIECE, Contract, UnfitError, check_framing, check_range
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from tests.serve_http import in_loop

COUNT = 3 * PIECE + 5


@in_loop
async def test_what_is_long_is_checked_elsewhere_one_at_a_time_and_keys_in_turn() -> None:
    checks, here = Checks(), threading.get_ident()
    order: list[str] = []
    goes_on = threading.Event()

    def check(who: str, rest: Callable[[], object]) -> None:
        order.append(who)
        assert (threading.get_ident() == here) is (who == "short")
        rest()
        if who != "short":
            assert goes_on.wait(20)

    long = [
        asyncio.ensure_future(checks.check(who, LONG_BYTES + 1, partial(check, who)))
        for who in ("alice", "alice", "alice", "bob")
    ]
    while not order:  # noqa: ASYNC110 - what is waited for is no event
        await asyncio.sleep(0.001)
    await checks.check("carol", LONG_BYTES, partial(check, "short"))
    long[1].cancel()  # its client has left
    assert order == ["alice", "short"]
    goes_on.set()
    await asyncio.gather(*long, return_exceptions=True)
    assert order == ["alice", "short", "bob", "alice"]


@in_loop
async def test_who_leaves_lets_the_next_begin_only_once_its_own_is_over() -> None:
    checks, goes_on = Checks(), threading.Event()
    running: list[int] = []

    def check(_: Callable[[], object]) -> None:
        running.append(1)
        assert len(running) == 1
        assert goes_on.wait(20)
        time.sleep(0.01)
        running.pop()

    first, second = (asyncio.ensure_future(checks.check("a", LONG_BYTES + 1, check)) for _ in range(2))
    while not running:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.sleep(0.01)
    goes_on.set()
    await second
    assert first.cancelled()


@pytest.mark.parametrize("fits", [True, False])
def test_elements_are_walked_in_pieces(fits: bool) -> None:
    rests: list[None] = []
    raw = b"\1\0\0\0x" * COUNT
    numbers = [1] * (COUNT - 1) + [1 if fits else 1000]
    checks = (
        partial(check_framing, "t", raw if fits else raw[:-1], COUNT),
        partial(check_range, "INT8", numbers),
    )
    for check in checks:
        rests.clear()
        try:
            check(lambda: rests.append(None))
        except UnfitError:
            assert not fits
        else:
            assert fits
        assert len(rests) >= 3


def test_raw_texts_over_grpc_are_walked_in_pieces() -> None:
    contract = Contract.of(ModelMetadata("m", ("1",), (TensorMetadata("t", "BYTES", (-1,)),), (), batched=False))
    message = messages.ModelInferRequest(model_name="m", inputs=[{"name": "t", "datatype": "BYTES", "shape": [COUNT]}])
    raws, rests = [memoryview(b"\0\0\0\0" * COUNT)], list[None]()
    check_message(message, contract, lambda: rests.append(None), shared_memory=False, raws=raws)
    assert len(rests) >= 3
    assert walked_bytes(message, message.ByteSize(), raws) >= 4 * COUNT
    message.inputs[0].contents.bytes_contents.extend([b""] * COUNT)
    assert walked_bytes(message, message.ByteSize(), []) >= 2 * COUNT


def test_raw_numbers_are_not_walked() -> None:
    message = messages.ModelInferRequest(
        model_name="m",
        inputs=[{"name": "t", "datatype": "FP32", "shape": [10_000]}],
        raw_input_contents=[bytes(40_000)],
    )
    assert walked_bytes(message, message.ByteSize(), None) < 100
