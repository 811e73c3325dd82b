"""all-MiniLM-L6-v2 on a GPU: torch, torch.compile and ONNX Runtime, FP32, FP16 and INT8.

    python benchmarks/gpu_minilm.py build/minilm [--batches 1 8 32 128] [--rounds 12] [--folder build/gpu]

The first folder is what examples/minilm/minilm.py wrote. Sentences of 32 tokens; between CUDA events, copies apart, all
ways in turns; cosine similarity of the embeddings with torch's, the least of the batch. The last line of stdout is one
JSON object. Needs a torch for CUDA and onnxruntime-gpu (docs/gpu.md); `--device cpu` tries the script out anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gpu_common import arguments, measure_network
from gpu_resnet50 import made

import compress
from compress.data.dataset import Dataset
from compress.model import Arrays

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ORT FP32": ("fp32", {"target": "cuda"}),
    "ORT FP16": ("fp16", {"target": "cuda", "precision": "fp16"}),
    "ORT INT8 (Q/DQ for TensorRT)": (
        "int8", {"target": "tensorrt", "precision": "fp16", "int8": "static", "smooth": True}
    ),
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("source", type=Path)
    asked = parser.parse_args()
    folder: Path = asked.folder / "minilm"
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in (("model.pt", "model.pt"), ("c.npz", "calibration.npz")):
        if not (folder / name).exists():
            (folder / name).write_bytes((asked.source / source).read_bytes())
    for number, (_, options) in enumerate(KINDS.values()):
        made(folder, number, options)
    if asked.export_only:
        return
    model = compress.load(folder / "model.pt")
    data = Dataset.open(str(folder / "c.npz"), model.signature)

    def inputs_of(batch: int) -> Arrays:
        found = data.take(slice(batch))[0]
        return {name: np.resize(values, (batch, *values.shape[1:])) for name, values in found.items()}

    measure_network(folder, KINDS, inputs_of, asked)


if __name__ == "__main__":
    main()
