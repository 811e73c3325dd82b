"""Kubernetes objects: Triton behind a gateway, as a base that every cluster can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from serve.deploy.cluster.naming import GATEWAY_PORT, TRITON_PORTS, labels, meta
from serve.deploy.cluster.policies import disruption_budget, network_policies
from serve.deploy.cluster.storage import MODELS, secured, stored
from serve.deploy.cluster.workload import Workload
from serve.deploy.options import RenderOptions
from serve.gateway.access.footprint import GATEWAY_BODY, GATEWAY_HOLDS, MIB, footprint_bytes

__all__ = ["GATEWAY_TOML", "base", "pod_security", "resources", "scratch"]

Object = dict[str, Any]
REPOSITORY = "compress-serve/repository"
"""Annotation with the repository's digest: other files at the same claim or path are new pods."""
NOTICE_S = 5  # for endpoints and the gateway to notice that a pod leaves
USER = 1000  # triton-server of NVIDIA's image, and the user of ours
GATEWAY_CPU_MILLIS = 1000
# What its pod may have: all that clients may make it hold, and the processes themselves.
GATEWAY_MEMORY_MIB = -(-footprint_bytes(GATEWAY_HOLDS, GATEWAY_BODY) // MIB)
SHM, TMP = "/dev/shm", "/tmp"  # noqa: S108  volumes of Triton's pod's own
START = (
    f"{{ find {SHM} {TMP} -xdev -type d ! -perm -700 -execdir chmod u+rwx {{}} \\; ;"
    f' find {SHM} {TMP} -xdev -mindepth 1 -delete; }} 2>/dev/null; exec tritonserver "$@"'
)
"""The volumes outlive a container that is killed: what it left takes the next one's room, up to where none starts.

find follows no link and leaves other file systems alone; folders are opened first, as one that their owner may not
read would keep what is in it. What can't be removed stays, and Triton starts all the same.
"""
GATEWAY_TOML = """\
# What the gateway keeps to in this cluster; `serve gateway --help` names every setting.
upstream = ["http://{name}-triton:8000"]
discover = true
host = "0.0.0.0"
port = 8080
keys = "/run/secrets/gateway/keys.json"
state = "/var/lib/gateway/rollouts.db"
drain_delay_s = {notice}
drain_timeout_s = {drain}
memory_bytes = {holds}  # the pod's memory limit is made for these two
max_body_bytes = {body}
access_log = "-"
"""


def base(workload: Workload, options: RenderOptions) -> dict[str, list[Object]]:
    """The base's objects, by file."""
    return {
        "triton.yaml": [_triton(workload, options), _triton_service(options), _account(options, "triton")],
        "gateway.yaml": [_gateway(options), _gateway_service(options), _account(options, "gateway")],
        "policies.yaml": [
            *network_policies(options),
            disruption_budget(options, "triton"),
            disruption_budget(options, "gateway"),
        ],
    }


def resources(workload: Workload, *, gpu: bool = False) -> Object:
    """A processor limit would throttle threads that ONNX Runtime counts on; memory is limited to what is requested."""
    memory = f"{workload.memory_mib}Mi"
    limits = {"memory": memory} | ({"nvidia.com/gpu": "1"} if gpu else {})
    return {"requests": {"cpu": f"{workload.cpu_millis}m", "memory": memory}, "limits": limits}


def scratch(workload: Workload) -> list[Object]:
    """The volumes that a Triton writes to."""
    return [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{workload.shared_mib}Mi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
    ]


def pod_security() -> Object:
    return {
        "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip


def _account(options: RenderOptions, part: str) -> Object:
    """Its own, with no rights and no token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": meta(options, part),
        "automountServiceAccountToken": False,
    }


def _pod(
    options: RenderOptions,
    part: str,
    containers: list[Object],
    volumes: list[Object],
    grace_s: int,
    first: Sequence[Object] = (),
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Object:
    return {
        "metadata": {"labels": labels(options, part), **({"annotations": dict(notes)} if notes else {})},
        "spec": {
            "serviceAccountName": f"{options.name}-{part}",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_s,
            "securityContext": pod_security(),
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": labels(options, part)},
                }
                for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
            ],
            **({"initContainers": list(first)} if first else {}),
            "containers": containers,
            "volumes": volumes,
        },
    }  # fmt: skip


def _probe(path: str, port: str, **times: int) -> Object:
    return {"httpGet": {"path": path, "port": port}, **times}


def _triton(workload: Workload, options: RenderOptions) -> Object:
    models = stored(options)
    container = {
        "name": "triton",
        "image": options.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", START, "tritonserver"],
        "args": [
            f"--model-repository={MODELS}", "--disable-auto-complete-config", "--model-control-mode=none",
            "--strict-readiness=true", f"--exit-timeout-secs={options.drain_s}", *workload.flags,
        ],
        "env": [{"name": "HOME", "value": TMP}],
        "ports": [{"name": name, "containerPort": port} for name, port in TRITON_PORTS.items()],
        "resources": resources(workload),
        "startupProbe": _probe("/v2/health/ready", "http", periodSeconds=5, timeoutSeconds=2,
                               failureThreshold=-(-options.start_s // 5)),
        "readinessProbe": _probe("/v2/health/ready", "http", periodSeconds=5, timeoutSeconds=2, failureThreshold=2),
        "livenessProbe": _probe("/v2/health/live", "http", periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        # Requests still come while the endpoint is taken out of the service's name.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(NOTICE_S)]}}},
        "securityContext": secured(),
        "volumeMounts": [
            {"name": "models", "mountPath": MODELS, "readOnly": True},
            {"name": "shm", "mountPath": SHM},
            {"name": "tmp", "mountPath": TMP},
        ],
    }  # fmt: skip
    volumes = [*scratch(workload), *models.volumes]
    grace_s = NOTICE_S + options.drain_s + 10
    pod = _pod(
        options, "triton", [container], volumes, grace_s, models.first, {REPOSITORY: f"sha256:{workload.digest}"}
    )
    return _deployment(options, "triton", pod, replicas=None)


def _gateway(options: RenderOptions) -> Object:
    container = {
        "name": "gateway",
        "image": options.gateway_image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["gateway", "--config", "/etc/gateway/gateway.toml"],
        "ports": [{"name": "http", "containerPort": GATEWAY_PORT}],
        "resources": {
            "requests": {"cpu": f"{GATEWAY_CPU_MILLIS}m", "memory": f"{GATEWAY_MEMORY_MIB}Mi"},
            "limits": {"cpu": f"{GATEWAY_CPU_MILLIS}m", "memory": f"{GATEWAY_MEMORY_MIB}Mi"},
        },
        "startupProbe": _probe("/healthz", "http", periodSeconds=1, timeoutSeconds=2, failureThreshold=60),
        "readinessProbe": _probe("/readyz", "http", periodSeconds=2, timeoutSeconds=3, failureThreshold=2),
        "livenessProbe": _probe("/healthz", "http", periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "securityContext": secured(),
        "volumeMounts": [
            {"name": "settings", "mountPath": "/etc/gateway", "readOnly": True},
            {"name": "keys", "mountPath": "/run/secrets/gateway", "readOnly": True},
            {"name": "state", "mountPath": "/var/lib/gateway"},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of the pod's own
        ],
    }
    volumes: list[Object] = [
        {"name": "settings", "configMap": {"name": f"{options.name}-gateway"}},
        {"name": "keys", "secret": {"secretName": f"{options.name}-keys", "defaultMode": 0o440}},
        {"name": "state", "emptyDir": {"sizeLimit": "64Mi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
    ]
    # After SIGTERM it stays reachable for drain_delay_s, then gives what is in flight drain_timeout_s.
    grace_s = NOTICE_S + options.drain_s + 10
    return _deployment(options, "gateway", _pod(options, "gateway", [container], volumes, grace_s), replicas=2)


def _deployment(options: RenderOptions, part: str, pod: Object, replicas: int | None) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta(options, part),
        "spec": {
            **({} if replicas is None else {"replicas": replicas}),  # an autoscaler's are not to be overwritten
            "selector": {"matchLabels": labels(options, part)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": pod,
        },
    }


def _triton_service(options: RenderOptions) -> Object:
    """Headless: the gateway looks up every pod and sends each request to the least busy one."""
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in TRITON_PORTS.items()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(options, "triton"),
        "spec": {"clusterIP": "None", "selector": labels(options, "triton"), "ports": ports},
    }


def _gateway_service(options: RenderOptions) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(options, "gateway"),
        "spec": {
            "selector": labels(options, "gateway"),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }
