"""A running `serve up` and a headless browser, for the tests that need them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import compress.cli

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], url: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A server that was started by a command, from when its /readyz says yes until the block ends."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{url}/readyz", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                pytest.fail(f"{command} did not get ready: {process.communicate()[0]}")
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert "stopped" in output


def compress_here(words: list[str], folder: Path) -> None:
    """A `compress` command in a folder, by a process that has imported torch already: this one. It has to end well."""
    with contextlib.chdir(folder), pytest.raises(SystemExit) as ended:
        compress.cli.main(words)
    assert not ended.value.code, words


@pytest.fixture(scope="session")
def shipped_triton() -> str:
    """The URL of the Triton behind `shipped`."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="session")
def shipped(shipped_triton: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`serve up model_repository` on the repository that comes with the project; the gateway's URL.

    On a copy: it is served once at a time, and other processes of this very test run may serve theirs.
    """
    folder = tmp_path_factory.mktemp("shipped")
    shutil.copytree(ROOT / "model_repository", folder / "model_repository")
    url = f"http://127.0.0.1:{free_port()}"
    port = shipped_triton.rpartition(":")[2]
    ports = ["--triton-http-port", port, "--triton-grpc-port", "0", "--triton-metrics-port", "0"]
    command = [sys.executable, "-m", "serve", "up", "model_repository", "--port", url.rpartition(":")[2], *ports]
    with running(command, url, folder):
        yield url


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[str], str]:
    """The document that a headless Chromium makes of a page, after its scripts have run."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser: apt-get install chromium")

    def dump(url: str) -> str:
        quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync", "--disable-extensions"]  # fmt: skip
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            *quiet,
            profile,
            "--virtual-time-budget=8000",
            "--dump-dom",
            url,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    return dump
