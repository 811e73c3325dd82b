"""A user's hook module: what it may say, and what each mistake is told."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from compress.artifact import Signature, TensorSpec
from compress.errors import HookError
from serve.hooks.load import Hooks, load_hooks
from tests.serve_models import HOOKS, hook_file

TINY = Signature((TensorSpec.parse("x:float32[batch,4]"),), (TensorSpec.parse("logits:float32[batch,3]"),))
PAIR = Signature(
    (TensorSpec.parse("a:float32[batch,length]"), TensorSpec.parse("b:int64[batch,2]")),
    (TensorSpec.parse("total:float32[batch]"),),
)
NUMPY = "from typing import *\nimport numpy as np\n"


def load(folder: Path, text: str, signature: Signature = TINY) -> Hooks:
    return load_hooks(hook_file(folder, text), signature)


def refusal(folder: Path, text: str, signature: Signature = TINY) -> HookError:
    with pytest.raises(HookError) as caught:
        load(folder, text, signature)
    return caught.value


def test_a_whole_module_is_read(tmp_path: Path) -> None:
    hooks = load(tmp_path, HOOKS)
    assert hooks.preprocess is not None
    assert hooks.postprocess is not None
    assert [(item.name, item.data_type, item.kind) for item in hooks.preprocess.arguments] == [
        ("text", "TYPE_STRING", "str")
    ]
    assert [(item.name, item.data_type, item.dims) for item in hooks.preprocess.results] == [("x", "TYPE_FP32", (4,))]
    assert [(item.name, item.data_type, item.dims) for item in hooks.postprocess.results] == [
        ("label", "TYPE_STRING", (1,)),
        ("score", "TYPE_FP32", (1,)),
    ]
    assert hooks.source.requirements == ("numpy",)
    assert hooks.example is not None
    assert hooks.example["text"].tolist() == [b"0,2,1,0"]


@pytest.mark.parametrize(
    ("annotation", "data_type", "dims", "kind"),
    [
        ("bytes", "TYPE_STRING", (1,), "bytes"),
        ("str", "TYPE_STRING", (1,), "str"),
        ("int", "TYPE_INT64", (1,), "int"),
        ("float", "TYPE_FP32", (1,), "float"),
        ("bool", "TYPE_BOOL", (1,), "bool"),
        ("np.float64", "TYPE_FP64", (1,), "scalar"),
        ("np.uint8", "TYPE_UINT8", (1,), "scalar"),
        ("Annotated[np.ndarray, 'uint8[28,28]']", "TYPE_UINT8", (28, 28), "array"),
        ("Annotated[Any, 'float32[frames,13]']", "TYPE_FP32", (-1, 13), "array"),
        ("'Annotated[np.ndarray, \"string[2]\"]'", "TYPE_STRING", (2,), "array"),
    ],
)
def test_an_annotation_says_which_tensor_it_is(
    tmp_path: Path, annotation: str, data_type: str, dims: tuple[int, ...], kind: str
) -> None:
    hooks = load(
        tmp_path, f"{NUMPY}def preprocess(value: {annotation}): ...\ndef postprocess(logits) -> {annotation}: ..."
    )
    assert hooks.preprocess is not None
    assert hooks.postprocess is not None
    (argument,), (result,) = hooks.preprocess.arguments, hooks.postprocess.results
    assert (argument.data_type, argument.dims, argument.kind) == (data_type, dims, kind)
    assert (result.name, result.data_type, result.dims, result.kind) == ("result", data_type, dims, kind)


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
@pytest.mark.parametrize("stage", ["preprocess(x1: bytes): ...", "postprocess(logits) -> A: ..."])
def test_either_function_may_be_left_out(tmp_path: Path, future: str, stage: str) -> None:
    hooks = load(tmp_path, f"{future}{NUMPY}class A(NamedTuple):\n  label: str\ndef {stage}")
    assert (hooks.preprocess is None) == stage.startswith("post")
    assert (hooks.postprocess is None) == stage.startswith("pre")


def test_several_inputs_are_given_by_name_and_an_item_may_be_one_number(tmp_path: Path) -> None:
    text = (
        f"{NUMPY}def preprocess(n: int): return dict(a=np.zeros(n, np.float32), b=[1, 2])\n"
        "def postprocess(total: float) -> float: return total\n"
        "def example(): return {'n': 3}\n"
    )
    hooks = load(tmp_path, text, PAIR)
    assert hooks.preprocess is not None
    assert hooks.postprocess is not None
    assert hooks.preprocess.returns == "mapping"
    assert hooks.postprocess.arguments[0].dims == ()
    assert hooks.example == {"n": np.array([3])}


def test_an_output_that_is_no_python_name_gets_underscores(tmp_path: Path) -> None:
    signature = Signature(TINY.inputs, (TensorSpec("fc/Add.0", "float32", ("batch", 3)),))
    hooks = load(tmp_path, "def postprocess(fc_Add_0) -> int: ...", signature)
    assert hooks.postprocess is not None
    assert hooks.postprocess.arguments[0].tensor == "fc/Add.0"


def test_two_outputs_that_come_to_one_name_are_told_apart(tmp_path: Path) -> None:
    outputs = tuple(TensorSpec(name, "float32", ("batch", 3)) for name in ("a.b", "c", "a_b"))
    signature = Signature(TINY.inputs, outputs)
    hooks = load(tmp_path, "def postprocess(a_b_0, a_b_2, c) -> int: ...", signature)
    assert hooks.postprocess is not None
    assert [item.tensor for item in hooks.postprocess.arguments] == ["a.b", "a_b", "c"]
    error = refusal(tmp_path, "def postprocess(a_b) -> int: ...", signature)
    assert "'a_b' could be 'a.b' or 'a_b'" in error.why
    assert error.mend == "write a_b_0 for 'a.b', or a_b_2 for 'a_b'"


@pytest.mark.parametrize(("output", "argument"), [("np", "np_"), ("class", "class_"), ("a", "a")])
def test_an_argument_may_have_an_underscore_behind_the_name(tmp_path: Path, output: str, argument: str) -> None:
    signature = Signature(TINY.inputs, (TensorSpec(output, "float32", ("batch", 3)),))
    hooks = load(tmp_path, f"def postprocess({argument}) -> int: ...", signature)
    assert hooks.postprocess is not None
    assert [(item.name, item.tensor) for item in hooks.postprocess.arguments] == [(argument, output)]
    assert "no output" in refusal(tmp_path, f"def postprocess({argument}__) -> int: ...", signature).why


def test_the_module_leaves_nothing_behind_that_clashes(tmp_path: Path) -> None:
    path = hook_file(tmp_path, HOOKS)
    load_hooks(path, TINY)  # which imports what it needs itself
    before = dict(sys.modules)
    load_hooks(path, TINY)
    load_hooks(path, TINY)
    new = set(sys.modules) - set(before)
    assert "my_hooks" not in sys.modules
    assert all(name.startswith("serve_user_hooks_") for name in new)
    assert [item.name for item in tmp_path.iterdir()] == ["my_hooks.py"]
    with pytest.raises(HookError):
        load(tmp_path, "1 / 0")
    assert set(sys.modules) - set(before) == new


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("x = (", 1, "not valid Python"),
        ("\nreturn 3", 2, "not valid Python"),
        ("import numpy\n\n1 / 0", 3, "ZeroDivisionError: division by zero"),
        ("import nothing_like_it", 1, "No module named 'nothing_like_it'"),
        ("\nimport sys\nsys.exit('bye')", 3, "SystemExit: bye"),
        ("x = 1", None, "neither preprocess nor postprocess"),
        ("def preprocess(\n  image): ...", 2, "'image' has no annotation"),
        ("def preprocess(image: list): ...", 1, "does not say which tensor"),
        ("def preprocess(image: 'Missing'): ...", 1, "name 'Missing' is not defined"),
        ("def preprocess(): ...", 1, "takes no argument"),
        ("def preprocess(*images: bytes): ...", 1, "can't be given by name"),
        ("async def preprocess(image: bytes): ...", 1, "not a plain function"),
        ("preprocess = 3", None, "not a plain function"),
        ("def preprocess(image: bytes):\n  yield 1", 1, "not a plain function"),
        ("async def postprocess(logits) -> int:\n  yield 1", 1, "not a plain function"),
        ("def postprocess(logits) -> int:\n  yield 1", 1, "it yields, and does not say what"),
        ("from typing import *\ndef postprocess(logits) -> Iterator:\n  yield 1", 2, "does not say what"),
        ("from typing import *\ndef postprocess(logits) -> Iterator[list[int]]:\n  yield [1]", 2, "it yields batches"),
        (
            (
                "from typing import *\nclass A(NamedTuple):\n  x: Any\n  more: int\n"
                "def preprocess(text: bytes) -> A: ...\ndef postprocess(logits) -> Iterator[int]:\n  yield 1"
            ),
            6,
            "preprocess gives 'more' past the network, and postprocess yields",
        ),
        ("\ndef postprocess(probs) -> int: ...", 2, "'probs' is no output of the network"),
        ("def postprocess() -> int: ...", 1, "takes no argument"),
        ("def postprocess(logits): ...", 1, "does not say what it gives"),
        ("def postprocess(logits) -> dict: ...", 1, "a dict does not say which tensors"),
        ("def postprocess(logits) -> dict[str, float]: ...", 1, "a dict does not say which tensors"),
        (
            "from typing import *\nclass A(TypedDict):\n  x: str\ndef postprocess(logits) -> A: ...",
            4,
            "a dict does not say which tensors",
        ),
        (
            "from typing import *\nclass A(NamedTuple):\n  x: list\ndef postprocess(logits) -> A: ...",
            2,
            "'x' is annotated",
        ),
        ("def preprocess(result: int): ...\ndef postprocess(logits) -> int: ...", 2, "of an input and of an output"),
        ("def preprocess(x: bytes): ...\ndef example(): return {'y': b''}", 2, "gave y, wanted x"),
        ("def preprocess(x: bytes): ...\ndef example(): return {'x': 3}", 2, "gave int, wanted bytes"),
        ("def preprocess(x: bytes): ...\ndef example():\n  raise OSError('gone')", 3, "OSError: gone"),
        ("REQUIREMENTS = 'numpy'\ndef preprocess(x: bytes): ...", 1, "not a plain list of strings"),
        ("REQUIREMENTS = [f()]\ndef preprocess(x: bytes): ...", 1, "not a plain list of strings"),
        ("REQUIREMENTS = ['nothing-like-it']\nimport nothing_like_it", None, "nothing-like-it (not installed)"),
        ("REQUIREMENTS = ['numpy>=99']\ndef preprocess(x: bytes): ...", None, "numpy>=99 ("),
        (
            "REQUIREMENTS = ['numpy >>> 3']\ndef preprocess(x: bytes): ...",
            1,
            "'numpy >>> 3', which is no requirement of a package",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, line: int | None, why: str) -> None:
    error = refusal(tmp_path, text)
    assert error.what.endswith(f"my_hooks.py:{line}" if line else "my_hooks.py")
    assert why in error.why
    assert error.mend


@pytest.mark.parametrize("annotation", ["Iterator[Answer]", "Iterable[Answer]", "Generator[Answer, None, None]"])
def test_a_postprocess_may_yield_its_answers(tmp_path: Path, annotation: str) -> None:
    text = HOOKS.replace("-> Answer:", f"-> {annotation}:").replace("return Answer(", "yield Answer(")
    hooks = load(tmp_path, f"from collections.abc import Generator, Iterable, Iterator\n{text}")
    assert hooks.postprocess is not None
    assert hooks.postprocess.streams
    assert hooks.postprocess.spec()["streams"]
    assert [item.name for item in hooks.postprocess.results] == ["label", "score"]
    scores = {"logits": np.array([0, 2, 1], np.float32)}
    assert [made["label"].tolist() for made in hooks.hook("postprocess").stream(scores)] == [[b"b"]]
    assert hooks.hook("postprocess").sample(scores)["score"] == 2


WRAPPED = """\
import functools
from collections.abc import Iterator


def noted(hook):
    @functools.wraps(hook)
    def wrapper(*given, **named):
        return GIVEN

    return wrapper


@noted
@noted
"""


def wrapped(given: str) -> str:
    text = HOOKS.replace("-> Answer:", "-> Iterator[Answer]:").replace("return Answer(", "yield Answer(")
    return text.replace("def postprocess", WRAPPED.replace("GIVEN", given) + "def postprocess")


def test_a_postprocess_that_yields_may_be_wrapped(tmp_path: Path) -> None:
    hooks = load(tmp_path, wrapped("hook(*given, **named)"))
    assert hooks.postprocess is not None
    assert hooks.postprocess.streams
    scores = {"logits": np.array([0, 2, 1], np.float32)}
    assert [made["label"].tolist() for made in hooks.hook("postprocess").stream(scores)] == [[b"b"]]


@pytest.mark.parametrize("given", ["list(hook(*given, **named))", "next(hook(*given, **named))"])
def test_one_whose_wrapper_does_not_yield_is_told_so_when_it_is_called(tmp_path: Path, given: str) -> None:
    hooks = load(tmp_path, wrapped(given).replace("@noted\n@noted\n", "@noted\n"))
    with pytest.raises(TypeError, match="where what it wraps yields"):
        next(hooks.hook("postprocess").stream({"logits": np.array([0, 2, 1], np.float32)}))


@pytest.mark.parametrize("kind", ["async ", ""])
def test_a_preprocess_that_yields_or_waits_is_refused_wrapped_too(tmp_path: Path, kind: str) -> None:
    how = WRAPPED.replace("GIVEN", "hook(*given, **named)")
    body = "return image" if kind else "yield image"
    assert "not a plain function" in refusal(tmp_path, f"{how}{kind}def preprocess(image: bytes):\n  {body}\n").why


@pytest.mark.parametrize("result", ["dict", "dict[str, float]"])
def test_who_gives_a_dict_is_shown_the_class_to_write(tmp_path: Path, result: str) -> None:
    mend = refusal(tmp_path, f"def postprocess(logits) -> {result}: ...").mend
    assert "class Answer(NamedTuple):" in mend
    assert "-> Answer" in mend


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return np.zeros(4)", "gave float64[4], wanted float32[4]"),
        ("return np.zeros((1, 4), np.float32)", "gave float32[1,4], wanted float32[4]"),
        ("return None", "x: gave"),
        ("return {'y': 3}", "x: gave"),
        ("raise KeyError('no')", "KeyError: 'no'"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_preprocess_is_tried_on_the_example_and_must_fit_the_network(tmp_path: Path, body: str, why: str) -> None:
    text = f"{NUMPY}def preprocess(image: bytes):\n  {body}\ndef example(): return {{'image': b''}}"
    assert why in refusal(tmp_path, text).why


@pytest.mark.parametrize("missing", ["nowhere.py", "hooks.txt", "."])
def test_what_is_no_python_file_is_refused(tmp_path: Path, missing: str) -> None:
    (tmp_path / "hooks.txt").write_text("")
    with pytest.raises(HookError, match="can't read the hooks"):
        load_hooks(tmp_path / missing, TINY)


PLAIN = NUMPY + "def preprocess(text: str, more: int) -> np.ndarray: ...\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PLAIN + "def admit(text): ...", "does not take what preprocess takes"),
        (PLAIN + "def admit(text, more, other): ...", "does not take what preprocess takes"),
        (PLAIN + "admit = 1", "not a plain function"),
        (NUMPY + "def admit(x): ...\ndef postprocess(logits) -> int: ...", "there is no preprocess"),
    ],
)
def test_what_admits_a_request_takes_what_preprocess_takes(tmp_path: Path, text: str, why: str) -> None:
    assert why in refusal(tmp_path, text).why
    load(tmp_path, PLAIN + "def admit(text, more): ...")


def test_an_example_that_is_not_admitted_is_told(tmp_path: Path) -> None:
    text = HOOKS + "\ndef admit(text):\n    raise ValueError('too much')\n"
    assert "too much" in refusal(tmp_path, text).why


LABELLED = """\
from typing import NamedTuple
import numpy as np
LABELS = {labels}
class Answer(NamedTuple):
    label: str
def postprocess(logits: np.ndarray) -> Answer:
    return Answer(LABELS[{index}])
"""


@pytest.mark.parametrize("labels", ["['a', 'b']", "['a', 'b', 'c', 'd']", "[str(number) for number in range(2)]"])
def test_labels_are_as_many_as_the_classes(labels: str, tmp_path: Path) -> None:
    """With fewer each request of a later class failed with IndexError; with more the names are of another network."""
    text = LABELLED.format(labels=labels, index="int(logits.argmax())")
    err = refusal(tmp_path, text)
    assert "hooks.py:3" in err.what
    assert err.why.endswith("labels, and the network's logits has 3 classes")


@pytest.mark.parametrize(
    ("labels", "index"),
    [("['a', 'b', 'c']", "int(logits.argmax())"), ("['a', 'b', 'c', 'd']", "int(logits.argmax()) + 1"),
     ("['a', 'b']", "int(logits[1:].argmax())")],
)  # fmt: skip
def test_labels_that_may_be_meant_so_are_taken(labels: str, index: str, tmp_path: Path) -> None:
    assert load(tmp_path, LABELLED.format(labels=labels, index=index)).postprocess is not None
