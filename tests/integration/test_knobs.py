"""Every knob of `serve pack`, read off the real Triton: its answers, statistics, metrics and time."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages

from compress.host.cores import cores_here
from serve.cli.main import main
from serve.gateway.upstream.outliers import Verdict
from serve.gateway.upstream.verdicts import verdict_of, was_hurried
from serve.http.message import Response
from serve.pack.write import PackOptions, pack
from serve.triton.launch import TritonOptions, TritonServer
from tests.integration.test_triton import FREE, get, infer, refusal
from tests.serve_models import hook_file, tiny_artifact

pytestmark = pytest.mark.integration
SLOW = """\
import time
import numpy as np


def preprocess(seconds: float) -> np.ndarray:
    time.sleep(seconds)
    return np.zeros(4, np.float32)
"""
TABLES = """\
instances = 1
metric_tags = { team = "vision" }
max_queue_delay_microseconds = 100

[preprocess.dynamic_batching]
preserve_ordering = true

[[network.instance_group]]
count = 3
kind = "KIND_CPU"

[ensemble.parameters]
owner = "us"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("knobs")
    repository, tiny = folder / "models", tiny_artifact(folder / "tiny")
    labels = folder / "names.txt"
    labels.write_text("one\ntwo\nthree\n")
    (folder / "pack.toml").write_text(TABLES)
    slow = hook_file(folder / "slow", SLOW)
    limited = {
        "instance_group": [{"count": 2, "rate_limiter": {"resources": [{"name": "R", "global": True, "count": 1}]}}]
    }
    ordered = {"dynamic_batching": {"preserve_ordering": True}}
    options = {
        "delayed": PackOptions(instances=1, max_queue_delay_microseconds=300_000),
        "preferred": PackOptions(instances=1, max_queue_delay_microseconds=3_000_000, preferred_batch_size=(4,)),
        "unbatched": PackOptions(instances=1, dynamic_batching=False),
        "cached": PackOptions(instances=1, response_cache=True),
        "labelled": PackOptions(instances=1, labels=labels),
        "tagged": PackOptions(instances=1, metric_tags={"team": "vision"}),
        "basic": PackOptions(instances=1, graph_level=-1, warmup=False),
        "sequence": PackOptions(instances=1, models={"network": {"sequence_batching": {}}}),
        "both": PackOptions(instances=1, serve_latest=2),
        "small": PackOptions(instances=1, max_batch_size=2),
        "threads1": PackOptions(instances=1, threads=1),
        "threads2": PackOptions(instances=1, threads=2),
    }
    for name, option in options.items():
        pack(tiny, repository=repository, name=name, options=option)
    pack(tiny, repository=repository, name="both", options=options["both"])
    slow_options = {
        "queue": PackOptions(instances=1, max_batch_size=1, max_queue_size=2),
        "timeout": PackOptions(instances=1, max_batch_size=1, queue_timeout_microseconds=200_000),
        "priority": PackOptions(instances=1, max_batch_size=1, priority_levels=2, default_priority_level=2),
        "limited": PackOptions(instances=1, max_batch_size=1, models={"preprocess": limited}),
        "parallel": PackOptions(instances=1, max_batch_size=1, hook_instances=2),
        "ordered": PackOptions(instances=1, max_batch_size=1, hook_instances=2, models={"preprocess": ordered}),
    }
    for name, option in slow_options.items():
        pack(tiny, repository=repository, name=name, hooks=slow, options=option)
    words = [str(tiny), "--repository", str(repository), "--name", "toml", "--hooks", str(slow)]
    with pytest.raises(SystemExit) as ended:
        main(["pack", *words, "--config", str(folder / "pack.toml"), "--max-queue-delay-microseconds", "7"])
    assert ended.value.code in (0, None)
    verbose = TritonOptions(log_verbose=1)
    with TritonServer(repository, ports=FREE, options=verbose, log=folder / "triton.log") as server:
        yield server


def tiny(server: TritonServer, model: str, number: float = 1.0) -> list[Any]:
    return infer(server, model, x=("FP32", [1, 4], [number, 2, 3, 4]))["logits"]


def counts(server: TritonServer, model: str) -> tuple[int, int]:
    (stats,) = get(server, f"/v2/models/{model}/stats")["model_stats"]
    return stats["inference_count"], stats["execution_count"]


def change(server: TritonServer, model: str, before: tuple[int, int]) -> tuple[int, int]:
    """Items and executions since then; the warm-up counts, too."""
    after = counts(server, model)
    return after[0] - before[0], after[1] - before[1]


def at_once(server: TritonServer, model: str, requests: int) -> float:
    """Seconds that so many requests at the same time take together."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(requests) as pool:
        list(pool.map(lambda _: tiny(server, model), range(requests)))
    return time.perf_counter() - begun


def slow(server: TritonServer, model: str, seconds: float, **parameters: int) -> int:
    """Occupy a slow hook; the status of the answer."""
    return slow_answer(server, model, seconds, **parameters)[0]


def slow_answer(server: TritonServer, model: str, seconds: float, **parameters: int) -> tuple[int, bytes]:
    body = {
        "parameters": parameters,
        "inputs": [{"name": "seconds", "datatype": "FP32", "shape": [1, 1], "data": [seconds]}],
    }
    url = f"http://{server.http_address}/v2/models/{model}/infer"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=30) as response:
            return int(response.status), response.read()
    except urllib.error.HTTPError as err:
        with err:
            return err.code, err.read()


def stub_threads(model: str) -> int:
    """Threads of the process that holds a model's only instance."""
    (stub,) = [
        process
        for process in Path("/proc").glob("[0-9]*")
        if b"python_backend_stub" in (words := command_line(process)) and f"/{model}/".encode() in words
    ]
    return len(list((stub / "task").iterdir()))


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_a_queue_delay_makes_batches(server: TritonServer) -> None:
    before = counts(server, "delayed")
    at_once(server, "delayed", 8)
    inferences, executions = change(server, "delayed", before)
    assert inferences == 8
    assert executions <= 3


def test_a_preferred_batch_size_ends_the_wait(server: TritonServer) -> None:
    assert at_once(server, "preferred", 4) < 2.0  # of the 3 s that it would wait for more


def test_without_dynamic_batching_each_request_runs_as_it_comes(server: TritonServer) -> None:
    before = counts(server, "unbatched")
    at_once(server, "unbatched", 8)
    assert change(server, "unbatched", before) == (8, 8)
    assert "dynamic_batching" not in get(server, "/v2/models/unbatched/config")


def test_an_answer_comes_from_the_cache_the_second_time(server: TritonServer) -> None:
    before = counts(server, "cached")
    assert tiny(server, "cached") == tiny(server, "cached")
    (stats,) = get(server, "/v2/models/cached/stats")["model_stats"]
    assert stats["inference_stats"]["cache_hit"]["count"] == 1
    assert change(server, "cached", before)[1] == 1


def test_labels_name_the_classes(server: TritonServer) -> None:
    outputs = [{"name": "logits", "parameters": {"classification": 2}}]
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 5, 1, 0]}]
    url = f"http://{server.http_address}/v2/models/labelled/infer"
    body = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as response:
        (answer,) = json.load(response)["outputs"]
    assert answer["data"] == ["5.000000:1:two", "1.000000:2:three"]


def test_metrics_carry_the_models_tags(server: TritonServer) -> None:
    tiny(server, "tagged")
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("nv_inference_request_success") and 'model="tagged"' in line]
    assert 'team="vision"' in line


def test_a_warm_up_is_run_unless_it_is_switched_off(server: TritonServer) -> None:
    log = server.log.read_text(encoding="utf-8", errors="replace")
    warmed = [line for line in log.splitlines() if "warmup sample" in line]
    assert any("'delayed'" in line and "batch_32" in line for line in warmed)
    assert not any("'basic'" in line for line in warmed)


def test_a_graph_level_reaches_the_backend(server: TritonServer) -> None:
    assert get(server, "/v2/models/basic/config")["optimization"]["graph"]["level"] == -1
    assert tiny(server, "basic") == [5.0, 6.0, 7.0]


def test_two_versions_are_served_when_two_are_wanted(server: TritonServer) -> None:
    stats = get(server, "/v2/models/both/stats")["model_stats"]
    assert sorted(each["version"] for each in stats) == ["1", "2"]


def test_a_sequence_needs_its_id(server: TritonServer) -> None:
    code, told = refusal(lambda: tiny(server, "sequence"))
    assert code == 400
    assert "correlation ID" in told


def test_a_request_beyond_max_batch_size_is_refused(server: TritonServer) -> None:
    def ask(samples: int) -> Any:
        return infer(server, "small", x=("FP32", [samples, 4], [1.0] * 4 * samples))["logits"]

    assert len(ask(2)) == 6
    code, told = refusal(lambda: ask(3))
    assert code == 400
    assert "batch-size must be <= 2" in told


def test_a_network_has_the_threads_that_it_was_given(server: TritonServer) -> None:
    has = min(2, cores_here().count)  # not more than there are cores
    assert stub_threads("threads2") - stub_threads("threads1") == has - 1  # one is the caller's


def test_a_full_queue_refuses(server: TritonServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: slow(server, "queue", 0.3), range(8)))
    assert answers.count(200) >= 3
    assert answers.count(503) >= 1


def test_a_request_that_waited_too_long_is_refused(server: TritonServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: slow(server, "timeout", 0.6), range(3)))
    assert answers.count(200) == 1
    assert set(answers) - {200} <= {503, 504, 429, 500}


def test_a_client_s_own_short_wait_in_a_queue_is_no_fault_of_the_server_s(server: TritonServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: slow_answer(server, "timeout", 0.6, timeout=1000), range(3)))
    refused = [Response(status, [], body, len(body)) for status, body in answers if status != 200]
    assert len(refused) == 2
    assert {verdict_of(answer, b'{"parameters":{"timeout":1000}}') for answer in refused} == {Verdict.NOTHING}
    assert {verdict_of(answer, b'{"parameters":{}}') for answer in refused} == {Verdict.GATEWAY_FAILURE}


def test_the_same_holds_over_grpc(server: TritonServer) -> None:
    def ask(wait: int) -> str | None:
        seconds = messages.ModelInferRequest.InferInputTensor(name="seconds", datatype="FP32", shape=[1, 1])
        request = messages.ModelInferRequest(
            model_name="timeout", inputs=[seconds], raw_input_contents=[np.float32(0.6).tobytes()]
        )
        request.parameters["timeout"].int64_param = wait
        with grpc.insecure_channel(server.grpc_address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            try:
                call(request.SerializeToString(), timeout=30)
            except grpc.RpcError as err:
                return str(err.details())
        return None

    with ThreadPoolExecutor(3) as pool:
        refused = [told for told in pool.map(ask, [1000] * 3) if told is not None]
    assert len(refused) == 2
    assert all(was_hurried(told.encode(), lambda: True) for told in refused)


def test_the_first_priority_is_served_first(server: TritonServer) -> None:
    order: list[str] = []

    def ask(name: str, seconds: float, **parameters: int) -> None:
        assert slow(server, "priority", seconds, **parameters) == 200
        order.append(name)

    threads = [threading.Thread(target=ask, args=("blocker", 0.8))]
    threads[0].start()
    time.sleep(0.2)
    for number in range(3):
        threads.append(threading.Thread(target=ask, args=(f"late{number}", 0.1)))
        threads[-1].start()
    time.sleep(0.2)
    threads.append(threading.Thread(target=ask, args=("urgent", 0.1), kwargs={"priority": 1}))
    threads[-1].start()
    for thread in threads:
        thread.join()
    assert order.index("urgent") <= 2  # one may be taken already


def test_a_shared_resource_lets_one_instance_run_at_a_time(server: TritonServer) -> None:
    took = {}
    for model in ("limited", "parallel"):
        begun = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda _, model=model: slow(server, model, 0.5), range(2))) == [200, 200]
        took[model] = time.perf_counter() - begun
    assert took["limited"] >= 1.0
    assert took["parallel"] < took["limited"]


@pytest.mark.parametrize(("model", "waits"), [("ordered", True), ("parallel", False)])
def test_an_answer_waits_for_those_asked_before_it_where_order_is_kept(
    server: TritonServer, model: str, waits: bool
) -> None:
    first = threading.Thread(target=slow, args=(server, model, 3.0))
    first.start()
    time.sleep(0.3)
    begun = time.perf_counter()
    assert slow(server, model, 0.0) == 200
    assert (time.perf_counter() - begun > 2.0) == waits
    first.join()


def test_a_file_sets_flags_and_any_field_and_the_command_line_wins(server: TritonServer) -> None:
    network, before, ensemble = (get(server, f"/v2/models/{name}/config") for name in
                                 ("toml_network", "toml_preprocess", "toml"))  # fmt: skip
    assert network["instance_group"][0]["count"] == 3
    assert network["metric_tags"] == {"team": "vision"}
    assert network["dynamic_batching"]["max_queue_delay_microseconds"] == 7
    assert before["dynamic_batching"]["preserve_ordering"] is True
    assert ensemble["parameters"]["owner"]["string_value"] == "us"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("instance = 1", "did you mean 'instances'?"),
        ("[netwrk]", "no model of a pack has that role"),
        ("[ensemble]\nmax_batch_size = 1", "this pack writes no such model"),
        ("[network]\nname = 'y'", "a model is named as its folder is"),
        ("instances = ", "it is not TOML"),
        ("instances = 'x'", "instances"),
    ],
)
def test_a_mistake_in_the_file_is_told(
    tmp_path: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pack.toml").write_text(text)
    words = [str(tiny_artifact(tmp_path / "tiny")), "--repository", str(tmp_path / "models"), "--name", "x"]
    with pytest.raises(SystemExit) as ended:
        main(["pack", *words, "--config", str(tmp_path / "pack.toml")])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert told in captured.err + captured.out
    assert not (tmp_path / "models" / "x").exists()
