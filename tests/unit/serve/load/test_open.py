"""An open loop sends when requests are due, whatever becomes of the others, and says when it could not."""

from __future__ import annotations

import asyncio
import gc
import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from compress.errors import ServerError
from serve.load.report.report import LoadReport
from serve.load.report.terminal import print_report
from serve.load.run import run_load
from tests.load_servers import at_once, inferences, options, served
from tests.serve_http import Received, answer

pytestmark = pytest.mark.clock


def test_it_sends_what_the_schedule_says_and_counts_all_of_it() -> None:
    with served(at_once) as server:
        result = run_load(options(server, rate="300", duration=1, warmup=0.5))
        assert inferences(server) == result.count + result.warmup_count
    assert 220 < result.count < 380
    assert 90 < result.warmup_count < 220
    assert (result.rate, result.concurrency, result.arrivals) == (300, 0, "poisson")
    assert result.latency.count == result.service.count == result.lateness.count == result.count
    assert sum(second.due for second in result.series) == result.count


def test_the_same_seed_gives_the_same_number_and_another_seed_another() -> None:
    with served(at_once) as server:
        counts = [run_load(options(server, rate="500", duration=0.4, warmup=0, seed=seed)).count for seed in (1, 1, 2)]
    assert counts[0] == counts[1] != counts[2]


def test_what_somebody_else_has_put_out_of_the_collector_s_sight_stays_there() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with served(at_once) as server:
        run_load(options(server, duration=0.2, warmup=0))
    assert gc.get_freeze_count() > frozen / 2, "some of them may be gone since"


def test_a_stall_shows_from_when_requests_were_due_and_hides_from_when_they_were_sent() -> None:
    """A server that holds everything back for 0.8 s, and a tester with few connections (coordinated omission)."""
    begun: list[float] = []  # with the first request: a busy machine may take its time until then

    async def stalls(_: Received, writer: asyncio.StreamWriter) -> None:
        begun.append(time.monotonic())
        if 1.0 < (since := begun[-1] - begun[0]) < 1.8:
            await asyncio.sleep(1.8 - since)
        writer.write(answer())

    with served(stalls) as server:
        result = run_load(options(server, rate="200", arrivals="constant", duration=3, warmup=0, connections=4))
    assert result.errors == {}
    due, sent = result.latency.at("p90"), result.service.at("p90")
    assert due is not None
    assert sent is not None
    assert due > 200  # 0.8 of 3 s were held back: a tenth of the requests waited longer than 0.5 s
    assert sent < 100  # four of 600
    assert result.waiting_ms > 50


def test_requests_that_wait_for_a_connection_do_not_make_the_generator_late() -> None:
    async def slow(_: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(answer())

    with served(slow) as server:
        result = run_load(options(server, rate="100", duration=1, warmup=0, connections=1))
    assert result.count > 60
    assert result.waiting_ms > 500  # one connection answers 20 a second
    assert result.latency.mean_ms is not None
    assert result.latency.mean_ms > result.waiting_ms
    late = result.lateness.at("p50")
    assert late is not None
    assert late < result.waiting_ms / 2, "where waits counted, it would be about as much; a busy machine delays both"
    assert result.seconds > 2  # all were waited for


def test_a_generator_that_is_late_says_that_the_run_is_invalid() -> None:
    with served(at_once) as server:
        good = run_load(options(server, rate="100", warmup=0, max_lateness_ms=1e6))
        bad = run_load(options(server, rate="100", warmup=0, max_lateness_ms=1e-6))
    assert good.invalid == ()
    assert "the generator itself was late: up to " in bad.invalid[0], "there are too few samples for a p99"
    for run in (good, bad):
        written = io.StringIO()
        print_report(LoadReport((run,), "serve load"), Console(width=120, file=written))
        (line,) = [line for line in written.getvalue().splitlines() if "sent late" in line]
        assert re.search(r"sent late, at most\W+[0-9.]+ ms \(too few samples for p99\)", line)


def test_timeouts_refusals_and_failures_are_counted_by_kind() -> None:
    async def never(_: Received, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def sheds(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}", "503 Service Unavailable"))

    with served(never) as server:
        assert set(run_load(options(server, rate="50", warmup=0, timeout=0.1)).errors) == {"timeout"}
    with served(sheds) as server:
        result = run_load(options(server, rate="50", warmup=0))
    assert set(result.errors) == {"status 503"}
    assert (result.count, result.p50_ms, result.error_share) == (0, None, 1)


def test_connections_that_the_server_closes_after_each_answer_are_opened_again() -> None:
    async def closes(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"ok", "200 OK", "connection: close"))
        await writer.drain()
        writer.close()

    async def without_a_length(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nbody")
        writer.close()

    for behaviour in (closes, without_a_length):
        with served(behaviour) as server:
            result = run_load(options(server, rate="100", warmup=0))
        assert result.errors == {}
        assert result.count > 10


def test_a_bounded_number_of_requests() -> None:
    with served(at_once) as server:
        result = run_load(options(server, rate="1000", duration=30, max_requests=50, warmup=0.1))
        assert result.count == 50
        assert result.seconds < 5


def test_a_trace_is_followed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time,what\n" + "".join(f"{100 + number / 100},x\n" for number in range(31)))
    with served(at_once) as server:
        result = run_load(options(server, arrivals=f"trace:{trace}", warmup=0.1))
        faster = run_load(options(server, arrivals=f"trace:{trace}", rate="310", warmup=0))
    assert result.count == 31
    assert result.rate == pytest.approx(31 / 0.3, rel=0.01)
    assert faster.count == 31
    assert faster.rate == pytest.approx(310, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rate": "fast"}, "can't read the rate"),
        ({"rate": "-1"}, "0 or more"),
        ({"rate": "10:0"}, "longer than 0"),
        ({"rate": "0.001"}, "not one request"),
        ({"rate": "10", "arrivals": "sometimes"}, "no such kind"),
        ({"rate": "10", "arrivals": "burst:0"}, "no such kind"),
        ({"arrivals": "trace:/nowhere"}, "can't read the trace"),
    ],
)
def test_what_is_no_schedule(changes: dict[str, str], says: str) -> None:
    with served(at_once) as server, pytest.raises(ServerError, match=says) as caught:
        run_load(options(server, **changes))
    assert caught.value.mend
