"""What `--agree` says is read once, and kept as it was said."""

from __future__ import annotations

import json

import pytest

from compress.errors import ServerError
from serve.rollout.agree import Agree
from serve.rollout.plan import Plan


@pytest.mark.parametrize(
    ("text", "rule", "told"),
    [
        ("label:first", Agree("label", "first"), "label:first"),
        ("labels:overlap=0.6", Agree("labels", "overlap", overlap=0.6), "labels:overlap=0.6"),
        ("labels:overlap=1", Agree("labels", "overlap", overlap=1.0), "labels:overlap=1.0"),
        ("y:tolerance=0.05", Agree("y", "close", atol=0.05), "y:tolerance=0.05"),
        ("y:tolerance=0", Agree("y", "close"), "y:tolerance=0.0"),
        ("y:rtol=1e-3", Agree("y", "close", rtol=0.001), "y:rtol=0.001"),
        ("y:rtol=.5,tolerance=2.", Agree("y", "close", atol=2.0, rtol=0.5), "y:tolerance=2.0,rtol=0.5"),
        ("scores:argmax", Agree("scores", "argmax"), "scores:argmax"),
        ("output:0:equal", Agree("output:0", "equal"), "output:0:equal"),
        ("boxes:function=alike", Agree("boxes", "function", function="alike"), "boxes:function=alike"),
        ("a b;c:ignore", Agree("a b;c", "ignore"), "a b;c:ignore"),
    ],
)
def test_rules_are_read_and_written(text: str, rule: Agree, told: str) -> None:
    assert Agree.parse(text) == rule
    assert str(rule) == told
    assert Agree.parse(told) == rule


@pytest.mark.parametrize(
    "text",
    [
        "", "label", ":first", "label:", "label:First", "label:overlap", "label:overlap=0", "label:overlap=1.1",
        "label:overlap=nan", "label:overlap=0.5,rtol=1", "y:tolerance=-1", "y:tolerance=inf", "y:tolerance=1e999",
        "y:rtol=1,rtol=2", "y:tolerance=1,", "y:tolerance= 1", "y:tolerance=1_0", "y:first=1", "y\n:first", "y:atol=1",
        "y" * 300 + ":first", "y:function", "y:function=", "y:function=_x", "y:function=a.b", "y:function=os;x",
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused_with_the_rules_there_are(text: str) -> None:
    with pytest.raises(ServerError) as err:
        Agree.parse(text)
    assert "overlap=0.6" in err.value.mend
    assert len(str(err.value).splitlines()) == 3


def test_a_plan_keeps_its_rules_in_the_state_file() -> None:
    plan = Plan(agree=(Agree.parse("label:first"), Agree.parse("y:tolerance=0.1")), expect_change=True)
    kept = json.loads(json.dumps(plan.to_dict()))
    assert kept["agree"] == ["label:first", "y:tolerance=0.1"]
    assert Plan.from_dict(kept) == plan
    assert plan.agreement == (
        "answers agree by label:first, y:tolerance=0.1; a change is expected: agreement is not judged"
    )
    del kept["agree"], kept["expect_change"]
    assert Plan.from_dict(kept) == Plan(), "the file of an earlier release"
    assert Plan().agreement == ""


@pytest.mark.parametrize(
    ("agree", "shadow", "told"),
    [(("y:first", "y:equal"), 10.0, "names the output 'y' twice"), (("y:first",), 0.0, "--shadow 0 makes none")],
)
def test_rules_that_can_not_stand_together_are_refused(agree: tuple[str, ...], shadow: float, told: str) -> None:
    with pytest.raises(ServerError) as err:
        Plan(agree=tuple(map(Agree.parse, agree)), shadow=shadow)
    assert told in err.value.why
