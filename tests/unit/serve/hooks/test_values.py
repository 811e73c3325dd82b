"""What Triton runs for a hook: what it needs, and how it turns values into tensors and back."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from serve.hooks.packed import values as hook_values
from serve.hooks.packed.values import Hook, named, to_array, to_value

SERVE = Path(hook_values.__file__).parents[2]


@pytest.mark.parametrize(
    ("path", "needs"),
    [
        ("hooks/packed/values.py", {"numpy", "packaging"}),
        ("hooks/packed/model.py", {"numpy", "hook_values", "triton_python_backend_utils"}),
        ("triton/backends/onnxruntime/model.py", {"numpy", "onnxruntime", "triton_python_backend_utils"}),
    ],
)
def test_what_triton_loads_needs_nothing_of_ours(path: str, needs: set[str]) -> None:
    found: set[str] = set()
    for node in ast.walk(ast.parse((SERVE / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    assert found - sys.stdlib_module_names == needs


@pytest.mark.parametrize(
    ("value", "kind", "data_type", "dims"),
    [
        (b"\xff\x00", "bytes", "TYPE_STRING", (1,)),
        ("é", "str", "TYPE_STRING", (1,)),
        (-3, "int", "TYPE_INT64", (1,)),
        (0.5, "float", "TYPE_FP32", (1,)),
        (True, "bool", "TYPE_BOOL", (1,)),
        (np.float64(0.1), "scalar", "TYPE_FP64", (1,)),
        (np.uint8(255), "scalar", "TYPE_UINT8", (1,)),
    ],
)
def test_a_value_becomes_a_tensor_and_comes_back(value: Any, kind: str, data_type: str, dims: tuple[int, ...]) -> None:
    array = to_array(value, kind, data_type, dims)
    assert array.shape == dims
    back = to_value(array, kind)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    ("value", "data_type", "dims", "expected"),
    [
        (np.ones((2, 3), np.float32), "TYPE_FP32", (-1, 3), [[1, 1, 1], [1, 1, 1]]),
        ([1, 2], "TYPE_UINT8", (2,), [1, 2]),
        ([[1], [2.5]], "TYPE_FP32", (2, 1), [[1], [2.5]]),
        (np.float32(2), "TYPE_FP32", (), 2),
        (["a", b"\xff"], "TYPE_STRING", (2,), [b"a", b"\xff"]),
        (np.array(["ab", "c"]), "TYPE_STRING", (2,), [b"ab", b"c"]),
    ],
)
def test_an_array_is_taken_as_it_is_and_a_list_for_one(
    value: Any, data_type: str, dims: tuple[int, ...], expected: object
) -> None:
    assert to_array(value, "array", data_type, dims).tolist() == expected


@pytest.mark.parametrize(
    ("value", "kind", "data_type", "dims", "message"),
    [
        (np.zeros(3), "array", "TYPE_FP32", (3,), r"gave float64\[3\], wanted float32\[3\]"),
        (np.zeros(3, np.float32), "array", "TYPE_FP32", (-1, 3), r"gave float32\[3\], wanted float32\[\?,3\]"),
        (None, "array", "TYPE_STRING", (1,), r"gave string\[\], wanted string\[1\]"),
        ("3", "float", "TYPE_FP32", (1,), "gave str, wanted float"),
        (3.5, "int", "TYPE_INT64", (1,), "integer"),
        (300, "scalar", "TYPE_UINT8", (1,), "gave 300, too large for uint8"),
        ([-1, 3], "array", "TYPE_UINT8", (2,), "gave -1, too large for uint8"),
        ([0.5], "array", "TYPE_INT64", (1,), r"gave float64\[1\], wanted int64\[1\]"),
        (2**63, "int", "TYPE_INT64", (1,), "too large"),
        (1, "bool", "TYPE_BOOL", (1,), "gave int, wanted bool"),
        (3, "str", "TYPE_STRING", (1,), "gave int, wanted bytes or str"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_wanted(
    value: Any, kind: str, data_type: str, dims: tuple[int, ...], message: str
) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError), match=message):
        to_array(value, kind, data_type, dims)


@pytest.mark.parametrize(
    ("result", "names", "returns", "expected"),
    [
        (5, ["x"], "value", {"x": 5}),
        ({"x": 5}, ["x"], "value", {"x": 5}),
        ((5, 6), ["x"], "value", {"x": (5, 6)}),
        ((5, 6), ["x", "y"], "tuple", {"x": 5, "y": 6}),
        ({"y": 6, "x": 5}, ["x", "y"], "mapping", {"x": 5, "y": 6}),
    ],
)
def test_results_are_told_by_name(result: Any, names: Sequence[str], returns: str, expected: dict[str, Any]) -> None:
    assert named(result, names, returns) == expected


@pytest.mark.parametrize(
    ("result", "names", "returns"),
    [
        ((5,), ["x", "y"], "tuple"),
        (5, ["x", "y"], "mapping"),
        ({"x": 5}, ["x", "y"], "mapping"),
        (None, ["x"], "tuple"),
    ],
)
def test_results_that_are_not_all_there_are_refused(result: Any, names: Sequence[str], returns: str) -> None:
    with pytest.raises(TypeError, match=r"wanted .*x"):
        named(result, names, returns)


@pytest.mark.parametrize(
    ("kind", "name", "ours"),
    [
        (ValueError, "preprocess", False),
        (UnicodeError, "preprocess", False),
        (UnidentifiedImageError, "preprocess", False),
        (Image.DecompressionBombError, "preprocess", False),
        (OSError, "preprocess", True),
        (KeyError, "preprocess", True),
        (ValueError, "postprocess", True),
        (UnidentifiedImageError, "postprocess", True),
    ],
)
def test_bad_input_is_the_clients_fault_and_all_else_ours(kind: type[Exception], name: str, ours: bool) -> None:
    hook = Hook(name, print, {"arguments": {}, "results": {}, "returns": "value"}, "hooks.py")
    assert hook.at_fault(kind()) is not ours


def test_a_request_is_admitted_as_a_whole_before_any_of_it_is_worked_on() -> None:
    seen: list[object] = []

    def admit(image: list[bytes]) -> None:
        seen.append(image)
        if sum(map(len, image)) > 3:
            raise ValueError("too much")

    def preprocess(image: bytes) -> bool:
        seen.append(image)
        return True

    spec = {"arguments": {"image": "bytes"}, "results": {"made": ["bool", "TYPE_BOOL", [1]]}, "returns": "value"}
    hook = Hook("preprocess", preprocess, spec, "hooks.py", admit)
    assert hook.many({"image": np.array([[b"a"], [b"bb"]], object)})["made"].shape == (2, 1)
    assert seen == [[b"a", b"bb"], b"a", b"bb"]
    for call, given in ((hook.many, [[b"aa"], [b"bb"]]), (hook.one, [b"aaaa"]), (hook.sample, [b"aaaa"])):
        seen.clear()
        with pytest.raises(ValueError, match="too much") as caught:
            call({"image": np.array(given, object)})
        assert hook.at_fault(caught.value)
        assert len(seen) == 1
    Hook("postprocess", preprocess, spec, "hooks.py", admit).one({"image": np.array([b"aaaa"], object)})
