"""Architectures of Hugging Face folders on their way: load, prune by a third, static INT8, pack, one request.

    python benchmarks/zoo.py [BERT ResNet …]

Each network is small and has random weights, so that figures tell what works, not what it is worth: INT8 answers are
held against the original's by cosine similarity on the data that it was calibrated with. One Triton then serves all
artifacts, and each is asked once; its answer is held against ONNX Runtime's on the same file. A refusal is printed as
it was told. MobileNetV3 is timm's, and passed over with the reason where timm is not installed. Behind the lines stands
the table of docs/compress.md. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as client
from zoo_models import TIMM, ZOO, write_data, write_folder

import compress
from compress import ExportOptions
from compress.artifact import Artifact
from compress.console.quiet import quiet
from compress.errors import ToolkitError
from compress.jobs.source import load_source
from compress.model import OnnxModel, sample_inputs
from compress.runtime.backends import OnnxBackend
from compress.runtime.machine import environment
from serve.pack.write import pack
from serve.triton.launch import Ports, TritonServer

SAMPLES = 32
THIRD = 1 / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names or list(ZOO)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = write_data(folder / "data", SAMPLES, seed=1)
        for number, name in enumerate(names):
            start = time.perf_counter()
            rows[name] = made(name, f"zoo_{number}", folder, data)
            rows[name]["seconds"] = round(time.perf_counter() - start, 1)
            print(f"{name:<18} {told(rows[name])}", flush=True)
        served = {name: row for name, row in rows.items() if not {"refused", "skipped"} & row.keys()}
        with TritonServer(folder / "models", ports=Ports(0, 0, 0)) as triton:
            for name, row in served.items():
                row["served_error"] = asked(triton.http_address, row["served_as"], folder)
                print(f"{name:<18} served; largest difference to ONNX Runtime {row['served_error']:.2g}", flush=True)
    whole = sum("served_error" in row for row in rows.values())
    print(table(rows))
    skipped = sum("skipped" in row for row in rows.values())
    print(f"{whole} of {len(rows) - skipped} end in a served model{f', {skipped} skipped' if skipped else ''}")
    print(json.dumps({"benchmark": "zoo", "environment": environment(1), "architectures": rows}))


def made(name: str, served_as: str, folder: Path, data: dict[str, Path]) -> dict[str, Any]:
    """One architecture up to its place in the model repository, or what refused it."""
    source, output = folder / f"{served_as}_source", folder / served_as
    row: dict[str, Any] = {"model": ZOO[name][2], "served_as": served_as}
    try:
        with warnings.catch_warnings(), quiet(verbose=False):
            warnings.simplefilter("ignore")
            try:
                part: Any = write_folder(name, source)
            except ImportError as err:
                return row | {"skipped": f"timm can't be imported ({err}): pip install -e '.[timm]'"}
            image = part == "image" or "Image" in ZOO[name][2] or ZOO[name][0] == TIMM
            kind = "audio" if "Whisper" in name else "image" if image else "text"
            asked_for = {"int8": "static", "calibration": str(data[kind]), "eval": str(data[kind]), "metric": "cosine"}
            options = ExportOptions(output=output, part=part, prune=THIRD, **asked_for)  # type: ignore[arg-type]
            try:
                row["layers"] = load_source(source, options).layered
                artifact, report = compress.export(source, options)
                row["pruned"] = report.gains["macs"]
            except ToolkitError as err:  # it may have nothing to prune, or not so much
                row["not_pruned"] = f"{err.what}: {err.why}"
                options = ExportOptions(output=output, part=part, **asked_for)  # type: ignore[arg-type]
                artifact, report = compress.export(source, options)
            last = report.stages[-1].measured
            row |= {"cosine": last.value, "smaller": report.gains["size"]}
            row["int8"] = report.stages[-1].did
            pack(artifact.folder, repository=folder / "models", name=served_as, text=False)
    except ToolkitError as err:
        row["refused"] = f"{err.what}; {err.why}; {err.mend}"
    return row


def told(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    if "refused" in row:
        return f"refused: {row['refused']}"
    pruned = f"{row['pruned']:.2f}× fewer MACs" if "pruned" in row else f"not pruned ({row['not_pruned'][:90]})"
    return f"{pruned}, {row['int8'][:60]}, cosine {row['cosine']:.3f}, packed ({row['seconds']} s)"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """What docs/compress.md has."""
    lines = ["| architecture | class | fewer MACs | INT8 | served |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        if "skipped" in row:
            continue
        pruned = f"{row['pruned']:.2f}×" if "pruned" in row else "not pruned"
        int8 = row.get("int8", "refused").partition(" in INT8")[0]
        lines.append(f"| {name} | {row['model']} | {pruned} | {int8} | {'yes' if 'served_error' in row else 'no'} |")
    return "\n".join(lines)


def asked(address: str, name: str, folder: Path) -> float:
    """One request of two samples to Triton: the largest difference from ONNX Runtime on the same file."""
    artifact = Artifact.load(folder / name)
    arrays = sample_inputs(artifact.signature, 2)
    wanted = OnnxBackend(OnnxModel(artifact.model_path, artifact.signature), 1).infer(arrays)
    inputs = []
    for spec in artifact.signature.inputs:
        given = client.InferInput(
            spec.name, list(arrays[spec.name].shape), "INT64" if spec.dtype == "int64" else "FP32"
        )
        given.set_data_from_numpy(arrays[spec.name])
        inputs.append(given)
    answer = client.InferenceServerClient(address).infer(name, inputs)
    return max(float(np.abs(answer.as_numpy(key) - value).max()) for key, value in wanted.items())


if __name__ == "__main__":
    main()
