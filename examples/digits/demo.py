"""The main job on real images: train, compress, pack, serve, ask, load-test, stop. `make demo` runs it.

    python examples/digits/demo.py [FOLDER]      # build/demo by default

Each step is a command that a user could type; the demo types it and checks what came of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
STEPS = 7
TURNS, MOST_TURNS = 3, 5
INVALID = 4  # of `serve load`: this machine had too much else to do
NAMES = ("digits_original", "digits")
console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo")
    started = time.perf_counter()
    artifact, original, repository = folder / "artifact", folder / "original", folder / "model_repository"

    step(1, "train a small residual network on 1,169 handwritten digits")
    run("python", HERE / "train.py", folder)

    step(2, "prune 70% of the multiply-accumulates, recover, quantize, export; and the original as it is, to compare")
    run(
        "compress", "export", folder / "model.pt", "--prune", "0.7", "--finetune", "train.npz", "--int8", "auto",
        "--calibration", "calibration.npz", "--eval", "eval.npz", "-o", artifact,
    )  # fmt: skip
    run("compress", "export", folder / "model.pt", "-o", original, "--eval", "eval.npz", quiet=True)

    step(3, "pack both into a Triton model repository, with hooks from image file to label")
    for source, name in ((artifact, "digits"), (original, "digits_original")):
        run("serve", "pack", source, "--repository", repository, "--name", name, "--hooks", HERE / "hooks.py")

    step(4, "start Triton and the gateway")
    ports = free_ports(4)
    with server(repository, ports) as url:
        step(5, "ask the gateway")
        images, labels = evaluation(folder / "eval.npz")
        (folder / "digit.png").write_bytes(images[0])
        run("serve", "infer", folder / "digit.png", "--model", "digits", "--url", url)
        console.print(f"  the image shows a {labels[0]}")
        served = accuracy(url, images, labels)
        own = json.loads((artifact / "report.json").read_text())["stages"][-1]["measured"]["accuracy"]
        console.print(
            f"  accuracy through the gateway over {len(images)} images: {served:.2%}; the artifact's own: {own:.2%}"
        )
        if served != own:
            sys.exit("the answers through the gateway are not those of the artifact")

        step(6, "load-test it, then take turns with the original")
        run(
            "serve",
            "load",
            url,
            "--model",
            "digits",
            "--concurrency",
            "16",
            "--duration",
            "5",
            "--output",
            folder / "load.json",
            folder / "load.html",
        )
        loads = take_turns(url, folder)

        step(7, "stop")
    left = [port for port in ports if not is_free(port)]
    if left:
        sys.exit(f"something still listens on {left}")
    console.print("  no process is left, and the ports are free")
    summary(artifact, loads)
    console.print(f"report: {artifact / 'report.html'}   whole demo: {time.perf_counter() - started:.0f} s")


def step(number: int, what: str) -> None:
    console.print(f"\n[bold cyan]\\[{number}/{STEPS}][/] [bold]{what}[/]")


def run(*words: str | Path, quiet: bool = False) -> None:
    """Run a command of this environment; end the demo if it fails."""
    command = [str(word) for word in words]
    console.print(f"[dim]$ {shlex.join(command)}[/]")
    program = [sys.executable] if command[0] == "python" else [sys.executable, "-m", command[0]]
    done = subprocess.run([*program, *command[1:]], capture_output=quiet, text=True, check=False)
    busy = command[:2] == ["serve", "load"] and done.returncode == INVALID  # it says so, and the turns tell how sure
    if done.returncode and not busy:
        sys.exit(f"{shlex.join(command)} failed\n{done.stderr or ''}")


@contextlib.contextmanager
def server(repository: Path, ports: list[int]) -> Iterator[str]:
    """`serve up` in the background, until the block ends."""
    flags = ["--port", "--triton-http-port", "--triton-grpc-port", "--triton-metrics-port"]
    words = [
        "up",
        str(repository),
        *(word for flag, port in zip(flags, ports, strict=True) for word in (flag, str(port))),
    ]
    console.print(f"[dim]$ {shlex.join(['serve', *words])}[/]")
    process = subprocess.Popen([sys.executable, "-m", "serve", *words])
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        while not ready(url):
            if process.poll() is not None:
                sys.exit("serve up has ended")
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    if process.returncode:
        sys.exit(f"serve up ended with code {process.returncode}")


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:  # noqa: S310  loopback
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def evaluation(path: Path) -> tuple[list[bytes], list[int]]:
    """The evaluation images as PNG files, and their labels."""
    with np.load(path) as data:
        pixels = np.rint(data["image"][:, 0] * 255).astype(np.uint8)
        labels = data["label"].tolist()
    files = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        files.append(file.getvalue())
    return files, labels


def accuracy(url: str, images: list[bytes], labels: list[int]) -> float:
    right = 0
    for image, label in zip(images, labels, strict=True):
        request = urllib.request.Request(f"{url}/predict/digits", image, {"Content-Type": "image/png"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  loopback
            right += json.load(answer)["outputs"]["label"] == str(label)
    return right / len(images)


def take_turns(url: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Load tests of each model, in turns, so that the machine's moods hit both; more of them while they disagree."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    while len(runs[NAMES[0]]) < TURNS or (len(runs[NAMES[0]]) < MOST_TURNS and not agreed(ratios(runs))):
        for name in NAMES:
            path = folder / f"load-{name}-{len(runs[name]) + 1}.json"
            words: list[str | Path] = ["--concurrency", "16", "--duration", "2", "--warmup", "0.5", "--output", path]
            run("serve", "load", url, "--model", name, *words, quiet=True)
            runs[name].append(json.loads(path.read_text())["runs"][0])
            console.print(
                f"  {runs[name][-1]['throughput']:,.0f} answers/s, {sum(runs[name][-1]['errors'].values())} errors"
            )
    return runs


def ratios(runs: dict[str, list[dict[str, Any]]]) -> list[float]:
    """Throughput after, as a multiple of that before, turn by turn."""
    return [after["throughput"] / before["throughput"] for before, after in zip(*runs.values(), strict=True)]


def agreed(found: list[float]) -> bool:
    """Whether all turns say the same of which is faster."""
    return min(found) > 1 or max(found) < 1


def summary(artifact: Path, loads: dict[str, list[dict[str, Any]]]) -> None:
    report = json.loads((artifact / "report.json").read_text())
    rows = {stage["stage"]: stage["measured"] for stage in report["stages"]}
    eager, onnx, last = rows["original"], rows["original_onnx"], report["stages"][-1]["measured"]
    table = Table(title="\nbefore → after, all measured by this run", title_justify="left")
    for heading in ("", "before", "after", "gain"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    table.add_row("size of the ONNX file", *pair(onnx, last, "size_bytes", "{:,} B"))
    table.add_row("multiply-accumulates", *pair(eager, last, "macs", "{:,}"))
    table.add_row("latency, torch eager → the artifact", *pair(eager, last, "latency_p50_ms", "{:.3f} ms"))
    table.add_row("latency, ONNX as it was → the artifact", *pair(onnx, last, "latency_p50_ms", "{:.3f} ms"))
    points = 100 * (last["accuracy"] - eager["accuracy"])
    table.add_row("accuracy", f"{eager['accuracy']:.2%}", f"{last['accuracy']:.2%}", f"{points:+.1f} points")
    found = ratios(loads)
    gain = f"{statistics.median(found):.2f}× ({min(found):.2f} to {max(found):.2f})"
    gain += "" if agreed(found) else ", within noise"
    rates = [statistics.median(load["throughput"] for load in loads[name]) for name in NAMES]
    p50 = [statistics.median(load["latency"]["percentiles_ms"]["p50"] for load in loads[name]) for name in NAMES]
    turns = f"{len(found)} turns"
    table.add_row(f"throughput, image to label, 16 clients, {turns}", *(f"{rate:,.0f}/s" for rate in rates), gain)
    table.add_row("  its p50", *(f"{each:.1f} ms" for each in p50), "" if not agreed(found) else ratio(*p50))
    console.print(table)


def pair(before: dict[str, Any], after: dict[str, Any], name: str, form: str) -> tuple[str, str, str]:
    return form.format(before[name]), form.format(after[name]), ratio(before[name], after[name], 1)


def ratio(before: float, after: float, digits: int = 2) -> str:
    return f"{before / after:.{digits}f}×"


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "120")
    main()
