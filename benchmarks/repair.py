"""Accuracy after pruning without any training: magnitude as it is, with the repair, and with channels chosen by OBS.

    python benchmarks/repair.py [--seeds 3] [--fractions 0.5 0.7] [--networks resnet mobilenet] [--data FOLDER]
      [--peers build/peers/bin/python]
    python benchmarks/repair.py --resnet50 [--samples 256]

The networks are examples/fashion_mnist's, trained beforehand; each seed draws 512 other training images, without
labels, to calibrate on. Accuracy is over all 10,000 test images. Torch-Pruning's own magnitude pruner stands beside, on
the same networks, to the same multiply-accumulates; and with `--peers`, a Python that has torch and nncf, NNCF's own
`prune`, which sets so many of the weights to zero by magnitude over all layers and keeps every channel, before and
after its BatchNorm adaptation by the same images. `--resnet50` is of time and memory: random weights, 224 x 224. The
last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch_pruning as tp
from rich.console import Console
from rich.table import Table
from torch import nn

import compress
from compress.data.dataset import Dataset
from compress.model import TorchModel, infer_signature
from compress.prune.prune_channels import PruneChannels
from compress.prune.repair.judge import statistics_again
from compress.prune.repair.samples import Samples
from compress.prune.repair_channels import RepairChannels
from compress.runtime.machine import environment
from compress.runtime.measure import torch_macs
from compress.signature import TensorSpec

ROOT = Path(__file__).parents[1]
CALIBRATION = 512
ROUND_TO = 8
NNCF = """
import json, logging, sys
folder, network, fraction, weights, evaluation, *calibrations = sys.argv[1:]
sys.path.insert(0, folder)
import nncf, networks, numpy as np, torch
logging.disable(logging.WARNING)
held = np.load(evaluation)
images, labels = torch.from_numpy(held["image"]), torch.from_numpy(held["label"])

def pruned():
    module = getattr(networks, network)().eval()
    module.load_state_dict(torch.load(weights, weights_only=True))
    mode = nncf.PruneMode.UNSTRUCTURED_MAGNITUDE_GLOBAL
    return nncf.prune(module, mode=mode, ratio=float(fraction), examples_inputs=images[:1]).eval()

def judged(module):
    with torch.no_grad():
        return sum(int((module(images[at:at + 500]).argmax(1) == labels[at:at + 500]).sum())
                   for at in range(0, len(labels), 500)) / len(labels)

found = {"as it is": [judged(pruned())], "adapted": []}
for path in calibrations:
    data = torch.split(torch.from_numpy(np.load(path)["image"]), 64)
    adapted = nncf.batch_norm_adaptation(pruned(), nncf.Dataset(data), num_iterations=len(data))
    found["adapted"].append(judged(adapted.eval()))
print(json.dumps(found))
"""
CLASSES = {"resnet": "ResNet", "mobilenet": "MobileNet"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--networks", nargs="+", default=["resnet", "mobilenet"])
    parser.add_argument("--data", type=Path, help="of Fashion-MNIST, if not where Debian installs it")
    parser.add_argument("--work", type=Path, default=ROOT / "build/repair-benchmark")
    parser.add_argument("--peers", type=Path, help="a Python with torch and nncf")
    parser.add_argument("--resnet50", action="store_true")
    parser.add_argument("--samples", type=int, default=256)
    arguments = parser.parse_args()
    if arguments.resnet50:
        figures: Any = large(arguments.samples)
    else:
        train = [sys.executable, ROOT / "examples/fashion_mnist/train_fashion.py", arguments.work, "--data-only"]
        source = [] if arguments.data is None else ["--data", arguments.data]
        subprocess.run([*train, *source], check=True, stdout=sys.stderr)
        figures = [
            row
            for network in arguments.networks
            for row in rows_of(network, arguments.work, arguments.fractions, arguments.seeds, arguments.peers)
        ]
        show(figures)
    print(json.dumps({"benchmark": "repair", "environment": environment(torch.get_num_threads()), "figures": figures}))


def rows_of(network: str, folder: Path, fractions: list[float], seeds: int, peers: Path | None) -> list[dict[str, Any]]:
    """A row for each way and fraction, with the accuracy under each seed."""
    model = compress.load(folder / f"{network}.pt")
    judge = Judge(folder)
    whole = torch_macs(model.module, model.signature)
    rows = [{"network": network, "way": "unpruned", "macs_removed": 0.0, "accuracy": [judge(model.module)]}]
    data = [calibration(folder, model, seed) for seed in range(seeds)]
    plain = PruneChannels(0.5, round_to=ROUND_TO)
    prepared = plain.prepare(model, quiet, folder)
    by_obs = [
        dataclasses.replace(plain, importance="obs", calibration=each).prepare(model, quiet, folder) for each in data
    ]
    for fraction in fractions:
        given = cast(TorchModel, dataclasses.replace(plain, fraction=fraction).cut(prepared, quiet).model)
        removed = 1 - torch_macs(given.module, model.signature) / whole
        theirs = torch_pruning(model, fraction)
        own = {"network": network, "macs_removed": removed}
        away = 1 - torch_macs(theirs, model.signature) / whole
        rows.append(own | {"way": "magnitude", "accuracy": [judge(given.module)]})
        rows.append(own | {"way": "Torch-Pruning, magnitude", "macs_removed": away, "accuracy": [judge(theirs)]})
        for way, accuracy in nncf(peers, network, model, folder, fraction, seeds).items():
            rows.append(own | {"way": f"NNCF, zeros, {way}", "macs_removed": 0.0, "accuracy": accuracy})
        again = [statistics_again(given.module, Samples(each, model.module, model.signature)) for each in data]
        rows.append(own | {"way": "magnitude, BN statistics", "accuracy": [judge(each) for each in again if each]})
        rows.append(own | {"way": "magnitude, repair"} | repaired([given] * seeds, data, judge))
        cut = [
            dataclasses.replace(plain, fraction=fraction, importance="obs").cut(each, quiet).model for each in by_obs
        ]
        chosen = [each for each in cut if isinstance(each, TorchModel)]
        lost = statistics.mean(1 - torch_macs(each.module, model.signature) / whole for each in chosen)
        rows.append(own | {"way": "OBS, repair", "macs_removed": lost} | repaired(chosen, data, judge))
        print("\n".join(map(json.dumps, rows)), file=sys.stderr, flush=True)
    return rows


def nncf(
    peers: Path | None, network: str, model: TorchModel, folder: Path, fraction: float, seeds: int
) -> dict[str, list[float]]:
    """Accuracies of its `prune`, as it is and adapted; nothing without a Python that has it."""
    if peers is None:
        return {}
    weights = folder / f"{network}-weights.pt"
    torch.save(model.module.state_dict(), weights)
    command = [str(peers), "-W", "ignore", "-c", NNCF, str(ROOT / "examples/fashion_mnist"), CLASSES[network]]
    command += [str(fraction), str(weights), str(folder / "eval.npz")]
    command += [str(folder / f"calibration-{seed}.npz") for seed in range(seeds)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return cast("dict[str, list[float]]", json.loads(said.splitlines()[-1]))


def repaired(pruned: list[TorchModel], data: list[Dataset], judge: Judge) -> dict[str, Any]:
    """Accuracy and CPU seconds of the repair, by seed."""
    accuracy, seconds = [], []
    for model, each in zip(pruned, data, strict=True):
        start = time.process_time()
        with tempfile.TemporaryDirectory() as work:
            given = cast(TorchModel, RepairChannels(each).run(model, Path(work), quiet).model)
        seconds.append(time.process_time() - start)
        accuracy.append(judge(given.module))
    return {"accuracy": accuracy, "cpu_seconds": seconds}


class Judge:
    """Accuracy over all test images."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "eval.npz") as held:
            self._images, self._labels = torch.from_numpy(held["image"]), torch.from_numpy(held["label"])

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> float:
        right = 0
        for images, labels in zip(torch.split(self._images, 500), torch.split(self._labels, 500), strict=True):
            right += int((module(images).argmax(1) == labels).sum())
        return right / len(self._labels)


def calibration(folder: Path, model: TorchModel, seed: int) -> Dataset:
    """Training images without labels, other ones for each seed."""
    path = folder / f"calibration-{seed}.npz"
    images = np.load(folder / "train/image.npy", mmap_mode="r")
    index = np.sort(np.random.default_rng(seed).choice(len(images), CALIBRATION, replace=False))
    np.savez(path, image=images[index].astype(np.float32))
    return Dataset.open(str(path), model.signature)


def torch_pruning(model: TorchModel, fraction: float) -> nn.Module:
    """Its magnitude pruner over all layers together, its ratio bisected to the fraction of multiply-accumulates."""
    example = torch.zeros(1, 1, 28, 28)
    whole, low, high = torch_macs(model.module, model.signature), 0.0, 1.0
    best: tuple[float, nn.Module] = (1.0, model.module)
    for _ in range(10):
        module = copy.deepcopy(model.module)
        for parameter in module.parameters():
            parameter.requires_grad_(True)
        pruner = tp.pruner.MagnitudePruner(
            module, example, tp.importance.GroupMagnitudeImportance(p=2), global_pruning=True,
            pruning_ratio=(low + high) / 2, max_pruning_ratio=0.9, round_to=ROUND_TO,
            ignored_layers=[module.get_submodule("head")],
        )  # fmt: skip
        pruner.step()
        gone = 1 - torch_macs(module, model.signature) / whole
        best = min(best, (abs(gone - fraction), module), key=lambda pair: pair[0])
        low, high = ((low + high) / 2, high) if gone < fraction else (low, (low + high) / 2)
    return best[1].eval()


def large(samples: int) -> dict[str, Any]:
    """Seconds and peak memory of pruning by half and repairing a ResNet-50 with random weights."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from compress_resnet50 import resnet50

    torch.manual_seed(0)
    module = resnet50().eval()
    signature = infer_signature(module, (TensorSpec.parse("image:float32[batch,3,224,224]"),), ("logits",))
    model = TorchModel(module, signature)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "image.npy"
        held = np.lib.format.open_memmap(path, "w+", np.float32, (samples, 3, 224, 224))
        for at in range(samples):
            held[at] = np.random.default_rng(at).standard_normal((3, 224, 224), np.float32)
        held.flush()
        data = Dataset.open(str(path), signature)
        pruned = cast(TorchModel, PruneChannels(0.5).run(model, Path(name), quiet).model)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        start, cpu = time.perf_counter(), time.process_time()
        given = RepairChannels(data).run(pruned, Path(name), quiet)
        return {
            "network": "ResNet-50, random weights, 224 x 224",
            "samples": samples,
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "peak_memory_before_bytes": before,
            "layers": len(given.details["layers"]),
        }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="10,000 test images, no training", title_justify="left")
    for column in ("network", "way", "MACs", "accuracy by seed", "mean"):
        table.add_column(column, justify="left" if column in ("network", "way") else "right", no_wrap=True)
    for row in rows:
        each = " ".join(f"{value:.2%}" for value in row["accuracy"])
        mean = statistics.mean(row["accuracy"])
        table.add_row(row["network"], row["way"], f"-{row['macs_removed']:.1%}", each, f"{mean:.2%}")
    Console(width=120).print(table)


def quiet(_done: int, _total: int, _note: str) -> None:
    """Shows nothing."""


if __name__ == "__main__":
    main()
