"""Autoscaling: KEDA's ScaledObject, of which KEDA makes a HorizontalPodAutoscaler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve.deploy.cluster.naming import meta
from serve.deploy.monitoring.rules import autoscaling
from serve.deploy.monitoring.scope import Scope
from serve.deploy.options import RenderOptions
from serve.load.report.report import read_report
from serve.load.slo import parse_objective

__all__ = ["UNMEASURED", "Signal", "rate_of", "scaled_object", "signals"]

Object = dict[str, Any]
GPU_BUSY = 0.75
UNMEASURED = 50.0  # requests a second of one replica, where nothing tells
FILL = 0.7  # of the most that a load test saw within the objective: others have to start meanwhile
UP_PODS, PERIOD_S = 4, 15
RATE, WAIT = "autoscale:requests:rate1m", "autoscale:queue_seconds:mean1m"
SLOW = "autoscale:latency_p99_seconds:1m"


@dataclass(frozen=True)
class Signal:
    """What replicas follow: a query, and its bound.

    Attributes:
        name: of the metric.
        query: one value.
        bound: of the value.
        each: whether the bound is for one replica's part (a rate), or for all of them alike (a time).
    """

    name: str
    query: str
    bound: float
    each: bool


def rate_of(options: RenderOptions, plan: dict[str, Any]) -> float | None:
    """Requests a second that one replica shall have: as told, else of the plan, else of the load test.

    Returns:
        None where nothing tells, or no run of the load test kept the objective.
    """
    told = options.target if options.target is not None else plan["scaling"]["target"]
    if told is not None or options.load is None:
        return None if told is None else float(told)
    goal = parse_objective(options.slo or plan["objective"])
    kept = [run.throughput for run in read_report(options.load).runs if not goal.broken(run)]
    return float(f"{FILL * max(kept):.3g}") if kept else None


def signals(
    options: RenderOptions, plan: dict[str, Any], slow_s: float, scope: Scope, *, gpu: bool = False
) -> list[Signal]:
    """The rate of one replica, wait in Triton's queue, and the gateway's p99, asked of what is scraped.

    Not of what is recorded: a Prometheus without the rules would have replicas stay at what KEDA falls back to.

    The p99 alone would scale too late, and up for what more replicas do not mend; it stands beside the others, with
    the objective itself as its bound.
    """
    asked = autoscaling(scope)
    found = [Signal("requests", asked[RATE], rate_of(options, plan) or UNMEASURED, each=True)]
    # What waits for nothing has no wait: without requests the quotient is 0 / 0.
    for name, series, bound in (("queue-seconds", WAIT, options.max_queue_ms / 1000), ("latency-p99", SLOW, slow_s)):
        found.append(Signal(name, f"({asked[series]} >= 0) or vector(0)", bound, each=False))
    if gpu:
        found.append(Signal("gpu-busy", f"avg({scope.of('nv_gpu_utilization')})", GPU_BUSY, each=False))
    return found


def _bounds(options: RenderOptions, plan: dict[str, Any]) -> tuple[int, int]:
    """Replicas at least and at most."""
    scaling = plan["scaling"]
    least = options.min_replicas or scaling["least"]
    return least, max(options.max_replicas or scaling["most"], least)


def _behavior(plan: dict[str, Any]) -> Object:
    """Up at once, down after minutes: as `serve plan` simulates it."""
    return {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "selectPolicy": "Max",
            "policies": [
                {"type": "Percent", "value": 100, "periodSeconds": PERIOD_S},
                {"type": "Pods", "value": UP_PODS, "periodSeconds": PERIOD_S},
            ],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": int(plan["scaling"]["down_window_s"]),
            "policies": [{"type": "Percent", "value": 100, "periodSeconds": PERIOD_S}],
        },
    }


def scaled_object(options: RenderOptions, plan: dict[str, Any], found: list[Signal]) -> Object:
    """KEDA's; what Prometheus does not tell is an error, never "nothing to do"."""
    least, most = _bounds(options, plan)
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": meta(options, "triton"),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{options.name}-triton"},
            "pollingInterval": PERIOD_S,
            "minReplicaCount": least,
            "maxReplicaCount": most,
            # Where Prometheus is silent: what there is, and half of the most at least.
            "fallback": {
                "failureThreshold": 3, "replicas": max(least, (least + most) // 2),
                "behavior": "currentReplicasIfHigher",
            },
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(plan)}},
            "triggers": [
                {
                    "type": "prometheus",
                    "name": signal.name,
                    "metricType": "AverageValue" if signal.each else "Value",
                    "metadata": {
                        "serverAddress": options.prometheus,
                        "query": signal.query,
                        "threshold": f"{signal.bound:g}",
                        "ignoreNullValues": "false",
                    },
                }
                for signal in found
            ],
        },
    }  # fmt: skip
