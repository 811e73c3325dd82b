"""What Triton loads and then does badly: defaults that are traps, settings that work against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compress.host.cores import Cores
from serve.config.pbtxt import from_message
from serve.config.threads import threads_of
from serve.lint.finding import Findings, warning
from serve.lint.model import Model
from serve.pack.onnx_reader import OnnxFile

__all__ = ["batch_advice", "core_advice", "file_advice", "instance_advice", "open_threads", "queue_advice"]

ANY = -1


def instance_advice(model: Model) -> Findings:
    """Instances that are left to a default, or are none."""
    if model.is_ensemble or not model.backend:
        return
    groups = model.config.instance_group
    if not groups:
        default = "two for each CPU model" if model.backend == "onnxruntime" else "one"
        yield warning(
            model.name,
            f"instance_group is left to Triton's default, {default}",
            "write instance_group { count: 1 kind: KIND_CPU }",
        )
    for group in groups:
        if group.count < 1:
            yield warning(
                model.name, f"instance_group has count {group.count}, which Triton takes for 1", "write count: 1"
            )
    if model.backend in ("onnxruntime", "openvino", "tensorrt", "pytorch") and not model.config.model_warmup:
        yield warning(
            model.name, "there is no model_warmup: the first requests pay for it", "write one, or pack it again"
        )


def batch_advice(model: Model, files: Mapping[Path, OnnxFile]) -> Findings:
    """Batching that is possible and off, or on and does nothing."""
    config = model.config
    scheduled = config.WhichOneof("scheduling_choice")
    if config.max_batch_size > 1 and scheduled is None and not model.is_ensemble:
        yield warning(
            model.name,
            f"max_batch_size is {config.max_batch_size}, and nothing makes batches",
            "write dynamic_batching { }",
        )
    if config.max_batch_size == 0 and scheduled == "dynamic_batching":
        yield warning(model.name, "dynamic_batching does nothing with max_batch_size 0", "write a max_batch_size")
    held = [found for path, found in files.items() if model.folder in path.parents and found.inputs]
    tensors = [tensor for found in held for tensor in (*found.inputs, *found.outputs)]
    if config.max_batch_size == 0 and tensors and all(tensor.shape[:1] == (ANY,) for tensor in tensors):
        yield warning(
            model.name,
            "max_batch_size is 0, and the first dimension of every tensor is free: Triton makes no batches of it",
            "write max_batch_size: 8 and leave the first of dims out, if it is a batch",
        )


def queue_advice(model: Model) -> Findings:
    """Queue policies that stall Triton's batcher, and sizes that only profiles need."""
    batching = model.config.dynamic_batching
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(p.max_queue_size or p.default_timeout_microseconds or p.allow_timeout_override for p in policies):
        yield warning(
            model.name,
            "a queue policy keeps Triton's batcher from taking requests ahead, and at times it oversleeps by 0.5 s",
            "bound the queue in front of Triton, as the gateway does, and leave the policy out",
        )
    if batching.preferred_batch_size and model.backend != "tensorrt":
        yield warning(
            model.name, "preferred_batch_size holds requests back, and only TensorRT's profiles need it", "leave it out"
        )


def core_advice(models: Sequence[Model], cores: Cores) -> Findings:
    """The threads of all instances of a model against the cores that there are."""
    for model in models:
        threads = threads_of(from_message(model.config), model.backend)
        if threads is None or not threads.too_many(cores.count):
            continue
        asked = f"{threads.each} threads each" if threads.total else "every core each"
        kept = f"the embedded Triton starts {threads.within(cores.count)} each"
        yield warning(
            model.name,
            f"{threads.instances} instances with {asked}, this machine has {cores.told()}; {kept}",
            f"keep the instances, and their threads together ({threads.parameter}), within the cores, "
            "or pack with --cores here",
        )


def open_threads(model: Model) -> Findings:
    """Threads that nobody counts: Triton's own backends then count the machine's cores, not the container's."""
    threads = threads_of(from_message(model.config), model.backend)
    if threads is not None and not threads.total:
        yield warning(
            model.name,
            f"{threads.parameter} is left open: in a container with fewer CPUs than its machine, each instance still "
            "starts a thread for every core of the machine",
            f"write {threads.parameter}, or pack again",
        )


def file_advice(model: Model) -> Findings:
    """Files that someone else may change, or that lie elsewhere."""
    root = model.folder.resolve()
    for path in sorted(model.folder.rglob("*")):
        where = path.relative_to(model.folder)
        if path.is_symlink() and root not in path.resolve().parents:
            yield warning(model.name, f"{where} is a link out of the model's folder", "copy the file here")
        elif path.exists() and path.stat().st_mode & 0o002 and not path.is_symlink():
            yield warning(model.name, f"anyone on this machine may write {where}", f"chmod o-w {where}")
