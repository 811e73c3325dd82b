"""`compress measure`: models of any kind side by side, on the CPU or a GPU."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from compress.data.dataset import Dataset
from compress.data.sizes import batches_of, typical_inputs
from compress.errors import StageError, ToolkitError, first_line
from compress.evaluate.answers import Likeness, likeness
from compress.jobs.branch import Silent
from compress.jobs.measured_apart import beyond, computed_differently
from compress.jobs.measured_models import backends_of, names_of, one_signature, opened, sized
from compress.model import Arrays, TorchModel
from compress.options import MeasureOptions
from compress.options.ranges import check_ranges
from compress.pipeline import Watcher, hashing_shown
from compress.runtime.backends import Backend
from compress.runtime.backends.onnxrt_device import OnnxDeviceBackend
from compress.runtime.device import accelerator, described, elapsed_ms
from compress.runtime.latency import MOST, Latency, Turns, interleave, latency, ratio
from compress.runtime.machine import environment

__all__ = ["Figure", "Measurement", "measure_files", "time_in_turns"]

BLOCK_MS = 30.0
CALLS = (5, 200)  # of a block
LONGEST_BLOCK_MS = 300.0


@runtime_checkable
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
        p50_ms, p99_ms: of a call; on a GPU without copies to and from it, on the CPU as `compress export` times it.
        throughput: samples a second, from the median.
        over_first: how many times as fast as the first model at the same batch.
        cosine_similarity, max_abs_error: against the first model's outputs; the least, and the largest.
        not_finite: of `looked_at` samples, those for which an output holds NaN or infinity: as unlike as can be.
        compared: samples of the data that these are over; 0 for the timed inputs, where these are random.
        p50_low_ms, p50_high_ms, over_first_low, over_first_high: ends of 95% intervals; None with too few rounds.
        differs: whether its answers to the timed inputs, or with the first batch to a sample of more that varies, are
            other ones than ONNX Runtime's by the same file, beyond what rounding explains.
        apart: by how much, if so: RMS of the difference as a share of ONNX Runtime's; None where it is no number.
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
    p50_low_ms: float | None = None
    p50_high_ms: float | None = None
    over_first_low: float | None = None
    over_first_high: float | None = None
    compared: int = 0
    not_finite: int = 0
    looked_at: int = 0
    differs: bool = False
    apart: float | None = None


@dataclass(frozen=True)
class Measurement:
    """All figures, and what they were taken on.

    Attributes:
        environment: machine and versions.
        figures: by model and batch.
        providers: what ONNX Runtime was asked for, by model.
        sizes: of dimensions other than the batch that vary: `size`, and its `source`.
        turns: why measuring ended, by batch.
        shapes: of the inputs, by batch.
        data: whose samples were the inputs; None where these were random.
        assumed: of the models' files, in words.
        not_run: models that an installed runtime does not run, each with why.
    """

    environment: Mapping[str, str | int]
    figures: tuple[Figure, ...]
    providers: Mapping[str, Any]
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    turns: Mapping[int, str] = field(default_factory=dict)
    shapes: Mapping[int, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    data: str | None = None
    assumed: tuple[str, ...] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


def measure_files(
    paths: Sequence[Path],
    options: MeasureOptions,
    watcher: Watcher | None = None,
) -> Measurement:
    """Run models on the same inputs, in turns, and time them.

    Args:
        paths: artifacts, ONNX files or model files of torch; all of one signature.
        options: on what, and how.
        watcher: is told how data is read, how answers are compared on it, and of rounds; by default nobody is.

    Raises:
        ToolkitError: a file can't be read, or can't run there.
    """
    check_ranges(options, rounds=(1, 1 << 20))
    watcher = watcher or Silent()
    device = accelerator() if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    models = dict(zip(names_of(paths), (opened(path, options) for path in paths), strict=True))
    not_run: dict[str, str] = {}
    makers = (getattr(model, "processor", None) for model in models.values())
    processor = next((maker for maker in makers if maker is not None), None)
    with hashing_shown(watcher):
        signature, data = sized(one_signature(models), options, processor)
    on = {key: dict(backends_of(key, model, device, options, signature, not_run)) for key, model in models.items()}
    backends = {name: backend for each in on.values() for name, backend in each.items()}
    figures: list[Figure] = []
    turns: dict[int, str] = {}
    shapes: dict[int, dict[str, list[int]]] = {}
    batches = batches_of(signature, options.batches)
    answering = {name: functools.partial(_answers, name, backend) for name, backend in backends.items()}
    alike = {
        batch: likeness(answering, typical_inputs(signature, data, batch), data, batch, _samples_told(watcher, data))
        for batch in batches
    }
    progress = watcher.started("measure")
    for nth, batch in enumerate(batches):

        def tick(done: int, total: int, nth: int = nth) -> None:
            progress(nth * total + done, len(batches) * total, "rounds")

        inputs = typical_inputs(signature, data, batch)
        if device.type == "cpu":  # as the report of an export does, so that the ratios of both agree
            times = latency(backends, inputs, rounds=options.rounds, progress=tick)
        else:
            there = {name: backend for name, backend in backends.items() if isinstance(backend, Prepares)}
            times = time_in_turns(there, inputs, options.rounds, tick)
        some = [[inputs], *([] if nth else ([each] for each in beyond(signature, data, on)))]
        apart = computed_differently(models, on, some) if device.type == "cpu" else {}
        figures += _figures(batch, backends, times, alike[batch], apart)
        turns[batch] = times.told
        shapes[batch] = {name: list(values.shape) for name, values in inputs.items()}
    found = {
        name: backend.provider_options for name, backend in backends.items() if isinstance(backend, OnnxDeviceBackend)
    }
    return Measurement(
        {**environment(options.threads), **described(device)},
        tuple(figures),
        found,
        signature.sizes_told,
        turns,
        shapes,
        options.data,
        tuple(model.assumed for model in models.values() if isinstance(model, TorchModel) and model.assumed),
        not_run,
    )


def _samples_told(watcher: Watcher, data: Dataset | None) -> Callable[[int, int], None]:
    """Of samples that answers are compared on."""
    if data is None:
        return lambda _done, _total: None
    progress = watcher.started("compare")
    return lambda done, total: progress(done, total, "samples")


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
    backends: Mapping[str, Prepares],
    inputs: Arrays,
    rounds: int = MOST,
    tick: Callable[[int, int], None] = lambda _done, _total: None,
) -> Turns:
    """Time every model: in each round all take a block of calls, in a new random order.

    Args:
        backends: by name, all on one device; the others are compared with the first.
        inputs: one batch.
        rounds: blocks for each at most; fewer where the intervals are narrow earlier.
        tick: is told rounds done and in all after each round.
    """
    blocks = {name: _block(backend.prepared(inputs), backend.stream) for name, backend in backends.items()}
    return interleave(blocks, rounds=rounds, progress=tick)


def _block(work: Callable[[], Any], stream: Any) -> Callable[[], list[float]]:
    calls = _calls(work, stream)

    def block() -> list[float]:
        elapsed_ms(work, stream, max(2, calls // 10) if calls >= CALLS[0] else 1)
        return elapsed_ms(work, stream, calls)

    return block


def _figures(
    batch: int,
    backends: Mapping[str, Backend],
    times: Mapping[str, Latency],
    alike: Mapping[str, Likeness],
    apart: Mapping[str, float],
) -> Iterator[Figure]:
    first = next(iter(backends))
    for name, backend in backends.items():
        took = times[name]
        over = ratio(times[first].rounds_ms, took.rounds_ms)
        assert over is not None  # noqa: S101  all took the same rounds
        yield Figure(
            model=name,
            runtime=backend.runtime,
            batch=batch,
            p50_ms=took.p50_ms,
            p50_low_ms=took.low_ms,
            p50_high_ms=took.high_ms,
            p99_ms=took.p99_ms,
            throughput=1000 * batch / took.p50_ms,
            over_first=over.value,
            over_first_low=over.low,
            over_first_high=over.high,
            cosine_similarity=alike[name].cosine_similarity,
            max_abs_error=alike[name].max_abs_error,
            compared=alike[name].samples,
            not_finite=alike[name].not_finite,
            looked_at=alike[name].looked_at,
            differs=name in apart,
            apart=apart[name] if math.isfinite(apart.get(name, math.inf)) else None,
            cpu_nodes=backend.cpu_nodes if isinstance(backend, OnnxDeviceBackend) else {},
        )


def _calls(work: Callable[[], Any], stream: Any) -> int:
    """Calls of a block: 30 ms of them, 5 to 200; of a call so long that 5 take over 0.3 s, fewer."""
    elapsed_ms(work, stream, 1)  # which may compile
    once = max(elapsed_ms(work, stream, 1)[0], 1e-3)
    if once < LONGEST_BLOCK_MS:
        elapsed_ms(work, stream, 2)
        once = max(min(elapsed_ms(work, stream, 3)), 1e-3)
    fewest = max(1.0, min(CALLS[0], LONGEST_BLOCK_MS / once))
    return int(min(CALLS[1], max(fewest, BLOCK_MS / once)))
