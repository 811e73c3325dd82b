"""`compress measure`: models of any kind side by side, on the CPU or a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from compress.artifact import Artifact, Signature
from compress.backends import Backend
from compress.backends.onnxrt_device import OnnxDeviceBackend, ProviderOptions
from compress.backends.pytorch_device import TorchDeviceBackend
from compress.checkpoint import load
from compress.compare import max_abs_error
from compress.dataset import Dataset
from compress.device import accelerator, described, elapsed_ms
from compress.engine.profiles import ranges_of
from compress.errors import RecipeError, StageError, ToolkitError, first_line
from compress.machine import environment
from compress.metrics import cosine_similarity
from compress.model import Arrays, EngineModel, Model, OnnxModel, TorchModel, in_float32
from compress.onnx_input import signature_of_onnx, vetted_onnx
from compress.options import MeasureOptions
from compress.signature import parse_sizes
from compress.sizes import sizes_in, typical_inputs

__all__ = ["Figure", "Measurement", "measure_files", "signature_of_onnx", "time_in_turns"]

BLOCK_MS = 30.0
CALLS = (5, 200)  # of a block


class Prepares(Backend, Protocol):
    """A model on a device."""

    @property
    def stream(self) -> Any:
        """What its work is enqueued on; None on the CPU."""

    def prepared(self, inputs: Arrays) -> Callable[[], Any]:
        """What runs it once on these inputs."""


@dataclass(frozen=True)
class Figure:
    """One model at one batch size.

    Attributes:
        model, runtime: what ran, and on what.
        batch: samples in a call.
        p50_ms, p99_ms: of a call, without copies to and from the device.
        throughput: samples a second, from the median.
        over_first: how many times as fast as the first model at the same batch.
        cosine_similarity, max_abs_error: against the first model's outputs; the least, and the largest.
        cpu_nodes: of an ONNX file on a GPU: how many nodes of each kind the CPU runs all the same.
    """

    model: str
    runtime: str
    batch: int
    p50_ms: float
    p99_ms: float
    throughput: float
    over_first: float
    cosine_similarity: float
    max_abs_error: float
    cpu_nodes: Mapping[str, int]


@dataclass(frozen=True)
class Measurement:
    """All figures, and what they were taken on.

    Attributes:
        environment: machine and versions.
        figures: by model and batch.
        providers: what ONNX Runtime was asked for, by model.
        sizes: of dimensions other than the batch that vary: `size`, and its `source`.
    """

    environment: Mapping[str, str | int]
    figures: tuple[Figure, ...]
    providers: Mapping[str, Any]
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


def measure_files(
    paths: Sequence[Path],
    options: MeasureOptions,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Measurement:
    """Run models on the same inputs, in turns, and time them.

    Args:
        paths: artifacts, ONNX files or model files of torch; all of one signature.
        options: on what, and how.
        progress: is told rounds done and in all.

    Raises:
        ToolkitError: a file can't be read, or can't run there.
    """
    device = accelerator() if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    models = dict(zip(_names(paths), (_opened(path, options) for path in paths), strict=True))
    signature, data = _sized(_one_signature(models), options)
    backends = {
        name: backend for key, model in models.items() for name, backend in _backends(key, model, device, options)
    }
    figures: list[Figure] = []
    total = len(options.batches) * options.rounds
    ticks = itertools.count(1)

    def tick() -> None:
        progress(next(ticks), total)

    for batch in options.batches:
        inputs = typical_inputs(signature, data, batch)
        outputs = {name: _answers(name, backend, inputs) for name, backend in backends.items()}
        times = time_in_turns(backends, inputs, options.rounds, tick)
        figures += _figures(batch, backends, times, outputs)
    found = {
        name: backend.provider_options for name, backend in backends.items() if isinstance(backend, OnnxDeviceBackend)
    }
    return Measurement(
        {**environment(options.threads), **described(device)}, tuple(figures), found, signature.sizes_told
    )


def _answers(name: str, backend: Backend, inputs: Arrays) -> Arrays:
    try:
        return backend.infer(inputs)
    except ToolkitError:
        raise
    except Exception as err:  # ONNX Runtime's own exception classes have no common base but this; torch has many
        shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in inputs.items())
        raise StageError(
            f"{name} does not run on {shapes}",
            why=first_line(err)[:300],
            mend="give dimensions that vary a size that it takes, as in --size seq=128, or --data",
        ) from err


def time_in_turns(
    backends: Mapping[str, Prepares], inputs: Arrays, rounds: int, tick: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Milliseconds of every call of every model: in each round all take a block, in a new random order.

    Args:
        backends: by name, all on one device.
        inputs: one batch.
        rounds: blocks for each.
        tick: is called after each round.
    """
    works = {name: backend.prepared(inputs) for name, backend in backends.items()}
    times: dict[str, list[float]] = {name: [] for name in backends}
    order, shuffle = list(backends), random.Random(0)  # noqa: S311  an order, not a secret
    calls = {name: _calls(work, backends[name].stream) for name, work in works.items()}
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            elapsed_ms(works[name], backends[name].stream, max(2, calls[name] // 10))
            times[name] += elapsed_ms(works[name], backends[name].stream, calls[name])
        tick()
    return times


def _figures(
    batch: int, backends: Mapping[str, Prepares], times: Mapping[str, Sequence[float]], outputs: Mapping[str, Arrays]
) -> Iterator[Figure]:
    first = next(iter(backends))
    medians = {name: float(np.percentile(taken, 50)) for name, taken in times.items()}
    for name, backend in backends.items():
        got = dict(zip(outputs[first], outputs[name].values(), strict=True))  # names may differ, the order does not
        yield Figure(
            model=name,
            runtime=backend.runtime,
            batch=batch,
            p50_ms=medians[name],
            p99_ms=float(np.percentile(times[name], 99)),
            throughput=1000 * batch / medians[name],
            over_first=medians[first] / medians[name],
            cosine_similarity=min(
                float(np.min(cosine_similarity(expected, got[key]))) for key, expected in outputs[first].items()
            ),
            max_abs_error=max_abs_error(outputs[first], got),
            cpu_nodes=backend.cpu_nodes if isinstance(backend, OnnxDeviceBackend) else {},
        )


def _calls(work: Callable[[], Any], stream: Any) -> int:
    elapsed_ms(work, stream, 3)
    once = max(min(elapsed_ms(work, stream, 3)), 1e-3)
    return int(min(CALLS[1], max(CALLS[0], BLOCK_MS / once)))


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-parts:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise RecipeError("can't tell the models apart", why="a path is given twice", mend="give each once")


def _opened(path: Path, options: MeasureOptions) -> Model:
    if path.is_dir():
        artifact = Artifact.load(path)
        if artifact.format == "plan":
            return EngineModel(artifact.model_path, artifact.signature)
        return OnnxModel(vetted_onnx(artifact.model_path), artifact.signature)
    if path.suffix == ".onnx":
        return OnnxModel(path, signature_of_onnx(path))
    return in_float32(load(path, inputs=options.input, model=options.model, trust=options.trust, sizes=options.size))


def _one_signature(models: Mapping[str, Model]) -> Signature:
    (first, model), *others = models.items()
    for name, other in others:
        if [(s.dtype, s.shape) for s in other.signature.inputs] != [(s.dtype, s.shape) for s in model.signature.inputs]:
            raise RecipeError(
                f"can't measure {name} beside {first}",
                why=f"it takes {', '.join(map(str, other.signature.inputs))}, the other "
                f"{', '.join(map(str, model.signature.inputs))}",
                mend="measure models of one signature",
            )
    return model.signature


def _backends(name: str, model: Model, device: torch.device, options: MeasureOptions) -> Iterator[tuple[str, Prepares]]:
    """What a model runs on: torch once or twice, an ONNX file once for each provider."""
    if isinstance(model, TorchModel):
        yield f"{name} (torch)", TorchDeviceBackend(model, device)
        if options.compile:
            yield f"{name} (compiled)", TorchDeviceBackend(model, device, compiled=True)
    elif isinstance(model, EngineModel):
        if device.type == "cpu":
            raise StageError(
                f"can't measure {name} on the CPU", why="it is a TensorRT engine", mend="add --device cuda"
            )
        from compress.backends.trt import TrtBackend

        yield name, TrtBackend(model)
    else:
        chosen: Sequence[Literal["cpu", "cuda", "tensorrt"]] = options.provider if device.type == "cuda" else ("cpu",)
        for provider in chosen:
            asked = ProviderOptions(provider, options.cuda_graphs, options.tf32, options.engine_cache, options.threads)
            yield f"{name} ({provider})" if len(options.provider) > 1 else name, OnnxDeviceBackend(model, asked)


def _sized(signature: Signature, options: MeasureOptions) -> tuple[Signature, Dataset | None]:
    """With the sizes that are asked for, else those of the data, else those of the first model's file; and the data.

    Raises:
        RecipeError: the data is of another size than is asked for.
    """
    asked = parse_sizes(options.size)
    asked |= {name: sizes[1] for name, sizes in ranges_of(options.dims).items() if name not in signature.batches}
    data = None if options.data is None else Dataset.open(options.data, signature)
    held = {} if data is None else sizes_in(data, signature)
    for dim, size in asked.items():
        if held.get(dim, size) != size:
            raise RecipeError(
                f"can't measure {options.data} at {dim} = {size}",
                why=f"its samples have {dim} = {held[dim]}",
                mend="leave --size and --dims out, or --data for random inputs",
            )
    return signature.sized(held, "from the data").sized(asked), data
