"""What builds the images and plays the pods, as far as no engine is needed: `make images-check` has the rest."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from compress.errors import ServerError
from deploy.containers.build import IMAGES, bases
from deploy.containers.engine import find_engine
from deploy.containers.sbom import bill
from deploy.containers.stack import _digest, _readable

ROOT = Path(__file__).parents[4]


def test_a_machine_without_an_engine_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="neither Podman nor a Docker") as told:
        find_engine({})
    assert "apt-get install" in told.value.mend


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
    first = _digest(tmp_path)
    assert _digest(tmp_path) == first
    (tmp_path / "a").write_text("2")
    assert _digest(tmp_path) != first


def test_what_a_pod_mounts_is_read_by_anybody_and_written_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o600)
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(tmp_path / "secret", "secret", filter=_readable)
    with tarfile.open(tmp_path / "all.tar") as archive:
        (entry,) = archive.getmembers()
    assert (entry.mode, entry.uid, entry.gid) == (0o644, 0, 0)


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
