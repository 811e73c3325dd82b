"""Hot reload: what is loaded when some of a repository is broken, or Triton is away for a while."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages

from serve.up.watch import Acts, Follower, TellTriton, fingerprints, follow

CONFIG = 'name: "{}"\nbackend: "python"\nmax_batch_size: 0\n'


class Triton:
    """What a Triton in explicit mode was told, and what it refuses."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.unloaded: list[str] = []
        self.dependents: list[bool] = []
        self.refuses: set[str] = set()
        self.hangs: set[str] = set()
        self.hanging, self.goes_on = threading.Event(), threading.Event()
        self.port = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        def act(told: list[str], message: Any) -> Callable[[Any, grpc.ServicerContext], Any]:
            def answer(request: Any, context: grpc.ServicerContext) -> Any:
                if request.model_name in self.refuses:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "it does not load")
                if request.model_name in self.hangs:
                    self.hanging.set()
                    self.goes_on.wait()
                told.append(request.model_name)
                self.dependents.append(request.parameters["unload_dependents"].bool_param)
                return message()

            return answer

        methods = {
            f"RepositoryModel{name}": grpc.unary_unary_rpc_method_handler(
                act(told, getattr(messages, f"RepositoryModel{name}Response")),
                getattr(messages, f"RepositoryModel{name}Request").FromString,
                lambda message: message.SerializeToString(),
            )
            for name, told in (("Load", self.loaded), ("Unload", self.unloaded))
        }
        with ThreadPoolExecutor() as pool:
            server = grpc.server(pool)
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods),)
            )
            self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
            server.start()
            try:
                yield
            finally:
                server.stop(None).wait()

    @property
    def acts(self) -> Acts:
        return TellTriton(f"127.0.0.1:{self.port}", {}, None)


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
    with triton.listening():
        follower = Follower(repository, triton.acts, events.append, now(repository))
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


def test_a_load_that_hangs_keeps_nobody_from_the_end(repository: Path) -> None:
    triton = Triton()
    events: list[str] = []

    async def main() -> None:
        following = asyncio.create_task(follow(repository, triton.acts, events.append, look_s=0.01))
        await asyncio.sleep(0.1)
        write(repository, "a", "second, longer")
        await asyncio.to_thread(triton.hanging.wait)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    with triton.listening():
        triton.hangs.add("a")
        asyncio.run(main())  # it waits for its threads
        triton.goes_on.set()
    assert triton.loaded in ([], ["a"])
    assert not events


def test_what_triton_refuses_is_tried_again_when_another_was_loaded(repository: Path) -> None:
    triton = Triton()
    events: list[str] = []
    with triton.listening():
        follower = Follower(repository, triton.acts, events.append, now(repository))
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
    with triton.listening():
        pass
    follower = Follower(repository, triton.acts, events.append, now(repository))
    write(repository, "a", "second, longer")
    shutil.rmtree(repository / "c")
    for _ in range(3):
        follower.take(now(repository))
    assert len(events) == 1
    with triton.listening():
        follower.take(now(repository))
    assert (triton.loaded, triton.unloaded, triton.dependents) == (["a"], ["c"], [False, True])
