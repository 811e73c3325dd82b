"""What this machine is, and what of it the parts need: facts for a report of a fault, and what to mend."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from compress.errors import ToolkitError
from compress.host.cores import cores_here
from serve import __version__
from serve.triton.find import find_triton
from serve.triton.memory import MIB

__all__ = ["Examined", "Fact", "examine"]

PACKAGES = (
    "torch", "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "torch-pruning",
    "nvidia-pytriton", "tritonclient", "grpcio", "fastapi", "uvicorn", "uvloop",
)  # fmt: skip
# What makes integers and halves fast, in the order in which it came.
INSTRUCTIONS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8",
                "asimddp", "i8mm", "bf16", "sve")  # fmt: skip
PORTS = {8000: "--triton-http-port", 8001: "--triton-grpc-port", 8002: "--triton-metrics-port", 8080: "--port"}
SHARED = Path("/dev/shm")  # noqa: S108 (looked at)
LITTLE_MEMORY_MIB = 2048
LITTLE_SHARED_MIB = 64
LITTLE_DISK_MIB = 1024
LARGEST_PROC = 4 * MIB


@dataclass(frozen=True)
class Fact:
    """One thing about the machine; `mend` says what to do where it stands in the way, and is empty where not."""

    name: str
    told: str
    mend: str = ""


@dataclass(frozen=True)
class Examined:
    """All that was found."""

    facts: tuple[Fact, ...]

    @property
    def faults(self) -> tuple[Fact, ...]:
        """What stands in the way of something."""
        return tuple(fact for fact in self.facts if fact.mend)

    def text(self) -> str:
        """In lines to paste: a name, two spaces, what was found."""
        width = max(len(fact.name) for fact in self.facts)
        return "\n".join(f"{fact.name:{width}}  {fact.told}" for fact in self.facts)


def examine(ports: Sequence[int] = tuple(PORTS), environ: Mapping[str, str] = os.environ) -> Examined:
    """Look at this machine; it starts no server, and nothing of the environment's values is told.

    Args:
        ports: those that `serve up` would listen on.
        environ: says which Triton is meant.
    """
    return Examined(
        (
            Fact("compress-serve", f"{__version__} in {Path(__file__).parents[2]}"),
            Fact("Python", f"{platform.python_version()} at {sys.executable}"),
            Fact("system", f"{platform.platform()}, {' '.join(platform.libc_ver())}"),
            Fact("processor", _processor()),
            Fact("instructions", _instructions()),
            *_room(),
            *_packages(),
            _triton(environ),
            *_gpus(),
            *map(_port, ports),
        )
    )


def _proc(name: str) -> str:
    try:
        with Path("/proc", name).open(encoding="utf-8", errors="replace") as file:
            return file.read(LARGEST_PROC)
    except OSError:
        return ""


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", _proc("cpuinfo"), re.MULTILINE)
    name = found[1] if found else platform.machine()
    return f"{name}, {cores_here().told()}, load {os.getloadavg()[0]:.1f}"


def _instructions() -> str:
    found = re.search(r"^(?:flags|Features)\s*: (.*)$", _proc("cpuinfo"), re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    has = [name for name in INSTRUCTIONS if name in flags]
    if not has:
        return "none of those that speed up INT8 are told"
    vnni = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"} & set(has)
    return " ".join(has) + ("" if vnni else " (no VNNI or dot products: INT8 gains less here)")


def _room() -> list[Fact]:
    """Memory, shared memory, disk."""
    values = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _proc("meminfo"), re.MULTILINE))
    total, free = (int(values.get(name, 0)) // 1024 for name in ("MemTotal", "MemAvailable"))
    little = "" if free >= LITTLE_MEMORY_MIB else "stop something: training and Triton want 2 GiB and more"
    facts = [Fact("memory", f"{free:,} of {total:,} MiB free", little)]
    if not values:  # another system than Linux
        facts = [Fact("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // MIB:,} MiB")]
    for name, folder, least, mend in (
        (
            "shared memory",
            SHARED,
            LITTLE_SHARED_MIB,
            "Triton's Python models need it: docker run --shm-size=256m",
        ),
        ("disk", Path(), LITTLE_DISK_MIB, "make room: artifacts and kept stages stand in the working folder"),
    ):
        try:
            found = shutil.disk_usage(folder).free // MIB
        except OSError:
            facts.append(Fact(name, "is not there", mend if values else ""))  # what needs it is Linux's
            continue
        facts.append(Fact(name, f"{found:,} MiB free", "" if found >= least else mend))
    return facts


def _packages() -> list[Fact]:
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    facts = [Fact("packages", " ".join(f"{name} {version}" for name, version in versions.items()) or "none")]
    both = [name for name in ("onnxruntime", "onnxruntime-gpu") if name in versions]
    if len(both) == 2:
        facts.append(
            Fact(
                "onnxruntime",
                "two packages write into one folder: " + " and ".join(both),
                "pip uninstall both, then install the one that is wanted",
            )
        )
    return facts


def _triton(environ: Mapping[str, str]) -> Fact:
    try:
        return Fact("Triton", str(find_triton(environ).binary))
    except ToolkitError as err:
        return Fact("Triton", f"{err.what}: {err.why}", err.mend)


def _gpus() -> list[Fact]:
    """NVIDIA's, by its driver's own library."""
    if importlib.util.find_spec("pynvml") is None or not Path("/proc/driver/nvidia").exists():
        return []
    import pynvml  # slow to find its driver

    try:
        pynvml.nvmlInit()
        names = [
            str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)))
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return [Fact("GPUs", f"{', '.join(names)}; driver {pynvml.nvmlSystemGetDriverVersion()}")]
    except pynvml.NVMLError as err:
        return [Fact("GPUs", f"the driver does not answer: {err}", "look at nvidia-smi")]


def _port(port: int) -> Fact:
    name = f"port {port}"
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(1)
        except OSError as err:
            flag = PORTS.get(port, "--port")
            return Fact(name, f"can't be had: {err.strerror}", f"serve up {flag} 0 takes a free one")
    return Fact(name, "free")
