"""Heads of answers: the short way's lines are those of the long way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.gateway.access.identity import ANONYMOUS, Identity, KeyRing
from serve.gateway.access.keys import Key
from serve.gateway.access.rate_limit import TokenBucket
from serve.gateway.edge.asked import Asked
from serve.gateway.edge.infer_head import MOST_FORWARDED, RETURNED, answer_lines, returned_lines, split_headers

KEY = Key("id", "name", "0" * 64)
HEADS = [
    [],
    [(b"content-type", b"a/b"), (b"server", b"secret"), (b"content-length", b"3")],
    [(b"content-type", b"a/b"), (b"inference-header-content-length", b"2"), (b"content-length", b"3")],
    [(b"content-type", b"a/b"), (b"content-type", b"c/d"), (b"content-encoding", b"gzip")],
    [(b"content-type", b"a" * 4000)],
]


@pytest.mark.parametrize("headers", HEADS)
@pytest.mark.parametrize("identity", [ANONYMOUS, Identity(KEY, TokenBucket(2.5, 7, 0.0)), Identity(KEY, None)])
def test_both_ways_write_the_same_head(identity: Identity, headers: list[tuple[bytes, bytes]]) -> None:
    returned = [header for header in headers if header[0] in RETURNED]
    for now in (0.0, 0.0, 1.7):
        if identity.bucket is not None:
            identity.bucket.take(now)
        assert returned_lines(headers, identity.limit_lines()) == answer_lines(returned, identity.limits())


def test_what_is_used_up_is_told_each_time() -> None:
    identity = Identity(replace(KEY, rate=1.0), TokenBucket(1.0, 3, 0.0))
    told = []
    for _ in range(4):
        told.append(returned_lines([], identity.limit_lines()).split(b"\r\n")[:2])
        identity.bucket.take(0.0)  # type: ignore[union-attr]
    policy = b'ratelimit-policy: "key";q=3;w=3'
    assert told == [[policy, b'ratelimit: "key";r=%d;t=%d' % (left, 3 - left)] for left in (3, 2, 1, 0)]


def test_a_header_that_can_not_be_sent_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="not a header"):
            returned_lines([(b"content-type", b"a\r\nx: y")], b"")
    assert b"a\r\n" not in returned_lines([(b"server", b"a\r\nx: y")], b"")  # not sent at all


@pytest.mark.parametrize("name", [b"content-type", b"accept-encoding", b"traceparent", b"tracestate"])
def test_what_goes_on_is_bounded_and_the_rest_of_it_goes_on(name: bytes) -> None:
    length = (b"inference-header-content-length", b"12")
    for many in ([(name, b"x" * 9000)], [(name, b"x" * 100)] * 120, [length] * 120):
        forwarded, read = split_headers([(b"tracestate", b"a=b"), *many, length, (b"accept-encoding", b"gzip")])
        assert sum(len(each) + len(value) for each, value in forwarded) <= MOST_FORWARDED + sum(map(len, length))
        assert forwarded.count(length) == 1
        assert (b"tracestate", b"a=b") in forwarded
        assert read == dict([length])


@pytest.mark.parametrize("form", [b"content-length", b"inference-header-content-length"])
def test_the_json_of_a_sequence_is_found_whatever_came_before(form: bytes) -> None:
    plain = b'{"inputs":[],"parameters":{"timeout_us_":1}}'
    others = [
        plain.replace(b"timeout_us_", b"sequence_id"),
        plain.replace(b"timeout_us_", b"\\u0073equence_id"),
        plain.replace(b"timeout_us_", b"x" * 2000 + b'":1,"sequence_id'),
    ]
    headers = [(b"content-length", b"400"), (form, b"400")]
    asked = Asked.read(b"/v2/models/m/infer", headers, KeyRing(None), 1 << 16)
    assert asked is not None
    for other in others:
        for _ in range(2):
            assert asked.is_plain(plain)
            assert asked.is_plain(plain.replace(b"timeout", b"x" * 2000))
            assert not asked.is_plain(other)
