"""What options ask for, where more than one of them decides it."""

from __future__ import annotations

from compress.options import ExportOptions, OptimizeOptions

__all__ = ["chooses", "drops", "is_static", "prunes", "repairs", "trains_last"]


def prunes(options: ExportOptions | OptimizeOptions) -> bool:
    """Whether channels are pruned."""
    if isinstance(options, OptimizeOptions):
        return any(options.prune)
    goals = (options.prune, options.target_latency_ms, options.target_size_mb, options.target_params)
    return any(goal is not None for goal in goals)


def drops(options: ExportOptions | OptimizeOptions) -> bool:
    """Whether blocks go whole."""
    return isinstance(options, ExportOptions) and options.drop_blocks is not None


def chooses(options: ExportOptions) -> bool:
    """Whether a run decides anything by its metric: which layers go back to float."""
    return options.max_drop is not None and is_static(options)


def is_static(options: ExportOptions) -> bool:
    """Whether INT8 has ranges from calibration data."""
    return options.int8 in ("static", "qat") or (options.int8 == "auto" and options.calibration is not None)


def repairs(options: ExportOptions | OptimizeOptions) -> bool:
    """Whether layers behind what is pruned are fitted."""
    pruned = prunes(options) or drops(options)
    return pruned and options.calibration is not None and options.repair is not False


def trains_last(options: OptimizeOptions) -> bool:
    """Whether a search trains nothing before all are compared: pruning is repaired, no gradient chooses channels."""
    able = options.finetune is not None and repairs(options) and "taylor" not in options.importance
    return able and options.train != "all"
