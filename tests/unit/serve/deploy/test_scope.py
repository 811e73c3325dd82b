"""What replicas follow is clients' requests of one application: asked of Prometheus, with an ensemble's series of two."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from serve.deploy.cluster.render import files
from serve.deploy.cluster.workload import Workload, workload_of
from serve.deploy.monitoring.dashboards import VARIABLES, dashboard, filled, queries
from serve.deploy.monitoring.monitoring import MonitoringOptions
from serve.deploy.monitoring.monitoring import files as monitoring
from serve.deploy.monitoring.objectives import objectives_of
from serve.deploy.monitoring.scope import SERIES_LABELS, Scope
from serve.deploy.options import RenderOptions
from serve.pack.write import pack
from tests.serve_models import tiny_artifact

ROOT = Path(__file__).parents[4]
PROMTOOL = shutil.which("promtool")
with_promtool = pytest.mark.skipif(PROMTOOL is None, reason="Debian's package prometheus is not there")
OPTIONS = RenderOptions(gateway_image="registry.example/gateway:1.0", image="registry.example/triton:26.07-pillow")
STEPS = ("digits_preprocess", "digits_network", "digits_postprocess")
ASKED = 40  # requests a second of clients, of the one application
OTHERS = 7 * ASKED  # of the other one
Applications = Mapping[str, RenderOptions]
BESIDE: Applications = {
    "another name": replace(OPTIONS, name="shop"),
    "another namespace": replace(OPTIONS, namespace="staging"),
}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return workload_of(ROOT / "model_repository")


def series(
    options: RenderOptions, rate: int, *, up: int = 1, failing: float = 0.1, scoped: bool = True
) -> list[dict[str, str]]:
    """What a Prometheus scrapes in 15 minutes of an application whose clients ask an ensemble of three steps.

    A request that ends well waits 10 ms in each step. At the gateway that share fails, and as many in Triton.
    """
    hashed = {"rollouts_pod_template_hash": "a"}
    own = {"namespace": options.namespace, "app_kubernetes_io_part_of": options.name, **hashed} if scoped else {}

    def one(name: str, values: str, **labels: str) -> dict[str, str]:
        told = ",".join(f"{key}={json.dumps(value)}" for key, value in {**own, **labels}.items())
        return {"series": f"{name}{{{told}}}", "values": values}

    def counter(name: str, each_s: float, **labels: str) -> dict[str, str]:
        return one(name, f"0+{15 * each_s:g}x60", **labels)

    route = "/v2/models/{model}/infer"
    found = [
        one("up", f"{up}x60", job="triton", instance="a"),
        counter("gateway_requests_total", rate * (1 - failing), model="digits", route=route, code="200"),
        counter("gateway_requests_total", rate * failing, model="digits", route=route, code="503"),
        counter("gateway_requests_total", rate, model="", route="/metrics", code="200"),
        counter("gateway_request_duration_seconds_bucket", rate, model="digits", le="0.25"),
        counter("gateway_request_duration_seconds_bucket", rate, model="digits", le="+Inf"),
        counter("gateway_request_duration_seconds_count", rate, model="digits"),
    ]
    for model in ("digits", *STEPS):
        failed = rate * failing / (1 - failing) if model == "digits" else 0
        found += [
            counter("nv_inference_request_success", rate, model=model, version="1"),
            counter("nv_inference_request_failure", failed, model=model, version="1"),
            counter("nv_inference_queue_duration_us", 1e4 * rate if model in STEPS else 0, model=model, version="1"),
            counter("nv_inference_request_duration_us", 1e5 * rate, model=model, version="1"),
            one("nv_inference_pending_request_count", f"{2 if model in STEPS else 0}x60", model=model, version="1"),
        ]
    return found


def holds(folder: Path, rules: list[str], scraped: list[dict[str, str]], wanted: list[tuple[str, float]]) -> None:
    """Each query gives that number, and one number only, once ten minutes went by."""
    names = []
    for number, text in enumerate(rules):
        names.append(f"{number}.yml")
        (folder / names[-1]).write_text(text)
    told = [
        {
            "expr": f"abs(({query}) - {value:g}) < bool {0.02 * value + 1e-6:g}",
            "eval_time": "10m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for query, value in wanted
    ]
    test = {"interval": "15s", "input_series": scraped, "promql_expr_test": told}
    (folder / "test.yml").write_text(json.dumps({"rule_files": names, "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def rules_of(written: Mapping[str, str]) -> str:
    (rules,) = yaml.safe_load_all(written["components/prometheus-operator/rules.yaml"])
    return json.dumps(rules["spec"])


def triggers(written: Mapping[str, str], path: str) -> dict[str, str]:
    (scaled,) = yaml.safe_load_all(written[path])
    return {each["name"]: each["metadata"]["query"] for each in scaled["spec"]["triggers"]}


SCALED = ("components/keda/scaledobject.yaml", "overlays/gpu/scaledobject.yaml")


@with_promtool
@pytest.mark.parametrize("path", SCALED)
@pytest.mark.parametrize("beside", [None, *BESIDE])
def test_replicas_follow_what_clients_of_that_application_ask(
    workload: Workload, tmp_path: Path, path: str, beside: str | None
) -> None:
    """40 requests a second, not 160 with an ensemble's steps; and each waits in every step."""
    written = files(workload, OPTIONS)
    rules, scraped = [rules_of(written)], series(OPTIONS, ASKED)
    if beside is not None:
        rules.append(rules_of(files(workload, BESIDE[beside])))
        scraped += series(BESIDE[beside], OTHERS)
    found = triggers(written, path)
    holds(tmp_path, rules, scraped, [(found["requests"], ASKED), (found["queue-seconds"], 0.03)])


@with_promtool
def test_replicas_are_scaled_where_no_rules_are_recorded_too(workload: Workload, tmp_path: Path) -> None:
    found = triggers(files(workload, OPTIONS), SCALED[0])
    holds(tmp_path, [], series(OPTIONS, ASKED), [(found["requests"], ASKED), (found["queue-seconds"], 0.03)])


@with_promtool
@pytest.mark.parametrize("beside", BESIDE)
def test_what_is_recorded_and_alerted_is_of_one_application(workload: Workload, tmp_path: Path, beside: str) -> None:
    """The other one's rules are there, too; it has no Triton that is up, and seven times as many requests."""
    other = BESIDE[beside]
    rules = [rules_of(files(workload, each)) for each in (OPTIONS, other)]
    scraped = series(OPTIONS, ASKED) + series(other, OTHERS, up=0)
    wanted: list[tuple[str, float]] = []
    told = [f"namespace='{each.namespace}',app_kubernetes_io_part_of='{each.name}'" for each in (OPTIONS, other)]
    for own, rate in zip(told, (ASKED, OTHERS), strict=True):
        wanted += [
            (f"sum(autoscale:requests:rate1m{{{own}}})", rate),
            (f"sum(autoscale:queue_seconds:mean1m{{{own}}})", 0.03),
            (f'sum(serving:requests:rate5m{{model="digits",{own}}})', rate),
            (f'sum(serving:request_errors:ratio_rate5m{{model="digits",{own}}})', 0.1),
            (f'sum(triton:requests:rate5m{{model="digits_network",{own}}})', rate),
        ]
    wanted += [
        ("sum(autoscale:pending:mean)", 6),  # three steps with two each, of the one Triton that is up
        ('count(ALERTS{alertname="TritonDown",alertstate="firing"})', 1),
        (f"count(ALERTS{{alertname='TritonDown',{told[1]}}})", 1),
        ('count(ALERTS{alertname="ModelFails"})', 2),
    ]  # fmt: skip
    holds(tmp_path, rules, scraped, wanted)


@with_promtool
@pytest.mark.parametrize("beside", BESIDE)
def test_a_canary_is_judged_by_clients_requests_of_its_application(
    workload: Workload, tmp_path: Path, beside: str
) -> None:
    """The other one fails half of what it is asked, and has pods of the same hash."""
    scraped = series(OPTIONS, ASKED) + series(BESIDE[beside], OTHERS, failing=0.5)
    queries = {
        metric["name"]: metric["provider"]["prometheus"]["query"]
        for template in yaml.safe_load_all(files(workload, OPTIONS)["overlays/canary/analysis.yaml"])
        for metric in template["spec"]["metrics"]
        if "prometheus" in metric["provider"]
    }
    assert set(queries) == {"more-errors", "slower", "errors-of-all", "slow-of-all"}
    against_itself = {name: query.replace("{{args.canary}}", "a").replace("{{args.stable}}", "a")
                      for name, query in queries.items()}  # fmt: skip
    failing = against_itself["more-errors"].partition(" - ")[0]
    holds(tmp_path, [], scraped, [(against_itself["errors-of-all"], 0.1), (failing, 0.1)])


BOARD = dashboard(objectives_of())
SELECTOR = re.compile(r"([a-z][\w:]*)\{")
SHOP = {"namespace": "production", "application": "shop"}


def every_series(labels: Mapping[str, str]) -> list[dict[str, str]]:
    """One of each name that the dashboard asks for, recorded ones among them."""
    told = ",".join(f"{name}={json.dumps(value)}" for name, value in {**labels, "model": "digits"}.items())
    names = {name for _, query in queries(BOARD) for name in SELECTOR.findall(query)}
    return [{"series": f"{name}{{{told}}}", "values": "1+15x60"} for name in sorted(names)]


@with_promtool
@pytest.mark.parametrize("scoped", [True, False], ids=["of two applications", "of the one that a Prometheus watches"])
def test_a_dashboard_shows_the_application_that_was_chosen(tmp_path: Path, *, scoped: bool) -> None:
    """And all that there are until one is, those without labels, too."""
    labels = {VARIABLES[name]: value for name, value in SHOP.items()} if scoped else {}
    wanted: list[tuple[str, float]] = []
    for _, query in queries(BOARD):
        there, away = (f"count({query}) or vector(0)" for query in (
            filled(BOARD, query, SHOP if scoped else {}), filled(BOARD, query, SHOP | {"application": "other"})
        ))  # fmt: skip
        wanted += [(there, 1), (f"count({filled(BOARD, query, {})}) or vector(0)", 1), (away, 0)]
        for name in SHOP:
            wanted.append((f"count({filled(BOARD, query, SHOP | {name: 'other'})}) or vector(0)", 0))
    assert len(wanted) > 5 * 20
    holds(tmp_path, [], every_series(labels), wanted)


def test_applications_and_models_are_chosen_from_those_that_are_watched() -> None:
    """First where it runs, then which one, then its models: each list is of what was chosen before."""
    asked = {each["name"]: each["query"] for each in BOARD["templating"]["list"] if each["type"] == "query"}
    assert asked == {
        "namespace": "label_values(gateway_requests_total, namespace)",
        "application": f'label_values(gateway_requests_total{{namespace=~"$namespace"}}, {SERIES_LABELS[1]})',
        "model": f'label_values(gateway_requests_total{{namespace=~"$namespace",{SERIES_LABELS[1]}=~"$application"}}, '
        "model)",
    }


@with_promtool
def test_rules_that_know_no_names_count_clients_requests_too(tmp_path: Path) -> None:
    """By what the gateway answered: without names, nothing tells an ensemble's steps."""
    recording = monitoring(MonitoringOptions())["prometheus/recording.yml"]
    answered = 0.9 * ASKED
    holds(
        tmp_path, [recording], series(OPTIONS, ASKED, scoped=False),
        [("sum(autoscale:requests:rate1m)", answered), ("sum(autoscale:queue_seconds:mean1m)", 0.03 * ASKED / answered)],
    )  # fmt: skip


def test_rules_for_one_application_say_that_they_add_up_several() -> None:
    written = monitoring(MonitoringOptions())
    for name in ("recording", "alerts"):
        assert "watches one application" in written[f"prometheus/{name}.yml"].split("groups:")[0]


def test_steps_are_told_by_who_packed_them_and_by_ensembles_of_anybody_s(tmp_path: Path, workload: Workload) -> None:
    assert workload.asked == ("digits",)
    repository = tmp_path / "models"
    for name in ("alone", "step"):
        pack(tiny_artifact(tmp_path / f"artifact-{name}"), repository=repository, name=name)
    assert workload_of(repository).asked == ("alone", "step")
    whole = repository / "whole"
    (whole / "1").mkdir(parents=True)
    (whole / "config.pbtxt").write_text(
        'platform: "ensemble" ensemble_scheduling { step { model_name: "step" model_version: -1 } }'
    )
    found = workload_of(repository)
    assert found.asked == ("alone", "whole")
    assert found.models == ("alone", "step", "whole"), "a gate holds steps to their budget, too"


@with_promtool
@pytest.mark.parametrize("name", ["a.b", "a|b", 'quo"te', "back\\slash", "{{ x }}", "größe", "(a)+"])
def test_a_name_selects_that_model_alone(tmp_path: Path, name: str) -> None:
    scope = Scope(models=(name,))
    scraped = [
        {"series": f"x{{model={json.dumps(each, ensure_ascii=False)}}}", "values": "1x60"}
        for each in (name, "axb", "aab")
    ]
    holds(tmp_path, [], scraped, [(f"count({scope.asked('x')})", 1)])
