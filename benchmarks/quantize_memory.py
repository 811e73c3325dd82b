"""Peak memory of quantizing the weights of a large ONNX file, beside ONNX Runtime's own dynamic quantizer.

    python benchmarks/quantize_memory.py [--gigabytes 3]

A chain of MatMuls behind a table, with random float32 weights in a file beside it, each run in a process of its own:
peak resident memory over the weights' bytes, and seconds. Theirs is called as its documentation has it, the weights of
what it writes in a file beside it, too. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from rich.console import Console
from rich.table import Table

from compress.artifact import Signature, TensorSpec
from compress.formats.onnx.outline import appended, put_outside
from compress.model import OnnxModel
from compress.quantize.quantize_int4 import QuantizeInt4
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.machine import environment
from compress.stage import Stage

WIDTH, ROWS = 3584, 8000
THEIRS = "ONNX Runtime's quantize_dynamic"
STAGES: dict[str, Stage] = {
    "--int8 dynamic": QuantizeOnnx("dynamic"),
    "--int8 weights": QuantizeOnnx("weights"),
    "--int4 weights": QuantizeInt4(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # WAY FOLDER: the child's work
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(child(arguments.one[0], Path(arguments.one[1]))))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        weights = prepare(Path(name), arguments.gigabytes)
        for way in (*STAGES, THEIRS):
            words = [sys.executable, __file__, "--one", way, name]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            told = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
            rows.append({"way": way, "weights_bytes": weights, **told})
    table = Table(title=f"quantizing {weights / 1e9:.2f} GB of weights", title_justify="left")
    for column in ("way", "peak, GB", "times the weights", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        peak = row.get("peak_bytes")
        shown = (
            ("failed", "", "") if peak is None else (f"{peak / 1e9:.2f}", f"{peak / weights:.2f}", f"{row['s']:.0f}")
        )
        table.add_row(row["way"], *shown)
    Console(width=120).print(table)
    print(json.dumps({"benchmark": "quantize_memory", "environment": environment(1), "rows": rows}))


def prepare(folder: Path, gigabytes: float) -> int:
    """Write the model; bytes of its weights."""
    rng = np.random.default_rng(0)
    layers = max(1, round((gigabytes * 1e9 - 4 * ROWS * WIDTH) / (4 * WIDTH * WIDTH)))
    stored, nodes, values = [], [], []
    with (folder / "model.onnx.data").open("wb") as file:
        for name, rows in (("table", ROWS), *((f"w{at}", WIDTH) for at in range(layers))):
            numbers = rng.standard_normal((rows, WIDTH), dtype=np.float32) / 60
            stored.append(TensorProto(name=name, data_type=TensorProto.FLOAT, dims=numbers.shape))
            put_outside(stored[-1], file.name.rpartition("/")[2], appended(file, numbers.tobytes()), numbers.nbytes)
    nodes.append(helper.make_node("Gather", ["table", "ids"], ["h0"], name="rows"))
    for at in range(layers):
        made = f"h{at + 1}" if at + 1 < layers else "y"
        nodes.append(helper.make_node("MatMul", [f"h{at}", f"w{at}"], [f"m{at}"], name=f"matmul{at}"))
        nodes.append(helper.make_node("Tanh", [f"m{at}"], [made], name=f"tanh{at}"))
        values += [helper.make_tensor_value_info(f"{kind}{at}", TensorProto.FLOAT, ["batch", WIDTH]) for kind in "hm"]
    given = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch"])]
    shown = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])]
    graph = helper.make_graph(nodes, "chain", given, shown, stored, value_info=values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return (folder / "model.onnx.data").stat().st_size


def child(way: str, folder: Path) -> dict[str, float]:
    """Peak resident bytes and seconds of one way."""
    source, start = folder / "model.onnx", time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as made:
        if way == THEIRS:
            quantize_dynamic(source, Path(made) / "model.onnx", per_channel=True, weight_type=QuantType.QInt8,
                             use_external_data_format=True)  # fmt: skip
        else:
            given, shown = (TensorSpec.parse(text) for text in ("ids:int64[batch]", f"y:float32[batch,{WIDTH}]"))
            model = OnnxModel(source, Signature((given,), (shown,)))
            STAGES[way].run(model, Path(made), lambda *_: None)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_bytes": peak, "s": time.perf_counter() - start}


if __name__ == "__main__":
    main()
