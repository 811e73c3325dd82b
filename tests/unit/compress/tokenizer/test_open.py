"""Tokens are those that transformers makes of the same folder, or an error names what differs."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.artifact import TensorSpec
from compress.console.wording import AssumedWarning
from compress.data.dataset import Dataset
from compress.data.reading import arrays_of
from compress.errors import DatasetError
from compress.formats.hub.config import offline
from compress.processor import Columns, Processor
from compress.signature import Signature
from compress.tokenizer import open as tokenizer
from tests.hub_models import LABELS

TOKENS = Signature(tuple(TensorSpec(name, "int64", ("batch", "seq")) for name in ("input_ids", "attention_mask")), ())
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "The", "the", "cat", "dog", "runs", "fast", "red")
TEXTS = ["The cat runs fast", "dog", "the red dog runs fast the cat runs red"]
LONGEST = 8


def bert_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def processor(tmp_path: Path) -> Processor:
    bert_tokenizer(tmp_path)
    beside(tmp_path)
    files = dict.fromkeys(("tokenizer.json", "tokenizer_config.json"), "")
    return Processor("text", "sequence-classification", files, LABELS, LONGEST, tmp_path)


def beside(folder: Path, **keys: Any) -> None:
    usual: dict[str, Any] = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "model_max_length": LONGEST,
    } | keys
    usual |= {name: f"[{name.split('_')[0].upper()}]" for name in ("pad_token", "cls_token", "sep_token", "unk_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(usual | keys))


def tokens_of(processor: Processor, texts: list[str] = TEXTS) -> list[list[int]]:
    """The ids of each text, without what fills up."""
    path = processor.folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    changed = dataclasses.replace(processor, files={**processor.files, "": str(len(list(processor.folder.iterdir())))})
    inputs = Dataset.open(arrays_of(str(path), changed), TOKENS).inputs
    return [row[mask == 1].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]


def tokens_by_transformers(folder: Path) -> list[list[int]]:
    with offline() as transformers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return [list(each) for each in tokenizer(TEXTS, truncation=True)["input_ids"]]


SAME: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "cut on the left": {"truncation_side": "left"},
    "a class that takes no such key": {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"},
}


@pytest.mark.filterwarnings("ignore::compress.console.wording.AssumedWarning")
@pytest.mark.parametrize("case", SAME)
def test_tokens_are_those_of_transformers(processor: Processor, case: str) -> None:
    beside(processor.folder, **SAME[case])
    (processor.folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert tokens_of(processor) == tokens_by_transformers(processor.folder)


OTHERWISE: dict[str, dict[str, Any]] = {
    "do_lower_case": {"do_lower_case": False},
    "strip_accents": {"strip_accents": False},
    "tokenize_chinese_chars": {"tokenize_chinese_chars": False},
    "split_special_tokens": {"split_special_tokens": True},
    "add_bos_token": {"add_bos_token": True, "bos_token": "[MASK]"},
    "added_tokens_decoder": {"added_tokens_decoder": {"12": {"content": "<new>"}}},
    "additional_special_tokens": {"additional_special_tokens": ["<new>"]},
}


@pytest.mark.parametrize("key", OTHERWISE)
def test_a_key_that_asks_for_other_tokens_is_named(processor: Processor, key: str) -> None:
    beside(processor.folder, **OTHERWISE[key])
    with pytest.raises(DatasetError, match=key):
        tokens_of(processor)


def test_what_the_error_advises_gives_the_tokens_of_transformers(processor: Processor) -> None:
    beside(processor.folder, do_lower_case=False)
    (processor.folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    wanted = tokens_by_transformers(processor.folder)
    with pytest.raises(DatasetError, match=r"AutoTokenizer.from_pretrained\(folder\).save_pretrained\(folder\)"):
        tokens_of(processor)
    with offline() as transformers:
        transformers.AutoTokenizer.from_pretrained(processor.folder).save_pretrained(processor.folder)
    assert tokens_of(processor) == wanted
    assert WORDS.index("The") in wanted[0]


def test_a_sentence_encoder_that_lowers_what_its_tokenizer_does_not_is_refused(processor: Processor) -> None:
    told = json.loads((processor.folder / "tokenizer.json").read_text())
    told["normalizer"]["lowercase"] = False
    (processor.folder / "tokenizer.json").write_text(json.dumps(told))
    beside(processor.folder, do_lower_case=False)
    (processor.folder / "sentence_bert_config.json").write_text('{"do_lower_case": true, "max_seq_length": 8}')
    asked = dataclasses.replace(processor, files={**processor.files, "sentence_bert_config.json": ""})
    with pytest.raises(DatasetError, match=r"sentence_bert_config\.json"):
        tokens_of(asked)


def test_what_is_not_followed_is_told(processor: Processor) -> None:
    beside(processor.folder, padding_side="left", truncation_side="left")
    prompts = {"prompts": {"query": "search: "}, "default_prompt_name": "query"}
    (processor.folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with pytest.warns(AssumedWarning) as told:
        tokens_of(processor)
    words = "\n".join(str(each.message) for each in told)
    assert all(name in words for name in ("padding_side", "truncation_side", "default_prompt_name", "search: "))


def test_texts_are_filled_up_with_the_models_own_number(processor: Processor, tmp_path: Path) -> None:
    beside(tmp_path, pad_token=None)
    path = tmp_path / "texts.txt"
    path.write_text("the cat\ndog\n")
    asked = dataclasses.replace(processor, pad_token_id=4)
    ids = np.asarray(Dataset.open(arrays_of(str(path), asked), TOKENS).inputs["input_ids"])
    assert ids[1].tolist() == [2, 8, 3, 4, 4, 4, 4, 4]
    beside(tmp_path, pad_token="[UNK]")
    with pytest.raises(DatasetError) as caught:
        arrays_of(str(path), dataclasses.replace(asked, max_length=7))
    assert "pad_token_id 4" in caught.value.why
    assert "pad token has the number 1" in caught.value.why


@pytest.mark.parametrize(("longest", "pair"), [(1, None), (2, None), (3, "other")])
def test_a_length_that_special_tokens_fill_is_refused(processor: Processor, longest: int, pair: str | None) -> None:
    asked = dataclasses.replace(processor, max_length=longest, columns=Columns(pair=pair))
    with pytest.raises(DatasetError, match="special tokens alone"):
        tokens_of(asked)


def replaced(**parts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda told: told.update(parts)


def charsmap(data: bytes) -> Callable[[dict[str, Any]], None]:
    return replaced(normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()})


def nested(depth: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [nested(depth - 1)] if depth else []}


DAMAGED: dict[str, Callable[[dict[str, Any]], None]] = {
    "a charsmap that is none": charsmap(b"\xff\xff\xff\x7fAAAA"),
    "a charsmap out of bounds": charsmap(b"\x04\0\0\0\xff\xff\xff\xffAAAA"),
    "pieces of no letters": replaced(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a template without its tokens": lambda told: told["post_processor"].update(special_tokens={}),
    "no unknown token": lambda told: told["model"].update(unk_token="zzz"),
    "no model": lambda told: told.pop("model"),
    "a normalizer that doubles 18 times": replaced(
        normalizer={
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 18,
        }
    ),
    "a normalizer that prepends 210,000 letters": replaced(normalizer={"type": "Prepend", "prepend": "w1 " * 70_000}),
    "an expression that matches between letters": replaced(
        normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "w1 " * 70_000}
    ),
    "a chain of such": replaced(
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {
                    "type": "Sequence",
                    "normalizers": [{"type": "Replace", "pattern": {"Regex": "$"}, "content": "a"}] * 18,
                }
            ],
        }
    ),
    "a charsmap with a long text": charsmap(b"\x04\0\0\0\0\0\0\0" + b"w1 " * 70_000 + b"\0"),
    "a normalizer that is not known": replaced(normalizer={"type": "Repeat", "times": 9}),
    "a part that has no type": replaced(pre_tokenizer={"pattern": {"String": " "}}),
    "a decoder that is not known": replaced(decoder={"type": "Repeat"}),
    "a template with a text 8 times": lambda told: told["post_processor"].update(
        single=[{"Sequence": {"id": "A", "type_id": 0}}] * 8
    ),
    "a template without the text": lambda told: told["post_processor"].update(
        single=[{"SpecialToken": {"id": "[CLS]", "type_id": 0}}]
    ),
    "parts without number": replaced(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "BertPreTokenizer"}] * 250_000}
    ),
    "parts without number, one in the other": replaced(normalizer=nested(100)),
    "parts without number, of all kinds": replaced(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}] * 40},
        decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}] * 40},
    ),
    "a template of many pieces": lambda told: told["post_processor"]["single"].extend(
        [{"SpecialToken": {"id": "[SEP]", "type_id": 0}}] * 100
    ),
    "a special token of many tokens": lambda told: told["post_processor"]["special_tokens"]["[SEP]"].update(
        ids=[3] * 100, tokens=["[SEP]"] * 100
    ),
    "a pattern of many choices": replaced(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "a|" * 10_000}, "behavior": "Isolated", "invert": False}
    ),
    "a vocabulary of long words": replaced(
        model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a" * 257, -1.0]]}
    ),
    "words of any length": lambda told: told["model"].update(max_input_chars_per_word=10**9),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_tokenizer_is_an_error_in_three_parts(processor: Processor, fault: str) -> None:
    path = processor.folder / "tokenizer.json"
    told = json.loads(path.read_text())
    DAMAGED[fault](told)
    path.write_text(json.dumps(told))
    with pytest.raises(DatasetError) as caught:
        tokens_of(processor, ["a" * 30, "strange words"])
    assert "the tokenizer of" in caught.value.what
    assert all((caught.value.why, caught.value.mend))


def test_as_many_parts_as_a_file_may_have_are_taken(processor: Processor) -> None:
    path = processor.folder / "tokenizer.json"
    told = json.loads(path.read_text())
    parts = [{"type": "BertPreTokenizer"}] * 60  # with the sequence, the normalizer, the model and the template 64
    path.write_text(json.dumps(told | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}))
    assert tokens_of(processor, ["the cat"]) == [[2, 6, 7, 3]]


def test_a_word_as_long_as_a_file_may_say_is_looked_up(processor: Processor) -> None:
    path = processor.folder / "tokenizer.json"
    told = json.loads(path.read_text())
    told["model"]["max_input_chars_per_word"] = 1000
    path.write_text(json.dumps(told))
    assert tokens_of(processor, ["x" * 1000, "the cat"]) == [[2, 1, 3], [2, 6, 7, 3]]


def test_padding_to_any_length_is_left_aside_before_anything_is_made(processor: Processor) -> None:
    path = processor.folder / "tokenizer.json"
    told = json.loads(path.read_text())
    told["padding"] = {
        "strategy": {"Fixed": 2_000_000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[PAD]",
    }  # fmt: skip
    path.write_text(json.dumps(told))
    beside(processor.folder, add_bos_token=True, bos_token="[CLS]", add_eos_token=True, eos_token="[SEP]")
    assert tokens_of(processor, ["the cat"]) == [[2, 6, 7, 3]]


def test_tokens_that_are_dropped_at_random_are_not_and_that_is_told(processor: Processor) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[PAD]": 0, "a": 1, "b": 2, "ab": 3, "abab": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "ab")], dropout=0.5))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(processor.folder / "tokenizer.json"))
    beside(processor.folder, tokenizer_class="PreTrainedTokenizerFast")
    with pytest.warns(AssumedWarning, match=r"dropout 0\.5 in .* is left out"):
        found = tokens_of(processor, ["abab ab"] * 50)
    assert found == [[4, 3]] * 50


def test_texts_are_looked_at_a_few_letters_at_a_time(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut off is made, too, and would stay until the last of a thousand rows is through."""
    monkeypatch.setattr(tokenizer, "AT_ONCE", 12 * 100)  # which a normalizer of BERT's may make of 100 letters
    monkeypatch.setattr(tokenizer, "LONGEST_TEXT", 200)
    tokens = tokenizer.open_tokenizer(processor)
    parts = list(tokens._few(["the cat " * 5] * 5 + ["dog " * 40]))
    assert [len(part) for part in parts] == [2, 2, 1, 1]
    assert tokens_of(processor, TEXTS * 20) == tokens_of(processor, TEXTS) * 20
    with pytest.raises(DatasetError, match="a text of 201 letters"):
        tokens_of(processor, ["x" * 201])
