"""A long infer request is taken apart without a copy of its tensors, and read as protobuf reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.errors import BadRequestError
from serve.gateway.grpc.wire import MOST_FIELDS, head_of, split, whole


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(0, 3))
def test_head_and_raw_inputs_are_those_of_the_message(raws: list[bytes], inputs: int) -> None:
    asked = messages.ModelInferRequest(
        model_name="m", id="7", inputs=[{"name": str(i), "shape": (i, 2**40)} for i in range(inputs)],
        raw_input_contents=raws,
    )  # fmt: skip
    head, found = split(asked.SerializeToString())
    assert [bytes(each) for each in found] == raws
    read = messages.ModelInferRequest.FromString(head)
    again = messages.ModelInferRequest.FromString(whole(read, found))
    assert again == asked
    del asked.raw_input_contents[:]
    assert read == asked


def test_a_short_one_is_left_to_protobuf() -> None:
    body = messages.ModelInferRequest(raw_input_contents=[b"abc"]).SerializeToString()
    assert head_of(body) == (body, None)
    long = messages.ModelInferRequest(raw_input_contents=[bytes(100_000)]).SerializeToString()
    head, raws = head_of(long)
    assert (head, [len(each) for each in raws or ()]) == (b"", [100_000])


@pytest.mark.parametrize(
    "body",
    [
        b"\x3a\x05abc", b"\x3a", b"\x0b", b"\x3d\x00", b"\xff" * 12, b"\xba\x80\x80\x80\x10\x01a",
        b"\x3a\x00" * (MOST_FIELDS + 1),
    ],
    ids=["cut short", "no length", "a group", "four bytes", "no number", "a tag of 33 bits", "millions of fields"],
)  # fmt: skip
def test_what_can_be_read_in_two_ways_or_takes_long_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="can't be read"):
        split(body)
