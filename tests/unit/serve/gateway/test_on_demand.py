"""Models that are loaded on demand: once for all who ask, within the memory, and no key at the others' cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from compress.errors import ServerError
from serve.gateway.errors import GatewayError, RateLimitedError, UpstreamDownError
from serve.gateway.on_demand import estimates as estimates_module
from serve.gateway.on_demand import loads as loads_module
from serve.gateway.on_demand import residency as residency_module
from serve.gateway.on_demand import room as room_module
from serve.gateway.on_demand import units as units_module
from serve.gateway.on_demand.catalogue import Known
from serve.gateway.on_demand.estimates import Estimates
from serve.gateway.on_demand.host import HostDownError, Used
from serve.gateway.on_demand.lease import Lease
from serve.gateway.on_demand.loads import MOST_IN_WINDOW, LoadFailedError, LoadingError
from serve.gateway.on_demand.residency import Residency
from serve.gateway.on_demand.resident import TURN_S
from serve.gateway.on_demand.turns import SEQUENCES_S
from tests.serve_http import in_loop

MIB = 1 << 20


class Host:
    """Processes of 100 MiB each beside a Triton of 50 MiB, as a real one tells of them."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.own = 50 * MIB
        self.loads: list[str] = []
        self.most = 0
        self.fails: set[str] = set()
        self.down = False
        self.takes_s = 0.01
        self.timeout_s = 5.0
        self.hanging: dict[str, asyncio.Event] = {}
        """Loads that wait for this."""
        self.given_up: list[str] = []
        self.begun: list[str] = []
        """Of those."""
        self.sizes: dict[str, int] = {}
        """Bytes of those that are no 100 MiB."""
        self.peaks: dict[str, int] = {}
        """The most that these have had, where that is more than they have."""
        self.computing: dict[str, asyncio.Event] = {}
        """Those whose processes go on until this."""
        self.unloads: list[tuple[str, bool]] = []
        """Each with whether it was patient."""
        self.twice: set[str] = set()
        """Those that are loaded anew, beside what was there."""

    async def load(self, model: Known) -> None:
        if self.down:
            raise HostDownError
        self.twice |= {model.name} & self.there
        try:
            await self._load(model)
        finally:
            self.twice.discard(model.name)

    async def _load(self, model: Known) -> None:
        await asyncio.sleep(self.takes_s)
        if model.name in self.hanging:
            self.begun.append(model.name)
            await self.hanging[model.name].wait()
        if model.name in self.fails:
            raise ServerError("Triton refuses it", why="its file is broken", mend="mend it")
        self.loads.append(model.name)
        self.there.add(model.name)
        self.most = max(self.most, (await self.used()).total)

    def give_up(self, model: str) -> None:
        self.given_up.append(model)

    async def unload(self, model: str, *, patient: bool = False) -> None:
        self.unloads.append((model, patient))
        await asyncio.sleep(self.takes_s)
        if model in self.computing:
            await self.computing[model].wait()
        self.there.discard(model)

    async def used(self) -> Used:
        sizes = {name: self.sizes.get(name, 100 * MIB) for name in self.there if name != "whole"}
        return Used(self.own, {name: size * (1 + (name in self.twice)) for name, size in sizes.items()}, self.peaks)


def one(name: str, idle_s: float = 0.0) -> Known:
    return Known(name, (name,), ((name,),), 20 * MIB, 1, "", idle_s)


KNOWN = {name: one(name) for name in "abcdefgh"}
KNOWN["whole"] = Known("whole", ("a", "b", "whole"), (("a", "b"), ("whole",)), 0, 0)


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "SETTLE_S", 0.0)
    monkeypatch.setattr(residency_module, "ROOM_S", 0.2)


def served(
    host: Host, models: int = 2, pins: tuple[str, ...] = (), on_event: Callable[[str], None] = lambda _: None
) -> Residency:
    """One with room for so many."""
    host.there |= set(pins)
    return Residency(host, KNOWN, (50 + 100 * models + 10) * MIB, pins, on_event)


async def ask(residency: Residency, *models: str, who: str = "", wait_s: float = 5.0) -> Lease:
    lease = residency.lease()
    try:
        await lease.need(models, who, time.monotonic() + wait_s)
    except BaseException:
        lease.close()
        raise
    return lease


async def used(residency: Residency, *models: str, who: str = "") -> None:
    for model in models:
        (await ask(residency, model, who=who)).close()


@in_loop
async def test_a_model_is_loaded_once_however_many_wait() -> None:
    host = Host()
    residency = served(host)
    await asyncio.gather(*(used(residency, "a") for _ in range(50)))
    assert host.loads == ["a"]
    assert residency.at_hand("a", "")
    assert not residency.loads.waiting


@in_loop
async def test_the_one_that_was_used_longest_ago_goes_and_the_memory_is_kept() -> None:
    host = Host()
    residency = served(host)
    await used(residency, "a", "b", "a", "c")
    assert set(residency.resident) == {"a", "c"}
    await used(residency, *"defgh")
    assert host.most <= residency.budget


@in_loop
async def test_what_a_request_holds_or_is_pinned_stays() -> None:
    host = Host()
    residency = served(host, models=3, pins=("a",))
    lease = await ask(residency, "b")
    await used(residency, "c", "d", "e")
    assert {"a", "b", "e"} == set(residency.resident)
    lease.close()
    residency.held = lambda _model: True
    with pytest.raises(LoadingError):
        await used(residency, "c")


@in_loop
async def test_steps_count_once_and_stay_as_long_as_one_needs_them() -> None:
    host = Host()
    residency = served(host)
    await used(residency, "a", "whole")
    assert host.loads == ["a", "b", "whole"]
    await used(residency, "a", "c")  # "whole" goes, and of its steps the one that nobody else needs
    assert host.there == {"a", "c"}


@in_loop
async def test_a_request_that_cannot_wait_is_told_how_long_it_takes() -> None:
    host = Host()
    residency = served(host)
    await used(residency, "a", "b", "c")
    residency.estimates.saw_seconds("a", 9.0)
    with pytest.raises(LoadingError) as caught:
        await ask(residency, "a", wait_s=0.0)
    assert dict(caught.value.headers)[b"retry-after"] in (b"4", b"5")
    await used(residency, "a")  # it was begun all the same


@in_loop
async def test_a_load_that_fails_is_told_and_not_repeated_for_a_while() -> None:
    host = Host()
    host.fails = {"a"}
    told: list[str] = []
    residency = Residency(host, KNOWN, 300 * MIB, (), told.append)
    for _ in range(3):
        with pytest.raises(LoadFailedError):
            await used(residency, "a")
    assert told == ["a can't be loaded: its file is broken; it is not tried again for 5 s"]
    await residency.changed("a", KNOWN)  # its files are others
    host.fails.clear()
    await used(residency, "a")


@in_loop
async def test_what_never_fits_is_refused_once_that_is_seen() -> None:
    host = Host()
    residency = Residency(host, KNOWN, 120 * MIB, (), lambda _: None)
    await used(residency, "a")  # a guess is no reason not to try
    await residency.keep()
    await residency.units.fit(0)
    with pytest.raises(LoadFailedError):
        await used(residency, "a")
    assert host.loads == ["a"]
    with pytest.raises(LoadFailedError):
        await used(Residency(host, KNOWN, 60 * MIB, (), lambda _: None), "b")  # its files alone are larger
    assert host.loads == ["a"]


@in_loop
async def test_one_that_is_large_does_not_keep_the_others_out() -> None:
    host = Host()
    residency = served(host)
    await used(residency, "a")
    for large in "bce":
        residency.estimates.saw_bytes(KNOWN[large], 900 * MIB)
    await used(residency, "d")
    assert host.there == {"d"}  # it may be as large: the others have made way


@in_loop
async def test_after_triton_died_only_what_is_asked_comes_back() -> None:
    host = Host()
    residency = served(host, models=3, pins=("d",))
    await used(residency, "a", "b")
    host.there, host.down = {"d"}, True
    residency.started()
    with pytest.raises(UpstreamDownError):
        await used(residency, "a")
    host.down = False
    await used(residency, "a")
    assert host.there == {"a", "d"}


@in_loop
async def test_what_grows_over_the_memory_makes_others_go() -> None:
    host = Host()
    residency = served(host)
    await used(residency, "a", "b")
    residency.budget -= 100 * MIB
    await residency.keep()
    assert set(residency.resident) == {"b"}


@in_loop
async def test_what_bodies_take_for_a_moment_makes_no_model_go_and_no_load_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host()
    residency = served(host)
    await used(residency, "a", "b")
    host.own = 400 * MIB
    await residency.keep()
    assert set(residency.resident) == {"a", "b"}
    await used(residency, "c")
    assert set(residency.resident) == {"b", "c"}
    assert not residency.counts["failed", "c"]

    monkeypatch.setattr(units_module, "PASSES_S", 0.0)  # it stays
    await residency.keep()
    assert not residency.resident


@in_loop
async def test_bodies_that_pass_for_minutes_are_no_reason_for_a_model_to_go() -> None:
    host = Host()
    residency = served(host)
    await used(residency, "a", "b")
    await residency.keep()
    residency.units.passing = lambda: 200 * MIB
    for at in range(3):
        host.own = 250 * MIB
        residency.units._owned.clear()  # a minute later
        await residency.keep()
        assert set(residency.resident) == {"a", "b"}, at
    assert residency.units.own == 50 * MIB
    residency.units.passing = lambda: 1 << 40  # what has not come to Triton yet lessens nothing
    await residency.keep()
    assert residency.units.own == 50 * MIB
    residency.units.passing = lambda: 0  # what stays when they are through is Triton's own
    residency.units._owned.clear()
    await residency.keep()
    assert len(residency.resident) < 2


@in_loop
async def test_what_has_grown_goes_before_what_keys_with_less_have_though_it_is_in_use() -> None:
    host = Host()
    residency = served(host, models=4)
    await used(residency, "a", "b", who="good")
    busy = await ask(residency, "c", who="large")
    host.sizes["c"] = 250 * MIB
    await residency.keep()
    assert set(residency.resident) == {"a", "b"}
    assert "c" in host.there  # it answers what it has

    busy.close()
    await residency.keep()
    await residency.units.fit(0)
    assert host.there == {"a", "b"}
    assert residency.went["c", "memory"] == 1


@in_loop
async def test_what_several_use_and_has_grown_goes_itself_and_not_what_one_of_them_has_alone() -> None:
    host = Host()
    residency = served(host, models=4)
    await used(residency, "a", "b", who="large")
    for who in ("large", "other"):
        await used(residency, "c", who=who)
    host.sizes["c"] = 250 * MIB
    await residency.keep()
    await residency.units.fit(0)
    assert host.there == {"a", "b"}


@in_loop
async def test_what_a_model_was_known_to_grow_to_when_it_came_is_no_growth() -> None:
    host = Host()
    residency = served(host, models=4)
    residency.estimates.saw_bytes(KNOWN["c"], 150 * MIB, settled=True)
    await used(residency, "c", who="small")
    await used(residency, "a", "b", who="large")
    host.sizes["c"] = 150 * MIB
    residency.budget -= 100 * MIB
    await residency.keep()
    assert set(residency.resident) == {"b", "c"}


@in_loop
async def test_a_pin_that_has_grown_is_loaded_anew_before_others_go() -> None:
    host = Host()
    residency = served(host, models=3, pins=("h",))
    residency.resident["h"].loaded -= TURN_S + 1
    await used(residency, "a", "b", who="good")
    busy = await ask(residency, "h", who="large")
    host.sizes["h"] = 250 * MIB
    await residency.keep()
    assert "h" in host.there  # it answers what it has
    assert "h" in residency.draining
    busy.close()
    waiting = asyncio.ensure_future(used(residency, "h", who="large"))
    host.sizes.clear()
    await kept(residency, 0.2)
    await waiting
    assert set(residency.resident) == {"a", "b", "h"}
    assert host.unloads == [("h", False)]
    assert host.most <= residency.budget


@in_loop
async def test_a_pin_that_has_grown_is_loaded_anew_for_a_load_that_finds_no_room() -> None:
    host = Host()
    events: list[str] = []
    residency = served(host, models=3, pins=("h",), on_event=events.append)
    residency.resident["h"].loaded -= TURN_S + 1
    await residency.keep()
    host.sizes["h"] = 250 * MIB
    await residency.keep()
    assert not host.unloads  # nobody needs it
    for model in "ab":
        waiting = asyncio.ensure_future(used(residency, model, who="good"))
        await asyncio.sleep(0.05)
        host.sizes.clear()
        await kept(residency, 0.15)
        await waiting
    assert host.there == {"a", "b", "h"}
    assert host.unloads == [("h", False)]
    assert not residency.counts["failed", "a"]
    assert events == ["h is loaded anew: it has grown by 150 MiB, which others need"]


@pytest.mark.parametrize("why", ["it was loaded just now", "a rollout needs it", "a sequence goes on"])
@in_loop
async def test_a_shortage_for_what_may_not_go_and_has_grown_is_told_as_that(why: str) -> None:
    host = Host()
    known = KNOWN | {"s": one("s", idle_s=60.0)}
    model = "s" if why.startswith("a sequence") else "a"
    pins = ("a",) if why.startswith("it was") else ()
    host.there |= set(pins)
    residency = Residency(host, known, 360 * MIB, pins, lambda _: None)
    residency.stays = residency.held = lambda name: name == "a" and why.startswith("a rollout")
    await used(residency, model, who="large")
    await residency.keep()
    host.sizes[model] = 250 * MIB
    await residency.keep()
    for other in "bc":
        with pytest.raises(LoadingError) as caught:
            await used(residency, other, who="good")
        assert "have grown by 150 MiB" in caught.value.why
    assert not residency.counts["failed", "b"]
    assert host.there == {model}
    assert residency.in_the_way({model, "c"}) == 150
    assert residency.in_the_way({"c"}) == 0
    residency.no_room_since -= 60.0  # nobody lacks it any more
    assert residency.in_the_way({model}) == 0


@in_loop
async def test_what_has_grown_and_has_had_sequences_for_long_goes() -> None:
    host = Host()
    residency = Residency(host, KNOWN | {"s": one("s", idle_s=60.0)}, 360 * MIB, (), lambda _: None)
    await used(residency, "s", "a")
    host.sizes["s"] = 250 * MIB
    residency.resident["s"].loaded -= SEQUENCES_S + 1
    await residency.keep()
    await residency.units.fit(0)
    assert host.there == {"a"}


@in_loop
async def test_what_is_brought_again_before_its_turn_to_go_came_stays() -> None:
    host = Host()
    residency = served(host, models=8)
    await used(residency, "whole")
    host.computing["a"] = asyncio.Event()
    residency._go([(residency.resident["whole"], "memory")], None)  # "a" is in the way of "b"
    await asyncio.sleep(0.05)
    await used(residency, "b")
    host.computing["a"].set()
    await residency.units.fit(0)
    assert host.there == {"b"}


@in_loop
async def test_what_has_grown_and_does_not_end_in_time_stays_and_another_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    residency = served(host, models=4)
    await used(residency, "a", "b", who="good")
    await ask(residency, "c", who="large")
    host.sizes["c"] = 250 * MIB
    monkeypatch.setattr(room_module, "DRAIN_S", 0.0)
    await residency.keep()
    await asyncio.sleep(0.01)
    await residency.keep()
    assert "c" in residency.resident
    assert set(residency.resident) == {"b", "c"}


@in_loop
async def test_what_a_model_had_once_does_not_keep_it_out_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    residency = served(host)
    await used(residency, "a")
    host.sizes["a"] = 900 * MIB
    await residency.keep()  # one request made it grow: it goes
    await residency.units.fit(0)
    with pytest.raises(LoadFailedError):
        await used(residency, "a")
    host.sizes.clear()
    monkeypatch.setattr(estimates_module, "FADES_S", -1.0)
    residency.failures.forget("a")
    await used(residency, "a")
    assert host.there == {"a"}


@in_loop
async def test_what_a_load_alone_takes_is_kept_while_it_lasts_and_keeps_no_model_out() -> None:
    host = Host()
    residency = served(host, models=3)
    host.peaks = {"c": 200 * MIB}
    await used(residency, "c", "a", "b", "d")
    assert host.there == {"a", "b", "d"}  # nobody knew of c's first load
    await used(residency, "c")
    assert host.there == {"c", "d"}
    await used(residency, "a")  # once it is loaded it has what it has
    assert host.there == {"a", "c", "d"}

    host.peaks = {"e": 900 * MIB}
    await used(residency, "e", "a", "e")
    assert "e" in host.there


@in_loop
async def test_what_a_load_alone_took_once_does_not_count_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request within the two seconds after a load can bring it about."""
    host = Host()
    host.peaks = {"c": 100 * MIB}
    residency = served(host, models=3)
    await used(residency, "c")
    host.peaks = {"c": 290 * MIB}
    await residency.keep()
    host.peaks.clear()
    monkeypatch.setattr(estimates_module, "FADES_S", -1.0)
    await used(residency, "a", "b", "d", "c")
    assert host.there == {"b", "c", "d"}


def test_what_a_model_had_once_says_nothing_of_others_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = Estimates()
    for model in "abc":
        estimates.saw_bytes(KNOWN[model], 100 * MIB)
        estimates.saw_bytes(KNOWN[model], 900 * MIB)
    assert estimates.bytes(KNOWN["d"]) == 900 * MIB
    monkeypatch.setattr(estimates_module, "FADES_S", -1.0)
    assert estimates.bytes(KNOWN["d"]) == 100 * MIB


@in_loop
async def test_a_load_waits_for_no_more_than_the_memory_that_it_needs() -> None:
    host = Host()
    residency = served(host, models=3)
    await used(residency, "a", "b", "c")
    host.computing["a"] = asyncio.Event()
    residency.budget -= 100 * MIB
    await residency.keep()  # a goes, and does not end
    residency.budget += 200 * MIB
    await asyncio.wait_for(used(residency, "d"), 1.0)
    assert host.there == {"a", "b", "c", "d"}

    waiting = asyncio.ensure_future(used(residency, "e"))  # b goes for it, which is not enough while a is there
    residency.budget -= 100 * MIB
    await asyncio.sleep(0.1)
    assert not waiting.done()
    host.computing["a"].set()
    await waiting
    assert host.there == {"c", "d", "e"}


@in_loop
async def test_what_is_evicted_is_waited_for_by_nobody_and_what_is_gone_from_the_repository_may_be() -> None:
    host = Host()
    residency = served(host)
    await used(residency, "a", "b", "c")
    await residency.changed("b", {name: known for name, known in KNOWN.items() if name != "b"})
    await residency.units.fit(0)
    assert host.unloads == [("a", False), ("b", True)]


@in_loop
async def test_what_a_model_had_once_it_was_asked_is_kept_for_it_when_it_comes_again() -> None:
    host = Host()
    residency = served(host)
    residency.estimates.saw_bytes(KNOWN["a"], 150 * MIB, settled=True)  # 50 more than it has just after its load
    await used(residency, "a", "b")
    assert host.there == {"b"}
    residency.budget += 50 * MIB
    await used(residency, "a")
    assert host.there == {"a", "b"}


@in_loop
async def test_requests_that_waited_are_counted_and_what_rests_is_told() -> None:
    host = Host()
    residency = served(host)
    await asyncio.gather(*(used(residency, "a") for _ in range(3)))
    await used(residency, "a")
    assert residency.counts["waited", "a"] == 3
    assert "a" not in residency.resting()


@in_loop
async def test_a_key_that_asks_for_one_after_the_other_does_not_take_what_others_use() -> None:
    host = Host()
    residency = served(host, models=4)
    await used(residency, "a", "b", who="good")
    for model in "cdefghcdefgh":
        await used(residency, model, who="greedy")
    assert {"a", "b"} <= set(residency.resident)


@in_loop
async def test_a_key_that_came_first_does_not_keep_all_the_memory() -> None:
    host = Host()
    residency = served(host, models=4)
    await used(residency, *"abcd", who="first")
    await used(residency, "e", "f", who="second")
    assert {"e", "f"} <= set(residency.resident)
    await used(residency, "g", who="second")  # by then both have as much: it trades its own
    assert {"c", "d"} <= set(residency.resident)


@in_loop
async def test_loads_of_one_key_are_bounded_while_others_are_served() -> None:
    host = Host()
    host.takes_s = 0.0
    residency = served(host, models=3)
    for _ in range(MOST_IN_WINDOW):
        await used(residency, "c", "d", "e", "f", who="alone")
    await used(residency, "a", who="good")
    with pytest.raises(RateLimitedError) as caught:
        await used(residency, *("bcdefgh" * MOST_IN_WINDOW), who="alone")
    assert int(dict(caught.value.headers)[b"retry-after"]) <= 60


def hanging(*models: str) -> Host:
    host = Host()
    host.timeout_s = 0.1
    host.hanging = {model: asyncio.Event() for model in models}
    return host


@in_loop
async def test_a_load_that_hangs_is_given_up_and_not_begun_again_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads_module, "FIRST_S", 0.0)
    host = hanging("a")
    residency = served(host)
    for model in ("a", "a", "whole"):  # which "a" is a step of
        with pytest.raises(LoadFailedError):
            await used(residency, model)
        assert residency.state(model) == "FAILED"
    with pytest.raises(LoadFailedError) as caught:
        await used(residency, "a")
    assert "has not ended yet" in caught.value.why
    assert int(dict(caught.value.headers)[b"retry-after"]) >= 1
    assert host.begun == ["a"]
    assert len(residency.units.behind) == 1
    await used(residency, "b", "c")


@in_loop
async def test_what_a_load_given_up_still_does_is_ended_again_and_again() -> None:
    host = hanging("a")
    residency = served(host)
    with pytest.raises(LoadFailedError):
        await used(residency, "a")
    await residency.keep()
    assert host.given_up == ["a", "a"]


@pytest.mark.parametrize("well", [True, False])
@in_loop
async def test_a_load_given_up_that_ends_after_all_leaves_nothing_behind(
    well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads_module, "FIRST_S", 0.0)
    host = hanging("a")
    residency = served(host)
    with pytest.raises(LoadFailedError):
        await used(residency, "a")
    host.fails = set() if well else {"a"}
    host.hanging.pop("a").set()
    await asyncio.sleep(0.1)
    await residency.units.fit(0)
    assert not host.there  # nobody waits for it any more
    assert not residency.units.behind
    host.fails.clear()
    await used(residency, "a")
    assert residency.state("a") == "READY"


@in_loop
async def test_one_that_is_there_stays_while_its_reload_hangs_and_comes_late() -> None:
    host = hanging()
    residency = served(host)
    await used(residency, "a")
    host.hanging["a"] = asyncio.Event()
    with pytest.raises(ServerError, match="can't load a"):
        await residency.changed("a", KNOWN)
    with pytest.raises(ServerError, match="can't load a"):
        await residency.changed("a", KNOWN)
    host.hanging.pop("a").set()
    await asyncio.sleep(0.1)
    assert residency.state("a") == "READY"
    assert host.there == {"a"}


@in_loop
async def test_what_has_changed_and_fits_once_is_loaded_once_it_is_gone() -> None:
    host = Host()
    residency = served(host, models=2)
    await used(residency, "a", "b")
    assert not await residency.changed("a", KNOWN)
    await residency.units.fit(0)
    assert host.unloads == [("a", True)], "what was asked of it is answered"
    assert host.there == {"b"}
    await used(residency, "a")
    assert host.most <= residency.budget


@in_loop
async def test_a_step_that_has_changed_and_fits_once_goes_with_what_needs_it() -> None:
    host = Host()
    residency = served(host, models=2)
    await used(residency, "whole")
    assert not await residency.changed("a", KNOWN)
    assert not residency.at_hand("whole", "")
    await used(residency, "whole")
    assert host.there == {"a", "b", "whole"}
    assert host.most <= residency.budget


@in_loop
async def test_two_of_a_model_while_it_is_loaded_anew_are_not_taken_for_its_size() -> None:
    host = hanging()
    host.timeout_s = 60.0
    residency = served(host, models=4)
    await used(residency, "a", "b", "c")
    host.hanging["a"] = asyncio.Event()
    anew = asyncio.ensure_future(residency.changed("a", KNOWN))
    await asyncio.sleep(0.1)
    await residency.keep()
    assert host.twice == {"a"}
    assert residency.units.taken <= residency.budget, "room is kept for both"
    host.hanging.pop("a").set()
    assert await anew
    await residency.keep()
    assert residency.estimates.bytes(KNOWN["a"]) <= 120 * MIB
    assert residency.at_hand("a", "")


@in_loop
async def test_one_whose_reload_hangs_makes_way_all_the_same() -> None:
    host = hanging()
    host.timeout_s = 60.0
    residency = served(host, models=3)
    await used(residency, "a", "b")
    host.hanging["a"] = asyncio.Event()
    anew = asyncio.ensure_future(residency.changed("a", KNOWN))
    await asyncio.sleep(0.1)
    residency.units.leave(["a"])
    with pytest.raises(ServerError, match="makes way"):
        await asyncio.wait_for(anew, 1)
    await asyncio.wait_for(residency.units.fit(0), 1)
    assert host.given_up == ["a"]
    assert ("a", False) in host.unloads


@in_loop
async def test_loads_of_two_keys_that_hang_do_not_hold_up_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads_module, "OVERDUE_S", 0.3)
    host = hanging("a", "b")
    host.timeout_s = 60.0
    residency = served(host, models=8)
    for model in KNOWN:
        residency.estimates.saw_seconds(model, 0.05)
    began = time.monotonic()
    stuck = [asyncio.ensure_future(used(residency, model, who=model)) for model in "ab"]
    more = asyncio.ensure_future(used(residency, "c", who="a"))
    good = asyncio.ensure_future(used(residency, "d", who="good"))
    await asyncio.sleep(0.1)
    await residency.keep()
    assert not good.done()  # they may still be at work
    while not good.done():
        await asyncio.sleep(0.05)
        await residency.keep()
    await good
    assert 0.3 <= time.monotonic() - began < 5.0
    assert not more.done()  # its key has one under way
    for task in (*stuck, more):
        task.cancel()
    await asyncio.gather(*stuck, more, return_exceptions=True)


@asynccontextmanager
async def hung(host: Host, residency: Residency, model: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A load of a model hangs for as long as a load may before it counts as such."""
    monkeypatch.setattr(loads_module, "OVERDUE_S", 0.1)
    host.timeout_s = 60.0
    residency.estimates.saw_seconds(model, 0.01)
    asking = asyncio.ensure_future(used(residency, model, who="hostile"))
    await asyncio.sleep(0.05)
    assert host.begun == [model]
    yield
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def kept(residency: Residency, seconds: float) -> None:
    """It is looked after for a while, as `watch` does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(0.02)
        await residency.keep()


@in_loop
async def test_a_load_that_hangs_gives_others_what_is_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    host = hanging("a")
    residency = served(host, models=2)
    residency.estimates.saw_bytes(KNOWN["a"], 200 * MIB)
    async with hung(host, residency, "a", monkeypatch):
        with pytest.raises(LoadingError):  # it may be at work
            await used(residency, "b", who="good")
        await kept(residency, 0.1)
        await used(residency, "b", who="good")
        await used(residency, "c", who="good")
        assert set(residency.resident) == {"b", "c"}


@in_loop
async def test_a_load_that_nobody_waits_for_gives_others_what_is_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "BACK_S", 0.0)
    host = hanging("a")
    host.timeout_s = 60.0
    residency = served(host, models=2)
    residency.estimates.saw_bytes(KNOWN["a"], 200 * MIB)
    asking = asyncio.ensure_future(used(residency, "a", who="hostile"))
    await asyncio.sleep(0.05)
    await kept(residency, 0.1)
    asking.cancel()
    good = asyncio.ensure_future(used(residency, "b", who="good"))
    await kept(residency, 0.1)
    await asyncio.wait_for(good, 0.1)


@pytest.mark.parametrize("fits", [True, False])
@in_loop
async def test_a_load_that_comes_late_stays_only_where_it_fits_still(
    monkeypatch: pytest.MonkeyPatch, *, fits: bool
) -> None:
    host = hanging("a")
    residency = served(host, models=2)
    async with hung(host, residency, "a", monkeypatch):
        await kept(residency, 0.2)
        await used(residency, *("b" if fits else "bc"), who="good")
        host.hanging.pop("a").set()
        await kept(residency, 0.2)
        assert "a" in host.loads
        assert host.unloads[:1] == ([] if fits else [("a", False)])  # it may come anew, as any other
        assert not host.given_up


@in_loop
async def test_a_load_that_hangs_and_takes_more_than_is_left_is_ended_before_anything_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = hanging("a")
    residency = served(host, models=2)
    async with hung(host, residency, "a", monkeypatch):
        await kept(residency, 0.2)
        await used(residency, "b", "c", who="good")
        host.there.add("a")  # its processes take it as they go on
        await residency.keep()
        await asyncio.sleep(0.02)
        assert host.given_up == ["a"]
        host.there.remove("a")
        host.fails.add("a")
        host.hanging.pop("a").set()
        await kept(residency, 0.1)
        assert set(residency.resident) == {"b", "c"}
        assert residency.counts["failed", "a"] == 1


@in_loop
async def test_at_the_end_what_is_being_loaded_is_given_up() -> None:
    host = hanging("a")
    host.timeout_s = 60.0
    residency = served(host)
    watching = asyncio.ensure_future(residency.watch())
    asking = asyncio.ensure_future(used(residency, "a"))
    await asyncio.sleep(0.1)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert host.given_up == ["a"]
    with pytest.raises(GatewayError):
        await asking


@in_loop
async def test_a_waiter_that_leaves_leaves_nothing_behind() -> None:
    host = Host()
    host.takes_s = 0.2
    residency = served(host)
    waiting: Coroutine[Any, Any, Lease] = ask(residency, "a")
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not residency.loads.waiting
    await used(residency, "a")
    assert host.loads == ["a"]
    assert residency.resident["a"].leases == 0


@in_loop
async def test_a_model_that_is_not_known_is_tritons_to_refuse() -> None:
    await used(served(Host()), "nobody")


@in_loop
async def test_a_step_that_fails_takes_back_what_was_loaded_for_it() -> None:
    host = Host()
    host.fails = {"b"}
    residency = served(host)
    with pytest.raises(GatewayError):
        await used(residency, "whole")
    await residency.units.fit(0)
    assert not host.there


@in_loop
async def test_a_key_that_touches_its_models_again_and_again_does_not_keep_them_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_module, "SETTLE_S", 0.1)
    monkeypatch.setattr(residency_module, "ROOM_S", 2.0)
    residency = served(Host())
    for model in "ab":
        (await ask(residency, model, who="x")).close()

    async def touch() -> None:
        while True:
            for model in "ab":
                residency.at_hand(model, "x")
            await asyncio.sleep(0.02)

    touching = asyncio.ensure_future(touch())
    try:
        (await ask(residency, "c", who="y")).close()
    finally:
        touching.cancel()
    assert "c" in residency.resident
