"""`serve load` beside perf_analyzer and wrk: the same server, the same closed loop, in turns in one run.

    python benchmarks/load_peers.py [--rounds 5] [--seconds 4]

Servers: Triton with convolutions of some ten milliseconds, where the server decides what comes out; Triton with a tiny
network, where a client that takes much CPU takes it from the server (perf_analyzer makes up the tensors, wrk posts the
same bytes); a server that answers at once, which shows what the client costs. Figures are medians over the rounds:
throughput, p50, p99, and the client's own CPU for a request. wrk is C, from Debian; perf_analyzer C++, from the wheel
of tritonclient 2.51.0. The generator's speed and punctuality stand at the end, the generator on one core and the server
on the other, beside a timer that does nothing else. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import uvloop
from gateway_overload import save_network
from perf_analyzer import install
from serving_networks import network

from serve.gateway.oip.protocol import build_request, parse_request
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.load.send.timer import PreciseTimer
from serve.pack.write import pack
from serve.triton.launch import Ports, TritonServer

Figures = dict[str, float]
CLIENTS = (1, 8, 32)
RATES = (4_000, 8_000, 16_000)
WARMUP_S = 0.5
LONGEST_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed: apt-get install wrk")
    found: dict[str, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack(network("tiny"), repository=folder / "models", name="tiny")
        pack(save_network(folder / "artifact"), repository=folder / "models", name="convolutions")
        with TritonServer(folder / "models", ports=Ports(0, 0, 0)) as triton:
            url = f"http://{triton.http_address}"
            for model, features, counts in (("convolutions", 16, (1, 8)), ("tiny", 64, CLIENTS)):
                body, header_length = tensor_body(features)
                script = folder / f"{model}.lua"
                headers = {"Content-Type": "application/octet-stream"}
                write_script(script, body, headers | {"Inference-Header-Content-Length": str(header_length)})
                for clients in counts:
                    title = f"Triton, {model}, {clients} in flight"
                    tools = {
                        "serve load": partial(ours, LoadOptions(model, url), clients, arguments.seconds),
                        "perf_analyzer": partial(perf_analyzer, triton.http_address, model, clients, arguments.seconds),
                        "wrk": partial(wrk, f"{url}/v2/models/{model}/infer", clients, arguments.seconds, script),
                    }
                    found[title] = in_turns(tools, arguments.rounds, title)
        plain = folder / "plain.lua"
        write_script(plain, b"x" * 128, {"Content-Type": "text/plain"})
        (folder / "body.txt").write_bytes(b"x" * 128)
        with trivial() as url:
            for clients in CLIENTS:
                title = f"trivial server, {clients} in flight"
                options = LoadOptions(url=f"{url}/", body=folder / "body.txt")
                tools = {
                    "serve load": partial(ours, options, clients, arguments.seconds),
                    "wrk": partial(wrk, f"{url}/", clients, arguments.seconds, plain),
                }
                found[title] = in_turns(tools, arguments.rounds, title)
            alone = punctuality(url, arguments.rounds, arguments.seconds)
    print(json.dumps({"cores": os.cpu_count(), "rounds": arguments.rounds, "cases": found, "one core": alone}))


def in_turns(tools: Mapping[str, Callable[[], Figures]], rounds: int, title: str) -> dict[str, Figures]:
    """Medians by tool, each round in another order."""
    runs: dict[str, list[Figures]] = {tool: [] for tool in tools}
    for number in range(rounds):
        names = list(tools)
        for tool in names[number % len(names) :] + names[: number % len(names)]:
            try:
                runs[tool].append(tools[tool]())
            except (subprocess.SubprocessError, FileNotFoundError) as err:
                print(f"{title}: {tool} gave no figures ({type(err).__name__}); that round is left out", flush=True)
    medians = {
        tool: {key: statistics.median(run[key] for run in each) for key in each[0]}
        for tool, each in runs.items()
        if each
    }
    print(title)
    first = medians["serve load"]
    for tool, figures in medians.items():
        print(
            f"  {tool:14} {figures['per_s']:9,.0f}/s ({figures['per_s'] / first['per_s']:.2f})  "
            f"p50 {figures['p50_ms']:.3f} ({figures['p50_ms'] / first['p50_ms']:.2f})  p99 {figures['p99_ms']:.3f} "
            f"({figures['p99_ms'] / first['p99_ms']:.2f}) ms  client's CPU {figures['cpu_us']:.1f} us a request",
            flush=True,
        )
    return medians


def ours(options: LoadOptions, clients: int, seconds: float) -> Figures:
    result = run_load(options.with_(concurrency=clients, duration=seconds, warmup=WARMUP_S))
    if result.error_count:
        sys.exit(f"the figures are worthless: {dict(result.errors)}")
    cpu_s = result.client_cpu_share * (result.seconds + WARMUP_S)
    return {
        "per_s": result.throughput,
        "p50_ms": result.latency.samples().value_at(50) / 1e6,
        "p99_ms": result.latency.samples().value_at(99) / 1e6,  # as the others do, however few lie beyond
        "cpu_us": 1e6 * cpu_s / (result.count + result.warmup_count),
    }


def wrk(url: str, clients: int, seconds: float, script: Path) -> Figures:
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds:g}s", "--latency", "-s", str(script), url]
    subprocess.run([*command[:3], "-d1s", *command[4:]], check=True, capture_output=True)
    text, cpu_s = timed(command)
    if "Non-2xx" in text:
        sys.exit(f"the figures are worthless: {text}")
    percentiles = {
        float(percent): milliseconds(value) for percent, value in re.findall(r"([\d.]+)%\s+([\d.]+\w+)\n", text)
    }
    requests = int(re.findall(r"(\d+) requests in", text)[0])
    return {
        "per_s": float(re.findall(r"Requests/sec:\s+([\d.]+)", text)[0]),
        "p50_ms": percentiles[50.0],
        "p99_ms": percentiles[99.0],
        "cpu_us": 1e6 * cpu_s / requests,
    }


def perf_analyzer(address: str, model: str, clients: int, seconds: float) -> Figures:
    binary, environ = install()
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.csv"
        command = [
            str(binary), "-m", model, "-u", address, "--concurrency-range", str(clients),
            "-p", str(int(1000 * seconds)), "-r", "3", "-s", "99", "--percentile", "99",
            "-f", str(report), "--verbose-csv",
        ]  # fmt: skip
        text, cpu_s = timed(command, environ, check=False)  # an unstable measurement is an error, with its figures
        heading, values = report.read_text().splitlines()[:2]
    row = dict(zip(heading.split(","), values.split(","), strict=False))
    # It sends for longer than it measures; the requests of all that time are in its log.
    sent = sum(int(count) for count in re.findall(r"Request count: (\d+)", text))
    rate = float(row["Inferences/Second"])
    return {
        "per_s": rate,
        "p50_ms": float(row["p50 latency"]) / 1000,
        "p99_ms": float(row["p99 latency"]) / 1000,
        "cpu_us": 1e6 * cpu_s / max(sent, rate * seconds, 1),
    }


def timed(command: Sequence[str], environ: dict[str, str] | None = None, *, check: bool = True) -> tuple[str, float]:
    """What a program prints, and the CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=check, capture_output=True, text=True, env=environ, timeout=LONGEST_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def milliseconds(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit]


def tensor_body(features: int) -> tuple[bytes, int]:
    values = np.random.default_rng(0).standard_normal(features).tolist()
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, features], "data": values}
    message = build_request(parse_request(json.dumps({"inputs": [tensor]}).encode()))
    return message.body, message.header_length or 0


def write_script(path: Path, body: bytes, headers: dict[str, str]) -> None:
    escaped = "".join(f"\\{byte:03d}" for byte in body)
    lines = ['wrk.method = "POST"', f'wrk.body = "{escaped}"']
    lines += [f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items()]
    path.write_text("\n".join(lines) + "\n")


@contextmanager
def trivial() -> Iterator[str]:
    """A server that answers at once, on the last core."""
    command = [sys.executable, str(Path(__file__).with_name("load_server.py")), "trivial"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
            line = process.stdout.readline() if process.stdout else ""
            yield f"http://127.0.0.1:{int(line)}"
        finally:
            process.terminate()


def punctuality(url: str, rounds: int, seconds: float) -> dict[str, object]:
    """On one core: answers a second of a closed loop, and lateness at half of that and at 4,000/s."""
    core = min(os.sched_getaffinity(0))
    closed: list[float] = []
    late: dict[str, list[float]] = {
        name: [] for name in (*(f"{rate:,}/s" for rate in RATES), "a bare timer at 4,000/s")
    }
    for _ in range(rounds):
        options = LoadOptions(url=f"{url}/", duration=seconds, warmup=WARMUP_S, cpus=(core,))
        closed.append(run_load(options.with_(concurrency=32)).throughput)
        for rate in RATES:
            result = run_load(options.with_(rate=str(rate)))
            late[f"{rate:,}/s"].append(result.lateness.at("p99") or 0.0)
        late["a bare timer at 4,000/s"].append(uvloop.run(bare_timer(core, seconds)))
    found: dict[str, object] = {"closed loop, answers/s": statistics.median(closed)}
    print(f"one core: {statistics.median(closed):,.0f} answers/s with 32 in flight")
    for name, values in late.items():
        found[f"lateness p99 ms, {name}"] = {
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
        }
        print(
            f"  p99 of lateness, {name}: median {statistics.median(values):.3f}, "
            f"{min(values):.3f} to {max(values):.3f} ms"
        )
    return found


async def bare_timer(core: int, seconds: float) -> float:
    """p99 of how late a timer wakes that does nothing else, in ms: what the machine itself allows."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    late: list[int] = []
    done = asyncio.Event()
    due = time.perf_counter_ns() + 1_000_000

    def wake() -> None:
        nonlocal due
        late.append(time.perf_counter_ns() - due)
        due += 250_000
        if len(late) >= seconds * 4000:
            done.set()
        else:
            timer.at(due)

    timer = PreciseTimer(wake)
    timer.at(due)
    await done.wait()
    timer.close()
    os.sched_setaffinity(0, own)
    return float(np.percentile(late, 99)) / 1e6


if __name__ == "__main__":
    main()
