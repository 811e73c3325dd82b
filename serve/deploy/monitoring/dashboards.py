"""The Grafana dashboard, as data: what a person on call looks at, from the outside in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from serve.deploy.monitoring.objectives import Objectives
from serve.deploy.monitoring.scope import SERIES_LABELS

__all__ = ["VARIABLES", "dashboard", "filled", "queries"]

WIDTH, HEIGHT = 8, 8
VARIABLES = dict(zip(("namespace", "application"), SERIES_LABELS, strict=True))
"""By which of a Prometheus' applications one is chosen: variables, and the labels that they are matched with."""
EVERY = ".*"  # of "All": series without the label, too, as where a Prometheus watches one application alone
WHERE = ",".join(f'{label}=~"${variable}"' for variable, label in VARIABLES.items())
ALL = f"{{{WHERE}}}"
OF = f'{{model=~"$model",{WHERE}}}'
SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard(goal: Objectives) -> dict[str, Any]:
    """One dashboard: traffic and objectives, where the time goes, load, releases, GPUs."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in _rows(goal):
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})  # fmt: skip
        for at, panel in enumerate(row):
            where = {"x": at % 3 * WIDTH, "y": top + 1 + at // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(panel | {"gridPos": where})
        top += 1 + (len(row) + 2) // 3 * HEIGHT
    numbered = [panel | {"id": number} for number, panel in enumerate(panels, 1)]
    return {
        "uid": "serving",
        "title": "Serving",
        "tags": ["serving"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                *_variables(),
            ]
        },
        "panels": numbered,
    }  # fmt: skip


def _variables() -> Iterator[dict[str, Any]]:
    """One application after the other, each variable's values among what those before it select; then its models."""
    seen = ""
    for name, label in (*VARIABLES.items(), ("model", "model")):
        query = f"label_values(gateway_requests_total{f'{{{seen}}}' if seen else ''}, {label})"
        seen += f'{"," if seen else ""}{label}=~"${name}"'
        yield {
            "name": name, "type": "query", "datasource": SOURCE, "query": query, "definition": query, "refresh": 2,
            "includeAll": True, "multi": name == "model", "allValue": ".+" if name == "model" else EVERY,
            "current": {"text": "All", "value": "$__all"},
        }  # fmt: skip


def queries(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(panel's title, query) of each query of a dashboard."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def filled(board: dict[str, Any], query: str, chosen: Mapping[str, str]) -> str:
    """A query as Grafana sends it.

    Args:
        board: the dashboard that it is of.
        query: with the dashboard's variables.
        chosen: their values; "All" of those that are not named.
    """
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            query = query.replace(f"${variable['name']}", chosen.get(variable["name"], variable["allValue"]))
    return query.replace("$__rate_interval", "1m")


def _rows(goal: Objectives) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    yield "What clients see", [
        _panel("Requests", "reqps", {"{{model}}": f"serving:requests:rate5m{OF}"}),
        _panel("Latency", "s", {
            f"{{{{model}}}} {name}": f"serving:latency_{name}_seconds:5m{OF}" for name in ("p50", "p95", "p99")
        }, line=goal.slow_s),
        _panel("Answers by code", "reqps", {
            "{{code}}": f"sum by (code) (rate(gateway_requests_total{OF}[$__rate_interval]))"}, stacked=True),
        _panel(f"Share slower than {goal.slow_s:g} s", "percentunit", {
            "{{model}}": f"serving:request_slow:ratio_rate5m{OF}"}, line=goal.slow_share),
        _panel("Share that fails", "percentunit", {
            "{{model}}": f"serving:request_errors:ratio_rate5m{OF}"}, line=goal.error_share),
        _panel("Budget burnt over 6 hours, 1 is as fast as allowed", "none", {
            "{{model}} latency": f"serving:request_slow:ratio_rate6h{OF} / {goal.slow_share:g}",
            "{{model}} errors": f"serving:request_errors:ratio_rate6h{OF} / {goal.error_share:g}"}, line=1),
    ]  # fmt: skip
    yield "Where the time goes", [
        _panel("In Triton: queue and compute", "s", {
            "{{model}} queue": f"triton:queue_seconds:mean5m{OF}",
            "{{model}} compute": f"triton:compute_seconds:mean5m{OF}"}),
        _panel("Batch size reached", "none", {"{{model}}": f"triton:batch_size:mean5m{OF}"}),
        _panel("Failures in Triton", "percentunit", {"{{model}}": f"triton:failures:ratio_rate5m{OF}"}),
    ]  # fmt: skip
    yield "Load", [
        _panel("With Triton, and the limit", "none", {
            "{{model}} in flight": f"sum by (model) (gateway_model_in_flight{OF})",
            "{{model}} limit": f"sum by (model) (gateway_model_limit{OF})"}),
        _panel("Waiting at the gateway, pending in Triton", "none", {
            "{{model}} waiting": f"sum by (model) (gateway_model_waiting{OF})",
            "{{model}} pending": f"triton:pending:sum{OF}"}),
        _panel("Turned away because of the load", "reqps", {
            "{{model}}": f"sum by (model) (rate(gateway_model_shed_total{OF}[$__rate_interval]))"}),
        _panel("Tritons that are asked", "none", {"{{upstream}}": f"gateway_upstream_up{ALL}"}),
        _panel("What an autoscaler sees: queue, p99", "s", {
            "queue": f"autoscale:queue_seconds:mean1m{ALL}", "p99": f"autoscale:latency_p99_seconds:1m{ALL}"}),
        _panel("What an autoscaler sees: rate, pending a replica", "none", {
            "requests/s": f"autoscale:requests:rate1m{ALL}", "pending": f"autoscale:pending:mean{ALL}"}),
    ]  # fmt: skip
    yield "Releases", [
        _panel("The candidate's share", "percentunit", {"{{model}}": f"gateway_rollout_weight{OF}"}),
        _panel("Evidence, 1 decides", "none", {
            "{{model}} {{question}} {{of}}": f"gateway_rollout_evidence{OF}"}, line=1),
        _panel("Answers by who gave them", "reqps", {
            "{{model}} {{variant}} {{outcome}}":
            f"sum by (model, variant, outcome) (rate(gateway_rollout_requests_total{OF}[$__rate_interval]))"}),
    ]  # fmt: skip
    yield "GPUs", [
        _panel("Utilization", "percentunit", {"{{gpu_uuid}}": f"nv_gpu_utilization{ALL}"}),
        _panel("Memory in use", "percentunit", {
            "{{gpu_uuid}}": f"nv_gpu_memory_used_bytes{ALL} / nv_gpu_memory_total_bytes{ALL}"}),
        _panel("Power", "watt", {"{{gpu_uuid}}": f"nv_gpu_power_usage{ALL}"}),
    ]  # fmt: skip


def _panel(
    title: str, unit: str, lines: dict[str, str], *, line: float | None = None, stacked: bool = False
) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if line is not None:
        steps.append({"color": "red", "value": line})
    custom: dict[str, Any] = {"lineWidth": 2, "showPoints": "never", "spanNulls": False}
    custom["fillOpacity"] = 30 if stacked else 0
    custom["stacking"] = {"mode": "normal" if stacked else "none"}
    custom["thresholdsStyle"] = {"mode": "line" if line is not None else "off"}
    return {
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": custom, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for at, (legend, expr) in enumerate(lines.items())
        ],
    }
