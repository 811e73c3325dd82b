"""A real tritonserver as a process: how it starts, how it fails, and that it always ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from compress.errors import RepositoryError, ServerError
from serve.http.message import Address
from serve.http.once import ask_once
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonOptions, TritonServer
from serve.triton.memory import FOLDER
from tests.serve_models import hook_file, tiny_artifact

FREE = Ports(0, 0, 0)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be cleared away does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def group(pid: int) -> set[int]:
    """The processes of a process group."""
    members = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and alive(int(folder.name)):
            try:
                if os.getpgid(int(folder.name)) == pid:
                    members.add(int(folder.name))
            except ProcessLookupError:
                pass
    return members


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model without hooks, in one process."""
    repository = tmp_path / "models"
    pack(tiny_artifact(tmp_path / "tiny"), repository=repository, name="plain", options=PackOptions(instances=1))
    return repository


def test_it_stops_and_leaves_nothing(repository: Path) -> None:
    server = TritonServer(repository, ports=FREE).start()
    pid = server.pid
    assert pid is not None
    members = group(pid)
    assert len(members) > 1
    assert server.running
    assert list(FOLDER.glob(f"{server._memory_prefix}*"))
    with pytest.raises(ServerError, match="twice"):
        server.start()
    server.stop()
    server.stop()
    assert not server.running
    assert server.pid is None
    assert not any(map(alive, members))
    assert not group(pid)
    assert not server.log.exists()
    assert not list(FOLDER.glob(f"{server._memory_prefix}*"))
    port = int(server.http_address.rpartition(":")[2])
    with TritonServer(repository, ports=Ports(port, 0, 0)) as again:  # the port is free, and it can be had again
        assert again.http_address == server.http_address


def test_a_server_that_hangs_is_killed_with_its_stubs(repository: Path) -> None:
    server = TritonServer(repository, ports=FREE, options=TritonOptions(stop_timeout_s=1)).start()
    pid = server.pid
    assert pid is not None
    members = group(pid)
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not any(map(alive, members))


def test_it_outlives_the_thread_that_started_it(repository: Path) -> None:
    server = TritonServer(repository, ports=FREE)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert server.running
    server.stop()


def test_it_dies_with_a_parent_that_is_killed(repository: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom serve.triton.launch import Ports, TritonServer\n"
        "server = TritonServer(Path(sys.argv[1]), ports=Ports(0, 0, 0)).start()\n"
        "print(server.pid, flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(repository)]
    environ = os.environ | {"TMPDIR": str(repository.parent)}  # it has no time to clear up
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        members = group(pid)
        assert len(members) > 1
        parent.kill()
    deadline = time.monotonic() + 20
    while any(map(alive, members)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, members))


def test_a_port_in_use_is_told_before_anything_starts(repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port}") as caught:
            TritonServer(repository, ports=Ports(0, port, 0)).start()
    assert "--triton-grpc-port" in caught.value.mend


def test_models_that_do_not_load_are_told_with_the_reason(repository: Path, tmp_path: Path) -> None:
    artifact = tiny_artifact(tmp_path / "tiny")
    pack(artifact, repository=repository, name="hooked", hooks=hook_file(tmp_path))
    hooks = repository / "hooked_preprocess/1/hooks.py"
    hooks.write_text("import nothing_like_it\n" + hooks.read_text())
    config = repository / "hooked_postprocess/config.pbtxt"
    config.write_text(config.read_text().replace('[\\"numpy\\"]', '[\\"nothing-else\\"]'))
    (repository / "plain/1/model.onnx").write_bytes(b"no model")
    network = repository / "hooked_network/config.pbtxt"
    network.write_text(network.read_text().replace("dims: 3", "dims: 5"))
    server = TritonServer(repository, ports=FREE, log=tmp_path / "logs/triton.log")
    with pytest.raises(ServerError, match="can't serve") as caught:
        server.start()
    why = caught.value.why
    assert "hooked_preprocess: ModuleNotFoundError: No module named 'nothing_like_it' (hooks.py, line 1)" in why
    assert "hooked_postprocess: RuntimeError: hooks.py needs nothing-else (not installed)" in why
    assert "output 'logits' is TYPE_FP32[-1, 5], model.onnx has tensor(float)[-1, 3]" in why
    assert "plain: " in why
    assert "CUDA" not in why
    assert "Traceback" not in why
    assert str(server.log) in caught.value.mend
    assert server.log.is_file()
    assert not server.running


def test_a_model_that_takes_too_long_is_told(repository: Path, tmp_path: Path) -> None:
    pack(tiny_artifact(tmp_path / "tiny"), repository=repository, name="hooked", hooks=hook_file(tmp_path))
    hooks = repository / "hooked_preprocess/1/hooks.py"
    hooks.write_text("import time\ntime.sleep(60)\n")
    options = TritonOptions(start_timeout_s=2, stop_timeout_s=1)
    with pytest.raises(ServerError) as caught:
        TritonServer(repository, ports=FREE, options=options, log=tmp_path / "triton.log").start()
    assert "not ready after 2 s" in caught.value.why


def test_an_empty_repository_is_told(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="holds no model"):
        TritonServer(tmp_path, ports=FREE).start()


def test_other_users_read_neither_its_log_nor_its_memory_nor_the_word_that_controls_it(
    repository: Path, tmp_path: Path
) -> None:
    log = tmp_path / "triton.log"
    with TritonServer(repository, ports=Ports(0, 0, 0), options=TritonOptions(heal=True), log=log) as server:
        (word,) = server.control.values()
        line = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert b"model-repository" in line
        assert word.encode() not in line
        assert log.stat().st_mode & 0o077 == 0
        regions = [*FOLDER.glob(f"{server._memory_prefix}*")]
        assert regions
        assert all(region.stat().st_mode & 0o077 == 0 for region in regions)
        host, _, port = server.http_address.rpartition(":")
        for headers, status in (({}, 403), ({**server.control, "content-type": "application/json"}, 200)):
            address, path = Address(host, int(port)), "/v2/repository/models/plain/load"
            assert ask_once(address, "POST", path, b"{}", headers, timeout_s=30.0)[0] == status


RAISES = """\
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("not this")
"""


FINISHES = """\
import time

class Base:
    def finalize(self):
        open({mark!r}, "a").write("begun")
        time.sleep(6)
        open({mark!r}, "a").write(", ended")
"""
INHERITS = """\
import sys

sys.path.append({folder!r})
from its_base import Base

class TritonPythonModel(Base):
    def execute(self, requests):
        raise ValueError("not this")
"""


@pytest.mark.parametrize("how", ["raised", "died"])
def test_what_triton_never_lets_go_of_keeps_it_from_no_end_and_takes_none_from_others(tmp_path: Path, how: str) -> None:
    """A model that raised while others waited, or whose process has died; beside one that has something to do then."""
    mark = tmp_path / "mark"
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/its_base.py").write_text(FINISHES.format(mark=str(mark)))
    for name, code in (("m", RAISES), ("other", INHERITS.format(folder=str(tmp_path / "installed")))):
        folder = tmp_path / "models" / name
        (folder / "1").mkdir(parents=True)
        (folder / "1/model.py").write_text(code)
        (folder / "config.pbtxt").write_text(
            'backend: "python" max_batch_size: 8 instance_group [ { kind: KIND_CPU count: 1 } ] '
            'input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ] '
            'output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]'
        )
    body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}'
    server = TritonServer(folder.parent, ports=FREE, options=TritonOptions(stop_timeout_s=300)).start()
    address = Address.parse(f"http://{server.http_address}")

    def ask(name: str = "m") -> None:
        for _ in range(50):
            assert ask_once(address, "POST", f"/v2/models/{name}/infer", body, timeout_s=30.0)[0] == 500

    clients = [threading.Thread(target=ask) for _ in range(6)]
    for client in clients if how == "raised" else []:
        client.start()
    for client in clients if how == "raised" else []:
        client.join()
    if how == "died":
        for stub in server.stubs():
            if stub.model == "m":
                os.kill(stub.pid, signal.SIGKILL)
        server.wedged.add("m")  # as who heals it says
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 200  # of the 300 that its options allow
    assert mark.read_text() == "begun, ended"
