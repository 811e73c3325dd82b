"""What is almost a model: a class of torch in half precision, a factory with arguments, a folder that lacks a file. Each
error says the line that mends it, and what it says works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.console.wording import AssumedWarning
from compress.errors import ToolkitError
from compress.formats.checkpoint import load
from compress.jobs.source import load_source
from compress.model import call, sample_inputs
from compress.options import SourceOptions
from tests.hub_models import bert_folder, with_config

X = ("x:float32[batch,4]",)


def network(classes: int, hidden: int = 8) -> nn.Module:
    """A factory that needs an argument."""
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def thousand(num_classes: int = 10) -> nn.Module:
    """One that makes a head of its own size, as torchvision's do."""
    return network(num_classes)


def four() -> nn.Module:
    """What the error says to write."""
    return thousand(num_classes=4)


def refused(read: Callable[[], object]) -> ToolkitError:
    with pytest.raises(ToolkitError) as caught:
        read()
    return caught.value


def test_weights_in_half_precision_name_the_dtype_that_they_take(tmp_path: Path) -> None:
    path = tmp_path / "half.pt"
    torch.save(network(3).half(), path)
    said = refused(lambda: load(path, inputs=X)).mend
    assert "'x:float16[batch,4]'" in said
    assert "module.to(torch.float32)" in said
    assert load(path, inputs=["x:float16[batch,4]"]).signature.outputs[0].dtype == "float16"


def test_a_factory_with_arguments_is_told_to_be_one_without(tmp_path: Path) -> None:
    torch.save(network(3).state_dict(), tmp_path / "weights.pt")
    error = refused(lambda: load(tmp_path / "weights.pt", inputs=X, model=f"{__name__}:network"))
    assert error.why == "it needs 1 argument: classes"
    assert "def network(): return network(classes=…)" in error.mend


def test_a_head_of_another_size_is_told_to_be_made(tmp_path: Path) -> None:
    torch.save(network(4).state_dict(), tmp_path / "weights.pt")
    error = refused(lambda: load(tmp_path / "weights.pt", inputs=X, model=f"{__name__}:thousand"))
    assert "def network(): return thousand(num_classes=4)" in error.mend
    assert load(tmp_path / "weights.pt", inputs=X, model=f"{__name__}:four").signature.outputs[0].shape == ("batch", 4)
    torch.save(network(4, hidden=9).state_dict(), tmp_path / "weights.pt")
    error = refused(lambda: load(tmp_path / "weights.pt", inputs=X, model=f"{__name__}:thousand"))
    assert "num_classes" not in error.mend


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("hub") / "bert", shard="20KB")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "bert"))


def test_shards_whose_index_is_missing_are_counted_by_their_names(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    model = load(folder)
    arrays = sample_inputs(model.signature, 2)
    with torch.no_grad():
        given = call(model.module, model.signature.inputs, arrays)["logits"]
    assert given.shape == (2, 3)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refused(lambda: load(folder)).why


def test_weights_without_a_config_say_what_is_missing(folder: Path) -> None:
    (folder / "config.json").unlink()
    error = refused(lambda: load_source(folder, SourceOptions()))
    assert "no config.json" in error.why
    assert "--model" in error.mend


def test_an_adapter_is_told_to_be_merged(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    error = refused(lambda: load_source(folder, SourceOptions()))
    assert "adapter" in error.what
    assert "merge_and_unload" in error.mend


@pytest.mark.parametrize("beside", [True, False])
def test_an_adapter_beside_whole_weights_is_told_not_to_be_applied(
    beside: bool, folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """transformers applies it where peft is installed, so whoever uses it there is given another network."""
    if beside:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    load(folder)
    told = [str(each.message) for each in recwarn if "adapter_config.json" in str(each.message)]
    assert bool(told) == beside
    assert all("not applied" in each and "merge_and_unload" in each for each in told)


def test_a_configuration_that_names_no_class_says_which_key_it_lacks(folder: Path) -> None:
    with_config(folder, architectures=None)
    with pytest.warns(AssumedWarning) as said:
        load(folder)
    assert any('has no "architectures"' in str(each.message) for each in said)


@pytest.mark.parametrize("name", ["bert-base-uncased", "gpt2"])
def test_the_name_of_a_model_alone_says_how_to_get_its_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"hf download {name} --local-dir {name}" in refused(lambda: load(name)).mend
