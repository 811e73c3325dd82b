"""The same pods for one machine: files that `podman kube play` takes, without a cluster and without Docker.

Podman reads a part of what Kubernetes reads, and reads some of it otherwise. What is changed here, and why:

- A Deployment's containers always start again, and in Podman 4.3 its init containers do so, too, for ever. So it is a
  Pod that starts again if it fails, named after its claim (without the application's name, where the claim begins with
  it): another version of the repository is another pod.
- A volume that is made empty is on the disk, and shared by pods that call theirs alike. So each is a claim of its own,
  which Podman mounts as memory of the size that the manifests allow; the copy of a signed repository stays on the disk,
  as it may be larger than any memory that the containers have.
- A Secret is mounted as it is written, in base64, by Podman 4.3. So a secret is a volume, which holds its file.
- Ports of containers are published to every interface. So only what is meant for this machine's users is named.
- A probe by HTTP becomes a call of curl, which the images don't have, of a port that must be a number. So it is the
  command that the images have for it. Podman knows one probe; it is the one that asks whether a container lives.
- Services, policies, budgets and autoscalers are not known. Names and isolation come from two networks instead.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from serve.deploy.cluster.manifests import pod_security
from serve.deploy.cluster.naming import GATEWAY_PORT, TRITON_PORTS, labels
from serve.deploy.cluster.storage import secured
from serve.deploy.cluster.yaml_text import several
from serve.deploy.monitoring.monitoring import DATA, MonitoringOptions
from serve.deploy.monitoring.monitoring import files as monitoring
from serve.deploy.options import RenderOptions

__all__ = ["played"]

Object = dict[str, Any]
PROMETHEUS_PORT = 9090
CLUSTER_ONLY = (
    "serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "topologySpreadConstraints",
)  # fmt: skip
# Of volumes that are made empty, those on the disk: what a gateway that is replaced should find again; the copy of a
# signed repository, which is made anew at each start.
STATE, COPY = "state", "models"
ALIVE = {
    "triton": f"http://127.0.0.1:{TRITON_PORTS['http']}/v2/health/live",
    "gateway": f"http://127.0.0.1:{GATEWAY_PORT}/healthz",
    "prometheus": f"http://127.0.0.1:{PROMETHEUS_PORT}/-/healthy",
}
PROMETHEUS_MIB = 256


def played(deployments: dict[str, Object], options: RenderOptions, gateway_toml: str, slo: str) -> dict[str, str]:
    """The files by their path; none where the repository is not on a claim.

    Args:
        deployments: of the base, by their part.
        options: what runs where.
        gateway_toml: the gateway's settings.
        slo: the objective that Prometheus watches.
    """
    kind, _, claim = options.storage.partition(":")
    if kind != "pvc":
        return {}
    version = claim.removeprefix(f"{options.name}-")
    names = {"triton": f"{options.name}-triton-{version}", "gateway": f"{options.name}-gateway"}
    parts = {part: _pod(deployments[part], part, names[part], options) for part in names}
    settings = _config(f"{options.name}-gateway", {"gateway.toml": gateway_toml})
    return {
        "podman/triton.yaml": several(parts["triton"]),
        "podman/gateway.yaml": several([settings, *parts["gateway"]]),
        "podman/prometheus.yaml": several(_prometheus(options, slo)),
    }


def _pod(deployment: Object, part: str, name: str, options: RenderOptions) -> list[Object]:
    """A pod, after the claims that it alone has."""
    template = copy.deepcopy(deployment["spec"]["template"])
    spec: Object = {key: value for key, value in template["spec"].items() if key not in CLUSTER_ONLY}
    spec["restartPolicy"] = "OnFailure"
    claims = []
    for volume in spec["volumes"]:
        empty = volume.pop("emptyDir", None)
        if empty is not None:
            volume["persistentVolumeClaim"] = {"claimName": f"{name}-{volume['name']}"}
            if volume["name"] not in (STATE, COPY):
                claims.append(
                    _in_memory(f"{name}-{volume['name']}", empty.get("sizeLimit", "1Gi"), labels(options, part))
                )
        secret = volume.pop("secret", None)
        if secret is not None:
            volume["persistentVolumeClaim"] = {"claimName": secret["secretName"], "readOnly": True}
    for container in spec["containers"]:
        for key in ("startupProbe", "readinessProbe", "lifecycle", "ports"):
            container.pop(key, None)
        container["livenessProbe"] = _alive(part)
        if part == "gateway":
            container["ports"] = _published(GATEWAY_PORT, options.gateway_port)
    metadata = {"name": name, "labels": template["metadata"]["labels"]}
    return [*claims, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}]


def _published(port: int, at: int) -> list[Object]:
    return [{"containerPort": port, "hostPort": at, "hostIP": "127.0.0.1"}]


def _alive(part: str) -> Object:
    """Plain words: some releases join them, and give them to a shell."""
    return {
        "exec": {"command": ["http-ok", ALIVE[part]]},
        "initialDelaySeconds": 60, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6,
    }  # fmt: skip


def _in_memory(name: str, size: str, marked: dict[str, str]) -> Object:
    limit = size.removesuffix("i").lower()  # as mount has it
    notes = {"driver": "local", "type": "tmpfs", "device": "tmpfs", "mount-options": f"size={limit},nosuid,nodev"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": name,
            "labels": marked,
            "annotations": {f"volume.podman.io/{key}": text for key, text in notes.items()},
        },
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}},
    }


def _config(name: str, files: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files}


def _prometheus(options: RenderOptions, slo: str) -> Sequence[Object]:
    """It looks up who answers to a name each time, so that it finds the Tritons of two versions."""
    watched = MonitoringOptions(
        gateway=(f"{options.name}-gateway:{GATEWAY_PORT}",),
        triton=(f"{options.name}-triton:{TRITON_PORTS['metrics']}",),
        slo=slo, by_name=True, key_file="/run/secrets/metrics/key",
    )  # fmt: skip
    name = f"{options.name}-prometheus"
    files = {path.rpartition("/")[2]: text for path, text in monitoring(watched).items() if "prometheus/" in path}
    memory = {"memory": f"{PROMETHEUS_MIB}Mi"}
    container = {
        "name": "prometheus",
        "image": options.prometheus_image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus", *DATA],
        "ports": _published(PROMETHEUS_PORT, options.prometheus_port),
        "resources": {"requests": memory, "limits": memory},
        "livenessProbe": _alive("prometheus"),
        "securityContext": secured(),
        "volumeMounts": [
            {"name": "settings", "mountPath": "/etc/prometheus", "readOnly": True},
            {"name": "key", "mountPath": "/run/secrets/metrics", "readOnly": True},
            {"name": "data", "mountPath": "/prometheus"},
        ],
    }
    spec = {
        "restartPolicy": "OnFailure",
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [
            {"name": "settings", "configMap": {"name": name}},
            {"name": "key", "persistentVolumeClaim": {"claimName": f"{options.name}-metrics-key", "readOnly": True}},
            {"name": "data", "persistentVolumeClaim": {"claimName": f"{name}-data"}},
        ],
    }
    metadata = {"name": name, "labels": labels(options, "prometheus")}
    return [_config(name, files), {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}]
