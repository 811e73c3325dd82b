"""TLS handshakes that are under way: bounded in all, and shared by addresses."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.grpc.clients import Greetings

Client = tuple[str, int]


def silent(address: str, count: int) -> set[Client]:
    return {(address, port) for port in range(count)}


def over(connected: set[Client], most: int = 10) -> set[Client]:
    return Greetings(set, most, 60.0).over(connected)


@pytest.mark.parametrize("others", [1, 3, 5])
def test_an_address_with_many_loses_its_own_and_nobody_elses(others: int) -> None:
    honest = silent("10.0.0.1", others)
    cut = over(honest | silent("10.0.0.2", 500))
    assert not cut & honest
    assert len(cut) == 500 - (10 - others)


def test_networks_of_ipv6_are_one_address() -> None:
    one = {(f"2001:db8::{at:x}", at) for at in range(100)}
    assert not over({("2001:db8:1::1", 1)} | one) - one


def test_of_more_addresses_than_may_greet_the_oldest_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    greetings, now = Greetings(set, 10, 60.0), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    first = {(f"10.0.0.{at}", 1) for at in range(10)}
    assert not greetings.over(first)
    now[0] = 1.0
    later = {(f"10.0.1.{at}", 1) for at in range(4)}
    cut = greetings.over(first | later)
    assert len(cut) == 4
    assert cut <= first


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 40))
def test_no_more_than_so_many_stay_and_who_has_fewer_keeps_all_that_another_keeps(counts: list[int], most: int) -> None:
    connected = set().union(*(silent(f"10.0.0.{at}", count) for at, count in enumerate(counts)))
    stay = connected - over(connected, most)
    assert len(stay) <= most
    assert len(stay) > min(len(connected), most) - len(counts)
    kept = sorted((count, sum(client[0] == f"10.0.0.{at}" for client in stay)) for at, count in enumerate(counts))
    if len(counts) <= most:
        assert all(less[1] <= more[1] for less, more in itertools.pairwise(kept))
