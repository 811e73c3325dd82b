"""Versions on a running Triton: a new one is loaded while requests go on, and a rollback goes back."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.errors import ServerError
from serve.cli.main import main
from serve.pack.write import PackOptions, pack
from serve.triton.control import list_models, load_model, unload_model
from serve.triton.launch import Ports, TritonOptions, TritonServer
from tests.serve_models import HOOKS, hook_file, tiny_artifact

pytestmark = pytest.mark.integration
OPTIONS = PackOptions(instances=1)


def packed(folder: Path, letters: str) -> int:
    hooks = hook_file(folder, HOOKS.replace('"abc"', f'"{letters}"'))
    return pack(folder / "artifact", repository=folder / "models", name="tiny", hooks=hooks, options=OPTIONS).version


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, TritonServer, str]]:
    tiny_artifact(tmp_path / "artifact")
    packed(tmp_path, "abc")
    options = TritonOptions(explicit=True)
    with TritonServer(tmp_path / "models", ports=Ports(0, 0, 0), options=options) as triton:
        yield tmp_path, triton, f"http://{triton.http_address}"


def ask(url: str) -> str:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["0,2,1,0"]}
    body = json.dumps({"inputs": [tensor]}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/tiny/infer", body, timeout=20) as response:
        answer: dict[str, Any] = json.load(response)
    return str(next(output["data"][0] for output in answer["outputs"] if output["name"] == "label"))


def states(url: str) -> dict[tuple[str, str], str]:
    return {(row.name, row.version): row.state for row in list_models(url)}


def test_a_new_version_is_loaded_while_requests_go_on_and_a_rollback_goes_back(
    served: tuple[Path, TritonServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, url = served
    assert ask(url) == "b"
    answers: list[str] = []
    failures: list[str] = []
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            try:
                answers.append(ask(url))
            except (OSError, urllib.error.HTTPError) as err:
                failures.append(str(err))

    asking = threading.Thread(target=go_on)
    asking.start()
    try:
        assert packed(folder, "xyz") == 2
        assert ask(url) == "b", "a version that is not loaded changes nothing"
        load_model(url, "tiny")
        assert ask(url) == "y"
        assert states(url)["tiny_network", "2"] == "READY"
        with pytest.raises(SystemExit) as ended:
            main(["models", "rollback", "tiny", "--repository", str(folder / "models"), "--url", url])
        assert ended.value.code in (0, None)
        assert ask(url) == "b"
    finally:
        stop.set()
        asking.join()
    assert failures == []
    assert {"b", "y"} <= set(answers)
    assert "version 1 in place of 2" in capsys.readouterr().out


def test_a_model_is_unloaded_and_loaded_again(
    served: tuple[Path, TritonServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, url = served
    unload_model(url, "tiny")
    with pytest.raises(urllib.error.HTTPError):
        ask(url)
    for command in (["load", "tiny"], ["list"]):
        with pytest.raises(SystemExit) as ended:
            main(["models", *command, "--url", url])
        assert ended.value.code in (0, None)
    assert ask(url) == "b"
    told = capsys.readouterr().out
    assert "tiny is served at version 1" in told
    assert "READY" in told


def test_a_version_that_does_not_load_leaves_the_one_before(served: tuple[Path, TritonServer, str]) -> None:
    folder, _, url = served
    packed(folder, "xyz")
    (folder / "models" / "tiny_network" / "2" / "model.onnx").write_bytes(b"damaged on the way")
    with pytest.raises(ServerError, match="Triton refuses") as caught:
        load_model(url, "tiny")
    assert "tiny_network" in caught.value.why
    assert ask(url) == "b"


def test_what_can_t_be_controlled_says_so(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="can't reach Triton"):
        list_models("http://127.0.0.1:9")
    pack(tiny_artifact(tmp_path / "artifact"), repository=tmp_path / "models", name="tiny", options=OPTIONS)
    with TritonServer(tmp_path / "models", ports=Ports(0, 0, 0)) as triton:
        with pytest.raises(ServerError) as caught:
            load_model(f"http://{triton.http_address}", "tiny")
        assert "--model-control" in caught.value.mend
