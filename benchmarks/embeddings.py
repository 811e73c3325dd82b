"""Embeddings a second: this stack's /v1/embeddings beside sentence-transformers behind FastAPI, with the same weights.

    compress export all-MiniLM-L6-v2 -o build/minilm-artifact
    python -m venv build/peers/sentence-transformers
    build/peers/sentence-transformers/bin/pip install 'sentence-transformers' 'fastapi' 'uvicorn[standard]'
    python benchmarks/embeddings.py all-MiniLM-L6-v2 build/minilm-artifact [--rounds 3] [--seconds 5] [--texts 1]

Both are asked with the same bytes, in a closed loop by this project's load generator on the same cores, and have to
give the same vectors first. Ours is `serve pack` as it is, two instances of one thread, and the gateway; the peer has
one worker whose torch takes all cores, or two workers of one thread. The gateway lets requests wait as the peer does,
where by itself it turns away what would wait for over half a second. Servers take turns, round by round; medians. What
is not installed is left out. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from serving_peers import ENVIRONMENTS, HERE, Target, family, free_port, ms, one, wait

from compress.runtime.machine import environment
from serve.pack.write import pack

OURS = "serve up"
PEERS = {"FastAPI, 1 worker": (1, 0), "FastAPI, 2 workers of 1 thread": (2, 1)}  # workers, threads (0: torch's choice)
PEER = ENVIRONMENTS / "sentence-transformers"
CONCURRENCIES = (1, 8, 64)
TEXT = "The old captain repaired the broken engine before the storm, which surprised even the specialists, part {}."
ALIKE = 0.999
PATIENCE_S = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of Hugging Face")
    parser.add_argument("artifact", type=Path, help="that `compress export` made of it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="measured time of each run")
    parser.add_argument("--texts", type=int, default=1, help="in a request")
    parser.add_argument("--concurrencies", type=int, nargs="*", default=CONCURRENCIES)
    arguments = parser.parse_args()
    servers = [OURS, *(PEERS if PEER.is_dir() else ())]
    runs: dict[tuple[str, int], list[dict[str, float | None]]] = {}
    vectors: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        body = Path(name) / "body.json"
        texts = [TEXT.format(number) for number in range(arguments.texts)]
        body.write_text(json.dumps({"model": "minilm", "input": texts, "encoding_format": "float"}))
        pack(arguments.artifact, repository=Path(name) / "models", name="minilm")
        for number in range(arguments.rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                with running(server, arguments.folder, Path(name), body) as (target, process):
                    vectors.setdefault(server, embedded(target))
                    for concurrency in arguments.concurrencies:
                        found = one(target, process, concurrency, arguments.seconds)
                        found["per_s"] = (found["per_s"] or 0) * arguments.texts
                        runs.setdefault((server, concurrency), []).append(found)
                        print(f"{number + 1} {server} {concurrency}: {found}", file=sys.stderr, flush=True)
    alike = {server: float((rows * vectors[OURS]).sum(1).min()) for server, rows in vectors.items()}
    if min(alike.values()) < ALIKE:
        sys.exit(f"they don't give the same vectors: least cosine {alike}")
    figures: dict[str, dict[str, Any]] = {}
    for (server, concurrency), rounds in runs.items():
        figures.setdefault(server, {})[str(concurrency)] = {
            key: middle([run[key] for run in rounds]) for key in rounds[0]
        }
    show(figures, arguments.concurrencies)
    head = {
        "benchmark": "embeddings",
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "texts": arguments.texts,
    }
    print(json.dumps(head | {"environment": environment(1), "least_cosine": alike, "servers": figures}))


def middle(values: list[float | None]) -> float | None:
    """None where a run had too few answers for it."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def embedded(target: Target) -> Any:
    """The vectors that a server gives, of length 1."""
    request = urllib.request.Request(target.url, target.body.read_bytes(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        rows = np.array([each["embedding"] for each in json.loads(answer.read())["data"]])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@contextmanager
def running(server: str, folder: Path, scratch: Path, body: Path) -> Iterator[tuple[Target, psutil.Process]]:
    """A started server, that has answered once: what to send, and its first process."""
    port = free_port()
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    if server == OURS:
        words = [sys.executable, "-m", "serve", "up", str(scratch / "models"), "--port", str(port)]
        words += [f"--triton-{kind}-port=0" for kind in ("http", "grpc", "metrics")]
        settings = scratch / "gateway.toml"
        settings.write_text(f"max_wait_s = {PATIENCE_S}\n")
        words += ["--gateway", str(settings)]
    else:
        workers, threads = PEERS[server]
        words = [str(PEER / "bin" / "uvicorn"), "sentence_transformers_app:app", "--app-dir", str(HERE / "peers")]
        words += ["--workers", str(workers), "--port", str(port), "--log-level", "warning", "--no-access-log"]
        environ |= {"FOLDER": str(folder.absolute()), "THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    log = scratch / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(words, env=environ, stdout=file, stderr=subprocess.STDOUT)
    target = Target(f"http://127.0.0.1:{port}/v1/embeddings", body)
    try:
        wait(target, process, log)
        yield target, psutil.Process(process.pid)
    finally:
        others = family(psutil.Process(process.pid))[1:] if process.poll() is None else []
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        for each in others:
            if each.is_running():
                each.kill()


def show(figures: dict[str, dict[str, Any]], concurrencies: list[int]) -> None:
    table = Table("server", title="embeddings a second", title_justify="left")
    for concurrency in concurrencies:
        table.add_column(f"{concurrency} in flight: embeddings/s, p50, p99 ms, CPU ms a request", justify="right")
    for server, rows in figures.items():
        cells = [
            f"{row['per_s']:,.0f}  {ms(row['p50_ms'])}  {ms(row['p99_ms'])}  {row['cpu_ms']:.1f}"
            + (f"  {row['errors']:.0f} errors" if row["errors"] else "")
            for row in rows.values()
        ]
        table.add_row(server, *cells)
    Console(soft_wrap=True, width=200).print(table)


if __name__ == "__main__":
    main()
