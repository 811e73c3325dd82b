"""How a packed model is run, from flags, TOML or Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from compress.artifact import Runtime
from compress.errors import RepositoryError

__all__ = ["ROLES", "PackOptions"]

ROLES = ("network", "preprocess", "postprocess", "ensemble", "pipeline")
"""The models that a pack may write, by what they do."""
ZERO = (
    "max_queue_delay_microseconds", "max_queue_size", "queue_timeout_microseconds", "priority_levels",
    "default_priority_level",
)  # fmt: skip
SIZES = ("instances", "threads", "hook_instances", "max_batch_size", "serve_latest")


@dataclass(frozen=True)
class PackOptions:
    """How Triton runs the models.

    instances times threads should not pass the cores of the machine that serves. Two instances with one thread each
    serve more than one instance with two threads, which answers a single request sooner. The embedded Triton keeps
    threads within the cores.

    Attributes:
        instances: copies of the network that run side by side, each with its own memory; on GPUs, on each GPU.
        threads: of the network, in each instance.
        cores: choose both for so many cores of the machine that serves, or, with "here", for those that this process
            may use here, by its CPUs, its container's quota and its NUMA nodes; by default they suit any machine.
        hook_instances: processes for each of preprocess and postprocess.
        pipeline: how hooks and network come together: an "ensemble" of models that Triton schedules, or "bls", one
            Python model that runs both hooks and asks the network.
        max_batch_size: the most items that one run takes.
        dynamic_batching: put requests that wait together into one run; without it, each request is run as the batch
            that its client made of it.
        max_queue_delay_microseconds: how long a request may wait for others to join its batch; 0 takes those that
            already wait.
        preferred_batch_size: sizes of batch that are worth waiting for; only a TensorRT plan with profiles needs them.
        preserve_ordering: answer in the order in which requests came.
        priority_levels: how many priorities requests may have, 1 is served first; 0 for none.
        default_priority_level: of a request that names none.
        max_queue_size: the most requests that may wait for a model in Triton, beyond which it refuses them; 0 for no
            bound. The gateway bounds them anyway, and with this bound or the next, Triton's batcher takes no request
            before an instance is idle and at times oversleeps by half a second.
        queue_timeout_microseconds: how long a request may wait for a model in Triton before it is refused; 0 for no
            bound.
        device: what the network runs on.
        gpus: the GPUs by number; all by default.
        accelerator: the execution provider of ONNX Runtime on GPUs: "cuda", or "tensorrt" for what it can take.
        precision: what TensorRT may compute in.
        engine_cache: a folder, where Triton runs, for the engines that TensorRT builds.
        profiles: of a TensorRT plan: which of its optimization profiles an instance uses; all by default.
        pinned_memory: on GPUs, let tensors come and go through pinned memory: faster copies, of memory that can't be
            swapped.
        cuda_graphs: record the network's GPU work once and replay it; shapes must not vary.
        graph_level: how far ONNX Runtime rewrites the graph: -1 basic, 0 all, 1 extended, 2 not at all.
        warmup: run the network once at batch 1 and once at the largest batch before it is ready.
        response_cache: answer a request that came before from Triton's memory. Not for a network that draws at random.
        runtime: what runs an ONNX file on the CPU; by default what its artifact was found to be fastest with.
        serve_latest: how many of the newest versions are served.
        labels: a text file with a name in each line for the network's first output; Triton's classification extension
            gives these.
        dimensions: of a model of embeddings: lengths that these may be cut to, where it was trained for that
            (Matryoshka); a client of /v1/embeddings chooses one.
        metric_tags: labels that Triton's metrics of the network carry.
        models: any field of Triton's model configuration, under the schema's names, by "network", "preprocess",
            "postprocess", "ensemble" or "pipeline"; laid over what the rest of the options make.
    """

    instances: int = 2
    threads: int = 1
    cores: int | Literal["here"] | None = None
    hook_instances: int = 1
    pipeline: Literal["ensemble", "bls"] = "ensemble"
    max_batch_size: int = 32
    dynamic_batching: bool = True
    max_queue_delay_microseconds: int = 0
    preferred_batch_size: tuple[int, ...] = ()
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    max_queue_size: int = 0
    queue_timeout_microseconds: int = 0
    device: Literal["cpu", "gpu"] = "cpu"
    gpus: tuple[int, ...] = ()
    accelerator: Literal["cuda", "tensorrt"] | None = None
    precision: Literal["fp32", "fp16", "int8"] | None = None
    engine_cache: str | None = None
    profiles: tuple[int, ...] = ()
    pinned_memory: bool = True
    cuda_graphs: bool = False
    graph_level: Literal[-1, 0, 1, 2] | None = None
    warmup: bool = True
    response_cache: bool = False
    runtime: Runtime | None = None
    serve_latest: int = 1
    labels: Path | None = None
    dimensions: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative_iterable="")] = ()
    metric_tags: dict[str, str] = field(default_factory=dict)
    models: Annotated[Mapping[str, Mapping[str, Any]], Parameter(parse=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*SIZES, *ZERO):
            value, least = getattr(self, name), 0 if name in ZERO else 1
            if value < least:
                self._refuse(name, value, f"it must be {least} or more")
        if any(size < 1 or size > self.max_batch_size for size in self.preferred_batch_size):
            self._refuse("preferred_batch_size", self.preferred_batch_size, f"sizes go from 1 to {self.max_batch_size}")
        if bool(self.priority_levels) != bool(self.default_priority_level):
            self._refuse(
                "priority_levels", self.priority_levels, "priority-levels and default-priority-level go together"
            )
        if self.default_priority_level > self.priority_levels:
            self._refuse(
                "default_priority_level", self.default_priority_level, f"there are {self.priority_levels} levels"
            )
        if self.preserve_ordering and self.priority_levels > 1:
            self._refuse("preserve_ordering", True, "priorities change the order")
        if isinstance(self.cores, int) and self.cores < 1:
            self._refuse("cores", self.cores, "it must be 1 or more")
        if self.cores is not None and (self.device == "gpu" or (self.instances, self.threads) != (2, 1)):
            why = "the network runs on a GPU" if self.device == "gpu" else "it chooses --instances and --threads"
            self._refuse("cores", self.cores, why)
        batching = ("max_queue_delay_microseconds", "preferred_batch_size", "preserve_ordering", "priority_levels",
                    "max_queue_size", "queue_timeout_microseconds")  # fmt: skip
        for name in batching:
            if not self.dynamic_batching and getattr(self, name):
                self._refuse(name, getattr(self, name), "it is part of dynamic batching, which is off")
        for name in ("gpus", "accelerator", "cuda_graphs"):
            if self.device == "cpu" and getattr(self, name):
                self._refuse(name, getattr(self, name), "the network runs on the CPU; add --device gpu")
        for name in ("precision", "engine_cache"):
            if self.accelerator != "tensorrt" and getattr(self, name):
                self._refuse(name, getattr(self, name), "it is TensorRT's; add --accelerator tensorrt")
        if self.device == "gpu" and self.runtime == "openvino":
            self._refuse("runtime", self.runtime, "OpenVINO runs the network on the CPU")
        if self.runtime == "openvino" and self.graph_level is not None:
            self._refuse("graph_level", self.graph_level, "it is ONNX Runtime's")
        for role in self.models:
            if role not in ROLES:
                raise RepositoryError(
                    f"can't configure [{role}]", why="no model of a pack has that role", mend=f"use {', '.join(ROLES)}"
                )

    def _refuse(self, name: str, value: object, why: str) -> None:
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
        raise RepositoryError(
            f"can't pack with {name.replace('_', '-')} {shown}",
            why=why,
            mend=f"give another value, or leave it out for {getattr(type(self), name, 'none')}",
        )
