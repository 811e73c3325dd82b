"""What Prometheus Operator is told: which pods to scrape, and the rules."""

from __future__ import annotations

from typing import Any

from serve.deploy.cluster.naming import PART_OF, labels, meta
from serve.deploy.monitoring.alerts import alert_rules
from serve.deploy.monitoring.monitoring import LIMITS
from serve.deploy.monitoring.objectives import Objectives
from serve.deploy.monitoring.rules import recording_rules
from serve.deploy.monitoring.scope import Scope
from serve.deploy.options import RenderOptions

__all__ = ["monitors", "rules_object"]

Object = dict[str, Any]


def monitors(options: RenderOptions) -> list[Object]:
    """What Prometheus Operator scrapes; the part's name becomes the job, as the rules expect it."""
    ends = {"triton": {"port": "metrics"}, "gateway": {"port": "http", "path": "/metrics"}}
    key = {"type": "Bearer", "credentials": {"name": f"{options.name}-metrics-key", "key": "key"}}
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": meta(options, part),
            "spec": {
                "jobLabel": "app.kubernetes.io/name",
                "selector": {"matchLabels": labels(options, part)},
                **{_camel(name): limit for name, limit in LIMITS.items()},
                "podTargetLabels": [PART_OF, "rollouts-pod-template-hash"],
                "podMetricsEndpoints": [
                    {**end, "interval": "15s", **({"authorization": key} if part == "gateway" else {})}
                ],
            },
        }
        for part, end in ends.items()
    ]


def _camel(name: str) -> str:
    """A setting of Prometheus, as its operator calls it."""
    first, *rest = name.split("_")
    return first + "".join(map(str.title, rest))


def rules_object(options: RenderOptions, goal: Objectives, scope: Scope) -> Object:
    groups = [*recording_rules(goal, scope)["groups"], *alert_rules(goal, scope)["groups"]]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": options.name, "labels": labels(options, "rules")},
        "spec": {"groups": groups},
    }
