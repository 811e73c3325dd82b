"""What the manifests count on and do not hold: said when they are written, with the command that makes it."""

from __future__ import annotations

from collections.abc import Iterator

from serve.deploy.cluster.naming import PART_OF, SERIES_LABELS
from serve.deploy.options import RenderOptions

__all__ = ["needs_of"]


def needs_of(options: RenderOptions) -> list[str]:
    """One line for each thing that has to be in the cluster first, in the order that they are needed."""
    return [*_place(options), *_repository(options), *_keys(options), *_controllers(options)]


def _place(options: RenderOptions) -> Iterator[str]:
    space = options.namespace
    yield f"the namespace {space} is not among the manifests: kubectl create namespace {space}"


def _repository(options: RenderOptions) -> Iterator[str]:
    kind, _, where = options.storage.partition(":")
    if kind == "pvc":
        yield (
            f"the claim {where} holds the repository before pods start. Several nodes mount it at once only where its "
            "access mode is ReadOnlyMany or ReadWriteMany: by ReadWriteOnce all pods are on one node, by "
            "ReadWriteOncePod there is one"
        )
    if kind == "image":
        yield f"nodes mount {where} as a volume: by Kubernetes' feature gate ImageVolume, and a runtime that can"
    if kind == "s3":
        name = f"{options.name}-bucket"
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        yield f"the secret {name} holds {keys}, to fetch models: {_secret(options, name)} --from-env-file=FILE"
    if options.signed_by:
        signer = options.signed_by
        yield (
            f"no pod starts without the ConfigMap {signer}, whose public.pem is the signer's public key: "
            f"kubectl -n {options.namespace} create configmap {signer} --from-file=public.pem; for Podman "
            f"write it to a file by --dry-run=client -o yaml, and give kube play that by --configmap"
        )


def _keys(options: RenderOptions) -> Iterator[str]:
    yield (
        "make the gateway's keys first: serve keys add … --file keys.json; "
        f"{_secret(options, f'{options.name}-keys')} --from-file=keys.json"
    )
    yield (
        "Prometheus reads the gateway by a key of its own: serve keys add prometheus --metrics --file keys.json, and "
        f"what that prints: {_secret(options, f'{options.name}-metrics-key')} --from-literal=key=KEY. Without it there "
        "is no p99, and the alert GatewayDown"
    )


def _controllers(options: RenderOptions) -> Iterator[str]:
    yield (
        "overlays/cpu, gpu and canary, and the chart while scaling.enabled, hold a ScaledObject: install KEDA first "
        "(its custom resources); canary needs Argo Rollouts, too, and components/prometheus-operator its operator"
    )
    space, part = SERIES_LABELS
    yield (
        f"KEDA and Argo ask {options.prometheus} for series with the labels {space} and {part}: PodMonitors of "
        "components/prometheus-operator make them (the chart's with monitoring.enabled). overlays/cpu holds none: a "
        f"Prometheus without that operator has to put the pod's namespace and label {PART_OF} onto what it scrapes. "
        "Where it has none, replicas stay at KEDA's fallback. The recording rules and alerts are in the same "
        "component; scaling does without them"
    )


def _secret(options: RenderOptions, name: str) -> str:
    return f"kubectl -n {options.namespace} create secret generic {name}"
