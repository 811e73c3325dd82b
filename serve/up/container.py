"""The same repository in NVIDIA's container: the command that serves it there."""

from __future__ import annotations

import shlex
from pathlib import Path

from serve.config.requirements import OF_HOOKS, REQUIREMENTS, requirements_in
from serve.repository.folders import check_hidden
from serve.repository.read import ModelInfo, instance_count
from serve.triton.flags import flags_for
from serve.triton.memory import MIB, region_bytes
from serve.triton.ports import HOST
from serve.up.options import UpOptions

__all__ = ["IMAGE", "SPARE_BYTES", "container_command", "requirements_of"]

IMAGE = "nvcr.io/nvidia/tritonserver:26.07-py3"
SPARE_BYTES = 64 * MIB


def container_command(repository: Path, models: list[ModelInfo], options: UpOptions) -> list[str]:
    """The words of `docker run`; what the hooks require is installed before Triton starts.

    Args:
        repository: is mounted, read-only.
        models: what it holds.
        options: of `serve up`: ports, image, and whether models may be loaded and unloaded.

    Raises:
        RepositoryError: it holds a folder that Triton would take for one more model.
    """
    check_hidden(repository)
    requirements = requirements_of(models)
    shared = instance_count([model for model in models if model.config.backend == "python"]) * region_bytes(models)
    server = ["tritonserver", "--model-repository=/models", "--disable-auto-complete-config"]
    if options.model_control:
        server += ["--model-control-mode=explicit", "--load-model=*"]
    server += flags_for(models)
    words = server
    if requirements:
        words = ["sh", "-c", f"pip install --quiet {shlex.join(requirements)} && exec {shlex.join(server)}"]
    gpus = any(group.kind == "KIND_GPU" for model in models for group in model.config.instance_group)
    published = [
        f"--publish={HOST}:{ours}:{theirs}"
        for ours, theirs in zip(vars(options.ports).values(), (8000, 8001, 8002), strict=True)
    ]
    return [
        "docker", "run", "--rm", *(["--gpus=all"] if gpus else []), f"--shm-size={(shared + SPARE_BYTES) // MIB}m",
        *published, f"--volume={repository.absolute()}:/models:ro", options.image or IMAGE, *words,
    ]  # fmt: skip


def requirements_of(models: list[ModelInfo]) -> list[str]:
    """What the hooks of all models need beside what the image has."""
    return sorted({text for model in models for text in _requirements(model)})


def _requirements(model: ModelInfo) -> list[str]:
    if OF_HOOKS not in model.config.parameters:
        return []
    found = requirements_in(model.config.parameters.get(REQUIREMENTS, "[]"))
    return [text for text in found if text.partition(" ")[0] != "numpy"]  # the image has it
