"""Small Hugging Face folders with random weights: one for each architecture that `benchmarks/zoo.py` runs.

Weights are drawn by transformers' own initialization, seeded; a word-level tokenizer and an image processor lie beside.
"""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from compress.formats.hub.config import offline

__all__ = ["TIMM", "ZOO", "write_data", "write_folder"]

WORDS = [f"word{number}" for number in range(110)]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
SIDE = 64

_TEXT: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "max_position_embeddings": 80, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "image_size": SIDE,
    "patch_size": 8,
}  # fmt: skip
_DEBERTA: dict[str, Any] = {
    "relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
    "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip

TIMM = "timm"  # in place of a configuration's class: a folder of timm's, which transformers has no class for

# By name: the class of the configuration, its arguments, the class of the model, and `--part` where there are two.
ZOO: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "BERT": ("BertConfig", _TEXT, "BertForSequenceClassification", None),
    "RoBERTa": ("RobertaConfig", _TEXT, "RobertaForTokenClassification", None),
    "DistilBERT": (
        "DistilBertConfig",
        {"vocab_size": 120, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 256, "max_position_embeddings": 80},
        "DistilBertForSequenceClassification",
        None,
    ),
    "MPNet": ("MPNetConfig", _TEXT, "MPNetModel", None),
    "DeBERTa-v3": ("DebertaV2Config", _TEXT | _DEBERTA, "DebertaV2ForSequenceClassification", None),
    "ModernBERT": (
        "ModernBertConfig", _TEXT | {"cls_token_id": 1, "sep_token_id": 2}, "ModernBertForSequenceClassification", None,
    ),
    "Llama": ("LlamaConfig", _TEXT | {"num_key_value_heads": 2}, "LlamaForCausalLM", None),
    "ViT": ("ViTConfig", _VISION, "ViTForImageClassification", None),
    "DeiT": ("DeiTConfig", _VISION, "DeiTForImageClassification", None),
    "Swin": (
        "SwinConfig",
        {"image_size": SIDE, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "SwinForImageClassification",
        None,
    ),
    "ConvNeXt": (
        "ConvNextConfig",
        {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 2, 1], "image_size": SIDE},
        "ConvNextForImageClassification",
        None,
    ),
    "ResNet": (
        "ResNetConfig",
        {"embedding_size": 32, "hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1], "layer_type": "basic"},
        "ResNetForImageClassification",
        None,
    ),
    "EfficientNet": (
        "EfficientNetConfig",
        {"image_size": SIDE, "width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640},
        "EfficientNetForImageClassification",
        None,
    ),
    "MobileNetV2": (
        "MobileNetV2Config", {"image_size": SIDE, "depth_multiplier": 0.5}, "MobileNetV2ForImageClassification", None,
    ),
    "MobileNetV3": (TIMM, {"architecture": "mobilenetv3_small_050"}, "MobileNetV3", None),
    "CLIP, text": ("CLIPConfig", {}, "CLIPModel", "text"),
    "CLIP, images": ("CLIPConfig", {}, "CLIPModel", "image"),
    "Whisper's encoder": (
        "WhisperConfig",
        {
            "vocab_size": 120, "d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 64, "num_mel_bins": 16,
            "max_source_positions": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        "WhisperModel",
        None,
    ),
}  # fmt: skip


def write_folder(name: str, folder: Path, seed: int = 0) -> str | None:
    """Write a folder of the zoo as transformers' save_pretrained does, or as timm's own; gives its `--part`.

    Raises:
        ImportError: it is timm's, which is not installed.
    """
    import torch

    config_class, arguments, model_class, part = ZOO[name]
    if config_class == TIMM:
        _write_timm(arguments["architecture"], folder, seed)
        _write_processor(folder)
        return part
    with offline() as transformers:
        arguments = dict(arguments)
        if model_class == "CLIPModel":
            text = {key: value for key, value in _TEXT.items() if key != "bos_token_id"}
            arguments = {
                "text_config": text | {"projection_dim": 32},
                "vision_config": _VISION | {"projection_dim": 32},
            }
            arguments["projection_dim"] = 32
        if "For" in model_class and "Classification" in model_class:
            arguments["id2label"] = {0: "bad", 1: "good", 2: "neither"}
            arguments["label2id"] = {"bad": 0, "good": 1, "neither": 2}
        torch.manual_seed(seed)
        config = getattr(transformers, config_class)(**arguments)
        model = getattr(transformers, model_class)(config)
        _settle(model)
        model.save_pretrained(folder)
    _write_tokenizer(folder)
    _write_processor(folder)
    return part


def _write_timm(architecture: str, folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    timm: Any = importlib.import_module("timm")
    torch.manual_seed(seed)
    model = timm.create_model(architecture, num_classes=3)
    _settle(model)
    folder.mkdir()
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / "model.safetensors")
    config = {
        "architecture": architecture, "num_classes": 3, "label_names": ["bad", "good", "neither"],
        "pretrained_cfg": {"input_size": [3, SIDE, SIDE]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _settle(model: Any) -> None:
    """Draw a convolutional network's weights by their fan, and take its BatchNorms' statistics.

    As transformers draws them, MobileNetV2 answers with 1e-25 and EfficientNet with 1e-33.
    """
    import torch

    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    if norms:
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight)
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # an average of all that is seen
        with torch.no_grad():
            model.train()(torch.rand(64, 3, SIDE, SIDE) * 2 - 1)
        model.eval()


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    known = {word: at for at, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))  # noqa: S106  a word, no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "model_max_length": 64}))


def _write_processor(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "ViTImageProcessor", "do_resize": True, "do_rescale": True,
                "do_normalize": True, "size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5], "resample": 2, "rescale_factor": 1 / 255,
            }
        )
    )  # fmt: skip


def write_data(folder: Path, count: int, seed: int) -> dict[str, Path]:
    """Texts, images by class, and spectrograms for the zoo: the path of each, by the kind of network."""
    rng, draw = random.Random(seed), np.random.default_rng(seed)  # noqa: S311  words, not secrets
    folder.mkdir(parents=True)
    texts = folder / "texts.jsonl"
    with texts.open("w") as file:
        for _ in range(count):
            words = rng.choices(WORDS, k=rng.randint(3, 30))
            file.write(json.dumps({"text": " ".join(words), "label": rng.choice(["bad", "good", "neither"])}) + "\n")
    from PIL import Image

    for number in range(count):
        place = folder / "images" / ("bad", "good", "neither")[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(place / f"{number}.png")
    np.savez(folder / "sounds.npz", input_features=draw.standard_normal((count, 16, 100)).astype(np.float32))
    return {"text": texts, "image": folder / "images", "audio": folder / "sounds.npz"}
