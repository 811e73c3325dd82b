"""A flag that nothing reads in its combination is told by name; one that is read, never."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from compress.cli import main
from compress.jobs.running import spread
from compress.options import ExportOptions, FinetuneOptions, MeasureOptions, OptimizeOptions, SensitivityOptions
from compress.options.unused import RULES, unused

OUT = Path("out")


def export(**options: Any) -> ExportOptions:
    return ExportOptions(output=OUT, **options)


def optimize(**options: Any) -> OptimizeOptions:
    return OptimizeOptions(output=OUT, **options)


def finetune(**options: Any) -> FinetuneOptions:
    return FinetuneOptions(output=OUT, data="d", **options)


STATIC = {"int8": "static", "calibration": "c"}
CASES: list[tuple[Any, set[str]]] = [
    (export(), set()),
    (export(prune=0.5, finetune="t", epochs=3, **STATIC, eval="e", metric="top1", max_drop=1.0), set()),
    (export(calibrator="entropy"), {"--calibrator"}),
    (export(calibrator="entropy", int8="dynamic"), {"--calibrator"}),
    (export(calibrator="entropy", **STATIC), set()),
    (export(calibrator="entropy", int8="qat", finetune="t", calibration="c"), set()),
    (export(epochs=3), {"--epochs"}),
    (export(epochs=3, batch_size=8, channels_last=False, prune=0.5), {"--epochs", "--batch-size", "--no-channels-last"}),
    (export(finetune="t", epochs=3, batch_size=8), set()),
    (export(opt_batch_size=(1, 8), dims=("s=1:2:3",), refit=True), {"--opt-batch-size", "--refit"}),  # --dims sets the sizes
    (export(opt_batch_size=(1, 8), target="tensorrt"), {"--opt-batch-size"}),
    (export(opt_batch_size=(1, 8), target="tensorrt", to="tensorrt"), set()),
    (export(scope="local"), {"--scope"}),
    (export(scope="local", target_params=9), set()),
    (export(scope="local", prune=0.5, sensitivity=Path("s")), {"--scope"}),
    (export(round_to=8, importance="random"), {"--round-to", "--importance"}),
    (export(round_to=8, importance="random", target_size_mb=1.0), set()),
    (export(metric="top1"), {"--metric"}),
    (export(confidence=0.8, budget_by="point"), {"--confidence", "--budget-by"}),
    (export(confidence=0.8, budget_by="point", eval="e", max_drop=1.0), set()),
    (export(finetune="t", patience=3), {"--patience"}),
    (export(finetune="t", patience=3, hold_out=0.1), set()),
    (export(finetune="t", patience=3, validation="v", hold_out=0.1), {"--hold-out"}),
    (export(finetune="t", distillation=0.0, temperature=2.0), {"--temperature"}),
    (export(finetune="t", hold_out=0.2, tune_training=8), set()),
    (export(finetune="t", hold_out=0.2, tune_training=8, profile=True, tensorboard=Path("l")), {"--profile", "--tensorboard"}),
    (export(tune_training=8), set()),  # which is refused
    (export(seed=3, threads=2, batches=(1, 8), work=Path("w"), verbose=True), set()),
    (optimize(eval="e", calibrators=("mse",)), {"--calibrators"}),
    (optimize(eval="e", calibrators=("mse",), calibration="c"), set()),
    (optimize(eval="e", calibration="c", int8=("none", "dynamic")), set()),
    (optimize(eval="e", calibration="c", int8=("none", "dynamic"), repair=False), {"--calibration"}),
    (export(prune=0.5, calibration="c", repair=False, int8="static"), set()),
    (export(prune=0.5, repair=False), {"--no-repair"}),
    (export(repair=True), {"--repair"}),
    (export(drop_blocks=1, calibration="c", repair=False), set()),
    (export(drop_blocks=1, calibration="c", round_to=8), {"--round-to"}),
    (export(prune=0.5, calibration="c", importance="obs", scope="local"), {"--scope"}),
    (export(allocate="latency"), {"--allocate"}),
    (export(allocate="latency", prune=0.5, calibration="c", importance="obs"), set()),
    (optimize(eval="e", calibration="c", int8=("none", "dynamic"), smooth=True), set()),
    (optimize(eval="e", prune=(0.0,), scope="local", epochs=9), {"--scope", "--epochs"}),
    (finetune(temperature=2.0, metric="top1"), {"--temperature", "--metric"}),
    (finetune(temperature=2.0, teacher=Path("t"), metric="top1", eval="e"), set()),
    (finetune(train_precision="32", train_threads=2, epochs=9), set()),
    (export(train_threads=2), {"--train-threads"}),
    (export(train_threads=2, finetune="t"), set()),
    (MeasureOptions(tf32=False, provider=("tensorrt",), cuda_graphs=True), {"--no-tf32", "--provider", "--cuda-graphs"}),
    (MeasureOptions(channels_last=True), {"--channels-last"}),
    (MeasureOptions(device="cuda", channels_last=True), set()),
    (MeasureOptions(device="cuda", tf32=False, engine_cache=Path("c")), {"--engine-cache"}),
    (MeasureOptions(device="cuda", provider=("tensorrt",), engine_cache=Path("c")), set()),
    (MeasureOptions(data="d", dims=("s=1:2:3",)), {"--dims"}),
    (SensitivityOptions(output=OUT, eval="e", metric="top1", samples=3), set()),
    (SensitivityOptions(output=OUT, eval="e", shared=Path("s")), {"--shared"}),
    (optimize(eval="e", train="winner"), {"--train"}),
    (optimize(eval="e", prune=(0.0,), importance=("obs",), allocate=("macs", "latency")), {"--importance", "--allocate"}),
    (optimize(eval="e", calibration="c", importance=("obs", "magnitude"), scope="local"), set()),
    (optimize(eval="e", calibration="c", importance=("obs",), scope="local"), {"--scope"}),
    (optimize(eval="e", train="all", finetune="t"), set()),
    (optimize(eval="e", shared=Path("s"), workers=2, prune=(0.0,)), {"--shared"}),
    (optimize(eval="e", ray="h:1", shared=Path("s"), workers=2, prune=(0.0,)), {"--workers"}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "flags"), CASES)
def test_what_nothing_reads_is_told_by_name_and_once(options: Any, flags: set[str]) -> None:
    told = unused(options)
    assert {warning.partition(" has no use here: ")[0] for warning in told} == flags
    assert len(told) == len(flags)
    assert all(warning.partition(": ")[2] for warning in told)


def test_what_is_for_torch_is_told_where_there_is_no_such_file(tmp_path: Path) -> None:
    options = MeasureOptions(compile=True)
    (tmp_path / "artifact.json").touch()
    assert "--compile" in unused(options, [tmp_path, Path("m.onnx")])[0]
    assert unused(options, [tmp_path, Path("m.pt")]) == ()


@pytest.mark.parametrize("kind", RULES)
def test_rules_are_of_options_that_there_are(kind: type) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    assert {name for rule in RULES[kind] for name in rule[0]} <= names


X, Y = "x:float32[batch,3]", "y:int64[batch, 5]"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--input", X], ["--input", X]),
        (["--input", X, Y], ["--input", X, "--input", Y]),
        (["--input", X, "--input", Y], ["--input", X, "--input", Y]),
        (["--input", X, "model.pt"], ["--input", X, "model.pt"]),
        (["--input", X, Y, "model.pt", "-o", "out"], ["--input", X, "--input", Y, "model.pt", "-o", "out"]),
        (["--input", "no spec", "model.pt"], ["--input", "no spec", "model.pt"]),
        (["m.pt", X], ["m.pt", X]),
        (["--input"], ["--input"]),
        ([], []),
    ],
)
def test_several_inputs_follow_one_flag_and_a_file_may_follow_them(words: list[str], expected: list[str]) -> None:
    assert spread(words) == expected


@pytest.mark.parametrize("order", ["before", "after"])
def test_inputs_are_given_one_after_the_other(order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from tests.models import build

    module, inputs = build("two_inputs")
    torch.save(module.state_dict(), tmp_path / "m.pt")
    given = ["--input", *inputs]
    words = [*given, str(tmp_path / "m.pt")] if order == "before" else [str(tmp_path / "m.pt"), *given]
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *words, "--model", "tests.unit.compress.options.test_unused:two_inputs"])
    assert not ended.value.code
    told = capsys.readouterr().out
    assert [spec for spec in inputs if spec not in told] == []


def two_inputs() -> Any:
    from tests.models import build

    return build("two_inputs")[0]
