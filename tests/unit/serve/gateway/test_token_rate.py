"""Tokens a minute: what is estimated, what is settled, and how it is told."""

from __future__ import annotations

import random

import pytest

from serve.gateway.access.token_rate import TokenRate


def test_texts_count_by_their_bytes_until_the_model_has_read_them() -> None:
    rate = TokenRate(1000, now=0.0)
    assert rate.estimate([400, 400]) == 204
    assert rate.take(204, 0.0) == 0.0
    rate.settle(204, 104, [400, 400])
    assert rate.fields(0.0)[1] == (b"x-ratelimit-remaining-tokens", b"896")


def test_what_is_asked_again_counts_as_much_as_such_texts_came_to() -> None:
    rate = TokenRate(1000, now=0.0)
    rate.settle(0, 402, [400])  # a token for each byte
    assert rate.estimate([400]) == 402
    for _ in range(100):
        rate.settle(0, 102, [400])
    assert rate.estimate([400]) in (102, 103)
    rate.settle(0, 12, [4000])  # cut, as it was too long
    assert rate.estimate([400]) >= 102


def test_what_was_not_begun_costs_nothing() -> None:
    rate = TokenRate(1000, now=0.0)
    assert rate.take(900, 0.0) == 0.0
    rate.give_back(900)
    assert rate.take(1000, 0.0) == 0.0


def test_what_was_estimated_too_low_is_owed() -> None:
    rate = TokenRate(60, now=0.0)
    assert rate.take(30, 0.0) == 0.0
    rate.settle(30, 120, [120])
    assert rate.fields(0.0) == [
        (b"x-ratelimit-limit-tokens", b"60"),
        (b"x-ratelimit-remaining-tokens", b"0"),
        (b"x-ratelimit-reset-tokens", b"2m0s"),
    ]
    assert rate.take(1, 0.0) == pytest.approx(61.0)
    assert rate.take(1, 61.5) == 0.0


@pytest.mark.parametrize(("of_a_byte", "most"), [(0.05, 1.0), (0.25, 1.0), (1.0, 4.0)])
def test_many_at_a_time_come_to_the_rate_over_any_time_and_to_little_more_at_once(
    of_a_byte: float, most: float
) -> None:
    """Requests of any size, as many at a time as the rate lets through, each answered up to ten seconds later.

    Of texts with a token for each byte, as none has more by much, so many minutes' worth may be read beyond the rate,
    once: those that went before the first of them was answered.
    """
    draw, per_minute, until = random.Random(7), 6000, 600.0
    rate = TokenRate(per_minute, now=0.0)
    under_way: list[tuple[float, int, int]] = []
    now, read = 0.0, 0
    while now < until:
        for each in [each for each in under_way if each[0] <= now]:
            under_way.remove(each)
            _, taken, size = each
            tokens = 2 + round(of_a_byte * size)
            rate.settle(taken, tokens, [size])
            read += tokens
        for _ in range(20):  # clients that ask again at once
            size = draw.randint(1, 4000)
            taken = rate.estimate([size])
            if taken <= per_minute and not rate.take(taken, now):
                under_way.append((now + draw.uniform(0, 10), taken, size))
        assert read <= per_minute * (most + now / 60) + 1
        now += 0.1
    assert read >= 0.8 * per_minute * until / 60, "what may be read is"


@pytest.mark.parametrize(
    ("spent", "told"), [(0, b"0ms"), (1, b"10ms"), (90, b"900ms"), (150, b"1.5s"), (6000, b"1m0s"), (5999, b"1m0s")]
)
def test_the_reset_is_told_as_openai_tells_it(spent: int, told: bytes) -> None:
    rate = TokenRate(6000, now=0.0)
    rate.take(spent, 0.0)
    assert dict(rate.fields(0.0))[b"x-ratelimit-reset-tokens"] == told
