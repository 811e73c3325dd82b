"""Print the README's table of peers from the newest files in benchmarks/results; a test holds the README to it.

    python docs/figures/peers.py

Each group of rows is of one run of the script that its first row names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
OURS = "**{}**"
Row = tuple[str, str, str]


def table() -> str:
    """Markdown: what was done, by which tool, with what result, and the script that printed it."""
    lines = ["| the same job | by | result | script |", "|---|---|---|---|"]
    for benchmark, rows in (
        ("compress_peers", _int8()),
        ("compress_fashion_mnist", _pruned()),
        ("calibration_memory", _calibration()),
        ("serving_peers", _served()),
        ("gateway_overload", _overload()),
        ("load_peers", _clients()),
    ):
        for place, (job, tool, result) in enumerate(rows):
            script = "" if place else f"[{benchmark}](benchmarks/{benchmark}.py)"
            lines.append(
                "|".join(
                    f" {cell} " if cell else " " for cell in ("", "" if place else job, tool, result, script, "")
                ).strip()
            )
    return "\n".join(lines)


def newest(benchmark: str) -> dict[str, Any]:
    """What a script printed last."""
    path = max(RESULTS.glob(f"*-{benchmark}.json"))
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _int8() -> Iterator[Row]:
    found = newest("compress_peers")
    version = found["environment"]["onnxruntime"]
    names = {
        "compress --int8 static": OURS.format("`compress --int8 static`"),
        "onnxruntime quantize_static, defaults": f"ONNX Runtime {version} `quantize_static`, its defaults",
        "onnxruntime quantize_static, per channel": "the same, set by hand to one scale for each channel",
        "NNCF": "NNCF",
    }
    job = "INT8 of a ResNet for Fashion-MNIST: accuracy, speed over FP32 ONNX"
    for key, name in names.items():
        model = found["models"][key]
        yield job, name, f"{model['accuracy']:.2%}, {model['faster_than_fp32_onnx']:.2f}×"
    yield job, "torchao", found["did_not_run"]["torchao"]


def _pruned() -> Iterator[Row]:
    model = newest("compress_fashion_mnist")["models"]["−70% MACs + INT8"]
    name = OURS.format("`compress --prune 0.7 --finetune … --int8 static`")
    job = "the same, 70% of its multiply-accumulates pruned before"
    yield job, name, f"{model['accuracy']:.2%}, {model['faster_than_fp32_onnx']:.2f}×"


def _calibration() -> Iterator[Row]:
    rows = [row for row in newest("calibration_memory")["rows"] if (row["method"], row["samples"]) == ("entropy", 256)]
    for row in rows:
        name = OURS.format("`compress`") if row["tool"] == "compress" else row["tool"]
        yield "entropy calibration on 256 samples: memory", name, f"{row['added_mb']:,.0f} MB"


def _served() -> Iterator[Row]:
    found = newest("serving_peers")
    names = {
        "triton": OURS.format("this Triton, direct"),
        "triton, no batching": "Triton without dynamic batching",
        "gateway": OURS.format("this Triton, through the gateway"),
        "fastapi": "FastAPI {} and ONNX Runtime, no batching",
        "mlserver": "MLServer {}",
        "litserve": "LitServe {}",
        "bentoml": "BentoML {}",
        "ray": "Ray Serve {}",
    }
    for key, name in names.items():
        at = found["networks"]["tiny"][key]["32"]
        named = name.format(found["versions"].get(key, ""))
        yield "a tiny network, 32 requests in flight", named, f"{at['per_s']:,.0f}/s, p50 {at['p50_ms']:.1f} ms"


def _overload() -> Iterator[Row]:
    found = newest("gateway_overload")
    job = "three times the load that can be borne: answers within a second"
    for key, name in (("gateway", OURS.format("the gateway")), ("Triton alone", "Triton alone")):
        good = found["ways"][key]["3.0"]["goodput"]
        yield job, name, f"{good:.0f}/s of {found['peak_per_s']:.0f}"


def _clients() -> Iterator[Row]:
    tools = newest("load_peers")["cases"]["Triton, tiny, 8 in flight"]
    for key, name in (("serve load", OURS.format("`serve load`")), ("perf_analyzer", "perf_analyzer"), ("wrk", "wrk")):
        yield "a load tester's own CPU a request", name, f"{tools[key]['cpu_us']:.0f} µs"


if __name__ == "__main__":
    print(table())
