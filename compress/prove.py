"""The rows of the report: what each model on the way is worth, measured side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from compress.artifact import Measured, StageReport
from compress.backends import open_model
from compress.compare import Comparison, compare
from compress.dataset import Dataset
from compress.measure import Latency, latency, onnx_macs, onnx_params, torch_macs, torch_params
from compress.model import Model, TorchModel, example_inputs
from compress.pipeline import Outcome, Watcher

__all__ = ["measure", "row", "row_of"]


def measure(
    rows: Mapping[str, Model], data: Dataset | None, threads: int, watcher: Watcher
) -> tuple[Mapping[str, Comparison], Mapping[str, Latency]]:
    opened = {name: open_model(model, threads=threads) for name, model in rows.items()}
    compared: Mapping[str, Comparison] = {}
    if data is not None:
        progress = watcher.started("compare")
        compared = compare("original", opened, data, progress=lambda done, total: progress(done, total, "samples"))
    specs = rows["original"].signature.inputs
    one = data.take(slice(0, 1))[0] if data is not None else example_inputs(specs, 1)
    tick = watcher.started("measure")
    return compared, latency(opened, one, progress=lambda done, total: tick(done, total, "interleaved rounds"))


def row(
    name: str,
    did: str,
    model: Model,
    compared: Mapping[str, Comparison],
    timed: Mapping[str, Latency],
    size: int | None = None,
) -> StageReport:
    if isinstance(model, TorchModel):
        macs, params, runtime = torch_macs(model.module, model.signature), torch_params(model.module), "torch eager"
    else:
        macs, params, runtime = onnx_macs(model.path), onnx_params(model.path), "ONNX Runtime"
        size = model.path.stat().st_size
    against = compared.get(name)
    measured = Measured(
        macs=macs,
        params=params,
        size_bytes=size,
        accuracy=against.accuracy if against else None,
        agreement=against.agreement if against else None,
        cosine_similarity=against.cosine_similarity if against else None,
        max_abs_error=against.max_abs_error if against else None,
        latency_p50_ms=timed[name].p50_ms,
        latency_p99_ms=timed[name].p99_ms,
        runtime=runtime,
    )
    return StageReport(name, did, measured, seconds=0.0)


def row_of(outcome: Outcome, compared: Mapping[str, Comparison], timed: Mapping[str, Latency]) -> StageReport:
    given = outcome.given
    measured = row(outcome.stage.name, given.did, given.model, compared, timed, outcome.size_bytes)
    return dataclasses.replace(
        measured,
        seconds=outcome.seconds,
        warnings=given.warnings,
        details=given.details,
        options=dict(outcome.stage.options),
    )
