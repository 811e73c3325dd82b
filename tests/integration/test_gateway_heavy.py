"""Heavy requests of one key at a real Triton with one instance: those of other keys wait for one of them, not for all.

Whichever way they come: by the model's own name or by that of a release, beginning sequences, or given up at once.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.rollout.plan import Plan, Target
from serve.rollout.store import Store
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_connections import CONFIG, MODEL
from tests.integration.test_gateway_sequences import until
from tests.serve_http import gateway_thread

HEAVY_S, CONNECTIONS = 0.4, 8
SEQUENCES = "sequence_batching { oldest { max_candidate_sequences: 64 } max_sequence_idle_microseconds: 60000000 }\n"
BATCHES = "dynamic_batching { max_queue_delay_microseconds: 1000 }\n"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("heavy")
    for name, more in (("m", ""), ("next", ""), ("steps", SEQUENCES), ("wide", BATCHES)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(MODEL)
        (repository / name / "config.pbtxt").write_text(CONFIG % name + more)
    two = (repository / "wide" / "config.pbtxt").read_text().replace("count: 1", "count: 2")
    (repository / "wide" / "config.pbtxt").write_text(two)
    with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
        yield server
        server.stop(within_s=5)  # what tests have left with it is of no use


def ask(
    connection: http.client.HTTPConnection, key: str, model: str, seconds: float, *, within_ms: int = 0, **told: object
) -> int:
    item = {"name": "seconds", "datatype": "FP32", "shape": [1, 1], "data": [seconds]}
    headers = {"x-api-key": key} | ({"X-Request-Timeout-Ms": str(within_ms)} if within_ms else {})
    body = json.dumps({"inputs": [item], "parameters": told})
    connection.request("POST", f"/v2/models/{model}/infer", body, headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.mark.parametrize("way", ["alone", "candidate", "sequence", "given up"])
def test_others_wait_for_one_heavy_request_not_for_all_of_them(triton: TritonServer, tmp_path: Path, way: str) -> None:
    keys, state = tmp_path / "keys.json", tmp_path / "rollouts.db"
    greedy, *others = (add_key(keys, name)[0] for name in ("greedy", "one", "two", "three"))
    settings = Settings(upstream=(f"http://{triton.http_address}",), port=0, keys=keys, state=state)
    asked = "steps" if way == "sequence" else "m"
    answered: list[float] = []  # when a heavy request was
    waited: list[tuple[float, float, int]] = []  # from when until when a light one did, and its answer
    numbers = itertools.count(1000)
    ends = threading.Event()

    with gateway_thread(settings) as url:

        def heavy() -> None:
            with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
                while not ends.is_set():
                    whole = {"sequence_id": next(numbers), "sequence_start": True, "sequence_end": True}
                    status = ask(
                        connection,
                        greedy,
                        "next" if way == "candidate" else asked,
                        HEAVY_S,
                        within_ms=40 if way == "given up" else 0,
                        **(whole if way == "sequence" else {}),
                    )
                    if status == 200:
                        answered.append(time.monotonic())
                    elif way != "given up":
                        time.sleep(0.1)

        def light(key: str, number: int) -> None:
            with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
                own = {"sequence_id": number} if way == "sequence" else {}
                if own:
                    assert ask(connection, key, asked, 0.0, sequence_start=True, **own) == 200
                while not ends.is_set():
                    begun = time.monotonic()
                    status = ask(connection, key, asked, 0.0, **own)
                    waited.append((begun, time.monotonic(), status))
                    time.sleep(0.1)

        if way in ("candidate", "given up"):
            store = Store(state)
            store.start("m", Target("next"), Plan(steps=(50.0,), step_s=3600.0), Target("m"))
            until(lambda: store.all("m")[0].state == "running")
            if way == "candidate":
                store.wish("m", "promote")
                until(lambda: store.all("m")[0].state == "promoted")
            time.sleep(0.6)  # a gateway looks twice a second
        threads = [threading.Thread(target=light, args=(key, number)) for number, key in enumerate(others, 1)]
        threads += [threading.Thread(target=heavy) for _ in range(CONNECTIONS)]
        for thread in threads[: len(others)]:
            thread.start()
        time.sleep(1)  # a key that is alone may have all there is
        for thread in threads[len(others) :]:
            thread.start()
        time.sleep(CONNECTIONS * HEAVY_S + 2)  # what came at once, before anything was known, is through
        known = time.monotonic()
        time.sleep(10)
        ends.set()
        for thread in threads:
            thread.join()

    late = [(begun, end, status) for begun, end, status in waited if begun > known]
    assert {status for _, _, status in late} == {200}
    took = sorted(end - begun for begun, end, _ in late)
    assert took[len(took) // 2] < HEAVY_S / 2, took  # for most, none was there
    assert sum(each > 3 * HEAVY_S for each in took) <= len(took) // 50, took
    if way != "given up":  # of which nobody is told when they end
        passed = [sum(begun < each < end for each in answered) for begun, end, _ in late]
        assert max(passed) <= 2, passed  # one that was with Triton, and at most one that was answered just before
        assert sum(each > known for each in answered) > 2  # and the key has its part


@pytest.mark.parametrize("every_s", [None, 2.0], ids=["alone", "beside a light request now and then"])
def test_a_key_has_its_instances_and_batches(triton: TritonServer, tmp_path: Path, every_s: float | None) -> None:
    keys, connections, seconds = tmp_path / "keys.json", 16, 0.2
    busy, rare = (add_key(keys, name)[0] for name in ("busy", "rare"))
    settings = Settings(upstream=(f"http://{triton.http_address}",), port=0, keys=keys, max_address_share=1.0)
    answers: list[tuple[float, int]] = []
    waited: list[float] = []
    ends = threading.Event()

    with gateway_thread(settings) as url:

        def uses() -> None:
            with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
                while not ends.is_set():
                    status = ask(connection, busy, "wide", seconds)
                    answers.append((time.monotonic(), status))
                    if status != 200:
                        time.sleep(0.1)

        def looks_in(every_s: float) -> None:
            with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
                while not ends.is_set():
                    begun = time.monotonic()
                    assert ask(connection, rare, "wide", 0.0) == 200
                    waited.append(time.monotonic() - begun)
                    ends.wait(every_s)

        threads = [threading.Thread(target=uses) for _ in range(connections)]
        if every_s is not None:
            threads.append(threading.Thread(target=looks_in, args=(every_s,)))
        for thread in threads:
            thread.start()
        time.sleep(3)  # by when it is known what each takes
        known = time.monotonic()
        time.sleep(8)
        until = time.monotonic()
        ends.set()
        for thread in threads:
            thread.join()

    late = [status for at, status in answers if known < at < until]
    # Without batches, and with one instance left free, it is 5 a second; one at a time in both, 10.
    assert late.count(200) > 8 * 15, len(late)
    assert late.count(200) > 0.9 * len(late)
    assert sum(each < 10 * seconds for each in waited) >= 0.8 * len(waited)
