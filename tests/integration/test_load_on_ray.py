"""A load from the nodes of a real Ray cluster: one schedule, added up, and nothing left of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from compress.errors import ServerError
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.load.send.on_ray import workers_on_ray
from tests.load_servers import at_once, inferences, served
from tests.ray_cluster import ON_RAY, Running, ray_cluster
from tests.serve_http import Scripted

pytestmark = ON_RAY


@pytest.fixture(scope="module")
def cluster() -> Iterator[Running]:
    with ray_cluster(3) as running:
        yield running


@pytest.fixture
def server() -> Iterator[Scripted]:
    with served(at_once) as found:
        yield found


def options(cluster: Running, server: Scripted, **more: object) -> LoadOptions:
    asked = LoadOptions("m", server.url, rate="300", duration=3.0, warmup=0.0, ray=cluster.address, max_lateness_ms=1e5)
    return asked.with_(**more)


def workers() -> list[psutil.Process]:
    return [
        each for each in psutil.process_iter(["cmdline"]) if "serve.load.send.on_ray" in (each.info["cmdline"] or ())
    ]


def nothing_is_left() -> None:
    until = time.monotonic() + 60
    while workers():
        assert time.monotonic() < until, workers()
        time.sleep(0.1)


def test_each_node_sends_a_part_of_one_schedule(cluster: Running, server: Scripted) -> None:
    begun = time.time()
    with workers_on_ray(options(cluster, server)) as given:
        assert len(set(given.worker)) == 3
        assert len(workers()) == 3
        for each in workers():
            assert not any(given.token in word for word in (*each.cmdline(), *each.environ().values()))
        keys = Path(tempfile.gettempdir()).glob("serve-load-*/key.pem")  # Ray's kill would leave them
        assert not [key for key in keys if key.stat().st_mtime >= begun]
        result = run_load(given)
        again = run_load(given)
    for each in (result, again):
        assert not each.errors
        assert not [why for why in each.invalid if "worker" in why]
        assert abs(each.count - 900) < 90
    assert inferences(server) >= result.count + again.count
    nothing_is_left()


def test_it_is_told_who_can_have_no_worker(cluster: Running, server: Scripted) -> None:
    for wrong, what in (
        ({"ray_workers": 4}, "each takes a core: 4 of 3"),
        ({"ray": "", "ray_workers": 2}, "no cluster"),
        ({"worker": ("127.0.0.1:1",)}, "--worker and --ray"),
        ({"ray": "127.0.0.1:1"}, "refused"),
    ):
        with pytest.raises(ServerError) as told, workers_on_ray(options(cluster, server, **wrong)):
            pass
        assert what in told.value.why
    nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_command_ends_its_workers(cluster: Running, server: Scripted, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "serve", "load", server.url, "--model", "m", "--rate", "100", "--duration", "300"]
    command += ["--ray", cluster.address, "--ray-workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as load:
        while inferences(server) < 30:
            assert load.poll() is None, load.communicate()[0]
            time.sleep(0.1)
        assert len(workers()) == 2
        load.send_signal(number)
        out, _ = load.communicate(timeout=60)
    assert "Traceback" not in out
    nothing_is_left()


def test_a_node_that_dies_makes_the_run_invalid_and_the_rest_is_kept(cluster: Running, server: Scripted) -> None:
    with workers_on_ray(options(cluster, server, duration=60.0, ray_workers=2)) as given:
        victim = workers()[0]
        killer = threading.Timer(2.0, victim.kill)
        killer.start()
        result = run_load(given)
    assert result.invalid
    assert result.count > 50
    nothing_is_left()
