"""A repository that has to be signed, in front of a real Triton: at the start, at each load, and after each death."""

from __future__ import annotations

import base64
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc

from serve.gateway.access.keys import add_key
from serve.repository.signing import check_files, sign
from tests.gateway_models import fetch
from tests.integration.test_gateway_grpc import free_port as free
from tests.integration.test_up import FREE, pack_letters, triton_of, up
from tests.serve_models import tiny_artifact

OPENSSL = str(shutil.which("openssl"))
JSON = "application/json"
SPY = "import pathlib\npathlib.Path({place!r}).touch()\n"


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A repository, and the keys, private and public, of who signed it."""
    tiny_artifact(tmp_path / "tiny")
    pack_letters(tmp_path, "abc")
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    subprocess.run(
        [OPENSSL, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", private],
        check=True,
        capture_output=True,
    )
    subprocess.run([OPENSSL, "pkey", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    sign(tmp_path / "models", private)
    return tmp_path / "models", private, public


def compiled(source: str, version: Path, module: str) -> Path:
    """Byte code that Python takes for the module's, without a look at its source; the folder that it is in."""
    folder = version / "__pycache__"
    folder.mkdir()
    (folder / "spy.py").write_text(source)
    target = folder / f"{module}.cpython-{sys.version_info.major}{sys.version_info.minor}.pyc"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(folder / "spy.py"), str(target), invalidation_mode=mode, doraise=True)
    (folder / "spy.py").unlink()
    return folder


def test_what_is_not_signed_is_not_loaded_whenever_it_comes(
    tmp_path: Path, signed: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, private, public = signed
    ran = tmp_path / "ran"
    admin = add_key(tmp_path / "keys.json", "admin", admin=True)[0]
    grpc_port = free()
    monkeypatch.setenv("SERVE_GATEWAY_KEYS", str(tmp_path / "keys.json"))
    monkeypatch.setenv("SERVE_GATEWAY_GRPC_PORT", str(grpc_port))
    words = ("--public-key", str(public), "--model-control", "--watch", "--restarts", "20")
    with up(tmp_path, str(repository), *FREE, *words) as running:
        url = running.url()

        def load(parameters: dict[str, Any] | None = None) -> int:
            body = json.dumps({"parameters": parameters} if parameters else {}).encode()
            at = f"{url}/v2/repository/models/tiny_postprocess/load"
            return fetch(at, body, authorization=f"Bearer {admin}")[0]

        assert load() == 200
        said = fetch(f"{url}/predict/tiny", b'{"text": "0,2,1,0"}', **{"x-api-key": admin}, content_type=JSON)
        assert said[1]["outputs"]["label"] == "b"
        assert check_files(repository, public), "a running Triton writes nothing into it"

        # A load that brings its code along, over HTTP and gRPC, and in a spelling that two readers read differently.
        source = base64.b64encode(SPY.format(place=str(ran)).encode()).decode()
        config = (repository / "tiny_postprocess/config.pbtxt").read_text()
        assert load({"config": json.dumps({"backend": "python"}), "file:1/model.py": source}) == 403
        assert load({"config": config}) == 403
        twice = b'{"parameters":{"file:1/model.py":"%s","config":"{}"},"parameters":{}}' % source.encode()
        at = f"{url}/v2/repository/models/tiny_postprocess/load"
        assert fetch(at, twice, authorization=f"Bearer {admin}")[0] == 200, "goes on as a load of the model's name"
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
            with pytest.raises(tritonclient.grpc.InferenceServerException, match="no files along"):
                client.load_model("tiny_postprocess", headers={"x-api-key": admin}, config="{}")
            client.load_model("tiny_postprocess", headers={"x-api-key": admin})

            # What lies in the repository.
            planted = compiled(SPY.format(place=str(ran)), repository / "tiny_postprocess/1", "model")
            assert load() == 409
            with pytest.raises(tritonclient.grpc.InferenceServerException, match="vouch"):
                client.load_model("tiny_postprocess", headers={"x-api-key": admin})
        shutil.rmtree(planted)
        assert load() == 200

        # What is changed is followed once it is signed.
        pack_letters(tmp_path, "xyz")
        running.until(lambda: "won't trust" in running.said)
        sign(repository, private)
        running.until(lambda: "tiny is loaded" in running.said)

        # What is there when Triton is started again.
        (repository / "tiny_network/9").symlink_to("1")
        os.kill(triton_of(running.process), signal.SIGKILL)
        running.until(lambda: "did not start: it is a link" in running.said)
        assert not triton_of(running.process)
        (repository / "tiny_network/9").unlink()
        running.until(lambda: "ready again" in running.said, 120)
    assert not ran.exists()
