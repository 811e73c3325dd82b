"""A real Triton with models for the gateway's tests."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonServer
from tests.serve_models import hook_file, tiny_artifact

FILES_CONFIG = """\
name: "files"
backend: "python"
max_batch_size: 4
input [ { name: "file" data_type: TYPE_STRING dims: [ 1 ] } ]
output [
  { name: "head" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "bytes" data_type: TYPE_INT64 dims: [ 1 ] }
]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
FILES_MODEL = """\
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "file").as_numpy()) for request in requests]

    def answer(self, files):
        if files[0, 0].startswith(b"sleep"):
            time.sleep(2)
        if files[0, 0].startswith(b"fail"):
            return pb_utils.InferenceResponse([], pb_utils.TritonError("this file is not to be read"))
        head = np.array([[file[:4]] for file in files[:, 0]], dtype=object)
        size = np.array([[len(file)] for file in files[:, 0]], dtype=np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("head", head), pb_utils.Tensor("bytes", size)])
"""


def write_files_model(repository: Path, code: str = FILES_MODEL, name: str = "files") -> None:
    """A Python model that takes any bytes."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(FILES_CONFIG.replace('"files"', f'"{name}"'))
    (version / "model.py").write_text(code)


def loading_slowly(code: str) -> str:
    """The model that takes its time to be loaded where it finds a file "slow" beside the repository."""
    waits = (
        "    def initialize(self, args):\n"
        "        while pathlib.Path(args['model_repository']).parent.resolve().with_name('slow').exists():\n"
        "            time.sleep(0.05)\n\n"
        "    def execute"
    )
    return code.replace("import time\n", "import pathlib\nimport time\n").replace("    def execute", waits)


def tiny_and_files(folder: Path, code: str) -> Path:
    """A repository of "tiny" and "files", one process each."""
    repository = folder / "models"
    pack(tiny_artifact(folder / "tiny"), repository=repository, name="tiny", options=PackOptions(instances=1))
    write_files_model(repository, code)
    return repository


@contextmanager
def triton_with_models(folder: Path) -> Iterator[str]:
    """host:port of the HTTP endpoint of `served_models`."""
    with served_models(folder) as server:
        yield server.http_address


@contextmanager
def served_models(folder: Path, files: str = FILES_MODEL) -> Iterator[TritonServer]:
    """A Triton that serves "tiny", "hooked" (text in, label out) and "files" (any bytes in), by this code."""
    repository = folder / "repository"
    artifact = tiny_artifact(folder / "artifact")
    pack(artifact, repository=repository, name="tiny")
    pack(artifact, repository=repository, name="hooked", hooks=hook_file(folder))
    write_files_model(repository, files)
    with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
        yield server
        server.stop(within_s=5)  # what tests have left with it is of no use


def fetch(url: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """Ask, and give the status and the JSON of the answer; `content_type="a/b"` sets a header."""
    request = urllib.request.Request(url, body, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as err:
        with err:
            return err.code, json.loads(err.read() or b"null")
