"""`serve up` as its user has it: a command that shows what it serves, keeps it alive, and follows the repository."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc

from serve.cli.main import main
from serve.gateway.access.keys import add_key
from serve.http.message import Address
from serve.http.once import ask_once
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonServer
from serve.triton.memory import FOLDER
from serve.up.claim import claimed
from tests.gateway_models import FILES_MODEL, fetch, loading_slowly, tiny_and_files
from tests.integration.test_gateway_grpc import free_port
from tests.serve_models import HOOKS, hook_file, tiny_artifact
from tests.warm import Serve

pytestmark = pytest.mark.integration
FREE = [word for flag in ("", "triton-http-", "triton-grpc-", "triton-metrics-") for word in (f"--{flag}port", "0")]
ONE = PackOptions(instances=1)
Process = Serve | subprocess.Popen[bytes]


class Up:
    """A running `serve up`, and what it has said so far; as a shell starts it, where how Python starts is the matter."""

    def __init__(self, *words: str, log: Path, by_a_shell: bool = False) -> None:
        self.log = log
        self.process: Process
        with log.open("wb") as file:
            if by_a_shell:
                environ = os.environ | {"PYTHONUNBUFFERED": "1"}
                command = [sys.executable, "-m", "serve", "up", *words]
                self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ)
            else:
                self.process = Serve("up", *words, out=file)

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def until(self, what: Callable[[], Any], seconds: float = 200.0) -> Any:
        """What the call gives, as soon as it is something."""
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert self.process.poll() is None or time.monotonic() < deadline - seconds + 5, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)
        return found

    def url(self) -> str:
        match = self.until(lambda: re.search(r"gateway +(http://\S+)", self.said))
        return str(match[1])


@contextmanager
def up(folder: Path, *words: str, by_a_shell: bool = False) -> Iterator[Up]:
    running = Up(*words, log=folder / "up.log", by_a_shell=by_a_shell)
    try:
        yield running
    finally:
        running.process.send_signal(signal.SIGINT)
        running.process.wait(200)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    tiny_artifact(tmp_path / "tiny")
    pack_letters(tmp_path, "abc")
    return tmp_path / "models"


def pack_letters(folder: Path, letters: str) -> None:
    hooks = hook_file(folder, HOOKS.replace('"abc"', f'"{letters}"'))
    pack(folder / "tiny", repository=folder / "models", name="tiny", hooks=hooks, options=ONE)


def label(url: str, model: str = "tiny") -> str:
    """The answer of the model, or the status that says why there is none."""
    request = urllib.request.Request(f"{url}/predict/{model}", json.dumps({"text": "0,2,1,0"}).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(json.load(answer)["outputs"]["label"])
    except urllib.error.HTTPError as err:
        with err:
            return str(err.code)


def triton_of(process: Process) -> int:
    """The tritonserver that a `serve up` started; it may be another one later."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                name, _, rest = (folder / "stat").read_text().rpartition(")")
            except OSError:
                continue
            state, parent = rest.split()[:2]
            if int(parent) == process.pid and "tritonserver" in name and state != "Z":
                return int(folder.name)
    return 0


def test_it_shows_what_it_serves_and_ends_in_order(tmp_path: Path, repository: Path) -> None:
    log = tmp_path / "triton.log"
    with up(tmp_path, str(repository), *FREE, "--log", str(log), "--cpus", "0", "--restarts", "0") as running:
        url = running.url()
        assert label(url) == "b"
        assert os.sched_getaffinity(triton_of(running.process)) == {0}
        said = running.said
    for text in ("tiny_network", "onnxruntime", "READY", f"{url}/predict/tiny", "Triton gRPC", "metrics", str(log)):
        assert text in said
    assert "gateway gRPC  none: grpc_port in" in said
    assert "Started" in log.read_text(encoding="utf-8")
    assert running.process.returncode == 0
    assert running.said.endswith("stopped\n")
    with claimed(repository):
        pass


def test_a_triton_that_dies_is_started_again_behind_the_same_gateway(tmp_path: Path, repository: Path) -> None:
    with up(tmp_path, str(repository), *FREE) as running:
        url = running.url()
        first = running.until(lambda: triton_of(running.process))
        os.kill(first, signal.SIGKILL)
        running.until(lambda: label(url) in ("502", "503"))
        running.until(lambda: "ready again" in running.said)
        assert label(url) == "b"
        assert triton_of(running.process) not in (0, first)
    assert (
        "Triton has died: it was ended by SIGKILL; with no request in flight; it is started again in 0.5 s"
        in running.said
    )
    assert running.process.returncode == 0


@pytest.mark.parametrize("told", ["to a full disk", "to nobody"])
def test_what_can_not_be_told_ends_nothing(tmp_path: Path, repository: Path, told: str) -> None:
    """Its words go to a disk that is full, or to a pipe whose reader has gone."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = [str(repository), "--port", str(port), *FREE[2:]]
    with ExitStack() as stack:
        reader, nobody = os.pipe()
        os.close(reader)
        stack.callback(os.close, nobody)
        full = os.open("/dev/full", os.O_WRONLY)
        stack.callback(os.close, full)
        out = full if told == "to a full disk" else nobody
        command = [sys.executable, "-m", "serve", "up", *words]
        running = subprocess.Popen(command, stdout=out, stderr=out)
        stack.callback(running.wait, 200)
        stack.callback(running.send_signal, signal.SIGINT)

        def answered() -> bool:
            assert running.poll() is None, "it has ended"
            try:
                return label(url) == "b"
            except OSError:
                return False

        def until(what: Callable[[], Any]) -> Any:
            deadline = time.monotonic() + 200
            while not (found := what()):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            return found

        until(answered)
        first = triton_of(running)
        os.kill(first, signal.SIGKILL)
        assert until(lambda: triton_of(running) not in (0, first))
        until(answered)
        hooks = [stub for stub in stubs_of(running) if "tiny_preprocess" in stub[1]]
        assert hooks
        for pid, _ in hooks:
            os.kill(pid, signal.SIGKILL)
        until(lambda: {pid for pid, _ in hooks}.isdisjoint(pid for pid, _ in stubs_of(running)))
        until(answered)


def stubs_of(process: Process) -> list[tuple[int, str]]:
    """The processes of Python models that its Triton has started: their ids and command lines."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if "triton_python_backend_stub" in words.split(" ")[0] and str(triton_of(process)) in words:
                    found.append((int(folder.name), words))
    return found


def test_a_triton_that_dies_too_often_ends_it(tmp_path: Path, repository: Path) -> None:
    with up(tmp_path, str(repository), *FREE, "--restarts", "0") as running:
        running.url()
        os.kill(running.until(lambda: triton_of(running.process)), signal.SIGKILL)
        assert running.process.wait(200) != 0
    assert "error: Triton has died" in running.said


def test_while_a_changed_model_loads_the_one_before_it_answers_on_each_connection(tmp_path: Path) -> None:
    """Over HTTP, a load holds one of Triton's threads, and with it all connections of that thread."""
    begun = tmp_path / "begun"
    waits = "            time.sleep(0.05)\n"
    code = loading_slowly(FILES_MODEL).replace(waits, f"{waits}            open({str(begun)!r}, 'w').close()\n")
    repository = tiny_and_files(tmp_path, code)
    slow = repository.with_name("slow")
    body = json.dumps({"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}]}).encode()
    with up(tmp_path, str(repository), *FREE, "--watch", "--drain-timeout", "3") as running:
        url = running.url()
        host, _, port = url.removeprefix("http://").rpartition(":")
        address = Address(host, int(port))

        def asks(_: int) -> int:
            return ask_once(address, "POST", "/v2/models/files/infer", body, timeout_s=30.0)[0]

        with ThreadPoolExecutor(32) as pool:
            assert set(pool.map(asks, range(64))) == {200}  # as many connections to Triton, on all of its threads
            slow.touch()
            with (repository / "files/1/model.py").open("a") as file:
                file.write("\n")
            running.until(begun.exists)
            assert set(pool.map(asks, range(256))) == {200}
            assert "files is loaded" not in running.said
        running.process.send_signal(signal.SIGTERM)  # a load that hangs does not keep it from its end
        assert running.process.wait(100) == 0, running.said
        assert "Traceback" not in running.said


def test_a_triton_elsewhere_gets_a_gateway(tmp_path: Path, repository: Path) -> None:
    with TritonServer(repository, ports=Ports(0, 0, 0)) as triton:
        with up(tmp_path, "--triton", f"http://{triton.http_address}", "--port", "0") as running:
            assert label(running.url()) == "b"
            assert "tiny_network" in running.said
        assert triton.running


def test_the_gateways_own_settings_hold_and_its_address_for_grpc_is_shown(tmp_path: Path, repository: Path) -> None:
    port = free_port()
    secret, _ = add_key(tmp_path / "keys.json", "me", models=("tiny",))
    (tmp_path / "gateway.toml").write_text(f'keys = "keys.json"\ngrpc_port = {port}\nmax_body_bytes = 1000\n')
    with up(tmp_path, str(repository), "--gateway", str(tmp_path / "gateway.toml"), *FREE) as running:
        url = running.url()
        assert fetch(f"{url}/v2/models/tiny")[0] == 401
        assert fetch(f"{url}/v2/models/tiny", None, x_api_key=secret)[0] == 200
        assert fetch(f"{url}/predict/tiny", bytes(2000), x_api_key=secret)[0] == 413
        running.until(lambda: re.search(r"^Ctrl-C stops", running.said, re.MULTILINE))
        (address,) = re.findall(r"^gateway gRPC +(\S+)$", running.said, re.MULTILINE)
        with tritonclient.grpc.InferenceServerClient(address) as client:
            assert client.is_model_ready("tiny", headers={"x-api-key": secret})
            assert client.get_model_metadata("tiny", headers={"x-api-key": secret}).name == "tiny"
    assert address == f"127.0.0.1:{port}"
    assert re.search(r"^Triton gRPC +\S+ +\(this machine only, past the gateway\)$", running.said, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "why"),
    [("keys = 'none.json'", "can't read the keys"), ("prot = 1", "did you mean"), ("timeout_s = 0", "timeout_s is 0")],
)
def test_settings_of_the_gateway_that_can_t_work_are_told_before_triton_starts(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    (tmp_path / "gateway.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["up", str(repository), "--gateway", str(tmp_path / "gateway.toml"), *FREE])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_the_container_command_is_printed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", str(repository), "--docker", "print", "--image", "triton:test", "--triton-http-port", "9000"])
    assert ended.value.code in (0, None)
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["docker", "run", "--rm"]
    assert "--publish=127.0.0.1:9000:8000" in words
    assert f"--volume={repository.absolute()}:/models:ro" in words
    assert words[words.index("triton:test") + 1] == "tritonserver"


def test_a_container_that_ends_is_told(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit 125\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    with pytest.raises(SystemExit) as ended:
        main(["up", str(repository), "--docker", "run", "--port", "0"])
    assert ended.value.code == 2
    assert "docker ended with code 125" in capsys.readouterr().err
    assert (tmp_path / "asked").read_text().startswith("run --rm --shm-size=")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "neither a repository nor a Triton"),
        (["models", "--triton", "http://127.0.0.1:1"], "both are given"),
        (["--triton", "http://127.0.0.1:1"], "refused"),
        (["models", "--cpus", "a-b"], "it is no list"),
        (["models", "--restarts", "-1"], "it is too small"),
    ],
)
def test_what_can_t_be_served_is_told(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", *words])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda model: (model / "1/model.onnx").write_bytes(b"no model"), "won't serve"),
        (lambda model: (model / "1/provenance.json").unlink() or (model / "1/model.onnx").write_bytes(b"x"), "refuses"),
        (lambda model: append(model / "config.pbtxt", 'runtime: "libnobody.so"'), "libnobody.so"),
        (lambda model: append(model / "config.pbtxt", "#" * (1 << 20)), "at most"),
        (lambda model: replaced(model / "config.pbtxt", "dims: 3", 'dims: 3 label_filename: "l.txt"'), "l.txt"),
    ],
    ids=["another file", "no model", "no runtime", "too long", "no labels"],
)
def test_what_triton_would_refuse_is_told_before_it_starts(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: Callable[[Path], object],
    why: str,
) -> None:
    broken(repository / "tiny_network")
    monkeypatch.setattr(TritonServer, "start", lambda _: pytest.fail("Triton was started"))
    with pytest.raises(SystemExit) as ended:
        main(["up", str(repository), *FREE])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_files_that_are_trusted_are_not_held_against_their_sums(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(repository / "tiny_preprocess/1/hooks.py", "# mine")
    started: list[bool] = []

    def start(_: TritonServer) -> None:
        started.append(True)
        raise SystemExit(7)

    monkeypatch.setattr(TritonServer, "start", start)
    with pytest.raises(SystemExit):
        main(["up", str(repository), "--trust-changes", *FREE])
    assert started


def append(path: Path, text: str) -> None:
    path.write_text(f"{path.read_text()}{text}\n")


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def hide(repository: Path, ran: Path) -> None:
    """Folders that are no models; what one of them would run leaves a file."""
    hidden = repository / ".a$(touch named)b"
    (hidden / "1").mkdir(parents=True)
    (repository / ".git/objects").mkdir(parents=True)
    tensors = "".join(f'{kind} {{ name: "{kind}" data_type: TYPE_FP32 dims: 1 }}\n' for kind in ("input", "output"))
    (hidden / "config.pbtxt").write_text(f'backend: "python"\n{tensors}')
    (hidden / "1/model.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass TritonPythonModel:\n    pass\n")
    shutil.copytree(hidden, repository / ".plain")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Up]]:
    """One that watches its repository, "models" in this folder, for the tests that follow."""
    folder = tmp_path_factory.mktemp("watched")
    tiny_artifact(folder / "tiny")
    pack_letters(folder, "abc")
    hide(folder / "models", folder / "ran")
    with up(folder, str(folder / "models"), *FREE, "--watch", "--drain-timeout", "3") as running:
        yield folder, running


def test_a_folder_with_a_dot_in_front_is_no_model_and_its_name_runs_nothing(watched: tuple[Path, Up]) -> None:
    folder, running = watched
    assert label(running.url()) == "b"
    here = Path(f"/proc/{triton_of(running.process)}/cwd").resolve()
    assert not (here / "named").exists()
    assert not (folder / "ran").exists()


def test_the_memory_of_a_model_that_is_loaded_again_is_closed_to_other_users_too(watched: tuple[Path, Up]) -> None:
    def regions() -> dict[str, int]:
        prefix = re.search(r"shm-region-prefix-name=([^\0]+)", line)
        assert prefix
        return {path.name: path.stat().st_mode & 0o077 for path in FOLDER.glob(f"{prefix[1]}*")}

    folder, running = watched
    url = running.url()
    line = ""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "stat").read_text().rpartition(")")[2].split()[1] == str(running.process.pid):
                found = (path / "cmdline").read_text()
                line = found if "shm-region-prefix-name" in found else line
    before = regions()
    assert not any(before.values())
    pack_letters(folder, "abc" if label(url) == "y" else "xyz")
    running.until(lambda: regions().keys() - before.keys() and not any(regions().values()))


def test_a_second_one_on_a_repository_is_told_who_serves_it(watched: tuple[Path, Up], tmp_path: Path) -> None:
    folder, running = watched
    running.url()
    link = tmp_path / "link"
    link.symlink_to(folder / "models")
    for other in (folder / "models", link):
        second = subprocess.run(
            [sys.executable, "-m", "serve", "up", str(other), *FREE],
            capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        assert second.returncode == 2
        assert f"the process {running.process.pid} serves it already" in second.stderr


def test_what_changes_in_the_repository_is_loaded(watched: tuple[Path, Up], tmp_path: Path) -> None:
    folder, running = watched
    repository, url = folder / "models", running.url()

    def said_again(words: str) -> Callable[[], bool]:
        before = running.said.count(words)
        return lambda: running.said.count(words) > before

    pack_letters(folder, "abc")
    running.until(lambda: label(url) == "b")
    pack_letters(folder, "xyz")
    running.until(lambda: label(url) == "y")
    loaded = said_again("other is loaded")
    pack(folder / "tiny", repository=repository, name="other", options=ONE)
    running.until(loaded)
    newest = max((repository / "tiny_network").glob("[0-9]*"), key=lambda path: int(path.name))
    whole, refused = (newest / "model.onnx").read_bytes(), said_again("what was loaded goes on")
    (newest / "model.onnx").write_bytes(b"damaged")
    running.until(refused)
    assert label(url) == "y"
    gone = said_again("other is no longer served")
    (repository / "other").rename(tmp_path / "aside")
    running.until(gone)
    (newest / "model.onnx").write_bytes(whole)
