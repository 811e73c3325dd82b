"""The onnxruntime backend, and that Triton's own load generator runs against what is served."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.errors import ServerError
from serve.config.model_config import ModelConfig
from serve.config.pbtxt import from_pbtxt
from serve.pack.write import PackOptions, pack
from serve.triton.control import load_model
from serve.triton.launch import TritonOptions, TritonServer
from tests.integration.test_triton import FREE, infer
from tests.serve_models import four_bit_artifact, hook_file, tiny_artifact

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
OPTIONAL = """
backend: "onnxruntime"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 2 }
input { name: "scale" data_type: TYPE_FP32 dims: 2 optional: true }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
instance_group { count: 1 kind: KIND_CPU }
dynamic_batching { max_queue_delay_microseconds: 200000 }
"""


def with_default(folder: Path) -> None:
    """x:float32[batch,2] times scale:float32[batch,2], which is [[10,100]] where nobody gives it."""
    (folder / "1").mkdir(parents=True)
    shape = ["batch", 2]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "scale"], ["y"])],
        "scaled",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "scale")],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.array([[10, 100]], np.float32), "scale")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "1/model.onnx"
    )
    (folder / "config.pbtxt").write_text(f'name: "{folder.name}"\n{OPTIONAL}')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("backend")
    repository = folder / "models"
    one = PackOptions(instances=1)
    pack(tiny_artifact(folder / "tiny"), repository=repository, name="plain", options=one)
    pack(folder / "tiny", repository=repository, name="hooked", hooks=hook_file(folder / "h"), options=one)
    with_default(repository / "scaled")
    pack(four_bit_artifact(folder / "four_bit"), repository=repository, name="four_bit", options=one)
    options = TritonOptions(explicit=True)  # for models that come later
    with TritonServer(repository, ports=FREE, options=options, log=folder / "triton.log") as server:
        yield server


def test_an_input_with_a_value_of_its_own_may_be_left_out(server: TritonServer) -> None:
    assert infer(server, "scaled", x=("FP32", [1, 2], [1, 2])) == {"y": [10.0, 200.0]}
    scale = ("FP32", [1, 2], [2, 3])
    assert infer(server, "scaled", x=("FP32", [1, 2], [1, 2]), scale=scale) == {"y": [2.0, 6.0]}


def test_4_bit_weights_are_answered_as_they_are_meant(server: TritonServer, tmp_path: Path) -> None:
    found = infer(server, "four_bit", ids=("INT64", [1, 2], [3, 19]))
    held = onnx.load(four_bit_artifact(tmp_path) / "model.onnx").graph.initializer
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in held}

    def restored(name: str) -> np.ndarray[Any, Any]:
        codes = weights[name].reshape(len(weights[name]), -1)
        each = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), 2, 32).astype(np.float32)
        zero = np.array([7, 8], np.float32)[:, None]
        found: np.ndarray[Any, Any] = (each - zero) * weights[f"{name}_scale"][..., None]
        return found.reshape(len(codes), 64)

    rows = restored("table")[[3, 19]]
    np.testing.assert_array_equal(found["rows"], rows.ravel())
    np.testing.assert_allclose(found["logits"], (rows @ restored("head").T).ravel(), rtol=1e-4, atol=1e-2)


def test_requests_with_and_without_it_are_answered_side_by_side(server: TritonServer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(number: int) -> list[float]:
        more = {"scale": ("FP32", [1, 2], [float(number), 1.0])} if number % 2 else {}
        return infer(server, "scaled", x=("FP32", [1, 2], [1, 1]), **more)["y"]

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(6)))
    assert answers == [[float(n), 1.0] if n % 2 else [10.0, 100.0] for n in range(6)]


def test_an_input_that_the_network_needs_may_not_be_left_out(server: TritonServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        infer(server, "scaled", scale=("FP32", [1, 2], [1, 2]))
    with caught.value as response:
        assert response.code == 400


@pytest.mark.parametrize(
    ("swap", "why"),
    [
        (("dims: 2 }\ninput", "dims: 2 optional: true }\ninput"), "says optional of ['x']"),
        (("dynamic_batching", ACCELERATED := (
            'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } } dynamic_batching'
        )), "the installed ONNX Runtime has no OpenVINOExecutionProvider, and execution_accelerators asks for it"),
        (("dynamic_batching", 'default_model_filename: "../../../elsewhere.onnx" dynamic_batching'), "leads out of the"),
        (("dynamic_batching", 'default_model_filename: "/elsewhere.onnx" dynamic_batching'), "leads out of the"),
        (("dynamic_batching", ACCELERATED.replace("openvino", "magic")), "execution_accelerators names 'magic'"),
    ],
)  # fmt: skip
def test_what_it_can_t_do_is_refused_when_it_is_loaded(server: TritonServer, swap: tuple[str, str], why: str) -> None:
    model = server.repository / "refused"
    with_default(model)
    path = model / "config.pbtxt"
    text = path.read_text()
    assert swap[0] in text
    path.write_text(text.replace(*swap))
    try:
        with pytest.raises(ServerError) as caught:
            load_model(f"http://{server.http_address}", model.name)
    finally:
        shutil.rmtree(model)
    assert why in caught.value.why


def test_gpu_options_become_the_config_that_the_c_backend_reads(tmp_path: Path) -> None:
    options = PackOptions(
        device="gpu", gpus=(0, 1), accelerator="tensorrt", precision="fp16", engine_cache="/cache", cuda_graphs=True
    )
    pack(tiny_artifact(tmp_path / "tiny"), repository=tmp_path / "models", name="plain", options=options)
    config: ModelConfig = from_pbtxt((tmp_path / "models/plain/config.pbtxt").read_text())
    (group,) = config.instance_group
    assert (group.kind, group.gpus) == ("KIND_GPU", (0, 1))
    assert config.optimization is not None
    assert config.optimization.cuda is not None
    assert config.optimization.cuda.graphs
    assert config.optimization.execution_accelerators is not None
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "tensorrt"
    assert accelerator.parameters == {
        "precision_mode": "FP16", "trt_engine_cache_enable": "1", "trt_engine_cache_path": "/cache",
    }  # fmt: skip


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(("model", "more"), [("plain", []), ("hooked", ["--string-data", "0,2,1,0"])])
def test_perf_analyzer_runs_against_what_is_served(
    server: TritonServer, tmp_path: Path, protocol: str, model: str, more: list[str]
) -> None:
    address = server.http_address if protocol == "http" else server.grpc_address
    out = tmp_path / "perf.csv"
    command = [sys.executable, str(ROOT / "benchmarks/perf_analyzer.py"), "-m", model, "-u", address, "-i", protocol]
    command += ["--request-count", "50", "--concurrency-range", "2", "-f", str(out), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    if "No matching distribution" in done.stderr:
        pytest.skip("the wheel that carries perf_analyzer can't be fetched")
    assert done.returncode == 0, done.stdout + done.stderr
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["Inferences/Second"]) > 0
