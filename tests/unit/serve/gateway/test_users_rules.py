"""Rules that are functions of the operator's file: what they say holds, and what they can't say is told."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from compress.errors import ServerError
from serve.gateway.release.agreement import Agreement, FunctionError
from serve.gateway.release.users_rules import UsersRules
from serve.rollout.agree import Agree

RULES = """
import os
import time

import numpy as np

def near(candidate, baseline):
    return bool(np.abs(candidate - baseline).max() < 0.5)

def shorter(candidate, baseline):
    return candidate.size <= baseline.size

def words(candidate, baseline):
    return [each.lower() for each in candidate] == [each.lower() for each in baseline]

def raises(candidate, baseline):
    raise ValueError("no boxes\\n")

def number(candidate, baseline):
    return 0.93

def hangs(candidate, baseline):
    time.sleep(60)

def ends(candidate, baseline):
    os._exit(3)

def eats(candidate, baseline):
    return bool(np.ones(2**30).any())

def exits(candidate, baseline):
    raise SystemExit("enough")

def _helper(candidate, baseline):
    return True

def one(candidate):
    return True
"""


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UsersRules]:
    path = tmp_path_factory.mktemp("rules") / "rules.py"
    path.write_text(RULES)
    made = UsersRules(path, seconds=20.0, memory_bytes=1024**3)
    yield made
    made.close()


def told(rows: list[list[object]], datatype: str = "FP32") -> tuple[bytes, None, None]:
    flat = [value for row in rows for value in row]
    output = {"name": "y", "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": flat}
    return json.dumps({"model_name": "m", "outputs": [output]}).encode(), None, None


def compare(
    rules: UsersRules, name: str, mine: list[list[object]], theirs: list[list[object]], datatype: str = "FP32"
) -> Agreement | None:
    texts = frozenset({"y"} if datatype == "BYTES" else ())
    agrees = (Agree.parse(f"y:function={name}"),)
    return rules.compare(told(mine, datatype), told(theirs, datatype), 1 << 20, True, None, texts, agrees)


def test_functions_of_two_arguments_are_rules(rules: UsersRules) -> None:
    assert rules.names == {"near", "shorter", "words", "raises", "number", "hangs", "ends", "eats", "exits"}


@pytest.mark.parametrize(
    ("name", "mine", "theirs", "datatype", "disagreed"),
    [
        ("near", [[1, 2], [3, 4]], [[1.1, 2], [3, 5]], "FP32", 1),
        ("near", [[1, 2]], [[1, 2]], "FP32", 0),
        ("shorter", [[1, 2]], [[1, 2, 3]], "FP32", 0),
        ("shorter", [[1, 2, 3], [1, 2, 3]], [[1, 2], [1, 2]], "FP32", 2),
        ("words", [["A", "b"]], [["a", "B"]], "BYTES", 0),
        ("near", [[1, 2]], [[1, 2], [3, 4]], "FP32", 2),
    ],
)  # fmt: skip
def test_each_item_is_judged_by_the_function(
    rules: UsersRules, name: str, mine: list[list[object]], theirs: list[list[object]], datatype: str, disagreed: int
) -> None:
    found = compare(rules, name, mine, theirs, datatype)
    assert found is not None
    assert (found.items, found.disagreed) == (len(theirs), disagreed)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", r"raises: ValueError: no boxes  \(line 17\)"),
        ("number", r"number gave 0.93 \(float\), and True or False is wanted"),
        ("exits", "exits: SystemExit: enough"),
        ("eats", "MemoryError"),
        ("ends", r"its process ended \(3\)"),
    ],
)
def test_what_gives_no_judgement_is_told_and_the_next_is_judged(rules: UsersRules, name: str, why: str) -> None:
    with pytest.raises(FunctionError, match=why):
        compare(rules, name, [[1, 2]], [[1, 2]])
    assert compare(rules, "near", [[1, 2]], [[1, 2]]) == Agreement(1, 0, 0.0, 0.0)


def test_a_function_that_hangs_is_ended_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULES)
    rules = UsersRules(tmp_path / "rules.py", seconds=0.5)
    process = rules._process
    begun = time.monotonic()
    with pytest.raises(FunctionError, match=r"took more than 0\.5 s"):
        compare(rules, "hangs", [[1, 2]], [[1, 2]])
    assert time.monotonic() - begun < 30, "it sleeps for 60"
    assert process.exitcode == -9
    rules.close()


def test_answers_that_nobody_can_read_are_no_functions_fault(rules: UsersRules) -> None:
    agrees = (Agree.parse("y:function=near"),)
    with pytest.raises(ValueError, match="not JSON"):
        rules.compare((b"{", None, None), (b"{", None, None), 1 << 20, True, None, frozenset(), agrees)


def test_the_rule_in_the_documentation_works_as_it_stands(tmp_path: Path) -> None:
    page = Path(__file__).parents[4] / "docs/gateway.md"
    (text,) = re.findall(r"```py\n(# rules\.py.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "rules.py").write_text(text)
    space: dict[str, object] = {}
    exec(text, space)  # noqa: S102  our own page
    alike = space["alike"]
    assert callable(alike)
    boxes = np.array([[0, 0, 10, 10], [20, 20, 30, 30]], np.float32)
    none = np.empty((0, 4), np.float32)
    assert [alike(boxes[::-1] + 1, boxes), alike(boxes, boxes + 8), alike(boxes[:1], boxes), alike(none, none)] == [
        True, False, False, True
    ]  # fmt: skip
    rules = UsersRules(tmp_path / "rules.py")
    rules.close()
    assert rules.names == {"alike"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def near(", "SyntaxError"),
        ("import no_such_module", r"No module named 'no_such_module' \(line 1\)"),
        ("near = 3", "no function of two arguments"),
        ("from operator import eq", "no function of two arguments"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "its process ended"),
    ],
)
def test_a_file_that_can_not_be_used_is_an_error_before_anything_is_served(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "rules.py").write_text(text)
    with pytest.raises(ServerError, match="can't use --agree-module") as caught:
        UsersRules(tmp_path / "rules.py")
    assert len(str(caught.value).splitlines()) == 3
    assert re.search(why, caught.value.why)
