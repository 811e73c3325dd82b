"""The same files on ONNX Runtime and on OpenVINO: which runtime is faster on this machine, file by file.

    python benchmarks/runtimes.py [--seconds 20] [--minilm build/minilm]

A ResNet-50 of full width on 64² pixels (untrained), the digits example's network, a MobileNet for 28² pixels and, where
its folder is named (examples/minilm/minilm.py writes it), all-MiniLM-L6-v2; each as `compress export` writes it in FP32
and in INT8: static, of MiniLM dynamic, too. One thread, batch 1; both runtimes take turns on a file, and the ratio is
paired by round, with its 95% interval. How far the outputs are apart is over the calibration data, as a share of their
size. Where the CPU multiplies BF16, the file of `--precision bf16` on OpenVINO is held against the FP32 file on ONNX
Runtime, too. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from serving_networks import resnet

import compress
from compress import ExportOptions
from compress.data.dataset import Dataset
from compress.data.sizes import typical_inputs
from compress.evaluate.judge import spread
from compress.evaluate.runtime_choice import distances
from compress.model import OnnxModel
from compress.runtime.backends import Backend, open_model
from compress.runtime.latency import latency, ratio
from compress.runtime.machine import environment, fast_bfloat16

ROOT = Path(__file__).parents[1]
KINDS: dict[str, dict[str, Any]] = {"FP32": {}, "INT8 static": {"int8": "static"}}
COMPARED = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring each file, at most")
    parser.add_argument("--minilm", type=Path, help="the folder that examples/minilm/minilm.py wrote")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for network, checkpoint, calibration in networks(Path(name), arguments.minilm):
            kinds = KINDS | ({"INT8 dynamic": {"int8": "dynamic"}} if network == "MiniLM" else {})
            for number, (kind, options) in enumerate(kinds.items()):
                output = Path(name) / f"{network}-{number}"
                asked: dict[str, Any] = {"runtime": "onnxruntime", **options}
                if options.get("int8") == "static":
                    asked["calibration"] = str(calibration)
                artifact, _ = compress.export(checkpoint, ExportOptions(output=output, **asked))
                model = OnnxModel(artifact.model_path, artifact.signature)
                pairs = [(kind, dataclasses.replace(model, runtime="openvino"))]
                if kind == "FP32" and fast_bfloat16():
                    half = ExportOptions(output=Path(name) / f"{network}-bf16", precision="bf16", runtime="openvino")
                    artifact, _ = compress.export(checkpoint, half)
                    pairs.append(("BF16, FP32", OnnxModel(artifact.model_path, artifact.signature, runtime="openvino")))
                for told, other in pairs:
                    rows.append(row(network, told, model, other, calibration, arguments.seconds))
                    print(rows[-1], file=sys.stderr)
    table = Table(title="Batch 1, one thread; above 1: OpenVINO is faster", title_justify="left")
    for column in ("network", "file", "ONNX Runtime", "OpenVINO", "OpenVINO is so many times as fast (95%)", "apart"):
        table.add_column(column, justify="left" if column in ("network", "file") else "right", no_wrap=True)
    for each in rows:
        table.add_row(
            each["network"], each["file"], f"{each['onnxruntime_ms']:.3f} ms", f"{each['openvino_ms']:.3f} ms",
            f"{each['openvino_speedup']:.2f}× ({each['low']:.2f}–{each['high']:.2f})", f"{each['apart']:.1e}",
        )  # fmt: skip
    Console(width=130).print(table)
    print(json.dumps({"benchmark": "runtimes", "environment": environment(1), "files": rows}))


def networks(folder: Path, minilm: Path | None) -> Iterator[tuple[str, Path, Path]]:
    """Name, model file and calibration data of each."""
    rng = np.random.default_rng(0)
    compress.save(resnet(64, 64), folder / "resnet.pt", inputs="image:float32[batch,3,64,64]")
    np.savez(folder / "resnet.npz", image=rng.standard_normal((32, 3, 64, 64)).astype(np.float32))
    yield "ResNet-50", folder / "resnet.pt", folder / "resnet.npz"
    np.savez(folder / "grey.npz", image=rng.random((32, 1, 28, 28), np.float32))
    yield "MobileNet", ROOT / "examples/fashion_mnist/mobilenet.pt", folder / "grey.npz"
    command = [sys.executable, str(ROOT / "examples/digits/train.py"), str(folder / "digits")]
    subprocess.run(command, check=True, stdout=sys.stderr)
    yield "digits", folder / "digits/model.pt", folder / "digits/calibration.npz"
    if minilm is not None:
        yield "MiniLM", minilm / "model.pt", minilm / "calibration.npz"


def row(
    network: str, kind: str, model: OnnxModel, other: OnnxModel, calibration: Path, seconds: float
) -> dict[str, Any]:
    """A file on ONNX Runtime, and the same or another on OpenVINO."""
    data = Dataset.open(str(calibration), model.signature)
    opened: dict[str, Backend] = {each.runtime: open_model(each, threads=1) for each in (model, other)}
    batches = [inputs for inputs, _ in spread(data, COMPARED).batches(1)]
    apart = distances(opened, "onnxruntime", batches)["openvino"]
    found = latency(opened, typical_inputs(model.signature, data, 1), seconds=seconds)
    over = ratio(found["onnxruntime"].rounds_ms, found["openvino"].rounds_ms)
    assert over is not None  # noqa: S101  both took the same rounds
    return {
        "network": network, "file": kind, "onnxruntime_ms": found["onnxruntime"].p50_ms,
        "openvino_ms": found["openvino"].p50_ms, "openvino_speedup": over.value, "low": over.low, "high": over.high,
        "apart": apart, "rounds": found.rounds,
    }  # fmt: skip


if __name__ == "__main__":
    main()
