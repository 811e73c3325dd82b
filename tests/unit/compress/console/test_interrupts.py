"""Ctrl-C ends a command also where a library does not come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).parents[4]

RUNS = """
import sys
import numpy as np
import onnxruntime
from compress.jobs.running import run_to_end

def run():
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    print("running", flush=True)
    session.run(None, {"x": np.ones((1, 4), np.float32)})

run_to_end(run, resumes=False)
"""
FORKS = """
import os, signal, sys, time
from compress.console import interrupts

interrupts.GRACE = 0.2
with interrupts.interruptible():
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, lambda *_: os._exit(7))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    _, status = os.waitpid(child, 0)
    time.sleep(1)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def endless(path: Path) -> Path:
    """A loop whose condition stays true."""
    said, values = helper.make_tensor_value_info("c", TensorProto.BOOL, []), ("v", "u")
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Identity", ["v"], ["u"])], "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []), said,
         helper.make_tensor_value_info(values[0], TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("d", TensorProto.BOOL, []),
         helper.make_tensor_value_info(values[1], TensorProto.FLOAT, None)],
    )  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("Loop", ["", "yes", "x"], ["y"], body=body)], "endless",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.array(True), "yes")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def processor_time(pid: int) -> float:
    """Seconds, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of processor time there")
def test_an_endless_loop_of_a_library_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNS, str(endless(tmp_path / "endless.onnx"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "running\n"
            begun = processor_time(run.pid)
            while processor_time(run.pid) < begun + 0.2:  # it is inside the loop
                time.sleep(0.05)
            run.send_signal(signal.SIGINT)
            _, told = run.communicate(timeout=120)
        finally:
            run.kill()
    assert run.returncode == 130
    assert told == "interrupted\n"


def test_a_signal_of_a_forked_process_is_its_own() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FORKS], env=environment, check=False, timeout=120)
    assert done.returncode == 7
