"""How many TLS handshakes an address may begin."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.access import handshakes as module
from serve.gateway.access.handshakes import AROUND_S, AT_ONCE_S, SHARE, Handshakes

COST_S = 0.0097  # 25 a second, with what is around it; 100 at once


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_an_address_begins_as_many_as_take_a_quarter_of_a_core(clock: list[float]) -> None:
    bound = Handshakes(COST_S)
    assert sum(bound.may("10.0.0.1") for _ in range(500)) == 100
    assert bound.may("10.0.0.2"), "another's are its own"
    clock[0] = 2.0
    assert sum(bound.may("10.0.0.1") for _ in range(500)) == 50
    assert bound.refused == 850


def test_networks_of_ipv6_are_one_address_and_one_of_ipv4_has_one_spelling(clock: list[float]) -> None:
    bound = Handshakes(COST_S)
    assert sum(bound.may(f"2001:db8::{at:x}") for at in range(500)) == 100
    assert bound.may("2001:db8:1::1")
    assert sum(bound.may(host) for _ in range(100) for host in ("10.0.0.1", "::ffff:10.0.0.1")) == 100


def test_of_an_address_that_rests_nothing_is_kept(clock: list[float]) -> None:
    bound = Handshakes(COST_S)
    for at in range(1000):
        clock[0] += 0.001
        bound.may(f"10.0.{at // 256}.{at % 256}")
    assert len(bound) == 1000
    clock[0] += AT_ONCE_S
    bound.may("10.0.0.1")
    assert len(bound) == 1


def test_no_more_addresses_are_kept_than_so_many(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    monkeypatch.setattr(module, "MOST_ADDRESSES", 10)
    bound = Handshakes(COST_S)
    assert all(bound.may(f"10.0.0.{at}") for at in range(100))
    assert len(bound) == 10


def test_behind_a_proxy_one_address_has_all(clock: list[float]) -> None:
    bound = Handshakes(COST_S, bounded=False)
    assert all(bound.may("10.0.0.1") for _ in range(1000))
    assert not len(bound)


@pytest.mark.parametrize("cost_s", [1e-6, 0.0005, 0.005, 1.0, 60.0])
def test_whatever_a_handshake_costs_one_may_begin(clock: list[float], cost_s: float) -> None:
    bound = Handshakes(cost_s)
    assert bound.may("10.0.0.1")
    assert bound.cost_s > cost_s
    assert bound.rate * (cost_s + AROUND_S) == pytest.approx(SHARE)


@given(st.lists(st.floats(0, 2), min_size=1, max_size=300))
def test_over_any_time_an_address_has_its_burst_and_its_rate(pauses: list[float]) -> None:
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        bound, begun = Handshakes(0.5), 0
        for pause in pauses:
            now[0] += pause
            begun += bound.may("10.0.0.1")
            assert begun <= bound.burst + bound.rate * now[0] + 1e-6
