"""Build a TensorRT engine from an ONNX file. Needs the standard library and TensorRT's Python package, 10 or 11.

`compress engine-script` puts this very file into the script that it writes: nothing of this project is imported here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BuildError", "BuildOptions", "Shapes", "build", "profiles_told"]

Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]  # smallest, best and largest, by input
Progress = Callable[[str, int, int], None]


class BuildError(Exception):
    """What failed, why, and how to mend it."""

    def __init__(self, what: str, why: str, mend: str) -> None:
        super().__init__(f"{what}\n  why:  {why}\n  mend: {mend}")
        self.what, self.why, self.mend = what, why, mend


@dataclass(frozen=True)
class BuildOptions:
    """How TensorRT builds.

    Attributes:
        profiles: for each optimization profile, the smallest, best and largest shape of each input that varies.
        optimization_level: 0 (fastest build) to 5 (fastest engine); None is TensorRT's own choice.
        workspace_bytes: the most device memory that a layer may work with; None is no limit of ours.
        timing_cache: a file that keeps what was timed; made if missing.
        version_compatible: the engine also runs in later releases of the same major version.
        hardware_compatibility: "ampere-plus" or "same-compute-capability"; None is this GPU model alone.
        refit: the weights can be replaced later.
        strip_weights: besides the engine, write one without its weights.
    """

    profiles: tuple[Shapes, ...] = ()
    optimization_level: int | None = None
    workspace_bytes: int | None = None
    timing_cache: Path | None = None
    version_compatible: bool = False
    hardware_compatibility: str | None = None
    refit: bool = False
    strip_weights: bool = False


def build(
    trt: Any, source: Path, plan: Path, options: BuildOptions, progress: Progress = lambda _phase, _done, _all: None
) -> dict[str, Any]:
    """Build an engine and write it, whole or not at all.

    Args:
        trt: the module `tensorrt`.
        source: an ONNX file; its own types decide the precisions (the network is strongly typed).
        plan: is written; with `strip_weights` also PLAN.stripped.
        options: how.
        progress: is told a phase, its steps done and in all.

    Returns:
        What the engine is, as JSON values: "tensorrt" (the release), "profiles", "inputs", "outputs", "layers" (as
        TensorRT's inspector has them), "device_memory_bytes", "warnings", "seconds".

    Raises:
        BuildError: TensorRT refuses the file or the options.
        KeyboardInterrupt: the build was interrupted.
    """
    warnings: list[str] = []
    started = time.monotonic()
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = _network(trt, builder, logger, source)
    config = builder.create_builder_config()
    _configure(trt, config, options)
    _profiles(builder, config, options.profiles)
    _load_timing_cache(config, options.timing_cache, warnings)
    monitor = _monitor(trt, progress)
    config.progress_monitor = monitor
    made = builder.build_serialized_network(network, config)
    if made is None:
        if monitor.interrupted:
            raise KeyboardInterrupt
        raise BuildError(
            f"TensorRT can't build an engine from {source}",
            "it gave none; what it logged above says why",
            "run `compress lint --target tensorrt` on the file, allow more --workspace-mb, or another --dims range",
        )
    _keep_timing_cache(config, options.timing_cache)
    runtime = trt.Runtime(logger)
    # A version-compatible engine brings a runtime of its own, which is code that runs on the host.
    runtime.engine_host_code_allowed = options.version_compatible
    engine = runtime.deserialize_cuda_engine(made)
    if engine is None:
        raise BuildError(
            "TensorRT can't load the engine that it built",
            "what it logged above says why",
            "build it on a GPU of the kind that will serve it",
        )
    if options.strip_weights:
        _write(plan.with_name(plan.name + ".stripped"), _stripped(trt, engine))
    _write(plan, made)
    told = _told(trt, engine, options)
    return told | {"warnings": warnings, "seconds": time.monotonic() - started}


def _network(trt: Any, builder: Any, logger: Any, source: Path) -> Any:
    # By name: the number behind it is another in each major version.
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(str(source)):
        return network
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    told = "; ".join(f"{error.node_operator()} {error.node_name()}: {error.desc()}" for error in errors[:3])
    raise BuildError(
        f"TensorRT can't read {source}",
        told or "its parser gives no reason",
        "`compress lint --target tensorrt` tells which nodes it does not take",
    )


def _configure(trt: Any, config: Any, options: BuildOptions) -> None:
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if options.hardware_compatibility is not None:
        name = options.hardware_compatibility.upper().replace("-", "_")
        level = getattr(trt.HardwareCompatibilityLevel, name, None)
        if level is None:
            raise BuildError(
                f"can't build for hardware {options.hardware_compatibility}",
                f"TensorRT {trt.__version__} does not know that level",
                "leave --hardware-compatibility out, or take ampere-plus",
            )
        config.hardware_compatibility_level = level
    if options.refit:
        config.set_flag(trt.BuilderFlag.REFIT)
    elif options.strip_weights:  # the same weights come back, so that nothing is lost by their being replaceable
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)


def _profiles(builder: Any, config: Any, profiles: tuple[Shapes, ...]) -> None:
    for number, shapes in enumerate(profiles):
        profile = builder.create_optimization_profile()
        for name in sorted(shapes):
            profile.set_shape(name, *shapes[name])
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(
                f"TensorRT refuses profile {number}",
                "; ".join(f"{name}: {shapes[name]}" for name in sorted(shapes)),
                "the smallest shape must not be above the best, nor the best above the largest",
            )


def _load_timing_cache(config: Any, path: Path | None, warnings: list[str]) -> None:
    if path is None:
        return
    kept = path.read_bytes() if path.exists() else b""
    cache = config.create_timing_cache(kept)
    if cache is not None and config.set_timing_cache(cache, False):
        return
    warnings.append(
        f"The timing cache {path} is of another TensorRT or GPU: everything is timed again, and it is replaced."
    )
    config.set_timing_cache(config.create_timing_cache(b""), False)


def _keep_timing_cache(config: Any, path: Path | None) -> None:
    cache = config.get_timing_cache() if path is not None else None
    if path is not None and cache is not None:
        _write(path, cache.serialize())


def _monitor(trt: Any, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Tells how far the outermost phase is; Ctrl-C ends the build."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interrupted = False
            self._phases: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._phases[phase_name] = num_steps
                progress(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                if phase_name in self._phases:
                    progress(phase_name, step + 1, self._phases[phase_name])
            except KeyboardInterrupt:  # TensorRT wants no exception; it ends when told False
                self.interrupted = True
            return not self.interrupted

        def phase_finish(self, phase_name: str) -> None:
            if phase_name in self._phases:
                steps = self._phases.pop(phase_name)
                progress(phase_name, steps, steps)

    return Monitor()


def _stripped(trt: Any, engine: Any) -> Any:
    config = engine.create_serialization_config()
    config.set_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)
    return engine.serialize_with_config(config)


def _write(path: Path, data: Any) -> None:
    """Beside, then renamed: an older file stays until the new one is whole.

    By hand, as this file goes to machines without this package. What waits under the name may be a link: not followed.
    """
    beside = path.with_name(f".{path.name}.part")
    beside.unlink(missing_ok=True)
    try:
        with beside.open("xb") as file:
            file.write(memoryview(data))
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def profiles_told(options: BuildOptions) -> list[dict[str, list[list[int]]]]:
    """The profiles as JSON values."""
    return [
        {name: [list(shape) for shape in shapes] for name, shapes in profile.items()} for profile in options.profiles
    ]


def _told(trt: Any, engine: Any, options: BuildOptions) -> dict[str, Any]:
    tensors: dict[str, dict[str, Any]] = {"inputs": {}, "outputs": {}}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        side = "inputs" if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else "outputs"
        kind = str(engine.get_tensor_dtype(name)).rpartition(".")[2]
        tensors[side][name] = {"dtype": kind, "shape": [int(size) for size in engine.get_tensor_shape(name)]}
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return {
        "tensorrt": str(trt.__version__),
        "profiles": profiles_told(options),
        **tensors,
        "layers": json.loads(text).get("Layers", []),
        "device_memory_bytes": int(engine.device_memory_size_v2),
        "version_compatible": options.version_compatible,
        "hardware_compatibility": options.hardware_compatibility,
    }
