"""What another user of the machine, who has no word, gets of a Triton that `serve up` runs: nothing that administers
it, and nothing of its memory. Whoever has an admin key gets it through the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.keys import add_key
from serve.gateway.grpc.channels import SERVICE
from serve.gateway.health.incidents import Incidents
from serve.gateway.settings import Settings
from serve.http.message import Address
from serve.http.once import ask_once
from serve.pack.write import PackOptions, pack
from serve.triton import launch
from serve.triton.launch import Ports, TritonOptions, TritonServer
from serve.triton.memory import FOLDER
from serve.tune.candidate import candidate_of
from serve.tune.trial import Stand, load_subject
from tests.integration.test_gateway_grpc import free_port
from tests.serve_http import gateway_thread
from tests.serve_models import tiny_artifact

pytestmark = pytest.mark.integration
REGION = "systemsharedmemory/region/mine"
READ = [
    "systemsharedmemory/status", f"{REGION}/status", "cudasharedmemory/status",
    "logging", "trace/setting", "models/plain/trace/setting",
]  # fmt: skip
WRITE = [
    f"{REGION}/register", f"{REGION}/unregister", "systemsharedmemory/unregister", "cudasharedmemory/unregister",
    "cudasharedmemory/region/mine/register", "logging", "trace/setting", "models/plain/trace/setting",
]  # fmt: skip
LOADING = ["repository/index", "repository/models/plain/load", "repository/models/plain/unload"]
ASKED = {
    "LogSettings": "LogSettingsRequest", "TraceSetting": "TraceSettingRequest",
    **{f"{kind}SharedMemory{act}": f"{kind}SharedMemory{act}Request"
       for kind in ("System", "Cuda") for act in ("Status", "Register", "Unregister")},
}  # fmt: skip
LOADING_ASKED = {name: f"{name}Request" for name in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed")
    pack(tiny_artifact(folder / "a"), repository=folder / "m", name="plain", options=PackOptions(instances=1))
    return folder / "m"


@pytest.fixture(scope="module", params=[False, True], ids=["none", "model control"])
def triton(request: pytest.FixtureRequest, repository: Path) -> Iterator[TritonServer]:
    """As `serve up` runs it, and as it runs it with --model-control."""
    with TritonServer(
        repository, ports=Ports(0, 0, 0), options=TritonOptions(heal=True, explicit=request.param)
    ) as server:
        yield server


def is_explicit(triton: TritonServer) -> bool:
    return triton._options.explicit


def code_of(address: str, name: str, kind: str, metadata: list[tuple[str, str]] | None = None) -> Any:
    """How the gRPC call ends, and what is told."""
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(SERVICE + name)(
                getattr(messages, kind)().SerializeToString(), metadata=metadata, timeout=30
            )
        except grpc.RpcError as err:
            return err.code(), err.details()
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("before", ["/v2/", "//v2/", "/v2//", "/%76%32/", "/v2/x/../"])
def test_over_http_nothing_that_administers_it_answers_who_has_no_word(triton: TritonServer, before: str) -> None:
    address = Address.parse(f"http://{triton.http_address}")
    asked = [("GET", path) for path in READ]
    asked += [("POST", path) for path in (WRITE if is_explicit(triton) else [*WRITE, *LOADING])]
    for headers in ({}, {"x-serve-control": ""}, {"x-serve-control": "guessed"}):
        for method, path in asked:
            status, answer = ask_once(
                address, method, before + path, b"{}" if method == "POST" else None, headers, timeout_s=30.0
            )
            if before == "/v2/":
                assert status == 403, (method, path)
                assert b"restricted" in answer
            assert status != 200, (method, before + path)


def test_over_grpc_nothing_that_administers_it_answers_who_has_no_word(triton: TritonServer) -> None:
    for name, kind in (ASKED if is_explicit(triton) else ASKED | LOADING_ASKED).items():
        for metadata in (None, [("x-serve-control", "guessed")], [("triton-grpc-protocol-x-serve-control", "guessed")]):
            code, told = code_of(triton.grpc_address, name, kind, metadata)
            assert code is grpc.StatusCode.UNAVAILABLE, name
            assert "restricted" in told


def test_an_admin_reaches_shared_memory_logging_and_tracing_through_the_gateway(
    triton: TritonServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    admin, plain = add_key(keys, "admin", admin=True)[0], add_key(keys, "plain", models=("plain",))[0]
    port = free_port()
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        keys=keys,
    )  # fmt: skip
    shared = FOLDER / f"admins-{time.monotonic_ns()}"
    shared.write_bytes(bytes(64))
    body = f'{{"key": "/{shared.name}", "offset": 0, "byte_size": 64}}'.encode()
    try:
        with gateway_thread(settings, Incidents(control=triton.control)) as url:

            def status(method: str, path: str, content: bytes | None, key: str = admin) -> int:
                return ask_once(Address.parse(url), method, f"/v2/{path}", content, {"x-api-key": key}, timeout_s=30.0)[
                    0
                ]

            assert status("POST", f"{REGION}/register", body, plain) == 403
            assert status("POST", f"{REGION}/register", body) == 200
            assert status("GET", f"{REGION}/status", None) == 200
            assert status("POST", f"{REGION}/unregister", b"{}") == 200
            assert all(status("GET", path, None) == 200 for path in ("logging", "trace/setting"))
            assert status("POST", "repository/index", b"{}") == 200
            loaded = status("POST", "repository/models/plain/load", b"{}")
            assert loaded == (200 if is_explicit(triton) else 403)  # the word is not lent for that
            assert ask_once(Address.parse(url), "GET", "/v2/logging", None, triton.control, timeout_s=30.0)[0] == 401
            for name in ("LogSettings", "TraceSetting", "SystemSharedMemoryStatus", "RepositoryIndex"):
                told = code_of(f"127.0.0.1:{port}", name, f"{name}Request", [("x-api-key", admin)])
                assert told[0] is grpc.StatusCode.OK, (name, told)
    finally:
        shared.unlink()


def test_regions_are_closed_to_other_users_from_their_first_moment(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "close_regions", lambda _: None)
    with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
        regions = [*FOLDER.glob(f"{server._memory_prefix}*")]
        assert regions
        assert not any(region.stat().st_mode & 0o077 for region in regions)


def test_nobody_else_loads_models_while_serve_tune_measures(repository: Path) -> None:
    subject = load_subject(repository, "plain")
    present = candidate_of(subject.messages(), subject.network)
    with Stand(subject) as stand:
        address = Address.parse(stand.serve(present))
        assert ask_once(address, "POST", "/v2/repository/models/plain/load", b"{}", timeout_s=30.0)[0] == 403
        stand.serve(replace(present, instances=2))  # it does itself
