"""The load tester tells the truth: against servers whose delay and failures are known."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import threading
import time
from array import array
from typing import Any

import numpy as np
import pytest
import uvloop
from rich.console import Console

from compress.errors import ServerError
from serve.gateway.oip.protocol import parse_request
from serve.load.ask.target import find_target
from serve.load.figures.histogram import Histogram
from serve.load.figures.recorder import Recorder
from serve.load.figures.result import LoadResult, percentile_or_none
from serve.load.options import LoadOptions
from serve.load.report.live import show_progress
from serve.load.report.report import LoadReport
from serve.load.report.terminal import print_report
from serve.load.run import Progress, Session, run_load
from serve.load.send.batch import Batch
from serve.load.send.job import Job, Request
from tests.load_servers import at_once, inferences, model_server, options, served
from tests.serve_http import Received, answer, scripted_server

pytestmark = pytest.mark.clock


def test_latency_is_at_least_the_servers_delay_and_counts_are_the_servers() -> None:
    delay_s = 0.02

    async def slow(_: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        writer.write(answer())

    with served(slow) as server:
        result = run_load(options(server, concurrency=8, duration=0.6))
        assert result.warmup_count + result.count == inferences(server)
        assert server.connections <= 8 + 3  # one each, and those that ask about the model
    assert result.p50_ms is not None
    assert result.mean_ms is not None
    assert result.max_ms is not None
    assert result.p50_ms >= delay_s * 1e3 - 2  # event loops count time in milliseconds
    assert result.mean_ms >= delay_s * 1e3 - 2
    assert result.max_ms >= result.p50_ms
    assert result.errors == {}
    assert result.throughput <= 8 / (delay_s - 0.002)  # a closed loop can't do more
    assert result.throughput == pytest.approx(result.count / result.seconds)
    assert result.seconds >= 0.6
    assert result.bytes_out == result.count * result.request_bytes
    assert result.bytes_in == result.count * len(answer())
    assert sum(second.successes for second in result.series) == result.count


@pytest.mark.parametrize("load", [{"concurrency": 4}, {"rate": "300", "concurrency": 1}])
def test_requests_that_a_server_drops_are_errors_and_are_sent_once(load: dict[str, Any]) -> None:
    """Each tenth connection is closed with no byte of an answer, after others were given over it."""
    dropped: list[int] = []

    async def drops(_: Received, writer: asyncio.StreamWriter) -> None:
        if next(turns) % 10 == 9:
            dropped.append(1)
            writer.close()
        else:
            writer.write(answer())

    turns = iter(range(1_000_000))
    with served(drops) as server:
        result = run_load(options(server, duration=0.6, warmup=0.0, **load))
        assert result.count + sum(result.errors.values()) == inferences(server)
    assert len(dropped) > 5
    assert result.errors == {"closed": len(dropped)}


def test_failures_are_counted_by_kind_and_are_no_fast_answers() -> None:
    async def moody(_: Received, writer: asyncio.StreamWriter) -> None:
        turn = next(turns) % 4
        if turn == 0:
            await asyncio.sleep(0.005)
            writer.write(answer())
        elif turn == 1:
            writer.write(answer(b"{}", "503 Service Unavailable"))
        elif turn == 2:
            writer.write(answer(b"{}", "400 Bad Request"))
        else:
            writer.write(answer()[:-1])
            writer.close()
        outcomes.append(turn)

    turns = iter(range(1_000_000))
    outcomes: list[int] = []
    with served(moody) as server:
        result = run_load(options(server, concurrency=1, warmup=0))
    assert result.count == outcomes.count(0)
    assert result.errors == {
        "closed": outcomes.count(3),
        "status 400": outcomes.count(2),
        "status 503": outcomes.count(1),
    }
    assert result.p50_ms is None or result.p50_ms >= 4


def test_timeouts_and_a_server_that_went_away() -> None:
    async def never(_: Received, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    with served(never) as server:
        result = run_load(options(server, timeout=0.1, warmup=0))
    assert set(result.errors) == {"timeout"}
    assert (result.count, result.throughput, result.mean_ms, result.max_ms) == (0, 0, None, None)

    async def gone() -> LoadResult:
        with served(at_once) as server:
            asked = options(server, duration=0.3)
            session = Session(asked)
            await session.__aenter__()
        try:
            return await session.run(asked)
        finally:
            await session.__aexit__()

    assert set(uvloop.run(gone()).errors) == {"refused"}


def test_a_server_that_does_not_answer_any_more_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.load.run.GIVE_UP_S", 3)

    async def gone(rate: str) -> LoadResult:
        with served(at_once) as server:
            asked = options(server, duration=120, warmup=0, rate=rate)
            session = Session(asked)
            await session.__aenter__()
        try:
            return await session.run(asked)
        finally:
            await session.__aexit__()

    for rate in ("", "50"):
        result = uvloop.run(gone(rate))
        assert result.seconds < 20
        assert result.interrupted
        assert "did not answer any more" in result.invalid[0]
        assert set(result.errors) == {"refused"}
        assert rate or result.error_count < 4 * 25  # each client comes again more and more seldom


@pytest.mark.parametrize("rate", ["", "100"])
def test_a_large_process_tidies_up_before_the_load_and_not_in_it(rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.collect", lambda: time.sleep(0.5))  # as where millions of objects live
    with served(at_once) as server:
        result = run_load(options(server, rate=rate, duration=0.3, warmup=0))
    assert result.count > 10
    assert result.lateness.max_ms is not None
    assert result.lateness.max_ms < 400


def test_a_client_that_backs_off_comes_when_it_was_told_to() -> None:
    async def busy(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}", "503 Service Unavailable", *headers))

    headers: tuple[str, ...] = ()
    with served(busy) as server:
        asked = options(server, concurrency=1, duration=0.9, warmup=0)
        hammered = run_load(asked).error_count
        doubling = run_load(asked.with_(back_off=True)).error_count
        headers = ("Retry-After: 1",)
        told = run_load(asked.with_(back_off=True)).error_count
    assert hammered > 50
    assert 4 <= doubling <= 8
    assert told == 1


def test_a_bounded_number_of_requests() -> None:
    with served(at_once) as server:
        result = run_load(options(server, max_requests=37, duration=30))
        assert result.count == 37
        assert result.seconds < 30
        assert inferences(server) == 37 + result.warmup_count


def test_slow_requests_begun_in_time_are_waited_for() -> None:
    async def slow(_: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        writer.write(answer())

    with served(slow) as server:
        result = run_load(options(server, concurrency=2, duration=0.1, warmup=0))
    assert result.count == 2
    assert result.seconds >= 0.29


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("rate", ["", "100"])
def test_ctrl_c_ends_it_with_a_report(rate: str, processes: int) -> None:
    with served(at_once) as server:

        def interrupt() -> None:
            while inferences(server) < 20:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        result = run_load(options(server, rate=rate, duration=60, warmup=0, processes=processes))
        thread.join()
    assert result.interrupted
    assert result.count > 0
    assert result.seconds < 10
    assert LoadResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_ctrl_c_before_the_processes_are_ready_ends_at_once_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*given: Any, **named: Any) -> Any:
        started.append(real(*given, **named))
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()  # long before it speaks
        return started[-1]

    with served(at_once) as server:
        monkeypatch.setattr(subprocess, "Popen", start)
        before = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_load(options(server, duration=60, processes=1))
    assert time.monotonic() - before < 20
    assert [process.poll() is not None for process in started] == [True]


def test_the_same_seed_sends_the_same_bytes() -> None:
    async def main() -> None:
        async with scripted_server(model_server(at_once)) as server:
            wires = [(await find_target(options(server, seed=seed))).requests[0].wire for seed in (1, 1, 2)]
            assert wires[0] == wires[1] != wires[2]
            body = wires[0].partition(b"\r\n\r\n")[2]
            (tensor,) = parse_request(body, len(body) - 16)
            assert (tensor.name, tensor.shape) == ("x", (1, 4))

    uvloop.run(main())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"url": "https://localhost"}, "http://"),
        ({"url": "http://192.0.2.1:8000"}, "--allow-remote"),
        ({"url": "http://name.invalid"}, "--allow-remote"),
        ({"model": "other"}, "no model 'other'"),
        ({"model": "../other"}, "no model"),
    ],
)
def test_what_can_not_be_a_target(changes: dict[str, Any], says: str) -> None:
    with served(at_once) as server, pytest.raises(ServerError, match=says) as caught:
        run_load(options(server, **changes))
    assert caught.value.mend


def test_a_target_that_is_not_there() -> None:
    with served(at_once) as server:
        asked = options(server)
    with pytest.raises(ServerError, match="can't reach"):
        run_load(asked)


@pytest.mark.parametrize("changes", [{"concurrency": 0}, {"duration": 0}, {"warmup": -1}, {"max_requests": 0}])
def test_options_that_can_not_work(changes: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match=next(iter(changes)).replace("_", "-")):
        LoadOptions(**{"model": "m"} | changes)


def test_a_percentile_needs_ten_samples_beyond_it() -> None:
    for percent, enough in ((50, 20), (90, 100), (99, 1000)):
        values = np.arange(1, enough + 1, dtype=np.int64) * 1_000_000
        assert percentile_or_none(Histogram.of(values[1:]), percent) is None
        assert percentile_or_none(Histogram.of(values), percent) == pytest.approx(enough * percent / 100, rel=1e-3)


def batch(rows: list[list[int]], **others: Any) -> Batch:
    values: dict[str, Any] = {"right": 0, "labelled": 0, "began": len(rows), "warmup": 0, "waiting": 0, "cpu_s": 0.1}
    values |= {"memory_bytes": 1, "ended": ""} | others
    return Batch(array("q", [value for row in rows for value in row]).tobytes(), ("", "timeout"), **values)


def test_the_recorder_keeps_seconds_that_add_up() -> None:
    ms = 1_000_000
    recorder = Recorder(Job("http", "h", 1, (Request(b"abc", 2), Request(b"abcde", 1))))
    rows = [[n * 50 * ms, n * 50 * ms, n * 50 * ms + ms, n * 50 * ms + 2 * ms, 7, n % 2, 0] for n in range(40)]
    recorder.add(batch(rows[:10]), 0)
    recorder.add(batch([*rows[10:], [900 * ms, 901 * ms, 901 * ms, 3500 * ms, 0, 0, 1]], began=31), 1)
    first, second, fourth = (recorder.seconds[number] for number in (0, 1, 3))
    assert (first.due, first.answers, first.rows, first.bytes_in, first.bytes_out) == (21, 20, 30, 140, 80)
    assert (second.due, second.answers, fourth.errors) == (20, 20, {"timeout": 1})
    assert first.latency.value_at(50) == pytest.approx(2 * ms, rel=1e-3)
    assert first.service.value_at(50) == pytest.approx(ms, rel=1e-3)
    assert first.lateness.value_at(100) == pytest.approx(ms, rel=1e-3)
    assert (first.latency_ns, first.waiting_ns, first.longest_ns) == (40 * ms, 20 * ms, 2 * ms)
    assert (recorder.count, recorder.errors, recorder.began) == (40, {"timeout": 1}, 41)
    assert recorder.latency().total == 40


def test_what_people_see() -> None:
    text = io.StringIO()
    with served(at_once) as server:
        closed = run_load(options(server, duration=0.1))
        opened = run_load(options(server, rate="200", duration=0.5))
    for result in (closed, opened):
        print_report(LoadReport((result,), "m at home", hourly_cost=2.5), Console(file=text, width=120))
    for words in ("throughput", "as measured", "from when it was due", "from when it was sent", "a million inferences"):
        assert words in text.getvalue()

    lines = io.StringIO()
    with show_progress(Console(file=lines, width=100)) as show:
        for elapsed_s in (0.2, 5.1, 5.3, 10.2):
            show(Progress(elapsed_s, 11, 100, 1))
    assert lines.getvalue() == "100 answers, 1 errors, 6 s left\n100 answers, 1 errors, 1 s left\n"

    bar = io.StringIO()
    with show_progress(Console(file=bar, width=100, force_terminal=True)) as show:
        show(Progress(0.2, 11, 0, 0))
        show(Progress(5.1, 11, 100, 1, 4, 2, 200.0, 3.5, 9.0, 0.2, "200 requests/s"))
    for words in (
        "warming up",
        "200 requests/s",
        "6 s left",
        "100 answers",
        "1 errors",
        "4 in flight, 2 wait",
        "9 ms p99",
    ):
        assert words in bar.getvalue()
