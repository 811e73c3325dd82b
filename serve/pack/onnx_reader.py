"""What the runtime that serves them says of ONNX files, in a process of its own: a damaged file may take it down."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compress.artifact import RUNTIME_NAMES, Runtime
from compress.vetting.onnx_wire import Calls, OnnxFileError, vet_onnx

__all__ = ["OnnxFile", "OnnxTensor", "read_onnx"]

TIMEOUT_S = 300.0
# One line of JSON for each file, so that a file that ends the process does not take the others' answers along.
_PROGRAM = """
import json, sys
import onnxruntime as ort
ort.set_default_logger_severity(4)
options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
for path in sys.argv[1:]:
    try:
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        found = [[[n.name, n.type, n.shape] for n in nodes] for nodes in (session.get_inputs(), session.get_outputs())]
        print(json.dumps({"path": path, "tensors": found}), flush=True)
        del session
    except Exception as err:
        print(json.dumps({"path": path, "error": str(err).strip().splitlines()[0]}), flush=True)
"""
# Types as ONNX Runtime tells them. OpenVINO's import would send an event, and write to the home folder.
_OPENVINO = """
import json, sys
sys.modules["openvino_telemetry"] = None
import openvino
TYPES = {"boolean": "bool", "string": "string", "f16": "float16", "bf16": "bfloat16", "f32": "float", "f64": "double"}
for size in ("8", "16", "32", "64"):
    TYPES |= {"i" + size: "int" + size, "u" + size: "uint" + size}
def tensor(port):
    kind = port.get_element_type().get_type_name()
    shape = port.get_partial_shape()
    known = list(shape) if shape.rank.is_static else []
    sizes = [size.get_length() if size.is_static else None for size in known]
    return [min(port.get_names()), "tensor(%s)" % TYPES.get(kind, kind), sizes]
core = openvino.Core()
for path in sys.argv[1:]:
    try:
        graph = core.read_model(path)
        found = [[tensor(port) for port in ports] for ports in (graph.inputs, graph.outputs)]
        print(json.dumps({"path": path, "tensors": found}), flush=True)
        del graph
    except Exception as err:
        lines = [line for line in str(err).strip().splitlines() if line and not line.startswith(("Exception", "Check"))]
        print(json.dumps({"path": path, "error": (lines or [type(err).__name__])[0]}), flush=True)
"""


@dataclass(frozen=True)
class OnnxTensor:
    """One input or output; -1 in the shape is any length."""

    name: str
    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OnnxFile:
    """What a file holds, or why the runtime refuses it.

    `operators` are the domain and name of each that it calls, `ir` is the version of ONNX's format that it tells.
    """

    inputs: tuple[OnnxTensor, ...] = ()
    outputs: tuple[OnnxTensor, ...] = ()
    error: str = ""
    operators: frozenset[tuple[str, str]] = frozenset()
    ir: int = 0


def read_onnx(paths: Sequence[Path], runtime: Runtime = "onnxruntime") -> dict[Path, OnnxFile] | None:
    """What each file holds; None where there is no such runtime to ask.

    Only files that reach nowhere beyond themselves are given to it. What serves a file is asked: of BF16, ONNX Runtime
    opens nothing on a CPU, and OpenVINO does.
    """
    found: dict[Path, OnnxFile] = {}
    called: dict[Path, Calls] = {}
    for path in paths:
        try:
            if path.exists():
                called[path] = vet_onnx(path)
        except OnnxFileError as err:
            found[path] = OnnxFile(error=str(err))
    left = [path for path in paths if path not in found]
    while left:
        lines, failed = _asked(left, runtime)
        if lines is None:
            return None
        for answer in map(json.loads, lines):
            found[Path(answer["path"])] = _file(answer)
        if failed and (failed != _late(runtime) or left[0] not in found):  # of what was late, the others had the time
            blamed = next((path for path in left if path not in found), None)
            found |= {} if blamed is None else {blamed: OnnxFile(error=failed)}
        left = [path for path in left if path not in found]
    told = {path: called.get(path, Calls()) for path in found}
    return {path: replace(held, operators=told[path], ir=told[path].ir) for path, held in found.items()}


def _late(runtime: Runtime) -> str:
    return f"{RUNTIME_NAMES[runtime]} takes more than {TIMEOUT_S:.0f} s to read it"


def _asked(paths: Sequence[Path], runtime: Runtime) -> tuple[list[str] | None, str]:
    """A line for each file that it came to the end of, None without that runtime; and what ended it, or ""."""
    # Not with the current folder on the path: what stands beside a file of somebody else's would run.
    program = _OPENVINO if runtime == "openvino" else _PROGRAM
    command = [sys.executable, "-P", "-c", program, *map(str, paths)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as err:
        told = err.stdout or ""  # bytes, even of text, and maybe half of a line
        lines = (told.decode("utf-8", "replace") if isinstance(told, bytes) else told).splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")], _late(runtime)
    if done.returncode and f"No module named '{runtime}'" in done.stderr:
        return None, ""
    return done.stdout.splitlines(), f"{RUNTIME_NAMES[runtime]} crashes on it (exit code {done.returncode})"


def _file(answer: dict[str, Any]) -> OnnxFile:
    if "error" in answer:  # without ONNX Runtime's codes, and the places in its own sources
        text = answer["error"].partition(f"{answer['path']} failed:")[2] or answer["error"]
        return OnnxFile(error=re.sub(r"^/onnxruntime_src/.*?\) (?=ONNX)", "", text)[:300])
    inputs, outputs = (
        tuple(
            OnnxTensor(name, kind, tuple(dim if isinstance(dim, int) else -1 for dim in shape))
            for name, kind, shape in tensors
        )
        for tensors in answer["tensors"]
    )
    return OnnxFile(inputs, outputs)
