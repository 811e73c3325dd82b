"""Flags that nothing reads in the combination that they are given in: a warning each, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compress.options import (
    EngineOptions,
    ExportOptions,
    FinetuneOptions,
    MeasureOptions,
    OptimizeOptions,
    SensitivityOptions,
    SourceOptions,
)
from compress.options.asked import drops, is_static, prunes
from compress.options.training import TrainingOptions

__all__ = ["RULES", "unused"]

Rule = tuple[tuple[str, ...], Callable[[Any], bool], str]
"""Options; whether something reads them; what is missing where nothing does."""


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _judges_epochs(options: Any) -> bool:
    return options.validation is not None or options.hold_out > 0


TRAINING: tuple[Rule, ...] = (
    (("temperature",), lambda o: o.distillation > 0, "the original's answers have no weight (--distillation 0)"),
    (("patience",), _judges_epochs, "no epoch is judged without --validation or --hold-out"),
    (("hold_out",), lambda o: o.validation is None, "--validation is given, in whose place it would be"),
    (
        ("profile", "tensorboard"),
        lambda o: o.tune_training is None,
        "--tune-training trains many times: give the settings that it finds, without it",
    ),
)

SHARED: tuple[Rule, ...] = (
    (
        tuple(name for name in _names(TrainingOptions) if name != "tune_training"),  # which is refused
        lambda o: o.finetune is not None,
        "nothing is trained without --finetune",
    ),
    (("importance", "scope", "round_to"), prunes, "nothing is pruned"),
    (("repair",), lambda o: prunes(o) or drops(o), "nothing is pruned"),
    (("repair",), lambda o: o.repair or o.calibration is not None, "nothing is repaired without --calibration"),
    (("scope",), lambda o: o.sensitivity is None, "--sensitivity sets what each layer loses, in its place"),
    (
        ("scope",),
        lambda o: o.importance not in ("obs", ("obs",)),
        "obs has every layer lose what costs its consumers the same",
    ),
    (("metric", "confidence"), lambda o: o.eval is not None, "nothing is judged without --eval"),
)

CLUSTER: Rule = (("shared",), lambda o: o.ray is not None, "it is what machines share with --ray, and there is none")

RULES: dict[type, tuple[Rule, ...]] = {
    ExportOptions: (
        *SHARED,
        *TRAINING,
        (("allocate",), prunes, "nothing is pruned"),
        (("calibrator",), is_static, "only static INT8 and QAT have ranges to choose"),
        (
            ("keep_float",),
            lambda o: o.int8 is not None or o.int4 is not None,
            "nothing is quantized without --int8 or --int4",
        ),
        (("budget_by",), lambda o: o.max_drop is not None, "there is no --max-drop to hold anything against"),
        # --dims sets the sizes that everything is measured at, too.
        (
            tuple(name for name in _names(EngineOptions) if name != "dims"),
            lambda o: o.to == "tensorrt",
            "no engine is built without --to tensorrt",
        ),
    ),
    OptimizeOptions: (
        *SHARED,
        *TRAINING,
        CLUSTER,
        (("workers",), lambda o: o.ray is None, "with --ray, the cluster says how many candidates are made at a time"),
        (("sensitivity", "allocate"), prunes, "nothing is pruned"),
        (("train",), lambda o: o.finetune is not None and prunes(o), "only what is pruned is trained, by --finetune"),
        (
            ("calibrators",),
            lambda o: "static" in o.int8 and o.calibration is not None,
            "no static INT8 is tried without --calibration",
        ),
        (
            ("calibration",),
            lambda o: "static" in o.int8 or o.smooth or (prunes(o) and o.repair is not False),
            "only static INT8, smoothing and the repair after pruning look at calibration data",
        ),
        (("smooth",), lambda o: o.calibration is not None, "smoothing looks at --calibration data, and there is none"),
    ),
    SensitivityOptions: (CLUSTER,),
    FinetuneOptions: (
        *TRAINING,
        (
            ("distillation", "temperature", "feature_weight"),
            lambda o: o.teacher is not None,
            "there is nothing to learn from without --teacher",
        ),
        (("metric",), lambda o: o.eval is not None, "nothing is judged without --eval"),
    ),
    MeasureOptions: (
        (
            ("provider", "cuda_graphs", "channels_last", "tf32", "engine_cache"),
            lambda o: o.device == "cuda",
            "it is for a GPU: add --device cuda",
        ),
        (("runtime",), lambda o: o.device == "cpu", "on a GPU it is --provider that says what runs ONNX files"),
        (("engine_cache",), lambda o: "tensorrt" in o.provider, "it keeps engines of --provider tensorrt"),
        (("dims",), lambda o: o.data is None, "the sizes are those of --data"),
    ),
}
FOR_TORCH = ("input", "model", "compile")


def unused(options: SourceOptions, models: Sequence[Path] = ()) -> tuple[str, ...]:
    """What was asked for and will not be looked at, each with why; one flag is told once.

    An option at its default counts as not given.

    Args:
        options: of any command.
        models: of `compress measure`: some flags are for model files of torch alone.
    """
    rules = RULES.get(type(options), ())
    if models and all((path / "artifact.json").exists() or path.suffix == ".onnx" for path in models):
        rules = (*rules, (FOR_TORCH, lambda _: False, "it is for model files of torch, and there is none"))
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    }
    found: dict[str, str] = {}
    for names, reads, missing in rules:
        for name in names:
            if name in given and name not in found and not reads(options):
                found[name] = f"{_flag(name, given[name], options)} has no use here: {missing}"
    return tuple(found.values())


def _flag(name: str, value: Any, options: SourceOptions) -> str:
    if name in ("train_precision", "train_threads") and isinstance(options, FinetuneOptions):
        name = name.removeprefix("train_")
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
