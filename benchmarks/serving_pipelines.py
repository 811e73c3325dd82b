"""Hooks as an ensemble against hooks as one Python model that asks the network (BLS): the digits model, image to label.

    python benchmarks/serving_pipelines.py [--rounds 5] [--seconds 2]

One Triton serves both, and the same hooks written for a whole batch at a time; the client takes turns between them, 1,
16 and 64 requests in flight, medians over the rounds. Each hook runs in one process, the network in two. The last line
of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from compress.runtime.machine import environment
from serve.load.options import LoadOptions
from serve.load.run import run_load
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonServer

NETWORK = Path("model_repository/digits_network/1/model.onnx")
HOOKS = Path("examples/digits/hooks.py")
BATCHWISE = """

_one, _label = preprocess, postprocess


def preprocess(image: list[bytes]) -> np.ndarray[Any, Any]:
    return np.stack([_one(file) for file in image])


def postprocess(logits: np.ndarray[Any, Any]) -> list[Prediction]:
    likely = np.exp(logits - logits.max(1, keepdims=True))
    return [
        Prediction(str(best), np.float32(share))
        for best, share in zip(likely.argmax(1).tolist(), (likely.max(1) / likely.sum(1)).tolist())
    ]
"""
IN_FLIGHT = (1, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time of each run")
    arguments = parser.parse_args()
    runs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = folder / "batchwise.py"
        whole.write_text(HOOKS.read_text() + BATCHWISE)
        kinds = {
            "ensemble": (HOOKS, PackOptions()),
            "bls": (HOOKS, PackOptions(pipeline="bls")),
            "ensemble, batch-wise": (whole, PackOptions()),
            "bls, batch-wise": (whole, PackOptions(pipeline="bls")),
        }
        models = {kind: kind.replace(", ", "_").replace("-", "_") for kind in kinds}
        for kind, (hooks, options) in kinds.items():
            pack(NETWORK, repository=folder / "models", name=models[kind], hooks=hooks, options=options)
        with TritonServer(folder / "models", ports=Ports(0, 0, 0)) as triton:
            url = f"http://{triton.http_address}"
            for number in range(arguments.rounds):
                for kind in kinds if number % 2 == 0 else reversed(kinds):
                    for count in IN_FLIGHT:
                        options_ = LoadOptions(
                            models[kind], url, concurrency=count, duration=arguments.seconds, warmup=0.3
                        )
                        found = run_load(options_)
                        if found.errors or found.p50_ms is None:
                            sys.exit(f"errors make the figures worthless: {dict(found.errors)}")
                        runs.setdefault((kind, count), []).append((found.throughput, found.p50_ms))
    figures = {
        kind: {
            str(count): {
                "per_s": statistics.median(rate for rate, _ in runs[kind, count]),
                "p50_ms": statistics.median(p50 for _, p50 in runs[kind, count]),
                "of_ensemble": statistics.median(
                    rate / base for (rate, _), (base, _) in zip(runs[kind, count], runs["ensemble", count], strict=True)
                ),
            }
            for count in IN_FLIGHT
        }
        for kind in kinds
    }
    table = Table(title=f"medians of {arguments.rounds} rounds", title_justify="left")
    table.add_column("hooks")
    for count in IN_FLIGHT:
        table.add_column(f"{count} in flight: answers/s, p50 ms, of the ensemble", justify="right")
    for kind, rows in figures.items():
        table.add_row(
            kind, *(f"{row['per_s']:,.0f}  {row['p50_ms']:.2f}  {row['of_ensemble']:.2f}" for row in rows.values())
        )
    Console(soft_wrap=True, width=160).print(table)
    head = {"benchmark": "serving_pipelines", "rounds": arguments.rounds, "environment": environment(1)}
    print(json.dumps(head | {"kinds": figures}))


if __name__ == "__main__":
    main()
