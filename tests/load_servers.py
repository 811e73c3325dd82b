"""Servers for tests of the load tester, each in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvloop

from serve.load.figures.histogram import Histogram
from serve.load.figures.result import Latency, LoadResult, Second
from serve.load.options import LoadOptions
from tests.serve_http import Received, Respond, Scripted, answer, scripted_server

METADATA = json.dumps(
    {
        "name": "m",
        "versions": ["1"],
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 1]}],
    }
).encode()


def model_server(infer: Respond, metadata: bytes = METADATA) -> Respond:
    """A server of the model "m" that answers inference as `infer` does."""

    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.method == "POST":
            await infer(request, writer)
        elif request.target == "/v2/models/m":
            writer.write(answer(metadata))
        else:
            writer.write(answer(b"{}", "404 Not Found"))

    return respond


@contextmanager
def served(infer: Respond, metadata: bytes = METADATA) -> Iterator[Scripted]:
    """Such a server."""
    started = threading.Event()
    found: list[Scripted] = []
    ends: list[Callable[[], object]] = []

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        async with scripted_server(model_server(infer, metadata)) as server:
            found.append(server)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    try:
        assert started.wait(10)
        yield found[0]
    finally:
        ends[0]()
        thread.join(10)


def options(server: Scripted, **changes: Any) -> LoadOptions:
    """A short load of that model, sent from this process."""
    defaults: dict[str, Any] = {
        "model": "m",
        "url": server.url,
        "concurrency": 4,
        "duration": 0.4,
        "warmup": 0.1,
        "processes": 0,
    }
    return LoadOptions(**defaults | changes)


def inferences(server: Scripted) -> int:
    return sum(request.method == "POST" for request in server.requests)


async def at_once(_: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(answer())


def result_of(seconds_ms: list[Any], *, errors: int = 0, **changes: Any) -> LoadResult:
    """A run whose latencies are given: for each second an array of milliseconds."""
    parts = [Histogram.of((np.asarray(each) * 1e6).astype(np.int64)) for each in seconds_ms]
    whole = Histogram.merged(parts)
    series = tuple(
        Second(number, part.total, part.total, part.total, 0, None, None, None, 0.0, part.encode())
        for number, part in enumerate(parts)
    )
    count = whole.total
    values: dict[str, Any] = {
        "model": "m", "url": "http://127.0.0.1:1", "concurrency": 4, "rate": None, "arrivals": "",
        "seconds": float(len(parts)), "count": count, "throughput": count / len(parts), "inferences": count / len(parts),
        "latency": Latency.of(whole), "service": Latency.of(whole), "estimated": Latency.of(whole),
        "lateness": Latency.of(Histogram.empty()), "waiting_ms": 0.0, "errors": {"timeout": errors} if errors else {},
        "warmup_count": 0, "unfinished": 0, "bytes_in": 0, "bytes_out": 0, "request_bytes": 100, "labelled": 0,
        "accuracy": None, "client_cpu_share": 0.1, "client_memory_bytes": 1, "processes": 1, "series": series,
    }  # fmt: skip
    return LoadResult(**values | changes)
