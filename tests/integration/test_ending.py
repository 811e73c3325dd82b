"""`serve up` ends in order whoever tells it to, at once where it is told twice, and a kill leaves nothing for long."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from compress.vetting.scratch import OWNER
from serve.triton.leftovers import RUN
from tests.gateway_models import FILES_MODEL, loading_slowly, tiny_and_files
from tests.integration.test_gateway_grpc import free_port
from tests.integration.test_isolation import ask, asked
from tests.integration.test_up import FREE, Up, up

pytestmark = pytest.mark.integration
# An hour for an answer, or a nap.
MODEL = loading_slowly(
    FILES_MODEL.replace("time.sleep(2)", "time.sleep(600)").replace(
        '        if files[0, 0].startswith(b"fail',
        '        if files[0, 0] == b"nap":\n            time.sleep(3)\n        if files[0, 0].startswith(b"fail',
    )
)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of what the test starts."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def sleeping() -> messages.ModelInferRequest:
    request = messages.ModelInferRequest(model_name="files", raw_input_contents=[struct.pack("<I", 5) + b"sleep"])
    request.inputs.add(name="file", datatype="BYTES", shape=[1, 1])
    return request


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tiny_and_files(tmp_path, MODEL)


def of(folder: Path) -> Iterator[int]:
    """The processes that have a path in this folder in their command line."""
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.fsencode(f"{folder}/") in (each / "cmdline").read_bytes():
                    yield int(each.name)


def runs(scratch: Path) -> list[Path]:
    return [path for path in scratch.iterdir() if path.name.startswith((RUN, "served-"))]


def loading(running: Up, scratch: Path) -> None:
    """Wait until Triton has a process for the model that takes its time."""
    running.until(lambda: any(b"model.py" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in of(scratch)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(tmp_path: Path, repository: Path, scratch: Path, number: signal.Signals) -> None:
    running = Up(str(repository), *FREE, log=tmp_path / "up.log")
    url = running.url()
    assert ask(url, "tiny", b"")[0] == 400

    running.process.send_signal(number)

    assert running.process.wait(100) == 0, running.said
    assert "Traceback" not in running.said
    assert runs(scratch) == []
    assert list(of(scratch)) == []


def test_a_terminal_that_closes_does_not_end_what_was_started_without_one(tmp_path: Path, repository: Path) -> None:
    command = ["nohup", sys.executable, "-m", "serve", "up", str(repository), *FREE]
    log = tmp_path / "up.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        while "gateway" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0


def test_a_terminal_that_closes_says_so_twice_and_hurries_nobody(
    tmp_path: Path, repository: Path, scratch: Path
) -> None:
    with up(tmp_path, str(repository), *FREE) as running:
        url = running.url()
        statuses: list[int] = []
        asking = threading.Thread(target=lambda: statuses.append(ask(url, "files", asked("nap"))[0]))
        asking.start()
        time.sleep(0.5)
        for number in (signal.SIGHUP, signal.SIGHUP):
            running.process.send_signal(number)
            time.sleep(0.3)
        asking.join(60)
        assert statuses == [200]
        assert running.process.wait(100) == 0, running.said


def test_triton_takes_no_modules_from_where_it_is_started(
    tmp_path: Path, repository: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = tmp_path / "here", tmp_path / "mark"
    folder.mkdir()
    for module in ("json", "dis", "uuid", "pathlib"):
        (folder / f"{module}.py").write_text(f"open({str(mark)!r}, 'a').write(__name__)\nraise SystemExit(1)\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.chdir(folder)
    with up(tmp_path, str(repository), *FREE, by_a_shell=True) as running:
        assert ask(running.url(), "tiny", b"")[0] == 400
    assert not mark.exists(), mark.read_text()


def test_told_twice_it_ends_without_waiting_and_says_what_it_cut(
    tmp_path: Path, repository: Path, scratch: Path
) -> None:
    running = Up(str(repository), *FREE, log=tmp_path / "up.log")
    url = running.url()
    statuses: list[int] = []
    asking = threading.Thread(target=lambda: statuses.append(ask(url, "files", asked("sleep"))[0]))
    asking.start()
    time.sleep(1)

    running.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    asking.join(60)

    assert running.process.wait(100) == 0, running.said
    assert statuses == [503]
    assert "ends at once, as it was told to; requests cut: 1" in running.said
    assert "Traceback" not in running.said
    assert runs(scratch) == []


@pytest.mark.parametrize("over", ["http", "grpc"])
def test_what_it_waits_for_as_it_ends_is_told_at_once_and_at_the_end(
    tmp_path: Path, repository: Path, scratch: Path, over: str
) -> None:
    port = free_port()
    more = ("--drain-timeout", "6", "--gateway", str(tmp_path / "gateway.toml"))
    (tmp_path / "gateway.toml").write_text(f"grpc_port = {port}\n")
    running = Up(str(repository), *FREE, *more, log=tmp_path / "up.log")
    url = running.url()

    def asks() -> None:
        if over == "http":
            assert ask(url, "files", asked("sleep"))[0] == 503
            return
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError):
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(sleeping(), timeout=60)

    assert ask(url, "files", asked("a"))[0] == 200
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(asks)
        time.sleep(1)
        running.process.send_signal(signal.SIGTERM)
        running.until(lambda: "waits for requests in flight (files: 1), for at most 6 s" in running.said)
        assert running.process.wait(100) == 0, running.said
        asking.result(60)
    cut = "requests cut: 1" if over == "http" else "calls over gRPC cut: 1"
    assert f"{cut} (files: 1)" in running.said
    assert "the gateway has ended, after" in running.said
    assert "Traceback" not in running.said


def test_an_end_that_waits_for_nobody_says_nothing(tmp_path: Path, repository: Path, scratch: Path) -> None:
    running = Up(str(repository), *FREE, log=tmp_path / "up.log")
    assert ask(running.url(), "tiny", b"")[0] == 400
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(100) == 0, running.said
    assert "the gateway waits" not in running.said


def test_a_signal_while_models_load_leaves_nothing(tmp_path: Path, repository: Path, scratch: Path) -> None:
    repository.with_name("slow").touch()
    running = Up(str(repository), *FREE, log=tmp_path / "up.log")
    loading(running, scratch)

    running.process.send_signal(signal.SIGHUP)

    assert running.process.wait(100) == 130, running.said
    assert "Traceback" not in running.said
    assert list(of(scratch)) == []
    assert runs(scratch) == []


def test_what_a_killed_one_left_is_removed_by_the_next(tmp_path: Path, repository: Path, scratch: Path) -> None:
    slow = repository.with_name("slow")
    slow.touch()
    killed = Up(str(repository), *FREE, log=tmp_path / "killed.log")
    loading(killed, scratch)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait(10)
    left = runs(scratch)
    assert {path.name.split("-")[0] for path in left} == {"served", "triton"}
    prefix = next((path / OWNER).read_text() for path in left if path.name.startswith(RUN))
    slow.unlink()
    with up(tmp_path, str(repository), *FREE) as running:
        running.url()
        assert not [path for path in left if path.exists()]
        assert not [pid for path in left for pid in of(path)]
        assert not list(Path("/dev/shm").glob(f"{prefix}*"))  # noqa: S108
        assert len(runs(scratch)) == 2
    assert runs(scratch) == []
