"""Workers and coordinators that end or freeze: what is told of the load then, and when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop

from compress.errors import ServerError
from serve.load.figures.result import LoadResult
from serve.load.measure import Plan, measure
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.load.send import channel as channel_module
from serve.load.send.arrivals import Arrivals, Leg
from serve.load.send.channel import Channel
from serve.load.send.conversation import Conversation
from serve.load.send.job import Job, Request
from serve.load.send.wire import pack
from tests.load_servers import at_once, inferences, options, served
from tests.serve_http import Scripted

pytestmark = pytest.mark.clock

PATIENT = {"warmup": 0, "token": "secret", "max_lateness_ms": 1e6}


@contextmanager
def worker(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A worker's process, and its address."""
    command = [sys.executable, "-m", "serve", "load", "worker", "--port", "0", *words]
    environ = os.environ | {"SERVE_LOAD_TOKEN": "secret", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()


def after(server: Scripted, count: int, then: Callable[[], object]) -> threading.Thread:
    """Do something once so many requests have come."""

    def wait() -> None:
        while inferences(server) < count:
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("load", [{"rate": "200"}, {"concurrency": 4}], ids=["open", "closed"])
def test_a_worker_that_is_ended_has_not_sent_its_part(how: signal.Signals, load: dict[str, Any]) -> None:
    with served(at_once) as server, worker() as (_, one), worker() as (two, address):
        thread = after(server, 100, lambda: two.send_signal(how))
        result = run_load(options(server, duration=3, worker=(one, address), **load, **PATIENT))
        thread.join()
        assert two.wait(10) == 0
    assert any("worker 2" in why and "ended before the load did" in why for why in result.invalid)
    assert not result.interrupted
    assert result.count >= 100


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_what_a_closed_loop_sends_does_not_depend_on_how_many_processes_send(
    clients: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had requests of its own, where their number and that of processes had a divisor in common."""
    from serve.load.send.turns import numbers

    for requests in (2, 4, 12, 4096):
        job = Job("http", "h", 1, (Request(b"x"),) * requests)
        for part in range(clients):
            mine = numbers(job, part, clients)
            sent = [next(mine) % requests for _ in range(requests * 64)]
            first = sum(number % 2 for number in sent) / len(sent)
            assert abs(first - 0.5) < 0.15
            assert len(set(sent)) == requests
        each = [numbers(job, part, clients) for part in range(clients)]
        turns = [next(one) for _ in range(100) for one in each]
        assert sorted(turns) == list(range(100 * clients))


@pytest.mark.parametrize("warmup", [0.0, 0.105])
def test_a_bound_on_requests_ends_a_schedule_where_one_process_would(warmup: float) -> None:
    seen: list[bytes] = []

    async def infer(request: Any, writer: asyncio.StreamWriter) -> None:
        seen.append(request.body)
        await at_once(request, writer)

    with served(infer) as server:
        counts = []
        for processes in (1, 3):
            result = run_load(
                options(
                    server, rate="200", arrivals="constant", processes=processes, max_requests=31, duration=5,
                    warmup=warmup, max_lateness_ms=1e6,
                )
            )  # fmt: skip
            counts.append((result.count, result.warmup_count, [second.due for second in result.series]))
    assert counts[0] == counts[1]


def test_fewer_connections_than_processes_and_the_same_answers_from_several_are_refused() -> None:
    with served(at_once) as server:
        with pytest.raises(ServerError, match="2 connections among 3"):
            run_load(options(server, rate="10", connections=2, processes=3))
        with pytest.raises(ServerError, match="same answers from several"):
            run_load(options(server, expect="same", processes=2))
        assert run_load(options(server, expect="same", processes=1, warmup=0)).seconds > 0


@pytest.mark.parametrize(
    "changes",
    [{"seed": -1}, {"seed": 2**64}, {"max_requests": 2**64}, {"connections": 2**64}, {"worker_wait": -1.0}],
)
def test_numbers_that_no_message_can_carry_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="can't run"):
        LoadOptions("m", **changes)


def test_a_frozen_worker_is_given_up_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "SILENCE_S", 3.0)
    with served(at_once) as server, worker() as (_, one), worker() as (two, address):
        thread = after(server, 50, lambda: two.send_signal(signal.SIGSTOP))
        result = run_load(options(server, rate="100", duration=2, worker=(one, address), **PATIENT))
        thread.join()
    assert any("nothing was heard" in why for why in result.invalid)
    assert result.count > 100


def test_ctrl_c_does_not_wait_for_a_frozen_worker() -> None:
    with served(at_once) as server, worker() as (_, one), worker() as (two, address):
        command = [sys.executable, "-m", "serve", "load", server.url, "--model", "m", "--rate", "100"]
        command += ["--duration", "60", "--warmup", "0", "--worker", one, address]
        environ = os.environ | {"SERVE_LOAD_TOKEN": "secret"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as coordinator:
            after(server, 50, lambda: two.send_signal(signal.SIGSTOP)).join()
            coordinator.send_signal(signal.SIGINT)
            time.sleep(0.5)
            coordinator.send_signal(signal.SIGINT)
            begun = time.monotonic()
            out, _ = coordinator.communicate(timeout=30)
    assert time.monotonic() - begun < 10
    assert "was not waited for" in " ".join(out.split())


def test_a_worker_stops_sending_for_a_coordinator_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "SILENCE_S", 1.0)

    async def main(port: int) -> bool:
        ours, theirs = socket.socketpair()
        held = asyncio.ensure_future(Conversation(Channel(*await asyncio.open_connection(sock=theirs))).hold())
        reader, writer = await asyncio.open_connection(sock=ours)
        data, blob = job(port).to_wire()
        writer.write(pack({"do": "prepare", "job": data, "part": 0, "parts": 1}, blob))
        writer.write(pack({"do": "start", "at_ns": time.perf_counter_ns()}))
        await asyncio.wait([held], timeout=10)
        writer.close()
        assert reader is not None
        return held.done()

    with served(at_once) as server:
        assert uvloop.run(main(port_of(server)))


def test_a_second_load_before_the_first_has_ended_ends_both() -> None:
    async def main(server: Scripted) -> int:
        ours, theirs = socket.socketpair()
        conversation = Conversation(Channel(*await asyncio.open_connection(sock=theirs)))
        held = asyncio.ensure_future(conversation.hold())
        _, writer = await asyncio.open_connection(sock=ours)
        data, blob = job(port_of(server)).to_wire()
        prepare = pack({"do": "prepare", "job": data, "part": 0, "parts": 1}, blob)
        writer.write(prepare + pack({"do": "start", "at_ns": time.perf_counter_ns()}))
        await asyncio.sleep(0.5)
        writer.write(prepare)
        await asyncio.wait([held], timeout=10)
        assert held.done()
        count = inferences(server)
        await asyncio.sleep(0.5)
        writer.close()
        return inferences(server) - count

    with served(at_once) as server:
        assert uvloop.run(main(server)) == 0


def port_of(server: Scripted) -> int:
    return int(server.url.rsplit(":", 1)[1])


def job(port: int) -> Job:
    request = Request(b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    schedule = Arrivals("constant", (Leg(100, 100, 3600),))
    return Job("http", "127.0.0.1", port, (request,), arrivals=schedule, duration_s=3600)


def test_runs_before_a_lost_worker_are_kept_and_what_was_not_sent_is_said() -> None:
    with served(at_once) as server, worker() as (_, one), worker() as (two, address):
        done: list[LoadResult] = []
        asked = options(server, rate="100", duration=1, worker=(one, address), **PATIENT)

        def lose(result: LoadResult) -> None:
            done.append(result)
            two.kill()

        report = measure(asked, Plan(rates=("50", "60", "70")), on_run=lose)
    assert len(done) == len(report.runs) < 3
    assert report.runs[0].invalid == ()
    assert "worker 2" in report.ended
    assert report.invalid


def test_a_worker_of_once_outlives_a_coordinator_that_sent_nothing_and_is_waited_for() -> None:
    with served(at_once) as server, worker("--once") as (one, address), socket.create_server(("127.0.0.1", 0)) as late:
        nobody = f"127.0.0.1:{late.getsockname()[1]}"
        late.close()
        asked = options(server, rate="50", duration=1, worker=(address, nobody), **PATIENT)
        with pytest.raises(ServerError, match="can't reach the worker"):
            run_load(asked)
        time.sleep(0.5)
        assert one.poll() is None
        command = [sys.executable, "-m", "serve", "load", "worker", "--once", "--port", nobody.rpartition(":")[2]]
        environ = os.environ | {"SERVE_LOAD_TOKEN": "secret"}
        starts: list[subprocess.Popen[bytes]] = []
        timer = threading.Timer(2, lambda: starts.append(subprocess.Popen(command, env=environ)))
        timer.start()
        try:
            result = run_load(asked.with_(worker_wait=30.0))
            assert one.wait(10) == starts[0].wait(10) == 0
        finally:
            timer.join()
            starts[0].kill()
    assert result.count > 10


def test_strangers_that_say_nothing_keep_nobody_away_and_busy_is_told_from_another_token() -> None:
    with served(at_once) as server, worker() as (_, address):
        host, _, port = address.partition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(70)]
        asked = options(server, rate="50", duration=3, worker=(address,), **PATIENT)
        first: list[LoadResult] = []
        thread = threading.Thread(target=lambda: first.append(run_load(asked)))
        thread.start()
        after(server, 10, lambda: None).join()
        with pytest.raises(ServerError, match="busy with another load") as caught:
            run_load(asked)
        thread.join()
        for stranger in strangers:
            stranger.close()
    assert first[0].count > 50
    assert "TOKEN" not in caught.value.mend
