"""What the figures were measured on."""

from __future__ import annotations

import contextlib
import functools
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from compress import __version__
from compress.console.wording import counted
from compress.runtime.measure import cores

__all__ = ["environment", "fast_bfloat16", "int8_saturates", "machine_of", "versions"]

_PACKAGES = (
    "torch", "onnx", "onnxruntime", "onnxruntime-gpu", "onnxscript", "torch-pruning", "numpy", "scipy", "openvino",
    "transformers", "tokenizers", "pillow",
)  # fmt: skip
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "avx512_bf16", "asimddp", "i8mm")


@functools.cache
def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    lines = (line.partition(":") for line in path.read_text(encoding="utf-8").splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def int8_saturates() -> bool:
    """Whether this is an x86 CPU without VNNI or AMX, whose products of 8-bit numbers saturate at 16 bits."""
    flags = _cpuinfo().get("flags", "").split()
    return platform.machine() in ("x86_64", "AMD64") and not {"avx512_vnni", "avx_vnni", "amx_int8"} & set(flags)


def fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    return bool({"avx512_bf16", "amx_bf16"} & set(_cpuinfo().get("flags", "").split()))


def versions() -> dict[str, str]:
    """Releases of the packages that decide what a stage gives."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def environment(threads: int) -> dict[str, str | int]:
    """Machine and versions, by stable names, as JSON values."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    found: dict[str, str | int] = {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cpu_flags": " ".join(flag for flag in _FLAGS if flag in flags),
        "cores": cores(),
        "threads": threads,
        "os": platform.platform(),
        "python": platform.python_version(),
        "compress": __version__,
    }
    return found | versions()


def machine_of(threads: int) -> str:
    """What a choice by measured times holds for.

    Args:
        threads: that the runtime computed with.
    """
    found = environment(threads)
    return f"{found['cpu']}; {found['cpu_flags']}; {counted(int(found['cores']), 'cores')}"
