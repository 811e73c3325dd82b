"""Requests changed at random, over HTTP and gRPC, against a real Triton behind the gateway, for as long as is asked.

    python benchmarks/gateway_fuzz.py [--minutes 10] [--seed 0]

Beside them good clients ask over both, and must not notice. Printed each half minute: how the hostile ones were
answered, and the good ones. The last line of stdout is one JSON object; exit code 1 where Triton or one of its models'
processes died, the gateway answered 500 or INTERNAL, or a good client got anything but its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from hostile_common import Good, Servers, attack, serving
from hostile_grpc import attack_grpc, good_grpc

PART_S = 30.0
LANES = 2


def stubs(servers: Servers) -> set[int]:
    """Triton, and the processes that run its models."""
    process = psutil.Process(servers.triton.pid)  # it was seen alive just now
    return {process.pid, *(child.pid for child in process.children(recursive=True))}


async def fuzz(servers: Servers, minutes: float, seed: int) -> dict[str, Any]:
    good, good_rpc, http, rpc = Good(), Counter[str](), Counter[str](), Counter[str]()
    before, end, part = stubs(servers), time.monotonic() + 60 * minutes, 0
    while (now := time.monotonic()) < end and servers.triton.running:
        until = min(end, now + PART_S)
        own, other = servers.keys[:2], servers.keys[2:]
        seeds = [seed + 1000 * part + lane for lane in range(LANES)]
        _, told_http, told_rpc, told_good = await asyncio.gather(
            asyncio.gather(*(good.ask(servers.address, key, until) for key in own)),
            asyncio.gather(*(attack(servers, other[0], each, until) for each in seeds)),
            asyncio.gather(*(attack_grpc(servers, other[1], each, until) for each in seeds)),
            good_grpc(servers, own[0], until),
        )
        for each in told_http:
            http.update(each)
        for each in told_rpc:
            rpc.update(each)
        good_rpc.update(told_good)
        part += 1
        print(f"{now - end + 60 * minutes:.0f} s: {dict(http)} {dict(rpc)} good {good.outcomes} {good_rpc}", flush=True)
    return {
        "http": dict(http),
        "grpc": dict(rpc),
        "good": good.figures(),
        "good_grpc": dict(good_rpc),
        "died": sorted(before - stubs(servers)) if servers.triton.running else ["Triton"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), 4) as servers:
        found = asyncio.run(fuzz(servers, arguments.minutes, arguments.seed))
    print(json.dumps(found))
    harmed = found["good"]["availability"] < 1 or set(found["good_grpc"]) != {"OK"}
    sys.exit(bool(found["died"] or harmed or "500" in found["http"] or "INTERNAL" in found["grpc"]))


if __name__ == "__main__":
    main()
