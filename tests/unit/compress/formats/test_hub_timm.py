"""timm's folders: made by timm where it is installed, told how to get it where it isn't, and nothing beside is read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError, MissingExtraError
from compress.formats.checkpoint import load
from compress.formats.hub.folder import HubFolder
from compress.formats.hub.timm import KIND, refuse_code, refuse_timm_within
from compress.model import call
from compress.processor import IMAGE_SETTINGS

SETTINGS: dict[str, Any] = {
    "input_size": [3, 64, 64], "interpolation": "bicubic", "crop_pct": 0.875, "mean": [0.5, 0.4, 0.3],
    "std": [0.2, 0.3, 0.4],
}  # fmt: skip


def written(folder: Path, state: dict[str, torch.Tensor], name: str, **config: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architecture": name, **config}))
    return folder


@pytest.mark.parametrize(
    ("name", "fixed", "layer"), [("mobilenetv3_small_050", False, "conv_stem"), ("vit_tiny_patch16_224", True, "head")]
)
def test_a_folder_answers_as_timm_does_and_keeps_its_layers(name: str, fixed: bool, layer: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed: the extra `timm`")
    module = timm.create_model(name, num_classes=3, **({"img_size": 64} if fixed else {})).eval()
    config = {
        "num_classes": 3,
        "label_names": ["a", "b", "c"],
        "pretrained_cfg": SETTINGS | {"fixed_input_size": fixed},
    }
    folder = written(tmp_path / "net", module.state_dict(), name, **config)
    with pytest.warns(AssumedWarning, match="is timm's") as said:
        load(folder)
    text = str(said[0].message)
    (folder / IMAGE_SETTINGS).write_text(text[text.index("{") :])
    loaded = load(folder)
    assert str(loaded.signature.inputs[0]) == "pixel_values:float32[batch,3,64,64]"
    assert loaded.processor is not None
    assert loaded.processor.labels == ("a", "b", "c")
    assert f"timm_model.{layer}" in dict(loaded.module.named_modules())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            call(loaded.module, loaded.signature.inputs, {"pixel_values": x})["logits"], module(x), rtol=1e-4, atol=1e-5
        )


def test_weights_that_have_one_name_in_the_network_are_refused(tmp_path: Path) -> None:
    state = {"fc.weight": torch.zeros(3, 4), "timm_model.fc.weight": torch.ones(3, 4)}
    with pytest.raises(CheckpointError, match="can't read the weights") as caught:
        load(written(tmp_path / "net", state, "resnet18", num_classes=3))
    assert "'fc.weight' and 'timm_model.fc.weight'" in caught.value.why


@pytest.mark.parametrize("missing", ["timm", "torchvision"])
def test_where_timm_is_not_installed_its_extra_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "torchvision":
        pytest.importorskip("timm", reason="timm is not installed: the extra `timm`")
        for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
            monkeypatch.delitem(sys.modules, name)
    folder = written(tmp_path / "net", {"fc.weight": torch.zeros(3, 4)}, "resnet18", num_classes=3)
    with pytest.raises(MissingExtraError) as caught:
        load(folder)
    assert missing in caught.value.why
    assert ".[timm]" in caught.value.mend


@pytest.mark.parametrize(
    "config",
    [
        {"architecture": "hf-hub:owner/name"},
        {"architecture": "local-dir:/tmp"},
        {"architecture": "no_such_network"},
        {"architecture": 3},
        {"architecture": "resnet18", "model_args": {"checkpoint_path": "weights.pth"}},
        {"architecture": "resnet18", "model_args": {"pretrained": True}},
        {"architecture": "resnet18", "model_args": {"features_only": True}},
        {"architecture": "resnet18", "model_args": {"norm_layer": "os.system"}},
        {"architecture": "resnet18", "model_args": {"block_args": {"a": 1}}},
        {"architecture": "resnet18", "model_args": [1]},
    ],
)
def test_timm_is_asked_for_a_network_of_its_own_alone(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(is_model="resnet18".__eq__, __version__="1")
    monkeypatch.setitem(sys.modules, "timm", fake)
    folder = HubFolder(tmp_path, tmp_path, {"model_type": KIND, **config}, (), (tmp_path / "model.safetensors",), False)
    with pytest.raises(CheckpointError, match="load"):
        refuse_code(folder)


def test_plain_settings_of_a_network_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(is_model="resnet18".__eq__, __version__="1"))
    config = {"architecture": "resnet18", "model_args": {"img_size": [64, 64], "act_layer": "gelu", "depth": 3}}
    refuse_code(HubFolder(tmp_path, tmp_path, config, (), (tmp_path / "model.safetensors",), False))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "vit", "architectures": ["TimmWrapperModel"], "model_args": {"checkpoint_path": "x.pth"}},
        {"model_type": "timm_backbone", "backbone": "resnet18"},
        {"model_type": "detr", "architectures": ["DetrModel"], "use_timm_backbone": True},
        {"model_type": "detr", "backbone": "hf-hub:owner/name"},
        {"model_type": "detr", "backbone": "/other/folder"},
        {"model_type": "detr", "backbone_kwargs": {"checkpoint_path": "x.pth"}},
        {"model_type": "detr", "backbone_config": {"model_type": "timm_backbone", "backbone": "resnet18"}},
        {"model_type": "x", "parts": [{"inner": {"model_type": KIND, "architecture": "local-dir:/tmp"}}]},
        {"model_type": KIND, "architecture": "resnet18", "vision_config": {"model_type": KIND}},
    ],
)
def test_no_part_of_a_network_is_made_by_timm_or_read_from_elsewhere(config: dict[str, Any], tmp_path: Path) -> None:
    folder = HubFolder(tmp_path, tmp_path, config, (), (tmp_path / "model.safetensors",), False)
    with pytest.raises(CheckpointError, match="won't load"):
        refuse_timm_within(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": KIND, "architecture": "resnet18", "architectures": ["TimmWrapperModel"]},
        {"model_type": "vit", "architectures": ["ViTModel"], "backbone": None, "use_timm_backbone": False},
        {"model_type": "detr", "backbone_config": {"model_type": "resnet"}, "backbone": None},
    ],
)
def test_networks_that_transformers_makes_are_taken(config: dict[str, Any], tmp_path: Path) -> None:
    refuse_timm_within(HubFolder(tmp_path, tmp_path, config, (), (tmp_path / "model.safetensors",), False))
