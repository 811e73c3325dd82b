"""Several processes, here and elsewhere: together they send what one would, and what they measured adds up."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import certifi
import orjson
import pytest
import uvloop

from compress.errors import ServerError
from serve.load.ask.check import Check
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.load.send.arrivals import Arrivals, Leg
from serve.load.send.job import Job, Request
from serve.load.send.processes import Processes
from serve.load.send.worker import listen
from tests.certificates import self_signed
from tests.load_servers import at_once, inferences, options, served

pytestmark = pytest.mark.clock


@contextmanager
def worker(token: str = "secret", *words: str) -> Iterator[str]:
    """The address of a worker in a process of its own."""
    command = [sys.executable, "-m", "serve", "load", "worker", "--port", "0", *words]
    environ = os.environ | {"SERVE_LOAD_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"listens(?: over TLS)? at (\S+)", process.stdout.readline())
            assert found is not None
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0


def test_a_job_arrives_as_it_was_sent() -> None:
    job = Job(
        "http", "::1", 80, (Request(b"a", 2), Request(b"bc")), weights=(1, 3), concurrency=5,
        arrivals=Arrivals("burst", (Leg(1, 2, 3),), 7, 4), metadata=(("a", "b"),),
        check=Check("json", labels=(("1",), ("2",))),
    )  # fmt: skip
    data, blob = job.to_wire()
    again = Job.from_wire(orjson.loads(orjson.dumps(data)), blob)
    assert orjson.dumps(again.to_wire()[0]) == orjson.dumps(data)
    assert again.requests == job.requests
    assert again.arrivals == job.arrivals
    for broken in (blob + b"x", b""):
        with pytest.raises(ValueError, match="lengths"):
            Job.from_wire(data, broken)


@pytest.mark.parametrize("rate", ["", "200"])
def test_processes_share_a_load(rate: str) -> None:
    with served(at_once) as server:
        alone = run_load(options(server, rate=rate, concurrency=3, processes=1, max_requests=50, warmup=0, duration=30))
        shared = run_load(
            options(server, rate=rate, concurrency=3, processes=2, max_requests=50, warmup=0, duration=30)
        )
        assert inferences(server) == alone.count + shared.count
    assert alone.count == shared.count == 50
    assert (alone.processes, shared.processes) == (1, 2)
    assert shared.latency.count == sum(second.due for second in shared.series) == 50


def test_two_workers_elsewhere_send_one_schedule() -> None:
    with served(at_once) as server, worker() as one, worker() as two:
        asked = options(server, rate="300", duration=1, warmup=0, token="secret")
        here = run_load(asked)
        there = run_load(asked.with_(worker=(one, two)))
        again = run_load(asked.with_(worker=(two,)))  # a worker takes load after load
    assert here.count == there.count == again.count
    assert there.errors == {}
    assert there.processes == 2


def test_four_workers_send_one_schedule_and_say_how_far_apart_they_may_be() -> None:
    with served(at_once) as server, ExitStack() as stack:
        workers = tuple(stack.enter_context(worker()) for _ in range(4))
        asked = options(server, rate="400", duration=2, warmup=0, token="secret")
        here = run_load(asked)
        there = run_load(asked.with_(worker=workers))
    assert here.clock_error_ms is None
    assert there.clock_error_ms is not None
    assert there.clock_error_ms > 0
    assert here.count == there.count == there.latency.count
    assert [second.due for second in here.series[:2]] == [second.due for second in there.series[:2]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"), "worker")


def test_a_load_goes_to_its_workers_over_tls(pair: tuple[Path, Path]) -> None:
    words = ("--tls-certificate", str(pair[0]), "--tls-key", str(pair[1]))
    with served(at_once) as server, worker("secret", *words) as address:
        asked = options(server, rate="100", duration=1, warmup=0, token="secret", worker=(address,))
        with pytest.raises(ServerError, match="won't work for us") as plain:
            run_load(asked)
        result = run_load(asked.with_(worker_ca=pair[0]))
        with pytest.raises(ServerError, match="can't trust the worker") as strange:
            run_load(asked.with_(worker_ca=Path(certifi.where())))
        name = address.replace("127.0.0.1", "localhost")
        with pytest.raises(ServerError, match="can't trust the worker"):
            run_load(asked.with_(worker_ca=pair[0], worker=(name,)))
    assert "--worker-ca" in str(plain.value.mend)
    assert "--worker-ca" in str(strange.value.mend)
    assert result.count == inferences(server) > 0


def test_a_worker_without_tls_is_told_from_one_that_is_not_trusted(pair: tuple[Path, Path]) -> None:
    with (
        served(at_once) as server,
        worker() as address,
        pytest.raises(ServerError, match="can't trust the worker") as caught,
    ):
        run_load(options(server, worker=(address,), token="secret", worker_ca=pair[0]))
    assert "--tls-certificate" in str(caught.value.mend)


def test_requests_and_their_key_go_to_another_machine_over_tls_or_by_the_users_own_word() -> None:
    with served(at_once) as server:
        with pytest.raises(ServerError, match="unencrypted"):
            run_load(options(server, worker=("192.0.2.1:9",), token="secret"))
        with pytest.raises(ServerError, match="can't reach the worker"):
            run_load(options(server, worker=("nowhere.invalid:9",), token="secret", worker_plain=True))


@pytest.mark.parametrize("words", [("--tls-key", "k.pem"), ("--tls-certificate", "no.pem", "--tls-key", "no.pem")])
def test_half_of_a_certificate_or_none_is_said(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "serve", "load", "worker", "--port", "0", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "mend:" in done.stderr


def test_a_worker_turns_away_who_does_not_know_the_token() -> None:
    with served(at_once) as server, worker("right") as address:
        with pytest.raises(ServerError, match="the token is another one"):
            run_load(options(server, worker=(address,), token="wrong"))
        assert run_load(options(server, worker=(address,), token="right", warmup=0)).count > 0
        assert inferences(server) > 0


def test_a_worker_sends_to_its_own_machine_only_unless_it_was_told_otherwise() -> None:
    """Told past the coordinator, which would refuse by itself."""

    async def tell(address: str) -> None:
        async with Processes(LoadOptions("m", worker=(address,), token="secret")) as processes:
            job = Job("http", "192.0.2.1", 9, (Request(b"x"),))
            await processes.run(job, lambda _batch, _part: None, lambda _start: None)

    with worker() as address, pytest.raises(ServerError, match="start it with --allow-remote"):
        uvloop.run(tell(address))


def test_a_worker_that_is_lost_makes_the_run_invalid_and_not_worthless() -> None:
    with served(at_once) as server, worker() as one:
        command = [sys.executable, "-m", "serve", "load", "worker", "--port", "0"]
        environ = os.environ | {"SERVE_LOAD_TOKEN": "secret", "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as doomed:
            assert doomed.stdout is not None
            two = doomed.stdout.readline().split()[-1]
            timer = threading.Timer(2.0, doomed.kill)
            timer.start()
            result = run_load(
                options(
                    server, rate="100", duration=3, warmup=0, worker=(one, two), token="secret", max_lateness_ms=1e6
                )
            )
            timer.join()
    assert result.count > 100
    assert any("was lost" in why for why in result.invalid)


def test_a_worker_does_not_listen_to_the_world_without_a_token() -> None:
    with pytest.raises(ServerError, match="SERVE_LOAD_TOKEN"):
        listen("0.0.0.0", 0, token="", allow_remote=False, on_event=print)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1", "127.0.0.1:port"])
def test_workers_that_are_not_there(address: str) -> None:
    with served(at_once) as server, pytest.raises(ServerError, match="can't reach the worker"):
        run_load(options(server, worker=(address,)))


def test_processes_can_be_bound_to_cpus_that_are_there() -> None:
    core = min(os.sched_getaffinity(0))
    with served(at_once) as server:
        assert run_load(options(server, processes=1, cpus=(core,), warmup=0)).count > 0
        with pytest.raises(ServerError, match="can't bind to CPU 9999"):
            run_load(options(server, processes=1, cpus=(9999,)))


def test_strangers_can_not_break_a_worker() -> None:
    with served(at_once) as server, worker() as address:
        host, _, port = address.partition(":")
        for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n" * 20, b"\xff" * 8, b"\0\0\0\2\0\0\0\0{}"):
            with socket.create_connection((host, int(port)), timeout=5) as stranger:
                stranger.sendall(nonsense)
                time.sleep(0.1)
        assert run_load(options(server, worker=(address,), token="secret", warmup=0)).count > 0
