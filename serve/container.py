"""The same repository in NVIDIA's container: the command that serves it there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from serve.repository import ModelInfo
from serve.triton.memory import MIB, instance_count, region_bytes
from serve.triton.ports import HOST, Ports

__all__ = ["IMAGE", "container_command"]

IMAGE = "nvcr.io/nvidia/tritonserver:26.07-py3"
SPARE_BYTES = 64 * MIB


def container_command(
    repository: Path, models: list[ModelInfo], *, ports: Ports, image: str = IMAGE, explicit: bool = False
) -> list[str]:
    """The words of `docker run`; what the hooks require is installed before Triton starts.

    Args:
        repository: is mounted, read-only.
        models: what it holds.
        ports: where to listen, on loopback.
        image: Triton's.
        explicit: let the model control API load and unload models.
    """
    requirements = sorted({text for model in models for text in _requirements(model)})
    shared = instance_count([model for model in models if model.config.backend == "python"]) * region_bytes(models)
    server = ["tritonserver", "--model-repository=/models", "--disable-auto-complete-config"]
    if explicit:
        server += ["--model-control-mode=explicit", "--load-model=*"]
    if any(model.config.response_cache and model.config.response_cache.enable for model in models):
        server.append(f"--cache-config=local,size={64 * MIB}")
    if any(group.rate_limiter for model in models for group in model.config.instance_group):
        server.append("--rate-limit=execution_count")
    words = server
    if requirements:
        words = ["sh", "-c", f"pip install --quiet {shlex.join(requirements)} && exec {shlex.join(server)}"]
    gpus = any(group.kind == "KIND_GPU" for model in models for group in model.config.instance_group)
    published = [
        f"--publish={HOST}:{ours}:{theirs}"
        for ours, theirs in ((ports.http_port, 8000), (ports.grpc_port, 8001), (ports.metrics_port, 8002))
    ]
    return [
        "docker", "run", "--rm", *(["--gpus=all"] if gpus else []), f"--shm-size={(shared + SPARE_BYTES) // MIB}m",
        *published, f"--volume={repository.absolute()}:/models:ro", image, *words,
    ]  # fmt: skip


def _requirements(model: ModelInfo) -> list[str]:
    found: list[str] = json.loads(model.config.parameters.get("requirements", "[]"))
    return [text for text in found if text.partition(" ")[0] != "numpy"]  # the image has it
