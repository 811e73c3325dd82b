"""What a configuration is to the search: a handful of numbers, and how they are written into config.pbtxt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Candidate", "candidate_of", "candidates", "write_into"]

BATCHES = (8, 32, 64)
DELAYS = (0, 200, 1000, 5000)


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        instances: of the network.
        threads: of the network in each; 0 for the runtime's own choice.
        max_batch_size: of the network; 0 where it has no batch.
        delay_us: how long a request waits for others; None without dynamic batching.
        hook_instances: of each hook, or of the pipeline; 0 where there is none.
    """

    instances: int
    threads: int
    max_batch_size: int
    delay_us: int | None
    hook_instances: int = 0

    def label(self) -> str:
        """A few words for tables and plots."""
        batching = "no batching" if self.delay_us is None else f"batch {self.max_batch_size}, wait {self.delay_us} µs"
        hooks = f", hooks {self.hook_instances}" if self.hook_instances else ""
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}" if self.threads else "all threads"
        return f"{self.instances} x {threads}, {batching}{hooks}"

    def to_dict(self) -> dict[str, int | None]:
        return dataclasses.asdict(self)


def candidates(now: Candidate, cores: int) -> list[Candidate]:
    """Every configuration that is worth a look; instances times threads stays within the cores.

    Args:
        now: what is there, which tells whether there is a batch, and hooks.
        cores: that the server may use.
    """
    pairs = {(instances, threads) for instances in range(1, cores + 1) for threads in range(1, cores // instances + 1)}
    hooks = sorted({1, max(1, cores // 2), cores}) if now.hook_instances else [0]
    batching: list[tuple[int, int | None]] = [(now.max_batch_size, None)]
    if now.max_batch_size:
        batching += [(size, delay) for size in sorted({*BATCHES, now.max_batch_size}) for delay in DELAYS]
    found = {
        Candidate(instances, threads, size, delay, hook)
        for instances, threads in pairs
        for size, delay in batching
        for hook in hooks
    }
    return sorted(found - {now}, key=_key)


def _key(candidate: Candidate) -> tuple[int, ...]:
    delay = -1 if candidate.delay_us is None else candidate.delay_us
    return (candidate.instances, candidate.threads, candidate.max_batch_size, delay, candidate.hook_instances)


def candidate_of(messages: Mapping[str, Any], network: str) -> Candidate:
    """What the configurations of a packed model say.

    Args:
        messages: the protobuf messages of all its parts, by name.
        network: the part that runs the network.
    """
    message = messages[network]
    name = "INFERENCE_NUM_THREADS" if message.backend == "openvino" else "intra_op_thread_count"
    told = message.parameters[name].string_value if name in message.parameters else ""
    threads = int(told) if told.isdecimal() else 0
    if message.backend == "openvino":  # of all instances together
        threads //= _count(message)
    hooks = [part for name, part in messages.items() if name != network and part.backend == "python"]
    return Candidate(
        instances=_count(message),
        threads=threads,
        max_batch_size=message.max_batch_size,
        delay_us=(
            message.dynamic_batching.max_queue_delay_microseconds if message.HasField("dynamic_batching") else None
        ),
        hook_instances=_count(hooks[0]) if hooks else 0,
    )


def _count(message: Any) -> int:
    return sum(max(group.count, 1) for group in message.instance_group) or 1


def write_into(messages: Mapping[str, Any], network: str, candidate: Candidate) -> None:
    """Set the messages to a candidate; everything that it does not speak of stays.

    The largest batch is set in all parts, because an ensemble's may not pass its steps'; warm-ups at the largest batch
    follow it.
    """
    for name, message in messages.items():
        old = message.max_batch_size
        if candidate.max_batch_size:
            message.max_batch_size = candidate.max_batch_size
            for warmup in message.model_warmup:
                if warmup.batch_size == old and old > 1:
                    warmup.batch_size = candidate.max_batch_size
                    warmup.name = f"batch_{candidate.max_batch_size}"
        if name == network:
            _set_count(message, candidate.instances)
            _set_threads(message, candidate)
        elif message.backend == "python" and candidate.hook_instances:
            _set_count(message, candidate.hook_instances)
        if message.platform == "ensemble":
            continue
        if candidate.delay_us is None:
            message.ClearField("dynamic_batching")
        else:
            message.dynamic_batching.SetInParent()
            message.dynamic_batching.max_queue_delay_microseconds = candidate.delay_us


def _set_threads(message: Any, candidate: Candidate) -> None:
    if message.backend != "openvino":
        message.parameters["intra_op_thread_count"].string_value = str(candidate.threads)
        return
    message.parameters["NUM_STREAMS"].string_value = str(candidate.instances)
    message.parameters["INFERENCE_NUM_THREADS"].string_value = str(candidate.instances * candidate.threads)


def _set_count(message: Any, count: int) -> None:
    del message.instance_group[1:]
    if not message.instance_group:
        message.instance_group.add().kind = 2  # KIND_CPU
    message.instance_group[0].count = count
