"""Hot reload: what is loaded when some of a repository is broken, or Triton is away for a while."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from serve.up.watch import Follower, fingerprints

CONFIG = 'name: "{}"\nbackend: "python"\nmax_batch_size: 0\n'


class Triton:
    """What a Triton in explicit mode was told, and what it refuses."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.unloaded: list[str] = []
        self.refuses: set[str] = set()
        self.port = 0

    @contextmanager
    def listening(self) -> Iterator[str]:
        triton = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                *_, name, verb = self.path.split("/")
                refused = name in triton.refuses
                if not refused:
                    (triton.loaded if verb == "load" else triton.unloaded).append(name)
                body = json.dumps({"error": "it does not load"} if refused else {}).encode()
                self.send_response(400 if refused else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        server = HTTPServer(("127.0.0.1", self.port), Handler)
        self.port = server.server_port
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def write(repository: Path, name: str, text: str | None = None, config: str | None = None) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name) if config is None else config)
    if text is not None:
        (version / "model.py").write_text(text)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        write(tmp_path, name, "first")
    return tmp_path


def now(repository: Path) -> dict[str, Any]:
    found = fingerprints(repository)
    assert found is not None
    return found


def test_a_broken_config_holds_up_no_other_model(repository: Path) -> None:
    triton = Triton()
    events: list[str] = []
    with triton.listening() as url:
        follower = Follower(repository, url, events.append, now(repository))
        write(repository, "b", "second, longer", config="name: {")
        write(repository, "a", "second, longer")
        follower.take(now(repository))
        assert triton.loaded == ["a"]
        write(repository, "c", "second, longer")  # while b is still broken
        follower.take(now(repository))
        assert triton.loaded == ["a", "c"]
        assert sum("config.pbtxt can't be read" in event for event in events) == 1  # not at each look
        write(repository, "b", "second, longer")
        follower.take(now(repository))
        assert triton.loaded == ["a", "c", "b"]
        follower.take(now(repository))
        assert triton.loaded == ["a", "c", "b"]


def test_what_triton_refuses_is_tried_again_when_another_was_loaded(repository: Path) -> None:
    triton = Triton()
    events: list[str] = []
    with triton.listening() as url:
        follower = Follower(repository, url, events.append, now(repository))
        triton.refuses.add("a")
        write(repository, "a", "needs the new b")
        for _ in range(3):
            follower.take(now(repository))
        assert (triton.loaded, len(events)) == ([], 1)
        triton.refuses.clear()
        write(repository, "b", "the new one")
        follower.take(now(repository))
        follower.take(now(repository))
        assert triton.loaded == ["b", "a"]


def test_changes_wait_for_a_triton_that_is_away(repository: Path) -> None:
    triton = Triton()
    events: list[str] = []
    with triton.listening() as url:
        pass
    follower = Follower(repository, url, events.append, now(repository))
    write(repository, "a", "second, longer")
    shutil.rmtree(repository / "c")
    for _ in range(3):
        follower.take(now(repository))
    assert len(events) == 1
    with triton.listening():
        follower.take(now(repository))
    assert (triton.loaded, triton.unloaded) == (["a"], ["c"])
