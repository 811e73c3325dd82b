"""A server that may use one core starts one thread that computes in each instance, whatever is asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest

from serve.pack.write import PackOptions, pack
from tests.control_groups import quota_of_one
from tests.serve_models import tiny_artifact

pytestmark = pytest.mark.integration
FREE = ["--port", "0", "--triton-http-port", "0", "--triton-grpc-port", "0", "--triton-metrics-port", "0"]
# ONNX Runtime's pool has a thread less than it is given: the caller is one of them.
POOL = re.compile(r"intra_op_thread_count.*?string_value: \"\d+\"", re.DOTALL)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks that say one thread, many, and nothing."""
    folder = tmp_path_factory.mktemp("cores")
    tiny = tiny_artifact(folder / "tiny")
    for name, threads in (("one", 1), ("many", 16), ("open", 1)):
        options = PackOptions(instances=1, threads=threads)
        pack(tiny, repository=folder / "models", name=name, options=options)
    if find_spec("openvino"):
        for name, threads in (("ov_one", 1), ("ov_many", 16)):
            options = PackOptions(instances=1, threads=threads, runtime="openvino")
            pack(tiny, repository=folder / "models", name=name, options=options)
    path = folder / "models/open/config.pbtxt"
    text = path.read_text(encoding="utf-8")
    changed = POOL.sub('intra_op_thread_count"\n  value {\n    string_value: "0"', text)
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    return folder / "models"


def served(before: list[str], repository: Path, log: Path, *more: str) -> tuple[str, dict[str, int]]:
    """What `serve up` says of cores, and the threads of each model's process."""
    command = [*before, sys.executable, "-m", "serve", "up", str(repository), *FREE, "--log", str(log), *more]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
        environ.pop(name, None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        try:
            said = ""
            assert process.stdout is not None
            for line in process.stdout:
                said += line
                if line.startswith("gateway "):
                    break
            assert "gateway " in said, said
            with urlopen(re.findall(r"gateway +(http\S+)", said)[0] + "/v2/health/ready", timeout=60) as answer:
                assert answer.status == 200
            counted = dict(threads_in(process.pid))
        finally:
            process.terminate()
            process.communicate(timeout=120)
    (told,) = [line for line in said.splitlines() if line.startswith("cores ")]
    return told, counted


def threads_in(ancestor: int) -> Iterator[tuple[str, int]]:
    """Each model's process below one, and how many threads the kernel counts in it."""
    below = {ancestor}
    for _ in range(8):  # deep enough: tritonserver, the stub
        below |= {pid for pid, parent in parents() if parent in below}
    for pid in below:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        if "python_backend_stub" in words and (found := re.search(r"/models/(\w+)/", words)):
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            yield found[1], int(re.findall(r"^Threads:\s+(\d+)$", status, re.MULTILINE)[0])


def alike(counted: dict[str, int]) -> bool:
    """Whether all models of a runtime have as many threads as the one that asks for one."""
    return all(count == counted["ov_one" if name.startswith("ov_") else "one"] for name, count in counted.items())


def parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue


def test_on_one_cpu_each_computes_with_one_thread(repository: Path, tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    before = [
        sys.executable,
        "-c",
        f"import os, sys; os.sched_setaffinity(0, {{{cpu}}}); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    told, counted = served(before, repository, tmp_path / "log")
    assert {"one", "many", "open"} <= set(counted)
    assert alike(counted), counted
    assert re.search(r"1 core\b.*many 1 x 1 thread \(16 asked for\); one 1 x 1 thread; open 1 x 1 thread\b", told), told


def test_in_a_group_with_the_time_of_one_cpu_each_computes_with_one_thread(repository: Path, tmp_path: Path) -> None:
    with quota_of_one() as before:
        told, counted = served(before, repository, tmp_path / "log")
        time.sleep(0.1)
    assert alike(counted), counted
    if (os.cpu_count() or 1) > 1:
        assert "1 at a time" in told
    assert "many 1 x 1 thread (16 asked for)" in told


def test_where_there_are_more_cores_more_threads_compute(repository: Path, tmp_path: Path) -> None:
    told, counted = served([], repository, tmp_path / "log")
    cores = len(os.sched_getaffinity(0))
    if re.search(r"^cores +(\d+) ", told)[1] == str(cores):  # type: ignore[index]
        assert counted["many"] - counted["one"] == min(16, cores) - 1
        assert counted["open"] - counted["one"] == cores - 1
