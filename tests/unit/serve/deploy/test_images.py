"""What builds the images and plays the pods, as far as no engine is needed: `make images-check` has the rest."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from compress.errors import ServerError
from deploy.containers.build import IMAGES, _epoch, bases
from deploy.containers.composed import Composed, find_compose
from deploy.containers.engine import Engine, find_engine, missing
from deploy.containers.sbom import bill
from deploy.containers.stack import Stack
from deploy.containers.volumes import digest, readable

ROOT = Path(__file__).parents[4]


def test_a_machine_without_an_engine_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="neither Podman nor a Docker") as told:
        find_engine({})
    assert "apt-get install" in told.value.mend


ENOUGH = {"security": {"rootless": True}, "cgroupVersion": "v2", "cgroupControllers": ["memory", "pids"],
          "idMappings": {"uidmap": [{"size": 1}, {"size": 65536}]}}  # fmt: skip


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (ENOUGH, []),
        ({"security": {"rootless": False}, "cgroupVersion": "v1"}, []),
        (ENOUGH | {"cgroupVersion": "v1", "cgroupControllers": []}, ["bound pods' processes"]),
        (ENOUGH | {"cgroupControllers": ["memory"]}, ["bound pods' processes"]),
        (ENOUGH | {"idMappings": {"uidmap": [{"size": 1}]}}, ["no ids"]),
        (ENOUGH | {"idMappings": {"uidmap": None}, "cgroupVersion": "v1"}, ["no ids", "bound pods' processes"]),
    ],
)
def test_what_podman_without_root_lacks_is_said_before_anything_is_started(
    tmp_path: Path, host: dict[str, Any], said: list[str]
) -> None:
    told = json.dumps({"host": {"networkBackend": "netavark", **host}})
    podman = program(tmp_path, "podman", f"case $1 in version) echo 4.3.1;; info) echo '{told}';; esac")
    engine = Engine(str(podman), podman=True)
    found = [why for why, _ in missing(engine, [], play=True) if "kept to themselves" not in why]
    assert len(found) == len(said)
    assert all(each in why for each, why in zip(said, found, strict=True))


def test_bases_are_those_of_the_dockerfiles_unless_others_are_named() -> None:
    names = [image.name for image in IMAGES]
    assert bases(names, {}) == {
        "PYTHON": "docker.io/library/python:3.11-slim-bookworm",
        "DEBIAN": "docker.io/library/debian:bookworm-slim",
    }
    assert bases(["gateway"], {"PYTHON_IMAGE": "localhost/mine:1", "DEBIAN_IMAGE": "x"}) == {
        "PYTHON": "localhost/mine:1"
    }


def test_a_bill_of_materials_names_each_package_by_its_place() -> None:
    rows = {"debian": [["libc6", "2.36-9", "amd64"]], "python": [["Py_Thing", "1.2", ""]]}
    told = json.loads(bill("localhost/compress-serve-gateway:0.1.0", rows))
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    assert {each["purl"] for each in told["components"]} == {
        "pkg:deb/debian/libc6@2.36-9?arch=amd64",
        "pkg:pypi/py-thing@1.2",
    }
    assert told["metadata"]["component"]["name"] == "compress-serve-gateway"


def test_another_content_is_another_volume(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = digest(tmp_path)
    assert digest(tmp_path) == first
    (tmp_path / "a").write_text("2")
    assert digest(tmp_path) != first


def test_what_a_pod_mounts_is_read_by_anybody_and_written_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o600)
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(tmp_path / "secret", "secret", filter=readable)
    with tarfile.open(tmp_path / "all.tar") as archive:
        (entry,) = archive.getmembers()
    assert (entry.mode, entry.uid, entry.gid) == (0o644, 0, 0)


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_docker_without_compose_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    docker = program(tmp_path, "docker", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="Docker Compose is not there") as told:
        find_compose(Engine(str(docker), podman=False))
    assert "plugin" in told.value.mend
    other = program(tmp_path, "docker-compose", "exit 0")
    assert find_compose(Engine(str(docker), podman=False)) == [str(other)]


def test_what_docker_mounts_any_user_can_read_in_a_folder_that_none_can_enter(tmp_path: Path) -> None:
    """Docker mounts a file with its owner and mode, and the images' users are not this one."""
    says = f'echo "$MODEL_REPOSITORY $SECRETS $GATEWAY_PORT $*" >> {tmp_path}/said; [ $1 = compose ] || echo healthy'
    docker = program(tmp_path, "docker", says)
    composed = Composed(Engine(str(docker), podman=False), tmp_path / "state", gateway_port=1, prometheus_port=2)
    composed.up(tmp_path)
    before = (tmp_path / "state/secrets/grafana-password").read_text()
    composed.up(tmp_path)
    composed.down()
    folder = tmp_path / "state/secrets"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == dict.fromkeys(
        ("keys.json", "metrics-key", "grafana-password"), 0o644
    )
    assert (folder / "grafana-password").read_text() == before
    assert (tmp_path / "state/client-key").stat().st_mode & 0o777 == 0o600
    said = [line for line in (tmp_path / "said").read_text().splitlines() if "--file" in line]
    assert said[0].startswith(f"{tmp_path} {folder} 1 compose --file ")
    assert [line.rpartition("compose.yaml ")[2] for line in said] == ["up --wait --wait-timeout 180"] * 2 + [
        "--profile more down"
    ]


def test_what_is_not_healthy_is_told_whatever_compose_says(tmp_path: Path) -> None:
    docker = program(
        tmp_path, "docker", 'case "$*" in *inspect*prometheus*) echo healthy;; *inspect*) echo starting;; esac'
    )
    with pytest.raises(ServerError, match="can't bring triton and gateway up") as told:
        Composed(Engine(str(docker), podman=False), tmp_path / "state").up(tmp_path)
    assert "logs check triton gateway" in told.value.mend


def test_what_the_check_of_a_repository_said_is_told_and_no_pod_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ROOT / "model_repository"
    pod = f"serving-triton-models-{digest(models)}"
    labels = '{"app.kubernetes.io/part-of": "serving", "compress-serve/signer": ""}'
    says = f"""echo "$*" >> {tmp_path}/said
case "$*" in
exec*|"kube play"*) exit 1;;
info*) echo {tmp_path}/graph;;
logs*check) echo "not what was packed";;
"pod ps"*) ! grep -q "kube play" {tmp_path}/said || echo {pod};;
"volume inspect serving-signer") echo '[{{"Name": "serving-signer", "Labels": {labels}}}]';;
"volume inspect"*) exit 125;;
esac"""
    podman = program(tmp_path, "podman", says)
    with pytest.raises(ServerError, match="can't serve"):
        Stack(Engine(str(podman), podman=True), tmp_path).add(models)
    assert "not what was packed" in capsys.readouterr().err
    said = (tmp_path / "said").read_text()
    assert f"pod rm --force --time 0 {pod}" in said.partition("kube play")[2]


def test_times_of_files_are_those_of_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that an earlier commit's build left is taken again, with its times."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert _epoch() == "315532800"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "400000000")
    assert _epoch() == "400000000"


def test_a_probe_fails_where_nobody_answers_or_the_answer_is_no() -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/ready" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    def asked(url: str) -> bool:
        command = [sys.executable, str(ROOT / "deploy/docker/http-ok"), url]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert (asked(f"{url}/ready"), asked(f"{url}/no")) == (True, False)
        server.shutdown()
    assert not asked(url)
