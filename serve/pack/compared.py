"""How large a batch of a file on OpenVINO may be: as large as its answers were compared with ONNX Runtime's at."""

from __future__ import annotations

from dataclasses import replace

from compress.artifact import Artifact
from serve.pack.options import PackOptions

__all__ = ["COMPARED", "batch_told", "largest_compared", "within_compared"]

COMPARED = "compared_batch"
"""The parameter of config.pbtxt that keeps it, for `serve lint`."""


def largest_compared(source: Artifact) -> int | None:
    """The most samples in a call that both runtimes were compared at; None where nobody knows, or a call is one."""
    sizes = [source.compared.get(dim) for dim in source.signature.batches]
    if not source.signature.batched or not all(sizes):
        return None
    return min(max(each) for each in sizes if each)


def within_compared(source: Artifact, options: PackOptions) -> PackOptions:
    """No larger batches than that."""
    most = largest_compared(source)
    if most is None or options.max_batch_size <= most:
        return options
    preferred = tuple(size for size in options.preferred_batch_size if size <= most)
    return replace(options, max_batch_size=most, preferred_batch_size=preferred)


def batch_told(source: Artifact, options: PackOptions, packed: int) -> tuple[str, ...]:
    """What is to be said of the batches that were packed.

    Args:
        source: what runs on OpenVINO.
        options: as they were given.
        packed: the network's max_batch_size, which a table or an edit by hand may have set.
    """
    most = largest_compared(source)
    if most is None:
        return ()
    why = (
        f"OpenVINO's answers were compared with ONNX Runtime's at up to {most} samples in a call, and a kernel may be "
        "another beyond (--runtime onnxruntime has no bound)"
    )
    if packed > most:
        return (f"max_batch_size is {packed}, as a table or an edit by hand has it: {why}",)
    if packed == most < options.max_batch_size:
        return (f"max_batch_size is {most}, not {options.max_batch_size}: {why}",)
    return ()
