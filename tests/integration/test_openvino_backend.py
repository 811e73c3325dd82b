"""The openvino backend of the embedded Triton: answers, batches, streams, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.artifact import Artifact, Measured, StageReport
from compress.errors import RepositoryError, ServerError
from compress.model import OnnxModel
from compress.runtime.backends import open_model
from compress.runtime.machine import fast_bfloat16
from serve.config.pbtxt import from_pbtxt
from serve.hooks.check import run_network
from serve.lint import run as lint_run
from serve.lint.run import lint
from serve.pack.write import PackOptions, pack
from serve.triton.control import load_model
from serve.triton.launch import TritonOptions, TritonServer
from serve.tune.candidate import candidate_of, candidates, write_into
from serve.tune.trial import load_subject
from serve.up.preflight import check_models
from tests.integration.test_triton import FREE, infer
from tests.serve_models import (
    WEIGHT,
    bfloat16_artifact,
    hook_file,
    lookup_artifact,
    pooled_artifact,
    sum_artifact,
    tiny_artifact,
    unbatched_artifact,
)

pytestmark = pytest.mark.integration
pytest.importorskip("openvino_telemetry", reason="OpenVINO is an extra")


def on_openvino(folder: Path) -> Path:
    """The artifact, whose runtime OpenVINO was found to be."""
    dataclasses.replace(Artifact.load(folder), runtime="openvino").save()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("openvino")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TritonServer]:
    repository = folder / "models"
    one = PackOptions(instances=1, max_queue_delay_microseconds=200_000, max_batch_size=8)
    tiny = on_openvino(tiny_artifact(folder / "tiny"))
    pack(tiny, repository=repository, name="plain", options=one)
    pack(tiny, repository=repository, name="hooked", hooks=hook_file(folder / "h"), options=one)
    pack(on_openvino(sum_artifact(folder / "sum")), repository=repository, name="sum", options=one)
    pack(on_openvino(pooled_artifact(folder / "pooled")), repository=repository, name="pooled", options=one)
    pack(on_openvino(unbatched_artifact(folder / "flat")), repository=repository, name="flat")
    half = on_openvino(bfloat16_artifact(folder / "half"))
    packed = pack(half, repository=repository, name="half", hooks=hook_file(folder / "h"), options=one)
    assert packed.warnings == (), "its hooks were tried on the network, in OpenVINO"
    pack(on_openvino(lookup_artifact(folder / "lookup")), repository=repository, name="lookup", options=one)
    pack(tiny, repository=repository, name="streams", options=PackOptions(instances=2, max_batch_size=8))
    path = repository / "streams/config.pbtxt"  # two streams of one process
    path.write_text(path.read_text().replace("count: 2", "count: 1"))
    options = TritonOptions(explicit=True)  # for models that come later
    with TritonServer(repository, ports=FREE, options=options, log=folder / "triton.log") as server:
        yield server


def statistics(server: TritonServer, model: str) -> Any:
    with urllib.request.urlopen(f"http://{server.http_address}/v2/models/{model}/stats", timeout=5) as response:
        return json.load(response)["model_stats"][0]


@pytest.mark.parametrize("model", ["plain", "streams"])
def test_answers_are_the_artifacts_on_openvino(server: TritonServer, folder: Path, model: str) -> None:
    artifact = Artifact.load(folder / "tiny")
    backend = open_model(OnnxModel(artifact.model_path, artifact.signature, runtime="openvino"), threads=1)
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    want = backend.infer({"x": x})["logits"]
    got = infer(server, model, x=("FP32", [3, 4], x.ravel().tolist()))["logits"]
    np.testing.assert_array_equal(np.array(got, np.float32).reshape(3, 3), want)


def test_hooks_are_tried_in_the_precision_that_the_server_computes_in(tmp_path: Path) -> None:
    artifact = Artifact.load(on_openvino(tiny_artifact(tmp_path / "tiny")))
    x = np.array([257.0, 0, 0, 0], np.float32)  # no number of BF16
    made = run_network(artifact, {"x": x}).made["logits"]
    np.testing.assert_array_equal(made, 257 * WEIGHT[0])


def test_what_onnx_runtime_has_no_kernels_for_is_served_all_the_same(server: TritonServer, folder: Path) -> None:
    assert [finding for finding in lint(folder / "models") if finding.model.startswith("half")] == []
    assert infer(server, "half", text=("BYTES", [1, 1], ["0,2,1,0"]))["label"] == ["b"]


@pytest.mark.parametrize("model", ["sum", "pooled"])
def test_sizes_that_a_model_can_not_do_harm_nobody_else(server: TritonServer, model: str) -> None:
    """OpenVINO's compiled model goes on failing at the size of before."""

    def asked(good: bool) -> Any:
        if model == "sum":
            return infer(
                server, "sum", a=("FP32", [1, 3], [1, 2, 3]), b=("FP32", [1, 3 + (not good)], [1.0] * (3 + (not good)))
            )
        side = 16 if good else 4
        return infer(server, "pooled", x=("FP32", [1, 1, side, side], [1.0] * side * side))

    want = asked(True)
    for _ in range(3):
        with pytest.raises(urllib.error.HTTPError):
            asked(False)
        assert asked(True) == want


def test_hooks_scalars_and_models_without_a_batch_are_served(server: TritonServer) -> None:
    assert infer(server, "hooked", text=("BYTES", [1, 1], ["0,2,1,0"]))["label"] == ["b"]
    assert infer(server, "sum", a=("FP32", [2, 2], [1, 2, 3, 4]), b=("FP32", [2, 2], [1, 1, 1, 1]))["total"] == [5, 9]
    assert infer(server, "flat", x=("FP32", [2, 2], [1, 2, 3, 4]))["y"] == [-1, -2, -3, -4]


@pytest.mark.parametrize("model", ["plain", "streams"])
def test_requests_that_wait_are_answered_in_batches_each_with_its_own(server: TritonServer, model: str) -> None:
    def ask(number: int) -> list[float]:
        return infer(server, model, x=("FP32", [1, 4], [float(number), 0, 0, 0]))["logits"]

    before = statistics(server, model)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(64)))
    assert answers == [[float(number), 0.0, 0.0] for number in range(64)]
    after = statistics(server, model)
    assert after["inference_count"] - before["inference_count"] == 64
    if model == "plain":  # which waits for others
        assert after["execution_count"] - before["execution_count"] <= 32


def test_a_request_that_fails_leaves_its_batch_unharmed(server: TritonServer) -> None:
    """Sizes that don't fit each other: the batch fails, and each is run alone."""

    def ask(length: int) -> list[float]:
        row = ("FP32", [1, length], [1.0] * length)
        return infer(server, "sum", a=row, b=row)["total"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(1, 9))) == [[2.0 * length] for length in range(1, 9)]


def test_the_configuration_is_that_of_tritons_own_backend(server: TritonServer, folder: Path) -> None:
    config = from_pbtxt((folder / "models/plain/config.pbtxt").read_text())
    assert (config.backend, config.default_model_filename) == ("openvino", "model.onnx")
    assert {
        "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": "1", "PERFORMANCE_HINT": "LATENCY", "ENABLE_BATCH_PADDING": "YES",
    }.items() <= config.parameters.items()  # fmt: skip
    streams = from_pbtxt((folder / "models/streams/config.pbtxt").read_text()).parameters
    assert (streams["NUM_STREAMS"], streams["PERFORMANCE_HINT"]) == ("2", "THROUGHPUT")
    assert "ENABLE_BATCH_PADDING" not in from_pbtxt((folder / "models/flat/config.pbtxt").read_text()).parameters
    assert not [found for found in lint(folder / "models") if found.severity == "error"]
    assert load_subject(folder / "models", "hooked").network == "hooked_network"


@pytest.mark.parametrize(
    ("swap", "why"),
    [
        (('string_value: "LATENCY"', 'string_value: "SOON"'), "PERFORMANCE_HINT"),
        (('key: "PERFORMANCE_HINT"', 'key: "NUM_STREAMS"'), "NUM_STREAMS is 'LATENCY'"),
        (("TYPE_FP32", "TYPE_FP64"), "TYPE_FP64"),
        (("model.onnx", "../../elsewhere.onnx"), "leads out of"),
        (('key: "PERFORMANCE_HINT"', 'key: "TARGET_DEVICE"'), "TARGET_DEVICE"),
        pytest.param(
            ('key: "ENABLE_BATCH_PADDING"', 'key: "HINT_BF16"'), "does not multiply BF16 in hardware",
            marks=pytest.mark.skipif(fast_bfloat16(), reason="this CPU multiplies BF16"),
        ),
    ],
)  # fmt: skip
def test_what_it_can_t_do_is_refused_when_it_is_loaded(
    server: TritonServer, tmp_path: Path, swap: tuple[str, str], why: str
) -> None:
    artifact = on_openvino(tiny_artifact(tmp_path / "tiny"))
    pack(artifact, repository=server.repository, name="refused", options=PackOptions(instances=1))
    path = server.repository / "refused/config.pbtxt"
    text = path.read_text()
    assert swap[0] in text
    path.write_text(text.replace(*swap))
    try:
        with pytest.raises(ServerError) as caught:
            load_model(f"http://{server.http_address}", "refused")
    finally:
        shutil.rmtree(path.parent)
    assert why in caught.value.why


def test_without_openvino_it_is_a_clear_error_before_triton_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(on_openvino(tiny_artifact(tmp_path / "tiny")), repository=tmp_path / "models", name="plain")
    check_models(tmp_path / "models")
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setattr(lint_run, "EMBEDDED", tuple(name for name in lint_run.EMBEDDED if name != "openvino"))
    with pytest.raises(RepositoryError) as caught:
        check_models(tmp_path / "models")
    assert "no OpenVINO" in caught.value.why
    assert "[openvino]" in caught.value.mend
    check_models(tmp_path / "models", container=True)


def test_what_was_measured_in_bf16_is_served_in_bf16(tmp_path: Path) -> None:
    artifact = Artifact.load(on_openvino(tiny_artifact(tmp_path / "tiny")))
    for runtime, hint in (("OpenVINO", None), ("OpenVINO, BF16", "YES")):
        row = StageReport("half_onnx", "did", Measured(runtime=runtime), 1.0)
        dataclasses.replace(artifact, stages=(row,)).save()
        pack(artifact.folder, repository=tmp_path / "m", name="plain")
        config = from_pbtxt((tmp_path / "m/plain/config.pbtxt").read_text())
        assert config.parameters.get("HINT_BF16") == hint


def test_the_runtime_can_be_said_when_it_is_packed(tmp_path: Path) -> None:
    artifact = on_openvino(tiny_artifact(tmp_path / "tiny"))
    for runtime, gpu in (("onnxruntime", "cpu"), (None, "gpu")):
        pack(artifact, repository=tmp_path / "m", name="plain", options=PackOptions(runtime=runtime, device=gpu))  # type: ignore[arg-type]
        assert from_pbtxt((tmp_path / "m/plain/config.pbtxt").read_text()).backend == "onnxruntime"
    with pytest.raises(RepositoryError, match="runtime openvino"):
        PackOptions(runtime="openvino", device="gpu")


def test_tuning_sets_the_streams_and_threads_of_all_instances(tmp_path: Path) -> None:
    options = PackOptions(instances=2, threads=3)
    pack(on_openvino(tiny_artifact(tmp_path / "tiny")), repository=tmp_path / "models", name="plain", options=options)
    messages = load_subject(tmp_path / "models", "plain").messages()
    present = candidate_of(messages, "plain")
    assert (present.instances, present.threads) == (2, 3)
    for other in candidates(present, cores=4):
        write_into(messages, "plain", other)
        assert candidate_of(messages, "plain") == other
        parameters = messages["plain"].parameters
        assert parameters["NUM_STREAMS"].string_value == str(other.instances)
        assert parameters["INFERENCE_NUM_THREADS"].string_value == str(other.instances * other.threads)
