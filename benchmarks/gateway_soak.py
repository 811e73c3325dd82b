"""Ten good keys and a hostile one: what the good ones see of it.

    python benchmarks/gateway_soak.py [--minutes 30]

A real Triton behind a real gateway. In turns of half a minute the good clients are alone, or beside a client with a
key of its own that sends what no model takes (`hostile_common.hostile`), on `--lanes` connections. Printed: the
availability and p99 of the good ones without and with it, the ratio of the p99s, how the hostile one was answered, and
whether Triton lived. The last line of stdout is one JSON object; exit code 1 below 99.9%, or beyond twice the p99.
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

from hostile_common import Good, Servers, attack, serving

GOOD_KEYS = 10
TURN_S = 30.0
LEAST, MOST = 0.999, 2.0


async def turns(servers: Servers, minutes: float, lanes: int) -> dict[str, Any]:
    seen = {False: Good(), True: Good()}
    answered: Counter[str] = Counter()
    pid = servers.triton.pid
    count = max(2, round(60 * minutes / TURN_S))
    for turn in range(count):
        until = time.monotonic() + 60 * minutes / count
        beside = turn % 2 == 1
        good = [seen[beside].ask(servers.address, key, until) for key in servers.keys[:GOOD_KEYS]]
        bad = [attack(servers, servers.keys[-1], 1000 * turn + lane, until) for lane in range(lanes if beside else 0)]
        _, told = await asyncio.gather(asyncio.gather(*good), asyncio.gather(*bad))
        for each in told:
            answered.update(each)
        print(f"turn {turn + 1} of {count}: {seen[beside].figures()}", flush=True)
    alone, together = seen[False].figures(), seen[True].figures()
    return {
        "alone": alone,
        "beside": together,
        "p99_ratio": round(float(str(together["p99_ms"])) / float(str(alone["p99_ms"])), 3),
        "hostile": dict(answered),
        "triton_lived": servers.triton.running and servers.triton.pid == pid,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--lanes", type=int, default=2, help="connections of the hostile client")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), GOOD_KEYS + 1) as servers:
        found = asyncio.run(turns(servers, arguments.minutes, arguments.lanes))
    print(json.dumps(found))
    kept = found["beside"]["availability"] >= LEAST and found["p99_ratio"] <= MOST and found["triton_lived"]
    sys.exit(not kept)


if __name__ == "__main__":
    main()
