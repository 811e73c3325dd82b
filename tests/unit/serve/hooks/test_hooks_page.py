"""docs/hooks.md: what it says of hooks is what the code takes; `tests/integration` has its examples on a real Triton."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from compress.artifact import Artifact
from compress.errors import SignatureError
from serve.hooks.check import check_hooks
from serve.hooks.load import load_hooks
from serve.hooks.types import of_annotation
from tests.hooks_page import EXAMPLES, PAGE, HookExample, written
from tests.serve_models import tiny_artifact


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_each_example_is_taken_and_answers_as_the_page_says(example: HookExample, tmp_path: Path) -> None:
    source = Artifact.load(tiny_artifact(tmp_path / "tiny"))
    hooks = load_hooks(written(example, tmp_path), source.signature)
    assert hooks.example is not None
    last = check_hooks(hooks, source, hooks.example)[-1].made
    wanted = example.answer[0] if hooks.streams else example.answer
    plain = {name: value.reshape(-1).tolist() for name, value in last.items()}
    told = {name: value if isinstance(value, list) else [value] for name, value in wanted.items() if name in last}
    assert {name: [as_text(each) for each in values] for name, values in plain.items()} == told


def as_text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def test_the_examples_have_each_form_that_a_module_may_have() -> None:
    code = "\n".join(example.code for example in EXAMPLES)
    defined = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)}
    assert defined == {"preprocess", "postprocess", "example", "admit"}
    assert all(
        word in code for word in ("REQUIREMENTS =", "FILES =", "yield ", "list[str]", "list[Answer]", "Annotated[")
    )


ROWS = re.findall(r"^\| (`[^|]+`[^|]*) \| (TYPE_\w+|their own|the same) \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("annotation", "data_type"), ROWS, ids=[row[0] for row in ROWS])
def test_each_annotation_is_the_tensor_that_the_table_says(annotation: str, data_type: str) -> None:
    assert len(ROWS) == 10
    names = {"np": np, "Annotated": Annotated}
    for text in re.findall(r"`([^`]+)`", annotation):
        if text == "list[...]":
            for inner in ("bytes", "str", "int", "float", "bool", "np.uint8"):
                assert of_annotation("a", eval(f"list[{inner}]", names)).batchwise  # noqa: S307 - the page's own
        elif text != "batch":
            found = of_annotation("a", eval(text, names))  # noqa: S307 - the page's own
            assert found.data_type == data_type or (data_type == "their own" and not found.batchwise)


def test_a_dict_is_none() -> None:
    with pytest.raises(SignatureError):
        of_annotation("a", dict)
