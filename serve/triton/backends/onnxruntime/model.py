"""Triton's `onnxruntime` backend for a Triton that has only the Python backend.

Triton takes this file for every model whose config.pbtxt says backend "onnxruntime". It reads the keys that the C++
backend of that name reads, so that one model repository is served by either:

    intra_op_thread_count, inter_op_thread_count   ONNX Runtime's threads; 0 or absent for a share of the cores
    execution_mode                                 "0" one operator after the other, "1" in parallel
    enable_mem_arena, enable_mem_pattern           "0" or "1"
    session.*                                      any session configuration entry of ONNX Runtime
    optimization { graph { level } }               -1 basic, 0 all, 1 extended, 2 none
    optimization { cuda { graphs } }               CUDA graphs, for instances on GPUs
    optimization { execution_accelerators }        gpu: "tensorrt" and "cuda", cpu: "openvino", with their parameters

Threads don't spin while they wait unless session.intra_op.allow_spinning says "1": instances share their cores. No
instance has more threads than its share of the cores that SERVE_CORES counts; ONNX Runtime itself would count those of
the machine, whatever a container may use.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

Array = np.ndarray[Any, Any]

ONNX_TYPES = {
    "TYPE_BOOL": "tensor(bool)", "TYPE_UINT8": "tensor(uint8)", "TYPE_UINT16": "tensor(uint16)",
    "TYPE_UINT32": "tensor(uint32)", "TYPE_UINT64": "tensor(uint64)", "TYPE_INT8": "tensor(int8)",
    "TYPE_INT16": "tensor(int16)", "TYPE_INT32": "tensor(int32)", "TYPE_INT64": "tensor(int64)",
    "TYPE_FP16": "tensor(float16)", "TYPE_FP32": "tensor(float)", "TYPE_FP64": "tensor(double)",
    "TYPE_STRING": "tensor(string)",
}  # fmt: skip
LEVELS = {
    "-1": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "0": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "1": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "2": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class MissingInputError(ValueError):
    """A request lacks an input; Triton notices it only where none is optional."""


class TritonPythonModel:
    """One instance: a process with a session of its own."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open model.onnx of the version folder and hold it against config.pbtxt."""
        config = json.loads(args["model_config"])
        name = config["default_model_filename"] or "model.onnx"
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RuntimeError(f"default_model_filename {name!r} leads out of the version's folder")
        path = Path(args["model_repository"]) / args["model_version"] / name
        if not path.is_file():
            raise RuntimeError(f"{path} is missing")
        if config.get("model_transaction_policy", {}).get("decoupled"):
            raise RuntimeError("config.pbtxt says decoupled, and ONNX Runtime gives one answer to each request")
        self.batched = int(config["max_batch_size"]) > 0
        gpu = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        self.session = onnxruntime.InferenceSession(
            str(path), session_options(config), providers=providers(config, gpu)
        )
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.optional = {tensor["name"] for tensor in config["input"] if tensor.get("optional")}
        self.outputs = [tensor["name"] for tensor in config["output"]]
        self.strings = {tensor["name"] for tensor in config["input"] if tensor["data_type"] == "TYPE_STRING"}
        given = [*self.session.get_inputs(), *self.session.get_overridable_initializers()]
        check("input", config["input"], given, batched=self.batched)
        needed = {node.name for node in self.session.get_inputs()} & self.optional
        if needed:
            raise RuntimeError(f"config.pbtxt says optional of {sorted(needed)}, and model.onnx has no value for it")
        check("output", config["output"], self.session.get_outputs(), batched=self.batched)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run the requests that the dynamic batcher put together, each with [n, …] inputs, as one batch."""
        if self.batched and len(requests) > 1:
            try:
                return self._together(requests)
            except Exception:  # one of them is at fault: the others must not pay for it
                pb_utils.Logger.log_verbose("a batch failed, its requests are run one by one")
        return [self._alone(request) for request in requests]

    def _alone(self, request: Any) -> Any:
        try:
            wanted = self._wanted(request)
            arrays = self.session.run(wanted, self._feed(request))
        except MissingInputError as err:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(err), pb_utils.TritonError.INVALID_ARG))
        except Exception as err:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"ONNX Runtime: {err}"))
        return pb_utils.InferenceResponse([pb_utils.Tensor(*pair) for pair in zip(wanted, arrays, strict=True)])

    def _together(self, requests: Sequence[Any]) -> list[Any]:
        feeds = [self._feed(request) for request in requests]
        if len({frozenset(feed) for feed in feeds}) > 1:
            raise ValueError("some requests leave an optional input out")
        wanted = [self._wanted(request) for request in requests]
        every = [name for name in self.outputs if any(name in names for names in wanted)]
        batch = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
        outputs = dict(zip(every, self.session.run(every, batch), strict=True))
        sizes = [len(next(iter(feed.values()))) for feed in feeds]
        if any(len(array) != sum(sizes) for array in outputs.values()):
            raise ValueError("an output does not have the batch's length")
        responses, start = [], 0
        for names, size in zip(wanted, sizes, strict=True):
            part = slice(start, start + size)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(name, outputs[name][part]) for name in names]))
            start += size
        return responses

    def _feed(self, request: Any) -> dict[str, Array]:
        feed = {}
        for name in self.inputs:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is None:
                if name in self.optional:  # the initializer of that name holds
                    continue
                raise MissingInputError(f"the request has no input {name!r}")
            array = tensor.as_numpy()
            if name in self.strings:  # Triton has bytes, ONNX Runtime wants text
                texts = [value.decode("utf-8") if isinstance(value, bytes) else value for value in array.ravel()]
                array = np.array(texts, np.object_).reshape(array.shape)
            feed[name] = array
        return feed

    def _wanted(self, request: Any) -> list[str]:
        names = set(request.requested_output_names())
        return [name for name in self.outputs if name in names]


def session_options(config: Mapping[str, Any]) -> Any:
    """ONNX Runtime's options, from the keys of the C++ backend."""
    parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    parallel = number(parameters, "execution_mode", "0", most=1) == 1
    options.intra_op_num_threads, options.inter_op_num_threads = threads(config, parameters, parallel=parallel)
    modes = onnxruntime.ExecutionMode
    options.execution_mode = modes.ORT_PARALLEL if parallel else modes.ORT_SEQUENTIAL
    options.enable_cpu_mem_arena = number(parameters, "enable_mem_arena", "1", most=1) == 1
    options.enable_mem_pattern = number(parameters, "enable_mem_pattern", "1", most=1) == 1
    level = config.get("optimization", {}).get("graph", {}).get("level", 0)
    options.graph_optimization_level = LEVELS[str(level)]
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    entries |= {key: value for key, value in parameters.items() if key.startswith("session.")}
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def threads(config: Mapping[str, Any], parameters: Mapping[str, str], *, parallel: bool) -> tuple[int, int]:
    """Of this instance, within an operator and side by side: together no more than its share of the cores."""
    instances = max(1, sum(int(group.get("count", 1)) for group in config.get("instance_group", [])))
    share = max(1, cores() // instances)
    intra = number(parameters, "intra_op_thread_count", "0") or share
    inter = number(parameters, "inter_op_thread_count", "0") or share
    if intra > share:
        pb_utils.Logger.log_warn(f"{intra} threads are asked for, {instances} instances share {cores()} cores: {share}")
    inter = min(inter, share) if parallel else 1
    return max(1, min(intra, share // inter)), inter


def cores() -> int:
    """That this process may use, and its Triton."""
    here = len(os.sched_getaffinity(0))
    return max(1, min(here, int(os.environ.get("SERVE_CORES", here))))


def number(parameters: Mapping[str, str], name: str, otherwise: str, most: int = 2**31 - 1) -> int:
    """A parameter that is a number; anything else is refused here, as it may be refused or misread elsewhere."""
    text = parameters.get(name, otherwise)
    if not (text.isascii() and text.isdecimal() and int(text) <= most):
        raise RuntimeError(f"the parameter {name} is {text!r}, and a number up to {most} is wanted")
    return int(text)


def providers(config: Mapping[str, Any], gpu: int | None) -> list[Any]:
    """ONNX Runtime's execution providers for an instance on that GPU, or on the CPU, the preferred one first.

    Raises:
        RuntimeError: one is asked for that the installed ONNX Runtime lacks; falling back would hide it.
    """
    optimization = config.get("optimization", {})
    accelerators = optimization.get("execution_accelerators", {})
    asked = accelerators.get("gpu_execution_accelerator" if gpu is not None else "cpu_execution_accelerator", [])
    device = {"device_id": str(gpu)}
    found: list[tuple[str, dict[str, str]]] = []
    cuda: dict[str, str] = {}
    for accelerator in asked:
        name, parameters = accelerator["name"], dict(accelerator.get("parameters", {}))
        if name == "tensorrt":
            found.append(("TensorrtExecutionProvider", device | tensorrt_options(parameters)))
        elif name == "cuda":
            cuda = parameters
        elif name == "openvino":
            found.append(("OpenVINOExecutionProvider", parameters))
        else:
            raise RuntimeError(f"execution_accelerators names {name!r}; known are tensorrt, cuda and openvino")
    if gpu is not None:
        graphs = {"enable_cuda_graph": "1"} if optimization.get("cuda", {}).get("graphs") else {}
        found.append(("CUDAExecutionProvider", device | graphs | cuda))
    for name, _ in found:
        if name not in onnxruntime.get_available_providers():
            why = (
                "instance_group asks for KIND_GPU" if name.startswith("CUDA") else "execution_accelerators asks for it"
            )
            raise RuntimeError(f"the installed ONNX Runtime has no {name}, and {why}")
    return [*found, "CPUExecutionProvider"]


def tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    """The C++ backend's parameters of the TensorRT provider as that provider's own options."""
    options = {key: value for key, value in parameters.items() if key.startswith("trt_")}
    if "max_workspace_size_bytes" in parameters:
        options["trt_max_workspace_size"] = parameters["max_workspace_size_bytes"]
    precision = parameters.get("precision_mode", "FP32")
    if precision in ("FP16", "INT8"):
        options[f"trt_{precision.lower()}_enable"] = "1"
    return options


def check(what: str, declared: Sequence[Mapping[str, Any]], nodes: Sequence[Any], *, batched: bool) -> None:
    """Raise RuntimeError unless config.pbtxt's tensors are those of the ONNX file; outputs may be left out."""
    have = {node.name: node for node in nodes}
    names = {tensor["name"] for tensor in declared}
    if not names and what == "output":
        raise RuntimeError("config.pbtxt declares no output")
    if names - have.keys() or (what == "input" and have.keys() - names):
        raise RuntimeError(f"config.pbtxt names the {what}s {sorted(names)}, model.onnx has {sorted(have)}")
    for tensor in declared:
        reshape = tensor.get("reshape")
        dims = [int(dim) for dim in (tensor["dims"] if reshape is None else reshape.get("shape", []))]
        dims = [-1, *dims] if batched else dims
        node = have[tensor["name"]]
        shape = [dim if isinstance(dim, int) else -1 for dim in node.shape]
        fits = len(dims) == len(shape) and all(
            -1 in pair or len(set(pair)) == 1 for pair in zip(dims, shape, strict=True)
        )
        if node.type != ONNX_TYPES.get(tensor["data_type"]) or not fits:
            declaration = f"{tensor['data_type']}{dims}"
            raise RuntimeError(
                f"config.pbtxt says that {what} {node.name!r} is {declaration}, model.onnx has {node.type}{shape}"
            )
