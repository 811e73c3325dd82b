"""`serve up --memory` on a real Triton: models that hang, grow, or begin processes cost others no memory for long."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from serve.gateway.access.keys import add_key
from tests.gateway_models import FILES_MODEL, fetch, write_files_model
from tests.integration.test_on_demand import HANGS, LONG, Served, served
from tests.integration.test_up import Up

pytestmark = pytest.mark.integration
MEMORY = "225MiB"  # Triton's own, and four of these models
KEEPS = "kept = bytearray(b'x') * (20 << 20)"
BEGINS = FILES_MODEL.replace("import time\n", "import subprocess\nimport sys\nimport time\n").replace(
    "    def execute",
    "    def initialize(self, args):\n"
    f'        code = "import time; {KEEPS}; time.sleep(600)"\n'
    "        subprocess.Popen([sys.prefix + '/bin/python3', '-c', code], start_new_session=True)\n\n"
    "    def execute",
)
GROWS = FILES_MODEL.replace(
    '        if files[0, 0].startswith(b"fail"):',
    '        if files[0, 0].startswith(b"grow"):\n'
    "            self.kept = np.ones(15_000_000)\n"
    '        if files[0, 0].startswith(b"fail"):',
)


def begun() -> list[Path]:
    """The processes that models have begun, and that are there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if KEEPS.encode() in path.read_bytes():
                found.append(path)
    return found


class Asking:
    """Keys of a server, each of which asks models."""

    def __init__(self, server: Served, keys: dict[str, str]) -> None:
        self.server = server
        self.keys = keys

    def ask(self, key: str, model: str, text: str = "text", **headers: str) -> tuple[int, Any]:
        return fetch(
            f"{self.server.url}/predict/{model}", json.dumps({"file": text}).encode(),
            content_type="application/json", x_api_key=self.keys[key], **headers,
        )  # fmt: skip

    @property
    def running(self) -> Up:
        return self.server.running


@contextmanager
def asking(folder: Path, repository: Path, *words: str) -> Iterator[Asking]:
    keys = {name: add_key(folder / "keys.json", name)[0] for name in ("good", "other")}
    with served(folder, repository, *words, memory=MEMORY) as server:
        yield Asking(server, keys)


def test_what_models_begin_ends_with_them_and_loads_fit_for_as_long_as_models_come_and_go(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    names = tuple(f"m{number}" for number in range(5))
    for name in names:
        write_files_model(repository, BEGINS, name)
    with asking(tmp_path, repository) as clients:
        for _ in range(4):
            for name in names:
                clients.running.until(lambda: clients.ask("good", name)[0] == 200, 30)  # noqa: B023 - called here

        def sizes() -> list[int]:
            taken = (clients.server.of("memory_bytes", name) for name in names)
            return [size for size in taken if size]

        clients.running.until(lambda: min(sizes()) > 50 << 20, 20)  # with what they have begun
        assert len(begun()) <= len(sizes()) < len(names)
    assert not begun()


def test_a_load_that_hangs_keeps_no_memory_from_others_for_long(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    names = ("one", "two", "three")
    write_files_model(repository, HANGS, "hangs")
    with (repository / "hangs" / "1" / "weights").open("wb") as file:
        file.truncate(120 << 20)
    for name in names:
        write_files_model(repository, name=name)
    with asking(tmp_path, repository, "--start-timeout", "120") as clients:
        for name in names:
            assert clients.ask("good", name)[0] == 200
        time.sleep(31)  # nobody has used them lately
        assert clients.ask("other", "hangs", x_request_timeout_ms="500")[0] == 503
        began = time.monotonic()
        for name in names:
            clients.running.until(lambda: clients.ask("good", name)[0] == 200, 60)  # noqa: B023 - called here
        assert time.monotonic() - began < 60
        assert {clients.ask("good", name)[0] for name in names} == {200}
        assert clients.server.of("memory_bytes", "hangs"), "and it hangs still"


def test_a_pin_that_has_grown_is_loaded_anew_and_others_are_served(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    names = ("one", "two", "three")
    write_files_model(repository, GROWS, "pinned")
    for name in names:
        write_files_model(repository, name=name)
    with asking(tmp_path, repository, "--pin", "pinned") as clients:
        time.sleep(31)  # so long one is there before it is loaded anew
        for name in names:
            assert clients.ask("good", name)[0] == 200
        assert clients.ask("other", "pinned", "grow")[0] == 200
        until = time.monotonic() + 20
        while time.monotonic() < until:
            assert {clients.ask("good", name)[0] for name in names} == {200}
            assert clients.ask("other", "pinned")[0] == 200
            time.sleep(0.3)
        assert "pinned is loaded anew: it has grown by" in clients.running.said
        assert [clients.server.of("evictions_total", name) for name in names] == [0, 0, 0]


def test_streams_that_were_left_hold_no_model(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    names = tuple(f"m{number}" for number in range(4))
    for name in (*names, "more"):
        write_files_model(repository, LONG, name)
    with asking(tmp_path, repository) as clients:
        server = clients.server
        given = triton_grpc.InferInput("file", [1, 1], "BYTES")
        given.set_data_from_numpy(np.array([[b"sleep"]], dtype=object))
        for name in names:
            assert clients.ask("other", name)[0] == 200
            with triton_grpc.InferenceServerClient(server.grpc) as client:
                ended = threading.Event()
                client.start_stream(lambda result, error: ended.set(), headers={"x-api-key": clients.keys["other"]})  # noqa: B023
                client.async_stream_infer(name, [given])
                time.sleep(0.5)
                client.stop_stream(cancel_requests=True)
        began = time.monotonic()
        clients.running.until(lambda: clients.ask("good", "more")[0] == 200, 60)
        assert time.monotonic() - began < 50  # of the 60 s that they would have computed


def test_a_model_that_fits_once_is_asked_for_again_after_it_has_changed(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    large = FILES_MODEL.replace(
        "    def execute", "    def initialize(self, args):\n        self.kept = np.ones(12_000_000)\n\n    def execute"
    )
    write_files_model(repository, large, "large")
    write_files_model(repository, name="small")
    with asking(tmp_path, repository, "--watch") as clients:
        for name in ("small", "large"):
            assert clients.ask("good", name)[0] == 200
        clients.running.until(lambda: (clients.server.of("memory_bytes", "large") or 0) > 100 << 20, 20)
        for time_of in (1, 2):
            with (repository / "large" / "1" / "model.py").open("a") as file:
                file.write(f"# {time_of}\n")
            clients.running.until(lambda: clients.running.said.count("large has changed") == time_of, 30)  # noqa: B023
            clients.running.until(lambda: clients.ask("good", "large")[0] == 200, 30)
            assert "large can't be loaded" not in clients.running.said
        assert clients.ask("other", "small")[0] == 200
