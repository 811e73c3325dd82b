"""What others see while one key holds connections with slow requests of five other models; a row of gateway_faults.py.

A real Triton with six Python models behind a gateway in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import uvloop

from serve.gateway.access.keys import add_key
from serve.http.client import Address, ExchangeError, Pool
from serve.triton.launch import Ports, TritonServer

SLOW = [f"slow{number}" for number in range(5)]
EACH, SLEEPS_S = 40, 4.9
CONFIG = """\
name: "%s"
backend: "python"
max_batch_size: 8
input [ { name: "seconds" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "slept" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
MODEL = """\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        asked = [pb_utils.get_input_tensor_by_name(request, "seconds").as_numpy() for request in requests]
        time.sleep(max(float(each.max()) for each in asked))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("slept", each)]) for each in asked]
"""


def slow_models(folder: Path, seconds: float) -> dict[str, object]:
    """Outcomes and milliseconds of ten clients of a quick model, in peace and beside the greedy key."""
    repository, keys = folder / "slow", folder / "slow.json"
    for name in [*SLOW, "quick"]:
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(MODEL)
        (repository / name / "config.pbtxt").write_text(CONFIG % name)
    greedy, good = add_key(keys, "greedy")[0], add_key(keys, "good")[0]
    with TritonServer(repository, ports=Ports(0, 0, 0)) as triton:
        command = [str(Path(sys.executable).with_name("serve")), "gateway", "--port", "0", "--keys", str(keys)]
        command += ["--upstream", f"http://{triton.http_address}", "--max-address-share", "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                return uvloop.run(_measure(Address.parse(line.split()[1]), greedy, good, max(seconds, 2 * SLEEPS_S)))
            finally:
                process.kill()  # what is slow need not end


async def _measure(address: Address, greedy: str, good: str, seconds: float) -> dict[str, object]:
    pool = Pool(address, max_connections=1000, timeout_s=40)
    figures: dict[str, object] = {}
    for model in SLOW:
        await ask(pool, good, model, 0.0)
    for what, each in (("in peace", 0), ("beside it", EACH)):
        counted: Counter[str] = Counter()
        took: list[float] = []
        begun = time.monotonic()

        async def client(until: float, counted: Counter[str], took: list[float]) -> None:
            while (now := time.monotonic()) < until:
                counted[await ask(pool, good, "quick", 0.0)] += 1
                took.append(1000 * (time.monotonic() - now))
                await asyncio.sleep(0.1)

        async def hold(model: str, until: float) -> None:
            while time.monotonic() < until:
                if await ask(pool, greedy, model, SLEEPS_S) != "200":
                    await asyncio.sleep(0.2)

        held = [asyncio.ensure_future(hold(model, begun + seconds)) for model in SLOW for _ in range(each)]
        await asyncio.gather(*(client(begun + seconds, counted, took) for _ in range(10)))
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        p50, p99 = np.percentile(took, (50, 99))
        figures[what] = {"outcomes": dict(counted), "p50_ms": round(float(p50), 1), "p99_ms": round(float(p99), 1)}
    await pool.close()
    return figures


async def ask(pool: Pool, key: str, model: str, seconds: float) -> str:
    body = {"inputs": [{"name": "seconds", "datatype": "FP32", "shape": [1, 1], "data": [seconds]}]}
    headers = [(b"x-api-key", key.encode()), (b"content-type", b"application/json")]
    try:
        path = f"/v2/models/{model}/infer".encode()
        return str((await pool.request(b"POST", path, headers, json.dumps(body).encode())).status)
    except ExchangeError as err:
        return err.kind
