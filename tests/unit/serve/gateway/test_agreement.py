"""When two answers are the same answer."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.oip.protocol import InferResponse
from serve.gateway.oip.tensors import DATATYPES, Tensor
from serve.gateway.release.agreement import Agreement, agreement, misfit, unlike
from serve.gateway.release.released import Told, compared
from serve.rollout.agree import Agree

NAN, INF = float("nan"), float("inf")


def answer(*outputs: tuple[str, Any]) -> InferResponse:
    tensors = []
    for number, (datatype, values) in enumerate(outputs):
        data = np.array(values, dtype=object) if datatype == "BYTES" else np.array(values, DATATYPES[datatype])
        tensors.append(Tensor(f"y{number}", datatype, data))
    return InferResponse("m", "1", tuple(tensors))


def compare(candidate: InferResponse, baseline: InferResponse, **how: Any) -> Agreement:
    found = agreement(candidate, baseline, **how)
    assert found is not None
    return found


def told(scores: str, label: bytes = b"cat", header: str = '"model_name":"m",') -> Told:
    """An answer in JSON, as Triton writes it: NaN, infinities and bytes that are no UTF-8 stand there as they are."""
    outputs = f'[{{"name":"y","datatype":"FP32","shape":[1,2],"data":[{scores}]}},'.encode()
    outputs += b'{"name":"label","datatype":"BYTES","shape":[1,1],"data":["' + label + b'"]}]'
    return b"{" + header.encode() + b'"outputs":' + outputs + b"}", None, None


GOOD = told("0.1,0.9")


@pytest.mark.parametrize(
    ("candidate", "baseline", "disagreed"),
    [
        (told("NaN,NaN"), GOOD, 1),
        (told("0.1,Infinity"), GOOD, 1),
        (told("-Infinity,0.9"), GOOD, 1),
        (told("0.1,0.9", b"\xff\xfe"), GOOD, 1),
        (told("NaN,0.9"), told("NaN,0.8"), 0),
        (told("0.1,0.9", b"\xff\xfe"), told("0.1,0.9", b"\xff\xfe"), 0),
        (told("0.1,0.9", b"\xff\xfe"), told("0.1,0.9", b"\xff\xfd"), 1),
        ((b"{", None, None), GOOD, 1),
        (GOOD, (b"{", None, None), 1),
        (told("0.1"), GOOD, 1),
        (told("0.1,0.9", b"," * 5000), GOOD, 1),
    ],
)
def test_an_answer_that_is_no_json_is_another_answer(candidate: Told, baseline: Told, disagreed: int) -> None:
    found = compared(candidate, baseline, 64 * 1000, True, None, {"label"})
    assert found is not None
    assert (found.items, found.disagreed) == (1, disagreed)


@pytest.mark.parametrize("both", [(b"{", None, None), (b"[" * 100_000, None, None), told("0.1,0.9", b"," * 5000)])
def test_two_answers_that_nobody_can_read_say_nothing(both: Told) -> None:
    with pytest.raises(ValueError, match=r"JSON|to read"):
        compared(both, both, 64 * 1000, True, None, {"label"})


def test_the_length_of_what_a_rule_leaves_out_is_not_judged() -> None:
    with pytest.raises(ValueError, match="to read"):
        compared(told("0.1,0.9", b"," * 5000), GOOD, 64 * 1000, True, None, {"label"}, [Agree.parse("label:ignore")])


SCORES = ("FP32", [[0.1, 0.9], [0.8, 0.2]])


@pytest.mark.parametrize(
    ("candidate", "baseline", "tolerance", "disagreed", "items"),
    [
        ([SCORES], [SCORES], None, 0, 2),
        ([("FP32", [[0.2, 0.7], [0.6, 0.5]])], [SCORES], None, 0, 2),
        ([("FP32", [[0.9, 0.1], [0.8, 0.2]])], [SCORES], None, 1, 2),
        ([("FP32", [[0.1, 0.9], [0.8, 0.21]])], [SCORES], 0.001, 1, 2),
        ([("FP32", [[0.1, 0.9], [0.8, 0.21]])], [SCORES], 0.1, 0, 2),
        ([("FP32", [[NAN, 0.9], [0.8, 0.2]])], [SCORES], None, 1, 2),
        ([("FP32", [[NAN, 0.9]])], [("FP32", [[NAN, 0.9]])], 0.0, 0, 1),
        ([("FP32", [[NAN, 0.9, 0.1]])], [("FP32", [[NAN, 0.1, 0.9]])], None, 1, 1),
        ([("FP32", [[NAN, -INF, 0.1]])], [("FP32", [[NAN, -INF, 0.9]])], None, 0, 1),
        ([("FP32", [[INF, 0.9]])], [("FP32", [[INF, 0.9]])], 0.0, 0, 1),
        ([("FP32", [[0.3], [0.4]])], [("FP32", [[0.5], [0.9]])], None, 0, 2),
        ([("FP32", [[0.3], [0.4]])], [("FP32", [[0.3], [0.9]])], 0.1, 1, 2),
        ([("INT64", [1, 2, 3])], [("INT64", [1, 5, 3])], None, 1, 3),
        ([("BYTES", [[b"cat"], [b"dog"]])], [("BYTES", [[b"cat"], [b"cow"]])], None, 1, 2),
        ([("BYTES", [[b"cat"]]), ("FP32", [[0.7]])], [("BYTES", [[b"cat"]]), ("FP32", [[0.8]])], None, 0, 1),
        ([("BOOL", [[True]])], [("BOOL", [[False]])], None, 1, 1),
        ([("FP32", [[0.1, 0.9]])], [SCORES], None, 2, 2),
        ([("FP64", [[0.1, 0.9], [0.8, 0.2]])], [SCORES], None, 2, 2),
        ([SCORES, SCORES], [SCORES], None, 2, 2),
        ([("FP32", np.zeros((2, 0)))], [("FP32", np.zeros((2, 0)))], None, 0, 2),
        ([("UINT64", [[2**63 + 1]])], [("UINT64", [[2**63]])], None, 1, 1),
    ],
)
def test_items_that_disagree(
    candidate: Any, baseline: Any, tolerance: float | None, disagreed: int, items: int
) -> None:
    found = compare(answer(*candidate), answer(*baseline), batched=True, tolerance=tolerance)
    assert (found.disagreed, found.items) == (disagreed, items)


CLASSES = [[b"0.900000:1", b"0.100000:0"], [b"0.800000:0:cat", b"0.200000:1:dog"]]


@pytest.mark.parametrize(
    ("classes", "tolerance", "disagreed"),
    [
        (CLASSES, None, 0),
        ([[b"0.700000:1", b"0.300000:0"], [b"0.600000:0:cat", b"0.400000:1:dog"]], None, 0),
        ([[b"0.700000:0", b"0.300000:1"], [b"0.600000:0:cat", b"0.400000:1:dog"]], None, 1),
        ([[b"0.900001:1", b"0.099999:0"], [b"0.800000:0:cat", b"0.200000:1:dog"]], 0.001, 0),
        ([[b"0.910000:1", b"0.090000:0"], [b"0.800000:0:cat", b"0.200000:1:dog"]], 0.001, 1),
        ([[b"nan:1", b"0.100000:0"], [b"inf:0:cat", b"0.200000:1:dog"]], 0.001, 2),
        ([[b"0.900000:1"], [b"0.800000:0:cat"]], None, 2),
    ],
)
def test_classes_are_judged_as_the_scores_would_be(classes: Any, tolerance: float | None, disagreed: int) -> None:
    candidate, baseline = answer(("BYTES", classes)), answer(("BYTES", CLASSES))
    found = compare(candidate, baseline, batched=True, tolerance=tolerance, texts=())
    assert (found.disagreed, found.items) == (disagreed, 2)
    same = compare(candidate, candidate, batched=True, tolerance=tolerance, texts=())
    assert same.disagreed == 0


def test_classes_without_a_batch_are_one_item() -> None:
    candidate, baseline = answer(("BYTES", [b"0.7:2", b"0.3:1"])), answer(("BYTES", [b"0.9:2", b"0.1:0"]))
    found = compare(candidate, baseline, batched=False, tolerance=None, texts=())
    assert (found.disagreed, found.items) == (0, 1)
    texts = compare(candidate, baseline, batched=False, tolerance=None, texts=("y0",))
    assert (texts.disagreed, texts.items) == (1, 1)


def test_without_a_batch_a_request_is_one_item() -> None:
    scores = answer(("FP32", [0.1, 0.2, 0.9]))
    other = answer(("FP32", [0.9, 0.2, 0.1]))
    found = compare(other, scores, batched=False, tolerance=None)
    assert (found.items, found.disagreed) == (1, 1)


def test_differences_are_of_all_numbers() -> None:
    found = compare(answer(("FP32", [[1.0, 2.0]])), answer(("FP32", [[1.0, 2.5]])), batched=True, tolerance=None)
    assert (found.difference, found.largest) == (0.25, 0.5)


@pytest.mark.parametrize(("rule", "datatype"), [("tolerance=0.5", "UINT8"), ("equal", "UINT8"), ("argmax", "FP16")])
def test_long_answers_are_compared_in_little_more_memory_than_they_have(rule: str, datatype: str) -> None:
    one = np.zeros((1, 4_000_000), DATATYPES[datatype])
    other = one.copy()
    other[0, -1] = 4
    mine, theirs = (InferResponse("m", "1", (Tensor("y0", datatype, each),)) for each in (one, other))
    tracemalloc.start()
    try:
        found = compare(mine, theirs, batched=True, tolerance=None, agrees=[Agree.parse(f"y0:{rule}")])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.disagreed, found.largest, found.difference) == (1, 4.0, 1e-6)
    assert peak < 6 * one.size, "numbers as float64, all at once, take 8 bytes each, three times"


TOP = ("BYTES", [[b"cat", b"dog", b"cow"], [b"ox", b"hen", b"pig"]])
OTHER_TOP = ("BYTES", [[b"cat", b"cow", b"fox"], [b"hen", b"ox", b"pig"]])


@pytest.mark.parametrize(
    ("candidate", "baseline", "rules", "disagreed"),
    [
        ([OTHER_TOP], [TOP], [], 2),
        ([OTHER_TOP], [TOP], ["y0:equal"], 2),
        ([OTHER_TOP], [TOP], ["y0:first"], 1),
        ([OTHER_TOP], [TOP], ["y0:overlap=0.6"], 0),
        ([OTHER_TOP], [TOP], ["y0:overlap=0.7"], 1),
        ([OTHER_TOP], [TOP], ["y0:overlap=1"], 1),
        ([("BYTES", [[b"cat"], [b"pig"]])], [TOP], ["y0:first"], 1),
        ([("BYTES", [[b"cat"], [b"pig"]])], [TOP], ["y0:overlap=0.3"], 0),
        ([("BYTES", [[b"cat"], [b"pig"]])], [TOP], [], 2),
        ([("BYTES", np.zeros((2, 0), object))], [TOP], ["y0:first"], 2),
        ([("BYTES", np.zeros((2, 0), object))], [TOP], ["y0:overlap=0.1"], 2),
        ([("BYTES", np.zeros((2, 0), object))] * 2, [("BYTES", np.zeros((2, 0), object))] * 2, ["y0:overlap=1"], 0),
        ([("INT64", [[1, 2], [3, 4]])], [("INT64", [[2, 1], [3, 5]])], ["y0:overlap=1"], 1),
        ([("INT64", [[1, 2], [3, 4]])], [("INT64", [[2, 1], [3, 5]])], ["y0:first"], 1),
        ([("INT64", [[1, 2], [3, 4]])], [("INT64", [[2, 1], [3, 5]])], ["y0:tolerance=1"], 0),
        ([("INT64", [[1, 2], [3, 4]])], [("INT64", [[2, 1], [3, 5]])], ["y0:argmax"], 1),
        ([("INT64", [1, 2])], [("INT64", [1, 3])], ["y0:first"], 1),
        ([("FP32", [[1.0], [100.0]])], [("FP32", [[1.5], [101.0]])], ["y0:tolerance=0.6"], 1),
        ([("FP32", [[1.0], [100.0]])], [("FP32", [[1.5], [101.0]])], ["y0:rtol=0.02"], 1),
        ([("FP32", [[1.0], [100.0]])], [("FP32", [[1.5], [101.0]])], ["y0:tolerance=0.5,rtol=0.01"], 0),
        ([("FP32", [[INF], [-INF]])], [("FP32", [[INF], [INF]])], ["y0:rtol=0.5"], 1),
        ([("FP32", [[NAN], [1.0]])], [("FP32", [[NAN], [NAN]])], ["y0:equal"], 1),
        ([("FP32", [[0.1, 0.8], [0.7, 0.6]])], [SCORES], ["y0:argmax"], 0),
        ([("FP32", [[0.1, 0.8], [0.7, 0.6]])], [SCORES], ["y0:equal"], 2),
        ([SCORES, OTHER_TOP], [SCORES, TOP], ["y1:ignore"], 0),
        ([SCORES], [SCORES, TOP], ["y1:ignore"], 0),
        ([SCORES], [SCORES, TOP], ["y1:first"], 2),
    ],
)
def test_a_rule_says_what_counts(candidate: Any, baseline: Any, rules: list[str], disagreed: int) -> None:
    agrees = [Agree.parse(rule) for rule in rules]
    for tolerance in (None, 1e-9):  # what was said of an output comes before what holds for all
        if tolerance is not None and not rules:
            continue
        found = compare(answer(*candidate), answer(*baseline), batched=True, tolerance=tolerance, agrees=agrees)
        assert (found.disagreed, found.items) == (disagreed, 2)


def test_where_nothing_that_counts_has_come_there_is_no_evidence() -> None:
    ignored = [Agree.parse("y0:ignore")]
    assert agreement(answer(SCORES), answer(SCORES), batched=True, tolerance=None, agrees=ignored) is None


@pytest.mark.parametrize(
    ("rule", "disagreed"),
    [("argmax", 1), ("equal", 2), ("tolerance=0.25", 0), ("rtol=0.1", 2), ("overlap=1", 0), ("ignore", None)],
)
def test_classes_are_held_to_the_rule_of_their_scores(rule: str, disagreed: int | None) -> None:
    other = [[b"0.700000:1", b"0.300000:0"], [b"0.600000:1:dog", b"0.400000:0:cat"]]
    agrees = [Agree.parse(f"y0:{rule}")]
    found = agreement(
        answer(("BYTES", other)), answer(("BYTES", CLASSES)), batched=True, tolerance=None, texts=(), agrees=agrees
    )
    assert (None if found is None else found.disagreed) == disagreed


OUTPUTS = (
    TensorMetadata("label", "BYTES", (-1, 1)), TensorMetadata("labels", "BYTES", (-1, 3)),
    TensorMetadata("ids", "INT64", (-1, -1)), TensorMetadata("scores", "FP32", (-1, 10)),
    TensorMetadata("probability", "FP16", (-1, 1)), TensorMetadata("sure", "BOOL", (-1, 1)),
    TensorMetadata("count", "UINT8", (-1,)),
)  # fmt: skip
FITTING = {
    "equal": {"label", "labels", "ids", "scores", "probability", "sure", "count"},
    "first": {"label", "labels", "ids", "count"},
    "overlap=0.5": {"labels", "ids"},
    "argmax": {"ids", "scores"},
    "tolerance=0.1": {"ids", "scores", "probability", "count"},
    "rtol=0.1": {"ids", "scores", "probability", "count"},
    "ignore": {"label", "labels", "ids", "scores", "probability", "sure", "count"},
}


@pytest.mark.parametrize("rule", FITTING)
def test_a_rule_fits_the_datatype_and_shape_of_its_output(rule: str) -> None:
    model = ModelMetadata("m", ("1",), (), OUTPUTS, batched=True)
    told = {output.name: misfit([Agree.parse(f"{output.name}:{rule}")], model) for output in OUTPUTS}
    assert {name for name, why in told.items() if not why} == FITTING[rule]
    for name, why in told.items():
        assert not why or (f"--agree {name}:" in why and "; take " in why)


def test_rules_for_outputs_that_are_not_there_or_leave_nothing_are_told() -> None:
    model = ModelMetadata("m", ("1",), (), OUTPUTS[:2], batched=True)
    told = misfit([Agree.parse("lable:first")], model)
    assert told == "--agree lable:first: m has no such output; name one of label, labels"
    assert "leave one" in misfit([Agree.parse("label:ignore"), Agree.parse("labels:ignore")], model)
    assert not misfit([Agree.parse("label:ignore")], model)
    whole = ModelMetadata("m", ("1",), (), (TensorMetadata("y", "FP32", (10,)),), batched=False)
    assert not misfit([Agree.parse("y:argmax")], whole)


def metadata(inputs: list[tuple[str, str, tuple[int, ...]]]) -> ModelMetadata:
    tensors = tuple(TensorMetadata(*each) for each in inputs)
    return ModelMetadata("m", ("1",), tensors, (TensorMetadata("y", "FP32", (-1, 3)),), batched=True)


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ([("x", "FP32", (-1, 4))], ""),
        ([("x", "FP32", (8, 4))], ""),
        ([("z", "FP32", (-1, 4))], "its inputs are z, the baseline's x"),
        ([("x", "FP16", (-1, 4))], "it has x:FP16[-1,4], the baseline x:FP32[-1,4]"),
        ([("x", "FP32", (-1, 5))], "it has x:FP32[-1,5]"),
        ([("x", "FP32", (-1, 4, 1))], "it has x:FP32[-1,4,1]"),
    ],
)
def test_a_candidate_must_take_what_the_baseline_takes(
    inputs: list[tuple[str, str, tuple[int, ...]]], told: str
) -> None:
    found = unlike(metadata(inputs), metadata([("x", "FP32", (-1, 4))]))
    assert found.startswith(told)
    assert bool(found) == bool(told)
