"""What is sent: examples, made-up shapes, datasets, files, templates; and how answers are judged."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from compress.errors import ServerError
from serve.gateway.oip.protocol import build_request, parse_request
from serve.gateway.oip.tensors import Tensor
from serve.load.ask.check import Answer, Check, Judge
from serve.load.ask.target import Endpoint, Target, find_target
from serve.load.options import LoadOptions
from serve.load.run import run_load
from tests.load_servers import METADATA, at_once, inferences, options, served
from tests.serve_http import Received, answer

pytestmark = pytest.mark.clock

BYTES = json.dumps(
    {"name": "m", "inputs": [{"name": "image", "datatype": "BYTES", "shape": [-1, 1]}],
     "outputs": [{"name": "label", "datatype": "BYTES", "shape": [-1, 1]}]}
).encode()  # fmt: skip
FIXED = json.dumps(
    {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 4]}],
     "outputs": [{"name": "y", "datatype": "FP32", "shape": [3]}]}
).encode()  # fmt: skip


def target_of(metadata: bytes = METADATA, **changes: Any) -> Target:
    with served(at_once, metadata) as server:
        return uvloop.run(find_target(options(server, **changes)))


def tensors(target: Target) -> list[list[Tensor]]:
    """What each request holds."""
    found: list[list[Tensor]] = []
    for request in target.requests:
        head, _, body = request.wire.partition(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"header-content-length" in line.lower()), None
        )
        found.append(list(parse_request(body, length)))
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.arange(20, dtype=np.float64).reshape(5, 4), label=np.array([0, 1, 0, 1, 0]))
    return path


@pytest.mark.parametrize("form", ["binary", "json"])
def test_both_forms_hold_the_same_tensors(form: str) -> None:
    target = target_of(form=form, seed=3)
    ((tensor,),) = tensors(target)
    ((other,),) = tensors(target_of(seed=3))
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", "FP32", (1, 4))
    assert np.allclose(tensor.data, other.data)


def test_made_up_inputs_have_the_shapes_and_weights_asked_for() -> None:
    target = target_of(shape=("x=2,4@3", "5,4"), distinct=2)
    assert [each[0].shape for each in tensors(target)] == [(2, 4), (2, 4), (5, 4), (5, 4)]
    assert [request.rows for request in target.requests] == [2, 2, 5, 5]
    assert target.weights == (3, 3, 1, 1)
    assert len({request.wire for request in target.requests}) == 4


IMAGES = json.dumps(
    {"name": "m", "inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 3, -1, -1]}],
     "outputs": [{"name": "mask", "datatype": "FP32", "shape": [-1, 1, -1, -1]}]}
).encode()  # fmt: skip


@pytest.mark.parametrize("text", ["image=3x48x48", "image=3,48,48", "x=1,3,48,48"])
def test_a_shape_that_is_none_is_told_one_that_the_model_takes(text: str) -> None:
    with pytest.raises(ServerError) as caught:
        target_of(IMAGES, shape=(text,))
    told = caught.value.mend.removeprefix("write it as in ")
    assert told.startswith("image=")
    assert len(target_of(IMAGES, shape=(told,)).requests) == 1


def test_batches_are_repeated_examples() -> None:
    target = target_of(batch=("1@7", "8@3"))
    assert [each[0].shape for each in tensors(target)] == [(1, 4), (8, 4)]
    assert target.weights == (7, 3)
    (eight,) = tensors(target)[1]
    assert (eight.data == eight.data[0]).all()


def test_a_dataset_is_sent_row_by_row_or_in_batches(data: Path) -> None:
    target = target_of(data=data)
    assert [each[0].data.tolist() for each in tensors(target)] == [
        [[*map(float, range(n, n + 4))]] for n in range(0, 20, 4)
    ]
    assert target.check is not None
    assert target.check.labels == (("0",), ("1",), ("0",), ("1",), ("0",))
    pairs = target_of(data=data, batch=("2",))
    assert [request.rows for request in pairs.requests] == [2, 2, 2]
    assert tensors(pairs)[2][0].data[1].tolist() == [0, 1, 2, 3]  # the last batch is filled from the beginning


def test_the_files_of_a_folder_are_bytes_with_their_folder_as_label(tmp_path: Path) -> None:
    for label, content in (("cat", b"miaow"), ("dog", b"woof")):
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.bin").write_bytes(content)
    target = target_of(BYTES, data=tmp_path)
    assert [each[0].data.ravel().tolist() for each in tensors(target)] == [[b"miaow"], [b"woof"]]
    assert target.check is not None
    assert target.check.labels == (("cat",), ("dog",))


def test_any_address_takes_bodies_and_templates(tmp_path: Path, data: Path) -> None:
    template = tmp_path / "body.json"
    template.write_text('{"instances": [${x}], "cost": "$$5"}')

    async def echo(request: Received, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(answer())

    seen: list[Received] = []
    with served(echo) as server:
        result = run_load(
            options(server, url=f"{server.url}/v1/predict?k=1", model="", body=template, data=data, max_requests=5, duration=30, warmup=0,
                    concurrency=1, header=("X-Who: me",))
        )  # fmt: skip
    assert result.count == 5
    assert [json.loads(request.body)["instances"][0][0] for request in seen[1:]] == [0, 4, 8, 12, 16]
    assert json.loads(seen[0].body)["cost"] == "$5"
    assert (seen[0].target, seen[0].headers["x-who"]) == ("/v1/predict?k=1", "me")
    assert seen[0].headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("metadata", "changes", "says"),
    [
        (METADATA, {"shape": ("x=1,5",)}, r"the model takes x:FP32\[-1,4\]"),
        (METADATA, {"shape": ("y=1,4",)}, "no input 'y'"),
        (METADATA, {"shape": ("x=1,nothing",)}, "is none"),
        (METADATA, {"shape": ("x=1,4@0",)}, "no weight"),
        (METADATA, {"batch": ("none",)}, "no number of rows"),
        (FIXED, {"batch": ("8",)}, "one item at a time"),
        (METADATA, {"data": Path("/nowhere.npz")}, "can't send"),
        (METADATA, {"expect": "miracles"}, "no such check"),
        (METADATA, {"expect": "answers.npz"}, "give --data, too"),
        (METADATA, {"header": ("nonsense",)}, "no colon"),
        (METADATA, {"model": ""}, "no model of it"),
    ],
)
def test_what_can_not_be_sent(metadata: bytes, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ServerError, match=says) as caught:
        target_of(metadata, **changes)
    assert caught.value.mend


def test_data_that_does_not_fit_the_model(tmp_path: Path, data: Path) -> None:
    np.savez(tmp_path / "wide.npz", x=np.zeros((5, 7)))
    np.savez(tmp_path / "other.npz", z=np.zeros((5, 4)), w=np.zeros((5, 4)))
    np.savez(tmp_path / "ragged.npz", x=np.zeros((5, 4)), label=np.zeros(4))
    for name, says in (("wide", r"x\[1, 7\]"), ("other", "the file has z"), ("ragged", "same number of rows")):
        with pytest.raises(ServerError, match=says):
            target_of(data=tmp_path / f"{name}.npz")
    template = tmp_path / "template"
    template.write_text("${nothing}")
    with served(at_once) as server, pytest.raises(ServerError, match="asks for 'nothing'"):
        run_load(options(server, url=f"{server.url}/x", model="", body=template, data=data))


def test_numbers_for_a_model_of_files_are_refused_with_what_to_give(tmp_path: Path) -> None:
    np.savez(tmp_path / "eval.npz", x=np.zeros((5, 4)))
    with pytest.raises(ServerError, match="the file has x") as caught:
        target_of(BYTES, data=tmp_path / "eval.npz")
    assert caught.value.mend.startswith("give a folder of files")


@pytest.mark.parametrize(
    ("url", "protocol", "path"),
    [
        ("http://h:1", "http", ""),
        ("http://h:1/", "http", "/"),
        ("grpc://h:1", "grpc", ""),
        ("http://[::1]:1/a?b=c", "http", "/a?b=c"),
    ],
)
def test_addresses(url: str, protocol: str, path: str) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.protocol, endpoint.path) == (protocol, path)


@pytest.mark.parametrize(
    "url", ["h:1", "https://h", "grpc://h:1/x", "http://", "http://h:port/x", "http://h/#x", "ftp://h"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ServerError, match="can't send load"):
        Endpoint.parse(url)


def response(values: list[Any], datatype: str = "FP32") -> Answer:
    dtype = object if datatype == "BYTES" else np.float32
    tensor = Tensor("y", datatype, np.array(values, dtype=dtype))
    message = build_request([tensor])
    head, size = json.loads(message.body[: message.header_length]), message.header_length or 0
    text = json.dumps({"model_name": "m", "outputs": head["inputs"]}).encode()
    return Answer(text + message.body[size:], len(text))


@pytest.mark.parametrize(
    ("check", "given", "wrong"),
    [
        (Check("binary", contains="m"), response([[1.0]]), ""),
        (Check("binary", contains="other"), response([[1.0]]), "other text"),
        (Check("binary", values=({"y": [[1.0]]},)), response([[1.0005]]), ""),
        (Check("binary", values=({"y": [[1.0]]},)), response([[1.5]]), "wrong values"),
        (Check("binary", values=({"z": [[1.0]]},)), response([[1.0]]), "wrong values"),
        (Check("binary", values=({"y": [[1.0]]},)), Answer(b"\xff\xff"), "unreadable answer"),
        (Check("plain", values=({"y": [1, 2]},)), Answer(b'{"outputs": {"y": [1, 2], "z": 3}}'), ""),
        (Check("plain", values=({"y": [1, 2]},)), Answer(b'{"y": [1, 3]}'), "wrong values"),
    ],
)
def test_answers_are_held_against_what_is_expected(check: Check, given: Answer, wrong: str) -> None:
    assert Judge(check).verdict(0, given).wrong == wrong
    assert Check.from_dict(json.loads(json.dumps(check.to_dict()))).to_dict() == check.to_dict()


def test_all_answers_to_one_request_can_be_asked_to_be_the_same() -> None:
    judge = Judge(Check("binary", same=True))
    found = [
        judge.verdict(number, response([[value]])).wrong for number, value in ((0, 1.0), (1, 2.0), (0, 1.0), (1, 1.0))
    ]
    assert found == ["", "", "", "another answer"]


@pytest.mark.parametrize(
    ("given", "labels", "right"),
    [
        (response([[0.1, 0.9], [0.8, 0.2]]), ("1", "0"), 2),
        (response([[0.1, 0.9], [0.8, 0.2]]), ("0", "0"), 1),
        (response([[b"cat"], [b"dog"]], "BYTES"), ("cat", "cow"), 1),
        (response([[b"cat", b"cow"], [b"dog", b"cow"]], "BYTES"), ("cat", "cow"), 1),  # the best comes first
    ],
)
def test_labels_are_counted(given: Answer, labels: tuple[str, ...], right: int) -> None:
    verdict = Judge(Check("binary", labels=(labels,))).verdict(0, given)
    assert (verdict.wrong, verdict.right, verdict.labelled) == ("", right, len(labels))


def test_images_that_json_can_not_carry_are_told_with_what_to_leave_out(tmp_path: Path) -> None:
    (tmp_path / "seven.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ServerError) as caught:
        target_of(BYTES, form="json", data=tmp_path)
    assert "not UTF-8 text" in caught.value.why
    assert caught.value.mend == "leave --form json out: tensors are sent raw then"


def test_an_answer_without_the_output_that_is_judged_is_wrong_in_its_own_way() -> None:
    judge = Judge(Check("binary", labels=(("1",),), output="other"))
    assert judge.verdict(0, response([[0.1, 0.9]])).wrong == "no such output"


def test_an_output_that_no_answer_of_an_address_has_is_told_before_the_load(data: Path, tmp_path: Path) -> None:
    (tmp_path / "body.json").write_text('{"x": ${x}}')

    async def infer(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b'{"outputs": {"y": [0.1, 0.9]}}'))

    with served(infer) as server:
        asked = options(server, model="", url=f"{server.url}/ask", data=data, body=tmp_path / "body.json")
        with pytest.raises(ServerError, match="there is no output 'nosuch'") as caught:
            run_load(asked.with_(label_output="nosuch"))
        assert inferences(server) == 1  # the one that finds out whether somebody answers
        assert run_load(asked.with_(label_output="y", max_requests=10, duration=60)).accuracy == 0.4
    assert caught.value.why == "the model gives y"


def test_accuracy_under_load_and_wrong_answers_are_reported(data: Path, tmp_path: Path) -> None:
    """A server that answers row n with label n % 2, but errs on the last one."""
    np.savez(tmp_path / "expected.npz", y=np.array([[1.0, 0], [0, 1], [1, 0], [0, 1], [1, 0]], np.float32))

    async def infer(request: Received, writer: asyncio.StreamWriter) -> None:
        length = int(request.headers["inference-header-content-length"])
        (tensor,) = parse_request(request.body, length)
        row = int(tensor.data[0, 0]) // 4
        label = row % 2 if row < 4 else 1
        made = response([[1.0 - label, float(label)]])
        writer.write(answer(made.body, "200 OK", f"inference-header-content-length: {made.header_length}"))

    with served(infer) as server:
        asked = options(server, data=data, max_requests=50, concurrency=1, warmup=0, duration=60)  # the requests end it
        plain = run_load(asked)
        strict = run_load(asked.with_(expect=str(tmp_path / "expected.npz")))
    assert (plain.count, plain.labelled, plain.accuracy) == (50, 50, 0.8)
    assert (strict.count, strict.errors) == (40, {"wrong values": 10})


def test_headers_carry_the_key_and_what_was_asked_for() -> None:
    headers = LoadOptions("m", key="secret", header=("Accept: text/plain",)).headers
    assert headers == [(b"authorization", b"Bearer secret"), (b"accept", b"text/plain")]
    assert "secret" not in repr(LoadOptions("m", key="secret", token="secret"))
