"""Which artifacts are packed to take image files, and what their hooks make of these."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compress.artifact import Artifact
from compress.data.images import _processor
from compress.errors import HookError, RepositoryError
from serve.config.pbtxt import parse
from serve.hooks.load import load_hooks
from serve.pack.images import write_image_hooks
from serve.pack.write import Packed, pack
from tests.serve_models import hook_file, tiny_artifact
from tests.starting_models import CROPPED, own_images

LABELS = ("ant", "bee", "cat", "dog", "eel")
WHOLE: dict[str, Any] = {
    "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 8, "width": 8}, "resample": 2,
    "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.25, 0.0],
    "image_std": [0.5, 0.5, 1.0],
}  # fmt: skip
CENTRE = WHOLE | CROPPED | {"image_processor_type": "CLIPImageProcessor"}


def packed(artifact: Path, **options: Any) -> Packed:
    return pack(artifact, repository=artifact.parent / "models", name="pets", **options)


def test_an_artifact_that_came_with_its_image_processor_takes_files_and_gives_labels(tmp_path: Path) -> None:
    found = packed(own_images(tmp_path / "artifact", "3,8,8", WHOLE, LABELS), image=True)
    (taken,) = found.inputs
    assert (taken.name, taken.data_type) == ("image", "TYPE_STRING")
    assert [tensor.name for tensor in found.outputs] == ["label", "probability"]
    config = parse((tmp_path / "models/pets/config.pbtxt").read_text())
    assert config.parameters["task"].string_value == "image-classification"
    assert repr(list(LABELS)).replace("'", '"') in (tmp_path / "models/pets_postprocess/1/hooks.py").read_text()


def test_without_the_flag_it_takes_arrays_and_says_that_it_could(tmp_path: Path) -> None:
    found = packed(own_images(tmp_path / "artifact", "3,8,8", WHOLE, LABELS))
    assert [tensor.name for tensor in found.inputs] == ["x"]
    assert any("--image" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"image_mean": None}, "says nothing of image_mean"),
        ({"resample": None}, "says nothing of resample"),
        ({"image_std": [0.5]}, "does not say how values are scaled"),
        ({"rescale_factor": 1 / 127.5}, "does not say how values are scaled"),
        ({"do_rescale": False}, "says do_rescale False"),
        ({"do_resize": False}, "says do_resize False"),
        ({"resample": 9}, "says resample 9"),
        ({"do_center_crop": True}, "says do_center_crop True"),
        ({"size": {"height": 9, "width": 8}}, "the network takes"),
        ({"size": {"shortest_edge": 8}}, "the network takes"),
        ({"size": {"height": 8, "width": 8}, "crop_pct": 0.9}, "'crop_pct', which is not known"),
        ({"rescale_offset": True}, "'rescale_offset', which is not known"),
        ({"image_processor_type": "ConvNextImageProcessor"}, "its processor is 'ConvNextImageProcessor'"),
        ({"image_processor_type": "EfficientNetImageProcessor"}, "its processor is 'EfficientNetImageProcessor'"),
        ({"image_processor_type": None}, "its processor is"),
        (CENTRE | {"do_center_crop": None}, "says do_center_crop None"),
        (CENTRE | {"size": {"shortest_edge": 4}}, "the network takes"),
        (CENTRE | {"crop_size": 9}, "the network takes"),
        (CENTRE | {"size": {"shortest_edge": 16, "longest_edge": 20}}, "the network takes"),
        (CENTRE | {"size": {"shortest_edge": 16, "height": 8, "width": 8}}, "the network takes"),
        (CENTRE | {"crop_size": {"height": 8, "width": 8, "x": 1}}, "the network takes"),
        (CENTRE | {"crop_size": {"height": 8}}, "the network takes"),
        (CENTRE | {"default_to_square": True}, "'default_to_square', which is not known"),
    ],
)
def test_what_is_not_known_to_the_letter_is_refused_not_guessed(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(HookError) as caught:
        packed(own_images(tmp_path / "artifact", "3,8,8", WHOLE | change, LABELS), image=True)
    assert why in caught.value.why
    assert "serve hooks new" in caught.value.mend


def test_a_network_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HookError, match="no image processor"):
        packed(tiny_artifact(tmp_path / "artifact"), image=True)


def test_hooks_or_texts_beside_it_are_refused(tmp_path: Path) -> None:
    artifact = own_images(tmp_path / "artifact", "3,8,8", WHOLE, LABELS)
    with pytest.raises(RepositoryError, match="both would stand before the network"):
        packed(artifact, image=True, hooks=hook_file(tmp_path))
    with pytest.raises(RepositoryError, match="both would stand before the network"):
        packed(artifact, image=True, text=True)


@pytest.mark.parametrize("settings", [WHOLE, WHOLE | {"size": 8}, CENTRE], ids=["whole", "a number", "centre"])
@pytest.mark.parametrize("resample", [0, 1, 2, 3, 4, 5])
def test_images_become_what_transformers_makes_of_them(tmp_path: Path, settings: dict[str, Any], resample: int) -> None:
    artifact = own_images(tmp_path / "artifact", "3,8,8", settings | {"resample": resample}, LABELS)
    source = Artifact.load(artifact)
    assert source.processor is not None
    hooks = load_hooks(write_image_hooks(source, tmp_path), source.signature)
    process, draw = _processor(source.processor.folder), np.random.default_rng(0)
    for size in [(64, 48), (17, 40), (8, 8), (2, 13), (1, 90), *draw.integers(1, 70, (20, 2)).tolist()]:
        picture, file = Image.fromarray(draw.integers(0, 256, (*size, 3)).astype(np.uint8)), io.BytesIO()
        picture.save(file, "PNG")
        given = {"return_tensors": "np", "input_data_format": "channels_last"}
        theirs = process(np.asarray(picture), **given)["pixel_values"][0]
        np.testing.assert_allclose(
            hooks.module.preprocess(file.getvalue()), theirs, rtol=0, atol=1e-6, err_msg=f"{size}"
        )


def test_an_image_that_would_be_much_too_long_is_its_clients_fault(tmp_path: Path) -> None:
    source = Artifact.load(own_images(tmp_path / "artifact", "3,8,8", CENTRE, LABELS))
    hooks = load_hooks(write_image_hooks(source, tmp_path), source.signature)
    file = io.BytesIO()
    Image.new("RGB", (1, 400_000)).save(file, "PNG")
    with pytest.raises(ValueError, match="too long for its width"):
        hooks.module.preprocess(file.getvalue())
