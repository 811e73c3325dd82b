"""ResNet-50 at 224² on a GPU: torch, torch.compile and ONNX Runtime, FP32, FP16 and INT8, whole and pruned.

    python benchmarks/gpu_resnet50.py [--batches 1 8 32 128] [--rounds 12] [--folder build/gpu] [--export-only]

Untrained weights: speed and size only, no accuracy is claimed. Between CUDA events, copies apart, all ways in turns.
INT8 is as TensorRT wants it; ONNX Runtime's CUDA provider has no such kernels, and what it makes of the file is told.
Pruned by 50% and 70% of the multiply-accumulates. The last line of stdout is one JSON object. Needs a torch for CUDA
and onnxruntime-gpu (docs/gpu.md); `--device cpu` tries the script out anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from compress_resnet50 import resnet50
from gpu_common import arguments, measure_network

import compress
from compress import ExportOptions
from compress.errors import ArtifactError
from compress.model import Arrays

INPUT = "image:float32[batch,3,224,224]"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ORT FP32": ("fp32", {"target": "cuda"}),
    "ORT FP16": ("fp16", {"target": "cuda", "precision": "fp16"}),
    "ORT INT8 (Q/DQ for TensorRT)": ("int8", {"target": "tensorrt", "precision": "fp16", "int8": "static"}),
    "−50% MACs, ORT FP16": ("fp16", {"target": "cuda", "precision": "fp16", "prune": 0.5}),
    "−70% MACs, ORT FP16": ("fp16", {"target": "cuda", "precision": "fp16", "prune": 0.7}),
}


def main() -> None:
    asked = arguments(__doc__ or "").parse_args()
    folder: Path = asked.folder / "resnet50"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.pt").exists():
        compress.save(resnet50(), folder / "model.pt", inputs=INPUT, outputs=["logits"])
        images = np.random.default_rng(0).standard_normal((16, 3, 224, 224)).astype(np.float32)
        np.savez(folder / "c.npz", image=images)
    for number, (_, options) in enumerate(KINDS.values()):
        made(folder, number, options)
    if asked.export_only:
        return

    def inputs_of(batch: int) -> Arrays:
        return {"image": np.random.default_rng(batch).standard_normal((batch, 3, 224, 224)).astype(np.float32)}

    measure_network(folder, KINDS, inputs_of, asked)


def made(folder: Path, number: int, options: dict[str, Any]) -> None:
    """Export, unless that was done before."""
    try:
        compress.Artifact.load(folder / str(number))
    except ArtifactError:
        data: dict[str, Any] = {} if set(options) == {"target"} else {"calibration": "c.npz"}
        compress.export(folder / "model.pt", ExportOptions(output=folder / str(number), **data, **options))


if __name__ == "__main__":
    main()
