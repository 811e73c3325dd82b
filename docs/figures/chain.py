"""Draw chain.svg: the way of the demo's network, with the figures of the newest `benchmarks/compress_digits.py`."""

from __future__ import annotations

import json
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
WIDTH, HEIGHT, TOP, TALL = 1000, 196, 34, 76
STYLE = """
  text { font-family: system-ui, -apple-system, 'Segoe UI', sans-serif; text-anchor: middle; fill: #1f2328 }
  .name { font-size: 16px; font-weight: 600 } .what { font-size: 12.5px; fill: #59636e } .figure { font-size: 13px }
  .gain { font-size: 14px; font-weight: 600; fill: #0a6b52 }
  rect { fill: #f6f8fa; stroke: #d1d9e0 } .made { fill: #e6f5ef; stroke: #2f9e7a } path { stroke: #59636e; fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .what { fill: #9198a1 } .gain { fill: #5fd0a9 }
    rect { fill: #151b23; stroke: #3d444d } .made { fill: #10281f; stroke: #2f9e7a } path { stroke: #9198a1 }
  }
"""


def chain(models: dict[str, dict[str, float]]) -> str:
    """The drawing, in light and dark.

    Args:
        models: by name, what compress_digits.py printed: accuracy, latency_p50_ms, size_bytes and the ratios.
    """
    eager, onnx, made = models["torch eager"], models["ONNX Runtime FP32"], _result(models)
    boxes = (
        ("model.pt", ("your network, trained",), f"{eager['accuracy']:.1%} · {eager['latency_p50_ms']:.2f} ms", ""),
        ("compress", ("prune · recover", "INT8 · ONNX · prove"), "", ""),
        ("artifact", ("model.onnx", "measured, proven"), f"{made['accuracy']:.1%} · {_ms(made)}", "made"),
        ("Triton", ("serve pack · serve up", "batching · hooks"), "", ""),
        ("gateway", ("keys · limits", "canaries · metrics"), "", ""),
        ("clients", ("files, JSON, tensors", "HTTP · gRPC"), "", ""),
    )
    wide, gap = 142, (WIDTH - 6 * 142 - 20) / 5
    parts = []
    for place, (name, lines, figure, kind) in enumerate(boxes):
        left = 10 + place * (wide + gap)
        middle = left + wide / 2
        parts.append(f'<rect class="{kind}" x="{left:.0f}" y="{TOP}" width="{wide}" height="{TALL}" rx="8"/>')
        parts.append(_text("name", middle, TOP + 26, name))
        parts += [_text("what", middle, TOP + 46 + 17 * row, line) for row, line in enumerate(lines)]
        if figure:
            parts.append(_text("figure", middle, TOP + TALL + 24, figure))
        if place:
            end = left - 3
            arrow = f"M{left - gap + 3:.0f} {TOP + 38}H{end:.0f}m-5 -4 l5 4 l-5 4"
            parts.append(f'<path d="{arrow}"/>')
    faster, smaller = made["faster_than_torch_eager"], onnx["size_bytes"] / made["size_bytes"]
    gain = f"{faster:.0f}× faster than PyTorch, {smaller:.0f}× smaller than its FP32 file ({_mb(onnx)} → {_mb(made)})"
    parts.append(_text("gain", 10 + 2 * (wide + gap) + wide / 2, TOP + TALL + 48, gain))
    note = "the demo's network, by benchmarks/compress_digits.py: batch 1, one thread, AMD EPYC, 500 unseen images"
    parts.append(_text("what", 10 + 2 * (wide + gap) + wide / 2, TOP + TALL + 70, note))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    return f'{head}aria-label="{escape(gain)}"><style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"


def _result(models: dict[str, dict[str, float]]) -> dict[str, float]:
    """The pruned and quantized one: the smallest file."""
    return min((one for one in models.values() if one["size_bytes"]), key=lambda one: one["size_bytes"])


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def _ms(model: dict[str, float]) -> str:
    return f"{model['latency_p50_ms']:.3f} ms"


def _mb(model: dict[str, float]) -> str:
    return f"{model['size_bytes'] / 1e6:.2f} MB"


if __name__ == "__main__":
    newest = max((HERE.parents[1] / "benchmarks/results").glob("*-compress_digits.json"))
    (HERE / "chain.svg").write_text(chain(json.loads(newest.read_text(encoding="utf-8"))["models"]), encoding="utf-8")
