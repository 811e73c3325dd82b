"""The files for `podman kube play`: the same pods, in what Podman reads of Kubernetes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.errors import ServerError
from serve.deploy.cluster.render import files
from serve.deploy.cluster.workload import Workload, workload_of
from serve.deploy.options import RenderOptions
from tests.custom_resources import VERSIONS, check

ROOT = Path(__file__).parents[4]
OPTIONS = RenderOptions(gateway_image="registry.example/gateway:1.0", image="registry.example/triton-cpu:1.0")
PARTS = ("triton", "gateway", "prometheus")
LASTING = {"models", "serving-keys", "serving-metrics-key", "serving-gateway-state", "serving-prometheus-data"}
Object = dict[str, Any]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return workload_of(ROOT / "model_repository")


def documents(workload: Workload, part: str, options: RenderOptions = OPTIONS) -> list[Object]:
    return list(yaml.safe_load_all(files(workload, options)[f"podman/{part}.yaml"]))


def pod_of(found: list[Object]) -> Object:
    (pod,) = [each for each in found if each["kind"] == "Pod"]
    return pod


@pytest.mark.parametrize("part", PARTS)
def test_each_file_fits_the_schemas(workload: Workload, part: str) -> None:
    for document in documents(workload, part):
        check(document, VERSIONS[-1])


@pytest.mark.parametrize("part", PARTS)
def test_what_is_published_is_on_this_machine_alone_and_triton_is_not(workload: Workload, part: str) -> None:
    (container,) = pod_of(documents(workload, part))["spec"]["containers"]
    ports = container.get("ports", [])
    assert all(port["hostIP"] == "127.0.0.1" for port in ports)
    assert [port["hostPort"] for port in ports] == {"gateway": [8080], "prometheus": [9090]}.get(part, [])


@pytest.mark.parametrize("part", PARTS)
def test_a_probe_is_words_that_an_image_has_and_no_shell_reads(workload: Workload, part: str) -> None:
    (container,) = pod_of(documents(workload, part))["spec"]["containers"]
    assert not {"startupProbe", "readinessProbe", "lifecycle"} & set(container)
    command = container["livenessProbe"]["exec"]["command"]
    assert command[0] == "http-ok"
    assert all(set(word).isdisjoint(" ;|&$<>()'\"\\*?") for word in command)


@pytest.mark.parametrize("part", PARTS)
def test_a_container_can_do_as_little_as_in_a_cluster(workload: Workload, part: str) -> None:
    spec = pod_of(documents(workload, part))["spec"]
    assert spec["securityContext"]["runAsUser"] == 1000
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        security = container["securityContext"]
        assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("part", PARTS)
def test_what_is_not_kept_is_memory_with_a_bound(workload: Workload, part: str) -> None:
    """Podman would put an empty volume onto the disk, unbounded, one for all pods that call theirs alike."""
    found = documents(workload, part)
    spec = pod_of(found)["spec"]
    made = {each["metadata"]["name"]: each for each in found if each["kind"] == "PersistentVolumeClaim"}
    claimed = {
        each["persistentVolumeClaim"]["claimName"] for each in spec["volumes"] if "persistentVolumeClaim" in each
    }
    assert not any("emptyDir" in each for each in spec["volumes"])
    assert claimed - set(made) <= LASTING
    assert set(made) <= claimed
    for each in made.values():
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "serving"
        notes = each["metadata"]["annotations"]
        assert notes["volume.podman.io/type"] == "tmpfs"
        assert f"size={each['spec']['resources']['requests']['storage'].lower().removesuffix('i')}," in notes[
            "volume.podman.io/mount-options"
        ]  # fmt: skip


def test_another_version_is_another_pod_with_volumes_of_its_own(workload: Workload) -> None:
    names = []
    for claim in ("models", "models-2"):
        found = documents(workload, "triton", replace(OPTIONS, storage=f"pvc:{claim}"))
        names.append({each["metadata"]["name"] for each in found})
        assert pod_of(found)["metadata"]["name"] == f"serving-triton-{claim}"
    assert not names[0] & names[1]
    found = documents(workload, "triton", replace(OPTIONS, storage="pvc:serving-models"))
    assert pod_of(found)["metadata"]["name"] == "serving-triton-models"


def test_files_are_checked_before_triton_reads_them(workload: Workload) -> None:
    (first,) = pod_of(documents(workload, "triton"))["spec"]["initContainers"]
    assert first["args"] == ["check", "/models"]


def test_a_signed_copy_is_on_the_disk_as_no_memory_has_to_hold_it(workload: Workload) -> None:
    found = documents(workload, "triton", replace(OPTIONS, signed_by="signer"))
    (copy,) = [each for each in pod_of(found)["spec"]["volumes"] if each["name"] == "models"]
    assert copy["persistentVolumeClaim"] == {"claimName": "serving-triton-models-models"}
    assert {each["metadata"]["name"] for each in found if each["kind"] == "PersistentVolumeClaim"} == {
        "serving-triton-models-shm", "serving-triton-models-tmp",
    }  # fmt: skip
    (trust,) = [each for each in pod_of(found)["spec"]["volumes"] if each["name"] == "trust"]
    assert trust["configMap"] == {"name": "signer"}


def test_keys_are_volumes_as_a_secret_would_be_read_in_base64(workload: Workload) -> None:
    for part, claim in (("gateway", "serving-keys"), ("prometheus", "serving-metrics-key")):
        volumes = pod_of(documents(workload, part))["spec"]["volumes"]
        assert not any("secret" in each for each in volumes)
        assert {"claimName": claim, "readOnly": True} in [each.get("persistentVolumeClaim") for each in volumes]


def test_prometheus_looks_up_every_server_behind_a_name(workload: Workload) -> None:
    (config,) = [each for each in documents(workload, "prometheus") if each["kind"] == "ConfigMap"]
    jobs = {job["job_name"]: job for job in yaml.safe_load(config["data"]["prometheus.yml"])["scrape_configs"]}
    found = {name: job["dns_sd_configs"][0] for name, job in jobs.items()}
    assert {name: (each["names"], each["port"]) for name, each in found.items()} == {
        "gateway": (["serving-gateway"], 8080),
        "triton": (["serving-triton"], 8002),
    }
    assert jobs["gateway"]["authorization"]["credentials_file"] == "/run/secrets/metrics/key"
    assert set(yaml.safe_load(config["data"]["prometheus.yml"])["rule_files"]) < set(config["data"])


def test_a_bucket_can_not_be_played(workload: Workload) -> None:
    assert not [name for name in files(workload, replace(OPTIONS, storage="s3://bucket/models")) if "podman/" in name]


@pytest.mark.parametrize(
    ("ports", "flag"), [((0, 9090), "--gateway-port 0"), ((8080, 70000), "--prometheus-port 70000")]
)
def test_a_port_that_is_none_is_refused(ports: tuple[int, int], flag: str) -> None:
    with pytest.raises(ServerError, match=flag):
        replace(OPTIONS, gateway_port=ports[0], prometheus_port=ports[1])
