"""Where a real Triton has a request, as far as the gateway's books know: in the queue of the model that was asked.

By whatever way it comes, and by whatever name: of one model and one server nobody has to tell.
"""

from __future__ import annotations

import http.client
import json
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from shutil import copytree
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.accounts import Work
from serve.gateway.access.fairness import Fairness
from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.rollout.plan import Plan, Target
from serve.rollout.store import Store
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_connections import CONFIG, MODEL
from tests.integration.test_gateway_grpc import free_port
from tests.integration.test_gateway_sequences import until
from tests.serve_http import gateway_thread

EVERY = "version_policy { all { } }\n"
CHAIN = """\
name: "chain"
platform: "ensemble"
max_batch_size: 8
input [ { name: "seconds" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "slept" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [ {
  model_name: "step" model_version: -1
  input_map { key: "seconds" value: "seconds" } output_map { key: "slept" value: "slept" }
} ] }
"""
PRIORITIES = "dynamic_batching { priority_levels: 2 default_priority_level: 1 }\n"


@dataclass
class Asking:
    """A gateway in front of so many Tritons, and the queues in which what it was asked ended."""

    url: str
    calls: Any
    key: str
    servers: int
    queues: list[str]

    def ask(self, way: str, model: str, version: str = "") -> str:
        """The path of the queue in which a request was answered; "" for none that is known."""
        self.queues.clear()
        if way == "HTTP":
            item = {"name": "seconds", "datatype": "FP32", "shape": [1, 1], "data": [0.0]}
            path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "")
            with closing(http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)) as connection:
                connection.request("POST", f"{path}/infer", json.dumps({"inputs": [item]}), {"x-api-key": self.key})
                answer = connection.getresponse()
                assert answer.status == 200, answer.read()
                answer.read()
        else:
            request = messages.ModelInferRequest(model_name=model, model_version=version)
            request.inputs.add(name="seconds", datatype="FP32", shape=[1, 1])
            request.raw_input_contents.append(struct.pack("<f", 0.0))
            metadata = (("x-api-key", self.key),)
            if way == "gRPC":
                self.calls.ModelInfer(request, metadata=metadata, timeout=60)
            else:
                (answered,) = self.calls.ModelStreamInfer(iter([request]), metadata=metadata, timeout=60)
                assert not answered.error_message
        until(lambda: len(self.queues) == 1)
        return self.queues[0]


@pytest.fixture(scope="module", params=[1, 2], ids=["one Triton", "two Tritons"])
def asking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    whole = tmp_path_factory.mktemp("queues")
    repository = whole / "repository"
    for name, more in (
        ("alone", ""),
        ("old", ""),
        ("new", ""),
        ("step", ""),
        ("versions", EVERY),
        ("urgent", PRIORITIES),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(MODEL)
        (repository / name / "config.pbtxt").write_text(CONFIG % name + more)
    (repository / "chain" / "1").mkdir(parents=True)
    (repository / "chain" / "config.pbtxt").write_text(CHAIN)
    copytree(repository / "versions" / "1", repository / "versions" / "2")
    key, _ = add_key(whole / "keys.json", "one")
    state = whole / "rollouts.db"
    queues: list[str] = []
    end = Fairness.end

    def ends(fairness: Fairness, work: Work, *args: Any, **more: Any) -> None:
        queues.append(work.there.at.path)
        end(fairness, work, *args, **more)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(Fairness, "end", ends)
        servers = [stack.enter_context(TritonServer(repository, ports=Ports(0, 0, 0))) for _ in range(request.param)]
        settings = Settings(
            upstream=tuple(f"http://{server.http_address}" for server in servers),
            grpc_upstream=tuple(str(server.grpc_address) for server in servers),
            port=0, grpc_port=free_port(), keys=whole / "keys.json", state=state,
        )  # fmt: skip
        with gateway_thread(settings) as url, grpc.insecure_channel(f"127.0.0.1:{settings.grpc_port}") as channel:
            found = Asking(url, service_pb2_grpc.GRPCInferenceServiceStub(channel), key, request.param, queues)
            store = Store(state)
            store.start("old", Target("new"), Plan(steps=(50.0,), step_s=3600.0), Target("old"))
            until(lambda: store.all("old")[0].state == "running")
            store.wish("old", "promote")
            until(lambda: store.all("old")[0].state == "promoted")
            time.sleep(0.6)  # a gateway looks twice a second
            for model in ("alone", "old", "new", "versions", "chain", "urgent"):
                found.ask("HTTP", model)
            time.sleep(0.3)  # how it works is known with the next look
            yield found


@pytest.mark.parametrize("way", ["HTTP", "gRPC", "stream"])
@pytest.mark.parametrize(
    ("model", "version", "queue"),
    [
        ("alone", "", "alone"),
        ("alone", "1", "alone"),  # it has no other
        ("old", "", "new"),  # which has taken over, but for streams: they go to what Triton serves by itself
        ("new", "", "new"),
        ("versions", "", "versions/versions/2"),
        ("versions", "1", "versions/versions/1"),
        ("versions", "2", "versions/versions/2"),
        ("chain", "", "chain"),
    ],
)
def test_a_request_is_in_the_queue_of_the_model_and_version_that_answer_it(
    asking: Asking, way: str, model: str, version: str, queue: str
) -> None:
    if asking.servers == 1 and model == "alone":
        queue = ""
    elif (way, model) == ("stream", "old"):
        queue = "old"
    assert asking.ask(way, model, version) == queue


def test_what_is_not_answered_in_its_order_is_in_none(asking: Asking) -> None:
    assert asking.ask("HTTP", "urgent") == ""
