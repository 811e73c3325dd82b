"""What `compress engine-script` puts behind the builder: the part of its script that runs.

Only the text below the mark goes into the script; above it is what the builder brings there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.tensorrt.build import BuildError, BuildOptions, Shapes, build, profiles_told

MODEL_SHA256 = ""
SETTINGS: dict[str, Any] = {}
# --- below, the script

import hashlib  # noqa: E402
import secrets  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402

TRTEXEC = ("trtexec", "/usr/src/tensorrt/bin/trtexec", "/opt/tensorrt/bin/trtexec")


def main(arguments: Sequence[str]) -> int:
    """Build; three lines and exit code 2 when that can't be done."""
    if len(arguments) != 2:
        print("usage: build_engine.py ARTIFACT OUTPUT", file=sys.stderr)
        return 2
    try:
        told = make(Path(arguments[0]), Path(arguments[1]))
    except BuildError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    for warning in told["warnings"]:
        print(f"! {warning}")
    print(f"TensorRT {told['tensorrt']}: {len(told['layers'])} layers, built in {told['seconds']:.0f} s")
    print(f"wrote {arguments[1]}: model.plan, engine.json, artifact.json")
    return 0


def make(artifact: Path, output: Path) -> dict[str, Any]:
    """Fill a folder beside the output with the engine and what `serve pack` wants to know, then rename it."""
    source = artifact / "model.onnx"
    again = "give the folder that `compress export` wrote, and this script was written for"
    if not source.is_file():
        raise BuildError(f"can't build from {artifact}", "there is no model.onnx in it", again)
    if hashlib.sha256(source.read_bytes()).hexdigest() != MODEL_SHA256:
        raise BuildError(f"can't build from {source}", "it is another file than this script was written for", again)
    if output.exists():
        raise BuildError(f"won't replace {output}", "it is there already", "name a new folder, or move it away")
    beside = output.with_name(f".{output.name}.{secrets.token_hex(4)}.part")  # nothing else has that name
    try:
        shutil.copytree(artifact, beside)
        data = _artifact(beside / "artifact.json", artifact, again)
        options = _options(output)
        trt = _tensorrt()
        if trt is not None:
            told = build(trt, source, beside / "model.plan", options, _show)
        else:
            told = _by_trtexec(source, beside / "model.plan", options)
        (beside / "engine.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        plan = hashlib.sha256((beside / "model.plan").read_bytes()).hexdigest()
        data.update(format="plan", model_file="model.plan", sha256=plan)
        (beside / "artifact.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        beside.replace(output)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return told


def _artifact(path: Path, artifact: Path, again: str) -> dict[str, Any]:
    """What artifact.json says: a table, without a key that stands twice, of whose values each reader takes another."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as err:
        raise BuildError(
            f"can't build from {artifact}", f"its artifact.json can't be read: {err.strerror}", again
        ) from err
    except (ValueError, RecursionError) as err:
        raise BuildError(f"can't build from {artifact}", f"its artifact.json is damaged: {err}", again) from err
    if not isinstance(data, dict):
        raise BuildError(f"can't build from {artifact}", "its artifact.json is damaged: it is no table", again)
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(name for at, name in enumerate(names[1:]) if name == names[at])
        raise ValueError(f"it has the key {twice[:60]!a} twice")
    return found


def _options(output: Path) -> BuildOptions:
    cache = SETTINGS["timing_cache"]
    return BuildOptions(**{**SETTINGS, "timing_cache": None if cache is None else output.parent / cache})


def _tensorrt() -> Any:
    try:
        import tensorrt  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return tensorrt


def _show(phase: str, done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r{phase}: {done}/{total}", end=end, file=sys.stderr, flush=True)


def _by_trtexec(source: Path, plan: Path, options: BuildOptions) -> dict[str, Any]:
    """The same by TensorRT's own program, where its Python package is missing."""
    programs = [found for name in TRTEXEC if (found := shutil.which(name))]
    if options.strip_weights:
        raise BuildError(
            "can't write an engine without its weights beside the whole one",
            "TensorRT's Python package is missing, and trtexec writes the one or the other",
            "pip install tensorrt of the release that serves, or leave --strip-weights out",
        )
    if not programs:
        raise BuildError(
            "can't build an engine here",
            "there is neither TensorRT's Python package nor trtexec",
            "run this in NVIDIA's Triton or TensorRT container, or pip install tensorrt of the release that serves",
        )
    layers = plan.with_name("layers.json")
    began = time.monotonic()
    call = [programs[0], f"--onnx={source}", f"--saveEngine={plan}", "--stronglyTyped", "--skipInference"]
    call += ["--profilingVerbosity=detailed", f"--exportLayerInfo={layers}", *_flags(options)]
    run = subprocess.run(call, capture_output=True, text=True, check=False)
    if run.returncode or not plan.is_file():
        lines = [line for line in (run.stdout + run.stderr).splitlines() if "[E]" in line]
        raise BuildError(
            f"trtexec can't build an engine from {source}",
            (lines or ["it gives no reason"])[0],
            "`compress lint --target tensorrt` tells which nodes TensorRT does not take",
        )
    told = json.loads(layers.read_text(encoding="utf-8")) if layers.is_file() else {}
    layers.unlink(missing_ok=True)
    mark = "TensorRT version:"
    said = [line.rpartition(mark)[2].strip() for line in run.stdout.splitlines() if mark in line]
    return {
        "tensorrt": said[0] if said else "?",
        "profiles": profiles_told(options),
        "layers": told.get("Layers", []),
        "version_compatible": options.version_compatible,
        "hardware_compatibility": options.hardware_compatibility,
        "warnings": [],
        "seconds": time.monotonic() - began,
    }


def _flags(options: BuildOptions) -> list[str]:
    levels = {"ampere-plus": "ampere+", "same-compute-capability": "sameComputeCapability"}
    flags = []
    for number, profile in enumerate(options.profiles):
        flags += [f"--profile={number}"] if len(options.profiles) > 1 else []
        flags += [f"--{kind}Shapes={_shapes(profile, at)}" for at, kind in enumerate(("min", "opt", "max"))]
    if options.optimization_level is not None:
        flags.append(f"--builderOptimizationLevel={options.optimization_level}")
    if options.workspace_bytes is not None:
        flags.append(f"--memPoolSize=workspace:{options.workspace_bytes}B")
    if options.timing_cache is not None:
        flags.append(f"--timingCacheFile={options.timing_cache}")
    if options.hardware_compatibility is not None:
        flags.append(f"--hardwareCompatibilityLevel={levels[options.hardware_compatibility]}")
    named = (("versionCompatible", options.version_compatible), ("refit", options.refit),
             )  # fmt: skip
    return flags + [f"--{name}" for name, given in named if given]


def _shapes(profile: Shapes, at: int) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, shapes[at]))}" for name, shapes in sorted(profile.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
