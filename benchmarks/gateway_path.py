"""CPU time of the gateway's own path for a request: bytes in, bytes out, with Triton's answer at hand.

    python benchmarks/gateway_path.py [--repeats 9]

No socket and no other process: a connection of the gateway's is given the bytes of a request, and the answer is taken
from it. The least CPU time (`time.process_time`) of several repeats is what a busy machine changes least. Each kind of
request is shown with validation and without, by the way that it takes: the short one (callbacks), or the long one (a
task), which a request also takes where no connection to Triton is free. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import uvicorn
import uvloop
from uvicorn.server import ServerState

from serve.gateway.access.keys import add_key
from serve.gateway.app import create_app
from serve.gateway.edge.connections import connection_class
from serve.gateway.edge.rounds import Rounds
from serve.gateway.server import prepare_memory
from serve.gateway.settings import Settings
from serve.http.client import NOBODY, Connection, Pool, Response
from serve.http.connection import Done
from serve.http.slots import Whose

COLUMNS = {"tiny": 64, "wide": 3500}
RAW = b"\0" * 40
ANSWER = orjson.dumps({"model_name": "tiny", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 10]}]}) + RAW


class Transport(asyncio.Transport):
    """Takes the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: asyncio.Future[bytes] | None = None

    def write(self, data: Any) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(data)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Stays."""

    def pause_reading(self) -> None:
        """Nothing comes by itself."""

    def resume_reading(self) -> None:
        """As above."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 8080) if name in ("peername", "sockname") else default


async def exchange(method: bytes, target: bytes, *_: Any, **__: Any) -> Response:
    """What Triton would answer."""
    if method == b"POST":
        length = b"%d" % (len(ANSWER) - len(RAW))
        return Response(200, [(b"inference-header-content-length", length)], ANSWER, 0)
    if target.endswith(b"/config"):
        return Response(200, [], b'{"max_batch_size": 8, "input": []}', 0)
    columns = COLUMNS["wide" if b"wide" in target else "tiny"]
    tensors = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, columns]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 10]}],
    }
    return Response(200, [], orjson.dumps({"name": "m", "versions": ["1"], **tensors}), 0)


def requests(secret: str) -> dict[str, tuple[bytes, int]]:
    """Each kind of request, and how often it is sent in a repeat."""

    def whole(model: str, item: dict[str, Any], raw: bytes = b"") -> bytes:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, COLUMNS[model]], **item}
        head = orjson.dumps({"inputs": [tensor]})
        lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "host: x", f"authorization: Bearer {secret}"]
        lines += [f"inference-header-content-length: {len(head)}"] if raw else []
        lines += [f"content-length: {len(head) + len(raw)}", "", ""]
        return "\r\n".join(lines).encode() + head + raw

    size = 4 * COLUMNS["tiny"]
    numbers = [number * 1.2345678 for number in range(COLUMNS["wide"])]
    return {
        "binary": (whole("tiny", {"parameters": {"binary_data_size": size}}, bytes(size)), 4000),
        "json_small": (whole("tiny", {"data": numbers[: COLUMNS["tiny"]]}), 4000),
        "json_44_kb": (whole("wide", {"data": numbers}), 300),
    }


class AtHand(Pool):
    """A connection to Triton that has the answer already."""

    def take(self, _whose: Whose = NOBODY) -> Connection:
        self.one = getattr(self, "one", None) or Connection(1 << 30)
        return self.one

    def send(
        self, _connection: Connection, _head: bytes, _body: bytes, _deadline: float, done: Done, _who: str = ""
    ) -> None:
        length = b"%d" % (len(ANSWER) - len(RAW))
        answer = Response(200, [(b"inference-header-content-length", length)], ANSWER, 0)
        asyncio.get_running_loop().call_soon(done, answer, None)

    def give(self, connection: Connection) -> None:
        """There are always more."""


async def measure(settings: Settings, secret: str, repeats: int, *, short: bool) -> dict[str, float]:
    """CPU microseconds of each kind of request."""
    app = create_app(settings)
    balancer = app.state.parts.upstream.balancer
    balancer.exchange = exchange
    balancer.sole.pool = AtHand(balancer.sole.address)
    direct = app.state.direct if short else None
    gate = app.state.parts.gate
    connections = connection_class(10.0, 30.0, 30.0, gate.memory, asyncio.Event(), direct, Rounds(gate.keys))
    config = uvicorn.Config(
        app, http=connections, lifespan="off", access_log=False, log_config=None,
        proxy_headers=False, server_header=False, date_header=False,
    )  # fmt: skip
    config.load()
    transport = Transport()
    connection: Any = config.http_protocol_class(config, ServerState(), {})  # type: ignore[call-arg]
    connection.connection_made(transport)
    loop = asyncio.get_running_loop()
    found = {}
    for name, (data, count) in requests(secret).items():
        least = float("inf")
        for _ in range(repeats):
            begun = time.process_time()
            for _ in range(count):
                transport.answered = loop.create_future()
                connection.data_received(data)
                answer = await transport.answered
            least = min(least, (time.process_time() - begun) / count)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{name} was refused: {answer[:500]!r}")
        found[name] = round(1e6 * least, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    prepare_memory()
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys.json"
        secret, _ = add_key(keys, "load", rate=1e8, burst=10**8)
        figures = {}
        for short in (True, False):
            for validate in (True, False):
                settings = Settings(upstream=("http://127.0.0.1:1",), port=0, keys=keys, validate=validate)
                name = f"{'validated' if validate else 'unchecked'}_{'short' if short else 'long'}"
                figures[name] = uvloop.run(measure(settings, secret, repeats, short=short))
    for way in ("short", "long"):
        for kind, micros in figures[f"validated_{way}"].items():
            without = figures[f"unchecked_{way}"][kind]
            print(f"{way:<5} way, {kind:<12} {micros:7.1f} µs with validation, {without:7.1f} without")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
