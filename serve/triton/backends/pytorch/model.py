"""Triton's `pytorch` backend for TorchScript, for a Triton that has only the Python backend.

It takes the files and the names that the C++ backend of that name takes, on the CPU: model.pt; inputs named after the
arguments of `forward`, or NAME__0, NAME__1 and so on by position; outputs in the order of config.pbtxt, or by such
positions. A TorchScript file is run by PyTorch's own interpreter; no Python code of it is. INTRA_OP_THREAD_COUNT, 1 by
default, is kept within the instance's share of the cores that SERVE_CORES counts.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

POSITION = re.compile(r"__(\d+)$")


class TritonPythonModel:
    """One instance: a process with a module of its own."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open model.pt of the version folder."""
        config = json.loads(args["model_config"])
        if config.get("platform") == "torch_aoti":
            raise RuntimeError("an AOTInductor package needs Triton's own pytorch backend, of release 25.06 or newer")
        name = config["default_model_filename"] or "model.pt"
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RuntimeError(f"default_model_filename {name!r} leads out of the version's folder")
        path = Path(args["model_repository"]) / args["model_version"] / name
        if not path.is_file():
            raise RuntimeError(f"{path} is missing")
        if args["model_instance_kind"] == "GPU":
            raise RuntimeError("instance_group asks for KIND_GPU, and this backend runs on CPUs: use KIND_CPU")
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        share = share_of_cores(config)
        torch.set_num_threads(max(1, min(int(parameters.get("INTRA_OP_THREAD_COUNT", "1")), share)))
        torch.set_num_interop_threads(share)  # else as many as the machine has cores, where a file forks
        self.module = torch.jit.load(str(path), map_location="cpu").eval()
        self.batched = int(config["max_batch_size"]) > 0
        arguments = [argument.name for argument in self.module.forward.schema.arguments[1:]]
        self.inputs = ordered([tensor["name"] for tensor in config["input"]], arguments)
        self.outputs = ordered([tensor["name"] for tensor in config["output"]], [])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run the requests that the dynamic batcher put together as one batch; each alone when that fails."""
        if self.batched and len(requests) > 1:
            try:
                return self._together(requests)
            except Exception:  # one of them is at fault: the others must not pay for it
                pb_utils.Logger.log_verbose("a batch failed, its requests are run one by one")
        return [self._alone(request) for request in requests]

    def _alone(self, request: Any) -> Any:
        try:
            outputs = self._run([array_of(request, name) for name in self.inputs])
            return response(request, dict(zip(self.outputs, outputs, strict=True)))
        except Exception as err:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"PyTorch: {err}"))

    def _together(self, requests: Sequence[Any]) -> list[Any]:
        feeds = [[array_of(request, name) for name in self.inputs] for request in requests]
        outputs = self._run([np.concatenate(arrays) for arrays in zip(*feeds, strict=True)])
        sizes = [len(feed[0]) for feed in feeds]
        if any(len(array) != sum(sizes) for array in outputs):
            raise ValueError("an output does not have the batch's length")
        ends = np.cumsum(sizes).tolist()
        return [
            response(request, {n: a[end - size : end] for n, a in zip(self.outputs, outputs, strict=True)})
            for request, size, end in zip(requests, sizes, ends, strict=True)
        ]

    def _run(self, arrays: Sequence[Any]) -> list[Any]:
        with torch.inference_mode():
            made = self.module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
        tensors = [made] if isinstance(made, torch.Tensor) else list(made)
        return [tensor.numpy() for tensor in tensors]


def share_of_cores(config: Mapping[str, Any]) -> int:
    """Of this instance, at least one."""
    here = len(os.sched_getaffinity(0))
    cores = max(1, min(here, int(os.environ.get("SERVE_CORES", here))))
    instances = max(1, sum(int(group.get("count", 1)) for group in config.get("instance_group", [])))
    return max(1, cores // instances)


def array_of(request: Any, name: str) -> Any:
    """An input as an array that PyTorch may take as its own."""
    array = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    return array if array.flags.writeable else array.copy()


def response(request: Any, arrays: Mapping[str, Any]) -> Any:
    """The answer with the outputs that are asked for."""
    wanted = [name for name in request.requested_output_names() if name in arrays]
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.ascontiguousarray(arrays[name])) for name in wanted])


def ordered(names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The names in the order of the arguments, of their positions, or as they stand.

    Raises:
        RuntimeError: some say a position, or an argument, and others don't.
    """
    positions = [POSITION.search(name) for name in names]
    if all(positions) and names:
        return sorted(names, key=lambda name: int(POSITION.search(name)[1]))  # type: ignore[index]
    if any(positions):
        raise RuntimeError(f"some of {list(names)} end in a position such as __0, and others do not")
    if not arguments:
        return list(names)
    if sorted(names) != sorted(arguments):
        raise RuntimeError(f"config.pbtxt names the inputs {sorted(names)}, forward has {list(arguments)}")
    return list(arguments)
