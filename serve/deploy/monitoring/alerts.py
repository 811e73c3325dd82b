"""What Prometheus wakes people for.

Budgets are watched by how fast they burn, over a long and a short window together (Beyer et al., The Site Reliability
Workbook, chapter 5, "Multiwindow, Multi-Burn-Rate Alerts"): the long one for certainty, the short one so that an alert
ends soon after its cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from serve.deploy.monitoring.objectives import Objectives

__all__ = ["Alert", "alert_rules", "alerts"]

RUNBOOK = "docs/runbook.md"
# How many times as fast as the budget allows, long window, short window, severity, and how to call it: a page is for 2%
# of a month's budget in an hour or 5% in six, a ticket for 10% in three days.
BURNS = (
    (14.4, "1h", "5m", "page", "Fast"),
    (6.0, "6h", "30m", "page", "Steadily"),
    (1.0, "3d", "6h", "ticket", "Slowly"),
)
JUDGED = " and on (model) gateway_rollout_running == 1"
DISAGREES = 'gateway_rollout_evidence{question="disagreement",of="worse"}'
FALLBACKS = "sum by (model) (rate(gateway_rollout_fallbacks_total[5m]))"
SHED = "sum by (model) (rate(gateway_model_shed_total[5m]))"
ASKED = "sum by (instance) (gateway_upstream_up)"
WAITING = "gateway_model_waiting"
QUEUE, COMPUTE = "triton:queue_seconds:mean5m", "triton:compute_seconds:mean5m"
BATCH, RATE = "triton:batch_size:mean5m", "triton:requests:rate5m"
GPU_MEMORY = "nv_gpu_memory_used_bytes / nv_gpu_memory_total_bytes"
GPU = "GPU {{ $labels.gpu_uuid }} of {{ $labels.instance }}"
MODEL, SHARE = "{{ $labels.model }}", "{{ $value | humanizePercentage }}"


@dataclass(frozen=True)
class Alert:
    """One alert.

    Attributes:
        name: also its heading in the runbook.
        signal: what it watches: a query that has a value while all is well, too.
        expr: when it holds.
        lasts: how long it must hold.
        severity: "page" or "ticket".
        says: one sentence, with Prometheus' own templates.
    """

    name: str
    signal: str
    expr: str
    lasts: str
    severity: str
    says: str


def alerts(goal: Objectives) -> tuple[Alert, ...]:
    """Every alert."""
    slow = f"{SHARE} of the answers of {MODEL} take longer than {goal.slow_s:g} s"
    return (
        *_burns("LatencyBudgetBurns", "serving:request_slow:ratio_rate", goal.slow_share, slow),
        *_burns(
            "ErrorBudgetBurns",
            "serving:request_errors:ratio_rate",
            goal.error_share,
            f"{SHARE} of the requests to {MODEL} fail",
        ),
        *_servers(),
        *_load(),
        *_releases(),
        *_gpus(),
    )


def _burns(name: str, signal: str, share: float, says: str) -> Iterator[Alert]:
    for factor, long, short, severity, pace in BURNS:
        bound = f"{factor * share:.6g}"
        pressing = "more than" if factor == 1 else f"over {factor:g} times what"
        yield Alert(
            f"{name}{pace}",
            f"{signal}{long}",
            f"{signal}{long} > {bound} and {signal}{short} > {bound}",
            "2m" if severity == "page" else "1h",
            severity,
            f"{says}, {pressing} the budget allows.",
        )


def _servers() -> Iterator[Alert]:
    for name, job in (("GatewayDown", "gateway"), ("TritonDown", "triton")):
        up = f'up{{job="{job}"}}'
        says = f"The {job} {{{{ $labels.instance }}}} gives no metrics."
        yield Alert(name, up, f"{up} == 0", "1m", "page", says)
    says = "The gateway {{ $labels.instance }} finds no Triton that answers."
    yield Alert("NoTritonIsAsked", ASKED, f"{ASKED} == 0", "30s", "page", says)
    failures = "triton:failures:ratio_rate5m"
    yield Alert(
        "ModelFails", failures, f"{failures} > 0.01", "5m", "page", f"Triton fails {SHARE} of the requests to {MODEL}."
    )


def _load() -> Iterator[Alert]:
    shed = f"{SHARE} of the requests to {MODEL} are turned away because of the load."
    yield Alert("RequestsAreShed", SHED, f"{SHED} / serving:requests:rate5m > 0.05", "5m", "ticket", shed)
    more = f"More and more requests wait for {MODEL}: {{{{ $value }}}} a second more."
    yield Alert("QueueGrows", WAITING, f"deriv({WAITING}[5m]) > 0 and {WAITING} > 10", "5m", "ticket", more)
    waits = f"Requests wait {{{{ $value | humanizeDuration }}}} in Triton for {MODEL}, longer than they run."
    yield Alert("TritonQueueIsLong", QUEUE, f"{QUEUE} > {COMPUTE} and {QUEUE} > 0.05", "10m", "ticket", waits)
    yield Alert(
        "BatchesCollapsed",
        BATCH,
        f"{BATCH} < 0.5 * ({BATCH} offset 1d) and {RATE} > 0.8 * ({RATE} offset 1d)",
        "15m",
        "ticket",
        f"Batches of {MODEL} are {{{{ $value | humanize }}}} on average, under half of yesterday's at the same load.",
    )


def _releases() -> Iterator[Alert]:
    says = f"The candidate of {MODEL} answers otherwise than allowed: it is about to be rolled back."
    yield Alert("CandidateDisagrees", DISAGREES, f"{DISAGREES} > 0.5{JUDGED}", "30s", "ticket", says)
    says = f"The baseline of {MODEL} answers for its candidate."
    yield Alert("CandidateFails", FALLBACKS, f"{FALLBACKS} > 0{JUDGED}", "1m", "ticket", says)


def _gpus() -> Iterator[Alert]:
    says = f"{GPU} has {SHARE} of its memory in use."
    yield Alert("GpuMemoryNearlyFull", GPU_MEMORY, f"{GPU_MEMORY} > 0.95", "5m", "ticket", says)
    busy = "avg_over_time(nv_gpu_utilization[10m]) > 0.95"
    yield Alert("GpuIsSaturated", "nv_gpu_utilization", busy, "10m", "ticket", f"{GPU} has been busy for ten minutes.")


def alert_rules(goal: Objectives) -> dict[str, Any]:
    """The alerts' file."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.says, "runbook": f"{RUNBOOK}#{alert.name.lower()}"},
        }
        for alert in alerts(goal)
    ]
    return {"groups": [{"name": "serving", "rules": rules}]}
