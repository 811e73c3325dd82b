"""What networks of Hugging Face folders are given: boxes of documents and whole detectors, and what is left out is told."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress.console.wording import AssumedWarning
from compress.data.dataset import Dataset
from compress.data.reading import arrays_of
from compress.errors import CheckpointError, DatasetError
from compress.formats.checkpoint import load
from compress.formats.hub.config import offline
from compress.model import TorchModel, call, sample_inputs
from compress.model.drawn import drawn_inputs, indices_of
from tests.hub_models import PROCESSOR, SIZES, bert_folder

LAYOUT = SIZES | {"initializer_range": 0.2, "hidden_size": 48, "max_2d_position_embeddings": 64}
V3 = LAYOUT | {"coordinate_size": 8, "shape_size": 8, "input_size": 32, "patch_size": 16}
UDOP = {"vocab_size": 60, "d_model": 48, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
DOCUMENTS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "LayoutLM": ("LayoutLMConfig", "LayoutLMForTokenClassification", LAYOUT, "int64"),
    "LayoutLMv3, without an image": (
        "LayoutLMv3Config", "LayoutLMv3ForTokenClassification", V3 | {"visual_embed": False}, "int64",
    ),
    "LiLT": ("LiltConfig", "LiltForTokenClassification", LAYOUT, "int64"),
    "BROS": ("BrosConfig", "BrosForTokenClassification", SIZES | {"hidden_size": 64, "initializer_range": 0.2}, "float32"),
    "UDOP's encoder": ("UdopConfig", "UdopEncoderModel", UDOP, "float32"),
}  # fmt: skip


def _written(folder: Path, config: str, kind: str, **sizes: Any) -> Path:
    with offline() as transformers:
        torch.manual_seed(0)
        getattr(transformers, kind)(getattr(transformers, config)(**sizes)).save_pretrained(folder)
    return folder


def _documents(folder: Path, of: str) -> TorchModel:
    config, kind, sizes, _ = DOCUMENTS[of]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the encoder alone is taken|.*left out|.*says no pooling")
        return load(_written(folder, config, kind, **sizes))


@pytest.mark.parametrize("of", DOCUMENTS)
def test_a_network_of_documents_takes_the_boxes_of_its_tokens(of: str, tmp_path: Path) -> None:
    loaded = _documents(tmp_path, of)
    dtype = DOCUMENTS[of][3]
    assert [str(spec) for spec in loaded.signature.inputs][-1] == f"bbox:{dtype}[batch,seq,4]"
    (output,) = loaded.signature.outputs
    ids = torch.randint(4, 60, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    boxes = torch.rand(3, 9, 4).sort(-1).values
    arrays = {"input_ids": ids, "attention_mask": mask, "bbox": boxes}
    if dtype == "int64":
        arrays["bbox"] = (boxes * 63).long()
    with offline() as transformers, torch.no_grad():
        original = getattr(transformers, DOCUMENTS[of][1]).from_pretrained(tmp_path).eval()
        given = call(loaded.module, loaded.signature.inputs, arrays)
        torch.testing.assert_close(given[output.name], original(**arrays)[output.name], rtol=1e-4, atol=1e-5)
        elsewhere = call(loaded.module, loaded.signature.inputs, arrays | {"bbox": torch.zeros_like(arrays["bbox"])})
    assert (elsewhere[output.name] - given[output.name]).abs().max() > 1e-3, "boxes matter"


def test_boxes_that_are_made_up_have_their_first_corner_first(tmp_path: Path) -> None:
    loaded = _documents(tmp_path, "LayoutLM")  # which looks up the difference of its corners
    bounds = indices_of(loaded.module, loaded.signature)
    assert bounds["bbox"] == LAYOUT["max_2d_position_embeddings"]
    sizes = {"batch": 3, "seq": 8}
    for arrays in (
        *(sample_inputs(loaded.signature, 3, seed) for seed in range(5)),
        *(drawn_inputs(loaded.signature, sizes, bounds, seed) for seed in range(5)),
    ):
        left, upper, right, lower = np.moveaxis(arrays["bbox"], -1, 0)
        assert (left <= right).all()
        assert (upper <= lower).all()
        call(loaded.module, loaded.signature.inputs, arrays)


def test_texts_that_say_nothing_of_boxes_are_refused_for_them(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "layoutlm")
    _written(folder, "LayoutLMConfig", "LayoutLMForSequenceClassification", **LAYOUT)
    loaded = load(folder)
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "word1", "label": 0}\n{"text": "word2 word3", "label": 1}\n')
    with pytest.raises(DatasetError, match="lacks the input 'bbox'") as refused:
        Dataset.open(arrays_of(str(texts), loaded.processor), loaded.signature)
    assert "the model takes more" in refused.value.why
    assert "arrays of all of its inputs" in refused.value.mend


LEFT_OUT: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "an image": ("LayoutLMv3Config", "LayoutLMv3ForTokenClassification", V3, "pixel_values"),
    "vectors of an image": (
        "VisualBertConfig", "VisualBertForQuestionAnswering", SIZES | {"visual_embedding_dim": 8, "num_labels": 3},
        "visual_embeds, visual_token_type_ids, image_text_alignment",
    ),
    "a character's shape and sound": (
        "RoCBertConfig", "RoCBertForSequenceClassification",
        SIZES | {"pronunciation_vocab_size": 20, "shape_vocab_size": 20}, "input_shape_ids, input_pronunciation_ids",
    ),
    "a language": ("XLMConfig", "XLMForSequenceClassification",
                   {"vocab_size": 60, "emb_dim": 32, "n_layers": 1, "n_heads": 2, "n_langs": 2}, "langs"),
    "a task": ("ErnieConfig", "ErnieForSequenceClassification", SIZES | {"use_task_id": True},
               r"task_type_ids \(for which zeros stand\)"),
}  # fmt: skip


@pytest.mark.parametrize("of", LEFT_OUT)
def test_an_input_that_is_left_out_is_told(of: str, tmp_path: Path) -> None:
    config, kind, sizes, names = LEFT_OUT[of]
    with pytest.warns(AssumedWarning, match=f"{kind} may be given besides is left out: {names}.*compress.save"):
        load(_written(tmp_path, config, kind, **sizes))


SILENT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no image by its configuration": (
        "LayoutLMv3Config", "LayoutLMv3ForTokenClassification", V3 | {"visual_embed": False},
    ),
    "one language": ("XLMConfig", "XLMForSequenceClassification",
                     {"vocab_size": 60, "emb_dim": 32, "n_layers": 1, "n_heads": 2}),
    "one task": ("ErnieConfig", "ErnieForSequenceClassification", SIZES),
    "places, labels, heads": ("BertConfig", "BertForSequenceClassification", SIZES),
    "what came before": ("GPT2Config", "GPT2LMHeadModel",
                         {"vocab_size": 60, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 40}),
    "masks of the training": ("BeitConfig", "BeitForImageClassification",
                              SIZES | {"image_size": 32, "patch_size": 16}),
}  # fmt: skip


@pytest.mark.parametrize("of", SILENT)
def test_of_inputs_that_change_nothing_nothing_is_told(of: str, tmp_path: Path) -> None:
    config, kind, sizes = SILENT[of]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load(_written(tmp_path, config, kind, **sizes))
    assert not [each for each in told if "may be given besides" in str(each.message)]


def test_where_a_network_fails_without_what_is_left_out_that_is_why(tmp_path: Path) -> None:
    sizes = SIZES | {"image_size": 32, "patch_size": 16, "num_labels": 3}
    with pytest.raises(CheckpointError, match="can't take the network") as refused:
        load(_written(tmp_path, "ViltConfig", "ViltForQuestionAnswering", **sizes))
    assert "takes pixel_values, pixel_mask" in refused.value.why
    assert "without them it fails" in refused.value.why


@pytest.mark.filterwarnings("ignore:.*none can be pruned")
@pytest.mark.parametrize("kind", ["Detr", "TableTransformer"])
def test_a_detector_with_a_decoder_of_objects_is_taken_whole(kind: str, tmp_path: Path) -> None:
    with offline() as transformers:
        backbone = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
        )
    sizes = {
        "use_timm_backbone": False, "backbone_config": backbone, "d_model": 32, "encoder_layers": 1,
        "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "num_queries": 5, "num_labels": 3,
    }  # fmt: skip
    folder = _written(tmp_path, f"{kind}Config", f"{kind}ForObjectDetection", **sizes)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    with pytest.warns(AssumedWarning, match=r"pixel_mask \(for which ones stand\)"):
        loaded = load(folder)
    assert [spec.name for spec in loaded.signature.outputs] == ["logits", "pred_boxes"]
    arrays = sample_inputs(loaded.signature, 3)
    with offline() as transformers, torch.no_grad():
        original = getattr(transformers, f"{kind}ForObjectDetection").from_pretrained(folder).eval()
        wanted = original(torch.as_tensor(arrays["pixel_values"]))
        given = call(loaded.module, loaded.signature.inputs, arrays)
    for name in ("logits", "pred_boxes"):
        torch.testing.assert_close(given[name], wanted[name], rtol=1e-4, atol=1e-5)
