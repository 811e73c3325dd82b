"""token_type_ids of a Hugging Face folder: passed where transformers' own tokenizer passes them, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.console.wording import AssumedWarning
from compress.data.reading import arrays_of
from compress.formats.checkpoint import load
from compress.formats.hub.config import offline
from compress.formats.hub.folder import open_hub_folder
from compress.formats.hub.type_ids import type_ids_of
from compress.jobs.source import load_source
from compress.model import call
from compress.options import SourceOptions
from compress.processor import Columns
from tests.hub_models import SIZES, bert_folder, sentence_folder, with_config

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


def network_of(folder: Path, kind: str, **sizes: Any) -> Path:
    """A network of another class, beside the tokenizer of BERT's folder; apart enough for a type to be seen."""
    bert_folder(folder, kind="BertModel")
    with offline() as transformers:
        torch.manual_seed(0)
        config = getattr(transformers, kind).config_class(**SIZES | {"initializer_range": 0.3} | sizes)
        getattr(transformers, kind)(config).save_pretrained(folder)
    return with_tokenizer_config(folder, model_input_names=[IDS, TYPES, MASK])


def of_three_types(folder: Path) -> Path:
    """The first token is of a third type, of a text alone as well, as Funnel's is."""
    network_of(folder, "BertModel", type_vocab_size=3)
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text())
    for name in ("single", "pair"):
        told["post_processor"][name][0]["SpecialToken"]["type_id"] = 2
    path.write_text(json.dumps(told))
    return folder


def as_transformers_has_it(folder: Path, kind: str, texts: list[Any]) -> tuple[Any, torch.Tensor]:
    """What its tokenizer makes of texts or pairs, and what its network gives of that."""
    pairs = isinstance(texts[0], tuple)
    first = [text[0] for text in texts] if pairs else texts
    second = [text[1] for text in texts] if pairs else None
    with offline() as transformers, torch.no_grad():
        made = transformers.PreTrainedTokenizerFast.from_pretrained(folder)(
            first, second, padding=True, return_tensors="pt"
        )
        return made, getattr(transformers, kind).from_pretrained(folder).eval()(**made)[0]


def given_of(folder: Path, made: Any, texts: list[Any], **options: Any) -> tuple[set[str], torch.Tensor]:
    """The inputs' names, and what the network gives of those tokens, as it is loaded here."""
    model = load_source(folder, SourceOptions(text_pair_column="b" if isinstance(texts[0], tuple) else None, **options))
    names = {spec.name for spec in model.signature.inputs}
    (given,) = call(model.module, model.signature.inputs, {name: made[name].numpy() for name in names}).values()
    return names, given


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "an encoder": ("BertModel", {}),
    "a masked language model": ("BertForMaskedLM", {}),
    "a classifier of tokens": ("BertForTokenClassification", {}),
    "another encoder": ("ElectraModel", {"embedding_size": 32}),
    "relative positions": ("DebertaV2Model", {"type_vocab_size": 2, "relative_attention": True}),
}


@pytest.mark.filterwarnings("ignore::compress.console.wording.AssumedWarning")
@pytest.mark.parametrize("case", ENCODERS)
def test_of_pairs_a_network_that_knows_types_gives_what_transformers_gives(case: str, tmp_path: Path) -> None:
    kind, sizes = ENCODERS[case]
    folder = network_of(tmp_path / "folder", kind, **sizes)
    made, wanted = as_transformers_has_it(folder, kind, PAIRS)
    names, given = given_of(folder, made, PAIRS)
    assert TYPES in names
    kept = made[MASK].bool()
    torch.testing.assert_close(given[kept], wanted[kept], atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::compress.console.wording.AssumedWarning")
@pytest.mark.parametrize("texts", [PAIRS, ["word1 word2", "word3"]], ids=["pairs", "single texts"])
def test_types_of_a_single_text_are_given_where_its_template_has_some(texts: list[Any], tmp_path: Path) -> None:
    folder = of_three_types(tmp_path / "folder")
    made, wanted = as_transformers_has_it(folder, "BertModel", texts)
    assert made[TYPES].max() == 2
    names, given = given_of(folder, made, texts)
    assert TYPES in names
    kept = made[MASK].bool()
    torch.testing.assert_close(given[kept], wanted[kept], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("modules", [True, False], ids=["of its modules", "of --pooling"])
def test_an_encoder_of_sentences_is_given_each_text_of_a_pair_by_itself(modules: bool, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "folder") if modules else bert_folder(tmp_path / "folder", kind="BertModel")
    with_tokenizer_config(folder, model_input_names=[IDS, TYPES, MASK])
    made, tokens = as_transformers_has_it(folder, "BertModel", [text for pair in PAIRS for text in pair])
    mask = made[MASK][:, :, None]
    wanted = (tokens * mask).sum(1) / mask.sum(1)
    names, given = given_of(folder, made, PAIRS, **({} if modules else {"pooling": "mean"}))
    assert names == {IDS, MASK}
    assert torch.nn.functional.cosine_similarity(given, wanted).min() > 1 - 1e-6


def test_single_texts_of_one_type_need_none(tmp_path: Path) -> None:
    model = load(sentence_folder(tmp_path / "folder"))
    assert {spec.name for spec in model.signature.inputs} == {IDS, MASK}


@pytest.mark.filterwarnings("ignore:.*says no pooling")
def test_pairs_for_a_network_that_knows_no_types_are_told_of(tmp_path: Path) -> None:
    folder = network_of(tmp_path / "folder", "RobertaModel", type_vocab_size=1)
    with pytest.warns(AssumedWarning, match="takes no token_type_ids"):
        load_source(folder, SourceOptions(text_pair_column="b"))
