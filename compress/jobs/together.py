"""Options that contradict each other, or need another: each is refused, with what to do."""

from __future__ import annotations

from compress.console.wording import counted
from compress.errors import RecipeError
from compress.options import ExportOptions, OptimizeOptions
from compress.options.asked import is_static, repairs
from compress.training.tune.space import LEAST_HELD, broken

__all__ = ["refuse_together", "refuse_tuning"]


def refuse_together(options: ExportOptions, *, judged: bool) -> None:
    """Refuse options that contradict each other, each with what to do.

    Args:
        options: of a run.
        judged: whether there is evaluation data.

    Raises:
        RecipeError: the first of them.
    """
    refuse_tuning(options)
    goals = {
        "--prune": options.prune,
        "--target-latency-ms": options.target_latency_ms,
        "--target-size-mb": options.target_size_mb,
        "--target-params": options.target_params,
    }
    given = [flag for flag, value in goals.items() if value is not None]
    static = is_static(options)
    by_latency = options.allocate == "latency" and bool(given)
    rules = (
        (len(given) > 1, "can't prune to two goals", " and ".join(given) + " are given", "leave one of them"),
        (
            options.calibration is not None
            and not (static or options.int4 or options.smooth or options.precision != "fp32")
            and not (repairs(options) or options.drop_blocks is not None),
            "calibration data is given, but nothing to calibrate",
            "only static INT8, QAT, smoothing, half precision, 4-bit weights, --drop-blocks and the repair look at it",
            "add --int8 static or --prune 0.5, or leave --calibration out",
        ),
        (
            options.drop_blocks is not None and options.calibration is None,
            "can't choose blocks to drop",
            "which of them the outputs need least is told by calibration data, and there is none",
            "add --calibration calibration.npz (unlabelled inputs, some hundreds), or leave --drop-blocks out",
        ),
        (
            options.drop_blocks == "auto" and not given,
            "can't weigh blocks against channels",
            "--drop-blocks auto drops what keeps a budget better than channels do, and there is no budget",
            "add --prune 0.5, or say how many: --drop-blocks 1",
        ),
        (
            options.drop_blocks is not None and options.rounds > 1,
            "can't drop blocks in rounds",
            "blocks go at once, before channels do",
            "leave --rounds or --drop-blocks out",
        ),
        (
            bool(options.repair) and bool(given) and options.calibration is None,
            "can't repair what pruning costs",
            "layers are fitted to calibration data, and there is none",
            "add --calibration calibration.npz (unlabelled inputs, some hundreds), or leave --repair out",
        ),
        (
            options.importance == "obs" and bool(given) and options.calibration is None,
            "can't choose channels by obs",
            "it looks at what layers read on calibration data, and there is none",
            "add --calibration calibration.npz, or take --importance magnitude",
        ),
        (
            options.importance == "obs" and bool(given) and options.repair is False,
            "can't choose channels by obs without the repair",
            "it takes channels that the others can stand in for, which they do once their layers are fitted",
            "leave --no-repair out, or take --importance magnitude",
        ),
        (
            by_latency and options.importance != "obs",
            f"can't choose by latency how much each layer loses, with --importance {options.importance}",
            "it ranks channels, and does not tell what a number of them costs; obs does, on calibration data",
            "add --importance obs --calibration calibration.npz, or leave --allocate out",
        ),
        (
            by_latency and options.sensitivity is not None,
            "can't choose by latency how much each layer loses, with --sensitivity",
            "that says what each layer loses, too",
            "leave one of them out",
        ),
        (
            by_latency and options.target != "cpu",
            f"can't choose by latency how much each layer loses on {options.target}",
            "layers would be timed on this CPU, which says nothing of a GPU",
            "leave --allocate out",
        ),
        (
            by_latency and options.drop_blocks is not None,
            "can't choose by latency how much each layer loses, with --drop-blocks",
            "blocks are weighed by the multiply-accumulates that go with them",
            "leave one of them out",
        ),
        (
            by_latency and (options.int4 is not None or options.precision != "fp32"),
            "can't choose by latency how much each layer loses, with 4-bit weights or half precision",
            "layers are timed in FP32 and in INT8 alone",
            "leave --allocate out, or --int4 and --precision",
        ),
        (
            options.smooth and not ((static or options.int8 == "dynamic") and options.calibration is not None),
            "can't smooth activations",
            "it is for static and dynamic INT8, and looks at calibration data",
            "add --int8 static (or dynamic) and --calibration, or leave --smooth out",
        ),
        (
            options.int8 == "qat" and options.finetune is None,
            "can't train with fake quantization",
            "there is no training data",
            "add --finetune train.npz, or ask for --int8 static",
        ),
        (
            options.int4 is not None and options.int8 is not None,
            "can't make weights 8-bit and 4-bit",
            "--int8 and --int4 are both given",
            "leave one of them: --int8 for speed, --int4 for the smallest file",
        ),
        (
            options.int4 is not None and options.target != "cpu",
            f"can't make 4-bit weights for {options.target}",
            "they are operators of ONNX Runtime's own: TensorRT does not read them, and on a GPU they were never run",
            "leave --target or --int4 out",
        ),
        (
            options.int4 is not None and options.precision != "fp32",
            f"can't make 4-bit weights and {options.precision.upper()} of one model",
            "what is beside 4-bit weights is computed in FP32 on a CPU",
            "leave --precision or --int4 out",
        ),
        (
            options.int8 == "auto" and options.target != "cpu",
            f"can't choose what to quantize for {options.target}",
            "--int8 auto measures with ONNX Runtime on this CPU, which says nothing of a GPU",
            "ask for --int8 static with --calibration",
        ),
        (
            options.importance == "taylor" and bool(given) and options.finetune is None,
            "can't tell the importance of channels by taylor",
            "it takes gradients on training data, and there is none",
            "add --finetune train.npz, or take --importance magnitude",
        ),
        (
            options.rounds < 1 or (options.rounds > 1 and (options.prune is None or options.finetune is None)),
            f"can't prune in {counted(options.rounds, 'rounds')}",
            "a round prunes by --prune and recovers by --finetune",
            "give both, or leave --rounds out",
        ),
        (
            options.max_drop is not None and not judged,
            "can't keep a largest drop",
            "without evaluation data no drop is known",
            "add --eval eval.npz, or leave --max-drop out",
        ),
        (
            options.sensitivity is not None and not given,
            "a sensitivity file is given, but nothing is pruned",
            "it sets how far each layer may be pruned",
            "add --prune 0.5, or leave --sensitivity out",
        ),
        (
            options.max_drop is not None and options.max_drop < 0,
            f"can't keep a largest drop of {options.max_drop}",
            "it is in points, 0 or more",
            "give 0.5 for half a point",
        ),
        (
            options.target_latency_ms is not None and options.target != "cpu",
            f"can't prune to a latency on {options.target}",
            "it would be measured with ONNX Runtime on this CPU, which says nothing of a GPU",
            "take --prune, --target-size-mb or --target-params, and `compress measure --device cuda` where the GPU is",
        ),
        (
            options.to == "tensorrt" and options.target != "tensorrt",
            "can't build a TensorRT engine",
            f"the file would be made for --target {options.target}, with INT8 that TensorRT does not take",
            "add --target tensorrt",
        ),
        (
            options.runtime == "openvino" and options.target != "cpu",
            f"can't serve a file for --target {options.target} with OpenVINO",
            "its INT8 is made for a GPU, and OpenVINO runs it on the CPU",
            "leave --target or --runtime out",
        ),
        (options.threads < 1, "can't measure with no thread", f"--threads is {options.threads}", "give 1 or more"),
    )
    for wrong, what, why, mend in rules:
        if wrong:
            raise RecipeError(what, why=why, mend=mend)


def refuse_tuning(options: ExportOptions | OptimizeOptions) -> None:
    """Refuse a search over a training's settings that can't be, as far as that is known without the data.

    Raises:
        RecipeError: there is no training, nothing judges it, or several processes share it.
    """
    what = "can't search for settings of a training"
    if options.tune_training is None:
        return
    if options.finetune is None:
        why = "there is no training data"
        raise RecipeError(what, why=why, mend="add --finetune train.npz, or leave --tune-training out")
    judged = options.validation is not None or options.hold_out > 0
    held = LEAST_HELD if judged else None  # how many there are is seen when the data is opened
    for why, mend in broken(options, LEAST_HELD, held, alone=options.devices == 1):
        raise RecipeError(what, why=why, mend=mend)
