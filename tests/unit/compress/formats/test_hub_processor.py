"""What a folder says about its inputs: which token fills up texts, and how large an image gets on its way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compress.data.images import Images, write_index
from compress.errors import CheckpointError, DatasetError
from compress.formats.checkpoint import load
from compress.formats.hub.config import offline
from compress.processor import Processor
from tests.hub_models import bert_folder, with_config


def test_the_token_that_fills_up_texts_goes_with_the_model(tmp_path: Path) -> None:
    found = load(with_config(bert_folder(tmp_path), pad_token_id=3)).processor
    assert found is not None
    assert found.pad_token_id == 3
    again = Processor.from_dict(json.loads(json.dumps(found.to_dict())), found.folder)
    assert (again, again.digest) == (found, found.digest)
    without = {key: value for key, value in found.to_dict().items() if key != "pad_token_id"}
    older = Processor.from_dict(without, found.folder)
    assert older.pad_token_id is None
    assert older.digest != found.digest
    with pytest.raises(ValueError, match="pad_token_id"):
        Processor.from_dict(without | {"pad_token_id": -1}, found.folder)


def _image_classifier(folder: Path, **settings: Any) -> Path:
    with offline() as transformers:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
        transformers.ViTForImageClassification(config).save_pretrained(folder)
    data = {"image_processor_type": "MobileNetV2ImageProcessor", "crop_size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(data | {"do_center_crop": True} | settings))
    return folder


VAST: dict[str, tuple[dict[str, Any], str]] = {
    "a side before the crop": ({"size": {"shortest_edge": 6000}}, "'shortest_edge' is 6000"),
    "a number that nothing here reads": ({"pad_size": {"height": 32, "width": 10**9}}, "'width' is 1000000000"),
    "a number in a list": ({"image_grid_pinpoints": [[32, 99999]]}, "'image_grid_pinpoints' is 99999"),
    "a share that is kept": ({"crop_pct": 0.001}, "'crop_pct' is 0.001"),
    "no number": ({"rescale_factor": float("nan")}, "'rescale_factor' is NaN"),
    "a number without end": ({"rescale_factor": float("inf")}, "'rescale_factor' is inf"),
}


@pytest.mark.parametrize("what", VAST)
def test_settings_that_would_make_vast_images_are_refused(tmp_path: Path, what: str) -> None:
    settings, why = VAST[what]
    with pytest.raises(CheckpointError) as caught:
        load(_image_classifier(tmp_path, **settings))
    assert why in caught.value.why


def test_an_image_whose_ratio_would_make_it_vast_is_refused_before_it_is_made(tmp_path: Path) -> None:
    from PIL import Image

    model = load(_image_classifier(tmp_path / "model", size={"shortest_edge": 1500}))
    assert model.processor is not None
    (tmp_path / "images").mkdir()
    Image.new("RGB", (60, 40)).save(tmp_path / "images" / "usual.png")
    Image.new("RGB", (600, 4)).save(tmp_path / "images" / "wide.png")
    (tmp_path / "index").mkdir()
    write_index(tmp_path / "images", model.processor, tmp_path / "index")
    images = Images(tmp_path / "index")
    assert images[0]["pixel_values"].shape == (3, 32, 32)
    with pytest.raises(DatasetError) as caught:
        images[1]
    assert "337,500,000" in caught.value.why
