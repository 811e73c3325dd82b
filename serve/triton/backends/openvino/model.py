"""Triton's `openvino` backend for a Triton that has only the Python backend.

Triton takes this file for every model whose config.pbtxt says backend "openvino". It reads the parameters that the C++
backend of that name reads, so that one model repository is served by either:

    NUM_STREAMS              requests that run side by side, over all instances: a number, AUTO or NUMA
    INFERENCE_NUM_THREADS    threads of all of them together, at most the cores that SERVE_CORES counts
    COMPILATION_NUM_THREADS  threads of the start, no more than those
    PERFORMANCE_HINT         LATENCY, THROUGHPUT or CUMULATIVE_THROUGHPUT
    HINT_BF16                YES computes float32 in BF16, on a CPU that multiplies it
    RESHAPE_IO_LAYERS        YES gives the file's inputs the dims of config.pbtxt
    ENABLE_BATCH_PADDING     YES fills a batch up where the file's own is of one size. The C++ backend gives every file
                             the batch max_batch_size, and answers no smaller one without this

There an instance is a request of one compiled model; here it is a process with a model of its own, which gets its share
of streams and threads. Without HINT_BF16 float32 is computed in float32, on every CPU.
"""

import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# OpenVINO's import would send an event, and write to the home folder.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
try:
    import openvino
except ImportError as err:
    raise RuntimeError(f"this Triton's Python has no OpenVINO: pip install the extra [openvino] ({err})") from err

Array = np.ndarray[Any, Any]

TYPES = {
    "TYPE_BOOL": "boolean", "TYPE_UINT8": "u8", "TYPE_UINT16": "u16", "TYPE_UINT32": "u32", "TYPE_UINT64": "u64",
    "TYPE_INT8": "i8", "TYPE_INT16": "i16", "TYPE_INT32": "i32", "TYPE_INT64": "i64", "TYPE_FP16": "f16",
    "TYPE_FP32": "f32", "TYPE_FP64": "f64",
}  # fmt: skip
MOST_SHAPES = 4096
REDUCTIONS = {
    "ReduceL1": "reduce_l1", "ReduceL2": "reduce_l2", "ReduceMax": "reduce_max", "ReduceMean": "reduce_mean",
    "ReduceMin": "reduce_min", "ReduceProd": "reduce_prod", "ReduceSum": "reduce_sum",
}  # fmt: skip
HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")


class RefusedError(ValueError):
    """A request lacks an input, which Triton notices only where none is optional; or its sizes can't be done."""


class Shapes:
    """Which sizes of its inputs a graph can do, as far as its operators tell without values."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[tuple[str, tuple[int, ...]], ...], str] = OrderedDict()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises RefusedError where it can't do these."""
        key = tuple(sorted(shapes.items()))
        with self._lock:
            if key not in self._known:
                self._known[key] = self._tried(shapes)
                while len(self._known) > MOST_SHAPES:
                    self._known.popitem(last=False)
            why = self._known[key]
        if why:
            raise RefusedError(f"the model can't do inputs of these sizes: {why}")

    def _tried(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        try:
            self._graph.reshape({name: list(shape) for name, shape in shapes.items()})
        except Exception as err:
            return str(err) or "the graph can't do these sizes"
        return ""


class TritonPythonModel:
    """One instance: a process with a compiled model of its own."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the file of the version folder and hold it against config.pbtxt."""
        config = json.loads(args["model_config"])
        name = config["default_model_filename"] or "model.xml"
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RuntimeError(f"default_model_filename {name!r} leads out of the version's folder")
        path = Path(args["model_repository"]) / args["model_version"] / name
        if not path.is_file():
            raise RuntimeError(f"{path} is missing")
        if config.get("model_transaction_policy", {}).get("decoupled"):
            raise RuntimeError("config.pbtxt says decoupled, and OpenVINO gives one answer to each request")
        if args["model_instance_kind"] != "CPU":
            raise RuntimeError("instance_group asks for another kind than KIND_CPU, which is all that OpenVINO's has")
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self.most = int(config["max_batch_size"])
        core = openvino.Core()
        dims = {tensor["name"]: self._dims(tensor) for tensor in config["input"]}
        self.file = partial(opened, core, path, dims if yes(parameters, "RESHAPE_IO_LAYERS") else {})
        graph = self.file()
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        check("input", config["input"], graph.inputs, self._dims)
        check("output", config["output"], graph.outputs, self._dims)
        self.fixed = self._fixed_batch(graph, padding=yes(parameters, "ENABLE_BATCH_PADDING"))
        settings = properties(parameters, instances(config), core)
        self.compiled = partial(core.compile_model, device_name="CPU", config=settings)
        self.model = self.compiled(graph)
        self.renewing = threading.Lock()
        # To run what a graph can't do may end the process, and what was compiled fails at other sizes from then on.
        varies = any(int(dim) < 0 for tensor in config["input"] for dim in tensor["dims"])
        self.shapes = Shapes(graph) if varies else None
        ports = {name: at for at, port in enumerate(self.model.outputs) for name in port.names}
        self.ports = [ports[name] for name in self.outputs]
        self.streams = int(self.model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        self.local = threading.local()
        self.free = threading.Semaphore(self.streams)
        self.workers = ThreadPoolExecutor(self.streams) if self.streams > 1 else None

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Run the requests that the dynamic batcher put together, each with [n, …] inputs, as one batch.

        With several streams the batch is answered later, by a thread, and the next one is taken as soon as a stream is
        free: batches overlap.
        """
        if self.workers is None:
            return self._answers(requests)
        senders = [request.get_response_sender() for request in requests]
        self.free.acquire()
        self.workers.submit(self._answer_later, requests, senders)
        self.free.acquire()  # Triton brings the next batch when this returns: until a stream is free, it may grow
        self.free.release()
        return None

    def finalize(self) -> None:
        """Let what is under way be answered."""
        if self.workers is not None:
            self.workers.shutdown(wait=True)

    def _answer_later(self, requests: Sequence[Any], senders: Sequence[Any]) -> None:
        try:
            for sender, response in zip(senders, self._answers(requests), strict=True):
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        finally:
            self.free.release()

    def _answers(self, requests: Sequence[Any]) -> list[Any]:
        if self.most and len(requests) > 1:
            try:
                return self._together(requests)
            except Exception:  # one of them is at fault: the others must not pay for it
                pb_utils.Logger.log_verbose("a batch failed, its requests are run one by one")
        return [self._alone(request) for request in requests]

    def _alone(self, request: Any) -> Any:
        try:
            outputs = self._run(self._feed(request))
        except RefusedError as err:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(err), pb_utils.TritonError.INVALID_ARG))
        except Exception as err:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"OpenVINO: {err}"))
        return self._response(request, outputs)

    def _together(self, requests: Sequence[Any]) -> list[Any]:
        feeds = [self._feed(request) for request in requests]
        outputs = self._run({name: np.concatenate([feed[name] for feed in feeds]) for name in self.inputs})
        sizes = [len(feed[self.inputs[0]]) for feed in feeds]
        if any(len(array) != sum(sizes) for array in outputs.values()):
            raise ValueError("an output does not have the batch's length")
        responses, start = [], 0
        for request, size in zip(requests, sizes, strict=True):
            part = slice(start, start + size)
            responses.append(self._response(request, {name: array[part] for name, array in outputs.items()}))
            start += size
        return responses

    def _run(self, feed: dict[str, Array]) -> dict[str, Array]:
        model = self.model
        if getattr(self.local, "model", None) is not model:  # a request for each thread, and as many as streams
            self.local.model, self.local.request = model, model.create_infer_request()
        size = len(feed[self.inputs[0]]) if self.fixed else 0
        if size < self.fixed:
            missing = self.fixed - size
            feed = {
                name: np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
                for name, array in feed.items()
            }
        if self.shapes is not None:
            self.shapes.check({name: array.shape for name, array in feed.items()})
        try:
            self.local.request.start_async(feed, share_inputs=True)
            self.local.request.wait()
        except Exception:
            self._renew(model)
            raise
        found = [self.local.request.get_output_tensor(at).data for at in self.ports]
        # Copies: the request writes its next answers into the same memory.
        return {
            name: np.array(array[:size] if self.fixed else array)
            for name, array in zip(self.outputs, found, strict=True)
        }

    def _renew(self, failed: Any) -> None:
        """Take another compiled model: OpenVINO 2026.4 goes on failing at the sizes of before."""
        with self.renewing:
            if self.model is failed:
                self.model = self.compiled(self.file())

    def _response(self, request: Any, outputs: Mapping[str, Array]) -> Any:
        wanted = set(request.requested_output_names())
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, np.ascontiguousarray(outputs[name])) for name in self.outputs if name in wanted]
        )

    def _feed(self, request: Any) -> dict[str, Array]:
        feed = {}
        for name in self.inputs:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is None:
                raise RefusedError(f"the request has no input {name!r}")
            feed[name] = tensor.as_numpy()
        return feed

    def _dims(self, tensor: Mapping[str, Any]) -> list[int]:
        """As the file has them: with the batch, as far as there is one."""
        reshape = tensor.get("reshape")
        dims = [int(dim) for dim in (tensor["dims"] if reshape is None else reshape.get("shape", []))]
        return [-1, *dims] if self.most else dims

    def _fixed_batch(self, graph: Any, *, padding: bool) -> int:
        """The batch that the file takes alone, as Triton fills it up; 0 where it takes any."""
        sizes = {port.partial_shape[0].get_length() for port in graph.inputs if port.partial_shape[0].is_static}
        if not self.most or not sizes:
            return 0
        if sizes != {self.most} or not padding:
            raise RuntimeError(
                f"the file takes batches of {sorted(sizes)} alone: write max_batch_size: {min(sizes)}, and the "
                "parameter ENABLE_BATCH_PADDING: YES"
            )
        return self.most


def opened(core: Any, path: Path, dims: Mapping[str, Sequence[int]]) -> Any:
    """A file's graph, its inputs with these dims, if any."""
    graph = core.read_model(str(path), config={"ENABLE_MMAP": False})
    if dims:
        graph.reshape({name: list(each) for name, each in dims.items()})
    return with_sound_kernels(graph)


def with_sound_kernels(graph: Any) -> Any:
    """Write what OpenVINO 2026.4 computes wrong in a quantized graph otherwise, in place.

    - Reductions (means, sums, maxima, …) of three dimensions, mostly from some number of rows on: they are given a
      fourth one of 1 in front.
    - Maxima and minima of other numbers of dimensions whose answers are rounded to 8 bits: these are no longer joined
      to one operator.
    - Sums of 8 bits that stand for zero by another number than 0, in some graphs: these are sums of floats.
    - Constants put around 8 bits that stand for zero by another number than 0, also where that makes the graph
      fail to compile: they are put around floats.

    See `compress.runtime.backends.openvino_kernels`, with which the file was compared with ONNX Runtime.
    """
    every = graph.get_ordered_ops()
    if not any(op.get_type_name() == "FakeQuantize" for op in every):
        return graph
    parts = normalizations(every)
    for node in every:
        kind = node.get_type_name()
        constant = kind == "Pad" and node.get_attributes()["pad_mode"].lower() == "constant"
        if (constant or kind == "ReduceSum") and is_float(node):
            node.input(0).replace_source_output(apart(node.input_value(0)))
        if kind not in REDUCTIONS or not is_float(node):
            continue
        takers = list(node.output(0).get_target_inputs())  # before a new one is made
        rank, axes = node.input(0).get_partial_shape().rank, axes_of(node)
        if rank.is_static and rank.get_length() == 3 and axes is not None:
            below = sorted(axis % 3 + 1 for axis in axes)
            if below in ([3], [2, 3]) and node.get_name() in parts:  # of other axes OpenVINO writes them out again
                continue
            give(takers, of_four(node, below), node)
        elif kind in ("ReduceMax", "ReduceMin"):
            give(takers, apart(node.output(0)), node)
    graph.validate_nodes_and_infer_types()
    return graph


def is_float(node: Any) -> bool:
    return bool(node.get_input_element_type(0).get_type_name() == "f32")


def of_four(node: Any, below: Sequence[int]) -> Any:
    """A reduction of three dimensions, of four; `below` are its axes there."""
    from openvino import opset13 as ops

    wide = ops.unsqueeze(node.input_value(0), ops.constant([0]))
    # Over the added dimension, too: otherwise OpenVINO takes the mean first, and adds the dimension behind it.
    made = getattr(ops, REDUCTIONS[node.get_type_name()])(wide, ops.constant([0, *below]), keep_dims=True)
    return ops.squeeze(made, ops.constant([0] if node.get_attributes()["keep_dims"] else [0, *below])).output(0)


def apart(value: Any) -> Any:
    """The value as it is, behind an operator that OpenVINO neither leaves out nor computes in 8 bits."""
    from openvino import opset13 as ops

    return ops.minimum(value, ops.constant(float("inf"), dtype="float32")).output(0)


def give(takers: Sequence[Any], value: Any, node: Any) -> None:
    """Let what took a node's output take this value, by the same name."""
    value.get_tensor().set_names(node.output(0).get_names())
    for taker in takers:
        taker.replace_source_output(value)


def axes_of(reduction: Any) -> list[int] | None:
    """The axes of a reduction, also of a GlobalAveragePool, whose axes are a range; None where they are not told."""
    axes = reduction.input_value(1)
    if axes.get_node().get_type_name() == "Constant":
        return [int(axis) for axis in axes.get_node().get_vector()]
    if axes.get_node().get_type_name() != "Range" or axes.get_partial_shape().is_dynamic:
        return None
    first, _, step = (value.get_node() for value in axes.get_node().input_values())
    if any(node.get_type_name() != "Constant" for node in (first, step)):
        return None
    start, by = int(first.get_vector()[0]), int(step.get_vector()[0])
    return [start + by * at for at in range(axes.get_shape()[0])]


def normalizations(every: Sequence[Any]) -> set[str]:
    """Names of the means that are parts of normalizations which are written out: OpenVINO makes one operator of each.

    That is, of squares by whose root their base is divided, and of what the base is apart from and nothing else takes.
    """
    found: set[str] = set()
    for mean in every:
        if mean.get_type_name() != "ReduceMean":
            continue
        square = mean.input_value(0).get_node()
        if square.get_type_name() not in ("Power", "Multiply"):
            continue
        base = square.input_value(0)
        roots = [root for more in takers(mean, "Add") for root in takers(more, "Sqrt", "Power")]
        roots += [inverse for root in roots for inverse in takers(root, "Power", "Divide")]
        ends = [end for root in roots for end in takers(root, "Divide", "Multiply") if base in end.input_values()]
        if not ends:
            continue
        found.add(mean.get_name())
        apart = base.get_node()
        ours = {node.get_name() for node in (square, *ends)}
        if apart.get_type_name() == "Subtract" and all(each.get_name() in ours for each in takers(apart)):
            taken = apart.input_value(1).get_node()
            if len(takers(taken)) == 1:
                found.add(taken.get_name())
    return found


def takers(node: Any, *kinds: str) -> list[Any]:
    """What reads a node; of these kinds, if any are named."""
    found = [taker.get_node() for output in node.outputs() for taker in output.get_target_inputs()]
    return [each for each in found if not kinds or each.get_type_name() in kinds]


def instances(config: Mapping[str, Any]) -> int:
    """Processes that share what the parameters give to the model."""
    return max(1, sum(int(group.get("count", 1)) for group in config.get("instance_group", [])))


def properties(parameters: Mapping[str, str], share: int, core: Any) -> dict[str, Any]:
    """OpenVINO's properties for one of so many instances.

    Raises:
        RuntimeError: a value that the C++ backend refuses, too, or what this one can't do.
    """
    for name in ("CPU_EXTENSION_PATH", "TARGET_DEVICE"):
        if parameters.get(name, "").upper() not in ("", "CPU"):
            raise RuntimeError(
                f"the parameter {name} is {parameters[name]!r}: the embedded Triton runs on the CPU alone"
            )
    most = cores()
    threads = number(parameters, "INFERENCE_NUM_THREADS") or most
    if threads > most:
        pb_utils.Logger.log_warn(f"INFERENCE_NUM_THREADS is {threads}, and there are {most} cores: {most}")
    found: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": max(1, min(threads, most) // share),
        "INFERENCE_PRECISION_HINT": "bf16" if yes(parameters, "HINT_BF16") else "f32",
        "ENABLE_CPU_PINNING": False,  # each process would pin its threads to the same cores
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    if parameters.get("HINT_BF16", "YES").lower() != "yes":
        raise RuntimeError(f"the parameter HINT_BF16 is {parameters['HINT_BF16']!r}, and YES or nothing is wanted")
    if yes(parameters, "HINT_BF16") and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise RuntimeError("the parameter HINT_BF16 is 'YES', and this CPU does not multiply BF16 in hardware")
    if compiling := number(parameters, "COMPILATION_NUM_THREADS"):
        found["COMPILATION_NUM_THREADS"] = min(compiling, most)
    hint = parameters.get("PERFORMANCE_HINT", "LATENCY").upper()
    if hint not in HINTS:
        raise RuntimeError(f"the parameter PERFORMANCE_HINT is {hint!r}, and one of {', '.join(HINTS)} is wanted")
    found["PERFORMANCE_HINT"] = hint
    streams = parameters.get("NUM_STREAMS", "").upper()
    if streams in ("AUTO", "NUMA"):
        found["NUM_STREAMS"] = streams
    elif streams:
        found["NUM_STREAMS"] = max(1, number(parameters, "NUM_STREAMS") // share)
    return found


def cores() -> int:
    """That this process may use, and its Triton: a container's quota is no affinity, which is all OpenVINO sees."""
    here = len(os.sched_getaffinity(0))
    return max(1, min(here, int(os.environ.get("SERVE_CORES", here))))


def number(parameters: Mapping[str, str], name: str) -> int:
    """A parameter that is a number, 0 where there is none."""
    text = parameters.get(name, "0")
    if not (text.isascii() and text.isdecimal() and int(text) < 2**31):
        raise RuntimeError(f"the parameter {name} is {text!r}, and a number is wanted")
    return int(text)


def yes(parameters: Mapping[str, str], name: str) -> bool:
    """Whether a parameter is YES, in any case."""
    return parameters.get(name, "").lower() == "yes"


def check(what: str, declared: Sequence[Mapping[str, Any]], ports: Sequence[Any], dims_of: Any) -> None:
    """Raise RuntimeError unless config.pbtxt's tensors are those of the file; outputs may be left out."""
    have = {name: port for port in ports for name in port.names}
    names = {tensor["name"] for tensor in declared}
    if not names and what == "output":
        raise RuntimeError("config.pbtxt declares no output")
    if names - have.keys() or (what == "input" and len(names) != len(ports)):
        raise RuntimeError(f"config.pbtxt names the {what}s {sorted(names)}, the file has {sorted(have)}")
    for tensor in declared:
        port, dims = have[tensor["name"]], dims_of(tensor)
        shape = [dim.get_length() if dim.is_static else -1 for dim in port.partial_shape]
        fits = len(dims) == len(shape) and all(
            -1 in pair or len(set(pair)) == 1 for pair in zip(dims, shape, strict=True)
        )
        kind = port.element_type.get_type_name()
        if kind != TYPES.get(tensor["data_type"]) or not fits:
            raise RuntimeError(
                f"config.pbtxt says that {what} {tensor['name']!r} is {tensor['data_type']}{dims}, the file has "
                f"{kind}{shape}"
            )
