"""The monitoring's files: what they hold, what Prometheus' own tool says of them, and the runbook."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.errors import ServerError
from serve.deploy.cluster.render import render
from serve.deploy.monitoring.alerts import alert_rules, alerts
from serve.deploy.monitoring.dashboards import dashboard, queries
from serve.deploy.monitoring.monitoring import DATA, LIMITS, MonitoringOptions, files, write_monitoring
from serve.deploy.monitoring.objectives import Objectives, objectives_of
from serve.deploy.monitoring.rules import INFERENCE, recording_rules
from serve.deploy.options import RenderOptions
from serve.gateway.observe.telemetry import INFERENCE_ROUTES

ROOT = Path(__file__).parents[4]
DEPLOY = ROOT / "deploy"
GOAL = objectives_of()
PROMTOOL = shutil.which("promtool")
PROMETHEUS = shutil.which("prometheus")
with_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="Debian's package prometheus is not there")
with_promtool = pytest.mark.skipif(PROMTOOL is None, reason="Debian's package prometheus is not there")


def test_what_stands_in_deploy_is_what_the_command_writes() -> None:
    for name, text in files(MonitoringOptions()).items():
        assert (DEPLOY / name).read_text(encoding="utf-8") == text, "run `serve deploy monitoring`"


@with_promtool
@pytest.mark.parametrize(
    "words",
    [["check", "rules", "recording.yml"], ["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"]],
)
def test_prometheus_takes_the_files(words: list[str]) -> None:
    done = subprocess.run(
        [str(PROMTOOL), *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@with_promtool
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    paths = sorted((DEPLOY / "prometheus").glob("alerts_*test.yml"))
    names = [test["name"] for path in paths for test in yaml.safe_load(path.read_text())["tests"]]
    wanted = [f"{alert.name} {what}" for alert in alerts(GOAL) for what in ("fires", "is quiet")]
    # What asks whether something is 0 has to ring where nothing is told at all, too.
    wanted += [f"{alert.name} fires where" for alert in alerts(GOAL) if re.search(r"== 0\b", alert.expr)]
    assert sorted(re.sub(r"(?<= fires where).*", "", name) for name in names) == sorted(wanted)
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_place_in_the_runbook_that_says_what_to_do() -> None:
    text = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n\n(.+?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(sections) == {alert.name for alert in alerts(GOAL)}
    assert all(len(section) > 45 for section in sections.values())
    for rule in alert_rules(GOAL)["groups"][0]["rules"]:
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (ROOT / path).is_file()
        assert anchor in {name.lower() for name in sections}


def test_the_rules_count_inference_and_nothing_else() -> None:
    for route in INFERENCE_ROUTES:
        assert re.fullmatch(INFERENCE, route)
    for route in ("other", "/metrics", "/v2/models/{model}/ready", "/v2/health/ready", "ModelReady"):
        assert not re.fullmatch(INFERENCE, route)


def test_an_alert_or_a_panel_asks_for_no_series_that_nothing_records() -> None:
    recorded = {rule["record"] for group in recording_rules(GOAL)["groups"] for rule in group["rules"]}
    asked = " ".join([alert.expr for alert in alerts(GOAL)] + [query for _, query in queries(dashboard(GOAL))])
    used = set(re.findall(r"\b(?:serving|triton|autoscale):[\w:]+", asked))
    assert used <= recorded


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("p99<250ms,errors<0.1%", Objectives(0.25, 0.01, 0.001)),
        ("p95<1s,errors<1%", Objectives(1.0, 0.05, 0.01)),
        ("p99.9<50ms", Objectives(0.05, 0.001, 0.001)),
    ],
)
def test_an_objective_becomes_two_budgets(text: str, goal: Objectives) -> None:
    assert objectives_of(text) == goal
    bound = f"{14.4 * goal.slow_share:.6g}"
    assert f"serving:request_slow:ratio_rate1h > {bound} and" in alerts(goal)[0].expr
    assert f'le="{goal.slow_s}"' in json.dumps(recording_rules(goal)).replace("\\", "")


def fires(folder: Path, goal: Objectives) -> None:
    """promtool: each page of the budgets rings where all answers are slow and all requests fail."""
    folder.mkdir()
    for name, written in (("recording.yml", recording_rules(goal)), ("alerts.yml", alert_rules(goal))):
        (folder / name).write_text(yaml.safe_dump(written))
    label = 'model="digits",route="/v2/models/{model}/infer"'
    seconds = "gateway_request_duration_seconds"
    series = {
        f'gateway_requests_total{{{label},code="500"}}': "0+60x200",
        f'{seconds}_bucket{{model="digits",le="{goal.slow_s}"}}': "0x200",
        f'{seconds}_count{{model="digits"}}': "0+60x200",
    }  # fmt: skip
    pages = [alert for alert in alerts(goal) if "BudgetBurns" in alert.name and alert.severity == "page"]
    assert len(pages) == 4
    told: Any = [
        {
            "expr": f'count(ALERTS{{alertname="{alert.name}",alertstate="firing"}})',
            "eval_time": "390m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for alert in pages
    ]
    scraped: Any = [{"series": name, "values": values} for name, values in series.items()]
    test: Any = {"interval": "2m", "input_series": scraped, "promql_expr_test": told}
    text: Any = {"rule_files": ["recording.yml", "alerts.yml"], "evaluation_interval": "2m", "tests": [test]}
    (folder / "test.yml").write_text(yaml.safe_dump(text))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@with_promtool
@pytest.mark.parametrize("text", ["p50<250ms,errors<50%", "p90<250ms,errors<10%", "p20<1s,errors<80%", "p99<250ms"])
def test_every_page_rings_when_all_is_slow_or_all_fails(text: str, tmp_path: Path) -> None:
    """Of a wide budget many times as fast is more than all there is: such a page would never ring."""
    goal = objectives_of(text)
    fires(tmp_path / "rules", goal)
    for alert in alerts(goal):
        if "BudgetBurns" in alert.name:
            bounds = [float(each) for each in re.findall(r"> ([\d.]+)", alert.expr)]
            share = goal.slow_share if "Latency" in alert.name else goal.error_share
            assert len(set(bounds)) == 1
            assert share - 1e-9 <= bounds[0] < 1
            assert (bounds[0] > share) is (alert.severity == "page")


@pytest.mark.parametrize(
    "text",
    [
        "errors<1%",
        "p99<260ms",
        "mean<1s",
        "p50<1s,p99<2.5s",
        "p99<250ms,errors<0",
        "p99.99999<1s",
        "p0.1<1s",
        "p99<1s,errors<99.9%",
    ],
)
def test_what_the_gateways_histogram_can_t_tell_is_refused(text: str) -> None:
    with pytest.raises(ServerError) as caught:
        objectives_of(text)
    assert caught.value.mend


def test_targets_a_key_and_the_interval_reach_prometheus(tmp_path: Path) -> None:
    options = MonitoringOptions(
        gateway=("a:1", "b:2"), triton=("c:3",), interval_s=5, key_file="/run/secrets/metrics-key"
    )
    assert len(write_monitoring(tmp_path, options)) == 6
    found: Any = yaml.safe_load((tmp_path / "prometheus/prometheus.yml").read_text())
    gateway, triton = found["scrape_configs"]
    assert gateway["static_configs"] == [{"targets": ["a:1", "b:2"]}]
    assert gateway["authorization"]["credentials_file"] == "/run/secrets/metrics-key"
    assert "authorization" not in triton
    assert found["global"]["scrape_interval"] == "5s"


def test_no_server_fills_a_prometheus(tmp_path: Path) -> None:
    """Each look has bounds, wherever Prometheus runs; what containers keep has one."""
    render(ROOT / "model_repository", tmp_path / "out", RenderOptions(gateway_image="registry.example/gateway:1.0"))
    pods = list(yaml.safe_load_all((tmp_path / "out/podman/prometheus.yaml").read_text()))
    configs = [yaml.safe_load(pods[0]["data"]["prometheus.yml"])]
    configs += [yaml.safe_load((DEPLOY / f"prometheus/{name}.yml").read_text()) for name in ("prometheus", "compose")]
    for config in configs:
        for job in config["scrape_configs"]:
            assert job.items() >= LIMITS.items()
    for monitor in yaml.safe_load_all((tmp_path / "out/components/prometheus-operator/monitors.yaml").read_text()):
        bounds = {key: value for key, value in monitor["spec"].items() if key.endswith("Limit")}
        assert sorted(map(str, bounds.values())) == sorted(map(str, LIMITS.values()))
        assert bounds["sampleLimit"] == LIMITS["sample_limit"]
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["prometheus"]["command"]
    for words in (pods[1]["spec"]["containers"][0]["args"], composed):
        assert set(DATA) <= set(words)
    done = subprocess.run([str(PROMTOOL), "check", "config", "--syntax-only", str(DEPLOY / "prometheus/compose.yml")],
                          capture_output=True, text=True, check=False) if PROMTOOL else None  # fmt: skip
    assert done is None or done.returncode == 0, done.stdout + done.stderr


@with_prometheus
@pytest.mark.parametrize(("samples", "up"), [(1000, 1.0), (60_000, 0.0)])
def test_an_answer_past_the_bounds_is_a_server_that_is_down(tmp_path: Path, samples: int, up: float) -> None:
    """By Prometheus itself."""
    text = "".join(f'x{{n="{number}"}} 1\n' for number in range(samples)).encode()

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        target = f"127.0.0.1:{server.server_address[1]}"
        write_monitoring(tmp_path, MonitoringOptions(gateway=(target,), triton=(target,), interval_s=1))
        with socket.socket() as tried:
            tried.bind(("127.0.0.1", 0))
            port = tried.getsockname()[1]
        config = f"--config.file={tmp_path}/prometheus/prometheus.yml"
        words = [config, f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}", *DATA]
        running = subprocess.Popen([str(PROMETHEUS), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            found: list[Any] = []
            while not found and time.monotonic() < deadline:
                time.sleep(0.2)
                with contextlib.suppress(OSError):
                    url = f"http://127.0.0.1:{port}/api/v1/query?query=up%7Bjob%3D%22triton%22%7D"
                    found = json.load(urllib.request.urlopen(url))["data"]["result"]
            assert [float(row["value"][1]) for row in found] == [up]
        finally:
            running.terminate()
            running.wait(20)
            server.shutdown()


@pytest.mark.parametrize("values", [{"gateway": ("http://a:1",)}, {"triton": ("a",)}, {"interval_s": 0}])
def test_what_can_t_be_watched_is_told(values: Any) -> None:
    with pytest.raises(ServerError) as caught:
        MonitoringOptions(**values)
    assert caught.value.mend


def test_the_dashboard_is_one_that_grafana_can_read() -> None:
    board = dashboard(GOAL)
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert len({panel["title"] for panel in panels}) == len(panels) >= 18
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies over another"
        assert at["x"] + at["w"] <= 24
        taken |= cells
    for panel in panels:
        assert panel["targets"]
        assert panel["datasource"]["uid"] == "${source}"


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from serve.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["deploy", "monitoring", "-o", str(tmp_path), "--slo", "p99<100ms,errors<1%"])
    assert not ended.value.code
    assert "alerts.yml" in capsys.readouterr().out
    assert "0.144" in (tmp_path / "prometheus/alerts.yml").read_text()
    with pytest.raises(SystemExit) as ended:
        main(["deploy", "monitoring", "-o", str(tmp_path), "--slo", "p99<123ms"])
    assert ended.value.code == 2
    assert "take one of" in capsys.readouterr().err
