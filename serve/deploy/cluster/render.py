"""Writing the manifests: a Kustomize base, what can be added to it, and overlays for a few kinds of cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.errors import ServerError
from compress.vetting.replace import mend_of
from compress.vetting.swap import put_back, replacing_folder
from compress.vetting.texts import read_text
from serve.deploy.cluster.canary import analysis_templates, rollout
from serve.deploy.cluster.chart import chart
from serve.deploy.cluster.gpu import engine_files, engine_patch, gpu_patch
from serve.deploy.cluster.manifests import (
    GATEWAY_TOML,
    NOTICE_S,
    USER,
    base,
)
from serve.deploy.cluster.naming import scope_of
from serve.deploy.cluster.needs import needs_of
from serve.deploy.cluster.operator import monitors, rules_object
from serve.deploy.cluster.played import played
from serve.deploy.cluster.scaling import UNMEASURED, rate_of, scaled_object, signals
from serve.deploy.cluster.storage import helper, models_volume
from serve.deploy.cluster.template import RELEASE as HELM_RELEASE
from serve.deploy.cluster.workload import Workload, workload_of
from serve.deploy.cluster.yaml_text import several, yaml_text
from serve.deploy.monitoring.objectives import objectives_of
from serve.deploy.options import RenderOptions, read_plan
from serve.gateway.access.footprint import GATEWAY_BODY, GATEWAY_HOLDS
from serve.gateway.observe.buckets import BUCKETS_S
from serve.load.slo import Term, parse_objective
from serve.rollout.plan import Plan

__all__ = ["files", "render", "warnings_of"]

Object = dict[str, Any]
MARK = ".rendered-by-serve"
RELEASE = re.compile(r"[:-](\d\d)\.(\d\d)-py3")
SAFE = (26, 7)
COMPONENT = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
# What earlier releases wrote, and what does the same now.
GONE = {
    "components/hpa": "components/keda, which makes such an HPA itself",
    "kserve": "overlays/cpu, behind the gateway",
}


def render(repository: Path, folder: Path, options: RenderOptions) -> tuple[list[Path], list[str]]:
    """Write the folder anew, beside, and put it in place.

    Args:
        repository: what is to be served.
        folder: replaced where an earlier run wrote it.
        options: what runs where.

    Returns:
        The files, and what to know before they are applied.

    Raises:
        RepositoryError: there is nothing to serve.
        ServerError: the folder is something else, an option makes no sense, or the disk refuses.
        MissingExtraError: PyYAML is not installed.
    """
    workload = workload_of(repository, options.load)
    texts = files(workload, options)
    try:
        put_back(folder)
        _refuse_others(folder)
    except OSError as err:
        raise _unwritable(folder, err) from err
    gone = [
        f"{name} is no longer written: take {instead}" for name, instead in GONE.items() if (folder / name).is_dir()
    ]
    for read in (repository, options.load, options.plan):
        if read is not None and folder.resolve() in (read.resolve(), *read.resolve().parents):
            why = f"{read}, which is read, is in it"
            raise ServerError(f"can't write into {folder}", why=why, mend="name a new folder")
    try:
        with replacing_folder(folder) as beside:
            for name, text in {MARK: "".join(f"{name}\n" for name in sorted(texts)), **texts}.items():
                path = beside / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise _unwritable(folder, err) from err
    return [folder / name for name in texts], [*gone, *warnings_of(workload, options)]


def _unwritable(folder: Path, err: OSError) -> ServerError:
    mend = mend_of(err, "name a folder that can be written")
    return ServerError(f"can't write {folder}", why=str(err), mend=mend)


def _refuse_others(folder: Path) -> None:
    """Raises ServerError where there is what no run has written: it would go with the rest.

    An earlier release's mark does not name what was written.
    """
    if not os.path.lexists(folder):
        return
    marked = (folder / MARK).is_file()
    if not marked and (not folder.is_dir() or any(folder.iterdir())):
        why, mend = "it holds something else", "name a new folder, or an empty one"
        raise ServerError(f"can't write into {folder}", why=why, mend=mend)
    try:
        ours = set(read_text(folder / MARK).splitlines()) if marked else set()
    except ValueError:
        ours = set()
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    if ours and (others := sorted({*found} - ours - {MARK})):
        shown = ", ".join(map(repr, others[:3])) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise ServerError(
            f"can't write into {folder}",
            why=f"it holds what no run has put there, and what would go with it: {shown}",
            mend="move that to another folder (a Kustomize overlay names its base by a path), or name a new one",
        )


def warnings_of(workload: Workload, options: RenderOptions) -> list[str]:
    """What to know before it is applied."""
    found = []
    if not workload.measured:
        found.append(
            "processors and memory are estimated from the repository: measure one replica with `serve load` on such a "
            "machine, and give --load"
        )
    if rate_of(options, read_plan(options.plan)) is None:
        found.append(
            f"a replica for each {UNMEASURED:g} requests/s, which nothing has measured: `serve plan` finds a rate; or "
            "give --load, of a test that keeps the objective, or --target"
        )
    told, widened = _watchable(options.slo or read_plan(options.plan)["objective"])
    if widened:
        found.append(
            f"canaries, alerts and the p99 are held to {told}, the next bound that the gateway's histogram has"
        )
    if (old := RELEASE.search(options.image)) is not None and (int(old[1]), int(old[2])) < SAFE:
        found.append(f"{options.image} has known vulnerabilities: take 26.07 or newer (docs/security.md)")
    if workload.requirements and options.image == RenderOptions.image:
        found.append(
            f"hooks require {', '.join(workload.requirements)}: build deploy/docker/triton.Dockerfile, and give --image"
        )
    if options.storage.startswith("s3"):
        found.append("canaries are not held to the compression report: the gate's job can't read a bucket")
    return [*found, *needs_of(options)]


def files(workload: Workload, options: RenderOptions) -> dict[str, str]:
    """Every file by its path."""
    plan = read_plan(options.plan)
    watched, _ = _watchable(options.slo or plan["objective"])
    goal = objectives_of(watched)
    course = Plan()
    scope = scope_of(options, workload.asked)
    cpu, gpu = (signals(options, plan, goal.slow_s, scope, gpu=each) for each in (False, True))
    found: dict[str, str] = {}

    def put(folder: str, objects: Mapping[str, Sequence[Object]], **kustomization: Any) -> None:
        """Objects, and a kustomization that names them first."""
        component = folder.startswith("components/")
        for name, each in objects.items():
            found[f"{folder}/{name}"] = several(each)
        resources = [*kustomization.pop("resources", []), *objects]
        head = COMPONENT if component else KUSTOMIZATION
        whole = {**head, **({"resources": resources} if resources else {}), **kustomization}
        found[f"{folder}/kustomization.yaml"] = yaml_text(whole)

    def toml(name: str) -> str:
        return GATEWAY_TOML.format(
            name=name, notice=NOTICE_S, drain=options.drain_s, holds=GATEWAY_HOLDS, body=GATEWAY_BODY
        )

    found["base/gateway.toml"] = toml(options.name)
    whole = base(workload, options)
    put(
        "base",
        whole,
        namespace=options.namespace,
        configMapGenerator=[{"name": f"{options.name}-gateway", "files": ["gateway.toml"]}],
    )
    put("components/keda", {"scaledobject.yaml": [scaled_object(options, plan, cpu)]})
    put(
        "components/prometheus-operator",
        {"monitors.yaml": monitors(options), "rules.yaml": [rules_object(options, goal, scope)]},
    )
    space = options.namespace
    put("overlays/cpu", {}, namespace=space, resources=["../../base"], components=["../../components/keda"])
    put(
        "overlays/gpu",
        {"scaledobject.yaml": [scaled_object(options, plan, gpu)]},
        namespace=space,
        resources=["../../base"],
        **engine_files(options),
        **_patches(_patch(options, "Deployment", [*gpu_patch(options), *engine_patch(workload, options)])),
    )
    if options.engine_script is not None:
        found["overlays/gpu/build_engine.py"] = _script(options.engine_script)
    put(
        "overlays/dev",
        {},
        namespace=space,
        resources=["../../base"],
        **_patches(
            _patch(options, "Deployment", [{"op": "add", "path": "/spec/replicas", "value": 1}, *_small(workload)]),
            (
                {"kind": "Deployment", "name": f"{options.name}-gateway"},
                [{"op": "replace", "path": "/spec/replicas", "value": 1}],
            ),
        ),
    )
    deployments = {part: whole[f"{part}.yaml"][0] for part in ("triton", "gateway")}
    found |= played(deployments, options, found["base/gateway.toml"], watched)
    found |= chart(workload, options, plan, goal, toml(HELM_RELEASE))
    models = models_volume(options)
    gate = None if models is None else _gate(workload, options, models)
    to_rollout = [
        {"op": "replace", "path": "/spec/scaleTargetRef/apiVersion", "value": "argoproj.io/v1alpha1"},
        {"op": "replace", "path": "/spec/scaleTargetRef/kind", "value": "Rollout"},
    ]
    put(
        "overlays/canary",
        {
            "rollout.yaml": [rollout(options, course, gate=gate is not None)],
            "analysis.yaml": analysis_templates(options, course, goal, scope, gate=gate),
        },
        namespace=space,
        resources=["../cpu"],
        **_patches(_patch(options, "ScaledObject", to_rollout)),
    )
    return found


def _script(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as err:
        mend = "make it with `compress engine-script`"
        raise ServerError(f"can't deploy with --engine-script {path}", why=str(err), mend=mend) from err


def _watchable(objective: str) -> tuple[str, bool]:
    """The terms that the gateway's histogram can tell (one percentile, and errors), and whether it had to be widened.

    A latency between two bounds of the histogram is held to the next one.
    """
    terms = parse_objective(objective).terms
    percents = sorted((term for term in terms if term.percent is not None), key=lambda term: term.percent or 0)
    latency = percents[-1] if percents else Term("p99", 250.0)
    bound = next((1000 * each for each in BUCKETS_S if 1000 * each >= latency.bound), 1000 * BUCKETS_S[-1])
    errors = next(term for term in terms if term.name == "errors")
    return f"{replace(latency, bound=bound)},{errors}", bound != latency.bound


def _patch(options: RenderOptions, kind: str, steps: list[Object]) -> tuple[Object, list[Object]]:
    return {"kind": kind, "name": f"{options.name}-triton"}, steps


def _patches(*given: tuple[Object, list[Object]]) -> Object:
    """Kustomize's JSON patches, of those that change something."""
    whole = [{"target": target, "patch": yaml_text(steps, head="")} for target, steps in given if steps]
    return {"patches": whole} if whole else {}


def _gate(workload: Workload, options: RenderOptions, volume: Object) -> Object:
    """A pod that reads the repository, and fails where compression cost a model more than its budget."""
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            helper(
                options, "gate",
                ["deploy", "gate", "/models", "--model", *workload.models, "--max-drop", f"{options.max_drop:g}"],
                [{"name": "models", "mountPath": "/models", "readOnly": True}],
            )
        ],
        "volumes": [volume],
    }  # fmt: skip


def _small(workload: Workload) -> list[Object]:
    """A tenth of a processor is enough to try it."""
    cpu = f"{min(workload.cpu_millis, 100)}m"
    return [{"op": "replace", "path": "/spec/template/spec/containers/0/resources/requests/cpu", "value": cpu}]
