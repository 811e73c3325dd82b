"""Releases in front of a real Triton, started and followed as a user does."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
import tritonclient.grpc
from onnx import numpy_helper
from tritonclient.utils import InferenceServerException

from serve.cli.main import main
from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.pack.options import PackOptions
from serve.pack.write import pack
from serve.triton.control import load_model
from serve.triton.launch import Ports, TritonOptions, TritonServer
from tests.gateway_models import fetch
from tests.serve_http import gateway_thread
from tests.serve_models import WEIGHT, hook_file, tiny_artifact

RANKED_CONFIG = """\
backend: "python"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "labels" data_type: TYPE_STRING dims: [ 3 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
RANKED_MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils

LABELS = {labels}


class TritonPythonModel:
    def execute(self, requests):
        sizes = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy().shape[0] for request in requests]
        rows = [np.array([LABELS] * size, dtype=object) for size in sizes]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("labels", row)]) for row in rows]
"""
# Three labels, the best first: two models that are as good, and one that says something else.
RANKED = {"ranked": ["cat", "dog", "cow"], "reranked": ["cat", "cow", "fox"], "others": ["pig", "hen", "ox"]}
X = [[0.0, 2.0, 1.0, 0.0]]
INFER = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": X}]}).encode()


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """ "tiny" and "hooked" with two versions, "hooked_next" and "piped" with hooks of their own; "worse" that confuses two classes, "near" whose scores are a bit larger,
    "blank" whose scores are NaN;
    "trained" whose versions 1, 2 and 3 are these; `RANKED`, and "doubled" whose two versions are the first."""
    folder = tmp_path_factory.mktemp("rollout")
    repository = folder / "repository"
    artifact = tiny_artifact(folder / "artifact")
    both = PackOptions(serve_latest=2)
    for _ in range(2):
        pack(artifact, repository=repository, name="tiny", options=both)
        pack(artifact, repository=repository, name="hooked", hooks=hook_file(folder), options=both)
    pack(artifact, repository=repository, name="hooked_next", hooks=hook_file(folder))
    pack(artifact, repository=repository, name="piped", hooks=hook_file(folder), options=PackOptions(pipeline="bls"))
    pack(changed(artifact, folder / "worse.onnx", WEIGHT[:, [0, 2, 1]]), repository=repository, name="worse")
    pack(changed(artifact, folder / "near.onnx", WEIGHT * np.float32(1.001)), repository=repository, name="near")
    pack(changed(artifact, folder / "blank.onnx", WEIGHT * np.float32("nan")), repository=repository, name="blank")
    three = PackOptions(serve_latest=3)
    for path in (artifact, folder / "worse.onnx", folder / "near.onnx"):
        pack(path, repository=repository, name="trained", options=three)
    for name, labels in RANKED.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(f'name: "{name}"\n{RANKED_CONFIG}')
        (version / "model.py").write_text(RANKED_MODEL.format(labels=labels))
    doubled = repository / "doubled"
    shutil.copytree(repository / "ranked", doubled)
    shutil.copytree(doubled / "1", doubled / "2")
    (doubled / "config.pbtxt").write_text(
        f'name: "doubled"\n{RANKED_CONFIG}version_policy: {{ latest: {{ num_versions: 2 }} }}\n'
    )
    with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
        yield server


def changed(artifact: Path, path: Path, weight: np.ndarray[Any, Any]) -> Path:
    """The network of a tiny artifact with other weights, written to `path`."""
    model = onnx.load(next(artifact.glob("*.onnx")))
    for tensor in model.graph.initializer:
        if tensor.dims == list(WEIGHT.shape):
            tensor.CopyFrom(numpy_helper.from_array(weight.copy(), tensor.name))
    onnx.save(model, path)
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.db"


@pytest.fixture
def url(triton: TritonServer, state: Path) -> Iterator[str]:
    with gateway_thread(Settings(upstream=(f"http://{triton.http_address}",), port=0, state=state)) as url:
        yield url


@pytest.fixture
def url_with_rules(triton: TritonServer, state: Path) -> Iterator[str]:
    """A gateway with a function of its owner's, which is called in another process: to start that takes seconds."""
    rules = state.with_name("rules.py")
    rules.write_text("def in_common(mine, theirs):\n    return len(set(mine) & set(theirs)) >= 2\n")
    settings = Settings(upstream=(f"http://{triton.http_address}",), port=0, state=state, agree_module=rules)
    with gateway_thread(settings) as url:
        yield url


def gateway_for(request: pytest.FixtureRequest, *words: str) -> str:
    """The URL of a gateway, with rules where the words ask for one."""
    url: str = request.getfixturevalue("url_with_rules" if any("function=" in word for word in words) else "url")
    return url


@contextmanager
def asking(ask: Callable[[], None], pause_s: float = 0.0) -> Iterator[None]:
    """Two clients that do this again and again."""
    stop = threading.Event()

    def go_on() -> None:
        while not stop.wait(pause_s):
            ask()

    clients = [threading.Thread(target=go_on) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()


@contextmanager
def critics(url: str, model: str) -> Iterator[Counter[tuple[str, bool]]]:
    """Two clients that ask all the time and tell the true class; who answered, and whether that was it."""
    seen: Counter[tuple[str, bool]] = Counter()
    truth = int(np.argmax(np.array(X) @ WEIGHT))

    def ask() -> None:
        with urllib.request.urlopen(f"{url}/v2/models/{model}/infer", INFER) as answer:
            id_ = answer.headers["answer-id"]
        if id_ is not None:  # else the rollout has not begun
            status, told = fetch(f"{url}/feedback", json.dumps({"id": id_, "label": truth}).encode())
            assert (status, told["counted"]) == (200, True)
            seen[told["served_by"], told["correct"]] += 1

    with asking(ask):
        yield seen


@contextmanager
def traffic(
    url: str, body: bytes = INFER, path: str = "/v2/models/tiny/infer", pause_s: float = 0.0
) -> Iterator[Counter[int]]:
    """Two clients that ask all the time; statuses of their answers."""
    seen: Counter[int] = Counter()

    def ask() -> None:
        seen[fetch(url + path, body)[0]] += 1

    with asking(ask, pause_s):
        yield seen


def rollout(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`serve rollout` in this process: a start of Python for each takes longer than most of what is tried here."""
    command, code = ["rollout", *arguments, "--state", str(state)], 0
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as errors:
        try:
            main(command)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(command, code, said.getvalue(), errors.getvalue())


def version_served(url: str) -> str:
    return str(fetch(f"{url}/v2/models/tiny/infer", INFER)[1]["model_version"])


QUICK = (
    "--shadow",
    "50",
    "--steps",
    "50",
    "--step-s",
    "0",
    "--max-error-increase",
    "0.1",
    "--max-disagreement",
    "0.1",
)


def test_a_version_is_proven_on_live_traffic_and_takes_over(url: str, state: Path) -> None:
    assert version_served(url) == "2", "Triton's own choice is the latest"
    with traffic(url) as seen:
        done = rollout(state, "start", "tiny", "--candidate", "2", "--wait", *QUICK, "--max-latency-increase", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny/1 goes on answering" in done.stdout
    assert "it disagrees with the baseline on 0%" in done.stdout
    assert set(seen) == {200}
    assert version_served(url) == "2"
    told = rollout(state, "history", "tiny").stdout
    assert "tiny/1 → tiny/2 · promoted" in told
    assert rollout(state, "clear", "tiny").returncode == 0


@pytest.mark.parametrize("candidate", ["worse", "blank"])
def test_a_model_that_answers_otherwise_is_taken_back_before_it_answers_anybody(
    url: str, state: Path, candidate: str
) -> None:
    with traffic(url) as seen:
        done = rollout(state, "start", "tiny", "--candidate", candidate, "--wait", *QUICK)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "it disagrees with the baseline on 100%" in done.stdout
    assert set(seen) == {200}
    answered = fetch(f"{url}/v2/models/tiny/infer", INFER)[1]
    assert answered["outputs"][0]["data"] == (np.array(X) @ WEIGHT).ravel().tolist()
    status = json.loads(rollout(state, "status", "--json").stdout)[0]
    assert (status["state"], status["weight"], status["baseline"]) == ("aborted", 0.0, "tiny")


@pytest.mark.parametrize(("candidate", "promoted"), [("near", True), ("worse", False)])
def test_classes_that_a_client_asks_for_are_judged_as_their_scores_would_be(
    url: str, state: Path, candidate: str, promoted: bool
) -> None:
    outputs = [{"name": "logits", "parameters": {"classification": 3}}]
    body = json.dumps({**json.loads(INFER), "outputs": outputs}).encode()
    with traffic(url, body) as seen:
        done = rollout(
            state, "start", "tiny", "--candidate", candidate, "--wait", *QUICK, "--max-latency-increase", "2"
        )
    assert (done.returncode == 0) is promoted, done.stdout + done.stderr
    assert f"it disagrees with the baseline on {0 if promoted else 100}%" in done.stdout
    assert set(seen) == {200}


ASK_LABELS = json.dumps({"inputs": [{"name": "x", "datatype": "INT64", "shape": [1, 1], "data": [1]}]}).encode()


@pytest.mark.parametrize(
    ("candidate", "arguments", "promoted"),
    [
        ("reranked", (), False),
        ("reranked", ("--agree", "labels:first"), True),
        ("reranked", ("--agree", "labels:overlap=0.9"), False),
        ("reranked", ("--agree", "labels:overlap=0.6"), True),
        ("reranked", ("--agree", "labels:function=in_common"), True),
        ("others", ("--agree", "labels:overlap=0.6"), False),
        ("others", ("--expect-change",), True),
        ("others", ("--agree", "labels:function=in_common"), False),
    ],
)
def test_labels_agree_as_was_asked_for(
    request: pytest.FixtureRequest, state: Path, candidate: str, arguments: tuple[str, ...], promoted: bool
) -> None:
    url = gateway_for(request, *arguments)
    with traffic(url, ASK_LABELS, "/v2/models/ranked/infer") as seen:
        done = rollout(
            state, "start", "ranked", "--candidate", candidate, "--wait", *QUICK, "--max-latency-increase", "5",
            *arguments,
        )  # fmt: skip
    assert (done.returncode == 0) is promoted, done.stdout + done.stderr
    assert set(seen) == {200}
    if "--expect-change" in arguments:
        assert "it disagrees with the baseline on 100%" in rollout(state, "history").stdout
        assert "not judged" in done.stdout
    if "--agree" in arguments:
        assert f"answers agree by {arguments[1]}" in done.stdout


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("label:first", ("has no such output", "name one of logits")),
        ("logits:first", ("the output is logits:FP32[-1,3]", "take argmax or tolerance=…")),
        ("logits:function=alike", ("the gateway has no such function", "it has in_common")),
        ("logits:best", ("'best' is no rule", "OUTPUT:RULE")),
    ],
)
def test_a_rule_that_can_not_hold_is_refused_at_the_start(
    request: pytest.FixtureRequest, state: Path, rule: str, told: tuple[str, str]
) -> None:
    url = gateway_for(request, rule)
    done = rollout(state, "start", "tiny", "--candidate", "2", "--agree", rule)
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.strip().splitlines()) == 3
    assert all(part in done.stderr for part in told)
    assert fetch(f"{url}/v2/models/tiny/infer", INFER)[0] == 200


@pytest.mark.parametrize(("version", "promoted"), [("2", False), ("3", True)])
def test_a_model_trained_anew_is_judged_by_what_clients_say(
    url: str, state: Path, version: str, promoted: bool
) -> None:
    with critics(url, "trained") as seen:
        done = rollout(
            state, "start", "trained", "--candidate", version, "--baseline", "1", "--wait", *QUICK,
            "--max-latency-increase", "5", "--expect-change", "--require-feedback", "--max-wrong-increase", "0.1",
        )  # fmt: skip
    assert (done.returncode == 0) is promoted, done.stdout + done.stderr
    assert f"{0 if promoted else 100}% of its answers are reported wrong, 0% of the baseline's" in done.stdout
    assert {right for (by, right) in seen if by == f"trained/{version}"} == {promoted}
    assert {right for (by, right) in seen if by == "trained/1"} == {True}


def test_the_friendly_route_tells_an_answer_s_id_too(url: str, state: Path) -> None:
    assert rollout(state, "start", "tiny", "--candidate", "worse").returncode == 0
    assert rollout(state, "promote", "tiny").returncode == 0
    request = urllib.request.Request(
        f"{url}/predict/tiny", json.dumps({"x": X[0]}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        word = {"id": answer.headers["answer-id"], "correct": False}
    told = fetch(f"{url}/feedback", json.dumps(word).encode())
    assert told == (200, {"model": "tiny", "served_by": "worse", "counted": True, "correct": False})


def test_a_body_says_who_answered_and_never_a_version_that_did_not(triton: TritonServer, state: Path) -> None:
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), port=0, grpc_port=free_port(),
        grpc_upstream=(triton.grpc_address,), state=state,
    )  # fmt: skip
    with gateway_thread(settings) as url:
        asked = json.dumps({"x": X[0]}).encode()
        before = fetch(f"{url}/predict/tiny", asked, content_type="application/json")[1]
        assert (before["model"], before["version"], before.get("served_by")) == ("tiny", "2", None)
        assert rollout(state, "start", "tiny", "--candidate", "worse").returncode == 0
        assert rollout(state, "promote", "tiny").returncode == 0
        plain = fetch(f"{url}/predict/tiny", asked, content_type="application/json")[1]
        assert (plain["model"], plain["version"], plain["served_by"]) == ("tiny", "1", "worse/1")
        schema = fetch(f"{url}/openapi.json")[1]["paths"]["/predict/tiny"]["post"]["responses"]["200"]
        jsonschema.validate(plain, schema["content"]["application/json"]["schema"])
        raw = fetch(f"{url}/v2/models/tiny/infer", INFER)[1]
        assert (raw["model_name"], raw["model_version"]) == ("worse", "1")
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{settings.grpc_port}") as client:
            given = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.array(X, np.float32))
            told = client.infer("tiny", [given]).get_response()
            assert (told.model_name, told.model_version) == ("worse", "1")


def test_the_friendly_route_and_grpc_go_the_same_way(triton: TritonServer, state: Path) -> None:
    settings = Settings(
        upstream=(f"http://{triton.http_address}",),
        port=0,
        grpc_port=free_port(),
        grpc_upstream=(triton.grpc_address,),
        state=state,
    )
    with gateway_thread(settings) as url:
        assert rollout(state, "start", "tiny", "--candidate", "worse").returncode == 0
        assert rollout(state, "promote", "tiny").returncode == 0
        wrong = (np.array(X) @ WEIGHT[:, [0, 2, 1]])[0].tolist()
        plain = fetch(f"{url}/predict/tiny", json.dumps({"x": X[0]}).encode(), content_type="application/json")
        assert plain[1]["outputs"]["logits"] == wrong
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{settings.grpc_port}") as client:
            given = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.array(X, np.float32))
            assert client.infer("tiny", [given]).as_numpy("logits")[0].tolist() == wrong
            fixed = client.infer("tiny", [given], model_version="1").as_numpy("logits")[0].tolist()
            assert fixed == (np.array(X) @ WEIGHT)[0].tolist(), "whoever names a version gets it"


def unless_refused(ask: Callable[[], object]) -> None:
    """On a busy machine a key with three requests at a time is told that others come first."""
    with suppress(InferenceServerException):
        ask()


@pytest.mark.parametrize(
    ("model", "candidate", "way"),
    [
        *(("ranked", "reranked", way) for way in ("http", "predict", "grpc", "stream")),
        *(("doubled", "2", way) for way in ("http", "grpc", "stream")),
    ],
)
def test_who_asks_the_candidate_by_its_own_name_does_not_make_it_look_slow(
    triton: TritonServer, state: Path, tmp_path: Path, model: str, candidate: str, way: str
) -> None:
    keys = tmp_path / "keys.json"
    good, other = (add_key(keys, name)[0] for name in ("good", "other"))
    bad, who = add_key(keys, "bad")
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), port=0, grpc_port=free_port(), keys=keys, state=state,
        grpc_upstream=(triton.grpc_address,),
    )  # fmt: skip
    named, version = (model, candidate) if candidate == "2" else (candidate, "")

    def asked(url: str, key: str) -> None:
        assert fetch(f"{url}/v2/models/{model}/infer", ASK_LABELS, x_api_key=key)[0] == 200

    def ways(url: str, client: tritonclient.grpc.InferenceServerClient) -> Callable[[], None]:
        given = tritonclient.grpc.InferInput("x", [1, 1], "INT64")
        given.set_data_from_numpy(np.array([[1]]))
        headers = {"x-api-key": bad}
        if way == "grpc":
            return partial(unless_refused, partial(client.infer, named, [given], version, headers=headers))
        if way == "stream":
            answered = threading.Semaphore(8)
            opening = threading.Lock()
            client.start_stream(lambda result, error: answered.release(), headers=headers)

            def send() -> None:
                answered.acquire(timeout=1.0)  # a busy gateway may end the stream, and what was asked in it
                with opening:
                    try:
                        client.async_stream_infer(named, [given], version)
                    except InferenceServerException:
                        client.stop_stream()
                        client.start_stream(lambda result, error: answered.release(), headers=headers)

            return send
        path = f"/predict/{named}" if way == "predict" else f"/v2/models/{named}{version and '/versions/2'}/infer"
        body = json.dumps({"x": [1]}).encode() if way == "predict" else ASK_LABELS
        return lambda: fetch(url + path, body, x_api_key=bad, content_type="application/json") and None

    with gateway_thread(settings) as url, ExitStack() as stack:
        for key in (good, other):
            stack.enter_context(asking(partial(asked, url, key)))
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{settings.grpc_port}") as client:
            direct = ways(url, client)
            with asking(direct), asking(direct), asking(direct):
                started = rollout(state, "start", model, "--candidate", candidate, *QUICK, "--expect-change")
                assert started.returncode == 0, started.stderr
                told = ""
                while "asked it by another name" not in told:
                    time.sleep(0.5)
                    told = rollout(state, "status").stdout
                    assert "aborted" not in told, told
            assert f"(key {who.id})" in told
            client.stop_stream()


@pytest.mark.parametrize("candidate", ["2", "3"], ids=["loaded", "not loaded yet"])
def test_versions_that_share_their_steps_are_no_release(url: str, state: Path, candidate: str) -> None:
    done = rollout(state, "start", "hooked", "--candidate", candidate)
    assert done.returncode == 2
    why, mend = done.stderr.strip().splitlines()[1:]
    assert "at whatever version is their newest" in why
    assert "serve rollout start hooked --candidate hooked_next" in mend


@pytest.mark.parametrize("candidate", ["hooked_next", "piped"])
def test_a_model_with_hooks_is_released_under_another_name(url: str, state: Path, candidate: str) -> None:
    body = json.dumps({"text": "0,2,1,0"}).encode()
    answers: set[tuple[str, str]] = set()

    def ask() -> None:
        status, told = fetch(f"{url}/predict/hooked", body, content_type="application/json")
        answers.add((told.get("served_by", ""), told["outputs"]["label"]) if status == 200 else (str(status), ""))

    with asking(ask):
        done = rollout(state, "start", "hooked", "--candidate", candidate, "--wait", *QUICK,
                       "--max-latency-increase", "5")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert {label for _, label in answers} == {"b"}
    assert {by for by, _ in answers} >= {"hooked/2", f"{candidate}/1"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("start", "tiny", "--candidate", "a/b"), "names no model"),
        (("start", "tiny", "--candidate", "2", "--steps", "50", "--steps", "5"), "percentages that grow"),
        (("abort", "tiny"), "no such file"),
        (("clear", "tiny"), "no such file"),
    ],
)
def test_mistakes_are_told_in_three_lines(state: Path, arguments: tuple[str, ...], told: str) -> None:
    done = rollout(state, *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 3


def test_a_baseline_that_triton_drops_for_the_candidate_costs_no_request(tmp_path: Path, state: Path) -> None:
    repository = tmp_path / "repository"
    artifact = tiny_artifact(tmp_path / "artifact")
    pack(artifact, repository=repository, name="tiny")
    with TritonServer(repository, ports=Ports(0, 0, 0), options=TritonOptions(explicit=True)) as server:
        triton = f"http://{server.http_address}"
        settings = Settings(upstream=(triton,), port=0, state=state)
        with gateway_thread(settings) as url, traffic(url, pause_s=0.02) as seen:  # seconds of it, and no evidence
            rollout(state, "start", "tiny", "--candidate", "2")
            pack(artifact, repository=repository, name="tiny")
            load_model(triton, "tiny")
            done = rollout(state, "status", "tiny", "--wait")
            assert done.returncode == 1
            assert "pack with --serve-latest 2" in done.stdout
            time.sleep(6)  # longer than metadata is kept
        assert set(seen) == {200}


def test_without_a_gateway_a_rollout_waits_and_says_so(state: Path) -> None:
    begun = time.monotonic()
    done = rollout(state, "start", "tiny", "--candidate", "2")
    assert done.returncode == 0
    assert "no gateway has taken it up yet" in done.stdout
    assert time.monotonic() - begun < 30
    assert "waiting" in rollout(state, "status").stdout


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
