"""The monitoring on a real Prometheus that scrapes a real gateway and a real Triton: each query is asked there."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from serve.deploy.cluster.canary import analysis_queries
from serve.deploy.cluster.scaling import Signal, signals
from serve.deploy.monitoring.alerts import alerts
from serve.deploy.monitoring.dashboards import dashboard, filled, queries
from serve.deploy.monitoring.monitoring import MonitoringOptions, write_monitoring
from serve.deploy.monitoring.objectives import objectives_of
from serve.deploy.monitoring.rules import autoscaling, recording_rules
from serve.deploy.monitoring.scope import Scope
from serve.deploy.options import RenderOptions, read_plan
from serve.gateway.settings import Settings
from serve.pack.options import PackOptions
from serve.pack.write import pack
from serve.rollout.plan import Plan
from serve.triton.launch import Ports, TritonOptions, TritonServer
from tests.e2e.conftest import free_port
from tests.gateway_models import fetch
from tests.serve_http import gateway_thread
from tests.serve_models import hook_file, tiny_artifact

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="Debian's package prometheus is not there")
GOAL = objectives_of()
RENDERED = RenderOptions(gateway_image="registry.example/gateway:1.0", target=10.0)
SCOPE = Scope(models=("tiny", "hooked"))
ANALYSIS = analysis_queries(Plan(), GOAL, 'job="triton"', 'job="triton"', SCOPE)
X = [[0.0, 2.0, 1.0, 0.0]]
INFER = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": X}]}).encode()
NO_GPU = "nv_gpu_"  # series that a Triton without a GPU does not have


class Watched:
    """A Triton, a gateway and a Prometheus that looks at both each second."""

    def __init__(self, url: str, triton: TritonServer) -> None:
        self.url, self.triton = url, triton

    def ask(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
            told = json.load(answer)
        assert told["status"] == "success"
        return told["data"]

    def values(self, query: str) -> list[float]:
        """What a query gives now, with all that the dashboard's variables may select."""
        plain = filled(dashboard(GOAL), query, {})
        return [float(row["value"][1]) for row in self.ask("query", query=plain)["result"]]

    def until(self, query: str, seconds: float = 40) -> list[float]:
        """The same, once there is something."""
        deadline = time.monotonic() + seconds
        while not (found := self.values(query)) and time.monotonic() < deadline:
            time.sleep(0.3)
        return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("prometheus")
    for _ in range(2):
        both = PackOptions(serve_latest=2)
        pack(tiny_artifact(folder / "artifact"), repository=folder / "models", name="tiny", options=both)
        shutil.rmtree(folder / "artifact")
    hooks = hook_file(folder)
    pack(tiny_artifact(folder / "artifact"), repository=folder / "models", name="hooked", hooks=hooks)
    state, port = folder / "rollouts.db", free_port()
    with (
        TritonServer(folder / "models", ports=Ports(0, 0, 0), options=TritonOptions()) as triton,
        gateway_thread(Settings(upstream=(f"http://{triton.http_address}",), port=0, state=state)) as gateway,
    ):
        options = MonitoringOptions(
            gateway=(gateway.removeprefix("http://"),), triton=(triton.metrics_address,), interval_s=1
        )
        write_monitoring(folder / "deploy", options)
        start = [
            "start",
            "tiny",
            "--candidate",
            "2",
            "--shadow",
            "50",
            "--steps",
            "50",
            "--step-s",
            "3600",
            "--state",
            str(state),
        ]
        subprocess.run([sys.executable, "-m", "serve", "rollout", *start], check=True, capture_output=True)
        stop = threading.Event()
        client = threading.Thread(target=requests, args=(gateway, stop))
        client.start()
        process = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={folder / 'deploy/prometheus/prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            found = Watched(f"http://127.0.0.1:{port}", triton)
            deadline = time.monotonic() + 30
            while True:
                try:
                    urllib.request.urlopen(f"{found.url}/-/ready").close()
                    break
                except OSError:
                    assert time.monotonic() < deadline, "Prometheus does not start"
                    time.sleep(0.1)
            yield found
        finally:
            process.terminate()
            process.wait(20)
            stop.set()
            client.join()


def requests(url: str, stop: threading.Event) -> None:
    """Good ones, one in ten that Triton refuses; and of an ensemble of three steps."""
    number = 0
    while not stop.wait(0.1):
        number += 1
        fetch(f"{url}/v2/models/tiny/infer", INFER if number % 10 else INFER.replace(b"FP32", b"INT8"))
        fetch(f"{url}/predict/hooked", b'{"text": "0,2,1,0"}', content_type="application/json")


def test_both_are_scraped(watched: Watched) -> None:
    for job in ("gateway", "triton"):
        assert watched.until(f'up{{job="{job}"}} == 1') == [1.0]


def test_every_rule_is_evaluated_without_an_error(watched: Watched) -> None:
    watched.until("serving:requests:rate5m")
    rules = [rule for group in watched.ask("rules")["groups"] for rule in group["rules"]]
    count = sum(len(group["rules"]) for group in recording_rules(GOAL)["groups"]) + len(alerts(GOAL))
    assert len(rules) == count
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}


@pytest.mark.parametrize(
    "query", sorted({rule["record"] for group in recording_rules(GOAL)["groups"] for rule in group["rules"]})
)
def test_what_is_recorded_has_values(watched: Watched, query: str) -> None:
    """Among them those that an autoscaler looks at."""
    assert watched.until(query)


@pytest.mark.parametrize(
    "signal_", signals(RENDERED, read_plan(None), GOAL.slow_s, SCOPE, gpu=True), ids=lambda each: each.name
)
def test_what_replicas_follow_is_one_number(watched: Watched, signal_: Signal) -> None:
    """As KEDA asks it."""
    found = watched.until(signal_.query, 0 if NO_GPU in signal_.query else 40)
    assert len(found) == int(NO_GPU not in signal_.query)


def test_an_ensemble_counts_as_what_clients_asked_of_it(watched: Watched) -> None:
    """Triton counts its steps, too; the gateway counts what it answered."""
    requests_ = autoscaling(Scope(models=("hooked",)))["autoscale:requests:rate1m"]
    answered = 'sum(rate(gateway_requests_total{model="hooked",code="200"}[1m]))'
    watched.until(f"({requests_} > 0) and ({answered} > 0)")
    (ratio,) = watched.values(f"({requests_}) / ({answered})")
    assert 0.6 < ratio < 1.6  # looked at in different moments of the first minute
    (steps,) = watched.values(f'sum(rate(nv_inference_request_success{{model=~"hooked.*"}}[1m])) / {requests_}')
    assert steps > 2


@pytest.mark.parametrize("name", sorted(ANALYSIS))
def test_what_a_canary_is_judged_by_is_one_number(watched: Watched, name: str) -> None:
    """Canary and stable are the same Triton here, so that neither is worse than the other."""
    query, most = ANALYSIS[name]
    watched.until("autoscale:requests:rate1m > 0")
    (found,) = watched.until(query)
    if name in ("more-errors", "slower"):
        assert found <= most
    assert found == pytest.approx({"more-errors": 0, "slower": 1}.get(name, found))


@pytest.mark.parametrize("name", ["more-errors", "slower"])
@pytest.mark.parametrize("nobody", ["canary", "stable"])
def test_a_canary_that_got_no_requests_has_no_number(watched: Watched, name: str, nobody: str) -> None:
    watched.until(ANALYSIS[name][0])
    asked = {"canary": 'job="triton"', "stable": 'job="triton"'} | {nobody: 'job="nobody"'}
    query, _ = analysis_queries(Plan(), GOAL, asked["canary"], asked["stable"], SCOPE)[name]
    assert not [value for value in watched.values(query) if not math.isnan(value)]


@pytest.mark.parametrize(("title", "query"), list(queries(dashboard(GOAL))))
def test_every_panel_of_the_dashboard_shows_something(watched: Watched, title: str, query: str) -> None:
    found = watched.until(query, 0 if NO_GPU in query else 40)
    assert bool(found) != (NO_GPU in query), title


@pytest.mark.parametrize("alert", alerts(GOAL), ids=lambda alert: alert.name)
def test_every_alert_watches_something_that_is_there(watched: Watched, alert: Any) -> None:
    found = watched.until(alert.signal, 0 if NO_GPU in alert.signal else 40)
    assert bool(found) != (NO_GPU in alert.signal)
    if alert.name in ("GatewayDown", "TritonDown", "NoTritonIsAsked", "QueueGrows", "RequestsAreShed"):
        assert not watched.values(alert.expr), "all is well"


def test_a_triton_that_is_gone_raises_its_alert(watched: Watched) -> None:
    os.kill(watched.triton.pid or 0, signal.SIGKILL)
    assert watched.until('ALERTS{alertname="TritonDown",alertstate="pending"}')
    assert watched.until('ALERTS{alertname="NoTritonIsAsked"}')
