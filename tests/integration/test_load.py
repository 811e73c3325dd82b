"""The load tester against a real Triton, directly and through the gateway."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from compress.errors import ServerError
from serve.cli.main import main
from serve.gateway.settings import Settings
from serve.load.figures import server_side
from serve.load.figures.result import LoadResult
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonServer
from serve.verify.run import verify
from tests.serve_http import gateway_thread
from tests.serve_models import HOOKS, hook_file, tiny_artifact

GRPC: list[str] = []
ONE = PackOptions(instances=1)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("load")
    artifact = tiny_artifact(folder / "artifact")
    pack(artifact, repository=folder / "repository", name="tiny", options=ONE)
    pack(artifact, repository=folder / "repository", name="hooked", hooks=hook_file(folder), options=ONE)
    turned = HOOKS.replace("    label: str\n    score: float", "    score: float\n    label: str")
    turned = turned.replace('Answer("abc"[best], float(logits[best]))', 'Answer(float(logits[best]), "abc"[best])')
    hooks = hook_file(folder / "turned", turned)
    pack(artifact, repository=folder / "repository", name="turned", hooks=hooks, options=ONE)
    without_example = hook_file(folder / "particular", HOOKS[: HOOKS.index("def example")])
    pack(artifact, repository=folder / "repository", name="particular", hooks=without_example, options=ONE)
    with TritonServer(folder / "repository", ports=Ports(0, 0, 0)) as server:
        GRPC.append(f"grpc://{server.grpc_address}")
        yield f"http://{server.http_address}"


@pytest.fixture(scope="module")
def grpc(triton: str) -> str:
    assert triton
    return GRPC[-1]


@pytest.fixture(scope="module")
def gateway(triton: str) -> Iterator[str]:
    with gateway_thread(Settings(upstream=(triton,), port=0)) as url:
        yield url


def successes(triton: str, model: str) -> int:
    """Triton's own count, once it stands still: it counts an ensemble's answer a moment after sending it."""
    counts = [-1, counted(triton, model)]
    while counts[-1] != counts[-2]:
        time.sleep(0.3)
        counts.append(counted(triton, model))
    return counts[-1]


def counted(triton: str, model: str) -> int:
    with urllib.request.urlopen(f"{triton}/v2/models/{model}/stats") as answer:
        stats = json.load(answer)["model_stats"][0]["inference_stats"]
    return int(stats["success"]["count"])


@pytest.mark.parametrize("way", ["triton", "gateway"])
@pytest.mark.parametrize("model", ["tiny", "hooked"])
@pytest.mark.parametrize("rate", ["", "100"])
def test_counts_are_tritons(triton: str, way: str, model: str, rate: str, request: pytest.FixtureRequest) -> None:
    url: str = request.getfixturevalue(way)
    before = successes(triton, model)
    result = run_load(LoadOptions(model, url, rate=rate, concurrency=4, duration=0.5, warmup=0.2))
    assert result.errors == {}
    assert result.warmup_count + result.count == successes(triton, model) - before
    assert result.count > 0
    assert result.p50_ms is not None
    assert LoadResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


@pytest.mark.parametrize("way", ["triton", "gateway", "grpc"])
def test_a_model_that_refuses_drawn_values_is_not_measured(way: str, request: pytest.FixtureRequest) -> None:
    url: str = request.getfixturevalue(way)
    with pytest.raises(ServerError, match="can't make a request that the model 'particular' answers") as caught:
        run_load(LoadOptions("particular", url, duration=0.5))
    assert "could not convert string to float" in caught.value.why
    assert "--data" in caught.value.mend


def test_a_load_that_nobody_answered_does_not_end_well(triton: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", text=np.array(["no numbers"]))
    np.savez(tmp_path / "good.npz", text=np.array(["0,1,2,3"]))
    common = ["load", triton, "--model", "particular", "--duration", "0.3", "--warmup", "0", "--data"]
    codes = []
    for name in ("good.npz", "bad.npz"):
        with pytest.raises(SystemExit) as ended:
            main([*common, str(tmp_path / name)])
        codes.append(ended.value.code)
    assert codes == [0, 1]


def test_tritons_own_account_says_where_the_time_went(triton: str, gateway: str) -> None:
    for url in (triton, gateway):
        result = run_load(LoadOptions("hooked", url, concurrency=8, duration=2, warmup=0.2))
        told = result.breakdown
        assert told is not None
        assert told.models[0].model == "hooked"
        assert {model.model for model in told.models[1:]} >= {"hooked_network"}
        network = next(model for model in told.models if model.model == "hooked_network")
        assert 0.3 * result.count < network.requests < 1.1 * result.count  # counted from the warm-up's end on, about
        batched = sum(size * count for size, count in network.batches.items())
        assert abs(batched - network.rows) <= 16  # read while it works: its two counts are not of one moment
        assert network.batch_size is not None
        assert network.batch_size >= 1
        assert 0 < network.infer_ms <= network.total_ms
        assert result.latency.mean_ms is not None
        assert told.models[0].total_ms < result.latency.mean_ms
        assert (told.gateway_ms is not None) == (url == gateway)
        assert told.gateway_ms is None or told.models[0].total_ms < told.gateway_ms < result.latency.mean_ms * 1.2
        assert result.server is not None
        assert result.server.cpu_share > 0


def test_over_grpc_the_same_answers_come_in_the_same_number(
    grpc: str, triton: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server_side, "TIMEOUT_S", 60.0
    )  # a machine with other work to do tells late, and that's not all
    before = successes(triton, "tiny")
    for rate in ("", "100"):
        result = run_load(LoadOptions("tiny", grpc, rate=rate, concurrency=4, duration=0.5, warmup=0.2, expect="same"))
        assert result.errors == {}
        assert result.count > 0
        after = successes(triton, "tiny")
        assert result.warmup_count + result.count == after - before
        before = after
        assert result.breakdown is not None
        assert result.breakdown.models[0].model == "tiny"
    with pytest.raises(ServerError, match="no model 'other'"):
        run_load(LoadOptions("other", grpc))
    with pytest.raises(ServerError, match="can't reach"):
        run_load(LoadOptions("tiny", "grpc://127.0.0.1:1", timeout=2))


@pytest.mark.parametrize("form", ["binary", "json", "grpc"])
def test_a_dataset_gives_the_models_own_accuracy_and_values(
    form: Literal["binary", "json", "grpc"], triton: str, grpc: str, tmp_path: Path
) -> None:
    """Labels and values are those that the model itself gave, one label of ten set wrong."""
    x = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [10, 4], "data": x.ravel().tolist()}]}
    asked = urllib.request.Request(f"{triton}/v2/models/tiny/infer", json.dumps(body).encode())
    with urllib.request.urlopen(asked) as answer:
        output = json.load(answer)["outputs"][0]
    values = np.array(output["data"], np.float32).reshape(output["shape"])
    labels = values.argmax(axis=1)
    labels[3] += 1
    np.savez(tmp_path / "data.npz", x=x, label=labels)
    np.savez(tmp_path / "right.npz", **{output["name"]: values})  # type: ignore[arg-type]
    np.savez(tmp_path / "wrong.npz", **{output["name"]: values + (np.arange(10) == 0)[:, None]})
    options = LoadOptions(
        "tiny", grpc if form == "grpc" else triton, form="json" if form == "json" else "binary", data=tmp_path / "data.npz",
        max_requests=40, concurrency=2, warmup=0,
    )  # fmt: skip
    plain = run_load(options)
    assert (plain.count, plain.errors, plain.labelled, plain.accuracy) == (40, {}, 40, 0.9)
    assert run_load(options.with_(expect=str(tmp_path / "right.npz"))).errors == {}
    assert run_load(options.with_(expect=str(tmp_path / "wrong.npz"))).errors == {"wrong values": 4}
    batched = run_load(options.with_(batch=("5",)))
    assert batched.inferences == pytest.approx(5 * batched.throughput)
    assert batched.accuracy == 0.9


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten texts with the label that the hooks give, but for the last; and the body that /predict takes."""
    folder = tmp_path_factory.mktemp("texts")
    texts = [",".join("9" if at == number % 3 else "0" for at in range(4)) for number in range(10)]
    labels = ["abc"[number % 3] for number in range(9)] + ["b"]
    np.savez(folder / "data.npz", text=np.array(texts), label=np.array(labels))
    (folder / "body.json").write_text('{"text": ${text}}')
    return folder


def labelled(form: str, model: str, texts: Path, request: pytest.FixtureRequest) -> LoadOptions:
    url: str = request.getfixturevalue({"grpc": "grpc", "plain": "gateway"}.get(form, "triton"))
    common: dict[str, Any] = {"data": texts / "data.npz", "concurrency": 2, "max_requests": 40, "warmup": 0}
    if form == "plain":
        return LoadOptions("", f"{url}/predict/{model}", body=texts / "body.json", **common)
    return LoadOptions(model, url, form="json" if form == "json" else "binary", **common)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("form", ["binary", "json", "grpc", "plain"])
def test_the_output_that_is_judged_is_the_one_that_verify_judges(
    form: str, processes: int, gateway: str, texts: Path, request: pytest.FixtureRequest
) -> None:
    """It is the model's first, in whatever order Triton writes them into an answer."""
    found = {}
    for model, wanted in (("hooked", 0.9), ("turned", 0.0)):
        assert verify(gateway, model, texts / "data.npz").parts[0].accuracy == wanted
        asked = labelled(form, model, texts, request).with_(processes=processes)
        found[model] = [run_load(asked.with_(label_output=name)).accuracy for name in ("", "label", "score")]
    assert found == {"hooked": [0.9, 0.9, 0.0], "turned": [0.0, 0.9, 0.0]}


@pytest.mark.parametrize("form", ["binary", "json", "grpc", "plain"])
def test_an_output_that_the_model_does_not_have_is_told_before_anything_is_sent(
    form: str, triton: str, texts: Path, request: pytest.FixtureRequest
) -> None:
    before = successes(triton, "hooked")
    with pytest.raises(ServerError, match="there is no output 'nosuch'") as caught:
        run_load(labelled(form, "hooked", texts, request).with_(label_output="nosuch"))
    assert caught.value.why == "the model gives label, score"
    assert "--label-output" in caught.value.mend
    assert successes(triton, "hooked") == before
