"""`serve hooks check`: one request through hooks and network, without a server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from compress.artifact import Artifact
from compress.errors import HookError, RepositoryError
from serve.cli.main import main
from serve.hooks.check import shown
from tests.hook_checks import steps_of, tried_of
from tests.serve_models import HOOKS, artifact_of, hook_file, text_artifact, tiny_artifact

UPPER = """
from typing import Annotated

import numpy as np


def preprocess(first: str, second: str) -> np.ndarray:
    return np.array([first.upper(), second.upper()], object)
"""


@pytest.fixture
def source(tmp_path: Path) -> Artifact:
    return Artifact.load(tiny_artifact(tmp_path / "artifact"))


def test_the_hooks_own_example_goes_all_the_way(source: Artifact, tmp_path: Path) -> None:
    steps = steps_of(hook_file(tmp_path), source, None)
    assert [step.name for step in steps] == ["preprocess", "network", "postprocess"]
    assert steps[0].made["x"].tolist() == [0, 2, 1, 0]
    assert steps[1].made["logits"].tolist() == [0, 2, 1]
    assert steps[2].made["label"].tolist() == [b"b"]
    assert all(0 <= step.seconds < 5 for step in steps)


def test_a_file_goes_all_the_way(source: Artifact, tmp_path: Path) -> None:
    hooks = hook_file(tmp_path, HOOKS.replace("text: str", "text: bytes").replace("text.split", "text.decode().split"))
    (tmp_path / "x.txt").write_text("9,0,0,0", encoding="utf-8")
    assert steps_of(hooks, source, tmp_path / "x.txt")[-1].made["label"].tolist() == [b"a"]


def test_values_by_name_go_all_the_way(tmp_path: Path) -> None:
    source = Artifact.load(text_artifact(tmp_path / "artifact"))
    (tmp_path / "x.json").write_text(json.dumps({"first": "ä", "second": "b"}), encoding="utf-8")
    steps = steps_of(hook_file(tmp_path, UPPER), source, tmp_path / "x.json")
    assert [step.name for step in steps] == ["preprocess", "network"]
    assert steps[1].made["same"].tolist() == ["Ä", "B"]


@pytest.mark.parametrize(
    ("text", "why"),
    [("1,2,x,4", "preprocess: it failed: ValueError"), ("1,2", "x: gave float32[2], wanted float32[4]")],
)
def test_a_hook_that_fails_is_told_with_its_line(source: Artifact, tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"text": text}), encoding="utf-8")
    with pytest.raises(HookError, match=r"my_hooks\.py:") as caught:
        steps_of(hook_file(tmp_path), source, tmp_path / "x.json")
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [("x.json", "{}", "wanted text"), ("x.json", "[", "Expecting"), ("gone.json", None, "No such file")],
)
def test_a_file_that_does_not_fit_is_refused(
    source: Artifact, tmp_path: Path, file: str, content: str | None, why: str
) -> None:
    if content is not None:
        (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(RepositoryError, match="can't try") as caught:
        steps_of(hook_file(tmp_path), source, tmp_path / file)
    assert why in caught.value.why


def test_a_bad_json_is_told_what_to_hold(source: Artifact, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[", encoding="utf-8")
    with pytest.raises(RepositoryError) as caught:
        steps_of(hook_file(tmp_path), source, tmp_path / "x.json")
    assert caught.value.mend == 'give a .json file of {"text": …}'


def test_a_pipe_that_nobody_writes_to_is_refused(source: Artifact, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(RepositoryError, match="can't try") as caught:
        steps_of(hook_file(tmp_path), source, tmp_path / "x.json")
    assert "it is no file" in caught.value.why


def test_bytes_that_are_no_text_are_not_given_to_a_network_of_texts(tmp_path: Path) -> None:
    source = Artifact.load(text_artifact(tmp_path / "artifact"))
    hooks = (
        UPPER.replace("first.upper()", 'b"\\xff"') + "\n\ndef example():\n    return {'first': 'a', 'second': 'b'}\n"
    )
    with pytest.raises(RepositoryError, match="can't run") as caught:
        steps_of(hook_file(tmp_path, hooks), source, None)
    assert "strings are UTF-8" in caught.value.why


def test_a_network_that_answers_nan_is_told(tmp_path: Path) -> None:
    """Logarithms of negative numbers: of a good sample it ends the check, of a bad one it is told."""
    node = helper.make_node("Log", ["x"], ["y"])
    source = Artifact.load(artifact_of(tmp_path / "a", [node], ["x:float32[batch,1]"], ["y:float32[batch,1]"]))
    text = (
        "import numpy as np\ndef preprocess(value: float):\n    return np.array([value], np.float32)\n"
        "def example(): return {'value': 1.0}\n"
    )
    hooks = hook_file(tmp_path, text)
    tried = {one.given: one.message for one in tried_of(hooks, source, None)}
    assert "the network answers NaN (y)" in tried["the lowest number"]
    assert tried["infinity"] == ""
    (tmp_path / "x.json").write_text('{"value": -1.0}', encoding="utf-8")
    with pytest.raises(RepositoryError, match="can't use what") as caught:
        steps_of(hooks, source, tmp_path / "x.json")
    assert "y is NaN" in caught.value.why


@pytest.mark.parametrize(
    ("annotation", "given", "status"),
    [
        ("int", "value", {"the lowest number": 500, "the highest": 500}),
        ("str", "len(value)", {"10,000 letters": 500, "a word": None}),
    ],
)
def test_what_preprocess_takes_and_the_network_fails_over_is_told(
    annotation: str, given: str, status: dict[str, int | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row of a table of 20, as a token's embedding is."""
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"])]
    table = {"table": np.arange(20, dtype=np.float32)}
    folder = artifact_of(tmp_path / "a", nodes, ["x:int64[batch,1]"], ["y:float32[batch,1]"], table)
    text = (
        f"import numpy as np\ndef preprocess(value: {annotation}):\n    return np.array([{given}], np.int64)\n"
        f"def example(): return {{'value': {'7' if annotation == 'int' else repr('seven')}}}\n"
    )
    tried = {one.given: one for one in tried_of(hook_file(tmp_path, text), Artifact.load(folder), None)}
    assert {given: tried[given].status for given in status} == status
    failed = next(name for name, code in status.items() if code == 500)
    assert "the network fails" in tried[failed].message
    assert "and the table that it is looked up in has 20 rows, for 0 to 19" in tried[failed].message
    with pytest.raises(SystemExit):
        main(["hooks", "check", str(tmp_path / "my_hooks.py"), "--artifact", str(folder)])
    told = capsys.readouterr().out
    assert f"value = {failed} fails (500): the network fails" in told


def test_several_texts_of_one_item_are_told_how_they_are_annotated(source: Artifact, tmp_path: Path) -> None:
    """A list is a whole batch's; who wants three labels of one item means something else."""
    text = HOOKS.replace("label: str\n    score: float", "labels: list[str]")
    asked = text.replace('Answer("abc"[best], float(logits[best]))', 'Answer(["a", "b", "c"])')
    with pytest.raises(HookError) as caught:
        steps_of(hook_file(tmp_path, asked), source, None)
    assert "labels: gave 3 for a batch of 1" in caught.value.why
    assert "Annotated[np.ndarray, 'string[3]']" in caught.value.mend
    spelled = asked.replace("labels: list[str]", "labels: Annotated[np.ndarray, 'string[3]']")
    given = spelled.replace("import NamedTuple", "import Annotated, NamedTuple")
    steps = steps_of(hook_file(tmp_path / "mended", given), source, None)
    assert steps[-1].made["labels"].tolist() == [b"a", b"b", b"c"]


def test_without_a_file_and_an_example_there_is_nothing_to_try(source: Artifact, tmp_path: Path) -> None:
    hooks = hook_file(tmp_path, HOOKS[: HOOKS.index("def example")])
    with pytest.raises(RepositoryError, match="can't try"):
        steps_of(hooks, source, None)


def test_the_command_shows_each_step(source: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["hooks", "check", str(hook_file(tmp_path)), "--artifact", str(source.folder)])
    assert ended.value.code in (0, None)
    told = capsys.readouterr().out
    assert "gives x = float32[4] 0, 2, 1, 0" in told
    assert "gives label = 'b'" in told
    assert "text = nothing is refused (400): hooks.py preprocess: ValueError" in told
    assert "text = bytes that are no UTF-8 is refused (400)" in told


STATUSES = """
import numpy as np

def preprocess(text: str) -> np.ndarray:
    assert text != "unexpected"
    if not text:
        raise ValueError("text is empty")
    if len(text) > 100:
        raise SystemExit("too long")
    return np.zeros(4, np.float32)

def example() -> dict[str, str]:
    return {"text": "good"}
"""


def test_bad_input_is_refused_fails_or_is_taken(source: Artifact, tmp_path: Path) -> None:
    tried = tried_of(hook_file(tmp_path, STATUSES), source, None)
    assert {one.given: one.status for one in tried} == {
        "nothing": 400, "one NUL": None, "a word": 500, "10,000 letters": 500, "bytes that are no UTF-8": 400,
    }  # fmt: skip
    assert "text is empty (line 7)" in tried[0].message
    assert "AssertionError" in tried[2].message
    assert "SystemExit: too long" in tried[3].message


def test_a_failure_on_bad_input_is_told_with_its_mend(
    source: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["hooks", "check", str(hook_file(tmp_path, STATUSES)), "--artifact", str(source.folder)])
    told = capsys.readouterr().out
    assert "text = a word fails (500): hooks.py preprocess: AssertionError" in told
    assert "raise a ValueError where the input is" in told


@pytest.mark.parametrize(
    ("annotation", "example", "given"),
    [
        ("bytes", "b'four'", ["nothing", "one NUL", "a word", "10,000 letters", "half of the sample"]),
        ("float", "1.0", ["NaN", "infinity", "the lowest number"]),
        ("np.int8", "1", ["the lowest number", "the highest"]),
        ("bool", "True", []),
        ("Annotated[Any, 'uint8[n,2]']", "[[1, 2]]", ["the lowest number", "the highest", "no element at all"]),
        ("list[bytes]", "b'four'", ["nothing", "one NUL", "a word", "10,000 letters", "half of the sample"]),
    ],
)
def test_each_kind_of_argument_has_bad_input_of_its_own(
    source: Artifact, tmp_path: Path, annotation: str, example: str, given: list[str]
) -> None:
    text = (
        "from typing import *\nimport numpy as np\n"
        f"def preprocess(item: {annotation}):\n"
        f"    return np.zeros((1, 4) if {annotation.startswith('list')} else 4, np.float32)\n"
        f"def example(): return dict(item={example})\n"
    )
    assert [one.given for one in tried_of(hook_file(tmp_path, text), source, None)] == given


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array([b"b"], object), "'b'"),
        (np.array([b"\xff"], object), r"'\\xff'"),
        (np.float32(0.1), "0.1"),
        (np.arange(3, dtype=np.int64), "int64[3] 0, 1, 2"),
        (np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
         "float32[3, 4] 0, 0.090909, 0.18182, 0.27273, 0.36364, 0.45455, … (least 0, most 1)"),
        (np.array([b"a", b"x" * 99], object), f"string[2] 'a', '{'x' * 60}…'"),
        (np.zeros((0, 2)), "float64[0, 2] "),
        (np.array([True, False]), "bool[2] True, False"),
    ],
)  # fmt: skip
def test_values_are_shown(value: Any, text: str) -> None:
    assert shown(value) == text
