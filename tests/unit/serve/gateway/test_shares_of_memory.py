"""Which model goes for whom: by use, by each key's part of what it shares, and in turns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from serve.gateway.on_demand.resident import LATELY_S, TURN_S, Claim, Reason, Resident, held_by, victim_of
from serve.gateway.on_demand.turns import SEQUENCES_S, State, Turns, drained_of

NOW = 1000.0


def used(name: str, *keys: str, ago: float = 1.0, there: float = 2 * TURN_S) -> Resident:
    """A model that keys have used, and that has been there for so long."""
    return Resident(name, NOW - ago, dict.fromkeys(keys, NOW - ago), loaded=NOW - there)


def victim(rows: list[Resident], claim: Claim | None) -> tuple[str, Reason] | None:
    found = victim_of(rows, rows, claim, NOW, lambda _: 1)
    return None if found is None else (found[0].name, found[1])


def turn(
    rows: list[Resident], claim: Claim, over: int = 1, busy: str = "", lasts: str = "", equal: float = 1.0
) -> tuple[list[str], float]:
    """What goes in a key's turn, and when it has the next."""
    going, next_s = drained_of(
        rows, lambda each: State(is_free=each.name not in busy.split(), lasts=each.name in lasts.split()), claim, over, equal, NOW,
        lambda _name, _going: 1,
    )  # fmt: skip
    return [each.name for each, _ in going], next_s


@pytest.mark.parametrize("who", [None, "x", "y", "z"])
def test_what_nobody_has_used_lately_goes_before_all_that_keys_use(who: str | None) -> None:
    shared = used("shared", "x", "y", ago=2 * LATELY_S)
    idle = used("idle", "x", ago=1.5 * LATELY_S)
    rows = [idle, used("mine", "x"), shared]
    assert victim(rows, None if who is None else Claim(who, 1)) == ("shared", "idle" if who else "memory")


def test_a_model_that_several_use_counts_for_each_of_them_in_part() -> None:
    rows = [used("one", "x", "y"), used("two", "x"), used("old", "z", ago=2 * LATELY_S)]
    assert held_by(rows, NOW, lambda _: 1) == {"x": 1.5, "y": 0.5}


def test_two_keys_that_share_models_have_them_in_part_and_give_them_to_those_with_less() -> None:
    rows = [used(name, "a", "b") for name in "defg"] + [used("m", *"0123456789")]
    assert victim(rows, Claim("a", 1)) is None  # the other would have less, and the ten even less
    assert victim(rows, Claim("new", 1)) == ("d", "share")
    assert victim(rows, Claim("0", 1, set("0123456789"))) == ("d", "share")


def test_keys_that_use_the_same_models_trade_them_as_one_key_would() -> None:
    rows = [used("d", "a", "b", ago=3), used("e", "a", "b", ago=2), used("other", "c")]
    assert victim(rows, Claim("a", 1, {"b"})) == ("d", "own")
    assert victim(rows, Claim("a", 1)) is None  # for one of them alone it would be at the other's cost


def test_one_key_trades_its_own() -> None:
    assert victim([used("mine", "x", ago=3), used("ours", "x", "y", ago=5)], Claim("x", 1)) == ("mine", "own")


def test_who_has_most_loses_first() -> None:
    rows = [used("two", "y", ago=9), used("three", "y", ago=9), *(used(name, "x") for name in "abc")]
    assert victim(rows, Claim("z", 1)) == ("a", "share")


def test_a_turn_takes_from_whoever_has_most_what_is_free_then_what_is_oldest_and_last_what_has_sequences() -> None:
    spare, more, free = used("m", "m", there=40), used("n", "m", there=35), used("f", "f", there=32)
    rows = [used("s", "s", there=900), used("y", "y", there=TURN_S / 2), used("o", "o", there=100), spare, more, free]
    assert turn(rows, Claim("z", 1), 1, busy="s m n o y", lasts="s") == (["m"], TURN_S)
    assert turn(rows, Claim("z", 1), 5, busy="s m n o y", lasts="s")[0] == ["m", "f", "o", "n", "s"]
    assert turn(rows, Claim("z", 1), 6, busy="s m n o y", lasts="s")[0] == []  # in part it would be for nothing
    rows[0].loaded = NOW - SEQUENCES_S / 2
    assert turn(rows, Claim("z", 1), 5, busy="s m n o y", lasts="s")[0] == []


def test_a_key_with_next_to_nothing_has_a_turn_at_what_another_has_had_for_long() -> None:
    rows = [used("old", "x"), used("new", "y", there=TURN_S / 2), used("ours", "z", *"0123456789")]
    assert victim(rows, Claim("z", 1)) is None
    assert turn(rows, Claim("z", 1)) == (["old"], TURN_S)
    assert turn([*rows, used("has", "z")], Claim("z", 1))[0] == []
    assert turn(rows[1:], Claim("z", 1))[0] == []


@pytest.mark.parametrize("state", ["busy", "young", "spared", "lasts"])
def test_no_turn_takes_what_many_share_while_another_has_enough(state: str) -> None:
    """Also where that one's can't go for now: it waits."""
    theirs, many = used("rich", "b"), used("shared", *"0123456789")
    if state == "young":
        theirs.loaded = NOW - 1
    if state == "spared":
        theirs.spared = NOW + 100
    found, _ = turn(
        [many, theirs], Claim("a", 1), 1, "rich" if state == "busy" else "", "rich" if state == "lasts" else ""
    )
    assert found == (["rich"] if state == "busy" else [])


def test_who_asks_for_more_than_any_has_gets_it_for_its_part_of_the_time() -> None:
    """As it would be refused for good else; the others get theirs back in a turn of theirs."""
    ten = [str(number) for number in range(10)]
    shared = [used(name, *ten) for name in "abc"]
    going, next_s = turn(shared, Claim("z", 3), 3, equal=3 / 11)
    assert (going, round(next_s)) == (["a", "b", "c"], 11 * TURN_S)
    back = Claim("0", 1, ten)
    assert turn([used("large", "z")], back)[0] == ["large"]
    assert turn([used("large", "z"), used("a", *ten)], back)[0] == ["large"]


class Memory:
    """Models of one size in so much memory, as the gateway has them come and go: a load of each key's in a second."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.there: dict[str, Resident] = {}
        self.asked: dict[str, dict[str, float]] = {}
        self.turns = Turns()
        self.lost: list[tuple[float, str, str, Reason]] = []
        self.busy: set[str] = set()
        self._loaded: dict[str, float] = {}

    def ask(self, who: str, model: str, now: float) -> bool:
        self.asked.setdefault(model, {})[who] = now
        if model in self.there:
            self.there[model].touch(who, now)
            return True
        if self._loaded.get(who, 0.0) == now:
            return False
        sharers = {key for key, at in self.asked[model].items() if now - at <= LATELY_S}
        if len(self.there) >= self.room and not self._makes_room(Claim(who, 1, sharers), now):
            return False
        self._loaded[who] = now
        self.there[model] = Resident(model, now, self.asked[model])
        return True

    def _makes_room(self, claim: Claim, now: float) -> bool:
        found = self._victim(claim, now, trades=False) or self._turn(claim, now) or self._victim(claim, now)
        if found is None:
            return False
        del self.there[found[0].name]
        for who in found[0].keys(now):
            self.lost.append((now, claim.who, who, found[1]))
        return True

    def _victim(self, claim: Claim, now: float, *, trades: bool = True) -> tuple[Resident, Reason] | None:
        rows = [*self.there.values()]
        return victim_of(rows, filter(self._is_free(now), rows), claim, now, lambda _: 1, trades=trades)

    def _turn(self, claim: Claim, now: float) -> tuple[Resident, Reason] | None:
        if self.turns.wait_s(claim.who, now):
            return None
        keys = {who for asked in self.asked.values() for who, at in asked.items() if now - at <= LATELY_S}
        is_free = self._is_free(now)
        going, next_s = drained_of(
            [*self.there.values()], lambda each: State(is_free=is_free(each)), claim, 1, self.room / len(keys), now,
            lambda *_: 1,
        )  # fmt: skip
        if going:
            self.turns.begin(claim.who, now, next_s)
        return going[0] if going else None

    def _is_free(self, now: float) -> Callable[[Resident], bool]:
        return lambda each: now > each.loaded and each.name not in self.busy


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_two_keys_ask_ten_that_share_less_than_their_part_keep_it(
    seed: int, *, together: bool, busy: bool
) -> None:
    """Two of twelve, seven models that fit. The two ask all the time or at times, at once or in turns."""
    chance = random.Random(seed)
    memory = Memory(7)
    theirs = [f"m{number}" for number in range(4, 12)]
    memory.busy = set(theirs) if busy else set()
    refused = 0
    for step in range(400):
        now = NOW + step
        for number in range(10):
            refused += not memory.ask(f"honest{number}", f"m{(step + number) % 3}", now) and step > 5
        for key in "ab":
            if chance.random() < (0.1, 0.6, 1.0)[seed % 3] and (together or step // 40 % 2 == (key == "b")):
                for model in [*theirs, "m0"]:
                    if chance.random() < (0.2, 1.0)[seed % 2]:
                        memory.ask(key, model, now)
    assert not refused
    assert not [each for each in memory.lost if each[1] in "ab" and each[2].startswith("honest")]


@pytest.mark.parametrize("busy", [False, True])
def test_ten_that_share_come_to_have_it_where_two_had_all(*, busy: bool) -> None:
    memory = Memory(7)
    theirs = [f"m{number}" for number in range(4, 12)]
    memory.busy = set(theirs) if busy else set()
    answered = {}
    for step in range(120):
        for key in "ab":
            for model in theirs:
                memory.ask(key, model, NOW + step)
        if step > 20:
            honest = [memory.ask(f"honest{number}", f"m{number % 3}", NOW + step) for number in range(10)]
            answered[step] = all(honest)
    assert all(all_of for step, all_of in answered.items() if step > 20 + 2 * TURN_S), answered


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_asked_a_key_takes_what_leaves_others_less_once_a_turn_at_most(seed: int) -> None:
    """Keys that ask at random, some for more than fits."""
    chance = random.Random(seed)
    memory = Memory(chance.randint(2, 6))
    models = [f"m{number}" for number in range(10)]
    wants = {f"k{number}": chance.sample(models, chance.randint(1, 6)) for number in range(chance.randint(2, 8))}
    for step in range(600):
        for key, wanted in wants.items():
            if chance.random() < 0.7:
                memory.ask(key, chance.choice(wanted), NOW + step)
    for key in wants:
        times = sorted({at for at, who, _, why in memory.lost if who == key and why in ("turn", "drained")})
        assert all(after - before >= TURN_S for before, after in itertools.pairwise(times))
