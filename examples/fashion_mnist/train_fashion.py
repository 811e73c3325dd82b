"""Train a network on Fashion-MNIST, and write it and its data as files for `compress`.

    python examples/fashion_mnist/train_fashion.py build/fashion [--network mobilenet] [--epochs 24] [--data FOLDER]

The ResNet takes about 10 minutes on 2 cores. `--data-only` writes the data beside the checkpoints that stand here.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import idx
from networks import MobileNet, ResNet

import compress

NETWORKS: dict[str, type[nn.Module]] = {"resnet": ResNet, "mobilenet": MobileNet}
SIGNATURE = "image:float32[batch,1,28,28]"


def train(network: nn.Module, folder: Path, epochs: int, *, batch: int = 128, peak: float = 0.2) -> float:
    """SGD with one cycle, shifted and mirrored images, smoothed labels; gives the test accuracy."""
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in idx.read(folder, "train"))
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), lr=peak, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = len(images) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=epochs * steps, pct_start=0.25)
    fast = isinstance(network, ResNet) and torch.backends.cpu.get_cpu_capability() == "AVX512"
    for epoch in range(epochs):
        network.train()
        start, total = time.perf_counter(), 0.0
        for index in torch.split(torch.randperm(len(images))[: steps * batch], batch):
            shown = augmented(images[index]).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=fast):
                loss = F.cross_entropy(network(shown).float(), labels[index], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += loss.item()
        took = time.perf_counter() - start
        right = accuracy(network, folder) if epoch % 4 == 3 or epoch == epochs - 1 else float("nan")
        print(f"epoch {epoch + 1}/{epochs}  loss {total / steps:.4f}  test {right:.4f}  {took:.0f} s", flush=True)
    return right


def augmented(images: torch.Tensor) -> torch.Tensor:
    """Each image mirrored or not, and shifted by up to 2 pixels."""
    mirrored = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
    padded = F.pad(mirrored, (2, 2, 2, 2))
    down, right = torch.randint(0, 5, (2,)).tolist()
    return padded[:, :, down : down + 28, right : right + 28]


@torch.inference_mode()
def accuracy(network: nn.Module, folder: Path) -> float:
    network.eval()
    images, labels = (torch.from_numpy(array) for array in idx.read(folder, "t10k"))
    right = 0
    for start in range(0, len(labels), 500):
        answers = network(images[start : start + 500]).argmax(1)
        right += int((answers == labels[start : start + 500]).sum())
    return right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--network", choices=NETWORKS, default="resnet")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--data", type=Path, default=idx.FOLDER)
    parser.add_argument("--data-only", action="store_true")
    arguments = parser.parse_args()
    idx.write(arguments.output, arguments.data)
    if arguments.data_only:
        for name in NETWORKS:
            shutil.copyfile(Path(__file__).with_name(f"{name}.pt"), arguments.output / f"{name}.pt")
        return
    network = NETWORKS[arguments.network]()
    peak = 0.2 if arguments.network == "resnet" else 0.1
    right = train(network, arguments.data, arguments.epochs, peak=peak)
    network = network.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
    path = arguments.output / f"{arguments.network}.pt"
    compress.save(network, path, inputs=SIGNATURE, outputs=["logits"])
    print(f"{right:.2%} of the test images right; wrote {path}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
