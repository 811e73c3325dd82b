"""A training on several machines: the manifests fit their schemas; what they start is started here as processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import compress
from compress.errors import ServerError
from compress.storage.files import locked
from serve.deploy.cluster.train_jobs import TrainJob, lines_first, training_of
from tests.custom_resources import VERSIONS, check
from tests.unit.compress.training.networks import data, model

Object = dict[str, Any]
IMAGE = "registry.example/compress:0.1.0"
COMMAND = ("finetune", "student.pt", "--teacher", "teacher.pt", "--data", "train.npz", "-o", "out", "--epochs", "2")


def objects(*arguments: str, **changes: Any) -> dict[str, Object]:
    made = training_of(TrainJob(**{"image": IMAGE, "claim": "work", **changes}), arguments or COMMAND)
    return {each["kind"]: each for each in made}


def container(job: Object) -> Object:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("gpus", [0, 4])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_schemas_strictly(version: str, gpus: int) -> None:
    for each in objects(gpus=gpus).values():
        check(each, version)


def test_pods_have_names_meet_at_the_first_and_are_made_again() -> None:
    made = objects(nodes=3, least_nodes=2, name="long", namespace="there")
    job = made["Job"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    assert job["template"]["spec"]["subdomain"] == made["Service"]["metadata"]["name"]
    environ = {each["name"]: each["value"] for each in container(made["Job"])["env"]}
    assert environ["NODES"] == "2:3"
    assert environ["MEETING"] == "long-0.long.there.svc:29400"
    assert job["backoffLimit"] >= 3


def test_a_gpu_has_a_process_and_the_machines_memory_to_hand_samples_over() -> None:
    found = container(objects(gpus=4)["Job"])
    assert found["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {"name": "PROCESSES", "value": "4"} in found["env"]
    assert "/dev/shm" in {mount["mountPath"] for mount in found["volumeMounts"]}  # noqa: S108


def test_the_pods_hear_one_another_alone() -> None:
    made = objects()
    (rule,) = made["NetworkPolicy"]["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": made["Job"]["spec"]["template"]["metadata"]["labels"]}}]}


def test_what_the_shell_or_kubernetes_would_read_stays_a_word() -> None:
    found = container(objects("finetune", "a b.pt", "--data", "$(MEETING)$HOME`x`;y", "-o", "out")["Job"])
    assert found["args"][1:4] == ["a b.pt", "--data", "$$(MEETING)$HOME`x`;y"]
    assert '"$@"' in found["command"][2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": "compress"}, COMMAND), ({"nodes": 0}, COMMAND), ({"nodes": 2, "least_nodes": 3}, COMMAND),
        ({"claim": "Work"}, COMMAND), ({"cpu": "much"}, COMMAND), ({"memory": "8 GB"}, COMMAND), ({"gpus": 17}, COMMAND),
        ({"wait_s": 0}, COMMAND), ({"namespace": "a b"}, COMMAND),
        ({}, ("export", "m.pt")), ({}, ("--data", "x")), ({}, (*COMMAND, "--devices=2")),
        ({}, (*COMMAND, "--tune-training", "4")), ({"memory": "8K"}, COMMAND), ({"memory": "0"}, COMMAND),
        ({}, COMMAND[:6]), ({}, (*COMMAND[:6], "-o", "/scratch/out")), ({}, (*COMMAND[:6], "--output=../out")),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ServerError, match="can't"):
        training_of(TrainJob(**{"image": IMAGE, "claim": "work", **changes}), words)


def test_the_command_writes_them_and_says_what_has_to_be_there(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    command = [sys.executable, "-m", "serve", "deploy", "train", "--image", IMAGE, "--claim", "work", "-o", str(file)]
    done = subprocess.run([*command, "--", *COMMAND], check=True, capture_output=True, text=True)
    assert f"kubectl apply -f {file}" in done.stdout.replace("\n", " ")
    assert lines_first(TrainJob(image=IMAGE, claim="work"))[0] in done.stdout
    assert file.read_text().startswith("# Written by `serve deploy train`")
    made = [each for each in yaml.safe_load_all(file.read_text()) if each]
    assert [each["kind"] for each in made] == ["Service", "Job", "NetworkPolicy"]
    assert container(made[1])["args"] == list(COMMAND)


def test_what_the_manifests_start_trains_together(tmp_path: Path) -> None:
    """Their very command and environment, but for the address; each pod is a process of this machine."""
    model(tmp_path, "student", 8)
    model(tmp_path, "teacher", 12)
    data(tmp_path, count=200)
    found = container(objects(least_nodes=2)["Job"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    environ = {each["name"]: each["value"] for each in found["env"]} | {"MEETING": meeting}
    environ |= {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    pods = [
        subprocess.Popen(
            [*found["command"], *found["args"], "--threads", "1"],
            cwd=tmp_path, env=environ | {"JOB_COMPLETION_INDEX": str(index)}, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    told = [pod.communicate()[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], told
    assert compress.load(tmp_path / "out/model.pt").signature.outputs[0].name == "logits"
    assert not list(tmp_path.glob("out.work/training-*")), "what was kept goes"


def started(folder: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """What a Job of one pod starts."""
    found = container(objects(*arguments, nodes=1)["Job"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    environ = {each["name"]: each["value"] for each in found["env"]} | {"MEETING": meeting, "JOB_COMPLETION_INDEX": "0"}
    environ |= {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [word.replace("--max-restarts 3", "--max-restarts 0") for word in found["command"]]
    return subprocess.run(
        [*command, *found["args"]], cwd=folder, env=environ | changes, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def final(code: int) -> bool:
    """Whether the Job gives up where a pod ends so."""
    rules = objects()["Job"]["spec"]["podFailurePolicy"]["rules"]
    return any(code in each.get("onExitCodes", {}).get("values", []) for each in rules if each["action"] == "FailJob")


@pytest.mark.parametrize("wrong", [("--epoch", "2"), ("--epochs", "two"), ("--epochs", "-3")])
def test_a_wrong_option_ends_the_job_before_torchrun_starts_anything(tmp_path: Path, wrong: tuple[str, str]) -> None:
    done = started(tmp_path, *COMMAND, *wrong)
    assert final(done.returncode), done.stderr
    assert wrong[0] in done.stderr + done.stdout
    assert "torch" not in done.stderr


def test_what_every_process_would_end_with_ends_the_job(tmp_path: Path) -> None:
    model(tmp_path, "student", 8)
    model(tmp_path, "teacher", 12)
    done = started(tmp_path, *COMMAND)
    assert final(done.returncode), done.stderr
    assert "train.npz" in done.stderr


def test_a_place_that_can_not_be_written_now_is_tried_again(tmp_path: Path) -> None:
    model(tmp_path, "student", 8)
    model(tmp_path, "teacher", 12)
    data(tmp_path, count=200)
    with locked(tmp_path / "out"):
        done = started(tmp_path, *COMMAND)
    assert "out" in done.stderr
    assert done.returncode
    assert not final(done.returncode), done.stderr
