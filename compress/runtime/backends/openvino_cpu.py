"""Run an ONNX file with OpenVINO on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compress.errors import MissingExtraError, RecipeError, StageError
from compress.model import Arrays, OnnxModel
from compress.model.inputs import in_calls, run_on
from compress.runtime.backends.onnxrt import is_emulated
from compress.runtime.backends.openvino_kernels import with_sound_kernels
from compress.runtime.machine import fast_bfloat16
from compress.vetting.loops import may_not_end

__all__ = ["OpenVinoBackend", "OpenVinoOptions", "check_sizes", "installed", "library"]

Precision = Literal["fp32", "bf16", "fp16"]
HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
TELEMETRY = "openvino_telemetry"


@dataclass(frozen=True)
class OpenVinoOptions:
    """How OpenVINO runs a file.

    Attributes:
        threads: of all streams together.
        streams: requests that it runs side by side; "auto" for its own choice.
        precision: what float32 is computed in. None is what the file is in: BF16 for a BF16 file, else FP32, which
            OpenVINO would leave for BF16 by itself where the CPU multiplies that.
        cache: a folder that keeps compiled models; None for no cache.
    """

    threads: int = 1
    streams: int | Literal["auto"] = 1
    precision: Precision | None = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        if self.threads < 1 or (self.streams != "auto" and self.streams < 1):
            raise RecipeError(
                "can't run OpenVINO so",
                why=f"it is asked for --threads {self.threads}, and for {self.streams} as the number of streams",
                mend="give 1 or more of both",
            )

    def properties(self, precision: Precision) -> dict[str, Any]:
        """For `Core.compile_model`."""
        return {
            "PERFORMANCE_HINT": "LATENCY" if self.streams == 1 else "THROUGHPUT",
            "NUM_STREAMS": "AUTO" if self.streams == "auto" else self.streams,
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": HINTS[precision],
            # Processes that each pin their threads pin them to the same cores.
            "ENABLE_CPU_PINNING": False,
            # Otherwise products with 8-bit weights alone have their other side rounded to 8 bits, too.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "CACHE_DIR": "" if self.cache is None else str(self.cache),
        }


def installed() -> bool:
    """Whether this environment has OpenVINO; it is not imported."""
    return importlib.util.find_spec("openvino") is not None


@functools.cache
def library() -> Any:
    """The package, imported without its telemetry: by itself it sends an event and writes to the home folder.

    For as long as the import lasts, the package that sends is one that can't be imported, for which OpenVINO has a
    stand-in that does nothing.

    Raises:
        MissingExtraError: it is not installed.
    """
    if not installed():
        raise MissingExtraError("can't run OpenVINO", module="openvino", extra="openvino")
    held = sys.modules.get(TELEMETRY)
    sys.modules[TELEMETRY] = None  # type: ignore[assignment]
    try:
        import openvino
    except ImportError as err:
        raise StageError(
            "can't load OpenVINO", why=_reason(err), mend="install it again: pip install --force-reinstall openvino"
        ) from err
    finally:
        sys.modules.pop(TELEMETRY)
        if held is not None:
            sys.modules[TELEMETRY] = held
    return openvino


@functools.cache
def _core() -> Any:
    return library().Core()


class OpenVinoBackend:
    """OpenVINO on the CPU, at any size of the dimensions that vary.

    Args:
        model: the file; one of someone else's has been vetted (`compress.formats.onnx.read.vetted_onnx`).
        options: threads, streams and precision.

    Raises:
        MissingExtraError: OpenVINO is not installed.
        StageError: it can't run the file, or the CPU lacks the precision.
    """

    def __init__(self, model: OnnxModel, options: OpenVinoOptions | None = None) -> None:
        options = options or OpenVinoOptions()
        self._precision: Precision = options.precision or ("bf16" if is_emulated(model.path) else "fp32")
        _refuse_loops(model.path)
        core = _core()
        _refuse_emulation(model.path, self._precision, core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
        try:
            # Not mapped: what is mapped changes under a session when its file is written again.
            graph = core.read_model(str(model.path), config={"ENABLE_MMAP": False})
            self._compiled = core.compile_model(with_sound_kernels(graph), "CPU", options.properties(self._precision))
        except (RuntimeError, OSError) as err:
            raise StageError(
                f"OpenVINO can't load {model.path.name}",
                why=_reason(err),
                mend="run it with ONNX Runtime: --runtime onnxruntime",
            ) from err
        self._request = self._compiled.create_infer_request()
        self._signature, self._path = model.signature, model.path
        named = {name: number for number, port in enumerate(self._compiled.outputs) for name in port.names}
        self._outputs = {spec.name: named.get(spec.name, number) for number, spec in enumerate(model.signature.outputs)}

    @property
    def runtime(self) -> str:
        return "OpenVINO" if self._precision == "fp32" else f"OpenVINO, {self._precision.upper()}"

    @property
    def emulated(self) -> bool:
        return False

    @property
    def properties(self) -> dict[str, Any]:
        """What OpenVINO says that it runs with."""
        names = ("NUM_STREAMS", "INFERENCE_NUM_THREADS", "INFERENCE_PRECISION_HINT", "ENABLE_CPU_PINNING")
        return {name: self._compiled.get_property(name) for name in names}

    def check_sizes(self, inputs: Arrays) -> None:
        """Raise StageError where the graph can't do inputs of these sizes; see the function."""
        check_sizes(self._path, {name: values.shape for name, values in inputs.items()})

    def infer(self, inputs: Arrays) -> Arrays:
        return in_calls(self._signature, inputs, self._run)

    def _run(self, inputs: Arrays) -> Arrays:
        found = run_on(inputs, lambda: self._infer(inputs))
        return {name: found[number] for name, number in self._outputs.items()}

    def _infer(self, inputs: Arrays) -> Any:
        try:
            return self._request.infer(inputs, share_inputs=True)
        except RuntimeError as err:
            raise RuntimeError(_reason(err)) from err


def check_sizes(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise StageError where the graph can't do inputs of these sizes, as far as OpenVINO's operators tell beforehand.

    To run one that can't may end the process: OpenVINO 2026.4 fails without a bound in a pooling of less than its
    window.
    """
    try:
        graph = _core().read_model(str(path), config={"ENABLE_MMAP": False})
        graph.reshape({name: list(shape) for name, shape in shapes.items()})
    except (RuntimeError, OSError) as err:
        raise StageError(
            f"OpenVINO can't run {path.name} at these sizes",
            why=_reason(err),
            mend="run it with ONNX Runtime: --runtime onnxruntime",
        ) from err


def _refuse_loops(path: Path) -> None:
    """OpenVINO is asked in this process, and can't be told to stop."""
    if may_not_end(path):
        raise StageError(
            f"can't run {path.name} with OpenVINO",
            why="it has a loop, and a run of OpenVINO that does not end can't be given up",
            mend="run it with ONNX Runtime: --runtime onnxruntime",
        )


def _refuse_emulation(path: Path, precision: Precision, capabilities: list[str]) -> None:
    """OpenVINO takes any hint, and computes in float32 where the CPU has nothing else: a row by that name would lie."""
    has = precision.upper() in capabilities and (precision != "bf16" or fast_bfloat16())
    if precision != "fp32" and not has:
        raise StageError(
            f"can't run {path.name} in {precision.upper()} with OpenVINO",
            why=f"this CPU does not multiply {precision.upper()} in hardware",
            mend="take FP32 here, or measure it where the CPU has AVX512-BF16 or AMX",
        )


def _reason(err: Exception) -> str:
    """The line that says what is wrong: OpenVINO puts where in its own source it was found before it."""
    lines = [line.strip(" -") for line in str(err).splitlines()]
    told = [line for line in lines if line and not re.match(r"(Exception from|Check '|FrontEnd API|Summary:)", line)]
    wanted = next((line for line in told if "No conversion rule" in line or "not supported" in line), None)
    return (wanted or next(iter(told), None) or type(err).__name__)[:300]
