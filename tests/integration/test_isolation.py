"""When something dies all the same: what served it heals, and nobody else notices."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.keys import add_key
from serve.triton.kin import processes
from serve.triton.stubs import Stub, stubs_in
from tests.gateway_models import FILES_MODEL, fetch, loading_slowly, tiny_and_files, write_files_model
from tests.integration.test_up import FREE, Up, triton_of, up
from tests.sequence_models import CONFIG as SEQUENCES_CONFIG
from tests.sequence_models import MODEL as SEQUENCES_MODEL
from tests.serve_models import tiny_artifact

pytestmark = pytest.mark.integration
TINY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
# It dies of some requests.
MODEL = (
    loading_slowly(FILES_MODEL)
    .replace(
        '        if files[0, 0].startswith(b"fail"):',
        '        if files[0, 0].startswith(b"nap"):\n            time.sleep(0.5)\n'
        '        if files[0, 0].startswith(b"die"):\n            os.kill(os.getpid(), signal.SIGSEGV)\n'
        '        if files[0, 0].startswith(b"fail"):',
    )
    .replace("import time\n", "import os\nimport signal\nimport time\n")
)


def asked(content: str) -> bytes:
    return json.dumps({"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1, 1], "data": [content]}]}).encode()


def tiny() -> messages.ModelInferRequest:
    request = messages.ModelInferRequest(model_name="tiny", raw_input_contents=[struct.pack("<4f", 1, 2, 3, 4)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    return request


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tiny_and_files(tmp_path, MODEL)


def stub_of(running: Up, model: str) -> Stub | None:
    """The process of a model's only instance."""
    triton = triton_of(running.process)
    pids = [pid for pid, each in processes().items() if triton and each.group == triton]
    links = {match[1] for pid in pids if (match := re.search(r"--model-repository=([^\0]+)", command(pid)))}
    return next((stub for link in links for stub in stubs_in(pids, link) if stub.model == model), None)


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def ask(url: str, model: str, body: bytes, **headers: str) -> tuple[int, Any, str | None]:
    """Status, JSON, and Retry-After."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), answer.headers.get("Retry-After")


@contextlib.contextmanager
def asking(url: str, model: str, body: bytes, statuses: list[int], **headers: str) -> Iterator[None]:
    """Ask again and again beside what else happens."""
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            statuses.append(ask(url, model, body, **headers)[0])
            time.sleep(0.02)  # or it would keep the machine busy

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def page(url: str) -> str:
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"))) as connection:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def counted(running: Up, what: str, times: int) -> bool:
    return running.said.count(what) == times


def until(running: Up, what: Callable[[], Any]) -> Any:
    return running.until(what, 60.0)


def test_a_dead_process_heals_and_is_told_meanwhile(tmp_path: Path, repository: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    settings = tmp_path / "gateway.toml"
    settings.write_text(f"grpc_port = {port}\n")
    with up(tmp_path, str(repository), *FREE, "--gateway", str(settings)) as running:
        url = running.url()
        assert ask(url, "files", asked("abcd"))[0] == 200
        (tmp_path / "slow").touch()  # it is loaded when we say so
        others: list[int] = []
        with asking(url, "tiny", TINY, others):
            dead = stub_of(running, "files")
            assert dead is not None
            os.kill(dead.pid, signal.SIGKILL)
            until(running, lambda: "it is loaded again" in running.said)
            before = time.monotonic()
            status, told, retry = ask(url, "files", asked("abcd"))
            assert (status, retry) == (503, "1"), told
            assert "files_0_0 was ended by SIGKILL" in told["why"]
            assert time.monotonic() - before < 0.9  # Triton would take a second to find out, each time
            assert fetch(f"{url}/v2/models/files/ready")[0] == 503
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                for call, message in (
                    (stub.ModelReady, messages.ModelReadyRequest(name="files")),
                    (stub.ModelInfer, messages.ModelInferRequest(model_name="files")),
                ):
                    with pytest.raises(grpc.RpcError) as caught:
                        call(message, timeout=20)
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                    assert "files_0_0 was ended by SIGKILL" in caught.value.details()
                stream = stub.ModelStreamInfer(
                    iter([tiny(), messages.ModelInferRequest(model_name="files")]), timeout=20
                )
                assert not next(stream).error_message, "what was asked before is answered"
                with pytest.raises(grpc.RpcError) as caught:
                    next(stream)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "files_0_0 was ended by SIGKILL" in caught.value.details()
                assert stub.ModelReady(messages.ModelReadyRequest(name="tiny"), timeout=20).ready
            assert fetch(f"{url}/v2/models/tiny/ready")[0] == 200
            assert fetch(f"{url}/readyz")[1]["down"] == ["files"]
            assert 'gateway_model_down_seconds{model="files"}' in page(url)
            (tmp_path / "slow").unlink()
            until(running, lambda: "files is served again" in running.said)
            assert ask(url, "files", asked("abcd"))[0] == 200
        assert set(others) == {200}
        assert fetch(f"{url}/v2/models/files/ready")[0] == 200
        assert "down" not in fetch(f"{url}/readyz")[1]
        assert 'gateway_model_down_seconds{model="files"}' not in page(url)
        assert 'gateway_model_deaths_total{model="files"} 1.0' in page(url)
        # Once more, with files as they were: Triton's own reload would do nothing.
        dead = until(running, lambda: stub_of(running, "files"))
        os.kill(dead.pid, signal.SIGKILL)
        until(running, lambda: running.said.count("files is served again") == 2)
        assert ask(url, "files", asked("abcd"))[0] == 200
        assert "Triton has died" not in running.said


def test_what_is_made_of_a_dead_model_is_down_and_heals_with_it(tmp_path: Path) -> None:
    from tests.integration.test_up import label, pack_letters

    tiny_artifact(tmp_path / "tiny")
    pack_letters(tmp_path, "abc")
    with up(tmp_path, str(tmp_path / "models"), *FREE) as running:
        url = running.url()
        assert label(url) == "b"
        dead = stub_of(running, "tiny_network")
        assert dead is not None
        os.kill(dead.pid, signal.SIGKILL)
        seen = {label(url)}

        def healed() -> bool:
            seen.add(label(url))
            return "tiny_network is served again" in running.said

        until(running, healed)
        assert label(url) == "b"
        assert seen <= {"b", "503"}


def test_a_request_that_kills_twice_is_refused_for_its_key(tmp_path: Path, repository: Path) -> None:
    keys = tmp_path / "keys.json"
    good = {"X-API-Key": add_key(keys, "good")[0]}
    bad = {"X-API-Key": add_key(keys, "bad")[0]}
    settings = tmp_path / "gateway.toml"
    settings.write_text(f'keys = "{keys}"\n')
    with up(tmp_path, str(repository), *FREE, "--gateway", str(settings), "--restarts", "1") as running:
        url = running.url()

        def served() -> bool:
            return ask(url, "files", asked("abcd"), **good)[0] == 200

        for times in (1, 2):
            until(running, served)
            status, told, retry = ask(url, "files", asked("die secret"), **bad)
            assert (status, retry) == (503, "1"), told
            until(running, partial(counted, running, "files is served again", times))
        for _ in range(3):
            status, told, _ = ask(url, "files", asked("die secret"), **bad)
            assert (status, told["why"]) == (422, "this very request has ended the model's process twice")
        assert ask(url, "files", asked("another"), **bad)[0] == 200
        assert served()
        said = running.said
        assert said.count("was ended by SIGSEGV; in flight: files (key ") == 2
        assert "secret" not in said
        assert bad["X-API-Key"] not in said
        # What another key sends is not that key's fault, until it has been seen twice from it.
        assert ask(url, "files", asked("die secret"), **good)[0] == 503
        until(running, served)


def test_a_poison_request_is_found_among_the_traffic_of_other_keys(tmp_path: Path, repository: Path) -> None:
    keys = tmp_path / "keys.json"
    goods = [{"X-API-Key": add_key(keys, name)[0]} for name in ("one", "two")]
    bad = {"X-API-Key": add_key(keys, "bad")[0]}
    settings = tmp_path / "gateway.toml"
    settings.write_text(f'keys = "{keys}"\n')
    with up(tmp_path, str(repository), *FREE, "--gateway", str(settings), "--restarts", "1") as running:
        url = running.url()
        answers: list[int] = []
        others: list[int] = []
        with contextlib.ExitStack() as stack:
            for good in goods:  # one of the two is nearly always with the model
                for _ in range(2):
                    stack.enter_context(asking(url, "files", asked("nap"), answers, **good))
            stack.enter_context(asking(url, "tiny", TINY, others, **goods[0]))
            until(running, lambda: 200 in answers)
            statuses: list[int] = []

            def refused() -> bool:
                statuses.append(ask(url, "files", asked("die"), **bad)[0])
                return statuses[-1] == 422

            until(running, refused)
            before = answers.count(200)
            until(running, lambda: answers.count(200) > before + 5)
        assert set(statuses) <= {422, 503}
        assert set(answers) <= {200, 503}, "nobody else is refused"
        assert set(others) == {200}
        assert running.said.count("was ended by SIGSEGV") <= 4
        assert ask(url, "files", asked("nap"), **goods[0])[0] == 200


def test_one_request_that_ends_both_models_refuses_no_release(tmp_path: Path, repository: Path) -> None:
    # Loaded again, it takes longer than the baseline: for that time it alone is down.
    slower = MODEL.replace("initialize(self, args):\n", "initialize(self, args):\n        time.sleep(3)\n")
    write_files_model(repository, slower, "other")
    keys, state = tmp_path / "keys.json", tmp_path / "rollouts.db"
    goods = [{"X-API-Key": add_key(keys, name)[0]} for name in ("one", "two")]
    bad = {"X-API-Key": add_key(keys, "bad")[0]}
    settings = tmp_path / "gateway.toml"
    settings.write_text(f'keys = "{keys}"\nstate = "{state}"\n')
    start = (
        "rollout",
        "start",
        "files",
        "--candidate",
        "other",
        "--state",
        str(state),
        "--shadow",
        "0",
        "--steps",
        "50",
    )
    often = ("--step-s", "3600", "--max-error-increase", "0.1", "--max-latency-increase", "20")
    with up(tmp_path, str(repository), *FREE, "--gateway", str(settings), "--restarts", "1") as running:
        url = running.url()
        answers: list[int] = []

        def answers_for_it(model: str) -> bool:
            return bool(ask(url, "files", asked("abcd"), **goods[0])[1].get("model_name") == model)

        with contextlib.ExitStack() as stack:
            for good in goods:
                for _ in range(2):
                    stack.enter_context(asking(url, "files", asked("abcd"), answers, **good))
            until(running, lambda: 200 in answers)
            subprocess.run([sys.executable, "-m", "serve", *start, *often], check=True, timeout=120)
            until(running, partial(answers_for_it, "other"))
            assert ask(url, "files", asked("die"), **bad)[0] == 503
            until(running, partial(counted, running, "other is served again", 1))
            until(running, partial(counted, running, "files is served again", 1))
            before = answers.count(200)
            until(running, lambda: answers.count(200) > before + 50)
            until(running, partial(answers_for_it, "other"))
            until(running, partial(answers_for_it, "files"))
        assert set(answers) <= {200, 503}, "a model that is down for a moment is no 404"


def test_a_triton_that_dies_names_the_signal_and_who_was_there(tmp_path: Path, repository: Path) -> None:
    with up(tmp_path, str(repository), *FREE, "--restarts", "1") as running:
        url = running.url()
        for times in (1, 2, 3):  # of one client's requests, which are not enough to end it for the others
            thread = threading.Thread(target=ask, args=(url, "files", asked(f"sleep {times}")))
            thread.start()
            until(running, lambda: 'gateway_model_in_flight{model="files"} 1.0' in page(url)
                  or 'gateway_model_in_flight{model="(others)"} 1.0' in page(url))  # fmt: skip
            os.kill(triton_of(running.process), signal.SIGSEGV)
            thread.join()
            until(running, partial(counted, running, "Triton is ready again", times))
        found = re.findall(r"Triton has died: it was ended by SIGSEGV; in flight: files \(no key, .* (\w{24})\)",
                           running.said)  # fmt: skip
        assert len(found) == 3
        assert len(set(found)) == 3
        assert ask(url, "tiny", TINY)[0] == 200


def test_sequences_of_a_triton_that_died_wait_for_nothing(tmp_path: Path, repository: Path) -> None:
    version = repository / "counts" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(SEQUENCES_CONFIG.replace("NAME", "counts", 1).replace("PLACE", ""))
    (version / "model.py").write_text(SEQUENCES_MODEL.replace("request.correlation_id()", "0"))
    with up(tmp_path, str(repository), *FREE, "--restarts", "1") as running:
        url = running.url()

        def begun(sequence: int) -> tuple[int, Any]:
            x = {"name": "x", "datatype": "INT64", "shape": [1, 1], "data": [1]}
            named = {"sequence_id": sequence, "sequence_start": True, "sequence_end": True}
            status, told, _ = ask(url, "counts", json.dumps({"inputs": [x], "parameters": named}).encode())
            return status, told

        assert begun(1)[0] == 200
        os.kill(triton_of(running.process), signal.SIGKILL)
        refused = [begun(sequence) for sequence in range(2, 22)]  # more than may wait at once
        assert {status for status, _ in refused} <= {200, 502, 503}, refused
        until(running, partial(counted, running, "Triton is ready again", 1))
        for sequence in range(30, 50):
            assert begun(sequence)[0] == 200


def test_one_that_is_answered_and_ends_triton_later_does_not_end_the_service(tmp_path: Path, repository: Path) -> None:
    with up(tmp_path, str(repository), *FREE, "--restarts", "1") as running:
        url = running.url()
        for times in (1, 2, 3):
            assert ask(url, "tiny", TINY)[0] == 200
            until(running, lambda: "gateway_model_in_flight" not in page(url) or not re.search(
                r"gateway_model_in_flight\{.*\} [1-9]", page(url)))  # fmt: skip
            os.kill(triton_of(running.process), signal.SIGSEGV)
            until(running, partial(counted, running, "Triton is ready again", times))
        assert running.said.count("was ended by SIGSEGV; with no request in flight") == 3
        assert ask(url, "tiny", TINY)[0] == 200


def test_who_stops_it_while_triton_is_down_is_told_of_no_error(tmp_path: Path, repository: Path) -> None:
    with up(tmp_path, str(repository), *FREE) as running:
        running.url()
        os.kill(triton_of(running.process), signal.SIGKILL)
        until(running, lambda: "Triton has died" in running.said)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(200) == 0, running.said


def test_starts_that_fail_end_it(tmp_path: Path, repository: Path) -> None:
    with up(tmp_path, str(repository), *FREE, "--restarts", "2") as running:
        running.url()
        (repository / "tiny/1/model.onnx").write_bytes(b"no model")
        os.kill(triton_of(running.process), signal.SIGKILL)
        assert running.process.wait(200) != 0
        assert running.said.count("Triton did not start") == 3  # once for the death, twice in a row for the starts
        assert "that is enough" in running.said


def test_a_process_that_was_stopped_goes_on(tmp_path: Path, repository: Path) -> None:
    with up(tmp_path, str(repository), *FREE) as running:
        url = running.url()
        stub = stub_of(running, "files")
        assert stub is not None
        os.kill(stub.pid, signal.SIGSTOP)
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(url, "files", asked("abcd"))[0])) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        time.sleep(3)
        assert ask(url, "tiny", TINY)[0] == 200
        os.kill(stub.pid, signal.SIGCONT)
        for thread in threads:
            thread.join()
        assert set(answers) <= {200, 503}
        until(running, lambda: ask(url, "files", asked("abcd"))[0] == 200)
        assert ask(url, "files", asked("abcd"))[0] == 200
        assert "has died" not in running.said
