"""Does `serve load` tell the truth? Against servers of known delays, and queues whose waiting times are theorems.

    python benchmarks/load_truth.py [--seconds 60]

For each case: percentiles as reported (from when a request was due), as a tool would report that counts from the
sending, and as theory gives them. Theory knows nothing of sockets and of this machine's other tenants, which add some
0.3 ms to each request and more to the rarest. For the queues, a second theory takes the very arrivals and service times
of the run (Lindley's recursion), so that what is left is the tester's own error. The last line of stdout is one JSON
object; a plot goes to build/load_truth.svg.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from load_server import answer_times

from serve.load.figures.result import LoadResult
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.load.send.arrivals import Arrivals, Leg

PERCENTS = (50.0, 90.0, 99.0, 99.9)
WARMUP_S = 1.0
Inverse = Callable[[float], float]


@dataclass(frozen=True)
class Case:
    """A server, a load, and what the latency must be.

    Attributes:
        words: of the server.
        rate: requests a second.
        theory: milliseconds at a share from 0 to 1; None where there is no formula.
        path: whether latencies can be computed from the run's own arrivals, too.
        seconds: how long, where it is not what was asked.
        connections: the tester's bound on them.
    """

    name: str
    words: tuple[str, ...]
    rate: float
    theory: Inverse | None
    path: bool = False
    seconds: float | None = None
    connections: int = 512


def cases() -> list[Case]:
    normal = statistics.NormalDist()
    return [
        Case("fixed 20 ms", ("fixed", "20"), 500, lambda _: 20.0),
        Case("lognormal, median 20 ms, sigma 0.5", ("lognormal", "20", "0.5"), 500,
             lambda share: 20 * math.exp(0.5 * normal.inv_cdf(share))),
        Case("20 ms, a stall of 1 s every 10 s", ("stall", "20", "10", "1"), 500,
             lambda share: 20 + 1000 * max(share - 0.9, 0) / 0.1),
        Case("the same over 20 connections", ("stall", "20", "10", "1"), 500, None, path=True, connections=20),
        Case("M/M/1, 70% busy", ("queue", "exponential", "500"), 350, mm1(350, 500), path=True),
        Case("M/D/1, 70% busy", ("queue", "constant", "500"), 350, md1(350, 500), path=True),
        Case("M/D/1, 90% busy", ("queue", "constant", "500"), 450, md1(450, 500), path=True),
        Case("capacity of 500/s, 600/s offered", ("queue", "constant", "500"), 600,
             lambda share: 1000 * (WARMUP_S + 10 * share) * 0.2, path=True, seconds=10),
    ]  # fmt: skip


def mm1(rate: float, service: float) -> Inverse:
    """Time in an M/M/1 queue is exponential (Kleinrock 1975, Queueing Systems I, 5.119)."""
    return lambda share: -1000 * math.log(1 - share) / (service - rate)


def md1(rate: float, service: float) -> Inverse:
    """Time in an M/D/1 queue (Franx 2001, A simple solution for the M/D/c waiting time distribution), inverted."""
    load = rate / service
    most = 400
    arrivals = [math.exp(-load)]  # so many come during one service
    for number in range(1, most + 2):
        arrivals.append(arrivals[-1] * load / number)
    more = np.cumsum(arrivals[::-1])[::-1]  # at least so many
    here = [1 - load]  # so many are there: as often up across a level as down
    for level in range(most):
        up = here[0] * more[level + 1] + sum(here[k] * more[level - k + 2] for k in range(1, level + 1))
        here.append(up / arrivals[0])
    waiting = np.cumsum([here[0] + here[1], *here[2:]])

    def below(wait: float) -> float:
        """Share that waits at most so many service times."""
        whole = int(wait) + 1
        left = load * (whole - wait)
        term, total = math.exp(-left), 0.0
        for number in range(whole):
            total += waiting[whole - number - 1] * term
            term *= left / (number + 1)
        return total

    def inverse(share: float) -> float:
        low, high = 0.0, most / 2
        if below(low) >= share:
            return 1000 / service
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if below(middle) < share else (low, middle)
        return 1000 * (high + 1) / service

    return inverse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    curves: list[tuple[str, LoadResult, Inverse | None]] = []
    for case in cases():
        with served(case.words) as url:
            seconds = case.seconds or arguments.seconds
            result = run_load(LoadOptions(url=url, rate=f"{case.rate:g}", duration=seconds, warmup=WARMUP_S,
                                          timeout=60, connections=case.connections))  # fmt: skip
        path = exact(case, seconds) if case.path else None
        curves.append((case.name, result, case.theory))
        show(case, result, path)
        rows.append(row_of(case, result, path))
    with served(("stall", "20", "10", "1")) as url:
        closed = run_load(LoadOptions(url=url, concurrency=1, duration=arguments.seconds, warmup=WARMUP_S))
    estimated = closed.estimated.at("p99") if closed.estimated else None
    print(f"the stall, seen by one client that waits for its answers: p99 {text(closed.p99_ms)} ms")
    print(f"  estimated for one that does not wait: {text(estimated)} ms")
    draw(curves, Path("build/load_truth.svg"))
    told = {"closed_stall_p99_ms": closed.p99_ms, "closed_stall_estimated_p99_ms": estimated}
    print(json.dumps({"cores": os.cpu_count(), "seconds": arguments.seconds, "cases": rows, **told}))


@contextmanager
def served(words: Sequence[str]) -> Iterator[str]:
    """The address of such a server, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("load_server.py")), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            yield f"http://127.0.0.1:{int(line)}/"
        finally:
            process.terminate()


def exact(case: Case, seconds: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Milliseconds of each request of the run, from its own arrivals and service times (Lindley 1952)."""
    arrivals = Arrivals("poisson", (Leg(case.rate, case.rate, WARMUP_S), Leg(case.rate, case.rate, seconds)), 0)
    when = answer_times(list(case.words))
    when(-(10**9))  # the request by which the tester learns that the server is there
    free = [0] * case.connections
    found: list[float] = []
    for due in (due for times, _ in arrivals.chunks() for due in times.tolist()):
        ended = when(max(due, heapq.heappop(free)))
        heapq.heappush(free, ended)
        if due >= WARMUP_S * 1e9:
            found.append((ended - due) / 1e6)
    return np.array(found)


def row_of(
    case: Case, result: LoadResult, path: np.ndarray[tuple[int], np.dtype[np.float64]] | None
) -> dict[str, object]:
    names = [f"p{percent:g}" for percent in PERCENTS]
    return {
        "case": case.name, "rate": case.rate, "count": result.count, "invalid": list(result.invalid),
        "lateness_p99_ms": result.lateness.at("p99"),
        "theory_ms": None if case.theory is None else {
            name: case.theory(percent / 100) for name, percent in zip(names, PERCENTS, strict=True)},
        "path_ms": None if path is None else {
            name: float(np.percentile(path, percent)) for name, percent in zip(names, PERCENTS, strict=True)},
        "reported_ms": {name: result.latency.at(name) for name in names},
        "from_sending_ms": {name: result.service.at(name) for name in names},
    }  # fmt: skip


def show(case: Case, result: LoadResult, path: np.ndarray[tuple[int], np.dtype[np.float64]] | None) -> None:
    print(
        f"{case.name}: {case.rate:g} requests/s, {result.count} answers, "
        f"sent late p99 {text(result.lateness.at('p99'))} ms"
    )
    print(f"  {'':8}{'theory':>10}{'this path':>10}{'reported':>10}{'ratio':>8}{'from sending':>14}")
    for percent in PERCENTS:
        name = f"p{percent:g}"
        known = None if case.theory is None else case.theory(percent / 100)
        own = None if path is None else float(np.percentile(path, percent))
        value = result.latency.at(name)
        ratio = "" if value is None else f"{value / (own or known or math.nan):.3f}"
        print(
            f"  {name:8}{text(known):>10}{text(own):>10}{text(value):>10}{ratio:>8}{text(result.service.at(name)):>14}"
        )
    for why in result.invalid:
        print(f"  invalid: {why}")
    sys.stdout.flush()


def text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def draw(curves: Sequence[tuple[str, LoadResult, Inverse | None]], path: Path) -> None:
    """Reported over theory, at each percentile, on an axis of nines."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(13, 6), layout="constrained")
    for place, (name, result, theory) in zip(axes.ravel(), curves, strict=False):
        shares = 1 - 10 ** -np.linspace(0.05, math.log10(max(result.count, 100)) - 1, 60)
        nines = -np.log10(1 - shares)
        due, sent = result.latency.samples(), result.service.samples()
        if theory is not None:
            place.plot(nines, [theory(share) for share in shares], color="#8a9099", lw=5, alpha=0.5, label="theory")
        place.plot(nines, [due.value_at(100 * share) / 1e6 for share in shares], color="#3b8bc4", label="from when due")
        place.plot(
            nines, [sent.value_at(100 * share) / 1e6 for share in shares], "--", color="#e0812b", label="from sending"
        )
        place.set(title=name, yscale="log", xlabel="percentile", ylabel="ms")
        place.set_xticks([0.3, 1, 2, 3], ["50", "90", "99", "99.9"])
        place.title.set_fontsize(9)
    axes[0, 0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    figure.savefig(path.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main()
