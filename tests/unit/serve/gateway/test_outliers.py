"""Outlier detection: which of several servers is left alone for a model, for how long, and how it comes back."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from serve.gateway.upstream.balancer import Balancer, scope_of
from serve.gateway.upstream.ejections import (
    BASE_EJECTION_TIME_S,
    MAX_EJECTION_TIME_S,
    MIN_WEIGHT,
    MOST_KEYS,
    SLOW_START_S,
    State,
)
from serve.gateway.upstream.outliers import INTERVAL_S, Outliers, Ticket, Verdict
from serve.http.client import ExchangeError
from tests.serve_http import Received, Scripted
from tests.serve_http import answer as answering
from tests.unit.serve.gateway.test_balancer import between
from tests.unit.serve.gateway.test_upstream import INFER

pytestmark = pytest.mark.clock

CLIENTS = 16
KEY, OTHER, THIRD = "key", "other", "third"


async def good(request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.005)
    writer.write(answering(b"ok"))


async def failing(request: Received, writer: asyncio.StreamWriter) -> None:
    """Its models fail at once; the server itself is well."""
    if request.method == "POST":
        writer.write(answering(b'{"error":"no memory"}', "500 Internal Server Error"))
    else:
        writer.write(answering(b""))


async def load(balancer: Balancer, requests: int, target: bytes = INFER) -> Counter[int]:
    """Closed-loop clients; answers by status."""
    seen: Counter[int] = Counter()

    async def client() -> None:
        for _ in range(requests // CLIENTS):
            seen[(await balancer.exchange(b"POST", target, body=b"{}")).status] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return seen


@pytest.mark.parametrize("others", [1, 2])
def test_a_server_that_fails_at_once_gets_next_to_nothing(others: int) -> None:
    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        seen = await load(balancer, 3200)
        assert seen[500] < 3 * CLIENTS, seen

    between([failing, *[good] * others], check)


class Fleet:
    """Hosts by name, their records, and a clock."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self.now = 0.0
        self.ejections: list[tuple[str, str]] = []
        self.outliers: Outliers[str] = Outliers("m", 0.0, lambda host, kind: self.ejections.append((host, kind)))

    def begin(self, host: str, who: str = KEY, *, trial: bool = False) -> Ticket:
        return self.outliers.begin(host, who, self.now, trial=trial)

    def answers(
        self, host: str, *verdicts: Verdict, who: str = KEY, trial: bool = False, begun: Ticket | None = None
    ) -> None:
        for verdict in verdicts:
            ticket = begun or self.begin(host, who, trial=trial)
            self.outliers.note(host, verdict, ticket, now=self.now, hosts=self.hosts)

    def state(self, host: str, who: str = KEY) -> State:
        return self.outliers.of(host).state(self.now, who)

    def seconds(self, host: str, who: str = KEY) -> float:
        """How long it still is ejected for a key."""
        return max(each.until - self.now if each.out else 0.0 for each in self.outliers.of(host).ejections(who))


GOOD, BAD, LOST = Verdict.GOOD, Verdict.SERVER_ERROR, Verdict.GATEWAY_FAILURE


def test_consecutive_failures_eject_and_anything_good_between_them_does_not() -> None:
    fleet = Fleet("a", "b")
    fleet.answers("a", *([BAD] * 4 + [GOOD]) * 20)
    fleet.answers("b", *([LOST, LOST, GOOD] * 20))
    assert not fleet.ejections
    fleet = Fleet("a", "b")
    fleet.answers("b", *[GOOD] * 5)
    fleet.answers("a", *[BAD] * 5)
    assert fleet.ejections == [("a", "consecutive_5xx")]
    fleet = Fleet("a", "b")
    fleet.answers("a", LOST, LOST, LOST)
    assert fleet.ejections == [("a", "consecutive_gateway_failure")]


def test_what_a_client_ended_says_nothing() -> None:
    fleet = Fleet("a", "b")
    fleet.answers("a", *[Verdict.NOTHING] * 100)
    fleet.answers("a", *[BAD, Verdict.NOTHING] * 4)
    assert not fleet.ejections
    fleet.answers("a", BAD)  # nor does it forgive
    assert fleet.ejections == [("a", "consecutive_5xx")]


def test_ten_lost_at_once_eject_for_one_base_time() -> None:
    fleet = Fleet("a", "b")
    before = fleet.begin("a")
    fleet.answers("a", *[LOST] * 10, begun=before)
    assert fleet.ejections == [("a", "consecutive_gateway_failure")]
    assert fleet.seconds("a") == BASE_EJECTION_TIME_S
    fleet.answers("a", GOOD, begun=before)  # of a request from before: only a trial decides
    assert fleet.seconds("a") == BASE_EJECTION_TIME_S


def test_ejections_grow_to_a_bound_and_shrink_with_time_in_service() -> None:
    fleet = Fleet("a", "b")
    fleet.answers("a", LOST, LOST, LOST)
    lasted = []
    for _ in range(40):
        lasted.append(fleet.seconds("a"))
        fleet.now += lasted[-1]
        assert fleet.state("a") is State.DUE
        fleet.answers("a", BAD, trial=True)
    assert lasted[:4] == [1, 2, 3, 4]
    assert max(lasted) == MAX_EJECTION_TIME_S
    fleet.now += fleet.seconds("a")
    fleet.answers("a", GOOD, trial=True)
    for _ in range(100):
        fleet.now += INTERVAL_S
        fleet.answers("a", GOOD)
    fleet.answers("a", LOST, LOST, LOST)
    assert fleet.seconds("a") == BASE_EJECTION_TIME_S


@pytest.mark.parametrize(
    ("rates", "out"),
    [
        ({"a": 0.1, "b": 0.0, "c": 0.0}, "a"),
        ({"a": 0.5, "b": 0.25, "c": 0.25}, "a"),
        ({"a": 0.3, "b": 0.3, "c": 0.3}, ""),
        ({"a": 0.02, "b": 0.0, "c": 0.0}, ""),
        ({"a": 0.3, "b": 0.0}, "a"),
        ({"a": 0.3}, ""),
    ],
)
def test_a_success_rate_below_that_of_the_others_ejects(rates: dict[str, float], out: str) -> None:
    fleet = Fleet(*rates)
    for host, rate in rates.items():
        evenly = (int((number + 1) * rate) > int(number * rate) for number in range(400))
        fleet.answers(host, *(BAD if bad else GOOD for bad in evenly))
    assert not fleet.ejections
    fleet.now += INTERVAL_S
    fleet.answers("a", GOOD)
    assert [host for host, _ in fleet.ejections] == [out] * bool(out)


def test_too_few_requests_prove_no_success_rate() -> None:
    fleet = Fleet("a", "b")
    fleet.answers("a", *[GOOD, BAD] * 40)
    fleet.answers("b", *[GOOD] * 1000)
    fleet.now += INTERVAL_S
    fleet.answers("a", GOOD)
    assert not fleet.ejections


def test_where_all_fail_none_is_an_outlier() -> None:
    """A poison request, or a model that is broken everywhere."""
    fleet = Fleet("a", "b", "c")
    for _ in range(50):
        for host in fleet.hosts:
            fleet.answers(host, BAD)
    assert len(fleet.ejections) <= 1


def test_at_most_half_of_the_hosts_are_ejected_and_a_lone_one_never() -> None:
    fleet = Fleet("a", "b", "c", "d")
    fleet.answers("d", *[GOOD] * 1000)
    for host in "abc":
        fleet.answers(host, *[BAD] * 10)
    assert [host for host, _ in fleet.ejections] == ["a", "b"]
    alone = Fleet("a")
    alone.answers("a", *[LOST] * 100)
    assert not alone.ejections


def test_a_host_that_returns_has_a_small_share_that_grows() -> None:
    fleet = Fleet("a", "b")
    fleet.answers("a", LOST, LOST, LOST)
    fleet.now += 1
    fleet.answers("a", GOOD, trial=True)
    record = fleet.outliers.of("a")
    shares = [record.weight(fleet.now + after, KEY) for after in (0, SLOW_START_S / 2, SLOW_START_S, 100)]
    assert shares == [MIN_WEIGHT, 0.5, 1, 1]
    assert fleet.outliers.of("b").weight(fleet.now, KEY) == 1


def test_what_fails_for_one_key_alone_is_left_alone_by_that_key_alone() -> None:
    fleet = Fleet("a", "b")
    fleet.answers("a", GOOD, who=OTHER)
    fleet.answers("a", *[BAD] * 50, who=KEY)
    assert fleet.state("a", KEY) is State.OUT
    assert fleet.state("a", OTHER) is State.IN
    assert fleet.outliers.of("a").weight(fleet.now, OTHER) == 1
    for _ in range(20):  # nor do its trials keep the host from others
        fleet.now += fleet.seconds("a")
        fleet.answers("a", BAD, who=KEY, trial=True)
        fleet.answers("a", BAD, GOOD, who=OTHER)  # which fails at times
    assert fleet.seconds("a", KEY) > 10
    assert fleet.state("a", OTHER) is State.IN


@pytest.mark.parametrize(
    ("first", "second"),
    [([BAD] * 5, [BAD] * 2), ([BAD] * 3, [BAD] * 2), ([LOST] * 3, [LOST]), ([LOST] * 2, [LOST]), ([BAD] * 4, [LOST])],
)
def test_what_fails_for_two_keys_is_left_alone_by_all(first: list[Verdict], second: list[Verdict]) -> None:
    fleet = Fleet("a", "b")
    fleet.answers("a", *first, who=KEY)
    fleet.answers("a", *second, who=OTHER)
    out = sum(verdict is not GOOD for verdict in second) > 1 or LOST in first
    assert (fleet.state("a", THIRD) is State.OUT) is out


def test_a_trial_that_fails_for_one_key_leaves_it_to_the_others() -> None:
    fleet = Fleet("a", "b")
    fleet.answers("a", LOST, LOST, who=KEY)
    fleet.answers("a", LOST, who=OTHER)
    assert {fleet.state("a", who) for who in (KEY, OTHER, THIRD)} == {State.OUT}
    fleet.now += BASE_EJECTION_TIME_S
    for lasts in (1, 2, 3):
        fleet.answers("a", BAD, who=KEY, trial=True)
        assert fleet.seconds("a", KEY) == lasts
        assert fleet.state("a", THIRD) is State.DUE
        fleet.now += lasts
    fleet.answers("a", BAD, who=THIRD, trial=True)  # of two it is the host's doing
    assert fleet.seconds("a", "fourth") == 2 * BASE_EJECTION_TIME_S
    fleet.now += 100
    fleet.answers("a", GOOD, who=OTHER, trial=True)
    assert fleet.state("a", THIRD) is State.IN


def test_one_key_that_fails_everywhere_does_not_hide_a_host_that_fails_for_all() -> None:
    fleet = Fleet("a", "b", "c")
    for _ in range(100):
        for host in "bc":
            fleet.answers(host, BAD, who=KEY)
            fleet.answers(host, GOOD, who=OTHER)
            fleet.answers(host, GOOD, who=THIRD)
    for _ in range(5):
        fleet.answers("a", BAD, who=OTHER)
        fleet.answers("a", BAD, who=THIRD)
    assert fleet.state("a", "fourth") is State.OUT


def test_a_success_rate_that_one_key_spoils_ejects_for_that_key() -> None:
    """By sequences it may choose where its requests go."""
    fleet = Fleet("a", "b")
    for _ in range(200):
        fleet.answers("a", BAD, GOOD, who=KEY)
        for host in "ab":
            fleet.answers(host, GOOD, who=OTHER)
    fleet.now += INTERVAL_S
    fleet.answers("b", GOOD, who=OTHER)
    assert fleet.ejections == [("a", "success_rate")]
    assert fleet.state("a", KEY) is State.OUT
    assert fleet.state("a", OTHER) is State.IN


def test_a_key_that_never_comes_back_leaves_no_trace() -> None:
    fleet = Fleet("a", "b")
    fleet.answers("a", *[BAD] * 5, who=KEY)
    record = fleet.outliers.of("a")
    assert record.ejected(fleet.now)
    fleet.now += BASE_EJECTION_TIME_S + MAX_EJECTION_TIME_S
    assert not record.ejected(fleet.now)
    fleet.answers("b", GOOD, who=OTHER)
    assert not record.alone


def test_a_trial_that_takes_long_or_says_nothing_keeps_no_other_key_from_one() -> None:
    fleet = Fleet("a", "b")
    fleet.answers("a", LOST, LOST, who=KEY)
    fleet.answers("a", LOST, who=OTHER)
    fleet.now += BASE_EJECTION_TIME_S
    for _ in range(4):
        slow = fleet.begin("a", KEY, trial=True)
        assert fleet.state("a", OTHER) is State.OUT
        fleet.now += 0.3
        fleet.answers("a", Verdict.NOTHING, begun=slow)
    slow = fleet.begin("a", KEY, trial=True)
    assert fleet.state("a", KEY) is State.OUT
    assert fleet.state("a", OTHER) is State.DUE
    fleet.answers("a", GOOD, who=OTHER, trial=True)
    assert fleet.state("a", THIRD) is State.IN
    fleet.answers("a", BAD, begun=slow)  # of before
    assert fleet.state("a", THIRD) is State.IN


def test_one_key_can_not_hide_a_host_behind_one_that_it_spoils_itself() -> None:
    fleet = Fleet("a", "b")
    for number in range(300):
        fleet.answers("a", BAD, BAD, BAD, GOOD, who=KEY)
        fleet.answers("a", GOOD, who=OTHER)
        fleet.answers("b", BAD if number % 5 == 0 else GOOD, who=OTHER)
    fleet.now += INTERVAL_S
    fleet.answers("a", GOOD, who=OTHER)
    assert fleet.state("b", THIRD) is State.OUT
    assert fleet.state("a", OTHER) is State.IN


def test_the_keys_that_are_counted_as_one_are_not_one() -> None:
    fleet = Fleet("a", "b")
    for number in range(8 * MOST_KEYS):
        fleet.answers("a", BAD if number % 2 else GOOD, who=f"key{number}")
        fleet.answers("b", GOOD, who=f"key{number}")
    fleet.now += INTERVAL_S
    fleet.answers("b", GOOD, who=OTHER)
    assert fleet.state("a", "any") is State.OUT


def test_of_more_keys_than_are_counted_by_themselves_all_count() -> None:
    fleet = Fleet("a", "b")
    for number in range(3 * MOST_KEYS):
        fleet.answers("a", *[BAD] * 3, GOOD, who=f"key{number}")
        fleet.answers("a", GOOD, who=OTHER)
    record = fleet.outliers.of("a")
    assert sum(record.tally.count()) == 5 * 3 * MOST_KEYS
    assert len(record.tally.by) == MOST_KEYS + 1
    for number in range(3 * MOST_KEYS):
        fleet.answers("a", *[BAD] * 5, GOOD, who=f"key{number}")
        fleet.answers("a", GOOD, who=OTHER)
    assert len(record.alone) == MOST_KEYS
    assert fleet.state("a", OTHER) is State.IN


def test_one_model_that_fails_takes_no_other_with_it() -> None:
    async def choosy(request: Received, writer: asyncio.StreamWriter) -> None:
        await (failing if "/m/" in request.target else good)(request, writer)

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        await asyncio.gather(load(balancer, 320), load(balancer, 320, b"/v2/models/other/infer"))
        assert [(node.address, model) for node, model in balancer.ejected()] == [(servers[0].address, "m")]
        asked = Counter(request.target.split("/")[3] for request in servers[0].requests)
        assert asked["other"] > 80
        assert asked["m"] < 3 * CLIENTS

    between([choosy, good], check)


def test_where_most_are_ejected_all_are_asked() -> None:
    """Envoy's panic threshold: two of three for the model, and what is left is no more than a third."""

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        scope = balancer.scope(scope_of(INFER))
        for level, node in zip(balancer.levels(scope), balancer.nodes, strict=False):
            ejection = level.of(node).all
            ejection.out, ejection.until = True, float("inf")
        for _ in range(9):
            await balancer.exchange(b"POST", INFER)
        assert [len(server.requests) for server in servers] == [3, 3, 3]

    between([good, good, good], check)


def test_a_client_that_leaves_does_not_take_the_trial_with_it() -> None:
    hangs = True

    async def sometimes(request: Received, writer: asyncio.StreamWriter) -> None:
        if hangs:
            await asyncio.sleep(30)
        writer.write(answering(b"ok"))

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        nonlocal hangs
        record = balancer.levels(balancer.scope(b""))[0].of(balancer.nodes[0])
        record.all.out = True
        for _ in range(5):
            with pytest.raises(ExchangeError, match="in time"):
                await balancer.exchange(b"POST", INFER, timeout_s=0.05)  # the client's own deadline
            leaving = asyncio.create_task(balancer.exchange(b"POST", INFER))
            await asyncio.sleep(0.05)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        assert len(servers[0].requests) == 10  # each of them was the trial
        hangs = False
        await balancer.exchange(b"POST", INFER)
        assert not record.all.out

    between([sometimes, good], check)


def test_a_deadline_of_the_clients_ejects_nobody() -> None:
    async def slowly(request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(answering(b"ok"))

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        for _ in range(30):
            with pytest.raises(ExchangeError, match="in time") as caught:
                await balancer.exchange(b"POST", INFER, timeout_s=0.001)
            assert caught.value.early
        assert not balancer.ejected()

    between([slowly, slowly], check)


def test_polling_models_that_are_not_there_leaves_the_others_their_retries() -> None:
    """Retries are for what a server lost; names that clients make up have a budget of their own."""
    loses = False

    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        if "/m/" not in request.target:
            writer.write(answering(b'{"error":"Request for unknown model: is not found"}', "400 Bad Request"))
        elif loses:
            writer.close()
        else:
            writer.write(answering(b"ok"))

    async def check(balancer: Balancer, servers: list[Scripted]) -> None:
        nonlocal loses
        await balancer.exchange(b"POST", INFER)
        for number in range(300):
            await balancer.exchange(b"GET", b"/v2/models/synthetic%d" % number)
            await balancer.exchange(b"POST", b"/v2/models/m/versions/%d/infer" % (number + 9))
        asked = sum(len(server.requests) for server in servers)
        assert asked < 600 * 1.2 + 20
        loses = True
        before = balancer.scope(scope_of(INFER)).budget.left
        with pytest.raises(ExchangeError):
            await balancer.exchange(b"POST", INFER)
        assert sum(len(server.requests) for server in servers) >= asked + 2  # it was tried again
        assert balancer.scope(scope_of(INFER)).budget.left < before

    between([respond, respond], check)
