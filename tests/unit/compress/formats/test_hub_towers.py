"""A network of two towers is read as transformers' own class of both reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.formats.checkpoint import load
from compress.formats.hub.config import offline
from compress.model import call, example_inputs

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {
    **SMALL,
    "vocab_size": 60,
    "max_position_embeddings": 40,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("part", ["text", "image"])
def test_a_tower_of_clip_gives_as_many_numbers_as_both_together_do_whatever_its_own_configuration_says(
    part: str, tmp_path: Path
) -> None:
    with offline() as transformers:
        torch.manual_seed(0)
        config = transformers.CLIPConfig(
            text_config=TEXT, vision_config={**SMALL, "image_size": 32, "patch_size": 8}, projection_dim=16
        )
        whole: Any = transformers.CLIPModel(config).eval()
        whole.save_pretrained(tmp_path)
        transformers.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ).save_pretrained(tmp_path)
    assert config.text_config.projection_dim == config.vision_config.projection_dim == 512
    model = load(tmp_path, part=part)
    assert model.signature.outputs[0].shape == ("batch", 16)
    given = example_inputs(model.signature.inputs, {"batch": 2, "seq": 7})
    tensors = {name: torch.as_tensor(values) for name, values in given.items()}
    with torch.no_grad():
        (found,) = call(model.module, model.signature.inputs, given).values()
        if part == "text":
            wanted = whole.text_projection(whole.text_model(**tensors).pooler_output)
        else:
            wanted = whole.visual_projection(whole.vision_model(**tensors).pooler_output)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
