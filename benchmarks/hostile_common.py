"""What the gateway's soak and fuzz share: a real Triton and gateway, good clients, and requests that are not."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from serve.gateway.access.keys import add_key
from serve.http.client import Address, ExchangeError, Pool
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.integration.test_gateway_hostile import GOOD, HOSTILE, TEXT

__all__ = ["Good", "Servers", "attack", "hostile", "serving"]

INFER = b"/v2/models/tiny/infer"
BODY = json.dumps(GOOD).encode()
PAUSE_S = 0.02
Request = tuple[bytes, bytes, list[tuple[bytes, bytes]]]


@dataclass
class Servers:
    """What runs: the gateway's addresses, Triton, and a key for each client."""

    address: Address
    grpc: str
    triton: TritonServer
    keys: list[bytes]


@contextmanager
def serving(folder: Path, clients: int) -> Iterator[Servers]:
    """The models of the tests behind a gateway in a process of its own."""
    keys = [add_key(folder / "keys.json", f"client-{number}")[0].encode() for number in range(clients)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        grpc_port = free.getsockname()[1]
    with served_models(folder) as triton:
        command = [sys.executable, "-m", "serve", "gateway", "--port", "0", "--keys", str(folder / "keys.json")]
        command += ["--upstream", f"http://{triton.http_address}", "--grpc-upstream", triton.grpc_address]
        command += ["--grpc-port", str(grpc_port)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with (
            (folder / "gateway.log").open("w") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
        ):
            try:
                line = process.stdout.readline() if process.stdout else ""
                if not line.startswith("gateway"):
                    raise SystemExit((folder / "gateway.log").read_text())
                yield Servers(Address.parse(line.split()[1]), f"127.0.0.1:{grpc_port}", triton, keys)
            finally:
                process.terminate()


@dataclass
class Good:
    """Clients that ask one small request after the other, with a pause between; what they saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    async def ask(self, address: Address, key: bytes, until: float) -> None:
        """One client, until that time of `time.monotonic`."""
        pool = Pool(address, max_connections=1)
        try:
            while time.monotonic() < until:
                started = time.monotonic()
                try:
                    answer = await pool.request(b"POST", INFER, [(b"x-api-key", key)], BODY, timeout_s=30.0)
                    self.outcomes[str(answer.status)] += 1
                except ExchangeError as err:
                    self.outcomes[err.kind] += 1
                self.seconds.append(time.monotonic() - started)
                await asyncio.sleep(PAUSE_S)
        finally:
            await pool.close()

    def figures(self) -> dict[str, object]:
        """Availability, percentiles in milliseconds, outcomes."""
        total = sum(self.outcomes.values())
        p50, p99 = (round(float(np.percentile(self.seconds, q)) * 1000, 2) for q in (50, 99))
        return {
            "asked": total,
            "availability": round(self.outcomes["200"] / max(total, 1), 6),
            "p50_ms": p50,
            "p99_ms": p99,
            "longest_ms": round(1000 * max(self.seconds)),
            "outcomes": dict(self.outcomes),
        }


def hostile(draw: random.Random) -> Request:
    """A request: target, body and headers; one of a list, or a good one with changes."""
    kind = draw.random()
    if kind < 0.3:
        model, body = draw.choice(list(HOSTILE.values()))
        return _infer(model), body, []
    if kind < 0.5:
        content = draw.randbytes(draw.randrange(12))
        prefix = draw.choice([0, 1, len(content), 2**31 - 1, 2**31, 2**32 - 1])
        size = draw.choice([4 + len(content), 0, 2**40, -1])
        told = {"name": "file", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [told]}).encode()
        length = draw.choice([len(head), len(head), 0, len(head) + 1, 2**40])
        headers = [(b"inference-header-content-length", b"%d" % length)]
        return _infer("files"), head + struct.pack("<I", prefix) + content, headers
    model, good = draw.choice([("tiny", GOOD), ("files", TEXT)])
    text = bytearray(json.dumps(_changed(json.loads(json.dumps(good)), draw)).encode())
    for _ in range(draw.choice([0, 0, 1, 3])):
        text[draw.randrange(len(text))] = draw.randrange(256)
    headers = []
    if draw.random() < 0.1:
        headers.append((b"x-request-timeout-ms", b"1"))
    if draw.random() < 0.1:
        headers.append((b"content-encoding", draw.choice([b"gzip", b"deflate", b"br"])))
    return _infer(model), bytes(text), headers


def _infer(model: str) -> bytes:
    return f"/v2/models/{model}/infer".encode()


WORDS: tuple[object, ...] = (
    0, -1, 1, 4, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64, 1.5, 1e308, "", "x", "BYTES", "FP32", "INT64", "\0", "é",
    None, True, [], {}, [[1]], [1] * 1000,
)  # fmt: skip


def _changed(value: object, draw: random.Random) -> object:
    """One to three places of a JSON value replaced, taken away or doubled."""
    for _ in range(draw.randint(1, 3)):
        value = _change(value, draw)
    return value


def _change(value: object, draw: random.Random) -> object:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        if draw.random() < 0.15:
            del value[name]
        else:
            value[name] = _change(value[name], draw)
        return value
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        if draw.random() < 0.2:
            value.append(copy.deepcopy(value[place]))
        else:
            value[place] = _change(value[place], draw)
        return value
    return copy.deepcopy(draw.choice(WORDS))


async def attack(servers: Servers, key: bytes, seed: int, until: float) -> Counter[str]:
    """One hostile client over HTTP; how it was answered."""
    draw, seen = random.Random(seed), Counter[str]()  # noqa: S311  a sample, not a secret
    pool = Pool(servers.address, max_connections=1)
    while time.monotonic() < until:
        target, body, headers = hostile(draw)
        try:
            answer = await pool.request(b"POST", target, [(b"x-api-key", key), *headers], body, timeout_s=10.0)
            seen[str(answer.status)] += 1
        except (ExchangeError, ValueError) as err:
            seen[getattr(err, "kind", "unsendable")] += 1
    with contextlib.suppress(ExchangeError):
        await pool.close()
    return seen
