"""What keys are charged where there are several queues, of servers, models under release and versions, by the times at
which all is seen."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.access.accounts import Account, NoSilence, Work, Works
from serve.gateway.access.at_server import READ_S
from serve.gateway.access.fairness import KNOWN_S, Fairness
from serve.gateway.health.flights import At

LIGHT_S, LONG_S = 0.001, 2.5


class Charged(Fairness):
    """Tells what each account was charged, all in all."""

    def __init__(self, servers: int, instances: int = 1, together: int = 1) -> None:
        super().__init__()
        self.charged: defaultdict[Account, float] = defaultdict(float)
        self.servers, self.instances, self.most_together, self.waits_s = servers, servers * instances, together, 0.0
        self.works = {"m": Works(instances, frozenset({"m"}), together=together, waits_s=0.0)}
        self.silence = Ready(servers=servers)

    def _pay(self, account: Account, seconds: float) -> None:
        self.charged[account] += seconds
        super()._pay(account, seconds)

    def sends(self, who: str, server: str, now: float, path: str = "m") -> Work:
        work = self.begin(self.of(who, 5, now), now, "m")
        self.sent(work, At(server, path), now)
        return work


@dataclass(frozen=True)
class Ready(NoSilence):
    """As many servers as there are."""

    servers: int = 1


def known(fairness: Charged, now: float) -> float:
    """Three keys have sent light requests to two servers; gives when it is."""
    for _ in range(30):
        for who, server in (("one", "s1"), ("two", "s1"), ("three", "s2")):
            fairness.end(fairness.sends(who, server, now), 1, now + LIGHT_S, answered=True)
            now += 0.03
    return now


def goes_on(fairness: Charged, now: float, until: float) -> None:
    """Others are answered by the other server meanwhile."""
    while now < until:
        for who in ("one", "three"):
            fairness.end(fairness.sends(who, "s2", now), 1, now + LIGHT_S, answered=True)
            now += 0.04


@pytest.mark.parametrize("gap_s", [0.0, 0.0004, 0.0009, 0.002, 0.005])
@pytest.mark.parametrize("first", ["the long one", "the light one"])
@pytest.mark.parametrize("together", [1, 8], ids=["one at a time", "in batches"])
@pytest.mark.parametrize("instances", [1, 2])
def test_what_stood_behind_a_long_request_is_charged_for_its_own_time_in_whatever_order_both_are_read(
    gap_s: float, first: str, together: int, instances: int
) -> None:
    fairness = Charged(2, instances, together)
    now = known(fairness, 100.0)
    for _ in range(3):
        long = [fairness.sends("long", "s1", now) for _ in range(instances)]
        now += 0.008
        light = fairness.sends("two", "s1", now)
        ends = now + LONG_S
        goes_on(fairness, now, ends - 0.06)
        both = [*long, light] if first == "the long one" else [light, *long]
        for number, work in enumerate(both):
            fairness.end(work, 1, ends + number * gap_s, answered=True)
        now = ends + 0.15
        goes_on(fairness, now, now + 0.1)
        now += 0.2
    fairness._look(now)
    accounts = fairness._accounts
    assert [who for who, account in accounts.items() if account.heavy] == ["long"]
    assert accounts["two"].cost < 0.01
    most = LONG_S / (2 * instances)
    # Two that a server which batches began with at once and answers at once may have been one batch.
    least = most / 2 if instances > 1 and together > 1 else most
    assert 0.95 * least < accounts["long"].cost < 1.05 * most


jobs = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(["s1", "s2", "s3"]),
        st.sampled_from([0, 1, 2]),  # of the paths
        st.floats(1.1 * READ_S, 0.5),  # after the one before: what is sent closer to it may have overtaken it
        st.sampled_from([0.0, 0.001, 0.02, 0.3, 3.0]),
        st.floats(0.0, 0.004),  # until the gateway reads its answer
    ),
    min_size=1,
    max_size=40,
)


RELEASED = {model: Works(1, frozenset({"m", "next"}), together=1, waits_s=0.0) for model in ("m", "next")}


def passes(steps: dict[str, int], *, together: int, waits_s: float) -> dict[str, Works]:
    """How an ensemble m works, whose steps have so many instances."""

    def works(instances: int, *asks: str) -> Works:
        return Works(
            instances, frozenset(asks), frozenset(asks), together=together, waits_s=waits_s, bound=next(iter(steps))
        )

    every = {model: works(instances, model) for model, instances in steps.items()}
    return {"m": works(min(steps.values()), "m", *steps), **every}


ENSEMBLE = passes({"a": 1, "b": 1}, together=1, waits_s=0.0)
VERSIONS = {"m": Works(1, frozenset({"m"}), together=1, waits_s=0.0, latest="3")}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    ("works", "paths"),
    [
        ({}, ["m", "m", "m"]),
        (RELEASED, ["m", "next", "next/versions/2"]),
        (VERSIONS, ["m", "m/versions/2", "m/versions/03"]),
        (ENSEMBLE, ["m", "m", "m"]),
    ],
    ids=["one model", "two under release", "several versions", "an ensemble"],
)
@given(jobs=jobs)
def test_each_key_is_charged_what_its_requests_took_where_each_queue_is_worked_on_one_after_the_other(
    servers: int, works: dict[str, Works], paths: list[str], jobs: list[tuple[str, str, int, float, float, float]]
) -> None:
    """A request that names no version is in the queue of the latest, and one of the only version in its model's."""
    fairness = Charged(servers)
    fairness.works = works or fairness.works
    now = 100.0
    free: defaultdict[tuple[str, str], float] = defaultdict(lambda: -math.inf)
    truth: defaultdict[str, float] = defaultdict(float)
    events: list[tuple[float, bool, int, str, str, str]] = []
    begun: dict[int, Work] = {}
    same = {"m/versions/03": "m", "next/versions/2": "next"}
    for number, (who, server, which, pause_s, takes_s, read_s) in enumerate(jobs):
        now += pause_s
        at, path = server if servers > 1 else "s1", paths[which]
        queue = at, same.get(path, path)
        free[queue] = max(now, free[queue]) + takes_s
        truth[who] += takes_s / servers
        heapq.heappush(events, (now, False, number, who, at, path))
        heapq.heappush(events, (free[queue] + read_s, True, number, who, at, path))
    while events:
        now, answered, number, who, at, path = heapq.heappop(events)
        if answered:
            fairness.end(begun[number], 1, now, answered=True)
        else:
            begun[number] = fairness.sends(who, at, now, path)
    fairness._look(now + 1.0)
    for who in truth:
        assert fairness.charged[fairness._accounts[who]] == pytest.approx(truth[who], abs=0.005 * len(jobs))
    assert all(there.idle for there in fairness.queues)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("read_s", [-0.004, 0.0, 0.004, 0.02], ids=str)
@pytest.mark.parametrize("gap_s", [0.0, 0.01], ids=["with it", "behind it"])
def test_who_is_beside_a_copy_for_a_candidate_is_charged_for_its_own_time(
    servers: int, together: int, read_s: float, gap_s: float
) -> None:
    """Whichever of the two answers the gateway reads first."""
    fairness = Charged(servers, together=together)
    fairness.works = {model: replace(works, together=together) for model, works in RELEASED.items()}
    now = steady(fairness, 100.0, {"one": LIGHT_S, "two": LIGHT_S}, "next")
    before = fairness.charged[fairness._accounts["two"]]
    copy = fairness.begin_uncounted("next", At("s1", "next"), now)
    light = fairness.sends("two", "s1", now + gap_s, "next")
    ends = [(now + LONG_S, copy), (now + LONG_S + LIGHT_S + read_s, light)]
    for at, work in sorted(ends, key=lambda each: each[0]):
        if work is copy:
            fairness.end_uncounted(copy, at)
        else:
            fairness.end(light, 1, at, answered=True)
    fairness._look(now + LONG_S + 1.0)
    assert fairness.charged[fairness._accounts["two"]] - before < 0.03 / servers
    assert not fairness.is_behind("one", now + LONG_S + 1.0)
    assert all(there.idle for there in fairness.queues)


def test_nobody_waits_behind_a_copy_that_was_just_sent() -> None:
    fairness = Charged(1)
    fairness.works = RELEASED
    now = steady(fairness, 100.0, {"one": LIGHT_S, "two": LIGHT_S}, "next")
    fairness.begin_uncounted("next", At("s1", "next"), now)
    assert not fairness.is_behind("one", now)


def test_a_request_that_is_asked_of_another_server_counts_there() -> None:
    fairness = Charged(2)
    now = known(fairness, 100.0)
    long = fairness.sends("three", "s1", now)
    behind = fairness.sends("two", "s1", now + 0.01)
    fairness.sent(behind, At("s2", "m"), now + 0.02)
    fairness.end(behind, 1, now + 0.5, answered=True)
    fairness._look(now + 0.6)
    assert fairness.charged[fairness._accounts["two"]] == pytest.approx(0.48 / 2 + 30 * LIGHT_S / 2, abs=0.01)
    fairness.sent(long, At("s2", "m"), now + 1.0)
    fairness.end(long, 1, now + 1.3, answered=True)
    fairness._look(now + 2.0)
    assert fairness.charged[fairness._accounts["three"]] == pytest.approx(0.3 / 2 + 30 * LIGHT_S / 2, abs=0.01)


class OneWasSilent(Ready):
    """A silence of the first server has just ended."""

    def over_at_of(self, server: str) -> float:
        return self.over_at if server == "s1" else -math.inf


@pytest.mark.parametrize(("server", "charged"), [("s1", False), ("s2", True)])
def test_a_silence_excuses_what_was_with_the_silent_server_and_nothing_else(server: str, charged: bool) -> None:
    fairness = Charged(2)
    now = known(fairness, 100.0)
    before = fairness.charged[fairness._accounts["three"]]
    work = fairness.sends("three", server, now)
    fairness.silence = OneWasSilent(over_at=now + 2.0, servers=2)
    fairness.end(work, 1, now + 2.5, answered=True)
    fairness._look(now + 3.0)
    assert (fairness.charged[fairness._accounts["three"]] - before > 1.0) is charged


def test_what_a_key_took_long_ago_is_forgotten_also_where_it_is_the_first_to_come_back() -> None:
    fairness = Charged(2)
    now = known(fairness, 100.0)
    fairness.end(fairness.sends("two", "s1", now), 1, now + 20.0, answered=True)
    fairness._look(now + 20.1)
    assert fairness.of("two", 5, now + 20.2).answers
    assert not fairness.of("two", 5, now + 20.2 + KNOWN_S + 1.0).answers


def test_one_server_has_one_queue_whether_or_not_it_is_told_that_a_request_goes_there() -> None:
    fairness = Charged(1)
    now = 100.0
    for _ in range(30):
        for who in ("one", "two", "three"):
            fairness.end(fairness.sends(who, "s1", now), 1, now + LIGHT_S, answered=True)
            now += 0.03
    long = fairness.sends("long", "s1", now)  # as over gRPC
    light = fairness.begin(fairness.of("two", 5, now + 0.01), now + 0.01, "m")  # as over HTTP
    for work in (long, light):
        fairness.end(work, 1, now + LONG_S, answered=True)
    fairness._look(now + LONG_S + 1.0)
    assert fairness.charged[fairness._accounts["two"]] < 0.1
    assert fairness.charged[fairness._accounts["long"]] == pytest.approx(LONG_S, rel=0.05)


def test_what_passes_through_an_ensemble_before_an_overdue_request_says_nothing_of_it() -> None:
    """Of its models one may be free, or have more instances, while another is at work on that request."""
    fairness = Charged(1)
    fairness.works = ENSEMBLE
    now = known(fairness, 100.0)
    long = fairness.sends("long", "s1", now)
    fairness.outlasts(long, now + 3.0)
    for each in range(20):
        fairness.end(fairness.sends("one", "s1", now + 3.0 + each), 1, now + 3.01 + each, answered=True)
    fairness._look(now + 30.0)
    assert not long.over
    assert fairness.of("long", 5, now + 30.0).heavy
    assert not fairness.of("one", 5, now + 30.0).heavy


HEAVY = ("heavy", "heavier")
passing = st.lists(
    st.tuples(
        st.sampled_from(["one", "two", *HEAVY]),
        st.sampled_from(["m", "a"]),  # the ensemble, or its first step for itself
        st.floats(0.0001, 0.5),  # after the one before
        st.sampled_from([0.0, 0.3, 3.0]),  # at the first step, of a heavy one
        st.sampled_from([0.0, 0.3, 3.0]),  # at the second
        st.floats(0.0, 0.004),  # until the gateway reads its answer
    ),
    min_size=1,
    max_size=30,
)


@given(jobs=passing)
def test_no_light_request_of_an_ensemble_pays_for_what_it_stood_behind_there_or_at_its_first_step(
    jobs: list[tuple[str, str, float, float, float, float]],
) -> None:
    """What asks a later one for itself comes before those that are on their way there: nobody can know that."""
    fairness = Charged(1)
    fairness.works = ENSEMBLE
    jobs = [(who, path if who in HEAVY else "m", *times) for who, path, *times in jobs]  # type: ignore[misc]
    now = 100.0
    free = {"a": -math.inf, "b": -math.inf}
    busy = {"a": 0.0, "b": 0.0}
    events: list[tuple[float, bool, int]] = []  # when a job is sent, or answered
    waiting: list[tuple[float, int, str]] = []  # at a step, from when on
    for number, (_, _, pause_s, *_) in enumerate(jobs):
        now += pause_s
        waiting.append((now, number, "a"))
        events.append((now, False, number))
    while waiting:
        at, number, step = heapq.heappop(waiting)
        who, path, _, first_s, second_s, read_s = jobs[number]
        takes_s = 0.001 if who not in HEAVY else first_s if step == "a" else second_s
        free[step] = max(at, free[step]) + takes_s
        busy[step] += takes_s
        if step == "a" and path == "m":
            heapq.heappush(waiting, (free[step], number, "b"))
        else:
            events.append((free[step] + read_s, True, number))
    events.sort()
    begun: dict[int, Work] = {}
    for at, answered, number in events:
        who, path, *_ = jobs[number]
        if answered:
            fairness.end(begun[number], 1, at, answered=True)
        else:
            work = begun[number] = fairness.begin(fairness.of(who, 5, at), at, path)
            fairness.sent(work, At("s1", path), at)
    fairness._look(events[-1][0] + 1.0)
    for who in ("one", "two"):
        if who in fairness._accounts:
            assert fairness.charged[fairness._accounts[who]] < 0.01 * len(jobs), who
    assert sum(fairness.charged.values()) > max(busy.values()) - 0.01 * len(jobs)  # and all of it is paid for
    assert all(there.idle for there in fairness.queues)


def steady(fairness: Charged, now: float, every: dict[str, float], path: str = "m") -> float:
    """Keys send requests that take so long, one after the other; gives when it is."""
    for _ in range(20):
        for who, takes_s in every.items():
            work = fairness.begin(fairness.of(who, 5, now), now, path)
            fairness.sent(work, At("s1", path), now)
            now += takes_s
            fairness.end(work, 1, now, answered=True)
            now += 0.02
    fairness._look(now)
    return now


@pytest.mark.parametrize("gap_s", [0.0, 0.0001, 0.0007, 0.005])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("together", [1, 8])
def test_one_that_was_overtaken_on_its_way_to_the_server_does_not_pay_for_what_overtook_it(
    gap_s: float, servers: int, together: int
) -> None:
    """Requests go by different connections: the server may have read the later one first."""
    fairness = Charged(servers, together=together)
    now = steady(fairness, 100.0, {"one": 0.001, "two": 0.001, "heavy": 1.5})
    before = dict(fairness.charged)
    light, heavy = (fairness.sends(who, "s1", now + gap) for who, gap in (("one", 0.0), ("heavy", gap_s)))
    now += gap_s + LONG_S
    fairness.end(heavy, 1, now, answered=True)
    fairness.end(light, 1, now + 0.001, answered=True)
    fairness._look(now + 1.0)
    paid = {
        who: fairness.charged[fairness._accounts[who]] - before[fairness._accounts[who]] for who in ("one", "heavy")
    }
    assert paid["one"] < 0.01
    assert paid["heavy"] == pytest.approx(LONG_S / servers, rel=0.05)
    assert not fairness._accounts["one"].heavy


def test_who_is_known_by_light_requests_pays_for_a_long_one_though_others_were_sent_right_behind_it() -> None:
    fairness = Charged(1)
    now = steady(fairness, 100.0, {"one": 0.001, "two": 0.001, "three": 0.001})
    works = [fairness.sends(who, "s1", now + 0.001 * number) for number, who in enumerate(("three", "one", "two"))]
    for work in works:
        fairness.end(work, 1, now + LONG_S, answered=True)
    fairness._look(now + LONG_S + 1.0)
    accounts = fairness._accounts
    assert {who: fairness.charged[accounts[who]] > 1.0 for who in accounts} == {
        "one": False,
        "two": False,
        "three": True,
    }


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("gap_s", [0.0005, 0.05])
@pytest.mark.parametrize("together", [1, 8])
def test_a_light_request_that_overtakes_a_long_one_within_an_ensemble_pays_for_its_own_time(
    servers: int, gap_s: float, together: int
) -> None:
    """It waited behind it at the first model, or was in a batch with it there; at the next one was free."""
    fairness = Charged(servers, together=together)
    fairness.works = passes({"first": 1, "wide": 2, "last": 1}, together=together, waits_s=0.001)
    now = steady(fairness, 100.0, {"one": 0.004, "two": 0.004, "heavy": 2.7})
    before = dict(fairness.charged)
    heavy, light = (fairness.sends(who, "s1", now + gap) for who, gap in (("heavy", 0.0), ("one", gap_s)))
    fairness.end(light, 1, now + 0.904, answered=True)
    fairness._look(now + 1.2)
    fairness.end(heavy, 1, now + 2.7, answered=True)
    fairness._look(now + 3.0)
    paid = {
        who: fairness.charged[fairness._accounts[who]] - before[fairness._accounts[who]] for who in ("one", "heavy")
    }
    assert paid["one"] < 0.01
    assert paid["heavy"] == pytest.approx(2.7 / servers, rel=0.05)


def test_who_overtakes_one_long_request_of_an_ensemble_again_and_again_pays_for_what_that_takes() -> None:
    fairness = Charged(1)
    fairness.works = passes({"first": 1, "wide": 2}, together=1, waits_s=0.0)
    now = steady(fairness, 100.0, {"one": 0.004, "two": 0.004, "long": 0.004})
    fairness.sends("long", "s1", now)
    for _ in range(8):
        now += 0.01
        work = fairness.sends("one", "s1", now)
        now += 1.0
        fairness.end(work, 1, now, answered=True)
        fairness._look(now + 0.02)
    assert fairness._accounts["one"].heavy
