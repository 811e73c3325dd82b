"""What round channel counts are worth: the same fraction of MACs pruned with and without rounding, timed in one run.

    python benchmarks/prune_rounding.py [--rounds 5]

The digits network with random weights (the time does not depend on them), pruned by 70%, in ONNX Runtime, FP32 and
INT8, at batch 1 with one thread. Medians over interleaved rounds; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import compress
from compress import ExportOptions
from compress.model import OnnxModel
from compress.runtime.backends import OnnxBackend
from compress.runtime.machine import environment
from compress.runtime.measure import latency

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "digits"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), rounds)
    table = Table(title="70% of the MACs pruned, batch 1, one thread", title_justify="left")
    for column in ("channels", "precision", "MACs", "p50", "over unpruned FP32"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in figures:
        table.add_row(
            row["channels"], row["precision"], f"{row['macs']:,}", f"{row['latency_p50_ms']:.3f} ms",
            f"{row['faster_than_unpruned_fp32']:.2f}×",
        )  # fmt: skip
    Console(width=120).print(table)
    print(json.dumps({"benchmark": "prune_rounding", "rounds": rounds, "environment": environment(1), "rows": figures}))


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    from network import DigitsNet

    torch.manual_seed(0)
    compress.save(DigitsNet(), folder / "model.pt", inputs="image:float32[batch,1,8,8]")
    np.savez(folder / "data.npz", image=np.random.default_rng(0).random((64, 1, 8, 8), np.float32))
    cases: list[tuple[str, dict[str, Any]]] = [("unpruned", {})]
    cases += [(f"multiples of {n}" if n > 1 else "as they come", {"prune": 0.7, "round_to": n}) for n in (1, 4, 8)]
    backends, macs = {}, {}
    for channels, options in cases:
        for precision, int8 in (("FP32", None), ("INT8", "static")):
            key = (channels, precision)
            output = folder / f"{channels}-{precision}".replace(" ", "-")
            wanted: dict[str, Any] = options | ({"int8": int8, "calibration": "data.npz"} if int8 else {})
            artifact, report = compress.export(folder / "model.pt", ExportOptions(output=output, **wanted))
            backends[key] = OnnxBackend(OnnxModel(artifact.model_path, artifact.signature), 1)
            macs[key] = report.stages[-1].measured.macs
    one = {"image": np.zeros((1, 1, 8, 8), np.float32)}
    named = {" ".join(key): backend for key, backend in backends.items()}
    runs = [latency(named, one) for _ in range(rounds)]
    medians = {key: statistics.median(run[" ".join(key)].p50_ms for run in runs) for key in backends}
    base = medians["unpruned", "FP32"]
    return [
        {"channels": channels, "precision": precision, "macs": macs[channels, precision],
         "latency_p50_ms": median, "faster_than_unpruned_fp32": base / median}
        for (channels, precision), median in medians.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
