"""Run an ONNX file with ONNX Runtime on a GPU: tensors stay there, and a fall back to the CPU is an error."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort

from compress.errors import RecipeError, StageError, first_line
from compress.model import Arrays, OnnxModel
from compress.model.watched import Watched
from compress.runtime.backends.onnxrt import WRONG_IN_HALF, is_half
from compress.runtime.device import accelerator, new_stream, stream_handle

__all__ = ["OnnxDeviceBackend", "ProviderOptions", "not_recorded"]

NAMES = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
SHOWN = {"cpu": "CPU", "cuda": "CUDA", "tensorrt": "TensorRT"}
UNRECORDED = "cannot use the graph capture feature"  # in its words for a graph of which some runs on the CPU
CAPTURE_RUNS = 3  # of which ONNX Runtime captures one and replays the next


@dataclass(frozen=True)
class ProviderOptions:
    """What ONNX Runtime runs on.

    Attributes:
        provider: "cuda", "tensorrt" (what it does not take runs on CUDA), or "cpu".
        cuda_graphs: record the GPU's work once for each shape, and replay it; all of the graph must run on CUDA.
        tf32: let products of float32 round to 11 bits on the tensor cores.
        engine_cache: a folder where TensorRT's engines are kept.
        threads: of what runs on the CPU.
        channels_last: of the CUDA provider: lay images out as its tensor cores read them, and add a convolution's bias
            in the same kernel; neither is ONNX Runtime's default.
    """

    provider: Literal["cpu", "cuda", "tensorrt"] = "cuda"
    cuda_graphs: bool = False
    tf32: bool = True
    engine_cache: Path | None = None
    threads: int = 1
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.cuda_graphs and self.provider == "cpu":
            raise RecipeError(
                "can't record CUDA graphs", why="the provider is the CPU", mend="add --device cuda, or leave it out"
            )

    def chain(self, stream: int) -> list[tuple[str, dict[str, str]]]:
        """The providers in their order, each with its options; the CPU, last, is for what moves shapes about."""
        shared = {"device_id": "0", "user_compute_stream": str(stream)} if stream else {"device_id": "0"}
        cuda = shared | {
            "cudnn_conv_algo_search": "EXHAUSTIVE",
            "use_tf32": str(int(self.tf32)),
            "enable_cuda_graph": str(int(self.cuda_graphs and self.provider == "cuda")),
        }
        if self.channels_last:
            cuda |= {"prefer_nhwc": "1", "fuse_conv_bias": "1"}
        trt = shared | {"trt_cuda_graph_enable": str(int(self.cuda_graphs))}
        if self.engine_cache is not None:
            trt |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(self.engine_cache)}
        chains = {
            "cpu": [],
            "cuda": [(NAMES["cuda"], cuda)],
            "tensorrt": [(NAMES["tensorrt"], trt), (NAMES["cuda"], cuda)],
        }
        return [*chains[self.provider], (NAMES["cpu"], {})]


class OnnxDeviceBackend:
    """ONNX Runtime with inputs and outputs bound on the device.

    Args:
        model: the file.
        options: what to run it on.

    Raises:
        StageError: the provider is not in this onnxruntime, or does not start, or there is no GPU.
    """

    def __init__(self, model: OnnxModel, options: ProviderOptions | None = None) -> None:
        self._options = options or ProviderOptions()
        wanted = NAMES[self._options.provider]
        if wanted not in ort.get_available_providers():
            raise StageError(
                f"can't run {model.path.name} on {SHOWN[self._options.provider]}",
                why=f"this onnxruntime {ort.__version__} has only {', '.join(ort.get_available_providers())}",
                mend="in an environment of its own: pip install -c constraints.txt -e '.[compress,gpu]'",
            )
        on_gpu = self._options.provider != "cpu"
        self._stream = new_stream(accelerator()) if on_gpu else None
        self._where = "cuda" if on_gpu else "cpu"
        if on_gpu and hasattr(ort, "preload_dlls"):
            ort.preload_dlls()  # CUDA and cuDNN from the packages that torch brought
        self._session = _open(model.path, self._options, stream_handle(self._stream))
        self.cpu_nodes = _nodes_on_cpu(self._session) if on_gpu else {}
        if self._options.cuda_graphs and self._options.provider == "cuda" and self.cpu_nodes:
            raise not_recorded(model.path.name, self.cpu_nodes)
        self._watched = Watched(model.path)
        self._graphs = 0
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._kinds = {output.name: output.type for output in self._session.get_outputs()}

    @property
    def runtime(self) -> str:
        graphs = ", CUDA graph" if self._options.cuda_graphs else ""
        layout = ", channels-last" if self._options.channels_last else ""
        return f"ONNX Runtime {SHOWN[self._options.provider]}{layout}{graphs}"

    @property
    def emulated(self) -> bool:
        return False

    @property
    def stream(self) -> Any:
        """What its work is enqueued on; None on the CPU."""
        return self._stream

    @property
    def provider_options(self) -> Mapping[str, Any]:
        """What ONNX Runtime says that it runs with, by provider."""
        found: Mapping[str, Any] = self._session.get_provider_options()
        return found

    def infer(self, inputs: Arrays) -> Arrays:
        binding = self._bound(inputs, {})
        self._watched.call(lambda run: self._session.run_with_iobinding(binding, self._asked(run)))
        binding.synchronize_outputs()
        return dict(zip(self._outputs, binding.copy_outputs_to_cpu(), strict=True))

    def _asked(self, run: ort.RunOptions) -> ort.RunOptions:
        if self._options.cuda_graphs:
            run.add_run_config_entry("gpu_graph_id", "-1")  # record nothing
        return run

    def prepared(self, inputs: Arrays) -> Callable[[], None]:
        """The inputs on the device, room for the outputs there: each call runs the model once and copies nothing.

        Its work is enqueued on `stream`. Inputs of another shape want a preparation of their own.
        """
        shapes = {name: array.shape for name, array in self.infer(inputs).items()}
        binding = self._bound(inputs, shapes)
        run = ort.RunOptions()
        if self._options.cuda_graphs:
            self._graphs += 1  # what is recorded writes to this preparation's places alone
            run.add_run_config_entry("gpu_graph_id", str(self._graphs))
        if self._where == "cuda":
            run.add_run_config_entry("disable_synchronize_execution_providers", "1")
        for _ in range(CAPTURE_RUNS):
            self._session.run_with_iobinding(binding, run)
        return lambda: self._session.run_with_iobinding(binding, run)

    def _bound(self, inputs: Arrays, outputs: Mapping[str, tuple[int, ...]]) -> Any:
        binding = self._session.io_binding()
        for name, values in inputs.items():
            held = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values), self._where, 0)
            binding.bind_ortvalue_input(name, held)
        for name in self._outputs:
            if name in outputs:  # a CUDA graph writes to the same place each time
                kind = ort.OrtValue.ortvalue_from_shape_and_type(
                    list(outputs[name]), _dtype(self._kinds[name]), self._where, 0
                )
                binding.bind_ortvalue_output(name, kind)
            else:
                binding.bind_output(name, self._where, 0)
        return binding


def not_recorded(file: str, on_cpu: Mapping[str, int]) -> StageError:
    """Why there are no CUDA graphs of a file, by the nodes of each kind that the CPU runs."""
    return StageError(
        f"can't record CUDA graphs of {file}",
        why=f"{sum(on_cpu.values())} of its nodes run on the CPU ({_listed(on_cpu)})",
        mend="leave --cuda-graphs out",
    )


def _dtype(kind: str) -> Any:
    names = {"float": np.float32, "double": np.float64, "float16": np.float16, "bool": np.bool_}
    text = kind.removeprefix("tensor(").removesuffix(")")
    return names.get(text) or np.dtype(text).type


def _open(path: Path, options: ProviderOptions, stream: int) -> ort.InferenceSession:
    asked = ort.SessionOptions()
    asked.intra_op_num_threads = options.threads
    asked.inter_op_num_threads = 1
    asked.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    with _said() as said:
        try:
            disabled = list(WRONG_IN_HALF) if is_half(path) else []
            found = ort.InferenceSession(
                str(path), asked, providers=options.chain(stream), disabled_optimizers=disabled
            )
        except Exception as err:  # ONNX Runtime's own exception classes have no common base but this
            if options.cuda_graphs and UNRECORDED in str(err):  # it does not say which nodes
                raise not_recorded(
                    path.name, _nodes_on_cpu(_open(path, dataclasses.replace(options, cuda_graphs=False), stream))
                ) from err
            raise StageError(
                f"ONNX Runtime can't load {path.name} on {SHOWN[options.provider]}",
                why=first_line(err),
                mend="see docs/gpu.md for the releases of CUDA and cuDNN that go together",
            ) from err
    wanted = NAMES[options.provider]
    if wanted not in found.get_providers():
        reasons = [line for line in said() if "rror" in line or "ailed" in line or "equire" in line]
        raise StageError(
            f"ONNX Runtime fell back to the CPU instead of running {path.name} on {SHOWN[options.provider]}",
            why=(reasons or said() or ["it does not say why"])[-1].strip(),
            mend="see docs/gpu.md for the releases of CUDA and cuDNN that go together",
        )
    return found


@contextlib.contextmanager
def _said() -> Iterator[Callable[[], list[str]]]:
    """What C++ writes to stderr meanwhile: ONNX Runtime tells only there why a provider does not start."""
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)
        lines: list[str] = []
        try:
            yield lambda: lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            lines += kept.read().splitlines()


def _nodes_on_cpu(session: ort.InferenceSession) -> dict[str, int]:
    """How many nodes of each kind the CPU runs."""
    groups = session.get_provider_graph_assignment_info()
    nodes = [node for group in groups if group.ep_name == NAMES["cpu"] for node in group.get_nodes()]
    return dict(Counter(node.op_type for node in nodes).most_common())


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in list(counts.items())[:4])
