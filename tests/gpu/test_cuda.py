"""On a real NVIDIA GPU; anywhere else, each of these skips and says why."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

import compress
from compress.jobs.measure import measure_files
from compress.model import EngineModel, OnnxModel, TorchModel, sample_inputs
from compress.options import ExportOptions, MeasureOptions
from compress.runtime.backends import OnnxBackend, open_model
from compress.runtime.backends.onnxrt_device import OnnxDeviceBackend, ProviderOptions
from compress.runtime.backends.pytorch_device import TorchDeviceBackend
from compress.runtime.device import elapsed_ms
from tests.families import family
from tests.unit.compress.training.networks import accuracy, patterns, weights
from tests.unit.compress.training.networks import trained as training

NO_GPU = "" if torch.cuda.is_available() else "torch sees no CUDA device"
NO_CUDA = "" if "CUDAExecutionProvider" in ort.get_available_providers() else "this onnxruntime has no CUDA provider"
NO_TENSORRT = "" if importlib.util.find_spec("tensorrt") else "the package tensorrt is not installed"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)]
with_cuda = pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
with_tensorrt = pytest.mark.skipif(bool(NO_TENSORRT), reason=NO_TENSORRT)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.pt, its artifact in float32, and in INT8 and FP16 for TensorRT."""
    folder = tmp_path_factory.mktemp("made")
    module, inputs = family("residual")
    compress.save(module, folder / "model.pt", inputs=inputs)
    name = inputs[0].partition(":")[0]
    images = np.random.default_rng(0).standard_normal((32, 3, 16, 16)).astype(np.float32)
    np.savez(folder / "data.npz", **{name: images})  # type: ignore[arg-type]
    compress.export(folder / "model.pt", ExportOptions(output=folder / "plain"))
    more: dict[str, Any] = {"int8": "static", "calibration": "data.npz", "precision": "fp16", "target": "tensorrt"}
    compress.export(folder / "model.pt", ExportOptions(output=folder / "int8", **more))
    return folder


def plain(made: Path) -> OnnxModel:
    artifact = compress.Artifact.load(made / "plain")
    return OnnxModel(artifact.model_path, artifact.signature)


@with_cuda
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_cuda_gives_what_the_cpu_gives_and_runs_no_node_there(made: Path, graphs: bool, channels_last: bool) -> None:
    model = plain(made)
    options = ProviderOptions("cuda", cuda_graphs=graphs, tf32=False, channels_last=channels_last)
    backend = OnnxDeviceBackend(model, options)
    assert not backend.cpu_nodes
    for batch in (1, 8):
        inputs = sample_inputs(model.signature, batch, seed=batch)
        expected = OnnxBackend(model, 1).infer(inputs)
        for name, values in backend.infer(inputs).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-3, atol=1e-4)
        work = backend.prepared(inputs)
        assert all(took > 0 for took in elapsed_ms(work, backend.stream, 20))


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_on_the_gpu_gives_what_it_gives_on_the_cpu(made: Path, compiled: bool) -> None:
    model = compress.load(made / "model.pt")
    assert isinstance(model, TorchModel)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    inputs = sample_inputs(model.signature, 4)
    expected = open_model(model, threads=1).infer(inputs)
    got = TorchDeviceBackend(model, torch.device("cuda"), compiled=compiled).infer(inputs)
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-3, atol=1e-4)


@with_cuda
def test_measuring_side_by_side(made: Path) -> None:
    options = MeasureOptions(device="cuda", batches=(1, 8), rounds=3, cuda_graphs=True)
    found = measure_files([made / "model.pt", made / "plain"], options)
    assert {row.runtime for row in found.figures} == {"torch eager", "ONNX Runtime CUDA, CUDA graph"}
    assert all(row.cosine_similarity > 0.999 for row in found.figures)
    assert "gpu" in found.environment
    json.dumps(found.to_dict())


@with_tensorrt
def test_an_engine_is_built_judged_and_timed(made: Path, tmp_path: Path) -> None:
    options = ExportOptions(
        output=tmp_path / "engine", to="tensorrt", target="tensorrt", int8="static", precision="fp16",
        calibration=str(made / "data.npz"), eval=str(made / "data.npz"), max_batch_size=16,
        timing_cache=tmp_path / "timing.cache",
    )  # fmt: skip
    artifact, report = compress.export(made / "model.pt", options)
    row = report.stages[-1]
    assert row.measured.cosine_similarity is not None
    assert row.measured.cosine_similarity > 0.97
    assert row.details["precisions"].get("INT8", 0) > 0
    assert (tmp_path / "timing.cache").stat().st_size > 0
    backend = open_model(EngineModel(artifact.model_path, artifact.signature), threads=1)
    assert backend.runtime.startswith("TensorRT")


@pytest.mark.parametrize("precision", ["auto", "bf16-mixed", "16-mixed", "32"])
def test_a_training_on_the_gpu_learns(tmp_path: Path, precision: str) -> None:
    given = training(tmp_path, epochs=6, count=320, train_precision=precision, accelerator="cuda", batch_size=32)
    assert accuracy(given, *patterns(512, seed=7)) > 0.85
    assert given.details["device"] == torch.cuda.get_device_name(0)
    assert given.details["peak_device_bytes"] > 0


def test_a_training_on_the_gpu_tells_where_its_time_goes(tmp_path: Path) -> None:
    given = training(tmp_path, epochs=3, profile=True, accelerator="cuda")
    assert 0 <= given.details["profile"]["device_idle"] <= 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none")
def test_two_gpus_compute_what_one_does(tmp_path: Path) -> None:
    options = {"epochs": 2, "train_precision": "32", "accelerator": "cuda"}
    one, two = (weights(training(tmp_path, devices=devices, **options)) for devices in (1, 2))
    assert all(torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-4) for name in one)
