"""GPUs: which node, how many, and a TensorRT plan that each pod builds for its own."""

from __future__ import annotations

from typing import Any

from serve.deploy.cluster.manifests import resources
from serve.deploy.cluster.storage import helper
from serve.deploy.cluster.workload import Workload
from serve.deploy.options import RenderOptions

__all__ = ["engine_files", "engine_patch", "gpu_patch"]

Object = dict[str, Any]


def gpu_patch(options: RenderOptions) -> list[Object]:
    """One GPU to a Triton, of the kind that its engines were built for."""
    node = {"nvidia.com/gpu.present": "true"} | (
        {"nvidia.com/gpu.product": options.gpu_product} if options.gpu_product else {}
    )
    pod = "/spec/template/spec"
    tolerated = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return [
        {"op": "add", "path": f"{pod}/containers/0/resources/limits/nvidia.com~1gpu", "value": "1"},
        {"op": "add", "path": f"{pod}/nodeSelector", "value": node},
        {"op": "add", "path": f"{pod}/tolerations", "value": tolerated},
    ]


def engine_files(options: RenderOptions) -> Object:
    if options.engine_script is None:
        return {}
    return {"configMapGenerator": [{"name": f"{options.name}-engine-script", "files": ["build_engine.py"]}]}


def engine_patch(workload: Workload, options: RenderOptions) -> list[Object]:
    """A plan fits the kind of GPU that built it: each pod builds its own, and packs it, before Triton starts."""
    if options.engine_script is None:
        return []
    pod, name = "/spec/template/spec", workload.models[0]
    models = {"name": "models", "mountPath": "/artifact", "readOnly": True}
    built = {"name": "built", "mountPath": "/built"}
    script = {"name": "script", "mountPath": "/script", "readOnly": True}
    tmp = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108  a volume of the pod's own
    build: Object = helper(
        options, "build-engine", ["/script/build_engine.py", "/artifact", "/built/artifact"],
        [models, built, script, tmp], image=options.image,
    )  # fmt: skip
    build["command"] = ["python3"]
    build["resources"] = resources(workload, gpu=True)
    packing = ["pack", "/built/artifact", "--repository", "/built/models", "--name", name]
    pack = helper(options, "pack", packing, [built, tmp])
    sources = {"name": "script", "configMap": {"name": f"{options.name}-engine-script"}}
    repository = {"name": "built", "mountPath": "/models", "subPath": "models", "readOnly": True}
    return [
        {"op": "replace", "path": f"{pod}/initContainers", "value": [build, pack]},
        {"op": "replace", "path": f"{pod}/containers/0/volumeMounts/0", "value": repository},
        {"op": "add", "path": f"{pod}/volumes/-", "value": {"name": "built", "emptyDir": {"sizeLimit": "8Gi"}}},
        {"op": "add", "path": f"{pod}/volumes/-", "value": sources},
    ]
