"""Twenty models of which five fit, asked at random: `serve up --memory`, Triton's explicit mode by hand, Ray Serve.

    python -m venv build/peers/ray && build/peers/ray/bin/pip install 'ray[serve]' onnxruntime==1.31.1
    python benchmarks/models_on_demand.py [--seconds 600] [--rate 1] [--zipf 1.2] [--only up hand ray] [--plot FILE]

The models are ONNX files of 20 to 60 MB, made here: two matrices each. Requests arrive as a Poisson process (this
project's load generator, latency from when each was due), the k-th model as often as 1/k**zipf; each server gets the
same schedule, one after the other. By hand is a proxy that sends, loads what is "not ready" and unloads what was used
longest ago, of five models at most; Ray Serve multiplexes five models in one replica. A request is cold where a load
of its model overlaps it, by Triton's own log or the replica's notes. Memory is what is resident of Triton and its
processes, sampled; of Ray, of its replica. The budget of `serve up` is that of a Triton with five models of the mean
size, as they were seen in a trial. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import uvloop
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table
from serving_peers import ENVIRONMENTS, HERE, family, free_port

from compress.artifact import Artifact, Signature, TensorSpec, sha256_of
from compress.runtime.machine import environment
from serve.gateway.oip.protocol import build_request, parse_request
from serve.http.message import Address, encode_head
from serve.load.send.arrivals import Arrivals, Leg
from serve.load.send.batch import COLUMNS, Batch
from serve.load.send.generator import Generator
from serve.load.send.job import Job, Request
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonOptions, TritonServer

SERVERS = {"up": "serve up --memory", "hand": "Triton, explicit, by hand", "ray": "Ray Serve, multiplexed"}
COUNT, FIT, WIDTH = 20, 5, 256
MIB = 1 << 20
SAMPLE_S = 0.2
# tritonserver 24.10 writes: I1126 13:02:46.815391 22151 model_lifecycle.cc:472] "loading: m0:1"
LINE = re.compile(r"^I(\d{4} [\d:.]+) .*\"(loading: |unloading: |successfully loaded ')(m\d\d)", re.MULTILINE)
WORDS = {"loading: ": "loading", "unloading: ": "unloading", "successfully loaded '": "loaded"}


@dataclass
class Run:
    """Of one server: times in seconds from the beginning of its load."""

    due: Any
    latency: Any
    model: Any
    cold: Any
    failed: dict[str, int]
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, bytes
    loads: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--zipf", type=float, default=1.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(SERVERS))
    parser.add_argument("--plot", type=Path, default=Path("build/models_on_demand.png"))
    arguments = parser.parse_args()
    servers = [name for name in arguments.only if name != "ray" or (ENVIRONMENTS / "ray").is_dir()]
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repository = folder / "models"
        for number in range(COUNT):
            make(number, folder, repository)
        budget = trial(repository)
        print(f"the budget is {budget // MIB} MiB", file=sys.stderr, flush=True)
        for server in servers:
            try:
                with running(server, repository, folder, budget) as (port, watched, notes):
                    runs[server] = run(server, arguments, port, watched, notes)
            except ChildProcessError as err:
                print(f"{server} is left out: {err}", file=sys.stderr, flush=True)
                continue
            print(f"{server}: {figures(runs[server], budget)}", file=sys.stderr, flush=True)
    found = {server: figures(each, budget) for server, each in runs.items()}
    show(found, budget)
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, budget, arguments.plot)
    head = {"benchmark": "models_on_demand", "seconds": arguments.seconds, "rate": arguments.rate}
    head |= {"zipf": arguments.zipf, "seed": arguments.seed, "budget_mib": budget // MIB}
    print(json.dumps(head | {"environment": environment(1), "servers": found}))


def make(number: int, folder: Path, repository: Path) -> None:
    """Pack a model of 20 to 60 MB, of no order in size."""
    size = 20e6 + 40e6 * (number * 7 % COUNT) / (COUNT - 1)
    hidden = int(size / 4 / (WIDTH + 64))
    generator = np.random.default_rng(number)
    weights = {
        "first": generator.standard_normal((WIDTH, hidden), np.float32),
        "second": generator.standard_normal((hidden, 64), np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "second"], ["y"]),
    ]  # fmt: skip
    signature = Signature((TensorSpec.parse(f"x:float32[batch,{WIDTH}]"),), (TensorSpec.parse("y:float32[batch,64]"),))
    ends = [
        [helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, spec.shape) for spec in specs]
        for specs in (signature.inputs, signature.outputs)
    ]
    graph = helper.make_graph(nodes, "g", *ends, [numpy_helper.from_array(*pair[::-1]) for pair in weights.items()])
    artifact = folder / "artifact"
    artifact.mkdir(exist_ok=True)
    path = artifact / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    Artifact(artifact, path.name, "onnx", sha256_of(path), signature).save()
    pack(artifact, repository=repository, name=f"m{number:02}", options=PackOptions(instances=1))


def trial(repository: Path) -> int:
    """Bytes of a Triton with five models of the mean size: two are loaded and asked, the smallest and the largest."""
    sizes = {path.parent.parent.name: path.stat().st_size for path in repository.glob("*/1/model.onnx")}
    names = [min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)]
    options = TritonOptions(explicit=True, load=False)
    with TritonServer(repository, ports=Ports(0, 0, 0), options=options) as triton:
        process = psutil.Process(triton.pid)
        own = resident(process)
        for name in names:
            post(f"http://{triton.http_address}/v2/repository/models/{name}/load", b"{}")
            message = wire(triton.http_address, f"/v2/models/{name}/infer", form="binary")[1]
            for _ in range(20):
                post(f"http://{triton.http_address}/v2/models/{name}/infer", message.body, dict(message.headers))
        return int(own + FIT * (resident(process) - own) / 2)


def resident(process: psutil.Process) -> float:
    total = 0.0
    for each in family(process):
        try:
            total += each.memory_info().rss
        except psutil.Error:  # it has gone
            continue
    return total


def post(url: str, body: bytes, headers: dict[bytes, bytes] | None = None) -> None:
    more = {name.decode(): value.decode() for name, value in (headers or {}).items()}
    with urllib.request.urlopen(urllib.request.Request(url, body, more), timeout=120) as answer:  # noqa: S310
        answer.read()


def wire(host: str, path: str, *, form: str, headers: list[tuple[bytes, bytes]] | None = None) -> tuple[Request, Any]:
    """A request of one sample."""
    values = np.random.default_rng(0).standard_normal(WIDTH).astype(np.float32)
    address = Address.parse(f"http://{host}")
    if form == "json":
        body = json.dumps({"x": [values.tolist()]}).encode()
        head = encode_head(b"POST", path.encode(), address, headers or [], len(body))
        return Request(head + body), None
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "data": values.tolist()}
    message = build_request(parse_request(json.dumps({"inputs": [tensor]}).encode()))
    head = encode_head(b"POST", path.encode(), address, message.headers, len(message.body))
    return Request(head + message.body), message


@contextmanager
def running(
    server: str, repository: Path, folder: Path, budget: int
) -> Iterator[tuple[int, psutil.Process | None, Path]]:
    """A started server: its port, the process whose memory counts (None: Ray's replica), and where its loads stand."""
    port, log, notes = free_port(), folder / f"{server}.log", folder / f"{server}.notes"
    environ = os.environ | {"PYTHONUNBUFFERED": "1", "FIT": str(FIT), "PORT": str(port)}
    if server == "hand":
        options = TritonOptions(explicit=True, load=False, stop_timeout_s=2.0)
        with TritonServer(repository, ports=Ports(0, 0, 0), options=options, log=notes) as triton:
            words = [sys.executable, str(HERE / "peers" / "by_hand_app.py")]
            with child(words, environ | {"TRITON": triton.http_address}, log, port, "Running on"):
                yield port, psutil.Process(triton.pid), notes
        return
    if server == "up":
        words = [sys.executable, "-m", "serve", "up", str(repository), "--port", str(port), "--log", str(notes)]
        words += [f"--triton-{kind}-port=0" for kind in ("http", "grpc", "metrics")]
        with child([*words, "--memory", f"{budget // MIB}MiB"], environ, log, port, "Ctrl-C") as process:
            triton_of = next(each for each in process.children() if "tritonserver" in each.name())
            yield port, triton_of, notes
        return
    path = (ENVIRONMENTS / "ray" / "bin").absolute()
    environ |= {"MODELS": str(repository.absolute()), "NOTES": str(notes), "RAY_USAGE_STATS_ENABLED": "0"}
    environ |= {"OMP_NUM_THREADS": "1", "PATH": f"{path}:{environ['PATH']}"}
    notes.touch()
    with child(
        [str(path / "python"), str(HERE / "peers" / "ray_models_app.py"), str(port)], environ, log, port, "ready"
    ):
        yield port, None, notes


@contextmanager
def child(words: list[str], environ: dict[str, str], log: Path, port: int, ready: str) -> Iterator[psutil.Process]:
    with log.open("wb") as file:
        process = subprocess.Popen(words, env=environ, stdout=file, stderr=subprocess.STDOUT)
    others: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while ready not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ChildProcessError(f"did not start at port {port}: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield psutil.Process(process.pid)
        others = family(psutil.Process(process.pid))[1:]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        for each in others:
            if each.is_running():
                each.kill()


def run(server: str, arguments: Any, port: int, watched: psutil.Process | None, notes: Path) -> Run:
    """One server's load."""
    host = f"127.0.0.1:{port}"
    requests = []
    for number in range(COUNT):
        name = f"m{number:02}"
        if server == "ray":
            headers = [(b"serve_multiplexed_model_id", name.encode()), (b"content-type", b"application/json")]
            requests.append(wire(host, "/predict", form="json", headers=headers)[0])
        else:
            requests.append(wire(host, f"/v2/models/{name}/infer", form="binary")[0])
    weights = tuple(1 / (number + 1) ** arguments.zipf for number in range(COUNT))
    arrivals = Arrivals("poisson", (Leg(arguments.rate, arguments.rate, arguments.seconds),), arguments.seed)
    job = Job(
        "http", "127.0.0.1", port, tuple(requests), weights, arrivals, duration_s=arguments.seconds, timeout_s=60.0,
        seed=arguments.seed,
    )  # fmt: skip
    batches: list[Batch] = []
    begun = time.time()
    memory: list[tuple[float, float]] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            process = watched or replica()
            memory.append((time.time() - begun, 0.0 if process is None else resident(process)))

    sampler = threading.Thread(target=sample)
    sampler.start()

    async def send() -> None:
        nonlocal begun
        generator = Generator(job, batches.append)
        await generator.prepare()
        begun = time.time()
        await generator.run(time.perf_counter_ns())

    try:
        uvloop.run(send())
    finally:
        over.set()
        sampler.join()
    rows = np.concatenate([np.frombuffer(batch.records, np.int64).reshape(-1, len(COLUMNS)) for batch in batches])
    kinds = batches[-1].kinds
    due, end, model, kind = (rows[:, COLUMNS.index(name)] for name in ("due", "end", "request", "kind"))
    due, end = due / 1e9, end / 1e9
    failed = {kinds[each]: int((kind == each).sum()) for each in np.unique(kind) if each}
    loads = [each for each in loads_of(server, notes, begun) if each[2] > 0]
    cold = np.array(
        [
            any(name == which and first < until and last > since for name, first, last in loads)
            for which, since, until in zip(model, due, end, strict=True)
        ]
    )
    good = kind == 0
    return Run(due[good], (end - due)[good], model[good], cold[good], failed, memory, len(loads))


def replica() -> psutil.Process | None:
    """Ray's, by the name that it gives itself."""
    for each in psutil.process_iter(["cmdline"]):
        if "ray::ServeReplica" in " ".join(each.info["cmdline"] or ()):
            return each
    return None


def loads_of(server: str, notes: Path, begun: float) -> list[tuple[int, float, float]]:
    """Model, and when its load began and ended, in seconds from the beginning."""
    text = notes.read_text(errors="replace")
    if server == "ray":
        told = [(float(at), what, name) for at, what, name in (line.split() for line in text.splitlines())]
    else:
        year = datetime.now().year
        told = [
            (datetime.strptime(f"{year} {at}", "%Y %m%d %H:%M:%S.%f").timestamp(), WORDS[what], name)
            for at, what, name in LINE.findall(text)
        ]
    began: dict[str, float] = {}
    found = []
    for at, what, name in told:
        if what == "loading":
            began[name] = at
        elif what == "loaded" and name in began:
            found.append((int(name[1:]), began.pop(name) - begun, at - begun))
    return found


def figures(run: Run, budget: int) -> dict[str, Any]:
    sizes = np.array([size for _, size in run.memory])
    warm, cold = run.latency[~run.cold], run.latency[run.cold]
    return {
        "answered": len(run.latency),
        "failed": run.failed,
        "loads": run.loads,
        "hit_rate": round(float((~run.cold).mean()), 3),
        "cold_ms": of(cold),
        "warm_ms": of(warm),
        "memory_peak_of_budget": round(float(sizes.max()) / budget, 3),
        "memory_mean_of_budget": round(float(sizes.mean()) / budget, 3),
        "memory_over_budget_share": round(float((sizes > budget).mean()), 4),
    }


def of(latency: Any) -> dict[str, float | int]:
    """Percentiles; p99 of a few hundred is close to the longest."""
    if not len(latency):
        return {"count": 0}
    p50, p90, p99, longest = (round(1000 * float(np.percentile(latency, each)), 1) for each in (50, 90, 99, 100))
    return {"count": len(latency), "p50": p50, "p90": p90, "p99": p99, "longest": longest}


def show(found: dict[str, dict[str, Any]], budget: int) -> None:
    title = f"{COUNT} models, memory for about {FIT} of them ({budget // MIB} MiB)"
    table = Table(title=title, title_justify="left")
    for column in ("server", "answered", "failed", "loads", "hits", "cold p50, p90, p99 ms", "warm p50, p90, p99 ms",
                   "memory: peak, mean, time over the budget"):  # fmt: skip
        table.add_column(column, justify="left" if column == "server" else "right")
    for server, row in found.items():
        three = [
            "  ".join(f"{row[kind].get(name, float('nan')):,.0f}" for name in ("p50", "p90", "p99"))
            for kind in ("cold_ms", "warm_ms")
        ]
        told = ", ".join(f"{count} {kind}" for kind, count in row["failed"].items()) or "0"
        used = "  ".join(
            f"{row[f'memory_{each}']:.1%}" for each in ("peak_of_budget", "mean_of_budget", "over_budget_share")
        )
        table.add_row(
            SERVERS[server], str(row["answered"]), told, str(row["loads"]), f"{row['hit_rate']:.0%}", *three, used
        )
    Console(soft_wrap=True, width=200).print(table)


def draw(runs: dict[str, Run], budget: int, path: Path) -> None:
    """Memory over time above, latencies below, a column for each server."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(runs), figsize=(5 * len(runs), 6), sharex=True, sharey="row", squeeze=False)
    for (server, run), (above, below) in zip(runs.items(), axes.T, strict=True):
        above.plot([at for at, _ in run.memory], [size / MIB for _, size in run.memory], color="#0b6e4f", linewidth=1)
        above.axhline(budget / MIB, color="#b3261e", linestyle="--", linewidth=1)
        above.set_title(SERVERS[server])
        for cold, colour, name in ((False, "#0b6e4f", "loaded"), (True, "#c77d0a", "had to be loaded")):
            mine = run.cold == cold
            below.scatter(run.due[mine], 1000 * run.latency[mine], s=5, color=colour, label=name)
        below.set_yscale("log")
        below.set_xlabel("seconds")
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("memory, MiB (dashed: the budget)")
    axes[1, 0].set_ylabel("latency, ms")
    axes[1, 0].legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
