"""A load from several pods: the manifests fit their schemas, and what they start is started here as processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from compress.errors import ServerError
from serve.deploy.cluster.load_jobs import LoadJobs, jobs_of, lines_first
from tests.certificates import self_signed
from tests.custom_resources import VERSIONS, check
from tests.load_servers import at_once, inferences, served

Object = dict[str, Any]
IMAGE = "registry.example/gateway:0.1.0"


def objects(*arguments: str, **changes: Any) -> dict[tuple[str, str], Object]:
    made = jobs_of(LoadJobs(image=IMAGE, **changes), arguments)
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def container(job: Object) -> Object:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_schemas_strictly(version: str) -> None:
    for each in objects("--model", "m", "--rate", "100").values():
        check(each, version)


def test_workers_are_an_indexed_job_whose_pods_have_names() -> None:
    made = objects(workers=3)
    job = made["Job", "load-workers"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    assert job["template"]["spec"]["subdomain"] == made["Service", "load-workers"]["metadata"]["name"]
    given = container(made["Job", "load-coordinator"])["args"]
    at = given.index("--worker")
    assert given[at + 1 : at + 4] == [f"load-workers-{number}.load-workers.serving.svc:9200" for number in range(3)]


def test_a_load_that_was_sent_is_not_sent_again() -> None:
    (rule,) = objects()["Job", "load-coordinator"]["spec"]["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1, 3, 4]}}


def test_no_secret_is_in_a_manifest_and_what_has_to_be_made_is_said() -> None:
    made = objects(name="big")
    for job in ("big-workers", "big-coordinator"):
        for variable in container(made["Job", job])["env"]:
            assert "value" not in variable
    told = "\n".join(lines_first(LoadJobs(image=IMAGE, name="big", namespace="there")))
    assert "DNS:*.big-workers.there.svc" in told
    assert all(name in told for name in ("big-token", "big-tls", "big-key"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": "gateway"}, ()), ({"workers": 0}, ()), ({"workers": 257}, ()), ({"name": "Load"}, ()),
        ({"cpu": "much"}, ()), ({"deadline_s": 0}, ()), ({"namespace": "a b"}, ()),
        ({}, ("--header", "authorization: Bearer x")), ({}, ("--header=X-Api-Key: x",)), ({}, ("--worker-wait", "1")),
        ({}, ("--worker", "x:1")), ({}, ("--output=x.json",)), ({}, ("--processes", "4")),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ServerError, match="can't"):
        jobs_of(LoadJobs(**{"image": IMAGE, **changes}), words)


def test_the_command_writes_them_and_takes_what_serve_load_does(tmp_path: Path) -> None:
    file = tmp_path / "load.yaml"
    command = [sys.executable, "-m", "serve", "deploy", "load", "--image", IMAGE, "--workers", "2", "-o", str(file)]
    done = subprocess.run([*command, "--", "--model", "m", "--rate", "100"], check=True, capture_output=True, text=True)
    assert f"kubectl apply -f {file}" in done.stdout.replace("\n", " ")
    made = [each for each in yaml.safe_load_all(file.read_text()) if each]
    assert [each["kind"] for each in made] == ["Service", "Job", "Job", "NetworkPolicy"]
    assert container(made[2])["args"][1:5] == ["--model", "m", "--rate", "100"]


def test_kubernetes_puts_nothing_into_arguments() -> None:
    """It would the workers' token for $(SERVE_LOAD_TOKEN), into requests; $$ is what it makes a $ of."""
    given = container(objects("--expect", "contains:$(SERVE_LOAD_TOKEN)$$")["Job", "load-coordinator"])["args"]
    assert given[2] == "contains:$$(SERVE_LOAD_TOKEN)$$$$"


@pytest.mark.clock
def test_a_pod_that_is_to_end_ends_its_load_and_prints_the_figures(tmp_path: Path) -> None:
    """A shell passes no signal on by itself."""
    script = container(objects()["Job", "load-coordinator"])["command"][2]
    script = script.replace("serve load", f"{sys.executable} -m serve load")
    script = script.replace("/tmp/load.json", str(tmp_path / "load.json"))  # noqa: S108
    with served(at_once) as server:
        words = [server.url, "--model", "m", "--rate", "100", "--duration", "300", "--warmup", "0"]
        command = ["/bin/sh", "-c", script, "serve", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pod:
            while inferences(server) < 50:
                assert pod.poll() is None
                time.sleep(0.05)
            pod.send_signal(signal.SIGTERM)
            out, _ = pod.communicate(timeout=30)
    (run,) = orjson.loads(out[out.index("\n{") :])["runs"]
    assert run["interrupted"]
    assert run["count"] >= 45


@pytest.mark.clock
def test_what_the_manifests_start_sends_one_schedule_over_tls(tmp_path: Path) -> None:
    """Their very arguments, but for addresses and the places of files."""
    certificate, key = self_signed(tmp_path, "workers")
    certificate.rename(tmp_path / "tls.crt")
    key.rename(tmp_path / "tls.key")
    environ = os.environ | {"SERVE_LOAD_TOKEN": "secret", "PYTHONUNBUFFERED": "1"}

    def here(words: list[str]) -> list[str]:
        return [word.replace("/run/secrets/tls", str(tmp_path)) for word in words]

    with served(at_once) as server, ExitStack() as stack:
        given = ("--model", "m", "--rate", "300", "--duration", "2", "--warmup", "0", "--max-lateness-ms", "100000")
        made = objects(*given, workers=4, url=server.url)
        words = here(container(made["Job", "load-workers"])["args"])
        words[words.index("0.0.0.0")], words[words.index("9200")] = "127.0.0.1", "0"
        workers, found = [], []
        for _ in range(4):
            command = [sys.executable, "-m", "serve", *words]
            worker = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ))
            stack.callback(worker.send_signal, signal.SIGINT)
            assert worker.stdout is not None
            told = re.search(r"over TLS at (\S+)", worker.stdout.readline())
            assert told is not None
            workers.append(worker)
            found.append(told[1])
        coordinator = container(made["Job", "load-coordinator"])
        words = here(coordinator["args"])
        at = words.index("--worker") + 1
        words[at : at + 4] = found
        script = coordinator["command"][2].replace("serve load", f"{sys.executable} -m serve load")
        script = script.replace("/tmp/load.json", str(tmp_path / "load.json"))  # noqa: S108
        done = subprocess.run(
            ["/bin/sh", "-c", script, "serve", *words], capture_output=True, text=True, env=environ, check=True
        )
        assert [worker.wait(30) for worker in workers] == [0, 0, 0, 0]
    (run,) = orjson.loads(done.stdout[done.stdout.index("\n{") :])["runs"]
    assert run["processes"] == 4
    assert run["clock_error_ms"] > 0
    assert run["errors"] == {}
    assert abs(run["count"] - 600) < 120
