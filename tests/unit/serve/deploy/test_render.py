"""Kubernetes manifests: what Kustomize makes of them fits the schemas of several releases, and keeps the policies."""

from __future__ import annotations

import errno
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.artifact import Runtime
from compress.errors import ServerError
from compress.vetting.replace import mend_of
from deploy.containers.keys import make_keys
from serve.deploy.cluster.canary import analysis_templates, passes, rollout
from serve.deploy.cluster.policies import network_policies
from serve.deploy.cluster.render import render, warnings_of
from serve.deploy.cluster.workload import workload_of
from serve.deploy.gate import judge
from serve.deploy.monitoring.monitoring import MonitoringOptions, write_monitoring
from serve.deploy.monitoring.objectives import objectives_of
from serve.deploy.monitoring.scope import Scope
from serve.deploy.options import RenderOptions
from serve.gateway.access.footprint import GATEWAY_HOLDS, MIB, footprint_bytes
from serve.gateway.settings_file import load_settings
from serve.pack.write import PackOptions, pack
from serve.rollout.plan import Plan
from tests.custom_resources import VERSIONS, check
from tests.full_disk import full_disk
from tests.load_servers import result_of
from tests.serve_models import hook_file, tiny_artifact

ROOT = Path(__file__).parents[4]
Object = dict[str, Any]
OVERLAYS = ("overlays/cpu", "overlays/gpu", "overlays/dev", "overlays/canary")
OPTIONS = RenderOptions(gateway_image="registry.example/gateway:1.0", image="registry.example/triton:26.07-pillow")
KUBECTL = shutil.which("kubectl")
with_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not there")
S3 = replace(OPTIONS, storage="s3://bucket/models")
S3_SIGNED = replace(S3, storage="s3://https://minio.example:9000/bucket/models", signed_by="signer")
SIGNED = replace(OPTIONS, storage="image:registry.example/models@sha256:" + "0" * 64, signed_by="signer")


def test_what_stands_in_deploy_is_what_the_command_writes(tmp_path: Path) -> None:
    """serve deploy render model_repository -o deploy/kubernetes, with the two images."""
    options = RenderOptions(
        gateway_image="registry.example/compress-serve-gateway:0.1.0",
        image="registry.example/compress-serve-triton:26.07-hooks",
    )
    render(ROOT / "model_repository", tmp_path / "kubernetes", options)
    anew, there = (
        {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "kubernetes", ROOT / "deploy/kubernetes")
    )
    assert anew == there


def built(folder: Path) -> list[Object]:
    done = subprocess.run([str(KUBECTL), "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What Kustomize makes of an overlay, of options."""
    folder = tmp_path_factory.mktemp("rendered")
    script = folder / "build_engine.py"
    script.write_text("print('builds')\n")
    every = {
        "pvc": OPTIONS,
        "s3": S3,
        "s3 signed": S3_SIGNED,
        "signed": SIGNED,
        "engine": replace(OPTIONS, engine_script=script, gpu_product="NVIDIA-H200"),
    }

    @cache
    def of(name: str, overlay: str) -> list[Object]:
        if not (folder / name).exists():
            render(ROOT / "model_repository", folder / name, every[name])
        return built(folder / name / overlay)

    return of


def one(documents: list[Object], kind: str, name: str = "") -> Object:
    (found,) = [each for each in documents if each["kind"] == kind and name in each["metadata"]["name"]]
    return found


def pods(documents: list[Object]) -> Iterator[Object]:
    """Pod specs, wherever they are."""
    for document in documents:
        match document["kind"]:
            case "Deployment":
                yield document["spec"]["template"]["spec"]
            case "AnalysisTemplate":
                for metric in document["spec"]["metrics"]:
                    if "job" in metric["provider"]:
                        yield metric["provider"]["job"]["spec"]["template"]["spec"]


@with_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_schemas_strictly(rendered: Any, overlay: str, version: str) -> None:
    documents = rendered("pvc", overlay)
    assert documents
    for document in documents:
        check(document, version)


@with_kubectl
@pytest.mark.parametrize(
    ("storage", "overlay"),
    [
        ("s3", "overlays/canary"),
        ("signed", "overlays/canary"),
        ("engine", "overlays/gpu"),
    ],
)
def test_so_do_those_of_other_options(rendered: Any, storage: str, overlay: str) -> None:
    for document in rendered(storage, overlay):
        check(document, VERSIONS[-1])


def test_components_fit_too(tmp_path: Path) -> None:
    render(ROOT / "model_repository", tmp_path / "out", replace(OPTIONS, target=20.0))
    for name in ("keda/scaledobject", "prometheus-operator/monitors", "prometheus-operator/rules"):
        for document in yaml.safe_load_all((tmp_path / f"out/components/{name}.yaml").read_text()):
            check(document, VERSIONS[0])
            groups = [group["name"] for group in document["spec"].get("groups", ())]
            assert len(groups) == len(set(groups)), "the API server refuses a name that stands there twice"


@pytest.mark.parametrize(
    "broken",
    [
        {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "spec": {"scaleTargetRef": {"name": "a"}}},
        {"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout", "spec": {"strategy": {"canary": {"step": []}}}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"port": 1}},
    ],
)
def test_the_schemas_refuse_what_is_wrong(broken: Object) -> None:
    with pytest.raises(Exception, match=r"required|not allowed|not of type|unexpected|Additional"):
        check(broken, VERSIONS[-1])


@with_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_is_root_or_writes_its_image_or_has_a_moving_tag_or_no_limit(rendered: Any, overlay: str) -> None:
    found = list(pods(rendered("pvc", overlay)))
    assert len(found) >= 2
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            secured = container["securityContext"]
            assert secured["readOnlyRootFilesystem"]
            assert not secured["allowPrivilegeEscalation"]
            assert secured["capabilities"] == {"drop": ["ALL"]}
            assert ":" in container["image"]
            assert not container["image"].endswith(":latest")
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
            assert container["resources"]["requests"]["cpu"]
            assert not any("value" in each and "KEY" in each["name"] for each in container.get("env", ()))


@with_kubectl
def test_triton_is_reached_by_the_gateway_and_by_prometheus_alone(rendered: Any) -> None:
    documents = rendered("pvc", "overlays/cpu")
    policy = one(documents, "NetworkPolicy", "triton")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    by_port = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    gateway = {
        "podSelector": {"matchLabels": one(documents, "Deployment", "gateway")["spec"]["selector"]["matchLabels"]}
    }
    assert by_port[8000] == by_port[8001] == [gateway]
    assert "podSelector" not in by_port[8002][0]
    assert "namespaceSelector" in by_port[8002][0]
    selected = one(documents, "Deployment", "triton")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= selected.items()
    assert one(documents, "Service", "triton")["spec"]["clusterIP"] == "None"


@with_kubectl
def test_what_a_pod_is_given_to_end_is_longer_than_what_it_takes(rendered: Any, tmp_path: Path) -> None:
    documents = rendered("pvc", "overlays/cpu")
    triton = one(documents, "Deployment", "triton")["spec"]["template"]["spec"]
    waits = int(triton["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    exits = next(int(text.partition("=")[2]) for text in triton["containers"][0]["args"] if "exit-timeout" in text)
    assert triton["terminationGracePeriodSeconds"] > waits + exits
    (tmp_path / "gateway.toml").write_text(
        one(documents, "ConfigMap")["data"]["gateway.toml"].replace(
            "/run/secrets/gateway/keys.json", str(tmp_path / "keys.json")
        )
    )
    settings = load_settings(tmp_path / "gateway.toml", {})
    assert settings.discover
    assert settings.upstream == ("http://serving-triton:8000",)
    grace = one(documents, "Deployment", "gateway")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.drain_delay_s + settings.drain_timeout_s


@with_kubectl
def test_a_gateways_bound_fits_into_its_pod(rendered: Any, tmp_path: Path) -> None:
    documents = rendered("pvc", "overlays/cpu")
    (tmp_path / "keys.json").write_text("{}")
    (tmp_path / "gateway.toml").write_text(
        one(documents, "ConfigMap")["data"]["gateway.toml"].replace(
            "/run/secrets/gateway/keys.json", str(tmp_path / "keys.json")
        )
    )
    settings = load_settings(tmp_path / "gateway.toml", {})
    (container,) = one(documents, "Deployment", "gateway")["spec"]["template"]["spec"]["containers"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) * MIB
    assert footprint_bytes(settings.memory_bytes, settings.max_body_bytes) <= limit
    assert settings.memory_bytes >= 4 * settings.max_body_bytes


def test_files_are_checked_before_triton_starts(rendered: Any) -> None:
    key = ["--public-key", "/run/trust/public.pem"]
    for storage, words in (
        ("pvc", ["check", "/models"]),
        ("signed", ["check", "/source", *key, "--into", "/models"]),
        ("s3", ["check", "/models"]),
        ("s3 signed", ["check", "/models", *key]),
    ):
        pod = one(rendered(storage, "overlays/cpu"), "Deployment", "triton")["spec"]["template"]["spec"]
        check = pod["initContainers"][-1]
        assert check["args"] == words
        containers = (*pod["initContainers"], *pod["containers"])
        assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
        (triton,) = pod["containers"]
        (served,) = (mount for mount in triton["volumeMounts"] if mount["name"] == "models")
        assert served == {"name": "models", "mountPath": "/models", "readOnly": True}
        assert any(arg.endswith("=/models") for arg in triton["args"]), "what was checked is what is served"
        if "signed" in storage or "s3" in storage:  # nothing from outside reaches a container that starts again
            (volume,) = (each for each in pod["volumes"] if each["name"] == "models")
            assert volume == {"name": "models", "emptyDir": {}}


@with_kubectl
@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("s3", ["s3", "sync", "s3://bucket/models", "/models", "--only-show-errors", "--delete", "--exact-timestamps"]),
        (
            "s3 signed",
            ["s3", "sync", "s3://bucket/models", "/models", "--only-show-errors", "--delete", "--exact-timestamps",
             "--endpoint-url", "https://minio.example:9000"],
        ),
    ],
)  # fmt: skip
def test_a_bucket_is_fetched_into_the_pod(rendered: Any, storage: str, words: list[str]) -> None:
    pod = one(rendered(storage, "overlays/cpu"), "Deployment", "triton")["spec"]["template"]["spec"]
    fetch = pod["initContainers"][0]
    assert fetch["args"] == words
    assert fetch["envFrom"] == [{"secretRef": {"name": "serving-bucket"}}]
    assert "envFrom" not in pod["containers"][0], "Triton needs no way to the bucket"


@with_kubectl
def test_an_engine_is_built_on_the_gpu_that_will_run_it(rendered: Any) -> None:
    pod = one(rendered("engine", "overlays/gpu"), "Deployment", "triton")["spec"]["template"]["spec"]
    build, packs = pod["initContainers"]
    assert build["command"] == ["python3"]
    assert build["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert packs["args"][:2] == ["pack", "/built/artifact"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["nodeSelector"]["nvidia.com/gpu.product"] == "NVIDIA-H200"
    assert pod["containers"][0]["volumeMounts"][0] == {
        "name": "built",
        "mountPath": "/models",
        "subPath": "models",
        "readOnly": True,
    }


@with_kubectl
def test_a_canary_passes_the_budget_first_and_the_autoscaler_follows_the_rollout(rendered: Any) -> None:
    documents = rendered("pvc", "overlays/canary")
    canary = one(documents, "Rollout")["spec"]
    assert canary["workloadRef"]["name"] == one(documents, "Deployment", "triton")["metadata"]["name"]
    steps = canary["strategy"]["canary"]["steps"]
    assert "analysis" in steps[0]
    assert [each["setWeight"] for each in steps if "setWeight" in each] == [5, 25, 50]
    named = {each["templateName"] for each in canary["strategy"]["canary"]["analysis"]["templates"]}
    named |= {each["templateName"] for each in steps[0]["analysis"]["templates"]}
    templates = [each for each in documents if each["kind"] == "AnalysisTemplate"]
    assert named == {each["metadata"]["name"] for each in templates}
    assert one(documents, "ScaledObject")["spec"]["scaleTargetRef"]["kind"] == "Rollout"
    assert {each["metadata"]["namespace"] for each in documents} == {"serving"}


@pytest.mark.parametrize(
    ("result", "passed"),
    [([], False), ([math.nan], False), ([0.2], False), ([0.1], True), ([-1.0], True), ([math.inf], False)],
)
def test_a_look_without_requests_is_no_good_look(result: list[float], passed: bool) -> None:
    condition = passes(0.1).replace("&&", "and").replace("!", "not ")
    assert eval(condition, {"len": len, "isNaN": math.isnan, "result": result}) is passed  # noqa: S307  our own text


def test_nothing_is_promoted_before_it_could_have_been_taken_back() -> None:
    plan = Plan(steps=(50.0,))
    goal = objectives_of()
    steps = rollout(OPTIONS, plan, gate=False)["spec"]["strategy"]["canary"]["steps"]
    lasts = sum(int(each["pause"]["duration"].removesuffix("s")) for each in steps if "pause" in each)
    for template in analysis_templates(OPTIONS, plan, goal, Scope(), gate=None):
        for metric in template["spec"]["metrics"]:
            assert "isNaN" in metric["successCondition"]
            assert metric["initialDelay"] == "2m"
            assert 120 + (metric["failureLimit"] + 1) * int(metric["interval"].removesuffix("s")) < lasts


def test_a_plan_says_how_to_scale(tmp_path: Path) -> None:
    scaling = {"least": 3, "most": 12, "target": 42.5, "down_window_s": 120.0, "period_s": 15.0}
    plan = {"kind": "serve plan", "schema_version": 1, "objective": "p99<80ms,errors<1%", "scaling": scaling}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    options = replace(OPTIONS, plan=tmp_path / "plan.json")
    _, warnings = render(ROOT / "model_repository", tmp_path / "out", options)
    assert any("p99<100ms" in text for text in warnings)  # the gateway's histogram has no 80
    spec = yaml.safe_load((tmp_path / "out/components/keda/scaledobject.yaml").read_text())["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (3, 12)
    assert spec["triggers"][0]["metadata"]["threshold"] == "42.5"
    assert spec["triggers"][0]["metricType"] == "AverageValue"
    assert all(each["metadata"]["ignoreNullValues"] == "false" for each in spec["triggers"])
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 120


def requests_of(folder: Path) -> Object:
    triggers = yaml.safe_load((folder / "components/keda/scaledobject.yaml").read_text())["spec"]["triggers"]
    names = [each["name"] for each in triggers]
    assert names == ["requests", "queue-seconds", "latency-p99"]
    first: Object = triggers[0]
    return first


def test_replicas_follow_a_rate_where_nothing_was_measured_too_and_that_is_said(tmp_path: Path) -> None:
    _, warnings = render(ROOT / "model_repository", tmp_path / "out", OPTIONS)
    trigger = requests_of(tmp_path / "out")
    assert (trigger["metadata"]["threshold"], trigger["metricType"]) == ("50", "AverageValue")
    assert any("for each 50 requests/s, which nothing has measured" in text for text in warnings)


def test_a_load_test_says_the_rate_by_its_runs_that_kept_the_objective(tmp_path: Path) -> None:
    from serve.load.figures.server_side import ServerUse
    from serve.load.report.report import LoadReport

    use = ServerUse(1.0, 2**29, 4)
    quick, slow = (result_of([[each] * rate] * 10, server=use) for each, rate in ((5.0, 200), (900.0, 400)))
    load = tmp_path / "load.json"
    for runs, threshold in (((quick, slow), "140"), ((slow,), "50")):
        load.write_text(json.dumps(LoadReport(runs, "a").to_dict()))
        options = replace(OPTIONS, load=load, slo="p99<100ms")
        _, warnings = render(ROOT / "model_repository", tmp_path / "out", options)
        assert requests_of(tmp_path / "out")["metadata"]["threshold"] == threshold
        assert any("nothing has measured" in text for text in warnings) is (threshold == "50")


def test_shared_memory_follows_what_a_gateway_lets_be_in_flight_where_inputs_are_of_any_size(tmp_path: Path) -> None:
    """Triton's regions grow to 1.6 times what they are sent, by each of two gateways, and where there is no room, others fail, too."""
    texts = workload_of(ROOT / "model_repository")
    assert texts.shared_mib * MIB >= 3 * GATEWAY_HOLDS
    pack(tiny_artifact(tmp_path / "artifact"), repository=tmp_path / "models", name="tiny")
    fixed = workload_of(tmp_path / "models")
    assert fixed.shared_mib * MIB < GATEWAY_HOLDS
    for workload in (texts, fixed):
        assert workload.memory_mib > workload.shared_mib + 512, "as what lies there counts as a pod's memory"


def test_signed_pods_are_told_to_need_their_key() -> None:
    found = warnings_of(workload_of(ROOT / "model_repository"), SIGNED)
    (told,) = [text for text in found if "ConfigMap signer" in text]
    assert "--from-file=public.pem" in told
    assert not any("ConfigMap" in text for text in warnings_of(workload_of(ROOT / "model_repository"), OPTIONS))


def test_what_python_compiled_takes_no_memory(tmp_path: Path) -> None:
    before = workload_of(ROOT / "model_repository")
    copy = tmp_path / "repository"
    shutil.copytree(ROOT / "model_repository", copy, ignore=shutil.ignore_patterns("__pycache__"))
    compiled = copy / "digits_preprocess/1/__pycache__/model.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"x" * 2**22)
    assert workload_of(copy) == before


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_pods_have_a_cpu_for_each_thread_of_either_runtime(runtime: Runtime, tmp_path: Path) -> None:
    options = PackOptions(instances=2, threads=3, runtime=runtime)
    pack(tiny_artifact(tmp_path / "tiny"), repository=tmp_path / "models", name="m", options=options)
    assert workload_of(tmp_path / "models").cpu_millis == 6000


def test_pods_are_sized_by_what_a_load_test_saw(tmp_path: Path) -> None:
    from serve.load.figures.server_side import ServerUse
    from serve.load.report.report import LoadReport

    run = result_of([[1.0] * 20], server=ServerUse(1.83, 700 * 1024 * 1024, 4))
    (tmp_path / "load.json").write_text(json.dumps(LoadReport((run,), "a").to_dict()))
    found = workload_of(ROOT / "model_repository", tmp_path / "load.json")
    assert found.measured
    assert found.cpu_millis == 1900
    assert found.memory_mib == 1050 + found.shared_mib
    assert not workload_of(ROOT / "model_repository").measured
    (tmp_path / "far.json").write_text(json.dumps(LoadReport((result_of([[1.0] * 20]),), "a").to_dict()))
    with pytest.raises(ServerError, match="saw no server"):
        workload_of(ROOT / "model_repository", tmp_path / "far.json")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"image": "tritonserver:latest"}, "changes"),
        ({"gateway_image": "gateway"}, "changes"),
        ({"gateway_image": "Not An Image"}, "no image"),
        ({"name": "Serving"}, "no name"),
        ({"storage": "nfs:there"}, "none of the kinds"),
        ({"storage": "pvc:"}, "none of the kinds"),
        ({"storage": "pvc:Models"}, "no claim's name"),
        ({"storage": "pvc:models\n- name: evil"}, "no claim's name"),
        ({"storage": "pvc:../models"}, "no claim's name"),
        ({"storage": "pvc:mod_els"}, "no claim's name"),
        ({"storage": "pvc:" + "a" * 254}, "no claim's name"),
        ({"storage": "s3:bucket"}, "begins with s3://"),
        ({"storage": "s3://Bucket/models"}, "no bucket's name"),
        ({"storage": "s3://bu..cket/models"}, "no bucket's name"),
        ({"storage": "s3://10.0.0.1/models"}, "no bucket's name"),
        ({"storage": "s3://minio:9000/bucket/models"}, "neither http"),
        ({"storage": "s3://https://minio:99999/bucket"}, "no port"),
        ({"storage": "s3://https://minio:9000"}, "no bucket's name"),
        ({"storage": "s3://ftp://minio/bucket"}, "endpoint"),
        ({"storage": "s3://https://me:secret@minio:9000/bucket"}, "a key does not belong"),
        ({"storage": "s3://me:secret@bucket/models"}, "a key does not belong"),
        ({"storage": "s3://bucket/../other"}, "no path"),
        ({"storage": "s3://bucket/models --delete"}, "no path"),
        ({"target": float("nan")}, "no number"),
        ({"min_replicas": 4, "max_replicas": 2}, "--max-replicas is 2"),
        ({"min_replicas": 0}, "too small"),
        ({"signed_by": "No"}, "no name"),
        ({"engine_script": Path("/nowhere/build.py")}, "no such file"),
        ({"monitoring_namespace": "monitoring\n  evil: x"}, "no name"),
        ({"monitoring_namespace": "{{ .Values.x }}"}, "no name"),
        ({"monitoring_namespace": ""}, "no name"),
        ({"prometheus": "http://prometheus:9090\n"}, "no address"),
        ({"prometheus": "http://{{ .Values.x }}:9090"}, "no address"),
        ({"prometheus": "prometheus:9090"}, "no address"),
        ({"prometheus": "http://prometheus:99999"}, "no address"),
        ({"prometheus": "http://me:secret@prometheus:9090"}, "no address"),
        ({"prometheus": "http://prometheus/{{ a }}"}, "no address"),
        ({"gpu_product": "NVIDIA H100"}, "no value of a label"),
        ({"gpu_product": "{{H100}}"}, "no value of a label"),
        ({"gpu_product": "H100\n"}, "no value of a label"),
    ],
)
def test_options_that_can_not_work_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ServerError, match=why) as raised:
        replace(OPTIONS, **changes)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", [
    "http://prometheus:9090", "https://prometheus.example", "https://mimir.example/prometheus/", "http://[fd00::1]:9090",
])  # fmt: skip
def test_a_prometheus_is_named_by_its_address(url: str) -> None:
    assert (
        replace(OPTIONS, prometheus=url, monitoring_namespace="1st", gpu_product="NVIDIA-A100_80.GB").prometheus == url
    )


@pytest.mark.parametrize(
    ("storage", "ports"),
    [
        ("pvc:models", []),
        ("pvc:models-2.a", []),
        ("s3://bucket/models", [443]),
        ("s3://https://minio.example/bucket/models", [443]),
        ("s3://http://minio.example/bucket", [80]),
        ("s3://https://minio.example:9000/bucket/models", [9000]),
        ("s3://http://[fd00::1]:9000/bucket/models", [9000]),
    ],
)
def test_triton_s_pods_get_out_to_their_bucket_alone_and_look_up_no_other_name(storage: str, ports: list[int]) -> None:
    policy = network_policies(replace(OPTIONS, storage=storage))[0]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    names, outside = ([53, 53], ports) if ports else ([], [])
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [*names, *outside]
    gateway = network_policies(replace(OPTIONS, storage=storage))[1]["spec"]
    assert {port["port"] for port in gateway["egress"][0]["ports"]} == {53}, "it looks Tritons up"


def test_a_folder_of_something_else_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ServerError, match="something else"):
        render(ROOT / "model_repository", tmp_path, OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    render(ROOT / "model_repository", tmp_path / "out", OPTIONS)
    (tmp_path / "out/stale.yaml").write_text("old")
    with (tmp_path / "out/.rendered-by-serve").open("a") as mark:  # as one that wrote it does
        mark.write("stale.yaml\n")
    render(ROOT / "model_repository", tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out/stale.yaml").exists()


def test_a_full_disk_leaves_the_folder_as_it_was_and_nothing_beside(tmp_path: Path) -> None:
    render(ROOT / "model_repository", tmp_path / "out", OPTIONS)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with full_disk(100), pytest.raises(ServerError, match="can't write"):
        render(ROOT / "model_repository", tmp_path / "out", OPTIONS)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_to_know_is_said() -> None:
    workload = workload_of(ROOT / "model_repository")
    said = " ".join(warnings_of(workload, replace(S3, image=RenderOptions.image)))
    said += " ".join(warnings_of(workload, replace(OPTIONS, image="nvcr.io/nvidia/tritonserver:24.10-py3")))
    assert not any(
        "vulnerabilities" in text for text in warnings_of(workload, replace(OPTIONS, image=RenderOptions.image))
    )
    for words in (
        "tritonserver:24.10-py3 has known vulnerabilities",
        "hooks require pillow",
        "serving-bucket",
        "estimated",
        "serving-keys",
        "serve plan",
    ):
        assert words in said


def names_that_are_not_there(documents: list[Object]) -> set[tuple[str, str]]:
    """(kind, name) of Secrets, ConfigMaps and claims that pods ask for and no document is."""
    there = {(each["kind"], each["metadata"]["name"]) for each in documents}
    asked: set[tuple[str, str]] = set()
    for pod in pods(documents):
        for volume in pod["volumes"]:
            for key, kind, name in (
                ("secret", "Secret", "secretName"),
                ("configMap", "ConfigMap", "name"),
                ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
            ):
                if key in volume:
                    asked.add((kind, volume[key][name]))
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            asked |= {("Secret", each["secretRef"]["name"]) for each in container.get("envFrom", ())}
    return asked - there


@with_kubectl
@pytest.mark.parametrize(
    ("storage", "options"), [("pvc", OPTIONS), ("s3", S3), ("s3 signed", S3_SIGNED), ("signed", SIGNED)]
)
def test_what_the_manifests_lack_is_said_by_name(rendered: Any, storage: str, options: RenderOptions) -> None:
    documents = rendered(storage, "overlays/canary")
    said = " ".join(warnings_of(workload_of(ROOT / "model_repository"), options))
    lacking = names_that_are_not_there(documents)
    assert lacking
    for kind, name in lacking:
        assert f"{'claim' if kind == 'PersistentVolumeClaim' else kind.lower()} {name}" in said.lower().replace(
            "create secret generic", "secret"
        )
    assert not any(each["kind"] == "Namespace" for each in documents)
    for words in (
        "kubectl create namespace serving",
        "serving-metrics-key --from-literal=key=",
        "KEDA",
        "Argo Rollouts",
        "app_kubernetes_io_part_of",
        "overlays/cpu holds none",
    ):
        assert words in said
    assert ("ReadOnlyMany" in said) is (storage == "pvc")
    assert ("ImageVolume" in said) is (storage == "signed")


@pytest.mark.parametrize(("most", "kept"), [(1.0, True), (0.2, False)])
def test_the_gate_holds_a_model_to_its_budget(tmp_path: Path, most: float, kept: bool) -> None:
    from compress.artifact import Artifact, Measured, StageReport

    artifact = Artifact.load(tiny_artifact(tmp_path / "artifact"))
    stage = StageReport("prune_channels", "", Measured(metric="top1", drop=0.4, drop_high=0.7), 1.0)
    replace(artifact, stages=(stage,)).save()
    pack(
        tmp_path / "artifact",
        repository=tmp_path / "models",
        name="tiny",
        hooks=hook_file(tmp_path),
        options=PackOptions(),
    )
    found = judge(tmp_path / "models", "tiny", most)
    assert found.kept is kept
    assert "0.40 points of top1" in found.words
    assert "0.70" in found.words


def test_the_gate_refuses_what_nobody_measured(tmp_path: Path) -> None:
    pack(tiny_artifact(tmp_path / "artifact"), repository=tmp_path / "models", name="tiny")
    assert not judge(tmp_path / "models", "tiny", 5.0).kept


@pytest.mark.parametrize(
    ("measured", "kept"),
    [
        ({"drop": 0.4, "drop_high": 0.7}, True),
        ({"drop": 0.4, "drop_high": 0.7, "drop_constant": 0.5}, True),
        ({"drop": 0.4, "drop_high": 0.7, "drop_constant": 0.4}, False),
        ({"drop": 0.4}, False),
        ({"drop": 0.4, "drop_high": 1.2}, False),
        ({"drop": 1.2, "drop_high": 0.7}, False),
        ({"drop_high": 0.7}, False),
        ({"drop": -0.4, "drop_high": -0.1}, True),
    ],
    ids=str,
)
def test_the_gate_judges_the_interval_s_end(tmp_path: Path, measured: dict[str, Any], kept: bool) -> None:
    from compress.artifact import Artifact, Measured, StageReport

    artifact = Artifact.load(tiny_artifact(tmp_path / "artifact"))
    stage = StageReport("prune_channels", "", replace(Measured(metric="top1"), **measured), 1.0)
    replace(artifact, stages=(stage,)).save()
    pack(tmp_path / "artifact", repository=tmp_path / "models", name="tiny")
    assert judge(tmp_path / "models", "tiny", 1.0).kept is kept
    assert not judge(tmp_path / "models", "tiny", math.nan).kept


def test_what_is_no_longer_written_is_told_of(tmp_path: Path) -> None:
    _, first = render(ROOT / "model_repository", tmp_path / "out", OPTIONS)
    for name in ("components/hpa", "kserve"):  # as an earlier release left it
        (tmp_path / "out" / name).mkdir()
    _, again = render(ROOT / "model_repository", tmp_path / "out", OPTIONS)
    assert again[:2] == [
        "components/hpa is no longer written: take components/keda, which makes such an HPA itself",
        "kserve is no longer written: take overlays/cpu, behind the gateway",
    ]
    assert again[2:] == first
    assert not (tmp_path / "out/kserve").exists()


def template_of(folder: Path) -> Object:
    found: Object = next(yaml.safe_load_all((folder / "base/triton.yaml").read_text()))["spec"]["template"]
    return found


@pytest.mark.parametrize("options", [OPTIONS, S3, SIGNED], ids=["claim", "bucket", "image"])
def test_other_files_at_the_same_place_are_new_pods_and_the_same_files_are_not(
    options: RenderOptions, tmp_path: Path
) -> None:
    for name in ("one", "same", "other"):
        shutil.copytree(ROOT / "model_repository", tmp_path / name)
    (tmp_path / "same/digits_network/1/__pycache__").mkdir()
    (tmp_path / "same/digits_network/1/__pycache__/x.pyc").write_bytes(b"x")
    with (tmp_path / "other/digits_network/1/model.onnx").open("ab") as file:
        file.write(b"\0")
    found = {}
    for name in ("one", "same", "other"):
        render(tmp_path / name, tmp_path / f"{name}-out", options)
        found[name] = template_of(tmp_path / f"{name}-out")
    assert found["one"] == found["same"]
    assert found["one"] != found["other"]
    assert found["one"]["spec"] == found["other"]["spec"], "only a note of the template differs"
    assert (tmp_path / "one-out/base/gateway.yaml").read_text() == (
        tmp_path / "other-out/base/gateway.yaml"
    ).read_text()


def test_what_no_run_has_put_into_the_folder_is_not_lost(tmp_path: Path) -> None:
    folder, overlay = tmp_path / "kubernetes", tmp_path / "kubernetes/overlays/mine/kustomization.yaml"
    for _ in range(2):
        render(ROOT / "model_repository", folder, OPTIONS)
    overlay.parent.mkdir()
    overlay.write_text("resources: [../cpu]\n")
    with pytest.raises(ServerError, match="can't write into") as caught:
        render(ROOT / "model_repository", folder, OPTIONS)
    assert "'overlays/mine/kustomization.yaml'" in caught.value.why
    assert overlay.read_text() == "resources: [../cpu]\n"
    overlay.unlink()
    render(ROOT / "model_repository", folder, OPTIONS)


@pytest.mark.parametrize("at", ["old", "kubernetes"])
def test_a_run_that_was_killed_in_its_swap_is_cleared_by_the_next(tmp_path: Path, at: str) -> None:
    """Killed while the old folder is moved aside, and while the new one is put in its place."""
    folder = tmp_path / "kubernetes"
    render(ROOT / "model_repository", folder, OPTIONS)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom compress.vetting.swap import replacing_folder\n"
        f"at = {at!r}\n"
        "sys.addaudithook(lambda event, args: event == 'os.rename' and Path(args[1]).name == at and os.kill(os.getpid(), 9))\n"
        f"with replacing_folder(Path({str(folder)!r})):\n    pass\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert folder.exists() == (at == "old")
    assert len(list(tmp_path.iterdir())) == 1 + (at == "old")
    render(ROOT / "model_repository", folder, OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["kubernetes"]


def test_a_place_without_room_is_told_as_that(tmp_path: Path) -> None:
    """Not as a folder that can't be written: another one on that disk would not help."""
    for write in (
        lambda: render(ROOT / "model_repository", tmp_path / "render", OPTIONS),
        lambda: write_monitoring(tmp_path / "monitoring", MonitoringOptions()),
        lambda: make_keys(tmp_path / "keys"),
    ):
        with full_disk(10), pytest.raises(ServerError, match="can't write") as told:
            write()
        assert "raise the limit on the size of files" in told.value.mend


def test_room_is_made_where_there_is_none() -> None:
    assert "free some space" in mend_of(OSError(errno.ENOSPC, "No space left on device"), "else")
    assert mend_of(OSError(errno.EACCES, "Permission denied"), "else") == mend_of(None, "else") == "else"
