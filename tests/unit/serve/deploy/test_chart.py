"""The Helm chart: by Helm itself, it is what Kustomize makes of the manifests, and a value changes what it names alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve.deploy.cluster.render import render
from serve.deploy.cluster.template import NAMESPACE, RELEASE, Values
from serve.deploy.options import RenderOptions
from tests.custom_resources import VERSIONS, check

ROOT = Path(__file__).parents[4]
Object = dict[str, Any]
Objects = dict[tuple[str, str], Object]
KUBECTL = shutil.which("kubectl")
HASH = re.compile(r"(serving-gateway)-[0-9a-z]{10}")
with_helm = pytest.mark.skipif(find_spec("helm_python") is None, reason="helm-python-sdk is not there")
with_both = pytest.mark.skipif(find_spec("helm_python") is None or KUBECTL is None, reason="no Helm, or no kubectl")
PVC = RenderOptions(gateway_image="registry.example/gateway:1.0", image="registry.example/triton:26.07-pillow")
DIGEST = "@sha256:" + "0" * 64
STORAGES = {
    "pvc": PVC,
    "pvc signed": replace(PVC, signed_by="signer"),
    "image signed": replace(PVC, storage=f"image:registry.example/models{DIGEST}", signed_by="signer"),
    "s3": replace(PVC, storage="s3://bucket/models"),
    "s3 signed": replace(PVC, storage="s3://https://minio.example:9000/bucket/models", signed_by="signer"),
    "with a rate": replace(PVC, target=20.0, min_replicas=3, max_replicas=12, max_queue_ms=40.0),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("charts")

    def of(storage: str) -> Path:
        if not (folder / storage).exists():
            render(ROOT / "model_repository", folder / storage, STORAGES[storage])
        return folder / storage

    return of


def by_name(texts: list[str]) -> Objects:
    documents = [each for text in texts for each in yaml.safe_load_all(text) if each]
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(found) == len(documents)
    return found


def templated(chart: Path, values: Object | None = None, name: str = "serving", namespace: str = "serving") -> Objects:
    """What Helm would apply."""
    import helm_python

    with helm_python.Chart.load(chart) as loaded:
        rendered = loaded.render(values or {}, name=name, namespace=namespace)
    return by_name([text for path, text in rendered.items() if path.endswith(".yaml")])


def kustomized(folder: Path) -> Objects:
    """What Kustomize would apply, but for what each tool does its own way: the namespace, and new pods for new settings."""
    done = subprocess.run([str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True, check=True)
    found = by_name([HASH.sub(r"\1", done.stdout)])
    for each in found.values():
        assert each["metadata"].pop("namespace") == "serving"
    return found


def without_checksum(objects: Objects) -> Objects:
    annotations = objects["Deployment", "serving-gateway"]["spec"]["template"]["metadata"].pop("annotations")
    assert re.fullmatch("[0-9a-f]{64}", annotations["checksum/config"])
    return objects


@with_both
@pytest.mark.parametrize("storage", STORAGES)
def test_by_default_it_is_what_kustomize_makes(folders: Callable[[str], Path], storage: str) -> None:
    folder = folders(storage)
    assert without_checksum(templated(folder / "helm")) == kustomized(folder / "overlays/cpu")


@with_helm
def test_with_monitoring_it_is_the_component_for_prometheus_operator(folders: Callable[[str], Path]) -> None:
    folder = folders("pvc")
    more = templated(folder / "helm", {"monitoring": {"enabled": True}})
    for key in templated(folder / "helm"):
        del more[key]
    texts = [(folder / f"components/prometheus-operator/{name}.yaml").read_text() for name in ("monitors", "rules")]
    assert more == by_name(texts)
    assert "{{ $labels" in texts[1], "alerts have templates of Prometheus's, which Helm has to leave alone"


def changes(before: Any, after: Any, path: str = "") -> dict[str, Any]:
    """What differs, by path: the new value, None for what is gone."""
    if isinstance(before, dict) and isinstance(after, dict):
        parts = {str(key): (before.get(key), after.get(key)) for key in {**before, **after}}
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        parts = {str(index): pair for index, pair in enumerate(zip(before, after, strict=True))}
    else:
        return {} if before == after else {path: after}
    found: dict[str, Any] = {}
    for key, (one, other) in parts.items():
        found |= changes(one, other, f"{path}/{key}")
    return found


TRITON = "Deployment serving-triton/spec/template/spec"
GATEWAY = "Deployment serving-gateway/spec/template/spec"
SCALED = "ScaledObject serving-triton/spec"
TOLERATED = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
CASES: dict[str, tuple[str, Object, Object]] = {
    "images": (
        "s3", {"triton": {"image": "a/t:2"}, "gateway": {"image": "a/g:2"}, "fetch": {"image": "a/f:2"}},
        {f"{TRITON}/containers/0/image": "a/t:2", f"{TRITON}/initContainers/0/image": "a/f:2",
         f"{TRITON}/initContainers/1/image": "a/g:2", f"{GATEWAY}/containers/0/image": "a/g:2"},
    ),
    "the claim": ("pvc", {"repository": {"claim": "b"}}, {f"{TRITON}/volumes/2/persistentVolumeClaim/claimName": "b"}),
    "who signed": (
        "pvc signed", {"repository": {"signedBy": "b", "claim": "c"}},
        {f"{TRITON}/volumes/4/configMap/name": "b", f"{TRITON}/volumes/2/persistentVolumeClaim/claimName": "c"},
    ),
    "the image volume": (
        "image signed", {"repository": {"image": "a/m:2"}}, {f"{TRITON}/volumes/2/image/reference": "a/m:2"}),
    "the bucket": (
        "s3 signed", {"repository": {"bucket": "s3://b/c", "secret": "d"}},
        {f"{TRITON}/initContainers/0/args/2": "s3://b/c", f"{TRITON}/initContainers/0/envFrom/0/secretRef/name": "d"},
    ),
    "sizes": (
        "pvc", {"triton": {"resources": {"requests": {"cpu": "8"}}, "sharedMemory": "1Gi"}, "gateway": {"replicas": 5}},
        {f"{TRITON}/containers/0/resources/requests/cpu": "8", f"{TRITON}/volumes/0/emptyDir/sizeLimit": "1Gi",
         "Deployment serving-gateway/spec/replicas": 5},
    ),
    "a gpu": (
        "pvc", {"triton": {"resources": {"limits": {"nvidia.com/gpu": "1"}}, "tolerations": TOLERATED,
                           "nodeSelector": {"nvidia.com/gpu.present": "true"}}},
        {f"{TRITON}/containers/0/resources/limits/nvidia.com/gpu": "1", f"{TRITON}/tolerations": TOLERATED,
         f"{TRITON}/nodeSelector": {"nvidia.com/gpu.present": "true"}},
    ),
    "keys": ("pvc", {"keys": {"secret": "mine"}}, {f"{GATEWAY}/volumes/1/secret/secretName": "mine"}),
    "a registry's secret": (
        "pvc", {"imagePullSecrets": [{"name": "r"}]},
        {f"{TRITON}/imagePullSecrets": [{"name": "r"}], f"{GATEWAY}/imagePullSecrets": [{"name": "r"}]},
    ),
    "scaling": (
        "with a rate", {"scaling": {"minReplicas": 5, "maxReplicas": 30, "requests": "25", "prometheus": "http://p"}},
        {f"{SCALED}/minReplicaCount": 5, f"{SCALED}/maxReplicaCount": 30, f"{SCALED}/fallback/replicas": 17,
         f"{SCALED}/triggers/0/metadata/threshold": "25",
         **{f"{SCALED}/triggers/{each}/metadata/serverAddress": "http://p" for each in range(3)}},
    ),
    "no autoscaler": (
        "pvc", {"scaling": {"enabled": False}, "triton": {"replicas": 4}},
        {"ScaledObject serving-triton": None, "Deployment serving-triton/spec/replicas": 4},
    ),
    "where Prometheus is": (
        "pvc", {"monitoring": {"namespace": "watch"}},
        {"NetworkPolicy serving-triton/spec/ingress/1/from/0/namespaceSelector/matchLabels"
         "/kubernetes.io/metadata.name": "watch"},
    ),
    "text that YAML or Helm could take for something else": (
        "pvc", {"keys": {"secret": "{{ x }}: [\n'\"#"}}, {f"{GATEWAY}/volumes/1/secret/secretName": "{{ x }}: [\n'\"#"}),
}  # fmt: skip


@with_helm
@pytest.mark.parametrize("case", CASES)
def test_a_value_changes_what_it_names_alone(folders: Callable[[str], Path], case: str) -> None:
    storage, values, expected = CASES[case]
    before, after = (templated(folders(storage) / "helm", each) for each in ({}, values))
    one, other = ({" ".join(key): each for key, each in objects.items()} for objects in (before, after))
    assert {path[1:]: new for path, new in changes(one, other).items()} == expected


@with_helm
def test_an_ingress_leads_to_the_gateway_when_it_is_asked_for(folders: Callable[[str], Path]) -> None:
    chart = folders("pvc") / "helm"
    tls = [{"hosts": ["a.example"], "secretName": "a-tls"}]
    asked = {"enabled": True, "host": "a.example", "className": "nginx", "tls": tls, "annotations": {"a/b": "c"}}
    plain, full = (templated(chart, {"ingress": each}) for each in ({"enabled": True}, asked))
    for objects in (plain, full):
        made = objects["Ingress", "serving-gateway"]
        check(made, VERSIONS[0])
        (path,) = made["spec"]["rules"][0]["http"]["paths"]
        service = objects["Service", path["backend"]["service"]["name"]]
        assert path["backend"]["service"]["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    assert full["Ingress", "serving-gateway"]["spec"]["tls"] == tls
    assert full["Ingress", "serving-gateway"]["spec"]["rules"][0]["host"] == "a.example"
    assert plain.keys() - {("Ingress", "serving-gateway")} == templated(chart).keys()


@with_helm
@pytest.mark.parametrize("name", ["shop", "123"])
def test_a_release_of_another_name_is_the_manifests_of_that_name(
    folders: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    chart = folders("pvc") / "helm"
    again = templated(chart, {"monitoring": {"enabled": True}}, name=name)
    assert RELEASE not in json.dumps([*again.values()])
    for each in again.values():
        check(each, VERSIONS[-1])
        assert each["metadata"].get("labels", {}).get("app.kubernetes.io/part-of", name) == name
    if name == "shop":
        render(ROOT / "model_repository", tmp_path / "out", replace(PVC, name=name))
        assert templated(tmp_path / "out/helm", {"monitoring": {"enabled": True}}, name=name) == again


@with_helm
@pytest.mark.parametrize("namespace", ["staging", "123"])
def test_a_release_in_another_namespace_is_scaled_and_watched_there(
    folders: Callable[[str], Path], tmp_path: Path, namespace: str
) -> None:
    again = templated(folders("pvc") / "helm", {"monitoring": {"enabled": True}}, namespace=namespace)
    assert NAMESPACE not in json.dumps([*again.values()])
    for each in again.values():
        check(each, VERSIONS[-1])
    for trigger in again["ScaledObject", "serving-triton"]["spec"]["triggers"]:
        assert f'namespace="{namespace}"' in trigger["metadata"]["query"]
    if namespace == "staging":
        render(ROOT / "model_repository", tmp_path / "out", replace(PVC, namespace=namespace))
        monitored = {"monitoring": {"enabled": True}}
        assert templated(tmp_path / "out/helm", monitored, namespace=namespace) == again
        texts = [(tmp_path / "out/components" / f"{name}.yaml").read_text()
                 for name in ("keda/scaledobject", "prometheus-operator/rules")]  # fmt: skip
        assert by_name(texts).items() <= again.items()


@with_helm
def test_helm_finds_nothing_to_say_of_it_and_refuses_values_that_it_does_not_have(
    folders: Callable[[str], Path],
) -> None:
    import helm_python

    for storage in STORAGES:
        found = helm_python.lint(folders(storage) / "helm")
        assert "ERROR" not in str(found), found
        assert "WARNING" not in str(found), found
    for wrong in ({"triton": {"imagee": "a"}}, {"scaling": {"minReplicas": "two"}}, {"triton": {"image": None}}):
        with pytest.raises(helm_python.HelmError):
            templated(folders("pvc") / "helm", wrong)
    with helm_python.Chart.load(folders("pvc") / "helm") as loaded:
        rendered = loaded.render({}, name="shop", namespace="here")
    assert "create secret generic" in str(rendered)


def test_a_value_stands_for_one_default() -> None:
    values = Values()
    values.add("a.b", 1)
    values.add("a.b", 1)
    with pytest.raises(ValueError, match=r"a\.b stands for both"):
        values.add("a.b", 2)
