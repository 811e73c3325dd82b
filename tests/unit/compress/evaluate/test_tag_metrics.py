"""A class for each token: F1 of entities, or of tokens, with an interval; words are split already, as tables have them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compress
from compress.artifact import TensorSpec
from compress.console.wording import AssumedWarning
from compress.data.dataset import Dataset
from compress.data.reading import arrays_of
from compress.errors import DatasetError, RecipeError
from compress.evaluate.intervals import difference_interval, mean_interval
from compress.evaluate.judge import Judge
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.tag_metrics import TagF1, _entities, are_entities
from compress.model import Arrays
from compress.options import ExportOptions
from compress.processor import Columns, Processor
from compress.signature import Signature
from tests.hub_models import bert_folder

NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
RNG = np.random.default_rng(0)
TOKENS = Signature(tuple(TensorSpec(name, "int64", ("batch", "seq")) for name in ("input_ids", "attention_mask")), ())
LOGITS = Signature(
    (TensorSpec("ids", "int64", ("batch", "seq")),), (TensorSpec("logits", "float32", ("batch", "seq", 5)),)
)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-PER I-PER O B-LOC", [(1, 3, "PER"), (4, 5, "LOC")]),
        ("B-PER B-PER I-PER", [(0, 1, "PER"), (1, 3, "PER")]),
        ("I-PER I-LOC I-LOC", [(0, 1, "PER"), (1, 3, "LOC")]),
        ("B-PER I-LOC", [(0, 1, "PER"), (1, 2, "LOC")]),
        ("S-LOC B-PER I-PER E-PER E-PER I-PER", [(0, 1, "LOC"), (1, 4, "PER"), (4, 5, "PER"), (5, 6, "PER")]),
        ("O O", []),
    ],
)
def test_entities_are_those_of_conlleval(tags: str, found: list[tuple[int, int, str]]) -> None:
    assert list(_entities(tags.split())) == found


def test_names_say_whether_classes_are_parts_of_entities() -> None:
    assert are_entities(NAMES)
    assert not are_entities(("NOUN", "VERB"))
    assert not are_entities(("O", "PER"))
    assert not are_entities(("LABEL_0", "LABEL_1"))


class Tagger:
    """Gives the class that the ids say, wrongly where their hash says so."""

    runtime, emulated = "numpy", False

    def __init__(self, wrong: float = 0.0) -> None:
        self._wrong = wrong

    def infer(self, inputs: Arrays) -> Arrays:
        ids = inputs["ids"]
        odd = (np.sin(ids * 7919.0 + np.arange(ids.shape[1])) + 1) / 2 < self._wrong
        return {"logits": np.eye(5, dtype=np.float32)[np.where(odd, (ids + 1) % 5, ids % 5)]}


def tagged(samples: int = 150) -> Dataset:
    """Ids of which the rest by 5 is the class; the last third has no label."""
    ids = RNG.integers(0, 500, (samples, 12))
    labels = np.where(np.arange(12) < 8, ids % 5, -100)
    return Dataset("", {"ids": ids}, labels, "0" * 64)


@pytest.mark.parametrize("entities", [True, False])
def test_the_mean_of_the_scores_is_the_f1_of_all(entities: bool) -> None:
    names = NAMES if entities else ("a", "O", "c", "d", "e")
    data = tagged()
    metric = find_metric(None, data, LOGITS, tags=names)
    assert metric.name == ("f1_entities" if entities else "f1_tokens")
    judge, wrong = Judge(Tagger(), data, metric), Tagger(0.2)
    assert judge.original == 1
    assert not judge.doubts
    drop = judge.drop(wrong)
    assert drop.low is not None
    assert drop.high is not None
    assert 0 < drop.low < drop.points < drop.high

    right = given = there = 0
    answers = wrong.infer(data.inputs)["logits"].argmax(-1)
    for mine, wanted in zip(answers[:, :8].tolist(), data.labels[:, :8].tolist(), strict=True):  # type: ignore[index]
        parts: list[set[Any]] = []
        for each in (mine, wanted):
            tags = [names[at] for at in each]
            tokens = {(at, tag) for at, tag in enumerate(tags) if tag != "O"}
            parts.append(set(_entities(tags)) if entities else tokens)
        right, given, there = right + len(parts[0] & parts[1]), given + len(parts[0]), there + len(parts[1])
    assert drop.after == pytest.approx(2 * right / (given + there))


def test_intervals_of_f1_hold_it_as_often_as_they_say() -> None:
    scores = TagF1(NAMES, -1, entities=True), TagF1(NAMES, -1, entities=True)
    first, second = Tagger(0.2), Tagger(0.3)
    data = tagged(20_000)
    for score, model in zip(scores, (first, second), strict=True):
        score.update(model.infer(data.inputs), data.labels)
    true = [score.compute().mean() for score in scores]
    held = apart = 0
    for _ in range(150):
        rows = RNG.integers(0, 20_000, 100)
        found = []
        for score in scores:
            part = TagF1(NAMES, -1, entities=True)
            part._counts = [score._counts[row] for row in rows]
            found.append(part.compute())
        own, lost = mean_interval(found[0], bounds=(0, 1)), difference_interval(found[1], found[0], bounds=(0, 1))
        held += own.low <= true[0] <= own.high
        apart += lost.low <= true[1] - true[0] <= lost.high
    assert held >= 135, "90% of 150, at 95% confidence"
    assert apart >= 135


def test_an_original_that_knows_nothing_is_doubted() -> None:
    data = tagged()
    metric = find_metric(None, data, LOGITS, tags=NAMES)
    shuffled = Dataset("", {"ids": RNG.permutation(data.inputs["ids"])}, data.labels, "0" * 64)
    assert "no better than chance" in Judge(Tagger(), shuffled, metric).doubts[0]
    with pytest.raises(RecipeError, match="no parts of entities"):
        find_metric("f1_entities", data, LOGITS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("hub") / "bert", kind="BertForTokenClassification", labels=NAMES)


@pytest.fixture
def processor(folder: Path) -> Processor:
    return Processor("text", "token-classification", dict.fromkeys(("tokenizer.json",), ""), NAMES, 8, folder)


def rows(path: Path, *given: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(path)


@pytest.mark.parametrize("named", [False, True])
def test_a_words_first_token_has_its_label(tmp_path: Path, processor: Processor, named: bool) -> None:
    # A word of several tokens, as the pre-tokenizer cuts it; and one too long for the model.
    first = {"tokens": ["word1", "word2-word3", "word4"], "ner_tags": ["B-PER", "I-PER", "O"] if named else [1, 2, 0]}
    second = {"tokens": [f"word{at}" for at in range(9)], "ner_tags": ["O"] * 9 if named else [0] * 9}
    data = Dataset.open(arrays_of(rows(tmp_path / "ner.jsonl", first, second), processor), TOKENS)
    assert np.asarray(data.inputs["input_ids"])[0].tolist() == [1, 5, 6, 3, 7, 8, 2, 0]
    assert np.asarray(data.labels).tolist() == [
        [-100, 1, 2, -100, -100, 0, -100, -100], [-100, 0, 0, 0, 0, 0, 0, -100],
    ]  # fmt: skip


def test_words_are_read_from_parquet(tmp_path: Path, processor: Processor) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"words": [["word1", "word2"], ["word3"]], "kinds": [[1, 2], [0]]})
    parquet.write_table(table, tmp_path / "ner.parquet")
    asked = Processor(
        "text", "token-classification", processor.files, NAMES, 8, processor.folder, Columns("words", None, "kinds")
    )
    data = Dataset.open(arrays_of(str(tmp_path / "ner.parquet"), asked), TOKENS)
    assert np.asarray(data.labels)[:, :4].tolist() == [[-100, 1, 2, -100], [-100, 0, -100, -100]]


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "fewer labels": ({"tokens": ["a", "b"], "ner_tags": [1]}, "2 words, and 1 label"),
    "no class": ({"tokens": ["a"], "ner_tags": [9]}, "B-PER"),
    "no name of a class": ({"tokens": ["a"], "ner_tags": ["B-ORG"]}, "B-PER"),
    "no number of a class": ({"tokens": ["a"], "ner_tags": [10**30]}, "B-PER"),
    "no labels": ({"tokens": ["a"]}, "no list of labels"),
    "no list": ({"tokens": ["a"], "ner_tags": 1}, "no list of labels"),
    "a number among words": ({"tokens": ["a", 3], "ner_tags": [1, 1]}, "no list of texts"),
    "half of a letter": ({"tokens": ["\ud83d"], "ner_tags": [1]}, "surrogates"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rows_that_do_not_fit_are_named(tmp_path: Path, processor: Processor, name: str) -> None:
    row, why = BROKEN[name]
    good = {"tokens": ["word1"], "ner_tags": [0]}
    with pytest.raises(DatasetError, match=r"row 2 of .*ner\.jsonl") as refused:
        arrays_of(rows(tmp_path / "ner.jsonl", good, row), processor)
    assert why in refused.value.why


def test_a_first_row_without_labels_does_not_say_that_there_are_none(tmp_path: Path, processor: Processor) -> None:
    first, second = {"tokens": ["word1"]}, {"tokens": ["word2"], "ner_tags": [1]}
    with pytest.raises(DatasetError, match=r"row 1 of .*ner\.jsonl") as refused:
        arrays_of(rows(tmp_path / "ner.jsonl", first, second), processor)
    assert "1 word, and no list of labels in 'ner_tags'" in refused.value.why


def test_words_without_labels_are_told_with_the_columns_that_may_be_them(tmp_path: Path, processor: Processor) -> None:
    with pytest.warns(AssumedWarning, match=r"no labels in ner\.jsonl \(not read: entities\)"):
        data = Dataset.open(
            arrays_of(rows(tmp_path / "ner.jsonl", {"tokens": ["word1"], "entities": [1]}), processor), TOKENS
        )
    assert data.labels is None


@pytest.mark.parametrize("tag", [10**30, 1 << 63, -1, True, 1.0])
def test_of_a_model_without_names_for_them_classes_are_numbers_that_an_array_holds(
    tmp_path: Path, processor: Processor, tag: Any
) -> None:
    unnamed = dataclasses.replace(processor, labels=())
    with pytest.raises(DatasetError, match="has the label"):
        arrays_of(rows(tmp_path / "ner.jsonl", {"tokens": ["word1"], "ner_tags": [tag]}), unnamed)


def test_a_tokenizer_that_tells_words_by_the_space_before_is_refused(tmp_path: Path, processor: Processor) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    tokenizer = Tokenizer.from_file(str(processor.folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    glued = Processor("text", "token-classification", processor.files, NAMES, 8, tmp_path)
    with pytest.raises(DatasetError, match="space before") as refused:
        arrays_of(rows(tmp_path / "ner.jsonl", {"tokens": ["a"], "ner_tags": [0]}), glued)
    assert "add_prefix_space=True" in refused.value.mend


def test_an_export_is_judged_by_f1_of_entities(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_MEASURE_SECONDS", "0")
    given = []
    for _ in range(60):
        words = RNG.integers(0, 56, 5).tolist()
        given.append({"tokens": [f"word{at}" for at in words], "ner_tags": [at % 5 for at in words]})
    data = rows(tmp_path / "ner.jsonl", *given)
    artifact, _ = compress.export(folder, ExportOptions(output=tmp_path / "out", eval=data, int8="dynamic"))
    measured = [stage.measured for stage in artifact.stages]
    assert {each.metric for each in measured if each is not None} == {"f1_entities"}
