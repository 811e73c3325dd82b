"""Embeddings a second: this stack's /v1/embeddings beside sentence-transformers behind FastAPI, LitServe and BentoML.

    compress export all-MiniLM-L6-v2 -o build/minilm-artifact
    python -m venv build/peers/sentence-transformers
    build/peers/sentence-transformers/bin/pip install torch==2.13.0 'sentence-transformers' 'fastapi' \
      'uvicorn[standard]' litserve bentoml
    python benchmarks/embeddings.py all-MiniLM-L6-v2 build/minilm-artifact [OTHER_ARTIFACT …]
      [--rounds 3] [--seconds 5] [--texts 1] [--lengths short mixed] [--only SERVER …]

All are asked with the same texts, in a closed loop by this project's load generator on the same cores: short ones of 3
to 14 tokens, or mixed, of which a quarter are paragraphs of 100 to 400 (the model reads 256). Ours is `serve pack` as
it is, two instances of one thread, and the gateway; each further artifact (INT8, BF16) is a row of its own. Of FastAPI
there is one worker whose torch takes all cores, and two of one thread; LitServe and BentoML have two workers and batch
up to 32. Each row tells the least cosine of its vectors with those of sentence-transformers. The gateway lets requests
wait as the peers do, where by itself it turns away what would wait for over half a second. Servers take turns, round by
round; medians. What is not installed is left out. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
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

FASTAPI = {
    "FastAPI, 1 worker": (1, 0),
    "FastAPI, 2 workers of 1 thread": (2, 1),
}  # workers, threads (0: torch's choice)
LITSERVE, BENTOML = "LitServe, 2 workers", "BentoML, 2 workers"
PEER = ENVIRONMENTS / "sentence-transformers"
CONCURRENCIES = (1, 8, 64)
BODIES = 64  # different ones, sent in turn
LONG = 0.25  # of mixed texts are paragraphs
WORDS = {"short": (2, 9), "long": (75, 300)}
PATIENCE_S = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of Hugging Face")
    parser.add_argument("artifacts", type=Path, nargs="+", help="that `compress export` made of it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="measured time of each run")
    parser.add_argument("--texts", type=int, default=1, help="in a request")
    parser.add_argument("--lengths", nargs="*", choices=("short", "mixed"), default=["short", "mixed"])
    parser.add_argument("--concurrencies", type=int, nargs="*", default=CONCURRENCIES)
    parser.add_argument("--only", nargs="*", help="these servers, by how their names begin")
    arguments = parser.parse_args()
    ours, servers = servers_of(arguments.artifacts, arguments.only)
    runs: dict[tuple[str, str, int], list[dict[str, float | None]]] = {}
    vectors: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for server, artifact in ours.items():
            pack(artifact, repository=scratch / server / "models", name="minilm")
        for lengths in arguments.lengths:
            write_bodies(scratch, lengths, arguments.texts)
        for number in range(arguments.rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                with running(server, arguments.folder, scratch) as (url, process):
                    kind = "sentences" if server == BENTOML else "input"
                    targets = {each: Target(url, scratch / kind / each) for each in arguments.lengths}
                    vectors.setdefault(server, embedded(targets[arguments.lengths[-1]]))
                    for lengths, target in targets.items():
                        for concurrency in arguments.concurrencies:
                            found = one(target, process, concurrency, arguments.seconds)
                            found["per_s"] = (found["per_s"] or 0) * arguments.texts
                            runs.setdefault((server, lengths, concurrency), []).append(found)
                            print(
                                f"{number + 1} {server} {lengths} {concurrency}: {found}", file=sys.stderr, flush=True
                            )
    reference = vectors.get(next(iter(FASTAPI)), next(iter(vectors.values())))
    alike = {server: float((rows * reference).sum(1).min()) for server, rows in vectors.items()}
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for (server, lengths, concurrency), rounds in runs.items():
        figures.setdefault(lengths, {}).setdefault(server, {})[str(concurrency)] = {
            key: middle([run[key] for run in rounds]) for key in rounds[0]
        }
    for lengths, rows in figures.items():
        show(lengths, rows, alike, arguments.concurrencies)
    head = {"benchmark": "embeddings"} | {key: getattr(arguments, key) for key in ("rounds", "seconds", "texts")}
    print(json.dumps(head | {"environment": environment(1), "least_cosine": alike, "lengths": figures}))


def servers_of(artifacts: list[Path], only: list[str] | None) -> tuple[dict[str, Path], list[str]]:
    """This stack's by name, each with its artifact; and the names of all that are asked, by how they begin."""
    ours = {f"serve up, {path.name}": path for path in artifacts}
    every = [*ours, *((*FASTAPI, LITSERVE, BENTOML) if PEER.is_dir() else ())]
    return ours, [server for server in every if only is None or server.startswith(tuple(only))]


def write_bodies(scratch: Path, lengths: str, count: int) -> None:
    """Requests of so many texts, in OpenAI's form and in BentoML's: pieces of this project's documents."""
    docs = sorted(HERE.parent.glob("docs/*.md"))
    words = re.findall(r"[A-Za-z][a-z']*|\d+", " ".join(path.read_text(encoding="utf-8") for path in docs))
    draw = random.Random(0)  # noqa: S311 - of texts
    for number in range(BODIES):
        texts = []
        for _ in range(count):
            many = draw.randint(*WORDS["long" if lengths == "mixed" and draw.random() < LONG else "short"])
            at = draw.randrange(len(words) - many)
            texts.append(" ".join(words[at : at + many]))
        forms = {
            "input": {"model": "minilm", "input": texts, "encoding_format": "float"},
            "sentences": {"sentences": texts},
        }
        for form, body in forms.items():
            path = scratch / form / lengths / f"{number:02}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(body))


def middle(values: list[float | None]) -> float | None:
    """None where a run had too few answers for it."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def embedded(target: Target) -> Any:
    """The vectors that a server gives to all of the texts, of length 1."""
    found: list[Any] = []
    for path in sorted(target.body.iterdir()):
        request = urllib.request.Request(target.url, path.read_bytes(), {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            said = json.loads(answer.read())
        found += said if isinstance(said, list) else [each["embedding"] for each in said["data"]]
    rows = np.array(found)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@contextmanager
def running(
    server: str, folder: Path, scratch: Path, patience: float | None = PATIENCE_S
) -> Iterator[tuple[str, psutil.Process]]:
    """A started server, that has answered once: whom to ask, and its first process.

    Args:
        server: by its name.
        folder: of Hugging Face.
        scratch: with the packed repositories and the bodies.
        patience: how long this stack's gateway lets a request wait, in seconds; None for its own bound.
    """
    port = free_port()
    environ = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "FOLDER": str(folder.absolute()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    environ |= {"BENTOML_DO_NOT_TRACK": "True", "PYTHONPATH": str(HERE / "peers")}
    tools = (PEER / "bin").absolute()
    if server in FASTAPI:
        workers, threads = FASTAPI[server]
        words = [str(tools / "uvicorn"), "sentence_transformers_app:app", "--app-dir", str(HERE / "peers")]
        words += ["--workers", str(workers), "--port", str(port), "--log-level", "warning", "--no-access-log"]
        environ |= {"THREADS": str(threads)}
    elif server == LITSERVE:
        words = [str(tools / "python"), str(HERE / "peers" / "litserve_embeddings_app.py"), str(port)]
    elif server == BENTOML:
        words = [str(tools / "bentoml"), "serve", "bentoml_embeddings_app:Service", "--host", "127.0.0.1"]
        words += ["--port", str(port), "--working-dir", str(HERE / "peers")]
        environ |= {"BENTOML_HOME": str(scratch / "bentoml"), "PATH": f"{tools}:{os.environ['PATH']}"}
    else:
        environ = os.environ | {"PYTHONUNBUFFERED": "1"}
        words = [sys.executable, "-m", "serve", "up", str(scratch / server / "models"), "--port", str(port)]
        words += [f"--triton-{kind}-port=0" for kind in ("http", "grpc", "metrics")]
        if patience is not None:
            settings = scratch / "gateway.toml"
            settings.write_text(f"max_wait_s = {patience}\n")
            words += ["--gateway", str(settings)]
    log = scratch / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(words, env=environ, stdout=file, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}/v1/embeddings"
    any_body = next((scratch / ("sentences" if server == BENTOML else "input")).rglob("*.json"))
    try:
        wait(Target(url, any_body), process, log)
        yield url, psutil.Process(process.pid)
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


def show(lengths: str, rows: dict[str, dict[str, Any]], alike: dict[str, float], concurrencies: list[int]) -> None:
    table = Table("server", "least cosine", title=f"embeddings a second, {lengths} texts", title_justify="left")
    for concurrency in concurrencies:
        table.add_column(f"{concurrency} in flight: embeddings/s, p50, p99 ms, CPU ms a request", justify="right")
    for server, by in rows.items():
        cells = [
            f"{row['per_s']:,.0f}  {ms(row['p50_ms'])}  {ms(row['p99_ms'])}  {row['cpu_ms']:.1f}"
            + (f"  {row['errors']:.0f} errors" if row["errors"] else "")
            for row in by.values()
        ]
        table.add_row(server, f"{alike[server]:.4f}", *cells)
    Console(soft_wrap=True, width=200).print(table)


if __name__ == "__main__":
    main()
