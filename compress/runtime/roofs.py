"""What this machine reaches: the roofs under which a model's layers stand."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from compress.runtime.backends.onnxrt import session

__all__ = ["KINDS", "TRIES", "Machine", "machine"]

KINDS = ("float", "int8")
MATRIX = 1024
ARRAY = 16 * 1024 * 1024  # floats: larger than the last cache of most machines
TRIES = 4  # each time: before, between and after the models' profiles, and the best of all counts


@dataclass(frozen=True)
class Machine:
    """What this machine reached when nothing else was asked of it.

    Attributes:
        threads: that were used.
        float_ops, int8_ops: operations a second (a multiply-accumulate is two) in a product of 1024 by 1024 matrices.
        bytes_per_second: of memory, read and written, in a triad over arrays of 64 MiB. What the caches hold is faster.
        tries: how often each was measured; the best counts.
        lifted: of "float" and "int8" those whose roof is a layer's own speed, which was above all tries.
    """

    threads: int
    float_ops: float
    int8_ops: float
    bytes_per_second: float
    tries: int = 1
    lifted: tuple[str, ...] = ()

    def ops(self, kind: str) -> float:
        """Operations a second of "float" or "int8"."""
        return self.int8_ops if kind == "int8" else self.float_ops

    def or_better(self, other: Machine) -> Machine:
        """The best of two measurements of one machine."""
        best = {kind: max(self.ops(kind), other.ops(kind)) for kind in KINDS}
        kept = tuple(
            kind for kind in KINDS if any(kind in m.lifted and m.ops(kind) == best[kind] for m in (self, other))
        )
        speed = max(self.bytes_per_second, other.bytes_per_second)
        return Machine(self.threads, best["float"], best["int8"], speed, self.tries + other.tries, kept)

    def lifted_to(self, fastest: Mapping[str, float]) -> Machine:
        """With roofs that are at least so high.

        Args:
            fastest: operations a second that a layer reached, by "float" and "int8".
        """
        found = self
        for kind, ops in fastest.items():
            if ops > self.ops(kind):
                lifted = (*found.lifted, kind)
                found = (
                    replace(found, int8_ops=ops, lifted=lifted)
                    if kind == "int8"
                    else replace(found, float_ops=ops, lifted=lifted)
                )
        return found


_known: dict[int, Machine] = {}


def machine(threads: int, *, again: bool = False) -> Machine:
    """The best that this machine reached so far, by threads: measured the first time, about half a second's work.

    Args:
        threads: that may be used.
        again: measure once more: what was a busy moment may have passed.
    """
    if again or threads not in _known:
        measured = _measured(threads)
        _known[threads] = _known[threads].or_better(measured) if threads in _known else measured
    return _known[threads]


def _measured(threads: int) -> Machine:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, y, z = (torch.ones(ARRAY) for _ in range(3))
        triad = _best(lambda: torch.add(y, z, alpha=0.5, out=x))
    finally:
        torch.set_num_threads(before)
    ops = 2.0 * MATRIX**3
    floats, whole = (_best(_product(kind, threads)) for kind in ("MatMul", "MatMulInteger"))
    return Machine(threads, ops / floats, ops / whole, 3 * 4 * ARRAY / triad, tries=TRIES)


def _best(work: Callable[[], Any]) -> float:
    work()
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


@functools.cache
def _product(kind: str, threads: int) -> Callable[[], Any]:
    """ONNX Runtime's own product: of floats, or of unsigned activations and signed weights."""
    rng = np.random.default_rng(0)
    whole = kind == "MatMulInteger"
    weights = rng.integers(-127, 127, (MATRIX, MATRIX)).astype(np.int8 if whole else np.float32)
    given = {"a": rng.integers(0, 255, (MATRIX, MATRIX)).astype(np.uint8 if whole else np.float32)}
    left, right = (TensorProto.UINT8, TensorProto.INT32) if whole else (TensorProto.FLOAT, TensorProto.FLOAT)
    graph = helper.make_graph(
        [helper.make_node(kind, ["a", "b"], ["c"])],
        "product",
        [helper.make_tensor_value_info("a", left, [MATRIX, MATRIX])],
        [helper.make_tensor_value_info("c", right, [MATRIX, MATRIX])],
        [onnx.numpy_helper.from_array(weights, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "product.onnx"
        onnx.save(model, path)
        running = session(path, threads)
    return lambda: running.run(None, given)
