"""A Helm chart of the same objects: what Kustomize makes of overlays/cpu, with values for what clusters differ in.

What comes from the repository and its storage (flags, probes, which containers check the files) is fixed when the chart
is written; it is of this repository. The release's name takes the place of --name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from serve import __version__
from serve.deploy.cluster.manifests import base
from serve.deploy.cluster.naming import meta, scope_of
from serve.deploy.cluster.operator import monitors, rules_object
from serve.deploy.cluster.scaling import scaled_object, signals
from serve.deploy.cluster.template import NAMESPACE, RELEASE, Values
from serve.deploy.cluster.workload import Workload
from serve.deploy.cluster.yaml_text import HEAD, yaml_text
from serve.deploy.monitoring.objectives import Objectives
from serve.deploy.monitoring.scope import Scope
from serve.deploy.options import RenderOptions

__all__ = ["chart"]

Object = dict[str, Any]
NOTES = """\
The gateway is the Service {{ .Release.Name }}-gateway. It starts once its keys are there:

  serve keys add me --file keys.json
  kubectl -n {{ .Release.Namespace }} create secret generic \\
    {{ .Values.keys.secret | default (printf "%s-keys" .Release.Name) }} --from-file=keys.json
"""
FALLBACK = (
    "max (int .Values.scaling.minReplicas) "
    "(div (add (int .Values.scaling.minReplicas) (int .Values.scaling.maxReplicas)) 2)"
)


def chart(workload: Workload, options: RenderOptions, plan: Object, goal: Objectives, toml: str) -> dict[str, str]:
    """The chart's files by path, under helm/.

    Args:
        workload, options, plan, goal: of the manifests beside it.
        toml: the gateway's settings, of a gateway with the name `RELEASE`.
    """
    named = replace(options, name=RELEASE, namespace=NAMESPACE)
    scope = scope_of(named, workload.asked)
    values = Values()
    files = base(workload, named)
    triton, gateway = (files[f"{part}.yaml"][0] for part in ("triton", "gateway"))
    _pods(values, triton, gateway)
    _storage(values, triton)
    values.add("scaling.enabled", True, "by KEDA; without it there are triton.replicas")
    values.optional(
        triton["spec"], "replicas", "triton.replicas", plan["scaling"]["least"], only="not .Values.scaling.enabled"
    )
    watched = _watched(values, files["policies.yaml"], named, goal, scope)
    annotated = gateway["spec"]["template"]["metadata"].setdefault("annotations", {})
    # As Kustomize's hash in a name: new settings are new pods.
    values.put(annotated, "checksum/config", 'include (print $.Template.BasePath "/settings.yaml") . | sha256sum')
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{RELEASE}-gateway"}}
    templates = {
        **{name: values.template(objects) for name, objects in files.items()},
        "settings.yaml": values.template([{**settings, "data": {"gateway.toml": toml}}]),
        "scaledobject.yaml": values.template([_scaled(values, named, plan, goal, scope)], "scaling.enabled"),
        "monitoring.yaml": values.template(watched, "monitoring.enabled"),
        "ingress.yaml": values.template([_ingress(values, named)], "ingress.enabled"),
        "NOTES.txt": NOTES,
    }
    return {
        "helm/Chart.yaml": yaml_text(
            {
                "apiVersion": "v2", "name": options.name, "version": __version__, "appVersion": __version__,
                "type": "application", "description": "Triton behind a gateway, for one model repository.",
            }
        ),
        "helm/values.yaml": values.text(HEAD),
        "helm/values.schema.json": json.dumps(values.schema(), indent=1) + "\n",
        **{f"helm/templates/{name}": text for name, text in templates.items()},
    }  # fmt: skip


def _pods(values: Values, triton: Object, gateway: Object) -> None:
    """Images, sizes, places, keys."""
    for part, deployment in (("triton", triton), ("gateway", gateway)):
        pod = deployment["spec"]["template"]["spec"]
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            owner = container["name"] if container["name"] in ("triton", "fetch") else "gateway"
            values.take(container, "image", f"{owner}.image")
        values.take(pod["containers"][0], "resources", f"{part}.resources", "of one pod, as Kubernetes writes them")
        values.optional(pod, "nodeSelector", f"{part}.nodeSelector", {})
        values.optional(pod, "tolerations", f"{part}.tolerations", [])
        values.optional(pod, "imagePullSecrets", "imagePullSecrets", [], "such as [{name: registry}]")
        for volume in pod["volumes"]:
            if volume["name"] == "shm":
                values.take(volume["emptyDir"], "sizeLimit", "triton.sharedMemory", "of one pod; counts as memory")
            if volume["name"] == "keys":
                _named(values, volume["secret"], "secretName", "keys.secret", "keys", "holds keys.json of `serve keys`")
    values.take(gateway["spec"], "replicas", "gateway.replicas")


def _storage(values: Values, triton: Object) -> None:
    """Where the repository is. Its kind, and whether it has to be signed, decide which containers there are."""
    pod = triton["spec"]["template"]["spec"]
    for volume in pod["volumes"]:
        if "persistentVolumeClaim" in volume:
            values.take(volume["persistentVolumeClaim"], "claimName", "repository.claim", "the volume with the models")
        if "image" in volume:
            values.take(volume["image"], "reference", "repository.image", "the image volume with the models")
        if volume["name"] == "trust":
            values.take(volume["configMap"], "name", "repository.signedBy", "a ConfigMap with public.pem")
    for container in pod["initContainers"]:
        if container["name"] == "fetch":
            values.take(container["args"], 2, "repository.bucket")
            reference = container["envFrom"][0]["secretRef"]
            _named(values, reference, "name", "repository.secret", "bucket", "holds AWS_ACCESS_KEY_ID and so on")


def _named(values: Values, holder: Object, key: str, name: str, suffix: str, comment: str) -> None:
    """A Secret that is named after the release, unless the user names another."""
    values.add(name, "", f"{comment}; by default RELEASE-{suffix}")
    values.put(holder, key, f'.Values.{name} | default (printf "%s-{suffix}" .Release.Name) | toJson')


def _scaled(values: Values, options: RenderOptions, plan: Object, goal: Objectives, scope: Scope) -> Object:
    scaled = scaled_object(options, plan, signals(options, plan, goal.slow_s, scope))
    spec = scaled["spec"]
    values.take(spec, "minReplicaCount", "scaling.minReplicas")
    values.take(spec, "maxReplicaCount", "scaling.maxReplicas")
    values.put(spec["fallback"], "replicas", FALLBACK)
    for trigger in spec["triggers"]:
        about = trigger["metadata"]
        values.take(about, "serverAddress", "scaling.prometheus", "where KEDA asks")
        head, *rest = trigger["name"].split("-")
        bound = f"scaling.{head}{''.join(map(str.title, rest))}"
        values.take(about, "threshold", bound, f"the bound of {trigger['name']}, a text")
    return scaled


def _watched(
    values: Values, policies: Sequence[Object], options: RenderOptions, goal: Objectives, scope: Scope
) -> list[Object]:
    """For Prometheus Operator; and who may read Triton's metrics, with it or without."""
    values.add("monitoring.enabled", False, "PodMonitors, rules and alerts, for Prometheus Operator")
    for policy in policies:
        for rule in policy["spec"].get("ingress", ()):
            for source in rule.get("from", ()):
                if chosen := source.get("namespaceSelector"):
                    values.take(chosen["matchLabels"], "kubernetes.io/metadata.name", "monitoring.namespace")
    pods = monitors(options)
    for pod in pods:
        for end in pod["spec"]["podMetricsEndpoints"]:
            if "authorization" in end:
                end["authorization"] = deepcopy(end["authorization"])
                credentials = end["authorization"]["credentials"]
                about = "holds the key of `serve keys add … --metrics`"
                _named(values, credentials, "name", "monitoring.keySecret", "metrics-key", about)
    return [*pods, rules_object(options, goal, scope)]


def _ingress(values: Values, options: RenderOptions) -> Object:
    """The gateway to the outside; the manifests leave that to the cluster."""
    values.add("ingress.enabled", False, "the gateway to the outside")
    service = {"name": f"{RELEASE}-gateway", "port": {"name": "http"}}
    rule: Object = {"http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": {"service": service}}]}}
    spec: Object = {"rules": [rule]}
    about = meta(options, "gateway")
    values.optional(about, "annotations", "ingress.annotations", {})
    values.optional(spec, "ingressClassName", "ingress.className", "")
    values.optional(rule, "host", "ingress.host", "")
    values.optional(spec, "tls", "ingress.tls", [], "such as [{hosts: [a.example], secretName: a-tls}]")
    return {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": about, "spec": spec}
