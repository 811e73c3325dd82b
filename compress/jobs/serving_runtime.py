"""The finished file on ONNX Runtime and on OpenVINO: measured in the same turns, compared, and one of them chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

from compress.artifact import Measured
from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.data.sizes import batches_of, typical_inputs
from compress.errors import MissingExtraError, ResourceError, StageError, ToolkitError
from compress.evaluate.judge import Budget
from compress.evaluate.metrics import Metric
from compress.evaluate.runtime_choice import BATCHED, Choice, RuntimeFigures, choose, distances, most_apart
from compress.formats.files import size_of
from compress.formats.onnx.outline import outline
from compress.jobs.compared_inputs import MANY, compared_inputs, joined, sizes_of
from compress.jobs.prove import Found, judged_fields, loss_between
from compress.model import Model, OnnxModel
from compress.model.inputs import Arrays, example_inputs
from compress.onnx_export.file import MOST
from compress.options import CompressOptions, ExportOptions
from compress.quantize.precision import FOUR_BIT
from compress.report.findings import telling
from compress.runtime.backends import Backend, open_model
from compress.runtime.backends.onnxrt import is_emulated, is_half
from compress.runtime.backends.openvino_cpu import check_sizes, installed
from compress.runtime.footprint import EndedError, Footprint, footprint
from compress.runtime.latency import FEWEST, Latency, Ratio, latency, measuring_seconds, ratio
from compress.runtime.machine import fast_bfloat16
from compress.runtime.measure import cores
from compress.vetting.loops import may_not_end
from compress.vetting.memory import memory_left

__all__ = ["apart", "at_batch", "beside", "chosen", "exact", "is_worse", "refuse_missing", "served"]

TWICE = 2  # it is opened once to be measured, and once to be compared
TRIED = (2, BATCHED)  # samples in a call, beside one, and as many as are compared
BATCHED_SECONDS = 15.0  # that timing both runtimes at a larger batch may take, or less where the user says so
QUANTIZED = ("uantize", "QLinear", "Integer", *FOUR_BIT)  # parts of operators' names
_Value = TypeVar("_Value")


def refuse_missing(runtime: str) -> None:
    """Raise MissingExtraError where OpenVINO is asked for by name, and is not there."""
    if runtime == "openvino" and not installed():
        raise MissingExtraError("can't run the result with OpenVINO", module="openvino", extra="openvino")


def beside(
    options: CompressOptions, rows: Mapping[str, Model], data: Dataset | None = None
) -> tuple[dict[str, OnnxModel], dict[str, Footprint], Choice | None]:
    """The last row's file on OpenVINO, if that is to be measured, and what it costs; else why it is not.

    Args:
        options: of the run.
        rows: models by row.
        data: whose first sample it is tried on; by default it is a random one.

    Returns:
        By a name of its own, the model and its memory and loading time; or none of both, and the choice.

    Raises:
        StageError: OpenVINO is asked for by name, and can't run the file.
    """
    last, final = list(rows.items())[-1]
    if not isinstance(final, OnnxModel) or options.target != "cpu" or options.runtime == "onnxruntime":
        return {}, {}, None
    asked = options.runtime == "openvino"
    if not asked and (not installed() or (is_emulated(final.path) and not fast_bfloat16())):
        return {}, {}, None
    model = dataclasses.replace(final, runtime="openvino")
    if not asked and (large := _largest(rows)) > MOST:
        why = f"opening what was made of {large / 1e9:.1f} GB of weights with it may take three times as much memory"
        told = f"OpenVINO was not tried: {why} (`--runtime openvino` tries it). ONNX Runtime serves the file."
        return {}, {}, Choice("onnxruntime", told)
    try:
        cost = _survives(model, options.threads)
        if not asked and (short := _short_of(cost, rows)):
            return {}, {}, Choice("onnxruntime", f"OpenVINO was not tried: {short}. ONNX Runtime serves the file.")
        backend = open_model(model, threads=options.threads)
        backend.infer(typical_inputs(final.signature, data, 1))
    except StageError as err:
        if asked:
            raise
        why = f"OpenVINO does not run the file ({err.why}): ONNX Runtime serves it."
        return {}, {}, Choice("onnxruntime", why, doubtful=True)
    if not asked and (lost := _lost_sizes(final, backend, options.threads)):
        why = f"OpenVINO fails at inputs that ONNX Runtime answers ({lost}): ONNX Runtime serves the file."
        return {}, {}, Choice("onnxruntime", why, doubtful=True)
    name = f"{last} on OpenVINO"
    return {name: model}, {} if cost is None else {name: cost}, None


def _survives(model: OnnxModel, threads: int) -> Footprint | None:
    """What a file costs on OpenVINO; None where it refuses it.

    Raises:
        StageError: it ended a process of its own: here it would end the export.
    """
    if may_not_end(model.path):  # which OpenVINO is never asked for here
        return None
    sizes = sorted({*TRIED, joined(model.signature)}) if model.signature.batches else ()
    try:
        return footprint(model, threads, [model.signature.at(size) for size in sizes])
    except (EndedError, ResourceError) as err:
        raise StageError(
            f"OpenVINO can't run {model.path.name}",
            why=f"tried in a process of its own, {err.why}",
            mend="run it with ONNX Runtime: --runtime onnxruntime",
        ) from err
    except StageError:  # asked here, it says in words what it lacks
        return None


def _largest(rows: Mapping[str, Model]) -> int:
    """Bytes of the largest file on the way."""
    return max(size_of(model.path) for model in rows.values() if isinstance(model, OnnxModel))


def _short_of(cost: Footprint | None, rows: Mapping[str, Model]) -> str:
    """What it would take to measure OpenVINO beside all rows, if there may be too little for it; else "".

    Short of memory, OpenVINO does not say so: it "could not create a primitive", or ends the process.
    """
    peak = 0 if cost is None else cost.peak_memory_bytes or 0  # 0, too, where the system does not tell
    files = sum(size_of(model.path) for model in rows.values() if isinstance(model, OnnxModel))
    left = memory_left()
    if files + TWICE * peak <= left:
        return ""
    return (
        f"it takes {peak / 1e9:.1f} GB for it, beside {files / 1e9:.1f} GB of files that are measured with it, and "
        f"{left / 1e9:.1f} GB are left"
    )


def _lost_sizes(model: OnnxModel, other: Backend, threads: int) -> str:
    """Sizes beside the batch that ONNX Runtime answers and OpenVINO, opened, does not; "" where none was found."""
    usual = model.signature.at(1)
    halves = {dim: (usual[dim] + 1) // 2 for dim in model.signature.told}
    if not halves:
        return ""
    ones = [
        {dim: size} for dim, half in halves.items() for size in (half, usual[dim] + 1, 2 * usual[dim], max(MANY, half))
    ]
    backend = open_model(model, threads=threads)
    for sizes in [*ones, halves]:
        try:
            inputs = example_inputs(model.signature.inputs, usual | sizes)
            backend.infer(inputs)
        except ToolkitError:
            continue
        try:
            check_sizes(model.path, {name: array.shape for name, array in inputs.items()})
            other.infer(inputs)
        except StageError:
            return ", ".join(f"{dim} = {size}" for dim, size in sizes.items())
    return ""


def chosen(
    options: ExportOptions,
    rows: Mapping[str, Model],
    others: Mapping[str, Model],
    found: Found,
    budget: Budget | None,
    data: Dataset | None,
) -> Choice:
    """What serves the file, by what was measured of both.

    Args:
        options: of the run.
        rows: models by row.
        others: what `beside` gave: one.
        found: what was measured of both.
        budget: of the drop, if there is one.
        data: on which both are compared; None for random inputs.

    Raises:
        StageError: OpenVINO is asked for by name, and computes the file differently.
    """
    last, other = list(rows)[-1], next(iter(others))
    difference, quantized, compared = _apart(rows, others[other], data)
    figures = (_figures(last, found, "onnxruntime", 0.0), _figures(other, found, "openvino", difference))
    timed = {name: found.latency[name] for name in (last, other) if name in found.latency}
    speedup = _ratio(timed)
    batched = None
    if speedup is not None and options.runtime == "auto":
        batched = at_batch({last: rows[last], other: others[other]}, timed, options.threads, data)
    (call,) = batches_of(rows[last].signature, (1,))
    at = f"at batch {call} with {counted(options.threads, 'threads')}"
    keeps = (True, True)
    if budget is not None and found.judged is not None:
        budget = budget.beside(found.compared["original"].constant)
        keeps = (
            budget.keeps(figures[0].drop, figures[0].drop_high),
            budget.keeps(figures[1].drop, figures[1].drop_high),
        )
    worse = _worse(found, last, other)
    half = _in_half(rows[last])
    choice = choose(figures, speedup, quantized, at=at, batched=batched, keeps=keeps, worse=worse, half=half)
    choice = dataclasses.replace(choice, compared=compared)
    if options.runtime != "openvino":
        return choice
    if choice.doubtful:
        raise StageError(
            f"OpenVINO computes the result of {last} differently than ONNX Runtime",
            why=choice.why,
            mend="take the runtime that it was quantized and judged on: --runtime onnxruntime",
        )
    return dataclasses.replace(choice, runtime="openvino", why="OpenVINO serves the file, as --runtime asks.")


def _ratio(timed: Mapping[str, Latency]) -> Ratio | None:
    """Of the second over the first, where both were timed."""
    return ratio(*(each.rounds_ms for each in timed.values())) if len(timed) == 2 else None


def at_batch(
    models: Mapping[str, Model], timed: Mapping[str, Latency], threads: int, data: Dataset | None = None
) -> Ratio | None:
    """How two files compare at a larger batch, timed in turns; None where the batch is fixed, or that would take long.

    Args:
        models: by name; the first is what the second is held against.
        timed: both at batch 1.
        threads: of each.
        data: whose samples go in; random ones by default.
    """
    signature = next(iter(models.values())).signature
    round_seconds = BATCHED * sum(each.p50_ms for each in timed.values()) / 1e3
    if not signature.batches or (FEWEST + 3) * round_seconds > BATCHED_SECONDS:  # three more, before the first round
        return None
    opened = {name: open_model(model, threads=threads) for name, model in models.items()}
    seconds = min(BATCHED_SECONDS, measuring_seconds())
    return _ratio(latency(opened, typical_inputs(signature, data, BATCHED), seconds=seconds))


def _apart(
    rows: Mapping[str, Model], other: Model, data: Dataset | None
) -> tuple[float, float, Mapping[str, Sequence[int]]]:
    """How far OpenVINO's outputs are from ONNX Runtime's, how far the float32 file's, which it was made of, and where.

    That is, by dimension that varies, at which sizes.
    """
    final = list(rows.values())[-1]
    before = next((model for model in reversed(list(rows.values())) if exact(model)), final)
    compared = {"last": final, "other": other} | ({} if before is final else {"before": before})
    opened = {name: open_model(model, threads=cores()) for name, model in compared.items()}
    groups = compared_inputs(data, final.signature, opened["last"], opened["other"])
    return *apart(opened, groups, half=_in_half(final)), sizes_of(final.signature, groups)


def apart(opened: Mapping[str, Backend], groups: Sequence[Sequence[Arrays]], *, half: bool) -> tuple[float, float]:
    """How far a file's outputs on another runtime are from its own, and how far those of what it was made of.

    Args:
        opened: the file as "last", it on the other runtime as "other", and, if it is another, the float32 file that it
            was made of as "before".
        groups: of inputs, see `compared_inputs`; that counts where the one is largest beside what the other explains.
        half: whether the file is in half precision.
    """
    found = [distances(opened, "last", batches) for batches in groups]
    both = [(each["other"], each.get("before", 0.0)) for each in found]
    return max(both, key=lambda pair: pair[0] / most_apart(pair[1], half=half))


def _in_half(model: Model) -> bool:
    return isinstance(model, OnnxModel) and is_half(model.path)


def exact(model: Model) -> bool:
    """Whether it is a file in float32."""
    if not isinstance(model, OnnxModel) or is_half(model.path):
        return False
    return not any(part in node.op_type for node in outline(model.path).graph.node for part in QUANTIZED)


def _figures(name: str, found: Found, runtime: str, difference: float) -> RuntimeFigures:
    timed = found.latency.get(name)
    told = {} if found.judged is None else judged_fields(name, name, found, found.judged)
    return RuntimeFigures(
        runtime="openvino" if runtime == "openvino" else "onnxruntime",
        p50_ms=timed.p50_ms if timed else None,
        p50_low_ms=timed.low_ms if timed else None,
        p50_high_ms=timed.high_ms if timed else None,
        value=told.get("value"),
        drop=told.get("drop"),
        drop_high=told.get("drop_high"),
        difference=difference,
    )


def _worse(found: Found, last: str, other: str) -> bool:
    if found.judged is None:
        return False
    first = found.compared["original"]
    return is_worse(loss_between(found, other, last), found.judged.metric, first.value, first.constant)


def is_worse(loss: float | None, metric: Metric, original: float, constant: float | None) -> bool:
    """Whether a file loses more on OpenVINO, beyond doubt and by what is worth a word.

    Args:
        loss: against ONNX Runtime for sure, in points; None where that is not known.
        metric: that is judged by.
        original: its value of the original.
        constant: points that the best answer that is always the same loses.
    """
    lost = Measured(metric=metric.name, metric_scale=metric.scale, drop=loss, drop_constant=constant)
    return telling(lost, Measured(value=original))


def served(
    rows: Mapping[str, Model], others: Mapping[str, Model], found: Found, choice: Choice | None
) -> tuple[dict[str, Model], Found]:
    """Rows and figures whose last row is the file on what serves it."""
    if not others:
        return dict(rows), found
    last, other = list(rows)[-1], next(iter(others))
    taken = other if choice is not None and choice.runtime == "openvino" else last

    def moved(held: Mapping[str, _Value]) -> dict[str, _Value]:
        kept = {name: value for name, value in held.items() if name not in (last, other)}
        return kept | ({last: held[taken]} if taken in held else {})

    models = dict(rows) | ({last: others[other]} if taken == other else {})
    return models, dataclasses.replace(
        found,
        compared=moved(found.compared),
        latency=dataclasses.replace(found.latency, found=moved(found.latency.found)),
        runtimes=moved(found.runtimes),
        batch_difference=moved(found.batch_difference),
        footprints=moved(found.footprints),
    )
