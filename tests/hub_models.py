"""Small Hugging Face folders with random weights, as transformers and sentence-transformers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from compress.formats.hub.config import offline

__all__ = ["LABELS", "SIZES", "bert_folder", "with_config"]

LABELS = ("bad", "good", "neither")
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 40,
}  # fmt: skip


def bert_folder(folder: Path, *, kind: str = "BertForSequenceClassification", shard: str = "50GB") -> Path:
    """A BERT with a tokenizer of 56 words, `word0` to `word55`."""
    with offline() as transformers:
        torch.manual_seed(0)
        named = {"id2label": dict(enumerate(LABELS)), "label2id": {name: at for at, name in enumerate(LABELS)}}
        config = transformers.BertConfig(**SIZES, **(named if "Classification" in kind else {}))
        getattr(transformers, kind)(config).save_pretrained(folder, max_shard_size=shard)
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: at for at, word in enumerate((*SPECIAL, *(f"word{number}" for number in range(56))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "model_max_length": 32}))
    return folder


def with_config(folder: Path, **changes: Any) -> Path:
    """The folder, some keys of its config.json changed; None takes a key out."""
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return folder
