"""KServe: the same Triton as a ServingRuntime, and an InferenceService that names the repository."""

from __future__ import annotations

from typing import Any

from serve.deploy.cluster.manifests import USER, pod_security, resources, scratch
from serve.deploy.cluster.naming import TRITON_PORTS, labels, meta
from serve.deploy.cluster.scaling import Signal, bounds, quantity
from serve.deploy.cluster.storage import MODELS, secured, stored
from serve.deploy.cluster.workload import Workload
from serve.deploy.options import RenderOptions

__all__ = ["kserve"]

Object = dict[str, Any]


def kserve(workload: Workload, options: RenderOptions, plan: dict[str, Any], found: list[Signal]) -> list[Object]:
    """Without the gateway: KServe has its own way in. KEDA scales it by the same signals.

    Nor with KServe's storage initializer, whose `storageUri` is left out: its container comes after those of the
    predictor, or (for oci://) beside Triton, so that no check could stand between it and Triton. The repository's
    volume and what checks it are the same as in the deployment.

    Args:
        found: what replicas follow; those that are times are left to the gateway's own deployment.
    """
    least, most = bounds(options, plan)
    container = {
        "name": "kserve-container",
        "image": options.image,
        "command": ["tritonserver"],
        "args": [
            f"--model-store={MODELS}", "--disable-auto-complete-config", "--strict-readiness=true",
            f"--exit-timeout-secs={options.drain_s}", f"--http-port={TRITON_PORTS['http']}", *workload.flags,
        ],
        "ports": [{"containerPort": TRITON_PORTS["http"], "protocol": "TCP"}],
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108  a volume of the pod's own
        "resources": resources(workload, gpu=workload.gpu),
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": TRITON_PORTS["http"]}, "periodSeconds": 5},
        "securityContext": {
            **secured(), "runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "models", "mountPath": MODELS, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  as above
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  as above
        ],
    }  # fmt: skip
    runtime = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": meta(options, "triton"),
        "spec": {
            "annotations": {
                "prometheus.kserve.io/port": str(TRITON_PORTS["metrics"]), "prometheus.kserve.io/path": "/metrics",
            },
            "supportedModelFormats": [{"name": "triton", "version": "2", "autoSelect": False}],
            "protocolVersions": ["v2", "grpc-v2"],
            "containers": [container],
            "volumes": scratch(workload),
        },
    }  # fmt: skip
    models = stored(options)
    rate = next((signal for signal in found if signal.each), None)
    scaling: Object = {"minReplicas": least, "maxReplicas": most}
    if rate is not None:
        metric = {
            "backend": "prometheus", "serverAddress": options.prometheus, "query": rate.query,
        }  # fmt: skip
        target = {"type": "AverageValue", "averageValue": quantity(rate.bound)}
        scaling["autoScaling"] = {"metrics": [{"type": "External", "external": {"metric": metric, "target": target}}]}
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": options.name,
            "labels": labels(options, "triton"),
            "annotations": {
                "serving.kserve.io/deploymentMode": "Standard",
                "serving.kserve.io/autoscalerClass": "keda" if rate is not None else "hpa",
            },
        },
        "spec": {
            "predictor": {
                **scaling,
                "terminationGracePeriodSeconds": options.drain_s + 15,
                "model": {
                    "modelFormat": {"name": "triton", "version": "2"},
                    "protocolVersion": "v2",
                    "runtime": f"{options.name}-triton",
                },
                "volumes": list(models.volumes),
                "initContainers": list(models.first),
                "securityContext": pod_security(),
            }
        },
    }
    return [runtime, service]
