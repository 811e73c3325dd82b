"""Folders of encoders that say no pooling: told early, and given one that is asked for."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError
from compress.formats.checkpoint import load
from compress.formats.hub.config import offline
from compress.formats.hub.pooling import POOLINGS
from compress.jobs.source import load_source
from compress.model import call
from compress.options import SourceOptions
from tests.hub_models import bert_folder, sentence_folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("hub") / "plain", kind="BertModel")


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_pooling_stands_behind_the_encoder_and_looks_at_no_padding(plain: Path, pooling: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AssumedWarning)
        model = load(plain, pooling=pooling)
    assert [str(spec) for spec in model.signature.outputs] == ["embeddings:float32[batch,32]"]
    assert model.processor is not None
    assert model.processor.task == "embeddings"
    ids, mask = torch.randint(4, 60, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[1, 3:] = 0
    with offline() as transformers, torch.no_grad():
        states = transformers.BertModel.from_pretrained(plain).eval()(ids, mask).last_hidden_state
        given = call(model.module, model.signature.inputs, {"input_ids": ids, "attention_mask": mask})["embeddings"]
    texts = (states[0], states[1, :3])
    wanted = {
        "mean": [rows.mean(0) for rows in texts], "cls": [rows[0] for rows in texts],
        "max": [rows.amax(0) for rows in texts],
    }  # fmt: skip
    torch.testing.assert_close(given, torch.stack(wanted[pooling]))


def test_the_head_of_a_language_model_is_left_out_for_it_and_told(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "masked", kind="BertForMaskedLM")
    with pytest.warns(AssumedWarning, match=r"left out, which a BertModel has no use for: cls\.predictions"):
        model = load_source(folder, SourceOptions(pooling="mean"))
    assert not [name for name in model.module.state_dict() if "pooler" in name], "which it lacks, and nobody asks"
    assert [str(spec) for spec in model.signature.outputs] == ["embeddings:float32[batch,32]"]


@pytest.mark.parametrize(("kind", "output"), [("BertModel", "last_hidden_state"), ("BertForMaskedLM", "logits")])
def test_an_encoder_without_a_pooling_is_told_of_as_it_is_loaded(tmp_path: Path, kind: str, output: str) -> None:
    folder = bert_folder(tmp_path / "plain", kind=kind)
    with pytest.warns(AssumedWarning, match=rf"it gives {output}:.*no embeddings of texts; --pooling mean, cls or max"):
        model = load(folder)
    assert [spec.name for spec in model.signature.outputs] == [output]


@pytest.mark.parametrize("pooled", [False, True])
def test_what_gives_one_answer_for_each_text_is_not_told_of(tmp_path: Path, pooled: bool) -> None:
    folder = sentence_folder(tmp_path / "a") if pooled else bert_folder(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error", AssumedWarning)
        load(folder)


def _images(folder: Path) -> Path:
    with offline() as transformers:
        config = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
        )
        transformers.ViTModel(config).save_pretrained(folder)
    return folder


def _file(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"weight": torch.ones(2)}, folder / "weights.pt")
    return folder / "weights.pt"


REFUSED = {
    "one that says its own": (sentence_folder, "mean", "its modules.json says"),
    "images": (_images, "mean", "takes no tokens of texts"),
    "no such pooling": (lambda folder: bert_folder(folder, kind="BertModel"), "median", "no such pooling"),
    "another file": (_file, "mean", "no Hugging Face folder"),
}


@pytest.mark.parametrize(("make", "pooling", "why"), REFUSED.values(), ids=REFUSED)
def test_a_pooling_that_has_no_place_is_refused(tmp_path: Path, make: object, pooling: str, why: str) -> None:
    assert callable(make)
    with pytest.raises(CheckpointError, match="pool") as caught:
        load(make(tmp_path / "folder"), pooling=pooling)
    assert why in caught.value.why
    assert caught.value.mend


def test_an_onnx_file_is_refused_one_too(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError):
        load_source(path, SourceOptions(pooling="cls"))
