"""Argo Rollouts: a new Triton takes over pod by pod, and is judged as the gateway's own rollouts judge."""

from __future__ import annotations

from typing import Any

from serve.deploy.cluster.naming import labels, meta
from serve.deploy.monitoring.objectives import Objectives
from serve.deploy.monitoring.rules import FAILURE, INFERENCE, SUCCESS
from serve.deploy.monitoring.scope import Scope
from serve.deploy.options import RenderOptions
from serve.rollout.plan import Plan

__all__ = ["HASH_LABEL", "analysis_queries", "analysis_templates", "passes", "rollout"]

Object = dict[str, Any]
HASH_LABEL = "rollouts_pod_template_hash"
WINDOW, WINDOW_S = "2m", 120
STEP_S = 120
LOOKS_S = 30
FAILED_LOOKS = 2
FIRST_STEP_S = WINDOW_S + (FAILED_LOOKS + 2) * LOOKS_S
"""Nothing is promoted before an analysis could have ended it: the first look comes after a window."""


def rollout(options: RenderOptions, plan: Plan, *, gate: bool) -> Object:
    """Over the Deployment of the base, which stays as the description of the pods."""
    steps: list[Object] = []
    if gate:
        steps.append({"analysis": {"templates": [{"templateName": f"{options.name}-accuracy-budget"}]}})
    for number, weight in enumerate(plan.steps):
        steps += [{"setWeight": round(weight)}, {"pause": {"duration": f"{STEP_S if number else FIRST_STEP_S}s"}}]
    judged = [{"templateName": f"{options.name}-{name}"} for name in ("canary-against-stable", "objective")]
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Rollout",
        "metadata": meta(options, "triton"),
        "spec": {
            "workloadRef": {
                "apiVersion": "apps/v1", "kind": "Deployment", "name": f"{options.name}-triton",
                "scaleDown": "onsuccess",
            },
            "progressDeadlineSeconds": options.start_s + 120,
            "progressDeadlineAbort": True,
            "strategy": {
                "canary": {
                    "maxUnavailable": 0,
                    "maxSurge": 1,
                    "abortScaleDownDelaySeconds": 30,
                    "steps": steps,
                    "analysis": {
                        "startingStep": 2 if gate else 1,  # from the first pod on
                        "templates": judged,
                        "args": [
                            {"name": "canary", "valueFrom": {"podTemplateHashValue": "Latest"}},
                            {"name": "stable", "valueFrom": {"podTemplateHashValue": "Stable"}},
                        ],
                    },
                }
            },
        },
    }  # fmt: skip


def analysis_queries(
    plan: Plan, goal: Objectives, canary: str, stable: str, scope: Scope
) -> dict[str, tuple[str, float]]:
    """What is asked of Prometheus, and the most that it may be, by name.

    Args:
        plan: how much worse the new one may be.
        goal: the objective.
        canary, stable: what selects the pods of each, as in 'hash="…"'.
        scope: whose series, and of which models; budgets are of clients' requests, not of an ensemble's steps.

    Returns:
        Queries that give no number, or NaN, where there were no requests to judge by.
    """

    def total(metric: str, which: str) -> str:
        return f"sum(rate({scope.asked(metric, which)}[{WINDOW}]))"

    def failing(which: str) -> str:
        failed, good = (total(name, which) for name in (FAILURE, SUCCESS))
        return f"(({failed} or vector(0)) / ((({failed} or vector(0)) + ({good} or vector(0))) > 0))"

    def seconds(which: str) -> str:
        return f"({total('nv_inference_request_duration_us', which)} / {total(SUCCESS, which)})"

    asked = f'route=~"{INFERENCE}"'
    everything, errors = (
        f"sum(rate({scope.of('gateway_requests_total', asked, *more)}[{WINDOW}]))" for more in ((), ('code=~"5.."',))
    )
    histogram = "gateway_request_duration_seconds"
    within, count = scope.of(f"{histogram}_bucket", f'le="{goal.slow_s}"'), scope.of(f"{histogram}_count")
    return {
        "more-errors": (f"{failing(canary)} - {failing(stable)}", plan.max_error_increase),
        "slower": (f"{seconds(canary)} / {seconds(stable)}", 1 + plan.max_latency_increase),
        "errors-of-all": (f"({errors} or vector(0)) / {everything}", goal.error_share),
        "slow-of-all": (f"1 - sum(rate({within}[{WINDOW}])) / sum(rate({count}[{WINDOW}]))", goal.slow_share),
    }


def passes(most: float) -> str:
    """Argo's condition for a look: a number that is no more than allowed. No requests, no proof: no promotion."""
    return f"len(result) > 0 && !isNaN(result[0]) && result[0] <= {most:g}"


def analysis_templates(
    options: RenderOptions, plan: Plan, goal: Objectives, scope: Scope, *, gate: Object | None
) -> list[Object]:
    """Canary against stable, everything against the objective, and the compression report against its budget.

    Args:
        options, plan, goal, scope: of the queries.
        gate: pod spec of the job for the last; None where it can't read the repository.
    """
    canary, stable = (f'{HASH_LABEL}="{{{{args.{name}}}}}"' for name in ("canary", "stable"))
    queries = analysis_queries(plan, goal, canary, stable, scope)

    def template(name: str, metrics: list[Object], args: tuple[str, ...] = ()) -> Object:
        return {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "AnalysisTemplate",
            "metadata": {"name": f"{options.name}-{name}", "labels": labels(options, "triton")},
            "spec": {**({"args": [{"name": each} for each in args]} if args else {}), "metrics": metrics},
        }

    def metric(name: str) -> Object:
        query, most = queries[name]
        return {
            "name": name,
            "initialDelay": WINDOW,
            "interval": f"{LOOKS_S}s",
            "failureLimit": FAILED_LOOKS,
            "consecutiveErrorLimit": 4,
            "successCondition": passes(most),
            "provider": {"prometheus": {"address": options.prometheus, "query": query}},
        }

    found = [
        template("canary-against-stable", [metric("more-errors"), metric("slower")], ("canary", "stable")),
        template("objective", [metric("errors-of-all"), metric("slow-of-all")]),
    ]
    if gate is not None:
        job = {"metadata": {"labels": labels(options, "gate")}, "spec": gate}
        spec = {"backoffLimit": 0, "activeDeadlineSeconds": 300, "template": job}
        found.append(
            template("accuracy-budget", [{"name": "drop", "failureLimit": 0, "provider": {"job": {"spec": spec}}}])
        )
    return found
