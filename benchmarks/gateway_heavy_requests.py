"""What ten keys' light requests meet while one key sends heavy ones to the same model; a row of gateway_faults.py, or

    python benchmarks/gateway_heavy_requests.py [--seconds 15] [--rounds 2]

A real Triton with a Python model of one instance and one of two, behind a gateway in a process of its own: requests of
10 ms every 0.3 s, alone and beside eight connections with requests of 0.65 s, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from gateway_slow_models import CONFIG, MODEL, ask

from serve.gateway.access.keys import add_key
from serve.http.client import Address, Pool
from serve.triton.launch import Ports, TritonServer

KEYS, LIGHT_S, EVERY_S = 10, 0.01, 0.3
CONNECTIONS, HEAVY_S = 8, 0.65
INSTANCES = {"one": 1, "two": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = heavy_requests(Path(folder), arguments.seconds, arguments.rounds)
    print(json.dumps(figures))


def heavy_requests(folder: Path, seconds: float, rounds: int = 1) -> dict[str, Any]:
    """Outcomes and milliseconds of the ten keys, and answers a second of the heavy one, by instances of the model."""
    repository, keys = folder / "heavy", folder / "heavy.json"
    for name, count in INSTANCES.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(MODEL)
        (repository / name / "config.pbtxt").write_text((CONFIG % name).replace("count: 1", f"count: {count}"))
    greedy, *others = (add_key(keys, name)[0] for name in ("greedy", *(f"k{n}" for n in range(KEYS))))
    with TritonServer(repository, ports=Ports(0, 0, 0)) as triton:
        command = [str(Path(sys.executable).with_name("serve")), "gateway", "--port", "0", "--keys", str(keys)]
        command += ["--upstream", f"http://{triton.http_address}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline() if process.stdout else ""
                return uvloop.run(_measure(Address.parse(line.split()[1]), greedy, others, seconds, rounds))
            finally:
                process.kill()


async def _measure(address: Address, greedy: str, others: list[str], seconds: float, rounds: int) -> dict[str, Any]:
    pool = Pool(address, max_connections=100, timeout_s=40)
    figures: dict[str, Any] = {}
    for _ in range(rounds):
        for model in INSTANCES:
            for what, connections in (("alone", 0), ("beside it", CONNECTIONS)):
                label = f"{model} instance{'s' * (model != 'one')}, {what}"
                figures.setdefault(label, []).append(
                    await _run(pool, model, greedy if connections else "", others, seconds)
                )
    await pool.close()
    return figures


async def _run(pool: Pool, model: str, greedy: str, others: list[str], seconds: float) -> dict[str, Any]:
    counted: Counter[str] = Counter()
    took: list[float] = []
    heavy = 0
    # What the heavy key sends before anything is known of it goes first.
    begun = time.monotonic() + (CONNECTIONS * HEAVY_S + 2 if greedy else 0)

    async def light(key: str) -> None:
        while (now := time.monotonic()) < begun + seconds:
            outcome = await ask(pool, key, model, LIGHT_S)
            if now > begun:
                counted[outcome] += 1
                took.append(1000 * (time.monotonic() - now))
            await asyncio.sleep(EVERY_S)

    async def hold() -> None:
        nonlocal heavy
        while time.monotonic() < begun + seconds:
            if await ask(pool, greedy, model, HEAVY_S) == "200":
                heavy += time.monotonic() > begun
            else:
                await asyncio.sleep(0.2)

    await asyncio.gather(*map(light, others), *(hold() for _ in range(CONNECTIONS if greedy else 0)))
    p50, p90, p99 = (round(float(each), 1) for each in np.percentile(took, (50, 90, 99)))
    found = {"outcomes": dict(counted), "p50_ms": p50, "p90_ms": p90, "p99_ms": p99}
    return found | {"heavy_per_s": round(heavy / seconds, 2)} if greedy else found


if __name__ == "__main__":
    main()
