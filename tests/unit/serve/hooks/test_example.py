"""The sample request that a packed ensemble keeps for a gateway to show."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from serve.config.pbtxt import from_pbtxt
from serve.pack.write import pack
from tests.serve_models import hook_file, tiny_artifact


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return tiny_artifact(tmp_path / "artifact")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "models"


def example_of(repository: Path) -> str | None:
    return from_pbtxt((repository / "tiny/config.pbtxt").read_text()).parameters.get("example_inputs")


@pytest.mark.parametrize(
    ("annotation", "value", "entry"),
    [
        ("str", "'é'", {"datatype": "BYTES", "shape": [1, 1], "data": ["é"]}),
        (
            "bytes",
            r"b'\xff\x00'",
            {"datatype": "BYTES", "shape": [1, 1], "base64": base64.b64encode(b"\xff\x00").decode()},
        ),
        ("int", "7", {"datatype": "INT64", "shape": [1, 1], "data": [7]}),
        ("float", "0.5", {"datatype": "FP32", "shape": [1, 1], "data": [0.5]}),
        ("bool", "True", {"datatype": "BOOL", "shape": [1, 1], "data": [True]}),
        ("Annotated[Any, 'uint8[1,2]']", "[[1, 2]]", {"datatype": "UINT8", "shape": [1, 1, 2], "data": [1, 2]}),
    ],
)
def test_the_example_is_kept_as_a_request(
    tmp_path: Path, artifact: Path, repository: Path, annotation: str, value: str, entry: dict[str, object]
) -> None:
    text = (
        "from typing import *\nimport numpy as np\n"
        f"def preprocess(item: {annotation}): return np.zeros(4, np.float32)\n"
        f"def example(): return dict(item={value})\n"
    )
    pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path, text))
    assert json.loads(example_of(repository) or "") == {"inputs": [{"name": "item", **entry}]}


@pytest.mark.parametrize("value", ["float('nan')", "np.float16(1)", "'x' * 70_000"])
def test_an_example_that_no_json_request_can_hold_is_left_out(
    tmp_path: Path, artifact: Path, repository: Path, value: str
) -> None:
    annotation = "str" if "'x'" in value else "np.float16" if "16" in value else "float"
    text = f"import numpy as np\ndef preprocess(item: {annotation}): return np.zeros(4, np.float32)\n"
    hooks = hook_file(tmp_path, f"{text}def example(): return dict(item={value})")
    pack(artifact, repository=repository, name="tiny", hooks=hooks)
    assert example_of(repository) is None
