"""Texts of very different lengths at one model of embeddings: short ones alone, beside long lists, and mixed lists.

    compress export all-MiniLM-L6-v2 -o build/minilm-artifact
    python benchmarks/text_lengths.py build/minilm-artifact [--rounds 3] [--seconds 20] [--beside OTHER_TREE …]

A real `serve up` as it is by itself, with no keys, so that all clients are one to it: the harder case. Texts are pieces
of this project's documents: queries of 2 to 9 words (3 to 14 tokens), paragraphs of 75 to 300 (100 to 400, of which the
model reads 256). Clients are closed loops; who is turned away comes again after 0.1 s (one text) or 0.5 s (a list).
With --beside the code of other checkouts takes turns, round by round; medians. The last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired

from rich.console import Console
from rich.table import Table

from compress.runtime.machine import environment

ROOT = Path(__file__).resolve().parent.parent
LIST = 32  # texts: as many as the model takes at once
MIXED = 0.25  # of a mixed list are paragraphs
OURS = "this tree"
WAIT_S = 0.1, 0.5  # of one text, and of a list, that was turned away


@dataclass
class Seen:
    """What clients of one kind saw."""

    texts: int = 0
    refused: int = 0
    seconds: list[float] = field(default_factory=list)
    last: float = 0.0  # of the answers, on the monotonic clock

    def figures(self, began: float) -> dict[str, float | None]:
        """Times in ms; None where there was no answer."""
        ordered, count = sorted(self.seconds), len(self.seconds)
        took = self.last - began if count else 0.0
        found: dict[str, float | None] = {"answers": count, "refused": self.refused}
        found["texts_per_s"] = round(self.texts / took, 2) if took else 0.0
        for share in (50, 90, 99):
            at = min(count - 1, count * share // 100)
            found[f"p{share}_ms"] = round(1000 * ordered[at], 1) if count else None
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, help="that `compress export` made of a sentence encoder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="in which requests are begun, of each load")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts")
    arguments = parser.parse_args()
    words = re.findall(r"[A-Za-z][a-z']*|\d+", " ".join(p.read_text() for p in sorted(ROOT.glob("docs/*.md"))))
    trees = {OURS: ROOT} | {path.name: path.resolve() for path in arguments.beside}
    runs: dict[tuple[str, str], list[dict[str, float | None]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.rounds):
            for name in trees if number % 2 == 0 else reversed(trees):
                with running(trees[name], arguments.artifact.resolve(), Path(scratch)) as port:
                    for load, found in loads(port, words, arguments.seconds, number).items():
                        runs.setdefault((load, name), []).append(found)
                        print(f"{number + 1} {name}, {load}: {found}", file=sys.stderr, flush=True)
    figures = {
        load: {
            name: {key: middle([run[key] for run in found]) for key in found[0]}
            for (each, name), found in runs.items()
            if each == load
        }
        for load in dict.fromkeys(load for load, _ in runs)
    }
    table = Table("load", "code", *next(iter(runs.values()))[0], title="texts of many lengths", title_justify="left")
    for load, by in figures.items():
        for name, row in by.items():
            table.add_row(load, name, *("–" if value is None else f"{value:g}" for value in row.values()))
    Console(soft_wrap=True, width=160).print(table)
    head = {"benchmark": "text_lengths", "rounds": arguments.rounds, "seconds": arguments.seconds}
    print(json.dumps(head | {"environment": environment(1), "loads": figures}))


def middle(values: list[float | None]) -> float | None:
    """None where a run had no answer."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def loads(port: int, words: list[str], seconds: float, seed: int) -> dict[str, dict[str, float | None]]:
    """Each load's figures, those of lists and of the short texts beside them apart."""

    def some(draw: random.Random, least: int, most: int) -> str:
        count = draw.randint(least, most)
        at = draw.randrange(len(words) - count)
        return " ".join(words[at : at + count])

    def query(draw: random.Random) -> list[str]:
        return [some(draw, 2, 9)]

    def paragraphs(draw: random.Random) -> list[str]:
        return [some(draw, 75, 300) for _ in range(LIST)]

    def mixed(draw: random.Random) -> list[str]:
        return [some(draw, 75, 300) if draw.random() < MIXED else some(draw, 2, 9) for _ in range(LIST)]

    found = {}
    (found["short, 1 client"],) = together(port, seconds / 2, seed, (query, 1))
    (found["short, 16 clients"],) = together(port, seconds / 2, seed, (query, 16))
    (found["long lists, 2 clients"],) = together(port, seconds, seed, (paragraphs, 2))
    (found["mixed lists, 2 clients"],) = together(port, seconds, seed, (mixed, 2))
    short, lists = together(port, seconds, seed, (query, 4), (paragraphs, 2))
    return found | {"short, 4 clients, beside:": short, "long lists, 2 clients, beside:": lists}


def together(
    port: int, seconds: float, seed: int, *kinds: tuple[Callable[[random.Random], list[str]], int]
) -> list[dict[str, float | None]]:
    """Clients of several kinds at the same time; the figures of each kind."""
    seen, began = [Seen() for _ in kinds], time.monotonic()
    threads = [
        threading.Thread(target=client, args=(port, make, f"{seed}/{kind}/{each}", began + seconds, seen[kind]))
        for kind, (make, count) in enumerate(kinds)
        for each in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each.figures(began) for each in seen]


def client(port: int, make: Callable[[random.Random], list[str]], seed: str, until: float, seen: Seen) -> None:
    """A closed loop."""
    draw = random.Random(seed)  # noqa: S311 - of texts
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    while (began := time.monotonic()) < until:
        texts = make(draw)
        body = json.dumps({"model": "minilm", "input": texts, "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status == 200:
            seen.last = max(seen.last, time.monotonic())
            seen.texts += len(texts)
            seen.seconds.append(time.monotonic() - began)
        else:
            seen.refused += 1
            time.sleep(WAIT_S[len(texts) > 1])
    connection.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running(tree: Path, artifact: Path, scratch: Path) -> Iterator[int]:
    """A started server of a checkout's code, that has answered once: its port."""
    environ = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    models, port, serve = scratch / f"models-{tree.name}", free_port(), [sys.executable, "-m", "serve"]
    if not models.is_dir():
        packing = Popen([*serve, "pack", str(artifact), "--repository", str(models), "--name", "minilm"], env=environ)
        if packing.wait():
            sys.exit("it can't be packed")
    words = [*serve, "up", str(models), "--port", str(port)]
    words += [f"--triton-{kind}-port=0" for kind in ("http", "grpc", "metrics")]
    with (scratch / "log").open("wb") as log:
        process = Popen(words, env=environ, cwd=scratch, stdout=log, stderr=STDOUT)
    try:
        until = time.monotonic() + 120
        while True:
            seen = Seen()
            try:
                client(port, lambda _: ["a text"], "", time.monotonic() + 0.01, seen)
            except OSError:
                time.sleep(0.5)
            if seen.seconds:
                break
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"it did not start:\n{(scratch / 'log').read_text()}")
        yield port
    finally:
        process.terminate()
        try:
            process.wait(60)
        except TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    main()
