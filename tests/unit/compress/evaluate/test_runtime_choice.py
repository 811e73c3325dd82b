"""Which runtime serves a file, and how far two runtimes' outputs are apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from compress.evaluate.runtime_choice import RuntimeFigures, choose, distances
from compress.model import Arrays
from compress.runtime.latency import Ratio

FASTER, SLOWER, NOISE = Ratio(1.6, 1.5, 1.7), Ratio(0.6, 0.5, 0.7), Ratio(1.02, 0.98, 1.06)


AT = "at batch 1 with 2 threads"


def figures(difference: float, p50: tuple[float | None, float | None] = (2.0, 1.0)) -> Any:
    return (
        RuntimeFigures("onnxruntime", p50[0], difference=0.0),
        RuntimeFigures("openvino", p50[1], difference=difference),
    )


@pytest.mark.parametrize(
    ("speedup", "difference", "quantized", "more", "runtime", "why"),
    [
        (
            FASTER,
            1e-6,
            0.0,
            {},
            "openvino",
            f"1.60 times as fast as ONNX Runtime (1.50 to 1.70) {AT}: OpenVINO serves it.",
        ),
        (SLOWER, 1e-6, 0.0, {}, "onnxruntime", f"(0.50 to 0.70) {AT}: ONNX Runtime serves it."),
        (SLOWER, 1e-6, 0.0, {"batched": FASTER}, "onnxruntime", "serves it. At batch 8 it is 1.60 times as fast (1.50"),
        (NOISE, 1e-6, 0.0, {"batched": FASTER}, "onnxruntime", "batches, give --runtime openvino."),
        (FASTER, 1e-6, 0.0, {"batched": SLOWER}, "openvino", "batches, give --runtime onnxruntime."),
        (NOISE, 1e-6, 0.0, {}, "onnxruntime", "within noise"),
        (Ratio(1.6), 1e-6, 0.0, {}, "onnxruntime", "too few rounds"),
        (None, 1e-6, 0.0, {}, "onnxruntime", "not timed"),
        (FASTER, 0.01, 0.0, {}, "onnxruntime", "computes the file differently"),
        (FASTER, 0.01, 0.006, {}, "openvino", "OpenVINO serves"),
        (FASTER, 0.01, 0.004, {}, "onnxruntime", "computes the file differently"),
        (FASTER, 0.01, 0.004, {"half": True}, "openvino", "OpenVINO serves"),
        (FASTER, 0.01, 0.002, {"half": True}, "onnxruntime", "computes the file differently"),
        (FASTER, 0.45, 0.4, {}, "openvino", "OpenVINO serves"),
        (FASTER, 0.6, 0.4, {}, "onnxruntime", "computes the file differently"),
        (FASTER, 0.6, 0.4, {"half": True}, "onnxruntime", "computes the file differently"),
        (FASTER, math.inf, 0.1, {}, "onnxruntime", "computes the file differently"),
        (FASTER, math.nan, 0.1, {}, "onnxruntime", "computes the file differently"),
        (FASTER, 1e-6, 0.0, {"keeps": (True, False)}, "onnxruntime", "does not keep the largest drop"),
        (FASTER, 1e-6, 0.0, {"keeps": (False, False)}, "openvino", "OpenVINO serves"),
        (FASTER, 1e-6, 0.0, {"worse": True}, "onnxruntime", "loses more of the metric"),
    ],
)
def test_the_faster_one_serves_if_it_computes_the_file_alike(
    speedup: Any, difference: float, quantized: float, more: dict[str, Any], runtime: str, why: str
) -> None:
    found = choose(figures(difference), speedup, quantized, at=AT, **more)
    assert (found.runtime, found.doubtful) == (runtime, "differently" in why)
    assert why in found.why


@pytest.mark.parametrize(
    ("speedup", "more"),
    [
        (SLOWER, {"batched": SLOWER}),
        (SLOWER, {"batched": NOISE}),
        (FASTER, {"batched": FASTER}),
        (FASTER, {"batched": Ratio(0.6)}),
        (FASTER, {"batched": FASTER, "worse": True}),
    ],
)
def test_a_larger_batch_is_told_only_where_it_turns_the_order(speedup: Any, more: dict[str, Any]) -> None:
    assert "At batch 8" not in choose(figures(1e-6), speedup, 0.0, at=AT, **more).why


def test_bf16_that_onnx_runtime_only_emulates_is_served_by_openvino() -> None:
    assert choose(figures(1e-6, (None, 1.0)), None, 0.0, at=AT).runtime == "openvino"
    assert choose(figures(0.5, (None, 1.0)), None, 0.0, at=AT).runtime == "onnxruntime"


def test_json_has_no_infinity() -> None:
    assert choose(figures(math.inf), FASTER, 0.0, at=AT).to_dict()["figures"][1]["difference"] is None


class Gives:
    """Outputs that are made here."""

    runtime, emulated = "made", False

    def __init__(self, **outputs: np.ndarray[Any, Any]) -> None:
        self.outputs = outputs

    def infer(self, inputs: Arrays) -> Arrays:
        return dict(self.outputs)


ONES = np.ones((2, 2), np.float32)
NAN = np.array([[1, math.nan], [1, 1]], np.float32)


@pytest.mark.parametrize(
    ("want", "got", "apart"),
    [
        ({"y": ONES}, {"y": ONES}, 0.0),
        ({"y": ONES}, {"y": 1.1 * ONES}, 0.1),
        ({"y": 100 * ONES}, {"y": 110 * ONES}, 0.1),
        ({"y": ONES, "z": ONES}, {"y": ONES, "z": 1.2 * ONES}, 0.2),
        ({"y": ONES}, {"y": ONES[:1]}, math.inf),
        ({"y": ONES}, {}, math.inf),
        ({"y": NAN}, {"y": NAN}, 0.0),
        ({"y": ONES}, {"y": NAN}, math.inf),
        ({"y": 0 * ONES}, {"y": ONES}, math.inf),
        ({"y": 0 * ONES}, {"y": 0 * ONES}, 0.0),
        ({"y": np.array([1, 2, 3, 4])}, {"y": np.array([1, 2, 3, 5])}, 0.5),
    ],
)
def test_distance_is_the_rms_of_the_difference_as_a_share(want: Any, got: Any, apart: float) -> None:
    found = distances({"a": Gives(**want), "b": Gives(**got)}, "a", [{}, {}])
    assert found == {"b": pytest.approx(apart, rel=1e-5)}
