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
from serve.deploy.monitoring.scope import Scope

__all__ = ["Alert", "alert_rules", "alerts"]

RUNBOOK = "docs/runbook.md"
# How many times as fast as the budget allows, long window, short window, severity, and how to call it: a page is for 2%
# of a month's budget in an hour or 5% in six, a ticket for 10% in three days.
BURNS = (
    (14.4, "1h", "5m", "page", "Fast"),
    (6.0, "6h", "30m", "page", "Steadily"),
    (1.0, "3d", "6h", "ticket", "Slowly"),
)
# The most that a page may ask for: with a budget of 10%, 14.4 times as fast is more than all requests, and nothing
# would ring. Three quarters of all that is asked is a failure to anybody; of a budget near that, half of what is left.
MOST = 0.75
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


def alerts(goal: Objectives, scope: Scope = Scope()) -> tuple[Alert, ...]:  # noqa: B008  it is frozen
    """Every alert.

    Args:
        goal: the objective.
        scope: whose series are watched, recorded ones included.
    """
    slow = f"{SHARE} of the answers of {MODEL} take longer than {goal.slow_s:g} s"
    failing = f"{SHARE} of the requests to {MODEL} fail"
    return (
        *_burns(scope, "LatencyBudgetBurns", "serving:request_slow:ratio_rate", goal.slow_share, slow),
        *_burns(scope, "ErrorBudgetBurns", "serving:request_errors:ratio_rate", goal.error_share, failing),
        *_servers(scope),
        *_load(scope),
        *_releases(scope),
        *_gpus(scope),
    )


def _burns(scope: Scope, name: str, signal: str, share: float, says: str) -> Iterator[Alert]:
    for factor, long, short, severity, pace in BURNS:
        fastest = min(factor * share, max(MOST, (1 + share) / 2)) if factor > 1 else share
        bound = f"{fastest:.6g}"
        pressing = "more than" if factor == 1 else f"over {fastest / share:.3g} times what"
        slow, quick = (scope.of(f"{signal}{window}") for window in (long, short))
        yield Alert(
            f"{name}{pace}",
            slow,
            f"{slow} > {bound} and {quick} > {bound}",
            "2m" if severity == "page" else "1h",
            severity,
            f"{says}, {pressing} the budget allows.",
        )


def _servers(scope: Scope) -> Iterator[Alert]:
    # Targets are looked up: of a server that is gone, or that nothing finds, there is no series that could be 0.
    for name, job in (("GatewayDown", "gateway"), ("TritonDown", "triton")):
        up = _up(scope, job)
        says = f"The {job} {{{{ $labels.instance }}}} gives no metrics."
        says = f"{{{{ if $labels.instance }}}}{says}{{{{ else }}}}Prometheus finds no {job} at all.{{{{ end }}}}"
        yield Alert(name, up, f"{up} == 0 or absent({up})", "1m", "page", says)
    asked = f"{scope.sum_by('instance')} ({scope.of('gateway_upstream_up')})"
    gateways = f"{scope.sum_by('instance')} ({_up(scope, 'gateway')} == 1)"
    says = "The gateway {{ $labels.instance }} finds no Triton that answers."
    none = f"{asked} == 0 or ({gateways} unless {asked})"
    yield Alert("NoTritonIsAsked", asked, none, "30s", "page", says)
    failures = scope.of("triton:failures:ratio_rate5m")
    yield Alert(
        "ModelFails", failures, f"{failures} > 0.01", "5m", "page", f"Triton fails {SHARE} of the requests to {MODEL}."
    )


def _up(scope: Scope, job: str) -> str:
    return scope.of("up", f'job="{job}"')


def _load(scope: Scope) -> Iterator[Alert]:
    shed = f"{scope.sum_by('model')} (rate({scope.of('gateway_model_shed_total')}[5m]))"
    waiting, rate = scope.of("gateway_model_waiting"), scope.of("triton:requests:rate5m")
    queue, compute = (scope.of(f"triton:{name}_seconds:mean5m") for name in ("queue", "compute"))
    batch = scope.of("triton:batch_size:mean5m")
    says = f"{SHARE} of the requests to {MODEL} are turned away because of the load."
    yield Alert("RequestsAreShed", shed, f"{shed} / {scope.of('serving:requests:rate5m')} > 0.05", "5m", "ticket", says)
    more = f"More and more requests wait for {MODEL}: {{{{ $value }}}} a second more."
    yield Alert("QueueGrows", waiting, f"deriv({waiting}[5m]) > 0 and {waiting} > 10", "5m", "ticket", more)
    waits = f"Requests wait {{{{ $value | humanizeDuration }}}} in Triton for {MODEL}, longer than they run."
    yield Alert("TritonQueueIsLong", queue, f"{queue} > {compute} and {queue} > 0.05", "10m", "ticket", waits)
    yield Alert(
        "BatchesCollapsed",
        batch,
        f"{batch} < 0.5 * ({batch} offset 1d) and {rate} > 0.8 * ({rate} offset 1d)",
        "15m",
        "ticket",
        f"Batches of {MODEL} are {{{{ $value | humanize }}}} on average, under half of yesterday's at the same load.",
    )


def _releases(scope: Scope) -> Iterator[Alert]:
    judged = f" and on (model) {scope.of('gateway_rollout_running')} == 1"
    disagrees = scope.of("gateway_rollout_evidence", 'question="disagreement"', 'of="worse"')
    fallbacks = f"{scope.sum_by('model')} (rate({scope.of('gateway_rollout_fallbacks_total')}[5m]))"
    says = f"The candidate of {MODEL} answers otherwise than allowed: it is about to be rolled back."
    yield Alert("CandidateDisagrees", disagrees, f"{disagrees} > 0.5{judged}", "30s", "ticket", says)
    says = f"The baseline of {MODEL} answers for its candidate."
    yield Alert("CandidateFails", fallbacks, f"{fallbacks} > 0{judged}", "1m", "ticket", says)


def _gpus(scope: Scope) -> Iterator[Alert]:
    memory = f"{scope.of('nv_gpu_memory_used_bytes')} / {scope.of('nv_gpu_memory_total_bytes')}"
    says = f"{GPU} has {SHARE} of its memory in use."
    yield Alert("GpuMemoryNearlyFull", memory, f"{memory} > 0.95", "5m", "ticket", says)
    used = scope.of("nv_gpu_utilization")
    busy = f"avg_over_time({used}[10m]) > 0.95"
    yield Alert("GpuIsSaturated", used, busy, "10m", "ticket", f"{GPU} has been busy for ten minutes.")


def alert_rules(goal: Objectives, scope: Scope = Scope()) -> dict[str, Any]:  # noqa: B008  it is frozen
    """The alerts' file."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.says, "runbook": f"{RUNBOOK}#{alert.name.lower()}"},
        }
        for alert in alerts(goal, scope)
    ]
    return {"groups": [{"name": "alerts", "rules": rules}]}
