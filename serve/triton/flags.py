"""What a tritonserver has to be told for what its models' configurations say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serve.repository.read import ModelInfo
from serve.repository.versions import all_served

__all__ = ["CACHE_BYTES", "flags_for", "loaders_for"]

CACHE_BYTES = 64 * 1024 * 1024
MORE_LOADERS, MOST_LOADERS = 4, 256


def flags_for(models: Sequence[ModelInfo], cache_bytes: int = CACHE_BYTES, caches: Path | None = None) -> list[str]:
    """The flags for response caches and rate limiters, where a model asks for them.

    Args:
        models: that it serves.
        cache_bytes: of memory for answers.
        caches: the folder of cache libraries, where the server does not know it.
    """
    flags = []
    if any(model.config.response_cache and model.config.response_cache.enable for model in models):
        flags.append(f"--cache-config=local,size={cache_bytes}")
        flags += [f"--cache-directory={caches}"] if caches is not None else []
    if any(group.rate_limiter for model in models for group in model.config.instance_group):
        flags.append("--rate-limit=execution_count")
    return flags


def loaders_for(models: Sequence[ModelInfo]) -> int:
    """Threads that load models which come when they are asked for, so that no number of loads that hang stops others.

    A load has one for each version until it ends, which it may never do. Some more are for models that are added.

    Args:
        models: that it may be asked for.
    """
    versions = sum(max(1, len(all_served(model.config, model.versions))) for model in models)
    return min(versions + MORE_LOADERS, MOST_LOADERS)
