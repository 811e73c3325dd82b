"""Tables of texts are data for `serve verify` and `serve load`, as they are for `compress`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.errors import RepositoryError, ServerError
from serve.verify.samples import samples_of
from tests.unit.serve.load.test_inputs import target_of, tensors

LINES = (
    '{"text": "good, é", "label": "positive", "from": {"a": 1}}\n\n{"text": "bad", "label": "negative", "from": null}\n'
)
TABLES = {
    "a.jsonl": LINES,
    "a.ndjson": LINES,
    "a.csv": 'text,label\n"good, é",positive\nbad,negative\n',
    "a.tsv": "text\tlabel\tfrom\ngood, é\tpositive\t1\nbad\tnegative\t2\n",
    "named.csv": '\ufeffsentence,y,text\n"good, é",positive,x\nbad,negative,x\n',
    "only.csv": 'comment,y\n"good, é",positive\nbad,negative\n',
}
METADATA = json.dumps(
    {"name": "m", "inputs": [{"name": "sentence", "datatype": "BYTES", "shape": [-1, 1]}],
     "outputs": [{"name": "label", "datatype": "BYTES", "shape": [-1, 1]}]}
).encode()  # fmt: skip
BAD = [
    ("a.jsonl", '{"text": "a", "label": "b"}\n{"text": "a"}\n', "its row 2 has no 'label'"),
    ("a.jsonl", '{"a": "a", "b": "b", "label": "b"}\n', "its columns are a, b, label, and the model takes sentence"),
    ("a.jsonl", '{"text": ["a", 1], "label": 1}\n{"text": ["b"], "label": 1}\n', "no one shape"),
    ("a.jsonl", '{"text": "a", "label": 1}\n{"text": 3, "label": 1}\n', "neither all texts nor all numbers"),
    ("a.jsonl", '{"text": "\\ud800", "label": 1}\n', "surrogates not allowed"),
    ("a.jsonl", "no JSON\n", "line 1 is no JSON"),
    ("a.csv", "text,label\na,b,c\n", "line 2 has another number of columns"),
    ("a.csv", "", "there is no row in it"),
    ("a.json", '[{"text": "a", "label": "b"}]', "it is no .npz, and no table of texts (.jsonl"),
    ("eval", "text,label\n", "it is no .npz, and no table"),
    ("gone.csv", None, "there is no such file"),
]


def written(folder: Path, name: str, text: str | None) -> Path:
    if text is not None:
        (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("name", TABLES)
def test_a_row_of_a_table_is_a_sample(name: str, tmp_path: Path) -> None:
    samples = list(samples_of(written(tmp_path, name, TABLES[name]), ["sentence"]))
    assert [json.loads(sample.content) for sample in samples] == [{"sentence": "good, é"}, {"sentence": "bad"}]
    assert [sample.label for sample in samples] == ["positive", "negative"]


def test_numbers_of_json_lines_are_samples_of_several_inputs(tmp_path: Path) -> None:
    text = '{"a": [1, 2], "b": 0.5, "other": "x", "label": 3}\n{"a": [3, 4], "b": 1, "other": "y", "label": 4}\n'
    samples = list(samples_of(written(tmp_path, "a.jsonl", text), ["a", "b"]))
    assert [json.loads(sample.content) for sample in samples] == [{"a": [1, 2], "b": 0.5}, {"a": [3, 4], "b": 1.0}]
    assert [sample.label for sample in samples] == ["3", "4"]


@pytest.mark.parametrize(("name", "text", "why"), BAD)
def test_a_table_that_does_not_fit_is_told(name: str, text: str | None, why: str, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="can't verify with") as caught:
        list(samples_of(written(tmp_path, name, text), ["sentence"]))
    assert why in caught.value.why
    assert ".jsonl or .csv" in caught.value.mend


@pytest.mark.clock
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_sent_row_by_row(name: str, tmp_path: Path) -> None:
    target = target_of(METADATA, data=written(tmp_path, name, TABLES[name]))
    assert [each[0].data.tolist() for each in tensors(target)] == [[["good, é".encode()]], [[b"bad"]]]
    assert target.check is not None
    assert target.check.labels == (("positive",), ("negative",))


@pytest.mark.clock
def test_lines_without_labels_are_sent_too(tmp_path: Path) -> None:
    target = target_of(METADATA, data=written(tmp_path, "a.txt", "good\n\nbad\n"))
    assert [each[0].data.tolist() for each in tensors(target)] == [[[b"good"]], [[b"bad"]]]


@pytest.mark.clock
@pytest.mark.parametrize("name", ["a.json", "a.csv"])
def test_what_can_t_be_sent_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="can't send") as caught:
        target_of(METADATA, data=written(tmp_path, name, "[1]"))
    assert caught.value.why.startswith("it is no .npz, and" if name == "a.json" else "there is no row")
