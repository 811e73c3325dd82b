"""One schedule sent by four workers over TLS, and by one: rates, percentiles and lateness beside each other.

    python benchmarks/load_workers.py [--rate 400] [--seconds 15] [--rounds 3]

The server of `load_server.py` answers after a drawn delay. Workers are processes of this machine, spoken to as those on
another are, with a certificate and a token; in turns, round by round. All send the same schedule, so counts are equal
where nothing is lost; medians over the rounds. The last line of stdout is one JSON object; exit code 1 where the rate
of four is over 2% from that of one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from load_truth import served
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from compress.runtime.machine import environment
from serve.load.figures.result import LoadResult
from serve.load.options import LoadOptions
from serve.load.run import run_load
from tests.certificates import self_signed

MANY, APART = 4, 0.02
SERVER = ("lognormal", "20", "0.5")
PERCENTILES = ("p50", "p90", "p99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="400", help="requests a second, of all together")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    token = secrets.token_hex(16)
    found: dict[int, list[LoadResult]] = {1: [], MANY: []}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        certificate, key = self_signed(Path(name), "worker")
        workers = [stack.enter_context(worker(token, certificate, key)) for _ in range(MANY)]
        for number in range(arguments.rounds):
            for count in sorted(found, reverse=bool(number % 2)):
                with served(SERVER) as url:
                    asked = LoadOptions(
                        url=url, rate=arguments.rate, duration=arguments.seconds, token=token,
                        worker=tuple(workers[:count]), worker_ca=certificate, seed=number,
                    )  # fmt: skip
                    found[count].append(run_load(asked))
    rows = {count: row(results) for count, results in found.items()}
    show(rows)
    apart = abs(rows[MANY]["rate"] / rows[1]["rate"] - 1)
    told = {str(count): each for count, each in rows.items()}
    print(f"rates are {apart:.2%} apart; {APART:.0%} are allowed")
    print(
        json.dumps({"benchmark": "load_workers", "environment": environment(1), "rate_apart": apart, "workers": told})
    )
    sys.exit(apart > APART)


@contextlib.contextmanager
def worker(token: str, certificate: Path, key: Path) -> Iterator[str]:
    """The address of one."""
    command = [sys.executable, "-m", "serve", "load", "worker", "--port", "0"]
    command += ["--tls-certificate", str(certificate), "--tls-key", str(key)]
    environ = os.environ | {"SERVE_LOAD_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            said = process.stdout.readline() if process.stdout else ""
            told = re.search(r"listens over TLS at (\S+)", said)
            if told is None:
                sys.exit(f"a worker did not start: {said}")
            yield told[1]
        finally:
            process.send_signal(signal.SIGINT)


def row(results: list[LoadResult]) -> dict[str, float]:
    """Medians over the rounds; answers and errors are of all together."""
    figures = {
        "rate": [result.throughput for result in results],
        **{name: [_known(result.latency.percentiles_ms[name]) for result in results] for name in PERCENTILES},
        "late_p99": [_known(result.lateness.percentiles_ms["p99"]) for result in results],
        "clocks_apart_ms": [result.clock_error_ms or 0.0 for result in results],
    }
    return {
        "answers": sum(result.count for result in results),
        "errors": sum(sum(result.errors.values()) for result in results),
        **{name: statistics.median(values) for name, values in figures.items()},
    }


def _known(value: float | None) -> float:
    return float("nan") if value is None else value


def show(rows: dict[int, dict[str, float]]) -> None:
    table = Table(title="One schedule by workers over TLS, ms", title_justify="left")
    for column in ("workers", "answers", "errors", "a second", *PERCENTILES, "sent late, p99", "clocks apart"):
        table.add_column(column, justify="right")
    for count, each in rows.items():
        values = [f"{each[name]:.2f}" for name in (*PERCENTILES, "late_p99", "clocks_apart_ms")]
        table.add_row(str(count), f"{each['answers']:,.0f}", f"{each['errors']:.0f}", f"{each['rate']:.1f}", *values)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
