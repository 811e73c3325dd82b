"""Sentence embeddings by all-MiniLM-L6-v2: dynamic, static and weight-only INT8 against torch and FP32 ONNX.

    python benchmarks/compress_minilm.py build/minilm [--rounds 5]

The folder is what examples/minilm/minilm.py wrote. One sentence of 32 tokens at a time, one thread, all models
interleaved; medians over the rounds. Cosine similarity with torch's embedding over 400 sentences, mean and worst. The
last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import compress
from compress import ExportOptions
from compress.data.dataset import Dataset
from compress.evaluate.metrics import cosine_similarity
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.runtime.backends import Backend, OnnxBackend, TorchBackend
from compress.runtime.machine import environment
from compress.runtime.measure import latency

EAGER, FLOAT = "torch eager", "ONNX Runtime FP32"
KINDS: dict[str, dict[str, Any]] = {
    "FP32, slow fusion avoided": {},
    "INT8 dynamic": {"int8": "dynamic"},
    "INT8 dynamic, smooth": {"int8": "dynamic", "calibration": "calibration.npz", "smooth": True},
    "INT8 static": {"int8": "static", "calibration": "calibration.npz"},
    "INT8 static, not smoothed": {"int8": "static", "calibration": "calibration.npz", "smooth": False},
    "INT8 weights": {"int8": "weights"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    original = compress.load(arguments.folder / "model.pt")
    data = Dataset.open(str(arguments.folder / "eval.npz"), original.signature)
    models: dict[str, Backend] = {EAGER: TorchBackend(original, 1)}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        models[FLOAT] = OnnxBackend(as_it_comes(original, Path(name) / "plain"), 1)
        for number, (kind, options) in enumerate(KINDS.items()):
            output = Path(name) / str(number)
            artifact, _ = compress.export(arguments.folder / "model.pt", ExportOptions(output=output, **options))
            models[kind] = OnnxBackend(OnnxModel(artifact.model_path, original.signature), 1)
            sizes[kind] = artifact.model_path.stat().st_size
        figures = measured(models, sizes, data, arguments.rounds)
    table = Table(title="all-MiniLM-L6-v2, 32 tokens, batch 1, one thread", title_justify="left")
    for column in ("model", "size", "p50", "over eager", "over FP32 ONNX", "cosine, mean", "worst of 400"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for kind, row in figures.items():
        size = "" if row["size_bytes"] is None else f"{row['size_bytes'] / 1e6:.1f} MB"
        table.add_row(
            kind, size, f"{row['latency_p50_ms']:.2f} ms",
            f"{row['faster_than_torch_eager']:.2f}×", f"{row['faster_than_fp32_onnx']:.2f}×",
            f"{row['cosine_mean']:.4f}", f"{row['cosine_worst']:.4f}",
        )  # fmt: skip
    Console(width=130).print(table)
    head = {"benchmark": "compress_minilm", "rounds": arguments.rounds, "environment": environment(1)}
    print(json.dumps(head | {"models": figures}))


def as_it_comes(model: TorchModel, folder: Path) -> OnnxModel:
    """torch.onnx's export with its constants folded, for ONNX Runtime to fuse as it does."""
    given: Any = model
    for stage in (OnnxFromTorch(), FoldOnnx()):
        (folder / stage.name).mkdir(parents=True)
        given = stage.run(given, folder / stage.name, lambda _done, _total, _note: None).model
    assert isinstance(given, OnnxModel)  # noqa: S101  FoldOnnx gives one
    return given


def measured(
    models: dict[str, Backend], sizes: dict[str, int], data: Dataset, rounds: int
) -> dict[str, dict[str, Any]]:
    likeness: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in models}
    for inputs, _ in data.batches(1):  # one at a time, as dynamic ranges are taken over the whole batch
        outputs = {name: next(iter(model.infer(inputs).values())) for name, model in models.items()}
        for name, output in outputs.items():
            likeness[name].append(cosine_similarity(output, outputs[EAGER]))
    one = data.take(slice(0, 1))[0]
    full = {"input_ids": one["input_ids"], "attention_mask": np.ones_like(one["attention_mask"])}
    runs = [latency(models, full) for _ in range(rounds)]
    p50 = {name: statistics.median(run[name].p50_ms for run in runs) for name in models}
    return {
        name: {
            "size_bytes": sizes.get(name),
            "latency_p50_ms": p50[name],
            "faster_than_torch_eager": p50[EAGER] / p50[name],
            "faster_than_fp32_onnx": p50[FLOAT] / p50[name],
            "cosine_mean": float(np.concatenate(likeness[name]).mean()),
            "cosine_worst": float(np.concatenate(likeness[name]).min()),
        }
        for name in models
    }


if __name__ == "__main__":
    main()
