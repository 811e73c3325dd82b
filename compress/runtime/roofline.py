"""What bounds each layer on this machine: arithmetic, memory, or neither (overhead).

Williams, Waterman & Patterson, Roofline: An Insightful Visual Performance Model, CACM 2009.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto

from compress.errors import StageError, ToolkitError, first_line
from compress.formats.onnx.outline import outline
from compress.model import Arrays
from compress.model.watched import Watched
from compress.runtime.backends.onnxrt import WRONG_IN_HALF, is_half
from compress.runtime.roofs import KINDS, Machine, machine

__all__ = ["Layer", "Roofline", "roofline", "same_roofs"]

# A layer as long as this whose speed is above the roof shows that the roof was measured in a busy moment.
TELLING_MICROSECONDS = 50.0
FEWEST_CALLS, SECONDS = 4, 1.0  # of a profile: a large model is run so often, or for so long
# Slower than its roof by more than this, a layer is held up by something else: starting it, odd shapes, copies.
OVERHEAD = 4.0
Shape = tuple[str, list[int]]
BYTES = {"float": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "bool": 1, "double": 8}


@dataclass(frozen=True)
class Layer:
    """One node as ONNX Runtime ran it, after its own fusions.

    Attributes:
        name, kind: of the node.
        microseconds: median of a call.
        ops: operations of a call, two for a multiply-accumulate; elements of the output where nothing is multiplied.
        bytes_moved: inputs, weights and outputs, each once.
        int8: whether its inputs are 8-bit.
        bound: what its roof is, or "overhead" where it is far below.
    """

    name: str
    kind: str
    microseconds: float
    ops: float
    bytes_moved: float
    int8: bool
    bound: Literal["compute", "memory", "overhead"]

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.ops / max(self.bytes_moved, 1.0)

    @property
    def ops_per_second(self) -> float:
        return self.ops / max(self.microseconds, 1e-3) * 1e6


@dataclass(frozen=True)
class Roofline:
    """A model's layers under this machine's roofs."""

    machine: Machine
    layers: tuple[Layer, ...]

    def under(self, roofs: Machine) -> Roofline:
        """The same layers under other roofs of the same machine."""
        return Roofline(roofs, tuple(replace(layer, bound=_bound(layer, roofs)) for layer in self.layers))

    def share(self, bound: str) -> float:
        """Share of the time that goes to layers with that bound, 0 to 1."""
        total = sum(layer.microseconds for layer in self.layers) or 1.0
        return sum(layer.microseconds for layer in self.layers if layer.bound == bound) / total

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": asdict(self.machine),
            "layers": [asdict(layer) | {"intensity": layer.intensity} for layer in self.layers],
            "time_share": {bound: self.share(bound) for bound in ("compute", "memory", "overhead")},
        }


def roofline(path: Path, inputs: Arrays, *, threads: int = 1, calls: int = 40, follows: bool = False) -> Roofline:
    """Profile a file and set each of its nodes under the roofs.

    Args:
        path: an ONNX file.
        inputs: one batch.
        threads: of the profile and of the roofs.
        calls: how often it is run at most; the first tenth does not count. A large model is run fewer times.
        follows: another model's call of this has just ended: the roofs that it measured last stand before this one.

    Raises:
        StageError: ONNX Runtime can't load, run or profile the file.
    """
    if not follows:
        machine(threads, again=True)
    events, weights = _profile(path, inputs, threads, calls)
    found = (_layer(name, group, weights.get(name, [])) for name, group in events.items())
    layers = tuple(layer for layer in found if layer is not None)
    roofs = machine(threads, again=True).lifted_to(_fastest(layers))
    return Roofline(roofs, layers).under(roofs)


def _fastest(layers: Sequence[Layer]) -> dict[str, float]:
    telling = [layer for layer in layers if layer.microseconds >= TELLING_MICROSECONDS]
    return {
        kind: max((layer.ops_per_second for layer in telling if layer.int8 == (kind == "int8")), default=0.0)
        for kind in KINDS
    }


def same_roofs(found: Mapping[str, Roofline]) -> dict[str, Roofline]:
    """Several models' layers under the best roofs that were measured beside any of them."""
    if not found:
        return {}
    roofs = functools.reduce(Machine.or_better, (each.machine for each in found.values()))
    roofs = replace(roofs, tries=max(each.machine.tries for each in found.values()))  # the last counts those before it
    return {name: each.under(roofs) for name, each in found.items()}


def _profile(
    path: Path, inputs: Arrays, threads: int, calls: int
) -> tuple[dict[str, list[Mapping[str, Any]]], dict[str, list[Shape]]]:
    """ONNX Runtime's own record of each node's calls, and the weights of each node, by node."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        half = is_half(path)
        if half:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        try:
            running = ort.InferenceSession(
                str(path),
                options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=list(WRONG_IN_HALF) if half else [],
            )
            begun = time.perf_counter()
            watched = Watched(path)
            for done in range(calls):
                watched.run(running, None, inputs)
                if done + 1 >= FEWEST_CALLS and time.perf_counter() - begun > SECONDS:
                    break
            # Names of nodes stand in it as they are: what they make of it need not be JSON.
            trace = json.loads(Path(running.end_profiling()).read_text(encoding="utf-8"))
        except ToolkitError:  # it has no end
            raise
        except Exception as err:  # ONNX Runtime's own exception classes have no common base but this
            raise StageError(
                f"can't tell what bounds the layers of {path.name}",
                why=f"ONNX Runtime can't profile it: {first_line(err)[:300]}",
                mend="leave --roofline out; `compress measure` says whether the file runs",
            ) from err
        weights = _weights(outline(Path(options.optimized_model_filepath)).graph)
    events: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in trace:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            events[event["name"].removesuffix("_kernel_time")].append(event)
    return {name: group[max(1, len(group) // 10) :] or group for name, group in events.items()}, weights


def _weights(graph: onnx.GraphProto) -> dict[str, list[Shape]]:
    """Type and shape of each initializer that a node reads, by node."""
    kinds = {
        TensorProto.FLOAT: "float",
        TensorProto.INT8: "int8",
        TensorProto.UINT8: "uint8",
        TensorProto.FLOAT16: "float16",
    }
    tensors = {t.name: (kinds.get(t.data_type, "int32"), list(t.dims)) for t in graph.initializer}
    return {node.name: [tensors[name] for name in node.input if name in tensors] for node in graph.node}


def _layer(name: str, events: Sequence[Mapping[str, Any]], weights: Sequence[Shape]) -> Layer | None:
    args = events[0]["args"]
    given, made = _shapes(args.get("input_type_shape", [])), _shapes(args.get("output_type_shape", []))
    known = [shape for _, shape in given]
    given += [weight for weight in weights if weight[1] not in known]
    if not made:
        return None
    kind = str(args["op_name"])
    ops = _ops(kind, given, made)
    moved = float(sum(BYTES.get(dtype, 4) * int(np.prod(shape)) for dtype, shape in (*given, *made)))
    int8 = bool(given) and given[0][0] in ("int8", "uint8")
    spent = statistics.median(event["dur"] for event in events)
    return Layer(name, kind, float(spent), ops, moved, int8, "overhead")


def _bound(layer: Layer, roofs: Machine) -> Literal["compute", "memory", "overhead"]:
    compute = layer.ops / (roofs.int8_ops if layer.int8 else roofs.float_ops) * 1e6
    memory = layer.bytes_moved / roofs.bytes_per_second * 1e6
    if layer.microseconds > OVERHEAD * max(compute, memory):
        return "overhead"
    return "compute" if compute > memory else "memory"


def _shapes(entries: Sequence[Mapping[str, list[int]]]) -> list[Shape]:
    return [(dtype, list(shape)) for entry in entries for dtype, shape in entry.items()]


_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}  # of each hidden unit


def _ops(kind: str, given: Sequence[Shape], made: Sequence[Shape]) -> float:
    out = float(np.prod(made[0][1]))
    matrices = [shape for _, shape in given if len(shape) >= 2]
    if kind in _GATES and len(matrices) > 2:
        # The steps are [length, batch, features], the two weights [directions, gates, features].
        gates = _GATES[kind] * made[0][1][-1]
        weights = [float(np.prod(shape)) for shape in matrices[1:] if len(shape) == 3 and shape[1] == gates]
        return 2 * float(np.prod(matrices[0][:2])) * sum(weights[-2:])
    if "ConvTranspose" in kind and len(matrices) > 1:
        return 2 * float(np.prod(matrices[0])) * float(np.prod(matrices[1][1:]))
    if "Conv" in kind and len(matrices) > 1:
        return 2 * out * float(np.prod(matrices[1][1:]))
    if ("MatMul" in kind or "Gemm" in kind) and len(matrices) > 1:
        return 2 * out * matrices[0][-1]
    return out
