"""What a model costs before it answers: memory and loading time, each in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact import Runtime
from compress.errors import ResourceError, StageError
from compress.formats.files import size_of
from compress.model import OnnxModel
from compress.model.watched import without_end
from compress.runtime.backends import openvino_kernels
from compress.runtime.backends.onnxrt import is_emulated, is_half
from compress.vetting.loops import loop_seconds, may_not_end

__all__ = ["EndedError", "Footprint", "footprint"]

# Imports first, so that what is added is the model's; the high-water mark is the kernel's own.
_PROGRAM = """
import json, runpy, sys, time
import numpy as np
from pathlib import Path

def status(name):
    if not Path("/proc/self/status").exists():
        return None
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None

path, threads, specs = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
OPENING
load_ms = 1000 * (time.perf_counter() - start)
usual, *others = [{name: np.zeros(shape, dtype) for name, dtype, shape in each} for each in specs]
for _ in range(2):  # the second plans its memory by what the first took
    run(usual)
peak = status("VmHWM")
for inputs in others:
    run(inputs)
print(json.dumps({"load_ms": load_ms, "peak": None if peak is None else max(0, peak - before)}))
"""
_OPENING: dict[Runtime, str] = {
    "onnxruntime": """
import onnxruntime as ort
ort.set_default_logger_severity(3)
options = ort.SessionOptions()
options.intra_op_num_threads = threads
if int(sys.argv[4]):
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
before = status("VmRSS")
start = time.perf_counter()
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
run = lambda inputs: session.run(None, inputs)
""",
    "openvino": """
sys.modules["openvino_telemetry"] = None  # OpenVINO's import would send an event, and write to the home folder
import openvino
before = status("VmRSS")
start = time.perf_counter()
core = openvino.Core()
graph = runpy.run_path(sys.argv[6])["with_sound_kernels"](core.read_model(path, config={"ENABLE_MMAP": False}))
session = core.compile_model(graph, "CPU", json.loads(sys.argv[5])).create_infer_request()
run = lambda inputs: session.infer(inputs, share_inputs=True)
""",
}


class EndedError(StageError):
    """The process that ran a model was ended by a signal: what runs it may end any process."""


@dataclass(frozen=True)
class Footprint:
    """Of one model.

    Attributes:
        load_ms: from the file to a session that is ready, in milliseconds.
        peak_memory_bytes: what loading it and running one sample of representative sizes adds to the process, at most;
            None where the system does not tell.
    """

    load_ms: float
    peak_memory_bytes: int | None


def footprint(model: OnnxModel, threads: int, others: Sequence[Mapping[str, int]] = ()) -> Footprint:
    """Load and run a file in a fresh process.

    Args:
        model: the file.
        threads: that it computes with.
        others: further sizes, by dimension, that it is run at; they count for nothing.

    Raises:
        StageError: it can't be run; an EndedError where that process was ended by it.
    """
    every = [model.signature.at(1), *others]
    specs = [[(spec.name, spec.dtype, spec.at(sizes)) for spec in model.signature.inputs] for sizes in every]
    program = _PROGRAM.replace("OPENING", _OPENING[model.runtime])
    command = [sys.executable, "-P", "-c", program, str(model.path), str(threads), json.dumps(specs)]
    command += [str(int(is_half(model.path))), json.dumps(_properties(model, threads)), openvino_kernels.__file__]
    seconds = loop_seconds() if may_not_end(model.path) else None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as err:
        raise without_end(model.path.name, err.timeout) from err
    if done.returncode:
        if done.returncode == -signal.SIGKILL or "bad_alloc" in done.stderr or "MemoryError" in done.stderr:
            raise ResourceError(
                "can't run the model in a process of its own",
                why=f"the system ended it, or gave it no more memory, with {_megabytes(model.path)} to load",
                mend="free some memory, or take a larger machine",
            )
        lines = done.stderr.strip().splitlines() if done.returncode > 0 else []
        lines = lines or [_ended(done.returncode)]
        why = lines[-1][:300]
        failed = EndedError if done.returncode < 0 else StageError
        raise failed("can't run the model in a process of its own", why=why, mend="report it with the model")
    found = json.loads(done.stdout)
    return Footprint(found["load_ms"], found["peak"])


def _properties(model: OnnxModel, threads: int) -> dict[str, Any]:
    if model.runtime != "openvino":
        return {}
    from compress.runtime.backends.openvino_cpu import OpenVinoOptions

    return OpenVinoOptions(threads=threads).properties("bf16" if is_emulated(model.path) else "fp32")


def _ended(code: int) -> str:
    return f"it ended by the signal {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"


def _megabytes(path: Path) -> str:
    return f"{size_of(path) / 1e6:,.1f} MB"
