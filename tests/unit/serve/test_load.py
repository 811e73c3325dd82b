"""The load tester tells the truth: against servers whose delay and failures are known."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from rich.console import Console

from compress.errors import ServerError
from serve.gateway.protocol import parse_request
from serve.load.generator import Progress, generate
from serve.load.options import LoadOptions
from serve.load.recorder import Recorder
from serve.load.report import print_result, show_progress
from serve.load.result import LoadResult, percentile_or_none
from serve.load.run import run_load
from serve.load.target import find_target
from tests.serve_http import Received, Respond, Scripted, answer, scripted_server

METADATA = json.dumps(
    {
        "name": "m",
        "versions": ["1"],
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 1]}],
    }
).encode()


def model_server(infer: Respond) -> Respond:
    """A server of the model "m" that answers inference as `infer` does."""

    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            await infer(request, writer)
        elif request.target == "/v2/models/m":
            writer.write(answer(METADATA))
        else:
            writer.write(answer(b"{}", "404 Not Found"))

    return respond


@contextmanager
def served(infer: Respond) -> Iterator[Scripted]:
    """Such a server in a thread of its own."""
    started = threading.Event()
    found: list[Scripted] = []
    ends: list[Callable[[], object]] = []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        async with scripted_server(model_server(infer)) as server:
            found.append(server)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    try:
        assert started.wait(10)
        yield found[0]
    finally:
        ends[0]()
        thread.join(10)


def options(server: Scripted, **changes: Any) -> LoadOptions:
    defaults: dict[str, Any] = {"model": "m", "url": server.url, "concurrency": 4, "duration": 0.4, "warmup": 0.1}
    return LoadOptions(**defaults | changes)


def inferences(server: Scripted) -> int:
    return sum(request.method == "POST" for request in server.requests)


async def at_once(_: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer())


def test_latency_is_at_least_the_servers_delay_and_counts_are_the_servers() -> None:
    delay_s = 0.02

    async def slow(_: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_s)
        writer.write(answer())

    with served(slow) as server:
        result = run_load(options(server, concurrency=8, duration=0.6))
        assert result.warmup_count + result.count == inferences(server)
        assert server.connections == 8 + 1  # one each, and one to ask for the model
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

    with served(at_once) as server:
        asked = options(server)
        target = uvloop.run(find_target(asked))

    async def gone() -> LoadResult:
        return await generate(target, asked, stop=asyncio.Event())

    assert set(uvloop.run(gone()).errors) == {"refused"}


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


def test_ctrl_c_ends_it_with_a_report(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    with served(at_once) as server:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        result = run_load(options(server, duration=60, warmup=0, output=path))
        timer.join()
    assert result.interrupted
    assert result.count > 0
    assert result.seconds < 60
    assert LoadResult.from_dict(json.loads(path.read_text())) == result


def test_the_same_seed_sends_the_same_bytes() -> None:
    async def main() -> None:
        async with scripted_server(model_server(at_once)) as server:
            bodies = [(await find_target(options(server, seed=seed))).body for seed in (1, 1, 2)]
            assert bodies[0] == bodies[1] != bodies[2]
            (tensor,) = parse_request(bodies[0], len(bodies[0]) - 16)
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


def test_a_target_that_is_not_there_and_a_file_that_can_not_be(tmp_path: Path) -> None:
    with served(at_once) as server:
        asked = options(server, duration=0.05, output=tmp_path / "no" / "folder.json")
        with pytest.raises(ServerError, match="can't write"):
            run_load(asked)
    with pytest.raises(ServerError, match="can't reach"):
        run_load(asked)


@pytest.mark.parametrize("changes", [{"concurrency": 0}, {"duration": 0}, {"warmup": -1}, {"max_requests": 0}])
def test_options_that_can_not_work(changes: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match=next(iter(changes)).replace("_", "-")):
        LoadOptions(**{"model": "m"} | changes)


def test_a_percentile_needs_ten_samples_beyond_it() -> None:
    for percent, enough in ((50, 20), (90, 100), (99, 1000)):
        assert percentile_or_none(np.arange(enough - 1), percent) is None
        assert percentile_or_none(np.arange(1, enough + 1), percent) == enough * percent / 100


def test_recorder_series() -> None:
    recorder = Recorder()
    for number in range(40):
        recorder.success(number * 50_000_000, number * 50_000_000 + 1_000_000 * (1 + number // 20), 7)
    recorder.failure("timeout", 3_500_000_000)
    result = recorder.result(
        model="m",
        url="u",
        concurrency=1,
        begin_ns=0,
        end_ns=4_000_000_000,
        request_bytes=3,
        client_cpu_share=0.5,
        interrupted=False,
    )
    assert [(s.successes, s.errors, s.p50_ms) for s in result.series] == [
        (20, 0, 1.0),
        (20, 0, 2.0),
        (0, 0, None),
        (0, 1, None),
    ]
    assert (result.count, result.throughput, result.error_count, result.bytes_in) == (40, 10, 1, 280)
    assert LoadResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_what_people_see() -> None:
    text = io.StringIO()
    with served(at_once) as server:
        result = run_load(options(server, duration=0.1))
    print_result(result, Console(file=text, width=100))
    assert "throughput" in text.getvalue()

    lines = io.StringIO()
    with show_progress(Console(file=lines, width=100)) as show:
        for elapsed_s in (0.2, 5.1, 5.3, 10.2):
            show(Progress(elapsed_s, 11, 100, 1))
    assert lines.getvalue() == "100 answers, 1 errors, 6 s left\n100 answers, 1 errors, 1 s left\n"

    bar = io.StringIO()
    with show_progress(Console(file=bar, width=100, force_terminal=True)) as show:
        show(Progress(0.2, 11, 0, 0))
        show(Progress(5.1, 11, 100, 1))
    assert "100 answers, 1 errors" in bar.getvalue()
