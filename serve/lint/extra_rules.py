"""What Triton looks for beside the model: labels, a runtime, agents, another Python, providers of ONNX Runtime."""

from __future__ import annotations

import re
from pathlib import Path

from serve.config.names import MODEL_NAME, leads_out
from serve.lint.finding import Findings, error, shown, warning
from serve.lint.model import Model

__all__ = ["agent_rules", "environment_rules", "label_rules", "name_rules", "provider_rules", "version_number_rules"]

PROVIDERS = {"cpu_execution_accelerator": ("openvino",), "gpu_execution_accelerator": ("tensorrt", "cuda")}
OWN_FOLDER = "$$TRITON_MODEL_DIRECTORY"
LARGEST = 2**63 - 1


def label_rules(model: Model) -> Findings:
    """Files of labels: Triton reads them when it loads the model."""
    for tensor in model.config.output:
        if leads_out(tensor.label_filename):
            what = f"output {tensor.name!r}: label_filename {tensor.label_filename!r} leads out of the model's folder"
            yield error(model.name, what, "put the file beside config.pbtxt")
        elif tensor.label_filename and not (model.folder / tensor.label_filename).is_file():
            what = f"output {tensor.name!r}: there is no label_filename {tensor.label_filename!r} in the model's folder"
            yield error(model.name, what, "put the file beside config.pbtxt, or leave label_filename out")


def name_rules(model: Model) -> Findings:
    """Names that stand in no path of the protocol: Triton loads such a model, and no client can ask it over HTTP."""
    if not re.fullmatch(MODEL_NAME, model.name):
        what = f"no client can ask for a model named {shown(model.name)!r} over HTTP"
        yield warning(model.name, what, "name it by letters, digits and _ . + : @ = ~ -, and not stats")


def agent_rules(model: Model) -> Findings:
    """Programs that only a Triton of one's own has."""
    for agent in model.config.model_repository_agents.agents:
        what = f"it wants the repository agent {agent.name!r}, which this Triton does not have"
        yield error(model.name, what, "leave model_repository_agents out, or lint for a container with --container")
    runtime = model.config.runtime
    if leads_out(runtime):
        yield error(model.name, f"runtime {runtime!r} leads out of the model's folder", "leave runtime out")
    elif (
        runtime
        and not model.is_ensemble
        and not any((model.folder / each / runtime).is_file() for each in _places(model))
    ):
        yield error(model.name, f"there is no runtime {runtime!r}", "leave runtime out: the backend has its own")


def _places(model: Model) -> list[str]:
    return ["", *map(str, model.served)]


def environment_rules(model: Model) -> Findings:
    """The archive of another Python for a model in Python."""
    if model.backend != "python" or "EXECUTION_ENV_PATH" not in model.config.parameters:
        return
    told = model.config.parameters["EXECUTION_ENV_PATH"].string_value
    path = Path(told.replace(OWN_FOLDER, str(model.folder.absolute()), 1))
    if not path.exists():
        yield error(
            model.name, f"there is no EXECUTION_ENV_PATH {told!r}", f"put it there, as in {OWN_FOLDER}/env.tar.gz"
        )


def provider_rules(model: Model, *, container: bool) -> Findings:
    """Execution providers of ONNX Runtime.

    Args:
        model: any.
        container: it is for a Triton elsewhere, which may have more than the embedded one.
    """
    if model.backend != "onnxruntime":
        return
    kinds = {type(group).Kind.Name(group.kind) for group in model.config.instance_group}
    for field, known in PROVIDERS.items():
        for accelerator in getattr(model.config.optimization.execution_accelerators, field):
            if accelerator.name not in known:
                what = f"{field} {accelerator.name!r} is unknown"
                yield error(model.name, what, f"write {' or '.join(known)}, or leave it out")
            elif not container and field.startswith("cpu") and kinds != {"KIND_GPU"}:
                what = f"{field} {accelerator.name!r} is not in the embedded Triton's ONNX Runtime"
                yield error(model.name, what, "leave it out, or lint for a container with --container")


def version_number_rules(model: Model) -> Findings:
    """Versions that no 64 bits hold."""
    for version in model.present:
        if version > LARGEST:
            yield error(model.name, f"the version {version} is too large", f"number versions from 1 to {LARGEST}")
