"""What `compress export` costs as models grow: seconds, stage by stage, and peak memory.

    python benchmarks/compress_large.py [--only resnet50 vit_b bert_base encoder_3gb] [--cores 2]

A ResNet-50, a ViT-B/16, a BERT-base and an encoder of 3 GB, which is more than an ONNX file holds, with untrained
weights, each by the command itself in a process of its own: the cost alone is measured, no accuracy is claimed.
`measuring` is what is left beside the stages: figures, plots, report. Memory is what the largest process needs, stage
by stage: pages of files, which the kernel may drop and read again, are told apart. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compress_resnet50 import resnet50
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import compress
from compress.runtime.machine import environment
from compress.runtime.memory import give_back

WIDTH, HEADS, DEPTH = 768, 12, 12
WORDS, LENGTH = 30522, 128


class Block(nn.Module):
    """A transformer's layer with separate projections; normalized before (ViT) or after (BERT) each half."""

    def __init__(self, width: int = WIDTH, *, before: bool) -> None:
        super().__init__()
        self.before = before
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(x.shape[0], x.shape[1], HEADS, x.shape[2] // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed: torch.Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            x = x + self.attend(self.first(x))
            fed: torch.Tensor = x + self.down(F.gelu(self.up(self.second(x))))
            return fed
        x = self.first(x + self.attend(x))
        normed: torch.Tensor = self.second(x + self.down(F.gelu(self.up(x))))
        return normed


class VisionTransformer(nn.Module):
    """ViT-B/16 at 224² (Dosovitskiy et al., 2021, table 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 16, 16)
        self.positions = nn.Parameter(torch.randn(1, 196, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block(before=True) for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1000)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


class TextEncoder(nn.Module):
    """BERT-base (Devlin et al., 2019, section 3), or wider and deeper; its first token classified."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, before=False) for _ in range(depth)))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.positions(places))
        logits: torch.Tensor = self.head(self.blocks(x)[:, 0])
        return logits


@dataclass(frozen=True)
class Job:
    """One export: how the model is made, what it takes, and what is asked for."""

    make: Callable[[], nn.Module]
    takes: str
    samples: Callable[[np.random.Generator], dict[str, np.ndarray[Any, Any]]]
    asked: tuple[str, ...]


def _images(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    return {"image": rng.standard_normal((16, 3, 224, 224)).astype(np.float32)}


def _texts(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    return {"tokens": rng.integers(0, WORDS, (16, LENGTH))}


STATIC = ("--int8", "static", "--calibration", "data.npz")
JOBS = {
    "resnet50": Job(resnet50, "image:float32[batch,3,224,224]", _images, ("--prune", "0.5", *STATIC)),
    "vit_b": Job(VisionTransformer, "image:float32[batch,3,224,224]", _images, ("--prune", "0.3")),
    "bert_base": Job(TextEncoder, "tokens:int64[batch,sequence]", _texts, ("--prune", "0.3", "--int8", "dynamic")),
    "encoder_3gb": Job(
        lambda: TextEncoder(1536, 25),
        "tokens:int64[batch,sequence]",
        _texts,
        ("--int8", "dynamic"),
    ),
    "encoder_3gb_int4": Job(
        lambda: TextEncoder(1536, 25),
        "tokens:int64[batch,sequence]",
        _texts,
        ("--int4", "weights"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--cores", type=int, default=2)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    figures = {name: exported(JOBS[name]) for name in arguments.only}
    show(figures)
    found = {"benchmark": "compress_large", "weights": "untrained", "environment": environment(1)}
    print(json.dumps(found | {"cores": arguments.cores, "models": figures}))


def exported(job: Job) -> dict[str, Any]:
    """Run the command once; seconds of each stage, of everything else, and the largest process's memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        compress.save(job.make(), folder / "model.pt", inputs=job.takes, outputs=["logits"])
        size = (folder / "model.pt").stat().st_size
        give_back()  # what the command needs is measured beside it
        np.savez(folder / "data.npz", **job.samples(np.random.default_rng(0)))  # type: ignore[arg-type]
        start = time.perf_counter()
        peaks, mark = run(["export", "model.pt", *job.asked, "-o", "artifact", "--no-cache"], folder)
        seconds = time.perf_counter() - start
        stages = json.loads((folder / "artifact" / "report.json").read_text())["stages"]
    spent = {stage["stage"]: stage["seconds"] for stage in stages}
    return {
        "asked": " ".join(job.asked),
        "seconds": seconds,
        "peak_memory_bytes": max(peaks.values()),
        "times_the_model": max(peaks.values()) / size,
        "with_pages_of_files_bytes": mark,
        "peak_by_stage_bytes": peaks,
        "stages": spent,
        "measuring": seconds - sum(spent.values()),
    }


def run(arguments: Sequence[str], folder: Path) -> tuple[dict[str, int], int]:
    """Run `compress` in a folder and look at the memory of its processes ten times a second.

    Returns:
        Bytes that the largest process needs, at most, until each stage ended: heap and shared memory, without pages of
        files that the kernel may drop and read again; and the largest high-water mark, which has these, too.
    """
    command = [sys.executable, "-m", "compress", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peaks: dict[str, int] = {}
    most = [0, 0]  # since the last stage ended; high-water mark

    def look() -> None:
        while process.poll() is None:
            for pid in family(process.pid):
                for place, bytes_now in enumerate(memory_of(pid)):
                    most[place] = max(most[place], bytes_now)
            time.sleep(0.1)

    looking = threading.Thread(target=look)
    looking.start()
    assert process.stdout is not None  # noqa: S101  it is piped
    for line in process.stdout:
        sys.stderr.write(line)
        if ended := re.match(r"\s*✓ (.*?\S)(?:\s\s|$)", line):
            peaks[ended[1]], most[0] = most[0], 0
    looking.join()
    if process.wait():
        sys.exit(f"compress {' '.join(arguments)} ended with {process.returncode}")
    peaks["report"] = most[0]
    return peaks, most[1]


def family(pid: int) -> list[int]:
    """A process, and all that it and its threads have started."""
    with contextlib.suppress(OSError):
        children = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/children")]
        return [pid, *(found for some in children for child in some for found in family(int(child)))]
    return []


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes that a process needs now, and its high-water mark with pages of files; zeros where it has ended."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        anon, shared, mark = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem", "VmHWM"))
    except (OSError, KeyError):
        return 0, 0
    return anon + shared, mark


def show(figures: dict[str, dict[str, Any]]) -> None:
    table = Table(title="One export, untrained weights", title_justify="left")
    for column in ("model", "asked", "seconds", "of these pruning", "measuring", "peak memory", "times the model"):
        table.add_column(column, justify="left" if column in ("model", "asked") else "right")
    for name, row in figures.items():
        pruning = sum(spent for stage, spent in row["stages"].items() if stage.startswith("prune"))
        seconds = (f"{row['seconds']:.0f}", f"{pruning:.0f}", f"{row['measuring']:.0f}")
        memory = (f"{row['peak_memory_bytes'] / 1e9:.1f} GB", f"{row['times_the_model']:.1f}")
        table.add_row(name, row["asked"], *seconds, *memory)
    Console(width=140).print(table)
    for name, row in figures.items():
        stages = Table(title=f"{name}: the largest process, by stage", title_justify="left")
        for column in ("until the end of", "memory"):
            stages.add_column(column)
        for stage, held in row["peak_by_stage_bytes"].items():
            stages.add_row(stage, f"{held / 1e9:.2f} GB")
        Console(width=140).print(stages)


if __name__ == "__main__":
    main()
