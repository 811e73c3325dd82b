"""What ONNX Runtime's fusion of an addition with a LayerNormalization costs on the CPU.

    python benchmarks/layer_norm_fusion.py [--runs 15]

Graphs of eight nodes in a row, float32, one thread, interleaved; medians, in microseconds a node. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from compress.runtime.machine import environment

SIZES = ((32, 384), (128, 384), (128, 768), (512, 1024))
KINDS = ("LayerNormalization alone", "Add, then it: fused", "Sum, then it")
NODES = 8


def session(kind: str, tokens: int, channels: int) -> ort.InferenceSession:
    """Eight additions of y, each normalized, or the normalizations alone."""
    nodes: list[NodeProto] = []
    now = "x"
    for number in range(NODES):
        if kind != KINDS[0]:
            nodes.append(helper.make_node(kind.split(",")[0], [now, "y"], [f"sum{number}"]))
            now = f"sum{number}"
        nodes.append(helper.make_node("LayerNormalization", [now, "scale", "bias"], [f"norm{number}"], axis=-1))
        now = f"norm{number}"
    weights = [
        numpy_helper.from_array(np.full(channels, value, np.float32), name)
        for name, value in (("scale", 1), ("bias", 0))
    ]
    shape = [1, tokens, channels]
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    made = [helper.make_tensor_value_info(now, TensorProto.FLOAT, shape)]
    model = helper.make_model(
        helper.make_graph(nodes, "norms", given, made, weights),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    table = Table(title="microseconds a node", title_justify="left")
    for column in ("tokens x channels", *KINDS):
        table.add_column(column, justify="right")
    figures = {}
    for tokens, channels in SIZES:
        rng = np.random.default_rng(0)
        inputs = {name: rng.standard_normal((1, tokens, channels), dtype=np.float32) for name in "xy"}
        opened = {kind: session(kind, tokens, channels) for kind in KINDS}
        took: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(runs):
            for kind, running in opened.items():
                start = time.perf_counter()
                running.run(None, inputs)
                took[kind].append(1e6 * (time.perf_counter() - start) / NODES)
        row = {kind: statistics.median(times) for kind, times in took.items()}
        figures[f"{tokens} x {channels}"] = row
        table.add_row(f"{tokens} x {channels}", *(f"{value:.0f}" for value in row.values()))
    Console(width=100).print(table)
    print(json.dumps({"benchmark": "layer_norm_fusion", "runs": runs, "environment": environment(1), "us": figures}))


if __name__ == "__main__":
    main()
