"""token_type_ids of a Hugging Face folder: passed where transformers' own tokenizer passes them, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.console.wording import AssumedWarning
from compress.data.reading import arrays_of
from compress.formats.checkpoint import load
from compress.formats.hub.config import offline
from compress.formats.hub.folder import open_hub_folder
from compress.formats.hub.type_ids import type_ids_of
from compress.processor import Columns
from tests.hub_models import SIZES, bert_folder, with_config

PAIRS = [("word1 word2", "word3"), ("word4", "word5 word6 word7")]
IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"


def with_tokenizer_config(folder: Path, **changes: Any) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


NAMED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "a class of BERT's": ({"tokenizer_class": "BertTokenizerFast"}, {}, True),
    "the model type's class": ({}, {}, True),
    "the generic class": ({"tokenizer_class": "PreTrainedTokenizerFast"}, {}, False),
    "a class of a network without them": ({"tokenizer_class": "RobertaTokenizer"}, {}, False),
    "a class in config.json": ({}, {"tokenizer_class": "RobertaTokenizer"}, False),
    "a class that is not known": ({"tokenizer_class": "SomebodysTokenizer"}, {}, False),
    "inputs without them": ({"model_input_names": [IDS, MASK], "tokenizer_class": "BertTokenizer"}, {}, False),
    "inputs with them": ({"model_input_names": [IDS, MASK, TYPES], "tokenizer_class": "RobertaTokenizer"}, {}, True),
}  # fmt: skip


@pytest.mark.parametrize(("told", "config", "wanted"), NAMED.values(), ids=NAMED)
def test_a_tokenizer_passes_what_transformers_own_passes(
    tmp_path: Path, told: dict[str, Any], config: dict[str, Any], wanted: bool
) -> None:
    folder = with_config(with_tokenizer_config(bert_folder(tmp_path / "bert"), **told), **config)
    with offline() as transformers:
        own = transformers.AutoTokenizer.from_pretrained(folder)
        assert (TYPES in own(*PAIRS[0])) == wanted
        kept = transformers.BertConfig(**config)
        assert type_ids_of(transformers, open_hub_folder(folder), kept) == wanted


def test_a_name_that_is_no_tokenizers_runs_nothing_and_is_the_generic_class(tmp_path: Path) -> None:
    folder = with_tokenizer_config(bert_folder(tmp_path / "bert"), tokenizer_class="pipeline")
    with offline() as transformers:
        assert type_ids_of(transformers, open_hub_folder(folder), transformers.BertConfig()) is False


def test_a_release_of_transformers_with_other_tables_is_not_guessed(tmp_path: Path) -> None:
    class Other:
        models = None

    folder = bert_folder(tmp_path / "bert")
    with offline() as transformers:
        assert type_ids_of(Other, open_hub_folder(folder), transformers.BertConfig()) is None


def test_a_network_is_judged_with_the_types_that_it_is_served_with(tmp_path: Path) -> None:
    folder = with_tokenizer_config(bert_folder(tmp_path / "bert"), model_input_names=[IDS, MASK])
    texts = tmp_path / "pairs.jsonl"
    texts.write_text("".join(json.dumps({"a": first, "b": second}) + "\n" for first, second in PAIRS))
    processor = load(folder).processor
    assert processor is not None
    silent = dataclasses.replace(processor, columns=Columns("a", "b"))
    speaking = dataclasses.replace(silent, type_ids=True)
    given = [np.load(Path(arrays_of(str(texts), each)) / f"{TYPES}.npy").max() for each in (silent, speaking)]
    assert given == [0, 1]
    assert silent.digest != speaking.digest


@pytest.mark.parametrize("passed", [False, True])
def test_a_network_without_a_table_of_types_takes_them_only_where_they_are_passed(tmp_path: Path, passed: bool) -> None:
    """GPT-2 adds the embeddings of tokens 0 and 1 where it is given types, and nothing where it is not."""
    folder = bert_folder(tmp_path / "gpt", kind="BertModel")
    sizes = {name: SIZES[name] for name in ("vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size")}
    with offline() as transformers:
        config = transformers.GPT2Config(**sizes, n_positions=40, bos_token_id=1, eos_token_id=2)
        transformers.GPT2Model(config).save_pretrained(folder)
    with_tokenizer_config(folder, model_input_names=[IDS, MASK, *([TYPES] if passed else [])])
    with pytest.warns(AssumedWarning, match="no pooling"):
        model = load(folder)
    assert (TYPES in {spec.name for spec in model.signature.inputs}) == passed
