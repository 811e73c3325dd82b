"""Who may talk to whom, and how many pods may be away at once."""

from __future__ import annotations

from typing import Any

from serve.deploy.addresses import bucket_of
from serve.deploy.cluster.naming import GATEWAY_PORT, TRITON_PORTS, labels, meta
from serve.deploy.options import RenderOptions

__all__ = ["disruption_budget", "network_policies"]

Object = dict[str, Any]


def network_policies(options: RenderOptions) -> list[Object]:
    """Nothing but what is named: gateway to Triton, Prometheus to both; names for who looks some up.

    Triton's pods do so for a bucket alone: to whoever runs code in a hook, a server of names is a way out.
    """
    names: Object = {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
        "ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")],
    }
    watcher = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": options.monitoring_namespace}}}
    gateway, triton = ({"podSelector": {"matchLabels": labels(options, part)}} for part in ("gateway", "triton"))

    def ports(*numbers: int) -> list[Object]:
        return [{"port": number, "protocol": "TCP"} for number in numbers]

    def policy(part: str, ingress: list[Object], egress: list[Object]) -> Object:
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": meta(options, part),
            "spec": {
                "podSelector": {"matchLabels": labels(options, part)},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": ingress,
                "egress": egress,
            },
        }

    outside: list[Object] = []
    if options.storage.startswith("s3:"):
        outside = [names, {"ports": ports(bucket_of(options.storage).port)}]
    return [
        policy(
            "triton",
            [
                {"from": [gateway], "ports": ports(TRITON_PORTS["http"], TRITON_PORTS["grpc"])},
                {"from": [watcher], "ports": ports(TRITON_PORTS["metrics"])},
            ],
            outside,
        ),
        policy(
            "gateway",
            [{"ports": ports(GATEWAY_PORT)}],
            [names, {"to": [triton], "ports": ports(TRITON_PORTS["http"], TRITON_PORTS["grpc"])}],
        ),
    ]


def disruption_budget(options: RenderOptions, part: str) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta(options, part),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(options, part)}},
    }
