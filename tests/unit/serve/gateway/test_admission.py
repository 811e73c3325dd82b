"""Places with the model server: how many there are, who waits for one, and who is turned away."""

from __future__ import annotations

import asyncio
import random

import pytest

from serve.gateway.access.admission import Admission, Bounds
from serve.gateway.errors import OverloadedError
from tests.serve_http import in_loop

pytestmark = pytest.mark.clock


class Server:
    """A model server with so many workers, simulated: a request's answer comes after those before it."""

    def __init__(self, workers: int, seconds: float, bounds: Bounds) -> None:
        self.now = 0.0
        self.places = Admission("m", bounds, lambda: self.now)
        self.free_at = [0.0] * workers
        self.seconds = seconds
        self.size = 0
        self.under_way: list[tuple[float, float, int]] = []

    def offer(self, requests: int) -> int:
        """Requests at this moment; those that got a place."""
        entered = 0
        for _ in range(requests):
            if self.places.try_enter():
                worker = min(range(len(self.free_at)), key=self.free_at.__getitem__)
                self.free_at[worker] = max(self.now, self.free_at[worker]) + self.seconds
                self.under_way.append((self.free_at[worker], self.now, self.size))
                entered += 1
        return entered

    def run(self, until: float, rate: float, step: float = 0.001) -> int:
        """Offer so many requests a second, evenly; those answered."""
        answered, owed = 0, 0.0
        while self.now < until:
            self.now += step
            owed += rate * step
            self.offer(int(owed))
            owed -= int(owed)
            for end, begun, size in sorted(each for each in self.under_way if each[0] <= self.now):
                self.under_way.remove((end, begun, size))
                self.places.leave(end - begun, size)
                answered += 1
        return answered


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.01), (2, 0.04), (4, 0.1)])
def test_under_three_times_the_load_the_server_stays_busy_and_answers_in_time(workers: int, seconds: float) -> None:
    server = Server(workers, seconds, Bounds(target_s=8 * seconds))
    capacity = workers / seconds
    server.run(2.0, 0.2 * capacity)
    server.run(6.0, 3 * capacity)
    answered = server.run(10.0, 3 * capacity)
    assert answered > 0.95 * 4 * capacity
    assert max(end - begun for end, begun, _ in server.under_way) < 2 * 8 * seconds
    assert server.places.in_flight <= server.places.bounds.most


def test_the_target_comes_from_an_idle_server_not_from_a_busy_one() -> None:
    server = Server(2, 0.04, Bounds())
    server.run(2.0, 10)
    assert server.places.target_s == pytest.approx(0.32, rel=0.1)
    server.run(100.0, 200, step=0.005)
    assert server.places.target_s < 0.5


def test_a_light_load_is_never_limited() -> None:
    server = Server(2, 0.01, Bounds())
    answered = server.run(10.0, 100)
    assert answered >= 998
    assert server.places.shed == 0


def test_the_limit_grows_only_as_far_as_it_is_used() -> None:
    server = Server(8, 0.01, Bounds(most=1000))
    server.run(20.0, 50)
    assert server.places.limit == 32


def in_turn(size: int, after_s: float = 2.0) -> float:
    """Answers a second of a server of eight workers: small requests of 1 ms, then batches of 60 ms of another size."""
    server = Server(8, 0.001, Bounds(most=64))
    server.run(5.0, 300)
    server.seconds, server.size = 0.06, size
    server.run(5.0 + after_s, 400)
    return server.run(10.0 + after_s, 400) / 5.0


def test_requests_of_another_size_that_take_longer_are_no_sign_of_load() -> None:
    assert in_turn(size=1_000_000) > 0.95 * 8 / 0.06


def test_nor_are_those_of_the_same_size_after_a_moment() -> None:
    """A model that was replaced by a slower one, or answers that came from a cache before."""
    assert in_turn(size=0, after_s=10.0) > 0.9 * 8 / 0.06


@pytest.mark.parametrize("sizes", [(100, 100), (100, 1_000_000)])
def test_requests_of_two_sizes_at_once_do_not_make_each_other_a_sign_of_load(sizes: tuple[int, int]) -> None:
    now = [0.0]
    places = Admission("m", Bounds(), lambda: now[0])
    for number in range(2000):
        assert places.try_enter()
        now[0] += 0.01
        slow = number % 2
        places.leave(0.2 if slow else 0.001, sizes[slow])
    assert (places.limit < 32) is (sizes[0] == sizes[1])


@in_loop
async def test_a_place_whose_client_gave_up_is_free_when_its_answer_would_have_come() -> None:
    loop = asyncio.get_running_loop()
    places = Admission("m", Bounds(most=1, least=1), loop.time)
    for _ in range(30):  # it takes 0.2 s
        assert places.try_enter()
        places.leave(0.2)
        await asyncio.sleep(0.01)
    limit = places.limit
    begun = loop.time()
    assert places.try_enter()
    places.abandon(0.001)
    assert not places.try_enter()
    await places.enter(5, 10)
    assert loop.time() - begun > 0.1
    assert places.limit == limit
    places.leave(None)
    assert places.in_flight == 0


def test_answers_that_are_slow_shrink_the_limit_to_no_less_than_the_least() -> None:
    now = [0.0]
    places = Admission("m", Bounds(target_s=0.1, least=3), lambda: now[0])
    for _ in range(1000):
        assert places.try_enter()
        now[0] += 0.05
        places.leave(5.0)
    assert int(places.limit) == 3


def test_what_says_nothing_of_the_load_is_not_learnt_from() -> None:
    now = [0.0]
    places = Admission("m", Bounds(), lambda: now[0])
    for _ in range(100):
        assert places.try_enter()
        now[0] += 1.0
        places.leave(None)
    assert places.limit == 32
    assert places.target_s == float("inf")


def busy(limit: int = 1, **bounds: float) -> Admission:
    """All places taken, and a server that takes a second."""
    places = Admission("m", Bounds(most=limit, least=1, **bounds), asyncio.get_running_loop().time)  # type: ignore[arg-type]
    for _ in range(limit):
        assert places.try_enter()
    return places


def test_those_that_wait_are_served_by_priority_then_by_time() -> None:
    async def main() -> None:
        places = busy(wait_s=10)
        order: list[str] = []

        async def come(name: str, priority: int) -> None:
            await places.enter(priority, 10)
            order.append(name)
            places.leave(None)

        tasks = []
        for name, priority in (("a5", 5), ("b9", 9), ("c5", 5), ("d1", 1), ("e9", 9)):
            tasks.append(asyncio.create_task(come(name, priority)))
            await asyncio.sleep(0)
        assert places.waiting == 5
        places.leave(None)
        await asyncio.gather(*tasks)
        assert order == ["d1", "a5", "c5", "b9", "e9"]
        assert (places.in_flight, places.waiting) == (0, 0)

    asyncio.run(main())


def test_a_better_priority_takes_the_place_of_a_worse_one_when_too_many_wait() -> None:
    async def main() -> None:
        places = busy(wait_s=10, waiting=2)
        low = [asyncio.create_task(places.enter(9, 10)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await places.enter(9, 10)
        high = asyncio.create_task(places.enter(1, 10))
        await asyncio.sleep(0)
        assert not low[0].done()
        with pytest.raises(OverloadedError, match="more requests"):
            await low[1]
        places.leave(None)
        await high
        places.leave(None)
        await low[0]
        assert places.shed == 2

    asyncio.run(main())


def test_keys_of_one_priority_are_served_in_turn() -> None:
    async def main() -> None:
        places = Admission("m", Bounds(most=1, least=1, wait_s=10), lambda: 0.0)  # all take as long
        assert places.try_enter()
        order: list[str] = []

        async def come(who: str) -> None:
            await places.enter(5, 10, who)
            order.append(who)
            places.leave(None, who=who)

        tasks = [asyncio.create_task(come(who)) for who in ("many", "many", "many", "many", "one", "two", "two")]
        await asyncio.sleep(0)
        places.leave(None)
        await asyncio.gather(*tasks)
        assert order == ["many", "one", "two", "many", "two", "many", "many"]
        assert (places.in_flight, places.waiting) == (0, 0)

    asyncio.run(main())


def test_a_keys_wait_is_not_foretold_by_what_another_sends() -> None:
    async def main() -> None:
        clock = [0.0]
        places = Admission("m", Bounds(most=2, least=2, target_s=1.0, wait_s=10.0), lambda: clock[0])
        for _ in range(40):
            assert places.try_enter()
            clock[0] += 0.5
            places.leave(0.9)
        assert places.try_enter()
        assert places.try_enter()
        waiting = [asyncio.create_task(places.enter(5, 1000, "many")) for _ in range(20)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            places.check(5, 5.0, "many")
        places.check(5, 5.0, "one")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert places.waiting == 0

    asyncio.run(main())


def test_slow_requests_of_one_key_have_no_other_key_refused() -> None:
    async def main() -> None:
        clock = [0.0]
        places = Admission("m", Bounds(most=2, least=2, target_s=0.02), lambda: clock[0])
        places.fairness.instances = 16
        for _ in range(40):
            assert places.try_enter()
            clock[0] += 0.5
            places.leave(0.1)
        assert places.try_enter()
        assert places.try_enter()
        slow = [asyncio.create_task(places.enter(5, 30, "slow")) for _ in range(8)]
        others = [asyncio.create_task(places.enter(5, 30, f"k{n}")) for n in range(10)]
        await asyncio.sleep(0.06)  # longer than twice the target: a request of the slow key ends
        for _ in range(12):
            places.leave(None)
            await asyncio.sleep(0)
        assert [task.exception() for task in others] == [None] * 10
        assert sum(isinstance(task.exception(), OverloadedError) for task in slow if task.done()) == 7
        await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(main())


def test_of_those_that_wait_the_key_with_most_makes_room() -> None:
    async def main() -> None:
        places = busy(wait_s=10, waiting=3)
        many = [asyncio.create_task(places.enter(5, 10, "many")) for _ in range(3)]
        await asyncio.sleep(0)
        one = asyncio.create_task(places.enter(5, 10, "one"))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="more requests"):
            await many[2]
        with pytest.raises(OverloadedError):
            await places.enter(5, 10, "one")  # it would have as many
        for who in ("", "many", "one"):
            places.leave(None, who=who)
            await asyncio.sleep(0)
        await asyncio.gather(*many[:2], one)

    asyncio.run(main())


def test_who_waits_too_long_is_told_when_to_come_again() -> None:
    async def main() -> None:
        places = busy(wait_s=0.05)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(OverloadedError) as caught:
            await places.enter(5, 10)
        assert asyncio.get_running_loop().time() - begun < 1
        assert (b"retry-after", b"1") in caught.value.headers
        assert places.waiting == 0
        with pytest.raises(OverloadedError):
            await places.enter(5, 0.01)

    asyncio.run(main())


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    async def main() -> None:
        clock = [0.0]
        places = Admission("m", Bounds(most=2, least=2, target_s=1.0), lambda: clock[0])
        for _ in range(40):
            assert places.try_enter()
            clock[0] += 0.5
            places.leave(0.9)
        assert places.try_enter()
        assert places.try_enter()
        waiting = [asyncio.create_task(places.enter(5, 10)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="more requests"):
            places.check(5, 10)
        places.check(4, 10)  # the better priority would be the first
        with pytest.raises(OverloadedError):
            places.check(4, 0.1)  # but not within a tenth of a second
        for task in waiting:
            task.cancel()

    asyncio.run(main())


def test_places_are_never_lost_whatever_clients_do() -> None:
    async def main() -> None:
        chance = random.Random(0)
        places = busy(3, wait_s=0.05)

        async def client() -> None:
            who = chance.choice("abc")
            try:
                await places.enter(chance.randint(1, 9), 10, who)
            except OverloadedError:
                return
            try:
                await asyncio.sleep(chance.random() * 0.01)
            finally:
                places.leave(0.001, who=who)

        tasks = []
        for number in range(600):
            tasks.append(asyncio.create_task(client()))
            if number == 20:
                for _ in range(3):
                    places.leave(0.001)
            if number % 3 == 0:
                chance.choice(tasks).cancel()
            if number % 7 == 0:
                await asyncio.sleep(0.002)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (places.in_flight, places.waiting) == (0, 0)
        assert all(places.try_enter(who) for who in "abc")

    asyncio.run(main())
