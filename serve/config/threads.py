"""How many threads a model computes with: what its configuration says, what a machine lets it have, and a choice."""

from __future__ import annotations

from dataclasses import dataclass

from compress.host.cores import Cores
from serve.config.model_config import ModelConfig

__all__ = ["CORES", "MOST_INSTANCES", "Threads", "choice", "threads_of"]

CORES = "SERVE_CORES"
"""The environment variable by which the embedded Triton's backends are told how many cores there are."""
MOST_INSTANCES = 8
"""That are chosen of themselves: each is a process with the network in its memory."""
COUNTS = {
    "onnxruntime": "intra_op_thread_count",
    "openvino": "INFERENCE_NUM_THREADS",
    "pytorch": "INTRA_OP_THREAD_COUNT",
}


@dataclass(frozen=True)
class Threads:
    """Of one model.

    Attributes:
        instances: that run side by side on CPUs.
        total: threads that all of them are given; 0 where it is left to the runtime, which takes every core of the
            machine for each.
        parameter: that says so, or would.
    """

    instances: int
    total: int
    parameter: str

    @property
    def each(self) -> int:
        """Of an instance, as the configuration has it; 0 where that says nothing."""
        return -(-self.total // self.instances)

    def within(self, cores: int) -> int:
        """Of an instance in the embedded Triton: no more than its share of the cores, and at least one."""
        share = max(1, cores // self.instances)
        return min(self.each, share) if self.total else share

    def too_many(self, cores: int) -> bool:
        """Whether all instances together would start more than the cores; where nothing is said, as many for each."""
        return max(self.instances, self.total or self.instances * cores) > max(1, cores)


def threads_of(config: ModelConfig, backend: str = "") -> Threads | None:
    """What a configuration says; None of a model that computes on no CPU by itself: an ensemble, hooks, GPUs.

    Args:
        config: of the model.
        backend: that runs it, where the configuration doesn't name one.
    """
    backend = backend or config.backend
    if backend not in COUNTS:
        return None
    groups = [group for group in config.instance_group if group.kind != "KIND_GPU"]
    if config.instance_group and not groups:
        return None
    default = 2 if backend == "onnxruntime" else 1  # Triton's own, of a CPU
    instances = sum(max(1, group.count) for group in groups) or default
    text = config.parameters.get(COUNTS[backend], "1" if backend == "pytorch" else "")
    told = int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else 0
    return Threads(instances, told if backend == "openvino" else instances * told, COUNTS[backend])


def choice(cores: Cores) -> tuple[int, int]:
    """Instances, and threads of each, for a machine's throughput: one instance for each physical core, of one thread.

    Of more than MOST_INSTANCES cores, each instance has several, all of one NUMA node.
    """
    instances = min(cores.computing, MOST_INSTANCES)
    return instances, max(1, min(cores.computing // instances, cores.in_node))
