"""token_type_ids of texts in pairs: the network is given what transformers gives it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from compress.artifact import Artifact, sha256_of
from compress.formats.hub.config import offline
from compress.processor import Columns, Processor
from serve.hooks.load import load_hooks
from serve.hooks.new import new_hooks
from serve.hooks.served_texts import served_texts
from tests.hub_models import bert_folder, hub_artifact, sentence_folder
from tests.starting_models import ids, tokenizer_file

PAIRS = [("word1 word2", "word3"), ("word4", "word5 word6 word7")]
IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"


def preprocessed(source: Artifact, folder: Path, *texts: list[str]) -> tuple[Any, tuple[str, ...]]:
    """What the hooks that are written for an artifact make of texts, and what is told of them."""
    code, notes = served_texts(source)
    folder.mkdir()
    (folder / "text_hooks.py").write_text(code)
    assert source.processor is not None
    (folder / "tokenizer.json").write_bytes((source.processor.folder / "tokenizer.json").read_bytes())
    return load_hooks(folder / "text_hooks.py", source.signature).module.preprocess(*texts), notes


@pytest.mark.parametrize(
    ("told", "passed"),
    [
        ({"tokenizer_class": "BertTokenizerFast"}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": [IDS, MASK]}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": [IDS, MASK, TYPES]}, True),
    ],
)
def test_a_cross_encoder_answers_pairs_as_transformers_does(tmp_path: Path, told: dict[str, Any], passed: bool) -> None:
    folder = bert_folder(tmp_path / "cross", labels=("relevance",))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | told))
    first, second = map(list, zip(*PAIRS, strict=True))
    with offline() as transformers, torch.no_grad():
        made = transformers.AutoTokenizer.from_pretrained(folder)(first, second, padding=True, return_tensors="pt")
        wanted = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()(**made).logits

    source = Artifact.load(hub_artifact(folder, tmp_path / "artifact", pair="second"))
    tokens, notes = preprocessed(source, tmp_path / "hooks", first, second)
    session = onnxruntime.InferenceSession(source.model_path)
    (given,) = session.run(None, {name: getattr(tokens, name) for name in (IDS, MASK, TYPES)})

    np.testing.assert_allclose(given, wanted, atol=1e-5)
    assert tokens.token_type_ids.max() == passed
    assert bool([note for note in notes if "passes none" in note]) != passed, "that zeros are given is told"


def test_an_encoder_of_sentences_takes_one_text_though_it_was_judged_by_pairs(tmp_path: Path) -> None:
    source = Artifact.load(hub_artifact(sentence_folder(tmp_path / "encoder"), tmp_path / "artifact", pair="second"))
    assert [spec.name for spec in source.signature.inputs] == [IDS, MASK]
    given, _ = preprocessed(source, tmp_path / "hooks", [PAIRS[0][0]])
    assert getattr(given, IDS).shape[0] == 1


def test_pairs_for_an_encoder_without_types_are_told_of(tmp_path: Path) -> None:
    source = artifact_of_pairs(tmp_path / "pairs", {})
    assert source.processor is not None
    specs = tuple(spec for spec in source.signature.inputs if spec.name != TYPES)
    bare = dataclasses.replace(
        source,
        processor=dataclasses.replace(source.processor, task="features"),
        signature=dataclasses.replace(source.signature, inputs=specs),
    )
    assert any(f"takes no {TYPES}" in note for note in served_texts(bare)[1])


def artifact_of_pairs(place: Path, told: dict[str, Any], types: bool | None = None) -> Artifact:
    """Of a network with token_type_ids, whose tokenizer_config.json says this."""
    ids(place, (IDS, MASK, TYPES), "length", "logits")
    folder = place / "processor"
    folder.mkdir()
    files = [tokenizer_file(folder).rename(folder / "tokenizer.json"), folder / "tokenizer_config.json"]
    files[1].write_text(json.dumps(told))
    named = {file.name: sha256_of(file) for file in files}
    made = Processor("text", "sequence-classification", named, (), 20, folder, Columns(pair="b"), type_ids=types)
    dataclasses.replace(Artifact.load(place), processor=made).save()
    return Artifact.load(place)


WITHOUT_WORD: dict[str, tuple[dict[str, Any], int, str]] = {
    "inputs without them": ({"model_input_names": [IDS, MASK]}, 0, "passes none"),
    "inputs with them": ({"model_input_names": [IDS, MASK, TYPES]}, 1, ""),
    "BERT's class": ({"tokenizer_class": "BertTokenizer"}, 1, ""),
    "RoBERTa's class": ({"tokenizer_class": "RobertaTokenizerFast"}, 0, "passes none"),
    "a generic class": ({"tokenizer_class": "PreTrainedTokenizerFast"}, 1, "does not say whether its tokenizer passes"),
    "nothing": ({}, 1, "does not say whether its tokenizer passes"),
    "no list of names": ({"model_input_names": TYPES}, 1, "does not say whether its tokenizer passes"),
}  # fmt: skip


@pytest.mark.parametrize(("told", "most", "said"), WITHOUT_WORD.values(), ids=WITHOUT_WORD)
def test_an_older_artifact_has_what_its_tokenizers_files_say_and_what_they_do_not_is_told(
    tmp_path: Path, told: dict[str, Any], most: int, said: str
) -> None:
    tokens, notes = preprocessed(artifact_of_pairs(tmp_path / "pairs", told), tmp_path / "hooks", ["a b"], ["c"])
    assert tokens.token_type_ids.max() == most
    assert [said in note for note in notes] == ([True] if said else [])


def test_the_artifacts_own_word_stands_above_its_files(tmp_path: Path) -> None:
    source = artifact_of_pairs(tmp_path / "pairs", {"model_input_names": [IDS, MASK]}, types=True)
    tokens, notes = preprocessed(source, tmp_path / "hooks", ["a b"], ["c"])
    assert tokens.token_type_ids.max() == 1
    assert not notes


@pytest.mark.parametrize("word", ["yes", 1, []])
def test_a_word_that_is_neither_true_nor_false_is_refused(word: Any, tmp_path: Path) -> None:
    data = Processor("text", "features", {}, (), None, tmp_path, type_ids=True).to_dict()
    with pytest.raises(TypeError, match="neither true nor false"):
        Processor.from_dict(data | {"token_type_ids": word}, tmp_path)


@pytest.mark.parametrize(("types", "made"), [(False, "[[0] * len(each.ids) for each in tokens]"), (True, "type_ids")])
def test_hooks_to_begin_with_have_zeros_where_none_are_passed(types: bool, made: str, tmp_path: Path) -> None:
    source = artifact_of_pairs(tmp_path / "artifact", {}, types=types)
    new_hooks("text", source, tmp_path / "made" / "hooks.py")
    code = (tmp_path / "made" / "hooks.py").read_text()
    assert made in code
    assert ("type_ids for each" in code) == types
