"""A TensorRT engine from the finished ONNX file, built on this machine's GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from compress.artifact import Signature
from compress.console.wording import counted
from compress.data.sizes import call_size
from compress.errors import MissingExtraError, RecipeError, StageError
from compress.model import Arrays, EngineModel, Model, OnnxModel, example_inputs
from compress.options import EngineOptions
from compress.runtime.backends.trt import TrtBackend, tensorrt_module
from compress.runtime.device import accelerator, described, elapsed_ms
from compress.stage import Given, Progress
from compress.tensorrt.build import BuildError, build
from compress.tensorrt.layers import precision_of, precisions_of
from compress.tensorrt.lint import lint_tensorrt
from compress.tensorrt.profiles import build_options, profiles_for, ranges_of

__all__ = ["ENGINE_FILE", "EngineFromOnnx", "one_sample"]

ENGINE_FILE = "engine.json"
CALLS = 100


@dataclass(frozen=True)
class EngineFromOnnx:
    """Build, and time the engine between CUDA events.

    Attributes:
        engine: how to build.
    """

    engine: EngineOptions

    name: ClassVar[str] = "engine_from_onnx"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = EngineModel

    @property
    def options(self) -> Mapping[str, Any]:
        """With the release and the GPU: another of either gives another engine."""
        found = {name: str(value) for name, value in vars(self.engine).items() if name in EngineOptions.__annotations__}
        return found | {"tensorrt": str(tensorrt_module().__version__), **described(accelerator())}

    def check(self, model: Model) -> None:
        try:
            tensorrt_module()
        except MissingExtraError as err:
            raise RecipeError(
                "can't build a TensorRT engine here",
                why=err.why,
                mend="leave --to out; `compress engine-script` then writes the script that builds it where TensorRT is",
            ) from err
        accelerator()
        profiles_for(model.signature, self.engine.max_batch_size, self.engine.opt_batch_size, self.engine.dims)

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        found = lint_tensorrt(model.path)
        if found.refused:
            first = next(finding for finding in found.findings if finding.severity == "error")
            raise StageError(
                "TensorRT would refuse the file", why=f"{first.layer or 'the file'}: {first.what}", mend=first.mend
            )
        options = build_options(model.signature, self.engine)
        plan = folder / "model.plan"
        try:
            told = build(
                tensorrt_module(), model.path, plan, options, lambda phase, done, total: progress(done, total, phase)
            )
        except BuildError as err:
            raise StageError(err.what, why=err.why, mend=err.mend) from err
        shutil.copyfile(model.path, folder / "model.onnx")
        (folder / ENGINE_FILE).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        given = EngineModel(plan, model.signature)
        backend = TrtBackend(given)
        work = backend.prepared(one_sample(model.signature, self.engine.dims))
        elapsed_ms(work, backend.stream, CALLS // 10)
        median, worst = np.percentile(elapsed_ms(work, backend.stream, CALLS), [50, 99]).tolist()
        precisions = precisions_of(told["layers"])
        return Given(
            given,
            did=f"TensorRT {told['tensorrt']}: {counted(len(told['layers']), 'layers')} ("
            + ", ".join(f"{count} {kind}" for kind, count in precisions.items())
            + f"), {median:.3f} ms on the GPU at batch {call_size(model.signature)}",
            details={
                "tensorrt": told["tensorrt"],
                "profiles": told["profiles"],
                "precisions": precisions,
                "layers": [precision_of(layer) for layer in told["layers"]],
                "device_memory_bytes": told["device_memory_bytes"],
                "device_p50_ms": median,
                "device_p99_ms": worst,
                "lint": found.counts,
            },
            warnings=tuple(told["warnings"]),
        )


def one_sample(signature: Signature, dims: Sequence[str]) -> Arrays:
    """Random inputs at batch 1, every other dimension that varies at its best size."""
    best = {name: sizes[1] for name, sizes in ranges_of(dims).items()}
    return example_inputs(signature.inputs, signature.at(1) | best)
