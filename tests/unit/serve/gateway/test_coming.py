"""What connections bring counts before anybody reads it, and who has too much of it loses the most of it."""

from __future__ import annotations

import pytest

from serve.gateway.access.footprint import MIB
from serve.gateway.access.long_work import LONG_BYTES, LongWork
from serve.gateway.access.memory import Memory
from serve.gateway.grpc.brought import Client
from serve.gateway.grpc.coming import Coming

ONE, TWO = ("127.0.0.1", 1), ("127.0.0.1", 2)
PEER, OTHER = "ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2"


def test_it_counts_until_it_is_read_or_its_call_is_over() -> None:
    memory = Memory(64 * MIB)
    coming = Coming(memory)
    assert not coming.some
    end = coming.calls(PEER, "alice")
    assert coming.some
    assert coming.count({ONE: 3 * MIB}) == set()
    assert memory.used == 3 * MIB - 512  # its headers
    coming.moved(PEER, 2 * MIB)
    assert memory.used == MIB - 512
    coming.count({ONE: 3 * MIB})
    assert memory.used < MIB
    end(None)
    assert not memory.used
    assert not coming.some


def test_messages_that_are_read_between_looks_count_for_nothing() -> None:
    memory = Memory(64 * MIB)
    coming = Coming(memory)
    brought = 0
    coming.calls(PEER, "alice")
    for _ in range(1000):  # with the frames' own bytes, which must not add up
        for _ in range(5):
            brought += MIB + MIB // 1000
            coming.moved(PEER, MIB)
        assert coming.count({ONE: brought}) == set()
        assert not memory.used


def test_calls_one_after_the_other_count_for_nothing_when_they_are_over() -> None:
    memory = Memory(64 * MIB)
    coming = Coming(memory)
    brought = 0
    for _ in range(100):
        end = coming.calls(PEER, "alice")
        brought += MIB
        coming.count({ONE: brought})
        assert memory.used > MIB // 2
        end(None)  # refused while its message came
        assert not memory.used
    coming.count({ONE: brought})
    coming.count({})
    coming.calls(PEER, "bob")  # another connection, of the same port
    coming.count({ONE: 1024})
    assert memory.used < 1024


@pytest.mark.parametrize("read", [True, False])
def test_short_calls_beside_long_ones_free_nothing_of_theirs(read: bool) -> None:
    memory = Memory(64 * MIB)
    coming = Coming(memory)
    for _ in range(40):
        coming.calls(PEER, "alice")  # their messages never end
    brought = 0
    cut: set[Client] = set()
    while not cut:
        brought += MIB
        for _ in range(100):
            brought += 300
            end = coming.calls(PEER, "alice")
            if read:
                coming.moved(PEER, 200)
            end(None)
        cut = coming.count({ONE: brought})
    assert cut == {ONE}
    assert brought < 40 * MIB


def test_a_caller_with_too_much_loses_the_connections_with_the_most() -> None:
    memory = Memory(64 * MIB)
    coming = Coming(memory)
    coming.calls(PEER, "alice")
    coming.calls(OTHER, "alice")
    assert coming.count({ONE: 14 * MIB, TWO: 18 * MIB}) == set()
    assert coming.count({ONE: 14 * MIB, TWO: 24 * MIB}) == {TWO}


def test_over_the_bound_the_caller_with_the_most_is_cut_and_not_another() -> None:
    memory = Memory(64 * MIB)
    coming = Coming(memory)
    coming.calls(PEER, "alice")
    coming.calls(OTHER, "bob")
    memory.take(50 * MIB, small=False)  # others'
    assert coming.count({ONE: 4 * MIB, TWO: 9 * MIB}) == set()
    assert coming.count({ONE: 4 * MIB, TWO: 12 * MIB}) == {TWO}


@pytest.mark.parametrize(("calls", "known"), [(3, True), (5, False)])
def test_who_has_long_messages_is_known_by_what_comes_of_them_before_one_is_whole(calls: int, known: bool) -> None:
    """Of so many bytes for so few calls, one is long at least; short ones never come to as much, however many."""
    work = LongWork()
    coming = Coming(Memory(64 * MIB), work)
    for number in range(calls):
        coming.calls(OTHER if number else PEER, "alice")
    coming.calls("ipv4:127.0.0.1:3", "bob")
    coming.count({ONE: 2 * LONG_BYTES, TWO: 2 * LONG_BYTES, ("127.0.0.1", 3): LONG_BYTES // 2})
    assert work.knows("alice") is known
    assert not work.knows("bob")
